"""What policies share whose order is one rank a copy: a touch writes ranks, the lazy order finds the least."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import TouchEvent
from kvstored.core.hints import Hint
from kvstored.core.policies.base import LazyOrder, Ledger
from kvstored.core.types import Budget, Rows, TierId


class Ranked:
    """A subclass says `touch` and `name`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._order = LazyOrder(ledger)
        self._age = 0
        self._touches = 1

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        raise NotImplementedError

    def stored(self, rows: Rows, lengths: Sequence[int], now_s: float) -> None:
        begin = 0
        for count in lengths:
            self.touch(rows[begin : begin + count], TouchEvent.STORED, now_s)
            begin += count

    def offer(self, row: int) -> None:
        self._order.offer(row)

    def first(self, rows: Rows) -> None:
        self._order.first(rows)

    def victim(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        return self._order.victim(tier, budget)

    def peek(self, tier: TierId, budget: Budget, now_s: float, most: int) -> list[int]:
        return self._order.peek(tier, budget, most)

    def follow(self, rows: Rows) -> int:
        return 1

    def forget(self, blocks: Rows) -> None:
        pass

    def hint(self, rows: Rows, hint: Hint, now_s: float) -> None:
        pass

    def maintain(self, now_s: float) -> None:
        pass

    def dump(self, now_s: float) -> bytes:
        return b""

    def load(self, dumped: bytes, now_s: float) -> None:
        pass

    def _order_of(self, count: int) -> NDArray[np.int64]:
        """Numbers that rise from touch to touch, to break ties."""
        numbers = np.arange(self._touches, self._touches + count)
        self._touches += count
        return numbers
