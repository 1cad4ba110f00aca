"""Extents against a plain set of units."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstored.core.extents import Extents
from kvstored.core.types import EXTENTS_MAX, Extent, Place

Unit = tuple[int, int]


def units_of(place: Place) -> list[Unit]:
    return [(e.segment, e.start + i) for e in place for i in range(e.units)]


def runs_of(free: set[Unit]) -> list[Extent]:
    runs: list[Extent] = []
    for segment, unit in sorted(free):
        last = runs[-1] if runs else Extent(-1, 0, 0)
        if last.segment == segment and last.start + last.units == unit:
            runs[-1] = Extent(segment, last.start, last.units + 1)
        else:
            runs.append(Extent(segment, unit, 1))
    return runs


def reachable(free: set[Unit]) -> int:
    """The most units that one take can gather."""
    return sum(sorted((run.units for run in runs_of(free)), reverse=True)[:EXTENTS_MAX])


class ExtentsAgainstSet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents()
        self.free: set[Unit] = set()
        self.held: list[Place] = []
        self.capacity = 0
        self.segments: dict[int, int] = {}

    @precondition(lambda self: len(self.segments) < 4)
    @rule(segment=st.integers(0, 9), units=st.sampled_from([1, 7, 64, 200]))
    def add_segment(self, segment: int, units: int) -> None:
        if segment in self.segments:
            return
        self.extents.add_segment(segment, units)
        self.segments[segment] = units
        self.free.update((segment, unit) for unit in range(units))

    def keep(self, place: Place, units: int) -> None:
        taken = units_of(place)
        assert len(taken) == len(set(taken)) == units
        assert self.free.issuperset(taken)
        assert 1 <= len(place) <= EXTENTS_MAX
        assert list(place) == sorted(place, key=lambda e: (e.segment, e.start))
        self.free.difference_update(taken)
        self.held.append(place)

    @rule(units=st.integers(1, 12) | st.integers(1, 300))
    def take(self, units: int) -> None:
        runs = runs_of(self.free)
        place = self.extents.take(units)
        if place is None:
            assert units > reachable(self.free)
            return
        fitting = [run for run in runs if run.units >= units]
        if fitting:  # best fit, then lowest address
            best = min(fitting, key=lambda run: (run.units, run.segment, run.start))
            assert place == (Extent(best.segment, best.start, units),)
        self.keep(place, units)

    @rule(sizes=st.lists(st.integers(1, 40), max_size=12))
    def take_run(self, sizes: list[int]) -> None:
        longest = max((run.units for run in runs_of(self.free)), default=0)
        places = self.extents.take_run(sizes)
        if places is None:
            assert sum(sizes) > longest
            return
        assert len(places) == len(sizes)
        if sizes and sum(sizes) <= longest:
            start = places[0][0].start
            for place, units in zip(places, sizes, strict=True):
                assert place == (Extent(places[0][0].segment, start, units),)
                start += units
        for place, units in zip(places, sizes, strict=True):
            self.keep(place, units)

    @rule(segment=st.integers(0, 9), start=st.integers(-1, 210), units=st.integers(0, 60))
    def claim(self, segment: int, start: int, units: int) -> None:
        extent = Extent(segment, start, units)
        wanted = units_of((extent,))
        expected = units > 0 and self.free.issuperset(wanted)
        assert self.extents.claim(extent) is expected
        if expected:
            self.keep((extent,), units)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(min_value=0))
    def give(self, pick: int) -> None:
        place = self.held.pop(pick % len(self.held))
        self.extents.give(place)
        self.free.update(units_of(place))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(min_value=0))
    def give_the_tail(self, pick: int) -> None:
        place = self.held.pop(pick % len(self.held))
        *rest, last = place
        keep = last.units // 2
        self.extents.give((Extent(last.segment, last.start + keep, last.units - keep),))
        self.free.update((last.segment, last.start + i) for i in range(keep, last.units))
        kept = (*rest, Extent(last.segment, last.start, keep)) if keep else tuple(rest)
        if kept:
            self.held.append(kept)

    @invariant()
    def agrees(self) -> None:
        runs = runs_of(self.free)
        assert list(self.extents.free_runs()) == runs
        assert self.extents.free_units == len(self.free)
        assert self.extents.capacity_units == sum(self.segments.values())
        assert self.extents.largest_units == max((run.units for run in runs), default=0)
        self.extents.check()


ExtentsAgainstSet.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestExtentsAgainstSet = ExtentsAgainstSet.TestCase


def full(units: int) -> Extents:
    extents = Extents()
    extents.add_segment(0, units)
    return extents


def test_more_than_the_most_extents_is_refused_and_nothing_is_taken() -> None:
    extents = full(4 * EXTENTS_MAX)
    places = [extents.take(1) for _ in range(4 * EXTENTS_MAX)]
    for place in places[::2]:
        assert place is not None
        extents.give(place)
    assert extents.take(EXTENTS_MAX + 1) is None
    assert extents.take_run([EXTENTS_MAX, EXTENTS_MAX + 1]) is None
    assert extents.free_units == 2 * EXTENTS_MAX
    place = extents.take(EXTENTS_MAX)
    assert place is not None
    assert len(place) == EXTENTS_MAX
    extents.check()


@given(order=st.permutations(range(48)))
def test_giving_everything_back_in_any_order_leaves_one_run(order: list[int]) -> None:
    extents = full(48 * 3)
    places = [extents.take(3) for _ in range(48)]
    assert extents.take(1) is None
    for i in order:
        extents.give(places[i] or ())
        extents.check()
    assert list(extents.free_runs()) == [Extent(0, 0, 48 * 3)]


def test_a_hole_of_one_size_is_found_again_by_that_size() -> None:
    extents = full(100_000)
    places = [extents.take(3_001) for _ in range(20)]
    hole = places[7]
    assert hole is not None
    extents.give(hole)
    assert extents.take(3_001) == hole


def test_units_given_twice_are_a_bug_of_the_caller() -> None:
    extents = full(16)
    place = extents.take(4)
    assert place is not None
    extents.give(place)
    with pytest.raises(AssertionError):
        extents.give(place)
    with pytest.raises(AssertionError):
        extents.give((Extent(0, 15, 2),))
    extents.check()


def test_fragmentation_is_the_share_in_runs_too_short_for_the_median_request() -> None:
    extents = full(100)
    assert extents.fragmentation() == 0.0
    for i in range(10):
        assert extents.claim(Extent(0, i * 10 + 9, 1))
    assert extents.take(50) is not None  # 50 units of 9 each: 5 whole runs and 5 units of a sixth
    extents.give((Extent(0, 99, 1),))
    assert {run.units for run in extents.free_runs()} == {4, 9, 10}
    extents._recent.clear()
    extents._recent.extend([1, 10, 50])
    assert extents.fragmentation() == (extents.free_units - 10) / extents.capacity_units


def test_stale_addresses_do_not_pile_up() -> None:
    extents = full(1_000)
    keeper = extents.take(2)
    assert keeper is not None
    for _ in range(1_000):
        one, other = extents.take(1), extents.take(2)
        extents.give(one or ())
        extents.give(other or ())
    assert sum(len(heap) for heap in extents._heaps.values()) < 300


MIX_UNITS = (1, 225, 1_200, 3_000, 8_192)
SEGMENT_UNITS = 65_536
SEGMENTS = 4


class Arena:
    """A cache over Extents that evicts its oldest blocks until a new one fits."""

    def __init__(self) -> None:
        self.extents = Extents()
        for segment in range(SEGMENTS):
            self.extents.add_segment(segment, SEGMENT_UNITS)
        self.blocks: OrderedDict[int, Place] = OrderedDict()
        self.stored_units = 0
        self.lowest = 1.0

    def store(self, units: int) -> None:
        while (place := self.extents.take(units)) is None:
            oldest = self.blocks.popitem(last=False)[1]
            self.lowest = min(self.lowest, self.usable)
            self.extents.give(oldest)
        self.blocks[self.stored_units] = place
        self.stored_units += units

    def touch_some(self, random: np.random.Generator) -> None:
        """Shuffle the order of eviction, as hits do."""
        for key in random.choice(np.array(list(self.blocks)), len(self.blocks) // 3, replace=False):
            self.blocks.move_to_end(int(key))

    @property
    def usable(self) -> float:
        return 1 - self.extents.free_units / self.extents.capacity_units

    def turn_over(self, sizes: tuple[int, ...], random: np.random.Generator) -> None:
        end = self.stored_units + self.extents.capacity_units
        while self.stored_units < end:
            self.store(sizes[int(random.integers(len(sizes)))])


def test_nine_tenths_are_usable_within_one_turnover_of_every_change_of_sizes() -> None:
    random = np.random.default_rng(1)
    arena = Arena()
    for sizes in ((1,), (8_192,), MIX_UNITS):
        arena.turn_over(sizes, random)
        assert arena.usable >= 0.9, sizes
        arena.lowest = 1.0
        arena.turn_over(sizes, random)  # from now on at every moment at which a block did not fit
        assert arena.lowest >= 0.9, sizes
    arena.extents.check()


def test_nine_tenths_are_usable_after_two_turnovers_when_hits_shuffle_the_order() -> None:
    """The first 32 MiB among randomly freed 4 KiB needs 64 runs; what it leaves takes longer."""
    random = np.random.default_rng(1)
    arena = Arena()
    for sizes in ((1,), (8_192,), MIX_UNITS):
        arena.turn_over(sizes, random)
        assert arena.usable >= 0.85, sizes
        arena.turn_over(sizes, random)
        assert arena.usable >= 0.9, sizes
        arena.touch_some(random)
    arena.extents.check()
