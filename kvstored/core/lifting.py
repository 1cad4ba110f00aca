"""Which copies of many plain blocks go up to a GPU as one run, and which go there from NVMe without a copy in DRAM. Changes nothing.

What NVMe has packed goes straight up: it crosses packed, and the GPU does the rest of its decoding. A run is only where everything is as simple as
can be: each block has its copy in DRAM, ready, of one piece in one extent, and besides it at most one that
is ready on NVMe, or lies on the GPU already. Everything else goes the way of single tasks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.columns import READY, SUSPECT, TARGET, UNVERIFIED
from kvstored.core.space import units_of
from kvstored.core.types import UNIT_BYTES, KeyBatch, Rows, TierId


@dataclass(frozen=True, slots=True)
class Liftable:
    """`sources`: copies in DRAM of the blocks at these indexes of the call; `coming`: copies that are on their way to the GPU already."""

    sources: Rows
    asked: NDArray[np.int64]
    coming: Rows


def find_liftable(books: Books, ns: int, rows: Rows) -> Liftable | None:
    """None where a block is not as simple as that. Blocks without a copy in DRAM stay where they are, as one by one."""
    table, blocks, pieces = books.copies, books.blocks, books.pieces
    chain = _chain(books, rows)
    if chain is None or not (blocks.ns[rows] == ns).all():
        return None
    on_gpu, source = _of_tier(books, chain, TierId.HBM), _of_tier(books, chain, TierId.DRAM)
    below = _of_tier(books, chain, TierId.NVME)
    is_there = on_gpu >= 0
    is_coming = is_there & (table.flags[on_gpu] & TARGET != 0)
    wanted = ~is_there & (source >= 0)
    at = source[wanted]
    is_left = ~is_there & (source < 0) & (below >= 0)
    if not len(at) or any(is_packed(books, copy) for copy in below[is_left].tolist()):
        return None
    piece = table.first_piece[at]
    fine = (table.state[at] == READY) & (table.flags[at] & (UNVERIFIED | SUSPECT | TARGET) == 0)
    fine &= (below[wanted] < 0) | (table.state[below[wanted]] == READY)
    fine &= blocks.valid[rows[wanted]] == books.layouts[ns].spec.block_tokens
    fine &= (piece >= 0) & (pieces.next[piece] < 0) & (pieces.units[piece] > 0)
    fine &= pieces.length[piece] == pieces.length[piece[0]]
    if not fine.all() or len(set(at.tolist())) < len(at):
        return None
    return Liftable(at, np.flatnonzero(wanted), on_gpu[is_coming])


def is_packed(books: Books, copy: int) -> bool:
    """Whether a ready copy on NVMe has a piece that is stored in less than its length. Tiny pieces are not hashed by a GPU."""
    if books.copies.state[copy] != READY:
        return False
    rows, pieces = list(books.pieces_of(copy)), books.pieces
    lengths = [int(pieces.length[row]) for row in rows]
    if min(lengths, default=0) < UNIT_BYTES:
        return False
    return any(
        sum(extent.units for extent in books.place(row)) < units_of(length)
        for row, length in zip(rows, lengths, strict=True)
    )


def packed_below(books: Books, block: int, part: int) -> int:
    """The copy on NVMe from which this part of a block goes straight up to a GPU; -1 where it goes over DRAM or is not there."""
    if books.copy_in(block, TierId.DRAM, part) >= 0:
        return -1
    copy = books.copy_in(block, TierId.NVME, part)
    return copy if copy >= 0 and is_packed(books, copy) else -1


def go_straight_up(books: Books, ns: int, keys: KeyBatch) -> NDArray[np.bool_]:
    """Which of these keys a GPU takes without a copy in DRAM."""
    rows = books.index.find(keys.fingerprints)
    found = np.zeros(len(rows), dtype=np.bool_)
    below = (1 << TierId.HBM) | (1 << TierId.DRAM)
    is_cold = (rows >= 0) & (books.blocks.ns[rows] == ns) & (books.blocks.tiers[rows] & below == 0)
    for i in np.flatnonzero(is_cold).tolist():
        parts = books.needed_parts(int(rows[i]))
        found[i] = bool(parts) and all(packed_below(books, int(rows[i]), p) >= 0 for p in parts)
    return found


def _chain(books: Books, rows: Rows) -> tuple[Rows, Rows, Rows] | None:
    """Up to three copies of each block, -1 where there are fewer; None where one has more."""
    following = books.copies.next
    first = books.blocks.first_copy[rows]
    second = np.where(first >= 0, following[first], np.int32(-1))
    third = np.where(second >= 0, following[second], np.int32(-1))
    has_more = (third >= 0) & (following[third] >= 0)
    return None if has_more.any() else (first, second, third)


def _of_tier(books: Books, chain: tuple[Rows, Rows, Rows], tier: TierId) -> Rows:
    found = np.full(len(chain[0]), -1, dtype=np.int32)
    for copies in chain:
        found = np.where((copies >= 0) & (books.copies.tier[copies] == int(tier)), copies, found)
    return found
