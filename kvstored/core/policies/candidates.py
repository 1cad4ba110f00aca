"""Copies that may be evicted, by class and weight: the longest and the shortest unused one of each is found in O(log n).

Within a class the worth of a copy depends on its age alone, and the worst is most often at one of the ends. The ends are kept in columns, so
that the worst of all classes is found by array calls. An end is looked at again where it changed, and where its age comes into another bin. A class
without copies has no place there: of the thousands that there may be few have any at a time. An entry that does not say any more
what is true of its copy is dropped when it comes up.
"""

from bisect import bisect_right
from collections.abc import Callable
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvstored.core.policies.ages import FIRST, LAST, Ages
from kvstored.core.policies.spells import EDGES, Floats

_EDGES = EDGES.tolist()
_ENDS = [*_EDGES, inf]
"""Of bins: the age at which the next one begins."""
_BIN_ENDS: Floats = np.asarray(_ENDS)
_SLACK = 256
_GROWTH = 64
_NONE = -1
_KNOWN = 2
"""Bits by which an end is shifted that changed to what is known."""
_FIRSTS, _LASTS = FIRST | FIRST << _KNOWN, LAST | LAST << _KNOWN
_FEW = 12
"""So many ends are rated one by one."""


class _Slot:
    """Copies of one class and weight. `at`: the places of its oldest and its newest one in the columns, where a single one is rated in the first alone;
    `changed`: which of these ends did."""

    __slots__ = ("ages", "at", "changed", "class_", "name", "size_max", "worth")

    def __init__(self, class_: int, weight: int, at: int) -> None:
        self.class_ = class_
        self.name = class_, weight
        self.worth = 2.0 ** (weight / 2)
        self.at = at
        self.ages = Ages()
        self.changed = 0
        self.size_max = _SLACK


