"""Baselines by frequency: LFU and GreedyDual-Size-Frequency, leaf first."""

import numpy as np

from kvstored.core.calls import TouchEvent
from kvstored.core.policies.ranked import Ranked
from kvstored.core.types import Budget, Rows, TierId

_ORDER_BITS = 40
_COUNT_MAX = (1 << 18) - 1
_SCALE = 1 << 20


class Lfu(Ranked):
    """Least often used first; of equals the least recent."""

    name = "lfu"

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        copies, blocks = self._ledger.copies, self._ledger.blocks
        count = np.minimum(blocks.hits[copies.block[rows]].astype(np.int64), _COUNT_MAX)
        rank = (count << _ORDER_BITS) + self._order_of(len(rows))
        copies.rank[rows] = np.maximum(copies.rank[rows], rank)


class Gdsf(Ranked):
    """Uses times recompute cost a unit of space, above the age of the cache: the rank of the last victim."""

    name = "gdsf"

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        copies, blocks = self._ledger.copies, self._ledger.blocks
        at = copies.block[rows]
        value = (1.0 + blocks.hits[at]) / np.maximum(copies.units[rows], 1)
        rank = self._age + (value * _SCALE).astype(np.int64) * _SCALE
        copies.rank[rows] = np.maximum(copies.rank[rows], rank + self._order_of(len(rows)))

    def victim(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        row = super().victim(tier, budget, now_s)
        if row is not None:
            self._age = max(self._age, int(self._ledger.copies.rank[row]))
        return row
