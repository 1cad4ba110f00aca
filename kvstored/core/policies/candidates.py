"""Copies that may be evicted, by class and weight: the longest and the shortest unused one of each is found in O(log n).

Within a class the worth of a copy depends on its age alone, and the worst is most often at one of the ends. Entries are never searched: one
that does not say any more what is true of its copy is dropped when it comes up. The ends are kept in columns, so that the worst of all
classes is found by array calls, and looked at again only where something changed.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from kvstored.core.policies.hazard import EDGES, Floats

Entry = tuple[float, int, int, int]
"""Start and number of the spell, rank, row of the copy: of one age the spell that began first leaves first."""
_SLACK = 256
_GROWTH = 64


class _Slot:
    """Copies of one class and weight. `at`: the places of its oldest and its newest one in the columns."""

    __slots__ = ("at", "newest", "oldest", "size_max")

    def __init__(self, at: int) -> None:
        self.at = at
        self.oldest: list[Entry] = []
        self.newest: list[Entry] = []
        """With start and spell negated."""
        self.size_max = _SLACK


class Candidates:
    """Of one tier and budget. `is_true(spell, row)`: whether an entry still says what is, and the copy may be evicted."""

    def __init__(self, is_true: Callable[[int, int], bool]) -> None:
        self._is_true = is_true
        self._slots: dict[int, dict[int, _Slot]] = {}
        self._changed: set[int] = set()
        self._entries: list[Entry | None] = []
        self._start_s = np.zeros(0)
        self._class = np.zeros(0, dtype=np.int32)
        self._weight = np.zeros(0)
        self._is_empty: NDArray[np.bool_] = np.ones(0, dtype=np.bool_)

    def push(self, class_: int, weight: int, entry: Entry) -> None:
        """`weight`: the worth of a hit a byte, as a power of two in halves."""
        slots = self._slots.setdefault(class_, {})
        slot = slots.get(weight)
        if slot is None:
            slot = slots[weight] = self._added(class_, weight)
        start_s, spell, rank, row = entry
        heappush(slot.oldest, entry)
        heappush(slot.newest, (-start_s, -spell, rank, row))
        self._changed.add(class_)
        if len(slot.oldest) > slot.size_max or len(slot.newest) > slot.size_max:
            self._sweep(slot)

    def changed(self, class_: int) -> None:
        """Some copies of this class are no candidates any more."""
        self._changed.add(class_)

    def oldest(self, last_use: Callable[[int], float]) -> int | None:
        """The row that is unused for longest: a spell may begin later, as where a branch is superseded."""
        while True:
            self._look_again()
            ends = [(at, entry) for at, entry in enumerate(self._entries) if entry is not None]
            stale = [at for at, entry in ends if not self._is_true(entry[1], entry[3])]
            if not stale:
                break
            self._changed.update(self._class[stale].tolist())
        found = [(last_use(entry[3]), entry) for _, entry in ends]
        return min(found)[1][3] if found else None

    def worst(self, rates: Floats, now_s: float) -> int | None:
        """The row of least rate times weight; of equals the oldest."""
        while True:
            self._look_again()
            at = self._least(rates, now_s)
            entry = None if at is None else self._entries[at]
            if at is None or entry is None:
                return None
            if self._is_true(entry[1], entry[3]):
                return entry[3]
            self._changed.add(
                self._class.item(at)
            )  # the copy went, or is in use, and nobody said so

    def _least(self, rates: Floats, now_s: float) -> int | None:
        """The place of it."""
        count = len(self._entries)
        if not count:
            return None
        bins = EDGES.searchsorted(now_s - self._start_s[:count], side="right")
        worth = rates[self._class[:count], bins] * self._weight[:count]
        worth[self._is_empty[:count]] = np.inf
        best = int(worth.argmin())
        least = worth.item(best)
        if least == np.inf:
            return None
        equal = np.flatnonzero(worth == least).tolist()
        if len(equal) == 1:
            return best
        return min((entry, at) for at in equal if (entry := self._entries[at]) is not None)[1]

    def _look_again(self) -> None:
        for class_ in self._changed:
            for slot in self._slots.get(class_, {}).values():
                oldest, newest = self._top(slot.oldest, 1), self._top(slot.newest, -1)
                self._put(slot.at, oldest)
                self._put(slot.at + 1, newest)
        self._changed.clear()

    def _top(self, heap: list[Entry], sign: int) -> Entry | None:
        while heap:
            start_s, spell, rank, row = heap[0]
            if self._is_true(sign * spell, row):
                return (sign * start_s, sign * spell, rank, row)
            heappop(heap)
        return None

    def _put(self, at: int, entry: Entry | None) -> None:
        self._entries[at] = entry
        self._is_empty[at] = entry is None
        if entry is not None:
            self._start_s[at] = entry[0]

    def _added(self, class_: int, weight: int) -> _Slot:
        at = len(self._entries)
        self._entries += [None, None]
        if at == len(self._class):
            more = max(_GROWTH, at)
            self._start_s = np.concatenate([self._start_s, np.zeros(more)])
            self._class = np.concatenate([self._class, np.zeros(more, dtype=np.int32)])
            self._weight = np.concatenate([self._weight, np.ones(more)])
            self._is_empty = np.concatenate([self._is_empty, np.ones(more, dtype=np.bool_)])
        self._class[at : at + 2] = class_
        self._weight[at : at + 2] = 2.0 ** (weight / 2)
        return _Slot(at)

    def _sweep(self, slot: _Slot) -> None:
        """Entries that are no more true would otherwise stay as long as they do not come up."""
        true = {each for each in slot.oldest if self._is_true(each[1], each[3])}
        slot.oldest = sorted(true)
        slot.newest = [(-start_s, -spell, rank, row) for start_s, spell, rank, row in true]
        heapify(slot.newest)
        slot.size_max = 2 * len(true) + _SLACK
