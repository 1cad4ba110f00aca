"""Puts of many plain blocks at once: columns instead of a row at a time.

Plain: the namespace has one group with one piece a block, the blocks are full, none of them is known, each is the child of the one before.
That is what an engine with one kind of KV puts all day. Everything else goes the way of single blocks, and both end in the same books.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import Fingerprint, Reserve
from kvstored.core.columnar import GrantedMany, Places, VisibleMany, no_places
from kvstored.core.columns import FILLING, READY, SUSPECT, WAITING
from kvstored.core.eviction import Evictor
from kvstored.core.placing import WRITE_TIER
from kvstored.core.readability import READABLE
from kvstored.core.rights import FillRun
from kvstored.core.space import units_of
from kvstored.core.types import Budget, Fingerprints, Heat, Layout, NamespaceId, Rows, TierId

PLAIN_MIN = 4
"""Fewer blocks are not worth the arrays."""


@dataclass(frozen=True, slots=True)
class Laid:
    """Fresh blocks of a reservation, with their FILLING copies and pieces, as rows; one of each a key."""

    blocks: Rows
    pieces: Rows
    places: Places
    fingerprints: Fingerprints
    generations: NDArray[np.uint64]
    length: int


@dataclass(frozen=True, slots=True)
class Paths:
    """New plain blocks of some paths, one path behind the other, and where their bytes lie. Each block is the child of the one before, the first of a
    path of what `parents` tells, None where it is a root; `lengths`: blocks of each."""

    fingerprints: Fingerprints
    places: Places
    generations: NDArray[np.uint64]
    lengths: list[int]
    parents: list[Fingerprint | None]

    def __len__(self) -> int:
        return len(self.fingerprints)


def plain_from(books: Books, call: Reserve) -> int:
    """The first key of the plain tail of a call, or its length where there is none that is worth it."""
    n = len(call.keys)
    if n < PLAIN_MIN or call.last_valid_tokens or not books.layouts[call.ns].is_plain:
        return n
    if WRITE_TIER in books.recovering:
        return n
    fingerprints, parents = call.keys.fingerprints, call.parents
    fine = (books.index.find(fingerprints) < 0) & (call.sizes[:, 0] == call.sizes[-1, 0])
    follows = np.zeros(n, dtype=np.bool_)
    follows[1:] = (parents.fingerprints[1:] == fingerprints[:-1]).all(axis=1) & parents.known[1:]
    last_other = np.flatnonzero(~fine)
    first = max(
        int(np.flatnonzero(~follows)[-1]), int(last_other[-1]) + 1 if len(last_other) else 0
    )
    if n - first < PLAIN_MIN or not call.sizes[-1, 0]:
        return n
    # low halves: that two of them are equal is no reason to look closer; a path below one of its own blocks is none
    low = fingerprints[first:, 0].tolist()
    above = parents.fingerprints[first, 0].tolist() if parents.known[first] else None
    is_distinct = len({*low, above}) == n - first + 1
    return first if is_distinct else n


def paths_from(books: Books, call: Reserve) -> list[int]:
    """Where the paths of a call begin of which all blocks are plain, new and distinct, none of them below one that comes later; else nothing."""
    if call.last_valid_tokens or not books.layouts[call.ns].is_plain:
        return []
    if WRITE_TIER in books.recovering or (call.sizes != call.sizes[0]).any():
        return []
    fingerprints, parents = call.keys.fingerprints, call.parents
    if (books.index.find(fingerprints) >= 0).any():
        return []
    # low halves, as above
    where = {low: i for i, low in enumerate(fingerprints[:, 0].tolist())}
    goes_on = (parents.fingerprints[1:] == fingerprints[:-1]).all(axis=1) & parents.known[1:]
    begins = [0, *(np.flatnonzero(~goes_on) + 1).tolist()]
    above = parents.fingerprints[begins, 0].tolist()
    is_below = parents.known[begins].tolist()
    late = any(
        k and where.get(low, -1) >= i for i, low, k in zip(begins, above, is_below, strict=True)
    )
    return [] if late or len(where) < len(fingerprints) else begins


def lay(books: Books, evictor: Evictor, call: Reserve, first: int, now_s: float) -> Laid | None:
    """Rows and places for the keys from `first` on, or for as many of them as there is room. None, with nothing changed but
    evictions, where their places are no single runs: then they go one by one."""
    length = int(call.sizes[first, 0])
    units = units_of(length)
    above = _parent_row(books, call, first)
    if above >= 0:
        books.blocks.holds[above] += 1
    count = evictor.plain_room(WRITE_TIER, units, len(call.keys) - first, now_s)
    places: Places | None = no_places()
    if count:
        places = books.space.take_equal(WRITE_TIER, Budget.GLOBAL, units, count)
    laid = None if places is None else _laid(books, call, first, above, places, length)
    if above >= 0:
        books.release_hold(above)
    return laid


def lay_paths(books: Books, ns: NamespaceId, put: Sequence[Paths], length: int) -> Laid:
    """Rows for the blocks of puts, in their order: a later path may begin below an earlier one's block."""
    layout = books.layouts[ns]
    fingerprints = np.concatenate([each.fingerprints for each in put])
    generations = np.concatenate([each.generations for each in put])
    places = Places(*map(np.concatenate, zip(*(each.places for each in put), strict=True)))
    lengths = [count for each in put for count in each.lengths]
    parents = [parent for each in put for parent in each.parents]
    blocks = _blocks(books, layout, fingerprints, generations)
    pieces = _copies(books, layout, blocks, places, length, lengths)
    begin = 0
    are_roots = [
        parent is None and count == 1 for parent, count in zip(parents, lengths, strict=True)
    ]
    for are_alone, together in groupby(
        zip(are_roots, parents, lengths, strict=True), itemgetter(0)
    ):
        if are_alone:
            end = begin + sum(1 for _ in together)
            books.tree.add_many(blocks[begin:end])
            begin = end
            continue
        for _, parent, count in together:
            _put_path(books, layout, blocks[begin : begin + count], parent)
            begin += count
    return Laid(blocks, pieces, places, fingerprints, generations, length)


