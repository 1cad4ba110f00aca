"""How likely a block of a class is to return at its age, learned while it runs.

A *spell* is the time that a run of blocks is unused: it has a class and a start. It ends with a use (an event), or it is cut short: it is
still open, or its branch was superseded. From both, a survival curve a class over logarithmic bins of age; a class of few events leans
on its group, a group on all. The rate of a class at an age is the best achievable number of hits per second of storage from then on
(Gittins index). Spells of evicted blocks count as those of stored ones: what was evicted teaches most.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstored.errors import InvalidArgument

BINS = 40
_FIRST_EDGE_S, _RATIO = 0.25, 1.35
HORIZON_S = 1800.0
"""A spell that lasts longer counts as not returned: ages beyond it are not told apart."""
_SLOT_S = 2.0
"""Open spells are counted by their start, to so many seconds."""
_LEAN = 3.0
"""A class leans on its group with the weight of so many requests."""
REBUILD_AT, REBUILD_EVERY = (25, 50, 100), 200
"""Requests after which tables are made, early ones and then regularly."""
_HEAD = struct.Struct("<4sIIQQ")
_MAGIC = b"KVH3"

Floats = NDArray[np.float64]

_EDGES = [_FIRST_EDGE_S * _RATIO**i for i in range(BINS - 1)]
EDGES: Floats = np.asarray(_EDGES)
_WIDTHS = np.diff(np.concatenate([[0.0], EDGES, [EDGES[-1] * _RATIO]]))
_HORIZON_BIN = int(np.searchsorted(EDGES, HORIZON_S, side="right"))


def bin_of(age_s: float) -> int:
    return bisect_right(_EDGES, age_s)


class _Spells:
    """Of one class, in blocks: ended by a use and cut short, by bin of age; open, by slot of start."""

    __slots__ = ("cut", "ended", "open")

    def __init__(self) -> None:
        self.ended = [0.0] * BINS
        self.cut = [0.0] * BINS
        self.open: dict[int, int] = {}


class Hazard:
    """`group_of`: the group of a class, below `groups`. Times may be any clock that does not go back."""

    def __init__(self, classes: int, groups: int, group_of: Callable[[int], int]) -> None:
        self.requests = 0
        self.blocks = 0
        self.is_learned = False
        self.rates: Floats = np.zeros((classes, BINS))
        """By class and bin; meaningless before `is_learned`."""
        self._groups = np.asarray([group_of(class_) for class_ in range(classes)])
        self._group_count = groups
        self._spells: dict[int, _Spells] = {}
        self._due_at = REBUILD_AT[0]

    def begin(self, class_: int, start_s: float, blocks: int) -> None:
        spells = self._spells.get(class_)
        if spells is None:
            spells = self._spells[class_] = _Spells()
        slot = int(start_s // _SLOT_S)
        spells.open[slot] = spells.open.get(slot, 0) + blocks

    def used(self, class_: int, start_s: float, now_s: float, blocks: int) -> None:
        """Blocks of a spell end it with a use."""
        spells = self._close(class_, start_s, blocks)
        spells.ended[bin_of(now_s - start_s)] += blocks

    def cut(self, class_: int, start_s: float, now_s: float, blocks: int) -> None:
        """Blocks of a spell end it without one."""
        spells = self._close(class_, start_s, blocks)
        spells.cut[bin_of(now_s - start_s)] += blocks

    def rename(self, before: int, after: int, start_s: float, blocks: int) -> None:
        """An open spell turns out to be of another class."""
        self._close(before, start_s, blocks)
        self.begin(after, start_s, blocks)

    @property
    def is_due(self) -> bool:
        return self.requests >= self._due_at

    def rebuild(self, now_s: float) -> None:
        """New rates from all spells: a few milliseconds, independent of the blocks stored."""
        early = [requests for requests in REBUILD_AT if requests > self.requests]
        self._due_at = early[0] if early else self.requests + REBUILD_EVERY
        classes = sorted(self._spells)
        if not classes:
            return
        ended = np.asarray([self._spells[class_].ended for class_ in classes])
        exposed = np.asarray([_exposed(self._spells[class_], now_s) for class_ in classes])
        groups = self._groups[classes]
        group_ended = np.zeros((self._group_count, BINS))
        group_exposed = np.zeros_like(group_ended)
        np.add.at(group_ended, groups, ended)
        np.add.at(group_exposed, groups, exposed)
        lean = max(1.0, _LEAN * self.blocks / max(self.requests, 1))
        overall = (ended.sum(axis=0) + 1e-3) / (exposed.sum(axis=0) + 1.0)
        of_group = (group_ended + lean * overall) / (group_exposed + lean)
        hazard = (ended + lean * of_group[groups]) / (exposed + lean)
        seen = np.unique(groups)
        known = np.concatenate([hazard, of_group[seen], overall[None, :]])
        rates = _gittins(np.minimum(known, 0.999))
        of_group[:] = rates[-1]  # what nobody has seen is like all
        of_group[seen] = rates[len(classes) : -1]
        self.rates = of_group[self._groups]
        self.rates[classes] = rates[: len(classes)]
        self.is_learned = True

    def dump(self, now_s: float) -> bytes:
        """What was learned. Spells that are open are cut: who goes on from it begins new ones for what it finds."""
        rows = []
        for class_, spells in sorted(self._spells.items()):
            cut = _with_open(spells, now_s)
            rows.append(np.asarray([class_, *spells.ended, *cut], dtype="<f8").tobytes())
        head = _HEAD.pack(_MAGIC, len(self._groups), len(rows), self.requests, self.blocks)
        return head + b"".join(rows)

    def load(self, dumped: bytes, now_s: float) -> None:
        """Go on from a dump; one of another shape is refused and nothing changed."""
        is_head = len(dumped) >= _HEAD.size
        head = _HEAD.unpack_from(dumped) if is_head else (b"", 0, 0, 0, 0)
        width = 1 + 2 * BINS
        if (
            head[:2] != (_MAGIC, len(self._groups))
            or len(dumped) != _HEAD.size + 8 * width * head[2]
        ):
            raise InvalidArgument(f"no state of this policy: bytes={len(dumped)}")
        rows = np.frombuffer(dumped, dtype="<f8", offset=_HEAD.size).reshape(-1, width)
        classes = rows[:, 0]
        is_whole = np.isfinite(rows).all() and (rows >= 0).all() and (classes < head[1]).all()
        if not is_whole or (classes != np.floor(classes)).any():
            raise InvalidArgument("no state of this policy: a figure is out of its range")
        self.requests, self.blocks = head[3], head[4]
        self._spells = {}
        for class_, *figures in rows.tolist():
            spells = self._spells[int(class_)] = _Spells()
            spells.ended, spells.cut = figures[:BINS], figures[BINS:]
        if self.requests >= REBUILD_AT[0]:
            self.rebuild(now_s)

    def _close(self, class_: int, start_s: float, blocks: int) -> _Spells:
        spells = self._spells.get(class_)
        if spells is None:
            spells = self._spells[class_] = _Spells()
        slot = int(start_s // _SLOT_S)
        left = spells.open.get(slot, 0) - blocks
        if left > 0:
            spells.open[slot] = left
        else:  # where it began before the horizon it is counted as cut already
            spells.open.pop(slot, None)
        return spells


def _exposed(spells: _Spells, now_s: float) -> list[float]:
    """Blocks that were at risk in each bin: those that went on beyond it, ended in it, or half of those cut in it. Spells that began before
    the horizon are cut there, for good."""
    late = [slot for slot in spells.open if slot * _SLOT_S < now_s - HORIZON_S]
    for slot in late:
        spells.cut[_HORIZON_BIN] += spells.open.pop(slot)
    cut = _with_open(spells, now_s)
    exposed, beyond = [0.0] * BINS, 0.0
    for age in range(BINS - 1, -1, -1):
        exposed[age] = beyond + 0.5 * cut[age] + spells.ended[age]
        beyond += cut[age] + spells.ended[age]
    return exposed


def _with_open(spells: _Spells, now_s: float) -> list[float]:
    """What was cut, and what is open as if it were cut now."""
    cut = list(spells.cut)
    ages = EDGES.searchsorted(now_s - _SLOT_S * np.fromiter(spells.open, float), side="right")
    for age, blocks in zip(ages.tolist(), spells.open.values(), strict=True):
        cut[age] += blocks
    return cut


def _gittins(hazard: Floats) -> Floats:
    """By class and bin: the best, over all later ages, of hits until then a second of storage until then."""
    alive = np.ones((len(hazard), BINS + 1))
    np.cumprod(1.0 - hazard, axis=1, out=alive[:, 1:])
    stored = np.zeros_like(alive)
    np.cumsum(_WIDTHS * 0.5 * (alive[:, :-1] + alive[:, 1:]), axis=1, out=stored[:, 1:])
    rates = np.zeros_like(hazard)
    for age in range(BINS):
        hits = alive[:, age, None] - alive[:, age + 1 :]
        cost = np.maximum(stored[:, age + 1 :] - stored[:, age, None], 1e-12)
        rates[:, age] = (hits / cost).max(axis=1)
    return rates
