"""Space claimed by records that a scan finds: bits until the tier opens, runs after it; and the end of a scan in slices."""

import random

import numpy as np
import pytest

from kvstored.core import recovery
from kvstored.core.extents import Extents
from kvstored.core.sorting import in_order
from kvstored.core.tree import PrefixTree
from kvstored.core.types import Extent, TierId, as_rows
from kvstored.core.unitmap import UnitMap
from tests.core.desk import Desk, remove
from tests.core.test_catalog_recovery import columns, found, recover, unit
from tests.core.test_extents import runs_of, units_of

NVME = TierId.NVME
SEGMENTS = {0: 700, 2: 1, 3: 64, 70: 9000}


def rows_of(*extents: Extent) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.asarray(extents, dtype=np.int64).reshape(-1, 3)


@pytest.mark.parametrize("seed", range(20))
def test_claims_against_a_set_of_units(seed: int) -> None:
    chance = random.Random(seed)
    extents, free = Extents(), {(s, u) for s, units in SEGMENTS.items() for u in range(units)}
    for segment, units in SEGMENTS.items():
        if segment == 3:
            (before,) = extents.take(100) or ()
            free -= set(units_of((before,)))
            extents.begin_claims()
        extents.add_segment(segment, units)
    held = [before]
    longest = chance.choice([3, 40, 3000])
    for _ in range(30):
        batch = [
            Extent(chance.choice([0, 0, 2, 3, 5, 70]), chance.randrange(800), units)
            for units in (chance.randint(1, longest) for _ in range(chance.randint(1, 9)))
        ]
        claimed = extents.claim_many(rows_of(*batch)).tolist()
        for i, extent in enumerate(batch):
            mine = set(units_of((extent,)))
            others = {u for j, o in enumerate(batch) if j != i and extents.has(o) for u in units_of((o,))}  # fmt: skip
            assert claimed[i] == (mine <= free and not mine & others)
        for extent in [extent for extent, is_mine in zip(batch, claimed, strict=True) if is_mine]:
            free -= set(units_of((extent,)))
            held.append(extent)
        one = Extent(0, chance.randrange(-1, 700), chance.randint(1, 3))
        assert extents.claim(one) == (set(units_of((one,))) <= free)
        if set(units_of((one,))) <= free:
            free -= set(units_of((one,)))
            held.append(one)
        gone = held.pop(chance.randrange(len(held)))
        extents.give((gone,))
        free |= set(units_of((gone,)))
        extents.check()
        assert extents.free_units == len(free)
    steps = 0
    while not extents.settle():
        steps += 1
        extents.check()
        if held:  # in segments with runs and without
            gone = held.pop()
            extents.give((gone,))
            free |= set(units_of((gone,)))
    assert steps == len(SEGMENTS) - 1
    extents.check()
    assert list(extents.free_runs()) == runs_of(free)
    for extent in held:
        extents.give((extent,))
    extents.check()
    assert extents.free_units == extents.capacity_units == extents.largest_units + 700 + 1 + 64


def test_units_given_twice_while_claims_go_on_are_a_bug_of_the_caller() -> None:
    units = UnitMap()
    units.add(0, 20)
    assert units.take_many(rows_of(Extent(0, 3, 12))).all()
    units.give(Extent(0, 4, 9))
    with pytest.raises(AssertionError, match="free already"):
        units.give(Extent(0, 3, 2))


