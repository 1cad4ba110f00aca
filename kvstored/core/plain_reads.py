"""Leases on many plain blocks at once: what an engine with one kind of KV reads all day, as columns.

Only where everything is as simple as can be: whatever the keys find lies in memory, is on its way there or can be brought there, and needs
no look before it is handed out; no key comes twice, and the tier's share for leases suffices. Everything else goes the way of single keys,
and both end in the same books.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import Acquire, Fingerprint, Reason
from kvstored.core.columnar import ReadMany
from kvstored.core.columns import READY, SUSPECT, TARGET, UNVERIFIED
from kvstored.core.leaving import free_doomed
from kvstored.core.plain import PLAIN_MIN
from kvstored.core.readability import NOT_READABLE
from kvstored.core.space import units_of
from kvstored.core.types import Rows, TierId

READ_TIER = TierId.DRAM

Mask = NDArray[np.bool_]
Reasons = Callable[[int, Fingerprint], Reason]


@dataclass(frozen=True, slots=True)
class Found:
    """What the keys of a call find, a row each: the copy in memory (ready, or `is_coming`) or, where `is_cold`, the one to bring up;
    -1 for a miss."""

    copies: Rows
    is_coming: Mask
    is_cold: Mask

    @property
    def cold(self) -> Rows:
        return self.copies[self.is_cold]

    @property
    def coming(self) -> Rows:
        return self.copies[self.is_coming]

    @property
    def in_memory(self) -> Rows:
        """Those that are ready or coming."""
        return self.copies[(self.copies >= 0) & ~self.is_cold]


def find_many(books: Books, call: Acquire, rows: Rows) -> Found | None:
    """`rows`: the keys' block rows, -1 where there is none. None where a key is not as simple as that. Changes nothing."""
    if len(rows) < PLAIN_MIN or not books.layouts[call.ns].is_plain or books.recovering:
        return None
    found = copies_of_many(books, call.ns, rows)
    if found is None:
        return None
    at = found.copies[found.copies >= 0]
    piece, pieces = books.copies.first_piece[at], books.pieces
    is_simple = (pieces.next[piece] < 0) & (pieces.units[piece] > 0)
    if not is_simple.all() or len(set(at.tolist())) < len(at):
        return None
    if found.is_cold.any() and not (call.load and can_load(books, call.ns, found.cold)):
        return None
    return found if _has_share(books, found) else None


def read_many(
    books: Books, call: Acquire, rows: Rows, found: Found, loading: list[int], reason: Reasons
) -> ReadMany:
    """What was found; `loading`: for what is cold the copies in memory that are on their way, for as many as found room. Changes nothing:
    `begin_reading` does."""
    copies = found.copies.copy()
    cold = np.flatnonzero(found.is_cold)
    copies[cold[: len(loading)]] = loading
    copies[cold[len(loading) :]] = -1
    hits = copies >= 0
    piece = np.full(len(rows), -1, dtype=np.int32)
    piece[hits] = books.copies.first_piece[copies[hits]]
    pieces = books.pieces
    tokens = books.layouts[call.ns].spec.block_tokens
    return ReadMany(
        copies=copies,
        depths=np.where(hits, books.tree.depth[rows], 0).astype(np.int64),
        tokens=np.where(hits, books.blocks.valid[rows], tokens).astype(np.int64),
        generations=np.where(hits, books.blocks.generation[rows], np.uint64(0)),
        places=books.places(piece),
        lengths=np.where(hits, pieces.length[piece], np.uint32(0)).astype(np.uint64),
        checksums=np.where(hits, pieces.checksum[piece], np.uint64(0)),
        tiers=np.where(
            found.is_cold | found.is_coming, books.blocks.fast[rows], np.uint8(READ_TIER)
        ),
        reasons={} if hits.all() else _reasons(books, call, rows, found, hits, reason),
    )


