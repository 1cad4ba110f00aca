"""A composite stamp: recency plus the worth of what is known of a block's reuse and of its recompute cost per byte.

The rank is a time in milliseconds: the touch, moved into the future by BONUS_S * log2(1 + hits) * cost, where cost is the block's prefill
FLOPs per byte relative to the first block of its namespace. Temperature classes come before time: cold first, sinks last.
Fixed weights of recency and frequency are not the best policy (they lose to plain LRU on some traces); the interface is what
a learned score needs.
"""

import numpy as np

from kvstored.core.calls import TouchEvent
from kvstored.core.columns import FIRST
from kvstored.core.policies.base import LazyOrder, Ledger
from kvstored.core.types import Budget, Rows, TierId

BONUS_S = 60.0
_CLASS_BIT, _ORDER_BITS = 50, 12
"""A rank is class, milliseconds (38 bits are 8 years) and place within the touch, so that ties are explicit."""
_DEPTH_SCALE_BLOCKS = 120.0
"""Blocks after which attention makes a block's prefill about a third dearer (0.3 x depth/30,500 tokens of an 8B model, 256-token blocks)."""


class Composite:
    name = "composite"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._order = LazyOrder(ledger)
        self._start_s: float | None = None

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        copies, blocks, tree = self._ledger.copies, self._ledger.blocks, self._ledger.tree
        rows = rows[copies.flags[rows] & FIRST == 0]
        if self._start_s is None:
            self._start_s = now_s
        at = copies.block[rows]
        hits = blocks.hits[at].astype(np.float64)
        depth = tree.depth[at].astype(np.float64)
        cost = 1.0 + 0.3 * depth / _DEPTH_SCALE_BLOCKS
        bonus_s = BONUS_S * np.log2(1.0 + hits) * cost
        ms = ((now_s - self._start_s + bonus_s) * 1000.0).astype(np.int64)
        shared = (hits > 0) | (tree.children[at] > 1) | (blocks.holds[at] > 0)
        order = np.arange(len(rows)) % (1 << _ORDER_BITS)
        copies.rank[rows] = (
            1 + (shared.astype(np.int64) << _CLASS_BIT) + (ms << _ORDER_BITS) + order
        )

    def offer(self, row: int) -> None:
        self._order.offer(row)

    def first(self, row: int) -> None:
        self._order.first(row)

    def victim(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        return self._order.victim(tier, budget)