def granted_run(books: Books, run: FillRun, laid: Laid, first_key: int) -> GrantedMany:
    """What is told of a run of fills."""
    heats = np.where(books.are_sinks(run.blocks), int(Heat.SINK), int(Heat.COLD))
    parents = np.zeros((len(run), 2), dtype=np.uint64)
    if len(run):
        parents[1:] = laid.fingerprints[:-1]
        parents[0] = books.parent_fingerprint(int(run.blocks[0]))
    return GrantedMany(
        first_fill=run.first,
        first_key=first_key,
        fingerprints=laid.fingerprints,
        parents=parents,
        depths=books.tree.depth[run.blocks].astype(np.int64),
        heats=heats.astype(np.uint8),
        generations=laid.generations,
        places=laid.places,
        valid_tokens=books.layouts[run.ns].spec.block_tokens,
        length=laid.length,
    )


def _parent_row(books: Books, call: Reserve, first: int) -> int:
    if not call.parents.known[first]:
        return -1
    tokens = books.layouts[call.ns].spec.block_tokens
    return books.ensure_block(call.ns, parent_of(call, first), tokens)


def parent_of(call: Reserve, i: int = 0) -> Fingerprint:
    low, high = call.parents.fingerprints[i].tolist()
    return low, high


def _laid(books: Books, call: Reserve, first: int, above: int, places: Places, length: int) -> Laid:
    count = places.size
    fingerprints = call.keys.fingerprints[first : first + count]
    layout = books.layouts[call.ns]
    if not count:
        nothing = np.empty(0, dtype=np.int32)
        none = np.empty(0, dtype=np.uint64)
        return Laid(nothing, nothing, places, fingerprints, none, length)
    generations = books.next_generations(count)
    blocks = _blocks(books, layout, fingerprints, generations)
    pieces = _copies(books, layout, blocks, places, length, (count,))
    is_child = above >= 0 and can_follow(books, layout, above)
    _put_below(books, layout, blocks, above if is_child else -1)
    return Laid(blocks, pieces, places, fingerprints, generations, length)


def _put_path(books: Books, layout: Layout, blocks: Rows, parent: Fingerprint | None) -> None:
    """One path, below what it is told to be below where that may have it."""
    above = -1
    if parent is not None:
        above = books.ensure_block(layout.id, parent, layout.spec.block_tokens)
    is_child = above >= 0 and can_follow(books, layout, above)
    _put_below(books, layout, blocks, above if is_child else -1)
    if above >= 0 and not is_child:
        books.drop_idle(above)


def _put_below(books: Books, layout: Layout, blocks: Rows, above: int) -> None:
    """Blocks and their copies become one run below a block, or at the root."""
    books.tree.add_run(blocks, above)
    if above >= 0:
        parent = books.copy_in(above, WRITE_TIER, layout.spec.groups[0].part)
        if parent >= 0:
            books.copies.kids[parent] += 1


def can_follow(books: Books, layout: Layout, above: int) -> bool:
    """As `Tables.link` has it: a parent is a full block of the same namespace."""
    is_full = int(books.blocks.valid[above]) == layout.spec.block_tokens
    return is_full and int(books.blocks.ns[above]) == layout.id


def _blocks(
    books: Books,
    layout: Layout,
    fingerprints: Fingerprints,
    generations: NDArray[np.uint64],
) -> Rows:
    table, count = books.blocks, len(fingerprints)
    blocks = table.take_many(count)
    at = blocks.astype(np.intp)  # else each column converts them, for a microsecond
    table.ns[at] = layout.id
    table.valid[at] = layout.spec.block_tokens
    table.generation[at] = generations
    table.holds[at] = 1
    books.tree.ensure(table.capacity)
    books.index.put_many(blocks, fingerprints)
    return blocks


