"""How likely a block of a class is to return at its age, learned while it runs.

A *spell* is the time that a run of blocks is unused: it has a class and a start. It ends with a use (an event), or it is cut short: it is
still open. From both, the hazard of each class by logarithmic bins of age. A class of few events leans on the coarser one that it is part of, and
so on up to all; what its other traits make of it is a factor for each, by how many more events there were with that trait than expected. The rate
of a class at an age is the best achievable number of hits per second of storage from then on (Gittins index). Spells of evicted blocks count as
those of stored ones: what was evicted teaches most.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from kvstored.core.policies.profiles import (
    CLASSES_MAX,
    LEVELS,
    TRAITS,
    Profile,
    Profiles,
    above,
    pack,
    unpack,
)
from kvstored.core.policies.spells import BINS, WEIGHT_POWER, WIDTHS, Floats, Spells
from kvstored.errors import InvalidArgument

_LEAN = 3.0
"""A class leans on the coarser one with the weight of so many requests."""
_TRAIT_LEAN = 10.0
"""And the factor of a trait on 1, with so many requests that were expected to return."""
_TRAIT_BINS = 5
"""Bins of age that have one factor."""
REBUILD_AT, REBUILD_EVERY = (25, 50, 100), 200
"""Requests after which tables are made, early ones and then regularly."""
PART_CLASSES = 2048
"""Of so many at once rates are made, 7 ms: the daemon's loop waits meanwhile."""
_HEAD = struct.Struct("<4sIQQ")
_MAGIC = b"KVH4"
_HAZARD_MAX = 0.999
_IS_LATER = np.triu(np.ones((BINS, BINS), dtype=np.bool_))

Ints = NDArray[np.int64]


class Hazard:
    """Times may be any clock that does not go back."""

    def __init__(self) -> None:
        self.requests = 0
        self.blocks = 0
        self.is_learned = False
        self.rates: Floats = np.zeros((CLASSES_MAX, BINS))
        """By class and bin; meaningless before `is_learned`."""
        self.spells = Spells()
        self._classes = Profiles()
        self.spells.grow()
        self.profiles = self._classes.profiles
        """By class."""
        self._fine: Floats = np.zeros((LEVELS[-1], BINS))
        self._factors: list[Floats] = []
        """Of the last tables: hazards of the finest level, and factors of each trait by value."""
        self._due_at = REBUILD_AT[0]
        self._begun: tuple[Floats, Floats] | None = None
        """Hazards by class of the tables that are being made, and their rates."""
        self._made = 0
        """Of how many classes there are rates yet."""

    def class_of(self, profile: Profile) -> int:
        """One that is new is worth what the last tables make of its parts (30 us)."""
        number = self._classes.number(profile)
        if number * BINS == len(self.spells.ended):
            self.spells.grow()
            if self.is_learned:
                self.rates[number] = self._rates_of(number)
        return number

    def maintain(self, now_s: float) -> None:
        """Makes new tables when they are due, a part a call."""
        if self._begun is None:
            if self.requests < self._due_at:
                return
            self._begin(now_s)
            if len(self._classes) > PART_CLASSES:
                return
        self._go_on()

    def rebuild(self, now_s: float) -> None:
        """New rates from all spells, whether they are due or not: some milliseconds, independent of the blocks stored."""
        self._begin(now_s)
        while self._begun is not None:
            self._go_on()

    def _begin(self, now_s: float) -> None:
        early = [requests for requests in REBUILD_AT if requests > self.requests]
        self._due_at = early[0] if early else self.requests + REBUILD_EVERY
        ended, exposed = self.spells.at_risk(now_s)
        request = max(1.0, self.blocks / max(self.requests, 1)) ** WEIGHT_POWER
        nodes = np.array(self._classes.nodes, dtype=np.int64)
        self._fine = _by_level(ended, exposed, nodes, _LEAN * request)
        hazard = self._fine[nodes]
        traits = np.array(self._classes.traits, dtype=np.int64).reshape(-1, len(TRAITS))
        events = _in_parts(ended)
        self._factors = []
        for trait, values in enumerate(TRAITS):
            expected = _in_parts(exposed * hazard)
            factors = _factors(events, expected, traits[:, trait], values, request)
            self._factors.append(factors)
            hazard *= factors[traits[:, trait]]
        self._begun, self._made = (hazard, np.zeros_like(self.rates)), 0

    def _go_on(self) -> None:
        assert self._begun is not None, "no tables were begun"
        hazard, rates = self._begun
        part = slice(self._made, min(self._made + PART_CLASSES, len(hazard)))
        rates[part] = _gittins(hazard[part])
        self._made = part.stop
        if self._made < len(hazard):
            return
        for late in range(len(hazard), len(self._classes)):
            rates[late] = self._rates_of(late)
        self.rates, self.is_learned, self._begun = rates, True, None

    def _rates_of(self, class_: int) -> Floats:
        """By the last tables."""
        hazard = self._fine[self._classes.nodes[class_]].copy()
        first = class_ * len(TRAITS)
        values = self._classes.traits[first : first + len(TRAITS)]
        for factors, value in zip(self._factors, values, strict=True):
            hazard *= factors[value]
        return _gittins_of(hazard)

    def dump(self, now_s: float) -> bytes:
        """What was learned. Spells that are open are cut: who goes on from it begins new ones for what it finds."""
        ended, cut = np.array(self.spells.ended).reshape(-1, BINS), self.spells.with_open(now_s)
        known = np.flatnonzero(ended.any(axis=1) | cut.any(axis=1))
        names = np.asarray([pack(self.profiles[i]) for i in known.tolist()], dtype=np.float64)
        rows = np.column_stack((names, ended[known], cut[known]))[np.argsort(names)]
        head = _HEAD.pack(_MAGIC, len(rows), self.requests, self.blocks)
        return head + rows.astype("<f8").tobytes()

    def load(self, dumped: bytes, now_s: float) -> None:
        """Go on from a dump; one of another shape is refused and nothing changed."""
        is_head = len(dumped) >= _HEAD.size
        head = _HEAD.unpack_from(dumped) if is_head else (b"", 0, 0, 0)
        width = 1 + 2 * BINS
        if head[0] != _MAGIC or len(dumped) != _HEAD.size + 8 * width * head[1]:
            raise InvalidArgument(f"no state of this policy: bytes={len(dumped)}")
        rows = np.frombuffer(dumped, dtype="<f8", offset=_HEAD.size).reshape(-1, width)
        names = rows[:, 0]
        is_whole = np.isfinite(rows).all() and (rows[:, : 1 + BINS] >= 0).all()
        if not is_whole or (names != np.floor(names)).any() or len(rows) > CLASSES_MAX:
            raise InvalidArgument("no state of this policy: a figure is out of its range")
        found = [unpack(int(name)) for name in names.tolist()]
        known = [profile for profile in found if profile is not None]
        if len(known) < len(found):
            raise InvalidArgument("no state of this policy: a class is out of its range")
        self.requests, self.blocks = head[2], head[3]
        self.spells = Spells()
        for _ in self.profiles:
            self.spells.grow()
        for profile, figures in zip(known, rows[:, 1:].tolist(), strict=True):
            at = self.class_of(profile) * BINS
            for i in range(BINS):
                self.spells.ended[at + i] += figures[i]
                self.spells.cut[at + i] += figures[BINS + i]
        if self.requests >= REBUILD_AT[0]:
            self.rebuild(now_s)


