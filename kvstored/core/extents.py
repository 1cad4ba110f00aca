"""The extent allocator of one tier: which 4 KiB units of its segments are free.

It knows free runs only, so its memory follows fragmentation, not how much is stored. Bytes, copies
and generations are other modules' business.

Best fit, then lowest address: blocks of one namespace have one size, so the hole that one left is
found again exactly, and a growing prefix is laid out upwards. What fits no run is gathered from the
largest runs, at most `EXTENTS_MAX` of them.

Two structures hold the free runs. `_Segment` orders them by address, for coalescing and claims.
`_order` and `_heaps` order them by length, then address; a heap forgets lazily: an address in it
counts while a run of that length starts there.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

from kvstored.core.types import EXTENTS_MAX, Extent, Place

_START_BITS = 32
"""An address is segment << _START_BITS | start."""
_START_MASK = (1 << _START_BITS) - 1
_PAGE_BITS = 12
"""Runs are kept in sorted arrays by pages of 2^12 units: an insert moves 8 KiB at most."""
_STALE_MAX = 64
_RECENT_TAKES = 64


class Extents:
    """A few microseconds a call (50 when gathered from 10 runs); about 130 bytes a free run."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._order: list[int] = []
        self._heaps: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}
        self._free_units = 0
        self._capacity_units = 0
        self._recent: deque[int] = deque(maxlen=_RECENT_TAKES)

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
        self._segments[segment] = _Segment(units)
        self._capacity_units += units
        self._free_units += units
        self._add(segment << _START_BITS, units)

    def take(self, units: int) -> Place | None:
        """One extent when a free run is long enough, else `EXTENTS_MAX` at most, by address.

        None, with nothing taken, when there is no such set: free something and try again.
        """
        assert units > 0
        self._recent.append(units)
        return self._take(units)

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

    def has(self, extent: Extent) -> bool:
        """Whether it lies within the segments, taken or free."""
        segment = self._segments.get(extent.segment)
        is_sound = extent.start >= 0 and extent.units > 0
        return segment is not None and is_sound and extent.start + extent.units <= segment.units

    def claim(self, extent: Extent) -> bool:
        """Take exactly these units, as a record found at recovery says.

        False, with nothing taken, when any unit is taken already or outside of the segments.
        """
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

    def give(self, place: Place) -> None:
        """Return taken units (all of a place or a part of it); they are free at once."""
        for extent in place:
            self._give(extent.segment, extent.start, extent.units)

    def fragmentation(self) -> float:
        """Share of the free units that lie in runs too short for the typical recent request.

        Typical is the median of the last 64 sizes asked for. 0 when nothing is free or was asked.
        Such runs still serve smaller requests and, gathered, larger ones.
        """
        if not self._recent or not self._free_units:
            return 0.0
        typical = sorted(self._recent)[len(self._recent) // 2]
        short = self._order[: bisect_left(self._order, typical)]
        return sum(units * self._counts[units] for units in short) / self._free_units

    def free_runs(self, segment: int | None = None) -> Iterator[Extent]:
        """All free runs (of one segment) by address; not to be used across changes."""
        numbers = sorted(self._segments) if segment is None else [segment]
        for number in numbers:
            for start, units in self._segments[number].runs():
                yield Extent(number, start, units)

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
        assert self._free_units == sum(units * count for units, count in counts.items())
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


class _Segment:
    """The free runs of one segment by address: pages of sorted starts with their lengths."""

    __slots__ = ("_occupied", "_pages", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        self._pages: dict[int, tuple[array[int], array[int]]] = {}
        self._occupied = 0
        """Bit p is set when page p holds a start: finds a run that reaches in from a page below."""

    def runs(self) -> Iterator[tuple[int, int]]:
        for page in sorted(self._pages):
            yield from zip(*self._pages[page], strict=True)

    def at_or_before(self, unit: int) -> tuple[int, int]:
        """Start and length of the last run that starts at or before this unit; (-1, 0) if none."""
        page = unit >> _PAGE_BITS
        here = self._pages.get(page)
        if here is not None:
            i = bisect_right(here[0], unit) - 1
            if i >= 0:
                return here[0][i], here[1][i]
        below = self._occupied & ((1 << page) - 1)
        if not below:
            return -1, 0
        starts, lengths = self._pages[below.bit_length() - 1]
        return starts[-1], lengths[-1]

    def units_at(self, start: int) -> int:
        """Length of the run that starts exactly there, or 0."""
        here = self._pages.get(start >> _PAGE_BITS)
        if here is None:
            return 0
        starts, lengths = here
        i = bisect_left(starts, start)
        return lengths[i] if i < len(starts) and starts[i] == start else 0

    def put(self, start: int, units: int) -> None:
        """Enter a run, or give the one that starts there another length."""
        page = start >> _PAGE_BITS
        here = self._pages.get(page)
        if here is None:
            self._pages[page] = array("I", (start,)), array("I", (units,))
            self._occupied |= 1 << page
            return
        starts, lengths = here
        i = bisect_left(starts, start)
        if i < len(starts) and starts[i] == start:
            lengths[i] = units
        else:
            starts.insert(i, start)
            lengths.insert(i, units)

    def remove(self, start: int) -> None:
        page = start >> _PAGE_BITS
        starts, lengths = self._pages[page]
        if len(starts) == 1:
            assert starts[0] == start
            del self._pages[page]
            self._occupied ^= 1 << page
            return
        i = bisect_left(starts, start)
        assert starts[i] == start
        del starts[i], lengths[i]

    def shorten(self, start: int, units: int) -> None:
        """Cut so many units off the front of a longer run."""
        page = start >> _PAGE_BITS
        starts, lengths = self._pages[page]
        i = bisect_left(starts, start)
        assert starts[i] == start
        assert lengths[i] > units
        if (start + units) >> _PAGE_BITS == page:
            starts[i] = start + units
            lengths[i] -= units
            return
        rest = lengths[i] - units
        self.remove(start)
        self.put(start + units, rest)


def _cut_at(whole: Extent, ends: Sequence[int]) -> Iterator[Place]:
    start = 0
    for end in ends:
        yield (Extent(whole.segment, whole.start + start, end - start),)
        start = end
