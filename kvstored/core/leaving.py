"""How the usual victims leave memory: whole tails of runs at once, their blocks with them or left on NVMe.

Whatever else a copy is (of several pieces or extents, on disk) goes the way of `Books.drop_copy`; both leave the same books and the same
effects in the same order.
"""

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import Fingerprint, Freed, PieceRow, Reason
from kvstored.core.columnar import FreedMany, named
from kvstored.core.columns import CLEAN, DOOMED, READY, SINK
from kvstored.core.history import Forgotten
from kvstored.core.policies.base import budget_of
from kvstored.core.readability import NOT_READABLE, READABLE
from kvstored.core.types import Budget, Fingerprints, NamespaceId, Part, Rows, TierId, as_rows

MANY = 3
"""Fewer leave faster one by one."""


def drop_victims(
    books: Books, victim: int, units: int, most: int, reason: Reason, now_s: float
) -> int:
    """Forget the policy's victim, and with it those that would follow it until so many units or copies have left. How many left."""
    run = _run_from(books, victim, units, most)
    if len(run):
        drop = drop_run if _is_only(books, victim) else drop_clean
        drop(books, run, reason, now_s)
        return len(run)
    if not drop_leaf(books, victim, reason, now_s):
        books.drop_copy(victim, reason, now_s)
    return 1


def victims_from(books: Books, victim: int, units: int, most: int) -> Rows:
    """The policy's victim, and those that leave with it in one step. Changes nothing."""
    run = _run_from(books, victim, units, most)
    return run if len(run) else as_rows([victim])


