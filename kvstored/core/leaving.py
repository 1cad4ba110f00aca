"""How the usual victims leave: whole tails of runs at once, each block of them with its only copy, in memory.

Whatever else a copy is (one of several, of several pieces or extents, on disk) goes the way of `Books.drop_copy`; both leave the same
books and the same effects in the same order.
"""

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Freed, PieceRow, Reason
from kvstored.core.columnar import FreedMany, named
from kvstored.core.columns import CLEAN, READY, SINK
from kvstored.core.history import Forgotten
from kvstored.core.policies.base import budget_of
from kvstored.core.readability import NOT_READABLE
from kvstored.core.types import Budget, NamespaceId, Part, Rows, TierId

MANY = 3
"""Fewer leave faster one by one."""


def drop_victims(
    books: Books, victim: int, units: int, most: int, reason: Reason, now_s: float
) -> int:
    """Forget the policy's victim, and with it those that would follow it until so many units or copies have left. How many left."""
    run = tail_run(books, victim, units, most)
    if len(run) >= MANY:
        drop_run(books, run, reason, now_s)
        return len(run)
    if not drop_leaf(books, victim, reason, now_s):
        books.drop_copy(victim, reason, now_s)
    return 1


def tail_run(books: Books, victim: int, units: int, most: int) -> Rows:
    """Copies from the victim upwards that `drop_run` can take and the policy would; empty where not even the victim is such."""
    copies, blocks, pieces = books.copies, books.blocks, books.pieces
    own = int(copies.units[victim])
    count = min(most, -(-units // own)) if own else 1
    block, part = int(copies.block[victim]), int(copies.part[victim])
    if count < MANY or int(copies.tier[victim]) > TierId.DRAM or part == int(Part.CHECKPOINT):
        return np.empty(0, dtype=np.int32)
    run = books.tree.run_above(block, count) if not books.tree.children[block] else ()
    if len(run) < MANY:
        return np.empty(0, dtype=np.int32)
    at = blocks.first_copy[run]
    count = books.policy.follow(at if (at >= 0).all() else at[: int(np.argmax(at < 0))])
    if count < MANY:
        return at[:0]
    run, at = run[:count], at[:count]
    fine = (copies.next[at] < 0) & (blocks.holds[run] == 0)
    fine &= (blocks.ns[run] == blocks.ns[block]) & (copies.part[at] == part)
    fine &= (copies.tier[at] == copies.tier[victim]) & (copies.state[at] == READY)
    fine &= (copies.readers[at] == 0) & (copies.fills[at] == 0)
    fine[1:] &= copies.kids[at[1:]] == 1
    piece = copies.first_piece[at]
    fine &= (piece >= 0) & (pieces.next[piece] < 0) & (pieces.units[piece] > 0)
    fine &= (pieces.group[piece] == 0) & (pieces.shard[piece] == 0)
    fine[1:] &= np.cumsum(copies.units[at[:-1]], dtype=np.int64) < units
    return at if fine.all() else at[: int(np.argmin(fine))]


def drop_run(books: Books, run: Rows, reason: Reason, now_s: float) -> None:
    """Forget these copies of `tail_run`, leaf first, with their blocks."""
    copies, blocks, pieces = books.copies, books.blocks, books.pieces
    rows = copies.block[run]
    top, leaf = int(rows[-1]), int(rows[0])
    tier, part = TierId(int(copies.tier[run[0]])), int(copies.part[run[0]])
    at = copies.first_piece[run]
    places = books.places(at)
    fingerprints = books.index.fingerprints[rows]
    flags, units = copies.flags[run], copies.units[run].astype(np.int64)
    book = books.space.books[tier]
    book.dirty -= int(np.count_nonzero(flags & CLEAN == 0))
    book.sinks -= int(units[flags & SINK != 0].sum())
    book.used[Budget.GLOBAL] -= int(units.sum())
    book.copies -= len(run)
    readable = blocks.fast[rows] != NOT_READABLE
    books.history.add_many(named(fingerprints[readable]), Forgotten(reason, tier, now_s))
    ns = NamespaceId(int(blocks.ns[leaf]))
    parent = int(books.tree.parent[top])
    books.forget_partial(leaf, int(books.tree.parent[leaf]))
    books.tree.cut_run(rows)
    books.index.pop_many(rows)
    for table, gone in ((pieces, at), (copies, run), (blocks, rows)):
        table.give_many(gone)
    books.space.give_memory(tier, places)
    books.effects.append(FreedMany(tier, ns, fingerprints, places, reason))
    if parent >= 0:
        _left_below(books, parent, tier, part)


def _left_below(books: Books, parent: int, tier: TierId, part: int) -> None:
    """A parent has a copy less below it."""
    above = books.copy_in(parent, tier, part)
    if above >= 0:
        books.copies.kids[above] -= 1
        books.consider(above)
    if not books.tree.children[parent]:
        for copy in books.copies_of(parent):
            books.consider(copy)
        books.drop_idle(parent)


def drop_leaf(books: Books, copy: int, reason: Reason, now_s: float) -> bool:
    """`Books.drop_copy` for the usual victim: the only copy of a block that nothing hangs on, of one piece, which goes with its block.
    False, with nothing done, for any other."""
    copies, blocks, tree = books.copies, books.blocks, books.tree
    block, piece = int(copies.block[copy]), int(copies.first_piece[copy])
    is_only = blocks.first_copy[block] == copy and copies.next[copy] < 0
    if not is_only or blocks.holds[block] or tree.children[block] or books.pieces.next[piece] >= 0:
        return False
    tier, part = TierId(int(copies.tier[copy])), int(copies.part[copy])
    book, units, flags = (
        books.space.books[tier],
        int(copies.units[copy]),
        int(copies.flags[copy]),
    )
    fingerprint, ns = books.fingerprint(block), NamespaceId(int(blocks.ns[block]))
    place, pieces = books.place(piece), books.pieces
    row = PieceRow(int(pieces.group[piece]), int(pieces.shard[piece]), place)
    book.dirty -= not flags & CLEAN
    book.sinks -= units if flags & SINK else 0
    book.used[budget_of(part)] -= units
    book.copies -= 1
    if blocks.fast[block] != NOT_READABLE:
        books.history.add(fingerprint, Forgotten(reason, tier, now_s))
    books.long_places.pop(piece, None)
    pieces.give(piece)
    copies.give(copy)
    blocks.first_copy[block] = -1
    token = books.space.give(tier, (place,))
    books.effects.append(Freed(tier, ns, fingerprint, (row,), reason, token, units))
    parent = int(tree.parent[block])
    above = books.copy_in(parent, tier, part) if parent >= 0 else -1
    if above >= 0:
        copies.kids[above] -= 1
    books.drop_idle(block)
    if above >= 0:
        books.consider(above)
    return True
