"""What leaf-first LRU would have hit with the same space, so that a learned order that does worse is noticed.

Of blocks in a path the tail is touched first, so leaf-first LRU holds just the blocks that were used last: as many as are stored here. Whether
it would have hit a block follows from the block's last use alone, be the block stored or a ghost. Times are counted in slots.
"""

_SLOT_S = 1.0
BUDGET_REQUESTS = 10.0
"""The learned order gives way when it is behind by so many requests' blocks; what it was ahead before counts for twice that at most."""
WAIT_SHARE, WAIT_BLOCKS_MAX = 0.5, 1 << 22
"""It gets another chance when this share of all that was ever asked for, or so many blocks, came since: with a geometric series of chances, the
regret grows with the logarithm of the time. What it learns goes on meanwhile."""

STEPS_MAX = 65_536


class Rival:
    def __init__(self) -> None:
        self.asked = 0
        self.lead = 0.0
        """Blocks that were hit since the learned order had its last chance, less those that LRU would have hit."""
        self.is_ahead = False
        self._chance_at = 0.0
        self._used_at: dict[int, int] = {}
        """Blocks, stored or ghosts, by the slot of their last use."""
        self._highest = -1
        self._first = 0
        """LRU holds what was used in this slot or later."""
        self._newer = 0
        """How many blocks those are."""

    def began(self, blocks: int, now_s: float) -> None:
        """Blocks without a history were asked for."""
        self.asked += blocks
        self._add(int(now_s // _SLOT_S), blocks)

    def found(self, blocks: int, last_s: float) -> None:
        """Blocks are here from before a restart."""
        self._add(int(last_s // _SLOT_S), blocks)

    def used(self, blocks: int, last_s: float, now_s: float, *, was_stored: bool) -> None:
        slot = int(last_s // _SLOT_S)
        self.asked += blocks
        self.lead += blocks * was_stored - blocks * (slot >= self._first)
        self._add(slot, -blocks)
        self._add(int(now_s // _SLOT_S), blocks)

    def forgotten(self, blocks: int, last_s: float) -> None:
        """These ghosts are no more."""
        self._add(int(last_s // _SLOT_S), -blocks)

    def judge(self, stored: int, requests: int) -> None:
        """From time to time, with so many blocks stored now."""
        self._settle(stored)
        budget = BUDGET_REQUESTS * self.asked / max(requests, 1)
        self.lead = min(self.lead, 2 * budget)
        if not self.is_ahead and self.lead < -budget:
            self.is_ahead = True
            self._chance_at = self.asked + min(WAIT_SHARE * self.asked, WAIT_BLOCKS_MAX)
        elif self.is_ahead and self.asked >= self._chance_at:
            self.is_ahead, self.lead = False, 0.0

    def _settle(self, stored: int) -> None:
        """At most `STEPS_MAX` slots further: after a long silence it takes some calls."""
        used_at, first, newer = self._used_at, self._first, self._newer
        for _ in range(STEPS_MAX):
            if first > self._highest or newer - used_at.get(first, 0) < stored:
                break
            newer -= used_at.get(first, 0)
            first += 1
        lowest = min(used_at, default=first) if newer < stored else first
        for _ in range(STEPS_MAX):
            if newer >= stored or first <= lowest:
                break
            first -= 1
            newer += used_at.get(first, 0)
        self._first, self._newer = first, newer

    def _add(self, slot: int, blocks: int) -> None:
        if slot > self._highest:
            if self._highest < 0:
                self._first = slot  # wall-clock seconds: never from 0 on
            self._highest = slot
        left = self._used_at.get(slot, 0) + blocks
        if left > 0:
            self._used_at[slot] = left
        else:
            self._used_at.pop(slot, None)
        if slot >= self._first:
            self._newer += blocks
