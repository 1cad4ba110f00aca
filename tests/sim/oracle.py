"""Leaf-first LRU as the traces' README defines it, as plainly as it can be said; the oracle for the real core."""

from collections import OrderedDict

from kvstored.core.hints import NO_HINT, Hint
from kvstored.sim.measure import NO_BLOCKS, Served, TierBlocks
from kvstored.sim.traces import BlockIds


class LeafLru:
    """Order is age: a request's blocks are moved to the young end from tail to head, then the old end is trimmed."""

    def __init__(self, capacity_blocks: int | None) -> None:
        self.capacity_blocks = capacity_blocks
        self.evicted_blocks = 0
        self.written_blocks = 0
        self.stored: OrderedDict[int, None] = OrderedDict()

    def request(self, ts_s: float, block_ids: BlockIds, hint: Hint = NO_HINT) -> Served:
        ids = block_ids.tolist()
        hits = next((i for i, block in enumerate(ids) if block not in self.stored), len(ids))
        puts = 0
        for block in reversed(ids):
            puts += block not in self.stored
            self.stored[block] = None
            self.stored.move_to_end(block)
        while self.capacity_blocks is not None and len(self.stored) > self.capacity_blocks:
            self.stored.popitem(last=False)
            self.evicted_blocks += 1
        tiers: TierBlocks = (NO_BLOCKS[0], hits, *NO_BLOCKS[2:])
        return Served(len(ids), tiers, puts)
