"""Baseline S3-FIFO (Yang et al., SOSP 2023), leaf first: a small queue lets one-hit wonders go, a main queue keeps what was used in the small one, ghosts
of the small queue go to the main one when they return."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import Fingerprint, TouchEvent
from kvstored.core.policies.base import Ledger
from kvstored.core.policies.lists import NO_LIST, Listed, blocks_of, named
from kvstored.core.types import Budget, Rows, TierId

SMALL, MAIN = 1, 2
SMALL_SHARE = 0.1
USES_MAX = 3


class S3Fifo(Listed):
    name = "s3fifo"
    lists = 2

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._uses: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        """By block, since it came into its queue."""
        self._ghosts: OrderedDict[Fingerprint, None] = OrderedDict()
        """What left from the small queue, as many as the main one has."""

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        blocks = blocks_of(self._ledger, rows)
        lists = self.lists_of(blocks)
        grown = len(self._list) - len(self._uses)
        self._uses = np.concatenate((self._uses, np.zeros(grown, dtype=np.uint8)))
        if event is TouchEvent.HIT:
            self._uses[blocks] = np.minimum(self._uses[blocks] + 1, USES_MAX)
        fresh = lists == NO_LIST
        if fresh.any():
            self._insert(blocks[fresh])
        copies = self._ledger.copies
        behind = rows[copies.rank[rows] == 0][::-1]  # a path's tail before its head
        copies.rank[behind] = self._order_of(len(behind))

    def choose(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        while True:
            small, main = (self.oldest(tier, budget, list_) for list_ in (SMALL, MAIN))
            is_full = self._sizes[SMALL] >= SMALL_SHARE * sum(self._sizes)
            row = small if main is None or (small is not None and is_full) else main
            if row is None:
                return None
            block = self._ledger.copies.block[[row]]
            uses = int(self._uses[block[0]])
            if row == small and uses > 1:
                self._uses[block] = 0
                self._behind(row)
                self.move(block, MAIN)
            elif row == main and uses:
                self._uses[block] = uses - 1
                self._behind(row)
            else:
                return row

    def forget(self, blocks: Rows) -> None:
        small = blocks[self.lists_of(blocks) == SMALL]
        self._ghosts.update(dict.fromkeys(named(self._ledger, small)))
        super().forget(blocks)
        self._uses[blocks[blocks < len(self._uses)]] = 0
        while len(self._ghosts) > max(self._sizes[MAIN], 1):
            self._ghosts.popitem(last=False)

    def _insert(self, blocks: Rows) -> None:
        names = named(self._ledger, blocks)
        known = [name in self._ghosts for name in names]
        for name in names:
            self._ghosts.pop(name, None)
        self.move(blocks, np.where(known, MAIN, SMALL).astype(np.uint8))

    def _behind(self, row: int) -> None:
        self._ledger.copies.rank[row] = self._order_of(1)[0]
