"""Reading the books for the shell's own upkeep: which counters moved, and which copy lies at a place. Changes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import Fingerprint
from kvstored.core.columns import READY, SUSPECT, UNVERIFIED
from kvstored.core.frame_classes import heat_of
from kvstored.core.readability import NOT_READABLE
from kvstored.core.types import Budget, Heat, KeyBatch, NamespaceId, Place, Rows, TierId


@dataclass(frozen=True, slots=True)
class Used:
    """Counters of one readable piece, as its record should have them."""

    tier: TierId
    fingerprint: Fingerprint
    group: int
    shard: int
    place: Place
    hits: int
    last_s: float
    heat: Heat


@dataclass(frozen=True, slots=True)
class UsedBatch:
    """`following`: block row to go on from, -1 after the last."""

    pieces: list[Used]
    following: int


def used_since(books: Books, since_s: float, first: int, blocks_max: int) -> UsedBatch:
    """Pieces of the blocks that were used at or after `since_s`, from block row `first` on. Blocks may come and go between calls."""
    blocks = books.blocks
    top = blocks.top
    is_used = (blocks.last_s[first:top] >= since_s) & (blocks.first_copy[first:top] >= 0)
    rows = np.flatnonzero(is_used) + first
    following = int(rows[blocks_max]) if len(rows) > blocks_max else -1
    pieces = [used for row in rows[:blocks_max].tolist() for used in _used(books, row)]
    return UsedBatch(pieces, following)


def blocks_in(books: Books, ns: NamespaceId) -> Rows:
    """Block rows of a namespace, deepest first, to clear them in slices: a million blocks at once would hold the loop for a minute."""
    rows = np.flatnonzero(books.blocks.ns[: books.blocks.top] == ns).astype(np.int32)
    return rows[np.argsort(-books.tree.depth[rows], kind="stable")]


def depth_of(books: Books, ns: NamespaceId, fingerprint: Fingerprint) -> int | None:
    """Of a block, where the books hold its path from a root that was stored; None where a part of the path may be missing."""
    block = books.index.find_one(fingerprint)
    if block < 0 or books.blocks.ns[block] != ns:
        return None
    root = block
    while (parent := int(books.tree.parent[root])) >= 0:
        root = parent
    return int(books.tree.depth[block]) if books.blocks.first_copy[root] >= 0 else None


def positions(
    books: Books, ns: NamespaceId, keys: KeyBatch
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Depth of each key's block in its path, and its tokens; a full block at depth 0 where it is not there."""
    rows = books.index.find(keys.fingerprints)
    is_there = (rows >= 0) & (books.blocks.ns[rows] == ns)
    tokens = np.where(is_there, books.blocks.valid[rows], books.layouts[ns].spec.block_tokens)
    return np.where(is_there, books.tree.depth[rows], 0).astype(np.int64), tokens.astype(np.int64)


def lacking(books: Books, ns: NamespaceId, keys: KeyBatch, tier: TierId) -> int:
    """Copies of required parts of the keys' readable blocks that `tier` has not and that are not on their way there."""
    rows = books.index.find(keys.fingerprints)
    rows = np.unique(rows[(rows >= 0) & (books.blocks.ns[rows] == ns)])
    readable = rows[books.blocks.fast[rows] != NOT_READABLE].tolist()
    return sum(
        books.copy_in(row, tier, part) < 0 for row in readable for part in books.needed_parts(row)
    )


def is_above_high(books: Books, tier: TierId) -> bool:
    """Whether a budget of the tier holds more than its high watermark: what the evictor is there to prevent."""
    book = books.space.books[tier]
    return any(
        book.used[budget] > int(books.space.limit(tier, budget) * book.limits.high)
        for budget in Budget
    )


def needs_no_look(books: Books, copy: int) -> bool:
    """Whether a copy may be read as it lies there, without a look at its bytes first."""
    flags = int(books.copies.flags[copy])
    return int(books.copies.state[copy]) == READY and not flags & (UNVERIFIED | SUSPECT)


def copy_at(
    books: Books, ns: NamespaceId, fingerprint: Fingerprint, tier: TierId, place: Place
) -> int | None:
    """The readable copy of which a piece lies at this very place."""
    block = books.index.find_one(fingerprint)
    if block < 0 or books.blocks.ns[block] != ns:
        return None
    for copy in books.copies_of(block):
        is_here = int(books.copies.tier[copy]) == tier and books.copies.state[copy] == READY
        if is_here and any(books.place(piece) == place for piece in books.pieces_of(copy)):
            return copy
    return None


def _used(books: Books, block: int) -> Iterator[Used]:
    fingerprint = books.fingerprint(block)
    hits, last_s = int(books.blocks.hits[block]), float(books.blocks.last_s[block])
    for copy in books.copies_of(block):
        if books.copies.state[copy] != READY:
            continue
        tier, heat = TierId(int(books.copies.tier[copy])), heat_of(books, copy)
        for piece in books.pieces_of(copy):
            group, shard = int(books.pieces.group[piece]), int(books.pieces.shard[piece])
            yield Used(tier, fingerprint, group, shard, books.place(piece), hits, last_s, heat)
