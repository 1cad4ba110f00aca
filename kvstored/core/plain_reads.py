"""Leases on many plain blocks at once: what an engine with one kind of KV reads all day, as columns.

Only where everything is as simple as can be: whatever the keys find lies ready in memory and needs no look before it is handed out,
no key comes twice, and the tier's share for leases suffices. Everything else goes the way of single keys, and both end in the same books.
"""

from collections.abc import Callable

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Acquire, Fingerprint, Reason
from kvstored.core.columnar import ReadMany
from kvstored.core.columns import READY, SUSPECT, UNVERIFIED
from kvstored.core.plain import PLAIN_MIN
from kvstored.core.types import Rows, TierId

READ_TIER = TierId.DRAM

Reasons = Callable[[int, Fingerprint], Reason]


def read_many(books: Books, call: Acquire, rows: Rows, reason: Reasons) -> ReadMany | None:
    """`rows`: the keys' block rows, -1 where there is none. Changes nothing: `begin_reading` does."""
    if len(rows) < PLAIN_MIN or not books.layouts[call.ns].is_plain or books.recovering:
        return None
    copies = _ready_copies(books, call, rows)
    if copies is None:
        return None
    hits = copies >= 0
    at = copies[hits]
    piece = np.full(len(rows), -1, dtype=np.int32)
    piece[hits] = books.copies.first_piece[at]
    pieces = books.pieces
    is_simple = (pieces.next[piece[hits]] < 0) & (pieces.units[piece[hits]] > 0)
    if not is_simple.all() or len(set(at.tolist())) < len(at) or not _has_share(books, at):
        return None
    everything = bool(hits.all())
    tokens = books.layouts[call.ns].spec.block_tokens
    return ReadMany(
        copies=copies,
        depths=np.where(hits, books.tree.depth[rows], 0).astype(np.int64),
        tokens=np.where(hits, books.blocks.valid[rows], tokens).astype(np.int64),
        generations=np.where(hits, books.blocks.generation[rows], np.uint64(0)),
        places=books.places(piece),
        lengths=np.where(hits, pieces.length[piece], np.uint32(0)).astype(np.uint64),
        checksums=np.where(hits, pieces.checksum[piece], np.uint64(0)),
        tier=READ_TIER,
        reasons={} if everything else _reasons(books, call, rows, copies, reason),
    )


def _ready_copies(books: Books, call: Acquire, rows: Rows) -> Rows | None:
    """The copy that each key reads, -1 for a block that has none; None where one is not simply there."""
    copies, blocks = books.copies, books.blocks
    there = (rows >= 0) & (blocks.ns[rows] == call.ns)
    first = np.where(there, blocks.first_copy[rows], np.int32(-1))
    chosen = np.where(copies.tier[first] == int(READ_TIER), first, copies.next[first])
    chosen = np.where(first >= 0, chosen, np.int32(-1))
    has = first >= 0
    good = (chosen >= 0) & (copies.tier[chosen] == int(READ_TIER)) & (copies.state[chosen] == READY)
    good &= copies.flags[chosen] & (UNVERIFIED | SUSPECT) == 0
    return chosen if bool((good | ~has).all()) else None


def _has_share(books: Books, copies: Rows) -> bool:
    """As `Leases` counts single ones: leases hold no more than their share of the tier."""
    book = books.space.books[READ_TIER]
    fresh = copies[books.copies.readers[copies] == 0]
    share = int(book.limits.capacity_units * book.limits.lease_share)
    return book.leased + int(books.copies.units[fresh].sum()) <= share


def _reasons(
    books: Books, call: Acquire, rows: Rows, copies: Rows, reason: Reasons
) -> dict[int, Reason]:
    found: dict[int, Reason] = {}
    for i in np.flatnonzero(copies < 0).tolist():
        low, high = call.keys.fingerprints[i].tolist()
        row = int(rows[i])
        is_own = row >= 0 and int(books.blocks.ns[row]) == call.ns
        found[i] = reason(row if is_own else -1, (low, high))
    return found


def begin_reading(books: Books, copies: Rows) -> None:
    """As `Books.read` for each; they are ready copies in memory, each once."""
    table = books.copies
    fresh = copies[table.readers[copies] == 0]
    table.readers[copies] += 1
    books.space.books[READ_TIER].leased += int(table.units[fresh].sum())
    books.mark_leased(fresh, leased=True)


def end_reading(books: Books, copies: Rows) -> None:
    """As `Books.unread` for each, each once."""
    table = books.copies
    table.readers[copies] -= 1
    idle = copies[table.readers[copies] == 0]
    books.space.books[READ_TIER].leased -= int(table.units[idle].sum())
    is_ready = table.state[idle] == READY
    for copy in idle[~is_ready].tolist():
        books.free_if_unused(copy)
    ready = idle[is_ready]
    books.mark_leased(ready, leased=False)
    for copy in ready[table.kids[ready] == 0].tolist():
        books.consider(copy)
