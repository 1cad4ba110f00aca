"""The interface of eviction policies, and the lazy order that they share.

The policy owns the order of victims; the books say what may be evicted at all. Touching only writes ranks: the order is a heap of
(rank when queued, row) integers, and an entry whose rank has grown since is queued again when it comes up. A rank may shrink only
through `first`, which queues at once.
"""

from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

from kvstored.core.calls import TouchEvent
from kvstored.core.columns import FIRST, QUEUED, Blocks, Copies
from kvstored.core.tree import PrefixTree
from kvstored.core.types import Budget, Part, Rows, TierId

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_SLACK = 4096


class Ledger(Protocol):
    """What a policy sees of the books."""

    copies: Copies
    blocks: Blocks
    tree: PrefixTree

    def is_evictable(self, row: int) -> bool: ...


class Policy(Protocol):
    name: str

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        """Copy rows were used, in this order (a path comes tail to head, so that its tail leaves first). Array writes only."""

    def offer(self, row: int) -> None:
        """The copy may be evicted from now on (leaf, ready, not read). Does nothing if it is queued already."""

    def first(self, row: int) -> None:
        """Make the copy a first victim: retired, superseded, or below a lost block."""

    def victim(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        """The first copy in order that may be evicted, taken out of the order; None when there is none."""


def budget_of(part: int) -> Budget:
    return Budget.CHECKPOINT if part == Part.CHECKPOINT else Budget.GLOBAL


class LazyOrder:
    """Heaps of candidates, one a (tier, budget)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heaps: dict[tuple[int, int], list[int]] = {}

    def offer(self, row: int) -> None:
        copies = self._ledger.copies
        if copies.flags[row] & QUEUED:
            return
        copies.flags[row] |= QUEUED
        self._push(row)

    def first(self, row: int) -> None:
        """Duplicates are harmless: only an entry of the current rank counts, and a forgotten row is not evictable."""
        copies = self._ledger.copies
        copies.flags[row] |= FIRST
        copies.rank[row] = 0
        if copies.flags[row] & QUEUED:
            self._push(row)

    def victim(self, tier: TierId, budget: Budget) -> int | None:
        heap = self._heaps.get((tier, budget), [])
        copies = self._ledger.copies
        while heap:
            entry = heappop(heap)
            row = entry & _ROW_MASK
            if not copies.flags[row] & QUEUED or not _belongs(copies, row, tier, budget):
                continue
            rank = int(copies.rank[row])
            if rank > entry >> _ROW_BITS:
                heappush(heap, rank << _ROW_BITS | row)
                continue
            if rank < entry >> _ROW_BITS:
                continue  # `first` queued it again with its smaller rank
            copies.flags[row] &= ~QUEUED & 0xFF
            if self._ledger.is_evictable(row):
                return row
        return None

    def _push(self, row: int) -> None:
        copies = self._ledger.copies
        key = (int(copies.tier[row]), int(budget_of(int(copies.part[row]))))
        heap = self._heaps.setdefault(key, [])
        heappush(heap, int(copies.rank[row]) << _ROW_BITS | row)
        if len(heap) > 2 * copies.live + _SLACK:
            self._compact(*key)

    def _compact(self, tier: int, budget: int) -> None:
        """Entries of forgotten copies leave when they come up; without pressure they never do, so they are swept here."""
        copies = self._ledger.copies
        rows = np.flatnonzero(
            (copies.flags[: copies.top] & QUEUED != 0) & (copies.tier[: copies.top] == tier)
        )
        heap = [
            int(copies.rank[row]) << _ROW_BITS | int(row)
            for row in rows
            if budget_of(int(copies.part[row])) == budget
        ]
        heapify(heap)
        self._heaps[tier, budget] = heap


def _belongs(copies: Copies, row: int, tier: TierId, budget: Budget) -> bool:
    return bool(copies.tier[row] == tier) and budget_of(int(copies.part[row])) is budget
