"""Recomputes every derived figure of the books and asserts that it is as kept: for tests, and for `check()` after each step of them."""

from collections import Counter

import numpy as np

from kvstored.core.asides import Asides
from kvstored.core.books import Books
from kvstored.core.carriage import Carriage
from kvstored.core.claims import Claims
from kvstored.core.columns import CLEAN, DOOMED, FILLING, FREE, QUEUED, READY, SINK
from kvstored.core.fills import Fills
from kvstored.core.leases import Leases
from kvstored.core.policies.base import budget_of
from kvstored.core.readability import refresh
from kvstored.core.space import units_in
from kvstored.core.types import Part, TierId


def check(
    books: Books,
    fills: Fills,
    asides: Asides,
    leases: Leases,
    claims: Claims,
    carriage: Carriage,
) -> None:
    asides.check()
    books.tree.check()
    books.index.check()
    _check_blocks(books)
    _check_copies(books, fills, carriage)
    _check_space(books)
    books.space.frames.check()
    _check_holds(books, fills, leases, claims, carriage)


def _check_blocks(books: Books) -> None:
    blocks = books.blocks
    rows = np.flatnonzero(blocks.ns[: blocks.top] >= 0).tolist()
    assert len(rows) == blocks.live == len(books.index)
    for block in rows:
        assert books.index.find_one(books.fingerprint(block)) == block
        is_used = blocks.first_copy[block] >= 0 or books.tree.children[block] or blocks.holds[block]
        assert is_used, f"idle block kept: block={block}"
        kept = (int(blocks.fast[block]), int(blocks.tiers[block]), int(blocks.have[block]))
        refresh(books, block)
        now = (int(blocks.fast[block]), int(blocks.tiers[block]), int(blocks.have[block]))
        assert kept == now, f"stale readability: block={block} kept={kept} now={now}"


def _check_copies(books: Books, fills: Fills, carriage: Carriage) -> None:
    copies = books.copies
    open_fills: Counter[int] = Counter()
    for fill in fills.open:
        open_fills.update({int(books.pieces.copy[row]) for row in fill.pieces})
    open_fills.update(task.target_copy for task in carriage.tasks.values())
    for run in carriage.runs.values():
        open_fills.update(run.target_copies.tolist())
    live = [copy for copy in range(copies.top) if copies.state[copy] != FREE]
    assert len(live) == copies.live
    for copy in live:
        assert copies.fills[copy] == open_fills[copy], f"fills of copy={copy}"
        _check_pieces(books, copy)
        if copies.state[copy] == DOOMED:
            assert copies.block[copy] < 0
            assert copies.readers[copy] or copies.fills[copy], f"unused doomed copy={copy}"
            continue
        block = int(copies.block[copy])
        assert copy in books.copies_of(block)
        below = (
            books.copy_in(child, int(copies.tier[copy]), int(copies.part[copy]))
            for child in books.tree.children_of(block)
        )
        assert copies.kids[copy] == sum(kid >= 0 for kid in below), f"kids of copy={copy}"
        assert copies.state[copy] == READY or not copies.flags[copy] & (CLEAN | SINK)
        is_queued = bool(copies.flags[copy] & QUEUED)
        is_scanned = TierId(int(copies.tier[copy])) in books.recovering
        assert is_queued or is_scanned or not books.is_evictable(copy), (
            f"evictable but not in order: copy={copy}"
        )
        _check_clean(books, copy, block)


def _check_clean(books: Books, copy: int, block: int) -> None:
    copies = books.copies
    if copies.state[copy] != READY:
        return
    is_clean = any(
        copies.part[other] == copies.part[copy]
        and copies.tier[other] > copies.tier[copy]
        and copies.state[other] == READY
        and not int(copies.have[copy]) & ~int(copies.have[other])
        for other in books.copies_of(block)
    )
    assert bool(copies.flags[copy] & CLEAN) == is_clean, f"clean flag of copy={copy}"


def _check_pieces(books: Books, copy: int) -> None:
    copies, pieces = books.copies, books.pieces
    rows = list(books.pieces_of(copy))
    assert all(pieces.copy[row] == copy for row in rows)
    assert copies.units[copy] == sum(units_in(books.place(row)) for row in rows)
    assert len({(int(pieces.group[row]), int(pieces.shard[row])) for row in rows}) == len(rows)
    if copies.state[copy] == READY and copies.part[copy] != Part.CHECKPOINT:
        assert all(pieces.state[row] == READY for row in rows)
        assert not copies.missing[copy]
    if copies.state[copy] == FILLING:
        assert rows or copies.fills[copy], f"empty copy kept: copy={copy}"


def _check_space(books: Books) -> None:
    copies = books.copies
    for tier, book in books.space.books.items():
        book.extents.check()
        used, leased, sinks, dirty, count = [0, 0], 0, 0, 0, 0
        for copy in range(copies.top):
            if copies.state[copy] == FREE or copies.tier[copy] != tier:
                continue
            count += 1
            units = int(copies.units[copy])
            used[budget_of(int(copies.part[copy]))] += units
            leased += units if copies.readers[copy] else 0
            sinks += units if copies.flags[copy] & SINK else 0
            dirty += copies.state[copy] == READY and not copies.flags[copy] & CLEAN
        kept = (book.used, book.leased, book.sinks, book.dirty, book.copies)
        assert kept == (used, leased, sinks, dirty, count), (
            f"tier={tier.name} kept={kept} now={used, leased, sinks, dirty, count}"
        )
        taken = book.extents.capacity_units - book.extents.free_units
        aside = book.quarantined + book.aside + book.discarding + books.space.kept_units(tier)
        assert taken == sum(used) + aside, f"leak in tier={tier.name}"


def _check_holds(
    books: Books, fills: Fills, leases: Leases, claims: Claims, carriage: Carriage
) -> None:
    holds: Counter[int] = Counter()
    for fill in fills.open:
        holds[fill.block] += 1
    paths = [lease.path for lease in leases.open.values()]
    paths += [pin.path for pin in claims.pins.values()]
    paths += [each.path for each in carriage.ahead.ahead]
    for path in paths:
        holds.update(path.tolist())
    for request in claims.requests.values():
        holds.update(request.path)
    blocks = books.blocks
    for block in range(blocks.top):
        assert blocks.holds[block] == holds[block], f"holds of block={block}"
    readers: Counter[int] = Counter()
    for lease in leases.open.values():
        readers.update(lease.all_copies())
    for copy, count in readers.items():
        assert books.copies.readers[copy] >= count, f"readers of copy={copy}"
