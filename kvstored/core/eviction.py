"""Room in a tier: which copies leave so that others fit.

The policy orders, the books allow, this module counts units. A budget that is within its limit is never shrunk for the other one.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Reason
from kvstored.core.classes import Classes
from kvstored.core.clearing import clear_run
from kvstored.core.columns import READY
from kvstored.core.feedback import Feedback
from kvstored.core.leaving import drop_victims, victims_from
from kvstored.core.policies.base import budget_of
from kvstored.core.space import TierBook
from kvstored.core.types import Budget, Part, Place, Rows, TierId


class Evictor:
    """`soft_pins`: pins that give way, oldest first, when nothing else in memory can; the claims module registers what each holds and
    how to release it. On disk they need not: pins have a share of it, and a write-back has time."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.feedback = Feedback(books)
        self.classes = Classes(books, self.feedback)
        self._shrinking: set[tuple[TierId, Budget]] = set()
        self.soft_pins: OrderedDict[int, tuple[Rows, Callable[[], bool]]] = OrderedDict()

    def room(
        self,
        tier: TierId,
        budget: Budget,
        units: list[int],
        now_s: float,
        near: Sequence[int] = (),
    ) -> list[Place] | None:
        """Places for pieces of these sizes, evicting as needed; None when that cannot be had (on disk: not yet). `near`: the segment where each
        would best be."""
        space = self._books.space
        need = sum(units)
        if need > space.limit(tier, budget) or tier in self._books.recovering | self._books.lost:
            return None
        book = space.books[tier]
        limit = space.limit(tier, budget)
        while (short := self._short(book, budget, limit, need)) > 0:
            over = space.over(tier, budget, need)
            if not over and book.discarding:
                return None
            debtor = self._debtor(tier, budget, over)
            if not self._evict(tier, debtor, Reason.DEMAND, now_s, units=short):
                return None
        places = space.take(tier, budget, units, near)
        return self._cleared(tier, budget, units, now_s) if places is None else places

    def plain_room(self, tier: TierId, units: int, count: int, now_s: float) -> int:
        """How many of `count` equal pieces there is room for, after evicting as for one after the other."""
        space, book = self._books.space, self._books.space.books[tier]
        limit, need = space.limit(tier, Budget.GLOBAL), units * count
        if units > limit or tier in self._books.recovering:
            return 0
        while (short := self._short(book, Budget.GLOBAL, limit, need)) > 0:
            over = book.used[Budget.GLOBAL] + need > limit
            if not over and book.discarding:
                break
            debtor = self._debtor(tier, Budget.GLOBAL, over)
            if not self._evict(tier, debtor, Reason.DEMAND, now_s, units=short):
                break
        free = min(limit - book.used[Budget.GLOBAL], book.extents.free_units)
        return max(0, min(count, free // units))

    def _short(self, book: TierBook, budget: Budget, limit: int, need: int) -> int:
        """Units that have to leave first for the budget's limit, then for space; none where this is not above 0."""
        return (
            book.used[budget] + need - limit
            if book.used[budget] + need > limit
            else need - book.extents.free_units
        )

    def _cleared(
        self, tier: TierId, budget: Budget, units: list[int], now_s: float
    ) -> list[Place] | None:
        """Enough is free, but in too many pieces: clear runs of it."""
        space = self._books.space
        need, largest = sum(units), space.books[tier].extents.segment_units_max
        for _ in range(need // max(1, largest) + 1):
            if space.books[tier].discarding:
                return None
            if not clear_run(self._books, tier, budget, min(need, largest), now_s):
                return None
            places = space.take(tier, budget, units)
            if places is not None:
                return places
        return None

    def trim(self, tier: TierId, now_s: float, copies_max: int | None) -> int:
        """Above the high watermark evict down to the low one; answers how many copies left.

        After `copies_max` of them it stops, and the next call goes on to the low watermark.
        """
        space = self._books.space
        limits = space.books[tier].limits
        evicted = 0
        for budget in Budget:
            limit = space.limit(tier, budget)
            if space.books[tier].used[budget] > int(limit * limits.high):
                self._shrinking.add((tier, budget))
            if (tier, budget) not in self._shrinking:
                continue
            low = int(limit * limits.low)
            while (over := space.books[tier].used[budget] - low) > 0:
                if evicted == copies_max:
                    return evicted
                most = over if copies_max is None else copies_max - evicted
                left = self._evict(tier, budget, Reason.WATERMARK, now_s, units=over, most=most)
                if not left:
                    break
                evicted += left
            self._shrinking.discard((tier, budget))
        return evicted

    def look(self, tier: TierId, now_s: float, runs_max: int) -> list[Rows]:
        """Copies that `trim` would take next, a run each, leaf first. The policy's order is as before afterwards."""
        space, policy = self._books.space, self._books.policy
        runs: list[Rows] = []
        for budget in Budget:
            limit, limits = space.limit(tier, budget), space.books[tier].limits
            used = space.books[tier].used[budget]
            is_shrinking = used > int(limit * limits.high) or (tier, budget) in self._shrinking
            left = used - int(limit * limits.low) if is_shrinking else 0
            victims = policy.peek(tier, budget, now_s, runs_max) if left > 0 else []
            for victim in self.classes.ordered(victims, now_s):
                if left <= 0:
                    break
                runs.append(victims_from(self._books, victim, left, 1 << 30))
                left -= int(self._books.copies.units[runs[-1]].sum())
        return runs

    def shed(self, tier: TierId, now_s: float, copies_max: int) -> int:
        """Evict whatever the watermarks, one copy of each budget in turn: what runs out is not the tier's space. How many left."""
        evicted = 0
        while evicted < copies_max:
            left = sum(self._evict(tier, budget, Reason.WATERMARK, now_s) for budget in Budget)
            if not left:
                break
            evicted += left
        return evicted

    def _debtor(self, tier: TierId, budget: Budget, over: bool) -> Budget:
        """Whose copy leaves: the own budget's, unless only the other one is over its limit."""
        other = Budget(1 - budget)
        if not over and self._books.space.over(tier, other, 0):
            return other
        return budget

    def _evict(
        self,
        tier: TierId,
        budget: Budget,
        reason: Reason,
        now_s: float,
        *,
        units: int = 1,
        most: int = 1 << 30,
    ) -> int:
        """The next victim leaves, and with it others until `units` or `most` copies have left; answers how many."""
        self.feedback.settle(now_s)
        victim = self._books.policy.victim(tier, budget, now_s)
        if victim is not None:
            chosen = self.classes.chosen(victim, tier, budget, now_s)
            if chosen != victim:  # what is above it is not next
                victim, most = chosen, 1
        if victim is None and tier <= TierId.DRAM and reason is Reason.DEMAND:
            victim = self._victim_of_pins(tier, budget, now_s)
        if victim is None and tier is TierId.NVME:
            victim = self._victim_of_frames(budget)
        if victim is None:
            return 0
        if int(self._books.blocks.ns[self._books.copies.block[victim]]) in self._books.retired:
            reason = Reason.RETIRED
        return drop_victims(self._books, victim, units, most, reason, now_s)

    def _victim_of_pins(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        for path, release in list(self.soft_pins.values()):
            if self._holds_any(path, tier, budget):
                release()
                victim = self._books.policy.victim(tier, budget, now_s)
                if victim is not None:
                    return victim
        return None

    def _victim_of_frames(self, budget: Budget) -> int | None:
        """The coldest copy that others refer to. It frees nothing, but one that hangs below what refers to it would keep that for ever."""
        books = self._books
        copies = books.copies
        mine = [
            copy
            for copy in books.space.frames.referred_to
            if books.is_idle(copy) and budget_of(int(copies.part[copy])) is budget
        ]
        return min(mine, key=lambda copy: (copies.rank.item(copy), copy), default=None)

    def _holds_any(self, path: Rows, tier: TierId, budget: Budget) -> bool:
        """Whether a path has copies there that nothing but a hold may keep."""
        copies = self._books.copies
        rows = self._books.copies_of_many(path)
        mine = (copies.part[rows] == Part.CHECKPOINT) == (budget is Budget.CHECKPOINT)
        idle = (copies.state[rows] == READY) & (copies.readers[rows] == 0)
        return bool(np.any(mine & idle & (copies.tier[rows] == tier)))
