"""Baseline after the workload-aware policy of "KVCache Cache in the Wild" (ATC 2025, arXiv 2506.02634), rebuilt from what is published of it.

A category is how often a block was used. Of each: the share of its blocks that were used again, and the mean time until then, taken as exponential.
A victim is the block that is least likely to be used within the time that an evicted block had been there unused; in a category that is
the least recently used one.
"""

from collections import OrderedDict
from math import exp, expm1

import numpy as np

from kvstored.core.calls import Fingerprint, TouchEvent
from kvstored.core.policies.base import Ledger
from kvstored.core.policies.lists import Listed, blocks_of, named
from kvstored.core.types import Budget, Rows, TierId

USES_EDGES = (2, 3, 5, 9, 33)
GHOSTS_MAX = 1 << 18
"""Some 200 bytes each."""
_STEP = 0.01
"""What an eviction moves the window of residence by."""


class Category:
    """Counts of blocks: `ended` spells of disuse, `reused` of them by a use, after so many seconds in all."""

    def __init__(self) -> None:
        self.ended = 2.0
        self.reused = 1.0
        self.reuse_s = 60.0

    def used_within(self, window_s: float, age_s: float) -> float:
        """How likely a block of this age is used in the window that follows."""
        share, mean_s = self.reused / self.ended, max(self.reuse_s / self.reused, 1e-3)
        later = share * exp(-age_s / mean_s)
        return later * -expm1(-window_s / mean_s) / max(later + 1.0 - share, 1e-12)


class Wa(Listed):
    name = "wa"
    lists = len(USES_EDGES) + 1

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.categories = [Category() for _ in range(self.lists)]
        self.window_s = 60.0
        self._last_s = np.zeros(0)
        """By block, as are the uses."""
        self._uses = np.zeros(0, dtype=np.int32)
        self._gone: OrderedDict[Fingerprint, tuple[float, int]] = OrderedDict()

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        blocks = blocks_of(self._ledger, rows)
        self.lists_of(blocks)
        grown = len(self._list) - len(self._uses)
        self._uses = np.concatenate((self._uses, np.zeros(grown, dtype=np.int32)))
        self._last_s = np.concatenate((self._last_s, np.zeros(grown)))
        fresh = blocks[self._uses[blocks] == 0]
        for block, name in zip(fresh.tolist(), named(self._ledger, fresh), strict=True):
            self._returns(block, name, now_s)
        if event is TouchEvent.HIT:
            categories, ages_s = self._category(blocks), now_s - self._last_s[blocks]
            for category in set(categories.tolist()):
                mine = ages_s[categories == category]
                self._count(category, len(mine), float(mine.sum()))
            self._uses[blocks] += 1
        self._last_s[blocks] = now_s
        self.move(blocks, (self._category(blocks) + 1).astype(np.uint8))
        order = rows[::-1] if event is TouchEvent.STORED else rows
        self._ledger.copies.rank[order] = self._order_of(len(rows))

    def choose(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        best: tuple[float, float, int] | None = None
        for list_ in range(1, self.lists + 1):
            row = self.oldest(tier, budget, list_)
            if row is not None:
                last_s = float(self._last_s[self._ledger.copies.block[row]])
                worth = self.categories[list_ - 1].used_within(self.window_s, now_s - last_s)
                best = min(best or (2.0, 0.0, 0), (worth, last_s, row))
        if best is None:
            return None
        self.window_s += _STEP * (now_s - best[1] - self.window_s)
        return best[2]

    def forget(self, blocks: Rows) -> None:
        known = blocks[self.lists_of(blocks) > 0]
        history = zip(self._last_s[known].tolist(), self._uses[known].tolist(), strict=True)
        self._gone.update(zip(named(self._ledger, known), history, strict=True))
        for list_ in self._list[known].tolist():
            self.categories[list_ - 1].ended += 1
        super().forget(blocks)
        self._uses[blocks[blocks < len(self._uses)]] = 0
        while len(self._gone) > GHOSTS_MAX:
            self._gone.popitem(last=False)

    def _returns(self, block: int, name: Fingerprint, now_s: float) -> None:
        """A block that is new here, or comes back after it was evicted: that was a reuse too, already counted as ended."""
        last_s, uses = self._gone.pop(name, (now_s, 0))
        if uses:
            category = int(np.searchsorted(USES_EDGES, uses, side="right"))
            self._count(category, 1, now_s - last_s)
            self.categories[category].ended -= 1
        self._uses[block] = uses + 1

    def _count(self, category: int, blocks: int, reuse_s: float) -> None:
        mine = self.categories[category]
        mine.ended += blocks
        mine.reused += blocks
        mine.reuse_s += reuse_s

    def _category(self, blocks: Rows) -> Rows:
        return np.searchsorted(USES_EDGES, self._uses[blocks], side="right").astype(np.int32)
