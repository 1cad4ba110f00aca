"""What policies of several lists share: a block is in one list, each list has its order of copies by rank, and a policy says which list yields.

Lists are of blocks, so that their sizes are exact: a block leaves its list when its row is given back. Entries of an order that say no more
what is true of their copy are dropped when they come up.
"""

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import Fingerprint
from kvstored.core.columns import FIRST, QUEUED
from kvstored.core.policies.base import Ledger, budget_of
from kvstored.core.policies.ranked import Ranked
from kvstored.core.types import Budget, Rows, TierId, as_rows

NO_LIST = 0
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_SLACK = 4096
_FIRSTS = -1
"""The list of first victims."""

Key = tuple[int, int, int]
"""Tier, budget and list."""


class Listed(Ranked):
    """A subclass says `touch`, `name` and `choose`. Lists are numbered from 1."""

    lists = 1

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._list: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        """By block."""
        self._sizes = [0] * (self.lists + 1)
        """Blocks by list; nothing is counted in `NO_LIST`."""
        self._heaps: dict[Key, list[int]] = {}

    def offer(self, row: int) -> None:
        copies = self._ledger.copies
        if not copies.flags[row] & QUEUED:
            copies.flags[row] |= QUEUED
            self._push(row)

    def first(self, rows: Rows) -> None:
        flags = self._ledger.copies.flags
        fresh = rows[flags[rows] & FIRST == 0]
        flags[fresh] |= FIRST
        for row in fresh[flags[fresh] & QUEUED != 0].tolist():
            self._push(row)

    def victim(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        row = self._top((tier, budget, _FIRSTS))
        if row is None:
            row = self.choose(tier, budget, now_s)
        if row is not None:
            self._ledger.copies.flags[row] &= ~QUEUED & 0xFF
        return row

    def peek(self, tier: TierId, budget: Budget, now_s: float, most: int) -> list[int]:
        """The oldest of each list, list by list: which list yields is decided, and learned from, only when something leaves."""
        found: list[int] = []
        for list_ in (_FIRSTS, *range(1, self.lists + 1)):
            while len(found) < most and (row := self._top((tier, budget, list_))) is not None:
                self._ledger.copies.flags[row] &= ~QUEUED & 0xFF
                found.append(row)
        for row in found:
            self.offer(row)
        return found

    def choose(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        """One of the `oldest` of the lists."""
        raise NotImplementedError

    def forget(self, blocks: Rows) -> None:
        known = blocks[blocks < len(self._list)]
        self._resize(self._list[known], -1)
        self._list[known] = NO_LIST

    def oldest(self, tier: TierId, budget: Budget, list_: int) -> int | None:
        """The copy of least rank of this list that may be evicted; it stays."""
        return self._top((tier, budget, list_))

    def move(self, blocks: Rows, to: NDArray[np.uint8] | int) -> None:
        """Each block once. Their copies that may be evicted are found in the new list."""
        self._room()
        before = self._list[blocks]
        self._list[blocks] = to
        self._resize(before, -1)
        self._resize(self._list[blocks], 1)
        copies, first = self._ledger.copies, self._ledger.blocks.first_copy
        for block in blocks[(before != self._list[blocks]) & (before != NO_LIST)].tolist():
            row = int(first[block])
            while row >= 0:
                if copies.flags[row] & QUEUED:
                    self._push(row)
                row = int(copies.next[row])

    def lists_of(self, blocks: Rows) -> NDArray[np.uint8]:
        self._room()
        return self._list[blocks]

    def _resize(self, lists: NDArray[np.uint8], by: int) -> None:
        for list_ in lists.tolist():
            if list_ != NO_LIST:
                self._sizes[list_] += by

    def _room(self) -> None:
        grown = self._ledger.blocks.capacity - len(self._list)
        if grown > 0:
            self._list = np.concatenate((self._list, np.zeros(grown, dtype=np.uint8)))

    def _top(self, key: Key) -> int | None:
        heap, copies = self._heaps.get(key, []), self._ledger.copies
        while heap:
            entry = heap[0]
            row = entry & _ROW_MASK
            rank = int(copies.rank[row])
            if not copies.flags[row] & QUEUED or self._key(row) != key:
                heappop(heap)
                if (
                    key[2] == _FIRSTS
                    and copies.flags[row] & QUEUED
                    and not copies.flags[row] & FIRST
                ):
                    self._push(row)  # an ordinary one again, whose entry may have come up meanwhile
            elif rank != entry >> _ROW_BITS:
                heappop(heap)
                heappush(heap, rank << _ROW_BITS | row)
            elif self._ledger.is_evictable(row):
                return row
            else:
                copies.flags[row] &= ~QUEUED & 0xFF  # it is offered again when it may go
                heappop(heap)
        return None

    def _push(self, row: int) -> None:
        key, copies = self._key(row), self._ledger.copies
        heap = self._heaps.setdefault(key, [])
        heappush(heap, int(copies.rank[row]) << _ROW_BITS | row)
        if len(heap) > 2 * copies.live + _SLACK:  # without pressure nothing comes up
            heap[:] = {each for each in heap if self._key(each & _ROW_MASK) == key}
            heapify(heap)

    def _key(self, row: int) -> Key:
        copies = self._ledger.copies
        is_first = copies.flags[row] & FIRST
        list_ = _FIRSTS if is_first else int(self._list[copies.block[row]])
        return int(copies.tier[row]), int(budget_of(int(copies.part[row]))), list_


def blocks_of(ledger: Ledger, rows: Rows) -> Rows:
    """Blocks of these copies, each once, in their order."""
    return as_rows(list(dict.fromkeys(ledger.copies.block[rows].tolist())))


def named(ledger: Ledger, blocks: Rows) -> list[Fingerprint]:
    return [(low, high) for low, high in ledger.fingerprints_of(blocks).tolist()]