def copies_of_many(books: Books, ns: int, rows: Rows) -> Found | None:
    """The copy that each key reads; None where one is neither simply there nor simply to be had. A copy on its way up is a miss once what
    it is made from was lost: that has perhaps gone bad, and what comes of it is not known yet."""
    copies, blocks = books.copies, books.blocks
    there = (rows >= 0) & (blocks.ns[rows] == ns) & (blocks.fast[rows] != NOT_READABLE)
    first = np.where(there, blocks.first_copy[rows], np.int32(-1))
    has = first >= 0
    is_first = copies.tier[first] == int(READ_TIER)
    chosen = np.where(is_first, first, copies.next[first])
    chosen = np.where(has, chosen, np.int32(-1))
    in_memory = (chosen >= 0) & (copies.tier[chosen] == int(READ_TIER))
    is_ready = in_memory & (copies.state[chosen] == READY)
    is_ready &= copies.flags[chosen] & (UNVERIFIED | SUSPECT) == 0
    is_coming = in_memory & (copies.flags[chosen] & (TARGET | SUSPECT) == TARGET)
    is_cold = has & (chosen < 0) & (copies.tier[first] == int(TierId.NVME))
    is_cold &= copies.state[first] == READY
    if not bool((is_ready | is_coming | is_cold | ~has).all()):
        return None
    return Found(np.where(is_cold, first, chosen), is_coming, is_cold)


def can_load(books: Books, ns: int, cold: Rows) -> bool:
    """Whether these copies on NVMe may be brought up as a run."""
    lengths = books.pieces.length[books.copies.first_piece[cold]]
    is_equal = bool((lengths == lengths[0]).all())
    return is_equal and not books.space.suspects and bool(are_movable(books, cold, ns).all())


def are_movable(books: Books, copies: Rows, ns: int) -> Mask:
    """Which of these copies of a plain namespace `begin_run` may take, as long as they are of one length."""
    table, blocks, pieces = books.copies, books.blocks, books.pieces
    owners, piece = table.block[copies], table.first_piece[copies]
    fine: Mask = (table.state[copies] == READY) & (blocks.ns[owners] == ns)
    fine &= (blocks.first_copy[owners] == copies) & (table.next[copies] < 0)
    fine &= blocks.valid[owners] == books.layouts[ns].spec.block_tokens
    fine &= (piece >= 0) & (pieces.next[piece] < 0) & (pieces.units[piece] > 0)
    return fine


def _has_share(books: Books, found: Found) -> bool:
    """As `Leases` counts single ones: leases hold no more than their share of the tier."""
    book, table = books.space.books[READ_TIER], books.copies
    fresh = found.in_memory
    fresh = fresh[table.readers[fresh] == 0]
    more = int(table.units[fresh].sum())
    if len(cold := found.cold):  # on disk it may lie in less
        more += len(cold) * units_of(int(books.pieces.length[table.first_piece[cold[0]]]))
    return book.leased + more <= int(book.limits.capacity_units * book.limits.lease_share)


def _reasons(
    books: Books, call: Acquire, rows: Rows, found: Found, hits: Mask, reason: Reasons
) -> dict[int, Reason]:
    reasons: dict[int, Reason] = {}
    for i in np.flatnonzero(~hits).tolist():
        low, high = call.keys.fingerprints[i].tolist()
        row = int(rows[i])
        is_own = row >= 0 and int(books.blocks.ns[row]) == call.ns
        is_without_room = bool(found.is_cold[i])
        reasons[i] = (
            Reason.NO_SPACE if is_without_room else reason(row if is_own else -1, (low, high))
        )
    return reasons


def begin_reading(books: Books, copies: Rows, tier: TierId) -> None:
    """As `Books.read` for each; they are copies in one tier, each once."""
    table = books.copies
    fresh = copies[table.readers[copies] == 0]
    table.readers[copies] += 1
    books.space.books[tier].leased += int(table.units[fresh].sum())
    books.mark_leased(fresh[table.state[fresh] == READY], tier, leased=True)


def end_reading(books: Books, copies: Rows, tier: TierId) -> None:
    """As `Books.unread` for each, each once."""
    table = books.copies
    table.readers[copies] -= 1
    idle = copies[table.readers[copies] == 0]
    books.space.books[tier].leased -= int(table.units[idle].sum())
    is_ready = table.state[idle] == READY
    for copy in free_doomed(books, idle[~is_ready]).tolist():
        books.free_if_unused(copy)
    ready = idle[is_ready]
    books.mark_leased(ready, tier, leased=False)
    for copy in ready[table.kids[ready] == 0].tolist():
        books.consider(copy)
