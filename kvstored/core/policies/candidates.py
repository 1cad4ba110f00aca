"""Copies that may be evicted, by class and weight: the longest and the shortest unused one of each is found in O(log n).

Within a class the worth of a copy depends on its age alone, and the worst is most often at one of the ends. The ends are kept in columns, so
that the worst of all classes is found by array calls, and looked at again only where something changed. A class without copies has no place there:
of the thousands that there may be few have any at a time. An entry that does not say any more
what is true of its copy is dropped when it comes up.
"""

from bisect import bisect_right
from collections.abc import Callable
from math import inf

import numpy as np

from kvstored.core.policies.ages import Ages
from kvstored.core.policies.spells import EDGES, Floats

_EDGES = EDGES.tolist()
_SLACK = 256
_GROWTH = 64


class _Slot:
    """Copies of one class and weight. `at`: the places of its oldest and its newest one in the columns."""

    __slots__ = ("ages", "at", "class_", "name", "size_max", "worth")

    def __init__(self, class_: int, weight: int, at: int) -> None:
        self.class_ = class_
        self.name = class_, weight
        self.worth = 2.0 ** (weight / 2)
        self.at = at
        self.ages = Ages()
        self.size_max = _SLACK


class Candidates:
    """Of one tier and budget. `times(spell, row)`: when the spell began and the last use; None where the entry does not say any more what
    is, or the copy may not be evicted."""

    def __init__(self, times: Callable[[int, int], tuple[float, float] | None]) -> None:
        self._times = times
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._by_place: list[_Slot] = []
        self._changed: dict[_Slot, None] = {}
        self._spell = np.zeros(0)
        self._start_s = np.zeros(0)
        self._last_s = np.zeros(0)
        self._worth = np.zeros(0)
        self._class = np.zeros(0, dtype=np.int32)
        self._weight = np.zeros(0)
        self._rated_s = -inf
        self._rates: Floats | None = None
        """Time and tables of which `_worth` tells."""

    def push(self, class_: int, weight: int, spell: int, row: int) -> None:
        """`weight`: the worth of a hit a byte, as a power of two in halves. Spells are numbered as they begin."""
        slot = self._slots.get((class_, weight))
        if slot is None:
            slot = self._slots[class_, weight] = self._added(class_, weight)
        slot.ages.add(spell, row)
        self._changed[slot] = None
        if len(slot.ages) > slot.size_max:
            self._sweep(slot)

    def remove(self, class_: int, weight: int, spell: int, row: int) -> None:
        """It is no candidate any more; where that is not said it is found out when it comes up."""
        slot = self._slots.get((class_, weight))
        if slot is not None:
            slot.ages.remove(spell, row)
            self._changed[slot] = None

    def pop_oldest(self) -> int | None:
        """The row that is unused for longest, taken out; of one time the first that was used then."""
        return self._pop(self._oldest)

    def pop_worst(self, rates: Floats, now_s: float) -> int | None:
        """The row of least rate times weight, taken out; of equals the oldest."""
        if now_s != self._rated_s or rates is not self._rates:
            self._rated_s, self._rates = now_s, rates
            self._rate_all(rates, now_s)
        return self._pop(lambda: self._worst(rates, now_s))

    def _pop(self, choose: Callable[[], int]) -> int | None:
        while True:
            at = choose()
            if at < 0:
                return None
            slot = self._by_place[at >> 1]
            spell, row = slot.ages.pop_last() if at & 1 else slot.ages.pop_first()
            self._changed[slot] = None
            if self._times(spell, row) is not None:
                return row

    def _worst(self, rates: Floats, now_s: float) -> int:
        for slot in self._changed:
            if not self._look(slot):
                continue
            for at in (slot.at, slot.at + 1):
                bin_ = bisect_right(_EDGES, now_s - self._start_s.item(at))
                self._worth[at] = rates.item(slot.class_, bin_) * slot.worth
        self._changed.clear()
        return self._least(self._worth)

    def _oldest(self) -> int:
        self._look_all()
        self._rated_s = -inf
        return self._least(self._last_s)

    def _least(self, values: Floats) -> int:
        """Its place; -1 where there is none."""
        if not self._by_place:
            return -1
        values = values[: 2 * len(self._by_place)]
        least = values.item(int(values.argmin()))
        equals = np.flatnonzero(values == least)
        return equals.item(int(self._spell[equals].argmin()) if len(equals) > 1 else 0)

    def _rate_all(self, rates: Floats, now_s: float) -> None:
        self._look_all()
        size = 2 * len(self._by_place)
        bins = EDGES.searchsorted(now_s - self._start_s[:size], side="right")
        self._worth[:size] = rates[self._class[:size], bins] * self._weight[:size]

    def _look_all(self) -> None:
        for slot in self._changed:
            self._look(slot)
        self._changed.clear()

    def _look(self, slot: _Slot) -> bool:
        """What is at its ends now: one that may not leave would hide those behind it. False where nothing is left of it."""
        at, ages, times_of = slot.at, slot.ages, self._times
        oldest = newest = None
        while len(ages) and (oldest := times_of(*ages.first())) is None:
            ages.pop_first()
        while len(ages) > 1 and (newest := times_of(*ages.last())) is None:
            ages.pop_last()
        if oldest is None:
            self._drop(slot)
            return False
        self._spell[at], self._spell[at + 1] = ages.first()[0], ages.last()[0]
        self._start_s[at], self._last_s[at] = oldest
        self._start_s[at + 1], self._last_s[at + 1] = newest or oldest
        return True

    def _drop(self, slot: _Slot) -> None:
        """The last one takes its place."""
        del self._slots[slot.name]
        last = self._by_place.pop()
        if last is slot:
            return
        at, source = slot.at, last.at
        for column in (
            self._spell,
            self._start_s,
            self._last_s,
            self._worth,
            self._weight,
            self._class,
        ):
            column[at : at + 2] = column[source : source + 2]
        last.at = at
        self._by_place[at >> 1] = last

    def _added(self, class_: int, weight: int) -> _Slot:
        slot = _Slot(class_, weight, 2 * len(self._by_place))
        self._by_place.append(slot)
        if slot.at == len(self._class):
            more = max(_GROWTH, slot.at)
            for name in ("_spell", "_start_s", "_last_s", "_worth", "_weight"):
                setattr(self, name, np.concatenate([getattr(self, name), np.full(more, inf)]))
            self._class = np.concatenate([self._class, np.zeros(more, dtype=np.int32)])
        self._class[slot.at : slot.at + 2] = class_
        self._weight[slot.at : slot.at + 2] = slot.worth
        return slot

    def _sweep(self, slot: _Slot) -> None:
        """Entries that are no more true would otherwise stay as long as they do not come up."""
        slot.ages.keep(lambda spell, row: self._times(spell, row) is not None)
        slot.size_max = 2 * len(slot.ages) + _SLACK