def _by_level(ended: Floats, exposed: Floats, nodes: Ints, lean: float) -> Floats:
    """Hazards of the finest level, each leaning on the one above."""
    sums = [_summed(ended, exposed, nodes, LEVELS[-1])]
    for level in reversed(range(len(LEVELS) - 1)):
        parents = np.asarray(above(range(LEVELS[level + 1]), level))
        sums.append(_summed(*sums[-1], parents, LEVELS[level]))
    overall = (ended.sum(axis=0) + 1e-3) / (exposed.sum(axis=0) + 1.0)
    hazard: Floats = np.tile(overall, (LEVELS[0], 1))
    for level, (events, risk) in enumerate(reversed(sums)):
        if level:
            hazard = hazard[above(range(LEVELS[level]), level - 1)]
        hazard = (events + lean * hazard) / (risk + lean)
    return hazard


def _factors(ended: Floats, expected: Floats, values: Ints, count: int, request: float) -> Floats:
    """By value and bin: how many more ended than expected, of what is told in parts."""
    events, risk = _summed(ended, expected, values, count)
    lean = _TRAIT_LEAN * request
    overall = (events.sum(axis=1) + lean) / (risk.sum(axis=1) + lean)
    factors = (events + lean * overall[:, None]) / (risk + lean)
    repeated: Floats = np.repeat(factors, _TRAIT_BINS, axis=1)
    return repeated


def _summed(ended: Floats, exposed: Floats, to: Ints, count: int) -> tuple[Floats, Floats]:
    """Rows added up by what they are part of."""
    width = ended.shape[1]
    cells = (to[:, None] * width + np.arange(width)).ravel()
    events, risk = (
        np.asarray(np.bincount(cells, figures.ravel(), count * width), dtype=np.float64)
        for figures in (ended, exposed)
    )
    return events.reshape(count, width), risk.reshape(count, width)


def _in_parts(figures: Floats) -> Floats:
    """Added up by the bins that have one factor."""
    parts: Floats = figures[:, ::_TRAIT_BINS].copy()
    for after in range(1, _TRAIT_BINS):
        parts += figures[:, after::_TRAIT_BINS]
    return parts


def _gittins_of(hazard: Floats) -> Floats:
    """The same of one class, in a few calls."""
    alive, stored = np.ones(BINS + 1), np.zeros(BINS + 1)
    np.cumprod(1.0 - np.minimum(hazard, _HAZARD_MAX), out=alive[1:])
    np.cumsum(WIDTHS * 0.5 * (alive[:-1] + alive[1:]), out=stored[1:])
    cost = np.maximum(stored[1:] - stored[:-1, None], 1e-12)
    rates: Floats = np.where(_IS_LATER, (alive[:-1, None] - alive[1:]) / cost, 0.0).max(axis=1)
    return rates


def _gittins(hazard: Floats) -> Floats:
    """By class and bin: the best, over all later ages, of hits until then a second of storage until then. Bins are rows here: twice as fast."""
    shape = (BINS + 1, len(hazard))
    alive, stored = np.ones(shape), np.zeros(shape)
    np.cumprod(1.0 - np.minimum(hazard.T, _HAZARD_MAX), axis=0, out=alive[1:])
    np.cumsum(WIDTHS[:, None] * 0.5 * (alive[:-1] + alive[1:]), axis=0, out=stored[1:])
    rates = np.zeros((BINS, len(hazard)))
    for age in range(BINS):
        cost = np.maximum(stored[age + 1 :] - stored[age], 1e-12)
        np.max((alive[age] - alive[age + 1 :]) / cost, axis=0, out=rates[age])
    return np.ascontiguousarray(rates.T)
