"""Leaf-first least recently used, one order a tier: the rank is the number of the touch.

It ignores temperature classes; sinks are exempt in the books. Within a request the tail leaves before the head.
"""

from collections.abc import Sequence

import numpy as np

from kvstored.core.calls import TouchEvent
from kvstored.core.columns import FIRST
from kvstored.core.policies.ranked import Ranked
from kvstored.core.types import Rows


class Lru(Ranked):
    name = "lru"

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        self._ledger.copies.rank[rows] = np.arange(self._touches, self._touches + len(rows))
        self._touches += len(rows)

    def stored(self, rows: Rows, lengths: Sequence[int], now_s: float) -> None:
        self.touch(rows, TouchEvent.STORED, now_s)

    def follow(self, rows: Rows) -> int:
        """Ranks are whole and distinct, and the victim's is the least of all that may be evicted: whatever ranks before it, or right
        after it and those of its followers that rank after it, is the next."""
        copies = self._ledger.copies
        rank = copies.rank[rows]
        later = np.cumsum(rank > rank[0])
        fine = (rank[1:] <= rank[0] + 1 + later[:-1]) & (np.diff(copies.flags[rows] & FIRST) == 0)
        return 1 + (len(fine) if fine.all() else int(np.argmin(fine)))
