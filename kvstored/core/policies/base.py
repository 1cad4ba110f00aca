"""The interface of eviction policies, and the lazy order that they share.

The policy owns the order of victims; the books say what may be evicted at all. Touching only writes ranks: the order is a heap of
(key when queued, row) integers, where the key of a first victim lies below all others. An entry whose key has grown since is queued again
when it comes up; a key shrinks only in `first`, which queues at once. So a rank never shrinks while its copy lives.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import Fingerprint, TouchEvent
from kvstored.core.columns import FIRST, QUEUED, Blocks, Copies
from kvstored.core.hints import Hint
from kvstored.core.tree import PrefixTree
from kvstored.core.types import Budget, Fingerprints, Part, Rows, TierId

RANK_BITS = 60
"""Ranks lie in [0, 2^60)."""
_FIRST_OFFSET = 1 << RANK_BITS
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_SLACK = 4096


class Ledger(Protocol):
    """What a policy sees of the books."""

    copies: Copies
    blocks: Blocks
    tree: PrefixTree

    def is_evictable(self, row: int) -> bool: ...

    def are_sinks(self, blocks: Rows) -> NDArray[np.bool_]: ...

    def weight(self, row: int) -> int:
        """What a hit of this copy saves a byte, as a power of two in halves."""

    def fingerprint(self, block: int) -> Fingerprint: ...

    def block_of(self, fingerprint: Fingerprint) -> int:
        """-1 where there is none."""

    def fingerprints_of(self, blocks: Rows) -> Fingerprints: ...


class Policy(Protocol):
    name: str

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        """Copy rows were used, in this order: a path comes tail to head, so that its tail leaves first; what is stored, head to tail."""

    def stored(self, rows: Rows, lengths: Sequence[int], now_s: float) -> None:
        """As `touch` for each of so many paths of copies in turn, one behind the other; no block is of two of them."""

    def offer(self, row: int) -> None:
        """The copy may be evicted from now on (leaf, ready, not read). Does nothing if it is queued already."""

    def first(self, rows: Rows) -> None:
        """Make copies first victims: retired, superseded, or below a lost block. They keep their ranks, and are ordinary
        copies again once the books clear FIRST."""

    def victim(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        """The first copy in order that may be evicted, taken out of the order; None when there is none."""

    def peek(self, tier: TierId, budget: Budget, now_s: float, most: int) -> list[int]:
        """The first of the copies that may be evicted now, in order; nothing is taken out, and nothing learned from it."""

    def follow(self, rows: Rows) -> int:
        """`rows`: a victim and copies each of which may be evicted once the one before it is gone. How many of them, from the first
        on, would be the next victims one after the other; at least 1."""

    def forget(self, blocks: Rows) -> None:
        """These rows of blocks are about to be given back; tree and index still know them."""

    def hint(self, rows: Rows, hint: Hint, now_s: float) -> None:
        """What is known of the request that just used these copies, tail to head."""

    def dump(self, now_s: float) -> bytes:
        """What was learned, for the next start; empty where nothing is."""

    def load(self, dumped: bytes, now_s: float) -> None:
        """Go on from a dump; `InvalidArgument` for one of another shape, with nothing changed."""

    def maintain(self, now_s: float) -> None:
        """Learn from what was seen: a few milliseconds at most, called beside the traffic, about once a second."""


class Peeking:
    """For policies whose `victim` does nothing but take a copy out."""

    def peek(self: Policy, tier: TierId, budget: Budget, now_s: float, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and (row := self.victim(tier, budget, now_s)) is not None:
            found.append(row)
        for row in found:
            self.offer(row)
        return found


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

    def first(self, rows: Rows) -> None:
        flags = self._ledger.copies.flags
        fresh = rows[flags[rows] & FIRST == 0]
        flags[fresh] |= FIRST
        for row in fresh[flags[fresh] & QUEUED != 0].tolist():
            self._push(row)

    def victim(self, tier: TierId, budget: Budget) -> int | None:
        heap = self._heaps.get((tier, budget), [])
        copies = self._ledger.copies
        while heap:
            entry = heappop(heap)
            row = entry & _ROW_MASK
            if not copies.flags[row] & QUEUED or not _belongs(copies, row, tier, budget):
                continue
            key, queued_key = self._key(row), entry >> _ROW_BITS
            if key > queued_key:
                heappush(heap, key << _ROW_BITS | row)
                continue
            if key < queued_key:
                continue  # `first` queued it again with its smaller key, or the row has another copy now
            copies.flags[row] &= ~QUEUED & 0xFF
            if self._ledger.is_evictable(row):
                return row
        return None

    def peek(self, tier: TierId, budget: Budget, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and (row := self.victim(tier, budget)) is not None:
            found.append(row)
        for row in found:
            self.offer(row)
        return found

    def _key(self, row: int) -> int:
        copies = self._ledger.copies
        rank = int(copies.rank[row])
        return rank - _FIRST_OFFSET if copies.flags[row] & FIRST else rank

    def _push(self, row: int) -> None:
        copies = self._ledger.copies
        key = (int(copies.tier[row]), int(budget_of(int(copies.part[row]))))
        heap = self._heaps.setdefault(key, [])
        heappush(heap, self._key(row) << _ROW_BITS | row)
        if len(heap) > 2 * copies.live + _SLACK:
            self._compact(*key)

    def _compact(self, tier: int, budget: int) -> None:
        """Entries of forgotten copies leave when they come up; without pressure they never do, so they are swept here."""
        copies = self._ledger.copies
        rows = np.flatnonzero(
            (copies.flags[: copies.top] & QUEUED != 0) & (copies.tier[: copies.top] == int(tier))
        )
        heap = [
            self._key(row) << _ROW_BITS | row
            for row in rows.tolist()
            if budget_of(int(copies.part[row])) == budget
        ]
        heapify(heap)
        self._heaps[tier, budget] = heap


def _belongs(copies: Copies, row: int, tier: TierId, budget: Budget) -> bool:
    return int(copies.tier[row]) == tier and budget_of(int(copies.part[row])) is budget
