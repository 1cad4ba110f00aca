"""A store of one tier with nothing in it but what a policy sees: for sweeps over many capacities and policies.

It asks the same policy the same questions as the whole core does in `sim/core.py` (a test holds it to the same hits under every ranked policy), at a tenth
of its cost: no keys, places, leases or effects. A block's row is its copy's row, and a block is found by its id in the trace.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import Fingerprint, TouchEvent
from kvstored.core.columns import READY, Blocks, Copies, Defaults
from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.policies.named import policy_named
from kvstored.core.tree import PrefixTree
from kvstored.core.types import Budget, Fingerprints, Part, Rows, TierId
from kvstored.sim.measure import Served
from kvstored.sim.traces import BlockIds

_NONE = np.int32(-1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class _Blocks(Blocks):
    """The columns that are used here."""

    defaults: ClassVar[Defaults] = {
        name: Blocks.defaults[name] for name in ("ns", "first_copy", "hits", "last_s", "valid")
    }


class _Copies(Copies):
    defaults: ClassVar[Defaults] = {
        name: Copies.defaults[name]
        for name in ("block", "next", "tier", "part", "state", "flags", "units", "rank")
    }


class LeanModel:
    """A `Model` of sim/offline.py and the `Ledger` of its policy. `evictions`: ids in the order in which they left, where asked for."""

    def __init__(
        self,
        *,
        policy: str,
        capacity_blocks: int,
        block_tokens: int,
        evictions: list[int] | None = None,
    ) -> None:
        self.blocks: Blocks = _Blocks()
        self.copies: Copies = _Copies()
        self.tree = PrefixTree()
        self.evicted_blocks = 0
        self.written_blocks = 0
        self.policy = policy_named(policy, self)
        self._capacity_blocks = capacity_blocks
        self._block_tokens = block_tokens
        self._evictions = evictions
        self._is_followed = True
        """The last victim was, by those above it."""
        self._row: Rows = np.full(1024, -1, dtype=np.int32)
        """By id."""
        self._prints: Fingerprints = np.zeros((0, 2), dtype=np.uint64)
        """By row: the id, spread over the slots of a hash table and still one to one, and as it is."""

    def request(self, ts_s: float, block_ids: BlockIds, hint: Hint = NO_HINT) -> Served:
        count = len(block_ids)
        if not count:
            return Served(0, (0, 0, 0, 0), 0)
        self._know(int(block_ids.max()))
        rows = self._row[block_ids]
        absent = rows < 0
        hit = int(absent.argmax()) if absent[-1] else count
        if hit:
            found = rows[hit - 1 :: -1] if hit < count else rows[::-1]
            self.blocks.last_s[found] = ts_s
            self.policy.touch(found, TouchEvent.HINT, ts_s)
            self.blocks.hits[found] += 1
            self.policy.touch(found, TouchEvent.HIT, ts_s)
        if hit < count:
            rows[hit:] = self._store(block_ids[hit:], int(rows[hit - 1]) if hit else -1, ts_s)
        self.policy.touch(rows[::-1], TouchEvent.HINT, ts_s)
        if not self.tree.children[rows[-1]]:
            self.policy.offer(int(rows[-1]))
        if hint is not NO_HINT:
            self.policy.hint(rows[::-1], hint, ts_s)
        self._trim(ts_s)
        self.policy.maintain(ts_s)
        return Served(count, (0, hit, 0, 0), count - hit)

    def is_evictable(self, row: int) -> bool:
        return self.copies.state.item(row) == READY and not self.tree.children.item(row)

    def are_sinks(self, blocks: Rows) -> NDArray[np.bool_]:
        return np.zeros(len(blocks), dtype=np.bool_)

    def weight(self, row: int) -> int:
        return 0

    def fingerprint(self, block: int) -> Fingerprint:
        low, high = self.fingerprints_of(np.asarray([block], dtype=np.int32))[0].tolist()
        return low, high

    def block_of(self, fingerprint: Fingerprint) -> int:
        return int(self._row[fingerprint[1]])

    def fingerprints_of(self, blocks: Rows) -> Fingerprints:
        return self._prints.take(blocks, axis=0)

    def _store(self, ids: BlockIds, parent: int, ts_s: float) -> Rows:
        rows = self.blocks.take_many(len(ids))
        assert np.array_equal(rows, self.copies.take_many(len(ids)))
        self.tree.ensure(self.blocks.capacity)
        if self.blocks.capacity > len(self._prints):
            self._prints = np.resize(self._prints, (self.blocks.capacity, 2))
        self._row[ids] = rows
        at = rows.astype(np.intp)
        self._prints[at, 0] = ids.astype(np.uint64) * _SPREAD
        self._prints[at, 1] = ids
        self.blocks.ns[at] = 0
        self.blocks.valid[at] = self._block_tokens
        self.blocks.first_copy[at] = rows
        self.blocks.last_s[at] = ts_s
        self.copies.block[at] = rows
        self.copies.tier[at] = TierId.DRAM
        self.copies.part[at] = Part.DENSE
        self.copies.state[at] = READY
        self.copies.units[at] = 1
        self.tree.add_run(rows, parent)
        self.policy.touch(rows, TouchEvent.STORED, ts_s)
        return rows

    def _trim(self, ts_s: float) -> None:
        while (over := self.blocks.live - self._capacity_blocks) > 0:
            victim = self.policy.victim(TierId.DRAM, Budget.GLOBAL, ts_s)
            if victim is None:
                return
            self._drop(self._run_of(victim, over))

    def _run_of(self, victim: int, over: int) -> Rows:
        """The victim and those that follow it. Of an order that takes them one by one long runs are not made in vain."""
        run = self.tree.run_above(victim, over if self._is_followed else 2)
        if len(run) == 1:
            return run
        count = self.policy.follow(run)
        if count == 2 and not self._is_followed:
            run = self.tree.run_above(victim, over)
            count = self.policy.follow(run)
        self._is_followed = count > 1
        return run[:count]

    def _drop(self, run: Rows) -> None:
        parent = int(self.tree.parent[run[-1]])
        self.policy.forget(run)
        ids = self._prints[run, 1].astype(np.int64)
        self._row[ids] = _NONE
        if self._evictions is not None:
            self._evictions.extend(ids.tolist())
        self.evicted_blocks += len(run)
        self.tree.cut_run(run)
        self.blocks.give_many(run)
        self.copies.give_many(run)
        if parent >= 0 and not self.tree.children[parent]:
            self.policy.offer(parent)

    def _know(self, last_id: int) -> None:
        if last_id >= len(self._row):
            grown = np.full(max(2 * len(self._row), last_id + 1), -1, dtype=np.int32)
            grown[: len(self._row)] = self._row
            self._row = grown
