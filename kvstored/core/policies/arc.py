"""Baseline ARC (Megiddo and Modha, FAST 2003), leaf first: what was used once and what was used more often are two LRU lists; ghosts of either that
return move the border between them."""

from collections import OrderedDict

import numpy as np

from kvstored.core.calls import Fingerprint, TouchEvent
from kvstored.core.policies.base import Ledger
from kvstored.core.policies.lists import NO_LIST, Listed, blocks_of, named
from kvstored.core.types import Budget, Rows, TierId

ONCE, OFTEN = 1, 2


class Arc(Listed):
    name = "arc"
    lists = 2

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.once_target = 0.0
        """Blocks that the list of those used once should have."""
        self._gone: dict[int, OrderedDict[Fingerprint, None]] = {
            ONCE: OrderedDict(),
            OFTEN: OrderedDict(),
        }
        self._was_gone_often = False
        """The block that came last was a ghost of those used more often."""

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        blocks = blocks_of(self._ledger, rows)
        lists = self.lists_of(blocks)
        fresh = blocks[lists == NO_LIST]
        into = [self._into(name) for name in named(self._ledger, fresh)]
        self.move(fresh, np.asarray(into, dtype=np.uint8))
        if event is TouchEvent.HIT:
            self.move(blocks[lists != NO_LIST], OFTEN)
        order = rows[::-1] if event is TouchEvent.STORED else rows
        self._ledger.copies.rank[order] = self._order_of(len(rows))

    def choose(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        once, often = (self.oldest(tier, budget, list_) for list_ in (ONCE, OFTEN))
        size = self._sizes[ONCE]
        is_over = size > self.once_target or (self._was_gone_often and size == self.once_target)
        return once if often is None or (once is not None and is_over) else often

    def forget(self, blocks: Rows) -> None:
        capacity = self._sizes[ONCE] + self._sizes[OFTEN]
        lists = self.lists_of(blocks)
        for list_ in (ONCE, OFTEN):
            names = named(self._ledger, blocks[lists == list_])
            self._gone[list_].update(dict.fromkeys(names))
        super().forget(blocks)
        once, often = self._gone[ONCE], self._gone[OFTEN]
        while once and self._sizes[ONCE] + len(once) > capacity:
            once.popitem(last=False)
        while often and len(once) + len(often) > capacity:
            often.popitem(last=False)

    def _into(self, name: Fingerprint) -> int:
        """The list of a block that is new here."""
        once, often = self._gone[ONCE], self._gone[OFTEN]
        self._was_gone_often = name in often
        if name in once:
            step = max(1.0, len(often) / len(once))
            capacity = self._sizes[ONCE] + self._sizes[OFTEN]
            self.once_target = min(self.once_target + step, capacity)
            del once[name]
        elif self._was_gone_often:
            step = max(1.0, len(once) / len(often))
            self.once_target = max(self.once_target - step, 0.0)
            del often[name]
        else:
            return ONCE
        return OFTEN
