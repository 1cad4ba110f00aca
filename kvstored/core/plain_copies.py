"""Copies of many plain blocks from one tier to another at once: what promotion and write-back mostly are, as columns.

Only where everything is as simple as can be: full blocks with a single copy (on the way to a GPU see lifting.py), of one piece in one extent, all
of one namespace. Everything else goes the way of single tasks, and both end in the same books.
"""

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.bulk import count_kids
from kvstored.core.calls import TouchEvent
from kvstored.core.census import heats_of
from kvstored.core.columnar import Places, VisibleMany
from kvstored.core.columns import CLEAN, FILLING, READY, TARGET
from kvstored.core.copying import CopyRun
from kvstored.core.plain_reads import begin_reading, end_reading
from kvstored.core.types import Budget, NamespaceId, Rows, TierId


def begin_run(
    books: Books,
    sources: Rows,
    target: TierId,
    places: Places,
    asked: NDArray[np.int64],
    first: int,
) -> CopyRun:
    """FILLING copies with a piece each at these places; their sources are read from now on."""
    table, blocks, pieces = books.copies, books.blocks, books.pieces
    owners, old = table.block[sources], table.first_piece[sources]
    targets = _opened(books, sources, target, places)
    source = TierId(int(table.tier[sources[0]]))
    begin_reading(books, sources, source)
    layout = books.layout_of(int(owners[0]))
    parents = books.tree.parent[owners]
    names = books.index.fingerprints[owners]
    above = np.where((parents >= 0)[:, None], books.index.fingerprints[parents], np.uint64(0))
    return CopyRun(
        first=first,
        ns=layout.id,
        part=layout.spec.groups[0].part,
        source=source,
        target=target,
        source_copies=sources,
        target_copies=targets,
        fingerprints=names,
        parents=above,
        depths=books.tree.depth[owners].astype(np.int64),
        hits=blocks.hits[owners],
        heats=heats_of(books, owners),
        generations=blocks.generation[owners],
        checksums=pieces.checksum[old],
        sources=books.places(old),
        targets=places,
        asked=asked,
        length=int(pieces.length[old[0]]),
        valid_tokens=layout.spec.block_tokens,
    )


def _opened(books: Books, sources: Rows, target: TierId, places: Places) -> Rows:
    table, blocks, pieces = books.copies, books.blocks, books.pieces
    owners, old = table.block[sources], table.first_piece[sources]
    rows, at = table.take_many(len(sources)), pieces.take_many(len(sources))
    table.block[rows] = owners
    table.tier[rows] = target
    table.part[rows] = table.part[sources]
    table.state[rows] = FILLING
    table.flags[rows] = TARGET
    table.missing[rows] = 1
    table.fills[rows] = 1
    table.next[rows] = blocks.first_copy[owners]
    table.first_piece[rows] = at
    table.units[rows] = places.units
    blocks.first_copy[owners] = rows
    pieces.copy[at] = rows
    pieces.group[at] = 0
    pieces.shard[at] = 0
    pieces.state[at] = FILLING
    pieces.length[at] = pieces.length[old]
    pieces.checksum[at] = pieces.checksum[old]
    pieces.segment[at], pieces.start[at], pieces.units[at] = places
    book = books.space.books[target]
    book.copies += len(rows)
    book.used[Budget.GLOBAL] += int(places.units.sum())
    count_kids(books, target, owners, rows)
    return rows


# ---- the end


def are_untouched(books: Books, run: CopyRun) -> bool:
    """Whether the run's blocks have just the two copies that it is about, as it left them, so that `finish_run` may take them."""
    table, rows, sources = books.copies, run.target_copies, run.source_copies
    owners = table.block[sources]
    if books.retired:
        return False
    fine = (owners >= 0) & (table.block[rows] == owners)
    fine &= (table.state[rows] == FILLING) & (table.missing[rows] == 1) & (table.fills[rows] == 1)
    fine &= table.state[sources] == READY
    if run.target is not TierId.HBM:  # above DRAM nothing depends on what else a block has
        fine &= (table.next[sources] < 0) & (books.blocks.first_copy[owners] == rows)
        fine &= table.next[rows] == sources
    return bool(fine.all())


def finish_run(books: Books, run: CopyRun, kept: Places, now_s: float) -> None:
    """The bytes are in the target, at `kept`: its copies become readable in order, and their sources are let go."""
    table, pieces, blocks = books.copies, books.pieces, books.blocks
    rows, sources = run.target_copies, run.source_copies
    at, owners, target = table.first_piece[rows], table.block[rows], run.target
    _trim(books, run, kept)
    table.flags[rows] &= ~TARGET & 0xFF
    table.fills[rows] = 0
    table.missing[rows] = 0
    table.state[rows] = READY
    pieces.state[at] = READY
    book = books.space.books[target]
    book.dirty += len(rows)
    blocks.last_s[owners] = np.maximum(blocks.last_s[owners], now_s)
    for i in np.flatnonzero(books.are_sinks(owners)).tolist():
        books.count_sink(int(rows[i]), int(owners[i]), target)
    books.policy.touch(rows, TouchEvent.STORED, now_s)
    faster, tier = (rows, target) if target < run.source else (sources, run.source)
    books.space.books[tier].dirty -= int(np.count_nonzero(table.flags[faster] & CLEAN == 0))
    table.flags[faster] |= CLEAN
    blocks.fast[owners] = tier
    blocks.tiers[owners] |= 1 << target
    is_load = target < run.source
    ns, depths = NamespaceId(run.ns), books.tree.depth[owners]
    lines = None if target is TierId.DRAM else run.sources
    books.effects.append(
        VisibleMany(ns, run.fingerprints, target, depths, kept, lines, is_load=is_load)
    )
    books.mark_leased(rows[table.readers[rows] > 0], target, leased=True)
    books.consider_many(rows[(table.kids[rows] == 0) & (table.readers[rows] == 0)])
    end_reading(books, sources, run.source)


def _trim(books: Books, run: CopyRun, kept: Places) -> None:
    """A disk may have stored less than was reserved."""
    for i in np.flatnonzero(kept.units != run.targets.units).tolist():
        piece = int(books.copies.first_piece[run.target_copies[i]])
        books.trim_piece(piece, kept.place(i))