def _run_from(books: Books, victim: int, units: int, most: int) -> Rows:
    """Empty where that is one alone."""
    own = int(books.copies.units[victim])
    count = min(most, -(-units // own)) if own else 1
    if count >= MANY and int(books.copies.tier[victim]) <= TierId.DRAM:
        find = only_run if _is_only(books, victim) else clean_run
        run = find(books, victim, units, count)
        if len(run) >= MANY:
            return run
    return np.empty(0, dtype=np.int32)


def _is_only(books: Books, victim: int) -> bool:
    """Whether the block has no other copy."""
    is_first = int(books.blocks.first_copy[books.copies.block[victim]]) == victim
    return is_first and int(books.copies.next[victim]) < 0


def only_run(books: Books, victim: int, units: int, count: int) -> Rows:
    """Copies from the victim upwards that the policy would take next and `drop_run` can: each the only one of its block. Empty where
    that is none."""
    copies, blocks, tree = books.copies, books.blocks, books.tree
    block = int(copies.block[victim])
    if tree.children[block]:
        return np.empty(0, dtype=np.int32)
    run = tree.run_above(block, count)
    at = _followers(books, blocks.first_copy[run])
    fine = copies.next[at] < 0
    return at[: _simple(books, at, run[: len(at)], fine, units)]


def clean_run(books: Books, victim: int, units: int, count: int) -> Rows:
    """The same for `drop_clean`: each has just one copy more, on NVMe, so that its block stays."""
    copies, blocks = books.copies, books.blocks
    layout = books.layout_of(int(copies.block[victim]))
    if TierId.NVME not in books.space.books or not layout.is_plain:
        return np.empty(0, dtype=np.int32)
    run = books.tree.path_above(int(copies.block[victim]), count)
    first = blocks.first_copy[run]
    in_memory = copies.tier[first] == copies.tier[victim]
    at = np.where(in_memory & (first >= 0), first, copies.next[first])
    at = _followers(books, at)
    run, first = run[: len(at)], first[: len(at)]
    other = np.where(first == at, copies.next[at], first)
    fine = (other >= 0) & (copies.tier[other] == int(TierId.NVME)) & (copies.state[other] == READY)
    fine &= copies.part[other] == copies.part[at]
    fine &= copies.next[np.where(first == at, other, at)] < 0
    fine &= copies.flags[at] & (CLEAN | SINK) == CLEAN  # children stay, and with them a sink
    return at[: _simple(books, at, run, fine, units)]


def drop_path(books: Books, path: Rows, reason: Reason, now_s: float) -> int:
    """Forget these blocks, leaf first, as far as each is the only child of the next and has but one simple copy, in memory. How many
    went; none where so few could that they go faster one by one."""
    copies, tree = books.copies, books.tree
    if len(path) < MANY or tree.children[path[0]]:
        return 0
    goes_on = (tree.parent[path[:-1]] == path[1:]) & (tree.children[path[1:]] == 1)
    run = path if goes_on.all() else path[: 1 + int(np.argmin(goes_on))]
    at = books.blocks.first_copy[run]
    fine = (at >= 0) & (copies.next[at] < 0) & (copies.tier[at] <= int(TierId.DRAM))
    count = _simple(books, at, run, fine, 1 << 62)
    if count < MANY:
        return 0
    drop_run(books, at[:count], reason, now_s)
    return count


def _followers(books: Books, at: Rows) -> Rows:
    """As many of the copies, from the victim on, as the policy would take; it ends where a block has none."""
    there = at if (at >= 0).all() else at[: int(np.argmax(at < 0))]
    return there[: books.policy.follow(there)] if len(there) else there


def _simple(books: Books, at: Rows, run: Rows, fine: NDArray[np.bool_], units: int) -> int:
    """How many copies, from the victim on, are `fine`, ready, of one piece in one extent, and used by nobody."""
    copies, blocks, pieces = books.copies, books.blocks, books.pieces
    if len(at) < MANY:
        return 0
    fine &= (blocks.holds[run] == 0) & (blocks.ns[run] == blocks.ns[run[0]])
    if books.recent.loose:  # of windows each leaves by itself, when nothing else is left
        fine[1:] &= ~books.recent.among(run[1:])
    fine[1:] &= ~books.tags.ever(run[1:])  # and so does what others may have to leave before
    fine &= (copies.part[at] == copies.part[at[0]]) & (copies.part[at] != int(Part.CHECKPOINT))
    fine &= (copies.tier[at] == copies.tier[at[0]]) & (copies.state[at] == READY)
    fine &= (copies.readers[at] == 0) & (copies.fills[at] == 0)
    fine[0] &= copies.kids[at[0]] == 0
    fine[1:] &= copies.kids[at[1:]] == 1
    piece = copies.first_piece[at]
    fine &= (piece >= 0) & (pieces.next[piece] < 0) & (pieces.units[piece] > 0)
    fine &= (pieces.group[piece] == 0) & (pieces.shard[piece] == 0)
    fine[1:] &= np.cumsum(copies.units[at[:-1]], dtype=np.int64) < units
    return len(fine) if fine.all() else int(np.argmin(fine))


def drop_run(books: Books, run: Rows, reason: Reason, now_s: float) -> None:
    """Forget these copies of `only_run`, leaf first, with their blocks."""
    copies, blocks = books.copies, books.blocks
    rows = copies.block[run]
    top, leaf = int(rows[-1]), int(rows[0])
    tier, part = TierId(int(copies.tier[run[0]])), int(copies.part[run[0]])
    readable = blocks.fast[rows] != NOT_READABLE
    fingerprints = books.index.fingerprints[rows]
    books.history.add_many(named(fingerprints[readable]), Forgotten(reason, tier, now_s))
    _give_up(books, run, fingerprints, reason)
    parent = int(books.tree.parent[top])
    books.forget_partial(leaf, int(books.tree.parent[leaf]))
    books.policy.forget(rows)
    books.recent.forget(rows)
    books.tree.cut_run(rows)
    books.index.pop_many(rows)
    blocks.give_many(rows)
    if parent >= 0:
        _left_below(books, parent, tier, part)


def drop_clean(books: Books, run: Rows, reason: Reason, now_s: float) -> None:  # noqa: ARG001 - as drop_run
    """Forget these copies of `clean_run`, leaf first; their blocks are read from NVMe from now on."""
    copies, blocks = books.copies, books.blocks
    rows = copies.block[run]
    first = blocks.first_copy[rows]
    others = np.where(first == run, copies.next[run], first)
    tier, part = TierId(int(copies.tier[run[0]])), int(copies.part[run[0]])
    parent = int(books.tree.parent[rows[-1]])
    _give_up(books, run, books.index.fingerprints[rows], reason)
    copies.next[others] = -1
    blocks.first_copy[rows] = others
    blocks.fast[rows] = TierId.NVME
    blocks.tiers[rows] = 1 << TierId.NVME | READABLE
    if parent >= 0:
        _left_below(books, parent, tier, part)


def _give_up(books: Books, run: Rows, fingerprints: Fingerprints, reason: Reason) -> None:
    """The copies' rows, pieces and space."""
    copies, pieces = books.copies, books.pieces
    at, tier = copies.first_piece[run], TierId(int(copies.tier[run[0]]))
    ns = NamespaceId(int(books.blocks.ns[copies.block[run[0]]]))
    places = books.places(at)
    flags, units = copies.flags[run], copies.units[run].astype(np.int64)
    book = books.space.books[tier]
    book.dirty -= int(np.count_nonzero(flags & CLEAN == 0))
    book.sinks -= int(units[flags & SINK != 0].sum())
    book.used[Budget.GLOBAL] -= int(units.sum())
    book.copies -= len(run)
    pieces.give_many(at)
    copies.give_many(run)
    books.space.frames.lossy.difference_update(run.tolist())
    books.space.give_memory(tier, places)
    books.effects.append(FreedMany(tier, ns, fingerprints, places, reason))


def free_doomed(books: Books, copies: Rows) -> Rows:
    """`Books.free_if_unused` for copies that nobody reads any more, at once where many lie in memory in one extent each; answers the others."""
    table, pieces = books.copies, books.pieces
    first = table.first_piece[copies]
    fine = (table.state[copies] == DOOMED) & (table.fills[copies] == 0) & (first >= 0)
    fine &= (pieces.next[first] < 0) & (pieces.units[first] > 0)
    fine &= (table.tier[copies] == int(TierId.DRAM)) & (table.part[copies] != int(Part.CHECKPOINT))
    if np.count_nonzero(fine) < MANY:
        return copies
    told: dict[tuple[NamespaceId, Reason], list[tuple[int, Fingerprint]]] = {}
    for copy in copies[fine].tolist():
        gone = books.doomed.pop(copy)
        told.setdefault((gone.ns, gone.reason), []).append((copy, gone.fingerprint))
    book = books.space.books[TierId.DRAM]
    for (ns, reason), mine in told.items():
        rows = as_rows([copy for copy, _ in mine])
        at = table.first_piece[rows]
        places = books.places(at)
        book.used[Budget.GLOBAL] -= int(table.units[rows].sum())
        book.copies -= len(rows)
        pieces.give_many(at)
        table.give_many(rows)
        books.space.give_memory(TierId.DRAM, places)
        names = np.array([name for _, name in mine], dtype=np.uint64)
        books.effects.append(FreedMany(TierId.DRAM, ns, names, places, reason))
    others: Rows = copies[~fine]
    return others


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
    books.space.frames.forget(copy)
    token = books.space.give(tier, (place,))
    books.effects.append(Freed(tier, ns, fingerprint, (row,), reason, token, units))
    books.consider_loosened()
    parent = int(tree.parent[block])
    above = books.copy_in(parent, tier, part) if parent >= 0 else -1
    if above >= 0:
        copies.kids[above] -= 1
    books.drop_idle(block)
    if above >= 0:
        books.consider(above)
    return True