@pytest.mark.parametrize("count", [0, 1, 5000, 100_000])
def test_slices_sort_as_one_sort_does(count: int) -> None:
    chance = np.random.default_rng(count)
    major = chance.integers(0, max(1, count // 3), count).astype(np.float64)
    major[: count // 2] = 7.0
    minor = chance.integers(0, 9, count).astype(np.int32)
    order = np.concatenate([np.zeros(0, dtype=np.int64), *in_order(major, minor)])
    expected = np.lexsort((minor, major))
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    np.testing.assert_array_equal(major[order], major[expected])
    np.testing.assert_array_equal(minor[order], minor[expected])


def test_children_of_many_rows_at_once() -> None:
    tree = PrefixTree(300)
    tree.add_many(as_rows(list(range(200))))
    for row in range(1, 200):
        tree.link(row, row % 7 if row >= 7 else 0)
    for row in range(150, 200):
        tree.remove(row)
    tree.add_many(as_rows(list(range(150, 250))))
    tree.check()
    rows = as_rows([*range(100), 160])
    owners, children = tree.children_of_many(rows)
    got = sorted(zip(rows[owners].tolist(), children.tolist(), strict=True))
    assert got == sorted((row, child) for row in rows.tolist() for child in tree.children_of(row))


@pytest.mark.parametrize("seed", range(6))
def test_a_forest_comes_back_whatever_the_order_of_its_records(seed: int) -> None:
    chance = random.Random(seed)
    names = [chr(0x100 + i) for i in range(120)]
    parents = [None if i < 4 else names[chance.randrange(min(i, 60))] for i in range(120)]
    desk = Desk(nvme=200)
    desk.catalog.recovery.begin(NVME)
    order = list(range(120))
    chance.shuffle(order)
    pieces = [found(desk, names[i], unit(i), parent=parents[i]) for i in order]
    step = chance.choice([1, 7, 50, 120])
    for begin in range(0, 120, step):
        batch = pieces[begin : begin + step]
        assert recover(desk, NVME, batch, is_bulk=chance.random() < 0.8) == [True] * len(batch)
    assert desk.catalog.recovery.done(NVME, desk.now_s) == 0
    desk.catalog.check()
    for i, name in enumerate(names):
        path, above = name, parents[i]
        while above is not None:
            path, above = above + path, parents[names.index(above)]
        assert desk.hits(path).hit_blocks == len(path)


def test_other_calls_may_come_between_the_slices_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The end of a scan ranked and offered everything in one call: 3.6 s of a million copies in which nobody was served.
    monkeypatch.setattr(recovery, "SLICE_COPIES", 2)
    desk = Desk(nvme=8, dram=8)
    desk.catalog.recovery.begin(NVME)
    pieces = [found(desk, name, unit(i), last_s=500.0 - i) for i, name in enumerate("abcdefgh")]
    desk.catalog.recovery.recover_many(NVME, desk.ns, columns(pieces), desk.now_s)
    steps = 0
    for dropped in desk.catalog.recovery.finish(NVME, desk.now_s):
        assert dropped == 0
        assert NVME in desk.catalog.recovering
        if steps == 1:
            remove(desk.catalog, desk.ns, desk.keys("h"), desk.now_s)
        if steps == 2:
            desk.put("x")
        desk.catalog.check()
        steps += 1
    assert steps >= 4
    assert NVME not in desk.catalog.recovering
    assert desk.hits("a").hit_blocks == 1
    assert desk.hits("h").hit_blocks == 0


@pytest.mark.parametrize("seed", range(10))
def test_many_links_are_as_good_as_one_after_the_other(seed: int) -> None:
    chance = random.Random(seed)
    one, many = PrefixTree(), PrefixTree()
    rows = as_rows(list(range(60)))
    one.add_many(rows)
    many.add_many(rows)
    loose = list(range(60))
    while loose:
        chance.shuffle(loose)
        batch, loose = loose[:9], loose[9:]
        parents = [chance.choice([row, *range(60)]) for row in batch]
        for row, parent in zip(batch, parents, strict=True):
            one.link(row, parent)
        many.link_many(as_rows(batch), as_rows(parents))
        many.check()
        for name in ("parent", "depth", "children"):
            np.testing.assert_array_equal(getattr(one, name), getattr(many, name))
        assert one.node_count == many.node_count


def test_room_is_made_before_the_records_come() -> None:
    # Tables that grew by an eighth while records came in were copied again and again, 30 ms of a quarter of a million at once.
    desk = Desk(nvme=8)
    desk.put("a")
    desk.catalog.recovery.begin(NVME)
    for _ in desk.catalog.recovery.expect(5000):
        desk.catalog.check()
    books = desk.catalog.books
    assert min(books.blocks.capacity, books.copies.capacity, books.pieces.capacity) >= 5001
    assert len(books.index.fingerprints) >= 5001
    assert len(books.tree.parent) >= 5001
    assert desk.hits("a").hit_blocks == 1
    desk.catalog.recovery.done(NVME, desk.now_s)
