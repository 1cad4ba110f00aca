"""The extent allocator of one tier: which 4 KiB units of its segments are free.

It knows free runs only, so its memory follows fragmentation, not how much is stored. Bytes, copies
and generations are other modules' business.

Best fit, then lowest address: blocks of one namespace have one size, so the hole that one left is
found again exactly, and a growing prefix is laid out upwards. What fits no run is gathered from the
largest runs, at most `EXTENTS_MAX` of them.

Two structures hold the free runs. `Segment` orders them by address, for coalescing and claims.
`_order` and `_heaps` order them by length, then address; a heap forgets lazily: an address in it
counts while a run of that length starts there. While a tier recovers its segments are a `UnitMap` instead.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from kvstored.core.runs import Segment
from kvstored.core.types import EXTENTS_MAX, Extent, Place
from kvstored.core.unitmap import UnitMap

_START_BITS = 32
"""An address is segment << _START_BITS | start."""
_START_MASK = (1 << _START_BITS) - 1
_STALE_MAX = 64
_RECENT_TAKES = 64
LOOKS_MAX = 256
"""Free runs that `take_in` looks at: 30 microseconds."""


class Extents:
    """A few microseconds a call (50 when gathered from 10 runs); about 130 bytes a free run."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._order: list[int] = []
        self._heaps: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}
        self._free_units = 0
        self._capacity_units = 0
        self._recent: deque[int] = deque(maxlen=_RECENT_TAKES)
        self._map: UnitMap | None = None
        """Of the segments in which claims go on: they have no runs."""

    @property
    def free_units(self) -> int:
        return self._free_units

    @property
    def capacity_units(self) -> int:
        return self._capacity_units

    @property
    def largest_units(self) -> int:
        """Length of the longest free run."""
        return self._order[-1] if self._order else 0

    def add_segment(self, segment: int, units: int) -> None:
        """A new segment, wholly free. Runs never cross segments."""
        assert segment not in self._segments, "segment is there"
        assert 0 < units <= _START_MASK
        self._segments[segment] = Segment(units)
        self._capacity_units += units
        self._free_units += units
        if self._map is not None:
            self._map.add(segment, units)
        else:
            self._add(segment << _START_BITS, units)

    def begin_claims(self) -> None:
        """Until `settle` nothing can be taken but by claims, which are cheap."""
        if self._map is not None:
            return
        self._map = UnitMap()
        for number, segment in self._segments.items():
            self._map.add(number, segment.units)
            end = 0
            for start, units in [*segment.runs(), (segment.units, 0)]:
                if start > end:
                    self._map.take_many(np.asarray([(number, end, start - end)], dtype=np.int64))
                end = start + units
                if units:
                    self._remove(number << _START_BITS | start, units)

    def settle(self) -> bool:
        """Make free runs of what was not claimed in one more segment; True when this was the last one."""
        if self._map is None:
            return True
        segments = self._map.segments()
        if segments:
            starts, lengths = self._map.free_runs(segments[0])
            self._map.drop(segments[0])
            self._put_runs(segments[0], starts, lengths)
        if len(segments) <= 1:
            self._map = None
        return self._map is None

    def take(self, units: int) -> Place | None:
        """One extent when a free run is long enough, else `EXTENTS_MAX` at most, by address.

        None, with nothing taken, when there is no such set: free something and try again.
        """
        assert units > 0
        self._recent.append(units)
        return self._take(units)

    def take_in(self, segment: int, units: int) -> Place | None:
        """One extent of this segment, the first among its lowest free runs that is long enough."""
        for run in islice(self.free_runs(segment), LOOKS_MAX):
            if run.units >= units:
                place = (Extent(segment, run.start, units),)
                self.claim(place[0])
                return place
        return None

    def take_run(self, sizes: Sequence[int]) -> list[Place] | None:
        """A place for each size, laid back to back as far as free runs reach; all or None."""
        assert all(units > 0 for units in sizes)
        self._recent.extend(sizes[-_RECENT_TAKES:])
        if sum(sizes) > self._free_units:
            return None
        places: list[Place] = []
        while len(places) < len(sizes):
            ends = list(self._ends_that_fit(sizes, len(places)))
            if ends:
                whole = self._cut(self._order[bisect_left(self._order, ends[-1])], ends[-1])
                places.extend(_cut_at(whole, ends))
                continue
            place = self._take(sizes[len(places)])
            if place is None:
                for taken in places:
                    self.give(taken)
                return None
            places.append(place)
        return places

    def take_equal(self, units: int, count: int) -> list[Extent] | None:
        """Runs that hold `count` places of `units` each, back to back, as `take_run` lays them. None, with nothing taken, where a
        place would lie in several extents."""
        self._recent.extend([units] * min(count, _RECENT_TAKES))
        runs: list[Extent] = []
        while count:
            fit = min(count, self.largest_units // units)
            if not fit:
                self.give(tuple(runs))
                return None
            runs.append(self._cut(self._order[bisect_left(self._order, fit * units)], fit * units))
            count -= fit
        return runs

    def has(self, extent: Extent) -> bool:
        """Whether it lies within the segments, taken or free."""
        segment = self._segments.get(extent.segment)
        is_sound = extent.start >= 0 and extent.units > 0
        return segment is not None and is_sound and extent.start + extent.units <= segment.units

    def claim(self, extent: Extent) -> bool:
        """Take exactly these units, as a record found at recovery says.

        False, with nothing taken, when any unit is taken already or outside of the segments.
        """
        if self._map is not None and extent.segment in self._map:
            return bool(self.claim_many(np.asarray([extent], dtype=np.int64))[0])
        segment = self._segments.get(extent.segment)
        if segment is None or extent.start < 0 or extent.units <= 0:
            return False
        start, units = segment.at_or_before(extent.start)
        before = extent.start - start
        after = units - before - extent.units
        if start < 0 or after < 0:
            return False
        base = extent.segment << _START_BITS
        self._remove(base | start, units)
        if before:
            self._add(base | start, before)
        if after:
            self._add(base | (extent.start + extent.units), after)
        self._free_units -= extent.units
        return True

    def claim_many(self, extents: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The same between `begin_claims` and `settle` for many rows of (segment, start, units); rows that meet each other fail both."""
        assert self._map is not None, "claims have not begun"
        taken = self._map.take_many(extents)
        self._free_units -= int(extents[taken, 2].sum())
        return taken

    def give(self, place: Place) -> None:
        """Return taken units (all of a place or a part of it); they are free at once."""
        for extent in place:
            self._give(extent.segment, extent.start, extent.units)

    def fragmentation(self) -> float:
        """Share of the capacity that lies free in runs too short for the typical recent request: what fragmentation costs.

        Typical is the median of the last 64 sizes asked for. Such runs still serve smaller requests and, gathered, larger ones. A share
        of what is free would say 1 when a single unit is.
        """
        if not self._recent or not self._capacity_units:
            return 0.0
        typical = sorted(self._recent)[len(self._recent) // 2]
        short = self._order[: bisect_left(self._order, typical)]
        return sum(units * self._counts[units] for units in short) / self._capacity_units

    def free_runs(self, segment: int | None = None) -> Iterator[Extent]:
        """All free runs (of one segment) by address, without those of segments in which claims go on; not to be used across changes."""
        numbers = sorted(self._segments) if segment is None else [segment]
        for number in numbers:
            for start, units in self._segments[number].runs():
                yield Extent(number, start, units)

    def segments(self) -> list[int]:
        """Their numbers."""
        return sorted(self._segments)

    @property
    def segment_units_max(self) -> int:
        """Units of the largest segment."""
        return max((segment.units for segment in self._segments.values()), default=0)

    def emptiest(self, count: int) -> list[tuple[int, int]]:
        """(segment, its units) of those with most free units."""
        free = {
            number: sum(units for _, units in segment.runs())
            for number, segment in self._segments.items()
        }
        chosen = sorted(free, key=lambda number: (-free[number], number))[:count]
        return [(number, self._segments[number].units) for number in chosen]

    def check(self) -> None:
        """Assert every invariant; cost is linear in the free runs."""
        counts: dict[int, int] = {}
        for run in self.free_runs():
            assert run.units > 0
            assert run.start >= 0
            assert run.start + run.units <= self._segments[run.segment].units
            assert (run.segment << _START_BITS | run.start) in self._heaps[run.units]
            counts[run.units] = counts.get(run.units, 0) + 1
        for one, other in pairwise(self.free_runs()):
            apart = one.segment != other.segment or one.start + one.units < other.start
            assert apart, "runs overlap or were not coalesced"
        assert counts == self._counts
        assert sorted(counts) == self._order
        assert self._heaps.keys() == counts.keys()
        claimable = self._map.segments() if self._map is not None else []
        assert not any(list(self.free_runs(number)) for number in claimable)
        rest = sum(int(self._map.free_runs(n)[1].sum()) for n in claimable if self._map is not None)
        assert self._free_units == rest + sum(units * count for units, count in counts.items())
        assert self._capacity_units == sum(segment.units for segment in self._segments.values())

    def _take(self, units: int) -> Place | None:
        at = bisect_left(self._order, units)
        if at < len(self._order):
            return (self._cut(self._order[at], units),)
        return self._gather(units) if units <= self._free_units else None

    def _gather(self, units: int) -> Place | None:
        """From the largest runs, the last of them best fit; no single run is long enough."""
        reach, runs = 0, EXTENTS_MAX
        for length in reversed(self._order):
            count = min(runs, self._counts[length])
            reach += count * length
            runs -= count
            if reach >= units or not runs:
                break
        if reach < units:
            return None
        extents: list[Extent] = []
        while units:
            length = self._order[-1]
            if length >= units:
                length = self._order[bisect_left(self._order, units)]
            extents.append(self._cut(length, min(length, units)))
            units -= extents[-1].units
        return tuple(sorted(extents, key=lambda extent: (extent.segment, extent.start)))

    def _ends_that_fit(self, sizes: Sequence[int], first: int) -> Iterator[int]:
        """Running totals of the sizes from `first` on, as far as one free run can hold."""
        largest = self.largest_units
        for end in accumulate(sizes[i] for i in range(first, len(sizes))):
            if end > largest:
                return
            yield end

    def _cut(self, length: int, units: int) -> Extent:
        """Take the first `units` of the lowest free run of exactly this length."""
        heap = self._heaps[length]
        while True:
            address = heap[0]
            segment = self._segments[address >> _START_BITS]
            start = address & _START_MASK
            if segment.units_at(start) == length:
                break
            heappop(heap)
        self._forget(length)
        if units == length:
            segment.remove(start)
        else:
            segment.shorten(start, units)
            self._remember(address + units, length - units)
        self._free_units -= units
        return Extent(address >> _START_BITS, start, units)

    def _give(self, number: int, start: int, units: int) -> None:
        segment = self._segments[number]
        end = start + units
        assert 0 <= start < end <= segment.units, "extent outside of its segment"
        if self._map is not None and number in self._map:
            self._map.give(Extent(number, start, units))
            self._free_units += units
            return
        base = number << _START_BITS
        left, left_units = segment.at_or_before(end - 1)
        assert left + left_units <= start, "units are free already"
        self._free_units += units
        right_units = segment.units_at(end)
        if right_units:
            segment.remove(end)
            self._forget(right_units)
        if left >= 0 and left + left_units == start:
            self._forget(left_units)
            start, units = left, left_units + units
        segment.put(start, units + right_units)
        self._remember(base | start, units + right_units)

    def _put_runs(self, number: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """All runs of a segment that has none yet."""
        if not len(starts):
            return
        self._segments[number].fill(starts, lengths)
        base = number << _START_BITS
        order = np.argsort(lengths, kind="stable")
        sizes, first = np.unique(lengths[order], return_index=True)
        for units, same in zip(sizes.tolist(), np.split(order, first[1:]), strict=False):
            addresses = (base | starts[same]).tolist()
            if units in self._heaps:
                heap = self._heaps[units]
                heap.extend(addresses)
                heapify(heap)
            else:
                self._heaps[units] = addresses
                insort(self._order, units)
            self._counts[units] = self._counts.get(units, 0) + len(addresses)

    def _add(self, address: int, units: int) -> None:
        self._segments[address >> _START_BITS].put(address & _START_MASK, units)
        self._remember(address, units)

    def _remove(self, address: int, units: int) -> None:
        self._segments[address >> _START_BITS].remove(address & _START_MASK)
        self._forget(units)

    def _remember(self, address: int, units: int) -> None:
        """Enter a run into the order by length."""
        heap = self._heaps.get(units)
        if heap is None:
            self._heaps[units] = [address]
            self._counts[units] = 1
            insort(self._order, units)
            return
        heappush(heap, address)
        self._counts[units] += 1
        if len(heap) > 2 * self._counts[units] + _STALE_MAX:
            heap[:] = {at for at in heap if self._units_at(at) == units}
            heapify(heap)

    def _forget(self, units: int) -> None:
        """One run of this length is gone; its address goes stale in the heap."""
        count = self._counts[units] - 1
        if count:
            self._counts[units] = count
            return
        del self._counts[units], self._heaps[units]
        del self._order[bisect_left(self._order, units)]

    def _units_at(self, address: int) -> int:
        return self._segments[address >> _START_BITS].units_at(address & _START_MASK)


def _cut_at(whole: Extent, ends: Sequence[int]) -> Iterator[Place]:
    start = 0
    for end in ends:
        yield (Extent(whole.segment, whole.start + start, end - start),)
        start = end
