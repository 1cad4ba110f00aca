"""Baseline S3-FIFO (Yang et al., SOSP 2023), leaf first: a small queue lets one-hit wonders go, a main queue keeps what was used in the small one, ghosts
of the small queue go to the main one when they return.

The hands pass all blocks, not leaves alone. A block with children cannot leave, and each use of a child is one of it, so it is taken for used: the
small queue's hand sends it on, the main one's gives it another round. When hands saw leaves only, inner blocks filled the small queue far beyond
its tenth, so that each new leaf left at once and the main queue gave nothing back: half the hits of leaf-first LRU on agents.
"""

from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import Fingerprint, TouchEvent
from kvstored.core.columns import FIRST, QUEUED
from kvstored.core.policies.base import Ledger, budget_of
from kvstored.core.policies.lists import NO_LIST, Key, Listed, blocks_of, named
from kvstored.core.types import Budget, Rows, TierId, as_rows

SMALL, MAIN = 1, 2
SMALL_SHARE = 0.1
USES_MAX = 3
_SLACK = 4096

Arrival = tuple[int, int]
"""Rank and row of a copy: true while the copy has this rank."""
_EMPTY: deque[Arrival] = deque()


class S3Fifo(Listed):
    name = "s3fifo"
    lists = 2

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._uses: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        """By block, since it came into its queue."""
        self._ghosts: OrderedDict[Fingerprint, None] = OrderedDict()
        """What left from the small queue, as many as the main one has room for."""
        self._queues: dict[Key, deque[Arrival]] = {}
        """Of all copies; the heaps know those that may leave."""
        self._newest: dict[Key, tuple[int, int]] = {}
        """Of a queue the block that came last, where its path makes up the end of the queue, and how many of them."""

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
        new = rows[copies.rank[rows] == 0]
        new = new if event is TouchEvent.STORED else new[::-1]
        copies.rank[new] = self._order_of(len(new))
        for row in new.tolist():
            self._come(row)

    def choose(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        share = SMALL_SHARE * sum(self._sizes)
        row = self._pass_small(tier, budget, share)
        if row is None:
            row = self._pass_main(tier, budget)
        if row is None:
            row = self._pass_small(tier, budget, 0.0)
        if row is None:  # all leaves were sent on meanwhile
            row = self.oldest(tier, budget, MAIN)
        return self.oldest(tier, budget, SMALL) if row is None else row

    def _pass_small(self, tier: TierId, budget: Budget, blocks_min: float) -> int | None:
        """The first that may leave, as long as the queue is that large. What comes before it was used, or has children: to the main queue."""
        copies, queue = self._ledger.copies, self._queues.get((tier, budget, SMALL), _EMPTY)
        for _ in range(len(queue)):
            if self._sizes[SMALL] < blocks_min:
                return None
            rank, row = queue[0]
            block = copies.block.item(row)
            if copies.rank.item(row) != rank or self._list.item(block) != SMALL:
                queue.popleft()
                continue
            is_offered = self._is_offered(row)
            is_evictable = self._ledger.is_evictable(row)
            if is_offered and is_evictable and self._uses.item(block) <= 1:
                return row
            queue.popleft()
            if is_evictable and not is_offered:
                self._newest.pop((tier, budget, SMALL), None)
                queue.append((rank, row))  # first victims, and what was taken out and may come back
            else:
                self._promote(block)
        return None

    def _pass_main(self, tier: TierId, budget: Budget) -> int | None:
        """The first that may leave and was not used since it came up last."""
        oldest = self.oldest(tier, budget, MAIN)
        if oldest is None:
            return None
        copies, queue = self._ledger.copies, self._queues.get((tier, budget, MAIN), _EMPTY)
        for _ in range((USES_MAX + 1) * len(queue)):
            rank, row = queue[0]
            block = copies.block.item(row)
            if copies.rank.item(row) != rank or self._list.item(block) != MAIN:
                queue.popleft()
                continue
            uses = self._uses.item(block)
            if uses:
                self._uses[block] = uses - 1
            elif self._is_offered(row) and self._ledger.is_evictable(row):
                return row
            self._newest.pop((tier, budget, MAIN), None)
            queue.rotate(-1)
        return oldest

    def follow(self, rows: Rows) -> int:
        """Those that come up next in the victim's queue, would not be sent on, and while it stays this queue's turn."""
        copies, key = self._ledger.copies, self._queue_of(int(rows[0]))
        list_ = key[2]
        uses_max = 1 if list_ == SMALL else 0
        small, blocks = self._sizes[SMALL], sum(self._sizes)
        count = 0
        for row, (rank, queued) in zip(rows.tolist(), self._queues.get(key, _EMPTY), strict=False):
            block = copies.block.item(row)
            if row != queued or copies.rank.item(row) != rank or self._list.item(block) != list_:
                break
            if self._uses.item(block) > uses_max or copies.flags.item(row) & FIRST:
                break
            gone = count if list_ == SMALL else 0
            if (small - gone >= SMALL_SHARE * (blocks - count)) != (list_ == SMALL):
                break
            count += 1
        return max(count, 1)

    def forget(self, blocks: Rows) -> None:
        small = blocks[self.lists_of(blocks) == SMALL]
        self._ghosts.update(dict.fromkeys(named(self._ledger, small)))
        super().forget(blocks)
        gone = set(blocks.tolist())
        self._newest = {key: last for key, last in self._newest.items() if last[0] not in gone}
        self._uses[blocks[blocks < len(self._uses)]] = 0
        ghosts_max = max((1 - SMALL_SHARE) * sum(self._sizes), 1)
        while len(self._ghosts) > ghosts_max:
            self._ghosts.popitem(last=False)

    def _insert(self, blocks: Rows) -> None:
        names = named(self._ledger, blocks)
        known = [name in self._ghosts for name in names]
        for name in names:
            self._ghosts.pop(name, None)
        self.move(blocks, np.where(known, MAIN, SMALL).astype(np.uint8))

    def _is_offered(self, row: int) -> bool:
        return self._ledger.copies.flags.item(row) & (QUEUED | FIRST) == QUEUED

    def _promote(self, block: int) -> None:
        self._uses[block] = 0
        self.move(as_rows([block]), MAIN)
        row = int(self._ledger.blocks.first_copy[block])
        while row >= 0:
            self._arrive(row)
            row = int(self._ledger.copies.next[row])

    def _come(self, row: int) -> None:
        """A new copy, head of a path first: it goes before those of its path that came just now, since a tail leaves before its head."""
        key, copies = self._queue_of(row), self._ledger.copies
        block, queue = copies.block.item(row), self._queues.get(key, _EMPTY)
        above, count = self._newest.get(key, (-1, 0))
        if above >= 0 and self._ledger.tree.parent.item(block) == above:
            queue.insert(max(0, len(queue) - count), (copies.rank.item(row), row))
        else:
            self._arrive(row)
            count = 0
        self._newest[key] = block, count + 1

    def _arrive(self, row: int) -> None:
        """A copy without a rank comes with its first touch."""
        copies = self._ledger.copies
        rank, key = copies.rank.item(row), self._queue_of(row)
        if not rank:
            return
        self._newest.pop(key, None)
        queue = self._queues.setdefault(key, deque())
        queue.append((rank, row))
        if len(queue) > 2 * copies.live + _SLACK:  # without pressure no hand passes
            self._queues[key] = deque(
                each
                for each in queue
                if copies.rank.item(each[1]) == each[0]
                and self._list.item(copies.block.item(each[1])) == key[2]
            )

    def _queue_of(self, row: int) -> Key:
        copies = self._ledger.copies
        block = copies.block.item(row)
        return (
            copies.tier.item(row),
            int(budget_of(copies.part.item(row))),
            self._list.item(block),
        )
