"""Counts of spells of disuse by class: ended by a use and cut short, by bin of age; open, by slot of start.

A run of many blocks that comes back is one event more than it is many: a spell weighs a power of its blocks, which it keeps however it ends, in
parts too.
"""

from array import array
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BINS = 40
_FIRST_EDGE_S, _RATIO = 0.25, 1.35
HORIZON_S = 3600.0
"""A spell that lasts longer counts as not returned: ages beyond it are not told apart."""
OPEN_MAX = 1 << 17
"""Classes and slots with open spells, some 150 bytes each; beyond it the oldest are cut."""
WEIGHT_POWER = 0.6
_SLOT_S = 2.0
"""Open spells are counted by their start, to so many seconds."""
_CLASS_BITS = 16
_WEIGHTS = [float(blocks**WEIGHT_POWER) for blocks in range(256)]

_EDGES = [_FIRST_EDGE_S * _RATIO**i for i in range(BINS - 1)]
EDGES: Floats = np.asarray(_EDGES)
WIDTHS: Floats = np.diff(np.concatenate([[0.0], EDGES, [EDGES[-1] * _RATIO]]))
_HORIZON_BIN = int(np.searchsorted(EDGES, HORIZON_S, side="right"))


def bin_of(age_s: float) -> int:
    return bisect_right(_EDGES, age_s)


def weight_of(blocks: int) -> float:
    return _WEIGHTS[blocks] if blocks < len(_WEIGHTS) else float(blocks**WEIGHT_POWER)


class Spells:
    """Of classes below `len(ended) / BINS`; `grow` makes room. `cut` is below 0 where spells came in from another class at that age."""

    def __init__(self, open_max: int = OPEN_MAX) -> None:
        self.ended = array("d")
        self.cut = array("d")
        self._open_max = open_max
        self._open: dict[int, int] = {}
        """Place by slot and class."""
        self._names = array("q")
        self._blocks = array("q")
        self._weights = array("d")
        self._free: list[int] = []

    def __len__(self) -> int:
        """Classes and slots with open spells."""
        return len(self._open)

    def grow(self) -> None:
        """One class more."""
        self.ended.extend([0.0] * BINS)
        self.cut.extend([0.0] * BINS)

    def begin(self, class_: int, start_s: float, blocks: int, times: int = 1) -> None:
        """So many of so many blocks each."""
        weight = weight_of(blocks)
        for _ in range(times):
            self._add(class_, start_s, blocks, weight)

    def extend(self, class_: int, start_s: float, blocks: int, more: int) -> None:
        """A spell of so many blocks has more: together they weigh what they would have at once."""
        self._add(class_, start_s, more, weight_of(blocks + more) - weight_of(blocks))

    def used(self, class_: int, start_s: float, now_s: float, blocks: int) -> None:
        """Blocks of a spell end it with a use."""
        weight = self._take(class_, start_s, blocks)
        # one that began before the horizon was counted as cut there
        self.ended[class_ * BINS + bin_of(now_s - start_s)] += weight or weight_of(blocks)

    def rename(self, before: int, after: int, start_s: float, blocks: int) -> None:
        """An open spell turns out to be of another class."""
        slot = int(start_s // _SLOT_S) << _CLASS_BITS
        place = self._open.get(slot | before)
        if place is None:
            return
        if self._blocks[place] > blocks or slot | after in self._open:
            self._add(after, start_s, blocks, self._take(before, start_s, blocks))
            return
        del self._open[slot | before]
        self._open[slot | after] = place
        self._names[place] = slot | after

    def turn(self, before: int, after: int, start_s: float, now_s: float, blocks: int) -> None:
        """An open spell goes on as one of another class: each is at risk for its part."""
        if weight := self._take(before, start_s, blocks):
            age = bin_of(now_s - start_s)
            self.cut[before * BINS + age] += weight
            self.cut[after * BINS + age] -= weight
            self._add(after, start_s, blocks, weight)

    def at_risk(self, now_s: float) -> tuple[Floats, Floats]:
        """By class and bin: what ended there, and what was at risk there: what went on beyond it, ended in it, or half of what was cut in it.
        Spells that began before the horizon are cut there, for good."""
        first = int((now_s - HORIZON_S) // _SLOT_S)
        for name in [name for name in self._open if name >> _CLASS_BITS < first]:
            self._cut_open(name, now_s)
        ended: Floats = np.array(self.ended).reshape(-1, BINS)
        cut = self.with_open(now_s)
        gone = ended + cut
        beyond = np.cumsum(gone[:, ::-1], axis=1)[:, ::-1] - gone
        return ended, np.maximum(beyond + 0.5 * cut + ended, 0.0)

    def with_open(self, now_s: float) -> Floats:
        """What was cut, and what is open as if it were cut now."""
        cut: Floats = np.array(self.cut)
        places = np.fromiter(self._open.values(), dtype=np.int64, count=len(self._open))
        names = np.array(self._names, dtype=np.int64)[places]
        ages = EDGES.searchsorted(now_s - _SLOT_S * (names >> _CLASS_BITS), side="right")
        at = (names & ((1 << _CLASS_BITS) - 1)) * BINS + ages
        cut += np.bincount(at, np.array(self._weights)[places], minlength=len(cut))
        return cut.reshape(-1, BINS)

    def _cut_open(self, name: int, now_s: float) -> None:
        place = self._open.pop(name)
        self._free.append(place)
        class_, slot = name & ((1 << _CLASS_BITS) - 1), name >> _CLASS_BITS
        age = min(bin_of(now_s - slot * _SLOT_S), _HORIZON_BIN)
        self.cut[class_ * BINS + age] += self._weights[place]

    def _add(self, class_: int, start_s: float, blocks: int, weight: float) -> None:
        name = int(start_s // _SLOT_S) << _CLASS_BITS | class_
        place = self._open.get(name)
        if place is not None:
            self._blocks[place] += blocks
            self._weights[place] += weight
            return
        if self._free:
            place = self._free.pop()
            self._names[place], self._blocks[place], self._weights[place] = name, blocks, weight
        else:
            place = len(self._names)
            self._names.append(name)
            self._blocks.append(blocks)
            self._weights.append(weight)
        self._open[name] = place
        if len(self._open) > self._open_max:
            self._cut_open(next(iter(self._open)), start_s)

    def _take(self, class_: int, start_s: float, blocks: int) -> float:
        """The weight of so many blocks that are open no more; 0 where they were cut before."""
        name = int(start_s // _SLOT_S) << _CLASS_BITS | class_
        place = self._open.get(name)
        if place is None:
            return 0.0
        left = self._blocks[place] - blocks
        if left <= 0:
            del self._open[name]
            self._free.append(place)
            return self._weights[place]
        weight = self._weights[place] * blocks / self._blocks[place]
        self._blocks[place] = left
        self._weights[place] -= weight
        return weight
