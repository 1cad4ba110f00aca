"""Space of the tiers in units: who uses how much, which budgets are full, what waits for its discard, where late writers may live."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import TierLimits
from kvstored.core.columnar import Places, places_in
from kvstored.core.extents import Extents
from kvstored.core.frames import Frames
from kvstored.core.types import UNIT_BYTES, Budget, Extent, Place, TierId
from kvstored.core.views import TierUse

SUSPECTS_MAX = 1024
"""Runs of suspect space that are told apart; beyond it whole segments are suspect."""


def units_of(length: int) -> int:
    return -(-length // UNIT_BYTES)


def units_in(place: Iterable[Extent]) -> int:
    return sum(extent.units for extent in place)


@dataclass(slots=True)
class TierBook:
    """One tier. `used` by budget; `leased`: of copies being read; `sinks`: of exempt sinks; `quarantined`: kept aside for late writers;
    `aside`: held for puts to come; `discarding`: forgotten, but its records are not yet off the disk; `pinned`: of pinned blocks."""

    limits: TierLimits
    extents: Extents = field(default_factory=Extents)
    used: list[int] = field(default_factory=lambda: [0, 0])
    copies: int = 0
    dirty: int = 0
    leased: int = 0
    pinned: int = 0
    sinks: int = 0
    quarantined: int = 0
    aside: int = 0
    discarding: int = 0

    @property
    def granted(self) -> int:
        return min(self.limits.capacity_units, self.extents.capacity_units)


class Space:
    """`has_checkpoints`: a namespace with window or state groups is open, so that their budget is set aside. `frames`: which extents on
    NVMe others need."""

    def __init__(self, tiers: Sequence[TierLimits]) -> None:
        self.books = {tier.tier: TierBook(tier) for tier in tiers}
        self.has_checkpoints = False
        self.frames = Frames()
        self.suspects: list[Extent] = []
        self._discards: dict[int, tuple[TierId, tuple[Place, ...]]] = {}
        self._token = 0

    def limit(self, tier: TierId, budget: Budget) -> int:
        book = self.books[tier]
        checkpoints = int(book.granted * book.limits.checkpoint_share) * self.has_checkpoints
        if budget is Budget.CHECKPOINT:
            return checkpoints
        aside = book.quarantined + book.aside + self.kept_units(tier)
        return max(0, book.granted - checkpoints - aside)

    def kept_units(self, tier: TierId) -> int:
        """Of extents whose own copies are gone: others refer to them."""
        return self.frames.orphaned_units if tier is TierId.NVME else 0

    def over(self, tier: TierId, budget: Budget, units: int) -> bool:
        return self.books[tier].used[budget] + units > self.limit(tier, budget)

    def take(
        self, tier: TierId, budget: Budget, units: list[int], near: Sequence[int] = ()
    ) -> list[Place] | None:
        """Places for several pieces, laid out back to back where possible; with `near` each in this segment if it has room. Counts
        nothing: adding pieces does."""
        if self.over(tier, budget, sum(units)):
            return None
        extents = self.books[tier].extents
        if near:
            return self._take_near(extents, units, near)
        if len(units) == 1:
            place = extents.take(units[0])
            return None if place is None else [place]
        return extents.take_run(units)

    def _take_near(
        self, extents: Extents, units: list[int], near: Sequence[int]
    ) -> list[Place] | None:
        places: list[Place] = []
        for need, segment in zip(units, near, strict=True):
            place = extents.take_in(segment, need) or extents.take(need)
            if place is None:
                for taken in places:
                    extents.give(taken)
                return None
            places.append(place)
        return places

    def take_equal(self, tier: TierId, budget: Budget, units: int, count: int) -> Places | None:
        """As `take` for `count` pieces of the same size, each in one extent; None where that is not to be had."""
        if self.over(tier, budget, units * count):
            return None
        runs = self.books[tier].extents.take_equal(units, count)
        return None if runs is None else places_in(runs, units)

    def give_memory(self, tier: TierId, places: Places) -> None:
        """Places in memory return at once, those that touch as one."""
        order = np.lexsort((places.start, places.segment))
        segment, start, units = (column[order] for column in places)
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = (segment[1:] != segment[:-1]) | (start[1:] != start[:-1] + units[:-1])
        first = np.flatnonzero(begins)
        lengths = np.add.reduceat(units, first)
        runs = zip(segment[first].tolist(), start[first].tolist(), lengths.tolist(), strict=True)
        self.books[tier].extents.give(tuple(Extent(*run) for run in runs))

    def give(self, tier: TierId, places: tuple[Place, ...]) -> int:
        """Space returns: at once in memory (0), after the discard of its records on disk (a token for `discarded`). What others refer to
        stays until they are gone too, whose records are discarded before."""
        book = self.books[tier]
        if tier <= TierId.DRAM:
            for place in places:
                book.extents.give(place)
            return 0
        self._token += 1
        given = tuple(self.frames.leaving(places))
        self._discards[self._token] = (tier, given)
        book.discarding += sum(units_in(place) for place in given)
        return self._token

    def discarded(self, token: int) -> None:
        tier, places = self._discards.pop(token)
        book = self.books[tier]
        for place in places:
            book.extents.give(place)
            book.discarding -= units_in(place)

    def suspect(self, place: Place) -> None:
        """From now on copies in this space are hashed at every read: a late writer may still write there."""
        self.suspects.extend(place)
        if len(self.suspects) > SUSPECTS_MAX:
            segments = sorted({extent.segment for extent in self.suspects})
            self.suspects = [Extent(segment, 0, 1 << 32) for segment in segments]

    def is_suspect(self, place: Place) -> bool:
        return any(
            extent.segment == other.segment
            and extent.start < other.start + other.units
            and other.start < extent.start + extent.units
            for extent in place
            for other in self.suspects
        )

    def are_suspect(self, places: Places) -> NDArray[np.bool_]:
        """`is_suspect` of many places of one extent each."""
        found = np.zeros(places.size, dtype=np.bool_)
        for other in self.suspects:
            here = places.segment == other.segment
            here &= places.start < other.start + other.units
            found |= here & (other.start < places.start + places.units)
        return found

    def use(self) -> list[TierUse]:
        """In the slowest tier no copy is dirty: there is none below that it could lack."""
        slowest = max(self.books)
        return [
            TierUse(
                tier=tier,
                capacity_units=book.limits.capacity_units,
                granted_units=book.granted,
                used_units=sum(book.used) + self.kept_units(tier),
                copies=book.copies,
                dirty_copies=0 if tier is slowest else book.dirty,
                leased_units=book.leased,
                pinned_units=book.pinned,
                quarantined_units=book.quarantined,
                aside_units=book.aside,
                kept_units=self.kept_units(tier),
                fragmentation=book.extents.fragmentation(),
            )
            for tier, book in sorted(self.books.items())
        ]