class Candidates:
    """Of one tier and budget. `times(spell, row)`: when the spell began and the last use; None where the entry does not say any more what
    is, or the copy may not be evicted."""

    def __init__(self, times: Callable[[int, int], tuple[float, float] | None]) -> None:
        self._times = times
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._by_place: list[_Slot] = []
        self._changed: list[_Slot] = []
        self._spell = np.zeros(0)
        self._start_s = np.zeros(0)
        self._last_s = np.zeros(0)
        self._worth = np.zeros(0)
        self._due_s = np.zeros(0)
        """When the age comes into another bin."""
        self._class = np.zeros(0, dtype=np.int32)
        self._weight = np.zeros(0)
        self._rated_s = -inf
        self._rates: Floats | None = None
        """Time and tables of which `_worth` tells."""

    def push(
        self, class_: int, weight: int, spell: int, row: int, start_s: float, last_s: float
    ) -> None:
        """`weight`: the worth of a hit a byte, as a power of two in halves. Spells are numbered as they begin; this one began at `start_s`, with
        a use at `last_s`."""
        slot = self._slots.get((class_, weight))
        if slot is None:
            slot = self._slots[class_, weight] = self._added(class_, weight)
        ages = slot.ages
        ends = ages.add(spell, row)
        if ends:
            at = slot.at  # `_set`, inlined twice: this is called most of all in a decision
            if ends & FIRST:
                self._spell[at], self._start_s[at], self._last_s[at] = spell, start_s, last_s
            if ends & LAST:
                at += 1
                self._spell[at], self._start_s[at], self._last_s[at] = spell, start_s, last_s
            if not slot.changed:
                self._changed.append(slot)
            # the second one makes two ends of one
            known = ends if ages.size != 2 else FIRST | LAST
            slot.changed = slot.changed & ~ends | known << _KNOWN
        if ages.size > slot.size_max:
            self._sweep(slot)

    def remove(self, class_: int, weight: int, spell: int, row: int) -> None:
        """It is no candidate any more; where that is not said it is found out when it comes up."""
        slot = self._slots.get((class_, weight))
        if slot is not None and (ends := slot.ages.remove(spell, row)):
            self._change(slot, ends)

    def doubt(self, class_: int, weight: int) -> None:
        """Its ends are looked at again before the next one leaves."""
        slot = self._slots.get((class_, weight))
        if slot is not None:
            self._change(slot, FIRST | LAST)

    def pop_oldest(self) -> int | None:
        """The row that is unused for longest, taken out; of one time the first that was used then."""
        self._rates = None  # worths are not kept up meanwhile
        self._settle()
        while (at := self._least(self._last_s)) >= 0:
            if (row := self._taken(at)) != _NONE:
                return row
            self._settle()
        return None

    def pop_worst(self, rates: Floats, now_s: float) -> int | None:
        """The row of least rate times weight, taken out; of equals the oldest."""
        is_other = rates is not self._rates or now_s < self._rated_s
        self._rates = None if is_other else rates
        self._settle(now_s)
        if is_other:
            self._rates = rates
            self._rate_all(rates, now_s)
        elif now_s != self._rated_s:
            self._rate_due(rates, now_s)
        self._rated_s = now_s
        while (at := self._least(self._worth)) >= 0:
            if (row := self._taken(at)) != _NONE:
                return row
            self._settle(now_s)
        return None

    def _taken(self, at: int) -> int:
        """The row at this place; `_NONE` where it may not leave."""
        slot = self._by_place[at >> 1]
        if at & 1:
            spell, row = slot.ages.pop_last()
            self._change(slot, LAST)
        else:
            spell, row = slot.ages.pop_first()
            self._change(slot, FIRST)
        return _NONE if self._times(spell, row) is None else row

    def _change(self, slot: _Slot, ends: int) -> None:
        if not slot.changed:
            self._changed.append(slot)
        slot.changed |= ends

    def _settle(self, now_s: float = 0.0) -> None:
        """Looks at the ends that changed, and rates them where worths are kept up."""
        if not self._changed:
            return
        rates = self._rates
        for slot in self._changed:
            ends, slot.changed = slot.changed, 0
            if ends & (FIRST | LAST) and not self._look(slot, ends):
                continue
            if rates is None:
                continue
            if ends & _FIRSTS:
                self._rate(slot, slot.at, rates, now_s)
            if slot.ages.size == 1:
                self._worth[slot.at + 1] = self._due_s[slot.at + 1] = inf
            elif ends & _LASTS:
                self._rate(slot, slot.at + 1, rates, now_s)
        self._changed.clear()

    def _look(self, slot: _Slot, ends: int) -> bool:
        """What is at its ends now: one that may not leave would hide those behind it. False where nothing is left of it."""
        at, ages, times_of = slot.at, slot.ages, self._times
        if ends & FIRST:
            while ages.size:
                spell, row = ages.first()
                if (times := times_of(spell, row)) is not None:
                    self._set(at, spell, *times)
                    break
                ages.pop_first()
        if not ages.size:
            self._drop(slot)
            return False
        if ends & LAST:
            while ages.size > 1:
                spell, row = ages.last()
                if (times := times_of(spell, row)) is not None:
                    self._set(at + 1, spell, *times)
                    return True
                ages.pop_last()
            self._set(at + 1, ages.last()[0], self._start_s.item(at), self._last_s.item(at))
        return True

    def _set(self, at: int, spell: int, start_s: float, last_s: float) -> None:
        self._spell[at], self._start_s[at], self._last_s[at] = spell, start_s, last_s

    def _least(self, values: Floats) -> int:
        """Its place; -1 where there is none."""
        if not self._by_place:
            return -1
        at = int(values.argmin())
        equals = (values == values.item(at)).nonzero()[0]
        return at if len(equals) == 1 else equals.item(self._spell.take(equals).argmin())

    def _rate(self, slot: _Slot, at: int, rates: Floats, now_s: float) -> None:
        start_s = self._start_s.item(at)
        bin_ = bisect_right(_EDGES, now_s - start_s)
        self._worth[at] = rates.item(slot.class_, bin_) * slot.worth
        self._due_s[at] = start_s + _ENDS[bin_]

    def _rate_due(self, rates: Floats, now_s: float) -> None:
        """Those whose ages came into another bin."""
        due = (self._due_s <= now_s).nonzero()[0]
        if len(due) > _FEW:
            self._rate_many(due, rates, now_s)
            return
        for at in due.tolist():
            self._rate(self._by_place[at >> 1], at, rates, now_s)

    def _rate_all(self, rates: Floats, now_s: float) -> None:
        self._rate_many(np.arange(2 * len(self._by_place)), rates, now_s)
        for slot in self._by_place:
            if slot.ages.size == 1:
                self._worth[slot.at + 1] = self._due_s[slot.at + 1] = inf

    def _rate_many(self, at: NDArray[np.intp], rates: Floats, now_s: float) -> None:
        start_s = self._start_s[at]
        bins = EDGES.searchsorted(now_s - start_s, side="right")
        self._worth[at] = rates[self._class[at], bins] * self._weight[at]
        self._due_s[at] = start_s + _BIN_ENDS[bins]

    def _drop(self, slot: _Slot) -> None:
        """The last one takes its place."""
        del self._slots[slot.name]
        last = self._by_place.pop()
        at, source = slot.at, last.at
        if last is not slot:
            last.at = at
            self._by_place[at >> 1] = last
            for column in (self._spell, self._start_s, self._weight, self._class):
                column[at : at + 2] = column[source : source + 2]
        for column in (self._last_s, self._worth, self._due_s):
            column[at : at + 2] = column[source : source + 2]
            column[source : source + 2] = inf

    def _added(self, class_: int, weight: int) -> _Slot:
        slot = _Slot(class_, weight, 2 * len(self._by_place))
        self._by_place.append(slot)
        if slot.at == len(self._class):
            more = max(_GROWTH, slot.at)
            for name in ("_spell", "_start_s", "_last_s", "_worth", "_due_s", "_weight"):
                setattr(self, name, np.concatenate([getattr(self, name), np.full(more, inf)]))
            self._class = np.concatenate([self._class, np.zeros(more, dtype=np.int32)])
        self._class[slot.at : slot.at + 2] = class_
        self._weight[slot.at : slot.at + 2] = slot.worth
        return slot

    def _sweep(self, slot: _Slot) -> None:
        """Entries that are no more true would otherwise stay as long as they do not come up."""
        slot.ages.keep(lambda spell, row: self._times(spell, row) is not None)
        slot.size_max = 2 * slot.ages.size + _SLACK
        self._change(slot, FIRST | LAST)
