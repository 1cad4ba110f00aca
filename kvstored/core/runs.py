"""The free runs of one segment by address; their order by length is kept in `extents.py`."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_PAGE_BITS = 12
"""Runs are kept in sorted arrays by pages of 2^12 units: an insert moves 8 KiB at most."""


class Segment:
    """Pages of sorted starts with their lengths."""

    __slots__ = ("_occupied", "_pages", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        self._pages: dict[int, tuple[array[int], array[int]]] = {}
        self._occupied = 0
        """Bit p is set when page p holds a start: finds a run that reaches in from a page below."""

    def fill(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Enter all runs, by address, where there is none yet."""
        pages, first = np.unique(starts >> _PAGE_BITS, return_index=True)
        ends = [*first[1:].tolist(), len(starts)]
        for page, begin, end in zip(pages.tolist(), first.tolist(), ends, strict=True):
            here = slice(begin, end)
            self._pages[page] = (
                array("I", starts[here].tolist()),
                array("I", lengths[here].tolist()),
            )
            self._occupied |= 1 << page

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
