"""The source article's composite score, literally: last use plus the worth of what is known of a block's reuse.

The rank is a time in milliseconds: the touch, moved into the future by BONUS_S * log2(1 + hits) * cost, where cost is the block's prefill
FLOPs per byte relative to the first block of its namespace. Temperature classes come before time: cold first, then what was hit or has
several children, sinks last. A class once reached is kept. A baseline: fixed weights lose to plain LRU on real traces.
"""

import numpy as np

from kvstored.core.calls import TouchEvent
from kvstored.core.policies.ranked import Ranked
from kvstored.core.types import Rows

BONUS_S = 60.0
_CLASS_BIT, _ORDER_BITS = 57, 12
"""A rank is class, milliseconds of the wall clock (45 bits) and place within the touch, so that ties are explicit."""
_DEPTH_SCALE_BLOCKS = 120.0
"""Blocks after which attention makes a block's prefill about a third dearer (0.3 x depth/30,500 tokens of an 8B model, 256-token blocks)."""


class Article(Ranked):
    name = "article"

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        copies, blocks, tree = self._ledger.copies, self._ledger.blocks, self._ledger.tree
        at = copies.block[rows]
        hits = blocks.hits[at].astype(np.float64)
        depth = tree.depth[at].astype(np.float64)
        cost = 1.0 + 0.3 * depth / _DEPTH_SCALE_BLOCKS
        bonus_s = BONUS_S * np.log2(1.0 + hits) * cost
        used_s = np.minimum(blocks.last_s[at], now_s)
        ms = ((np.maximum(used_s, 0.0) + bonus_s) * 1000.0).astype(np.int64)
        shared = (hits > 0) | (tree.children[at] > 1)
        class_ = np.where(self._ledger.are_sinks(at), 2, shared).astype(np.int64)
        order = np.arange(len(rows)) % (1 << _ORDER_BITS)
        rank = (class_ << _CLASS_BIT) + (ms << _ORDER_BITS) + order
        copies.rank[rows] = np.maximum(copies.rank[rows], rank)