def _copies(
    books: Books,
    layout: Layout,
    blocks: Rows,
    places: Places,
    length: int,
    lengths: Sequence[int],
) -> Rows:
    """FILLING copies with one FILLING piece each; answers the pieces. `lengths`: of the paths, whose last blocks have no copy below."""
    copies, pieces, count = books.copies, books.pieces, len(blocks)
    part = layout.spec.groups[0].part
    taken = pieces.take_many(count)
    rows, at = copies.take_many(count).astype(np.intp), taken.astype(np.intp)
    copies.block[rows] = blocks
    copies.tier[rows] = WRITE_TIER
    copies.part[rows] = part
    copies.state[rows] = FILLING
    copies.missing[rows] = 1
    copies.fills[rows] = 1
    copies.first_piece[rows] = at
    copies.kids[rows] = 1
    copies.kids[rows[np.cumsum(lengths) - 1]] = 0
    copies.units[rows] = units_of(length)
    if books.space.suspects:
        copies.flags[rows[books.space.are_suspect(places)]] |= SUSPECT
    books.blocks.first_copy[blocks] = rows
    pieces.copy[at] = rows
    pieces.state[at] = FILLING
    pieces.length[at] = length
    pieces.segment[at], pieces.start[at], pieces.units[at] = places
    book = books.space.books[WRITE_TIER]
    book.copies += count
    book.used[Budget.GLOBAL] += count * units_of(length)
    return taken


# ---- commit


def ready_at_once(books: Books, call: Reserve, begins: Sequence[int]) -> bool:
    """Whether blocks that nobody knows yet, of paths that begin there, become readable as `make_ready` does it: they are no first victims, and retire
    no partial block."""
    if call.ns in books.retired or not books.partials:
        return call.ns not in books.retired
    below = [i for i in begins if call.parents.known[i]]
    return not any(books.index.find_one(parent_of(call, i)) in books.partials for i in below)


def ready_together(books: Books, run: FillRun) -> bool:
    """Whether the run's pieces still are whole copies of blocks that have no other copy, so that `make_ready` may take them."""
    copies, table = books.copies, books.pieces
    at = table.copy[run.pieces]
    above = books.tree.parent[run.blocks].tolist() if books.partials else ()
    if run.ns in books.retired or not books.partials.keys().isdisjoint(above):
        return False
    # a copy that was forgotten meanwhile has no block
    whole = (copies.block[at] == run.blocks) & (books.blocks.first_copy[run.blocks] == at)
    whole &= (copies.state[at] == FILLING) & (copies.missing[at] == 1) & (copies.readers[at] == 0)
    whole &= (copies.next[at] < 0) & (table.next[run.pieces] < 0) & (copies.fills[at] == 1)
    return bool(whole.all())


def make_ready(
    books: Books,
    ns: NamespaceId,
    laid: Laid | FillRun,
    checksums: NDArray[np.uint64],
    lengths: Sequence[int],
    now_s: float,
) -> None:
    """The copies become readable, in their order; each fill's hold ends. `lengths`: of the paths that they are of."""
    copies, table, blocks = books.copies, books.pieces, books.blocks
    pieces, owners = laid.pieces.astype(np.intp), laid.blocks.astype(np.intp)
    rows = table.copy[pieces]
    at = rows.astype(np.intp)
    table.state[pieces] = READY
    table.checksum[pieces] = checksums
    copies.missing[at] = 0
    copies.fills[at] = 0
    copies.state[at] = READY
    book = books.space.books[WRITE_TIER]
    book.dirty += len(at)
    blocks.last_s[owners] = np.maximum(blocks.last_s[owners], now_s)
    for i in np.flatnonzero(books.are_sinks(laid.blocks)).tolist():
        books.count_sink(int(at[i]), int(owners[i]), WRITE_TIER)
    books.policy.stored(rows, lengths, now_s)
    books.asked.stored(laid.blocks)
    blocks.fast[owners] = WRITE_TIER
    blocks.tiers[owners] = 1 << WRITE_TIER | READABLE
    depths = books.tree.depth[owners]
    books.effects.append(VisibleMany(ns, laid.fingerprints, WRITE_TIER, depths, laid.places))
    if TierId.NVME in books.space.books:
        fresh = at[copies.flags[at] & WAITING == 0]
        copies.flags[fresh] |= WAITING
        books.waiting.extend(fresh.tolist())
    _return(books, laid.blocks)
    blocks.holds[owners] -= 1
    books.consider_many(rows[copies.kids[at] == 0])


def _return(books: Books, blocks: Rows) -> None:
    """Blocks that have children which did not come with this commit may make them reachable again."""
    tree = books.tree
    children = tree.children.take(blocks)
    if not children.any():
        return
    along = np.zeros(len(blocks), dtype=np.bool_)
    along[:-1] = (tree.parent[blocks[1:]] == blocks[:-1]) & (children[:-1] == 1)
    for block in blocks[~along & (children > 0)].tolist():
        books.block_returned(block)
