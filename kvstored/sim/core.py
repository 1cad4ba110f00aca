"""The real core as a model of the offline replay: the daemon's Catalog and policies, without bytes and with the trace's time.

A request is served as the daemon serves it: match, hold and load what is hit, reserve and commit the rest, touch the path, let go, write
back. What is hit is held by a running request, not by a lease: the same protection, without the list of pieces that nobody reads
here (40 us a block). Copies between tiers take no time. A block takes one unit of every tier, and capacities are
exact: high and low watermark are the capacity, nothing filters what is written to the slower tier, nothing is exempt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvstored.core.bundles import Signal, bundle_named
from kvstored.core.calls import (
    CopyTask,
    FillStatus,
    Fingerprint,
    Freed,
    Limits,
    Parents,
    Reason,
    Reserve,
    StoredPiece,
    TierLimits,
    TouchEvent,
)
from kvstored.core.catalog import Catalog
from kvstored.core.columnar import singly
from kvstored.core.copying import Copying, targets_of
from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.keys import root
from kvstored.core.namespace import Namespaces
from kvstored.core.types import BATCH_KEYS_MAX, UNIT_BYTES, KeyBatch, TierId
from kvstored.sim.keys import TraceKeys, trace_namespace
from kvstored.sim.measure import NO_BLOCKS, Served, TierBlocks, summed
from kvstored.sim.traces import BlockIds, Trace

INFINITE_BLOCKS = 1 << 30
WRITE_BACK_BYTES = 1 << 40
TTL_S = 1.0
"""A request takes no time here."""
ONE_GROUP = 1
EVICTED = frozenset({Reason.WATERMARK, Reason.DEMAND})


class CoreModel:
    """One namespace in a catalog of its own. `policy`: of a bundle or of an order alone. `capacity_blocks` by tier; None: DRAM without bound.
    `evictions`: tier and fingerprint of each copy in the order in which they leave, where asked for."""

    def __init__(
        self,
        trace: Trace,
        *,
        policy: str,
        capacity_blocks: Mapping[TierId, int] | None,
        evictions: list[tuple[TierId, Fingerprint]] | None = None,
    ) -> None:
        blocks = capacity_blocks or {TierId.DRAM: INFINITE_BLOCKS}
        limits = [_exact(tier, units) for tier, units in sorted(blocks.items())]
        self._tiers = tuple(sorted(blocks))
        bundle = bundle_named(policy)
        heard = Limits(
            hears_hints=Signal.HINTS in bundle.signals, writes_back=Signal.DISK in bundle.signals
        )
        self.catalog = Catalog(tiers=limits, policy=bundle.policy, limits=heard, epoch=1)
        for tier in self._tiers:
            self.catalog.grow(tier, 0, INFINITE_BLOCKS)
        spec = trace_namespace(trace, UNIT_BYTES)
        layout = Namespaces().open(spec, supersede=False).layout
        self.catalog.add_namespace(layout)
        self.evicted_blocks = 0
        self.written_blocks = 0
        """Copies that were made on NVMe."""
        self._evictions = evictions
        self._ns = layout.id
        self._keys = TraceKeys(root(layout.digest), layout.seed)
        self._session = self.catalog.open_session(0.0)
        self._held: list[bytes] = []
        self._is_tiered = len(blocks) > 1

    def request(self, ts_s: float, block_ids: BlockIds, hint: Hint = NO_HINT) -> Served:
        catalog = self.catalog
        catalog.expire(ts_s)
        hits = self.match(block_ids, ts_s)
        hit = sum(hits)
        for ids in _parts(block_ids[:hit]):
            self._hold(self._keys.batch(ids), ts_s)
        put = self._put(block_ids, hit, ts_s)
        for ids in reversed(_parts(block_ids)):
            catalog.touch(self._ns, self._keys.batch(ids), ts_s, hint)
            hint = replace(hint, session="")  # only the tail is where the session is
        while self._held:
            catalog.complete_request(self._session, self._held.pop(), False, ts_s)
        if self._is_tiered:
            while copying := catalog.write_back(WRITE_BACK_BYTES, ts_s):
                self._carry(copying, ts_s)
        for tier in self._tiers:
            catalog.make_room(tier, ts_s)
        catalog.books.policy.maintain(ts_s)
        self._account()
        return Served(len(block_ids), hits, put)

    def _evicted(self, freed: Freed) -> None:
        if freed.reason in EVICTED:
            self.evicted_blocks += 1
            if self._evictions is not None:
                self._evictions.append((freed.tier, freed.fingerprint))

    def match(self, block_ids: BlockIds, ts_s: float) -> TierBlocks:
        """Blocks of the longest stored prefix, by tier."""
        hits = NO_BLOCKS
        for ids in _parts(block_ids):
            found = self.catalog.match(self._ns, self._keys.batch(ids), 0, ts_s)
            hits = summed(hits, found.tier_blocks)
            if found.hit_blocks < len(ids):
                break
        return hits

    def _hold(self, batch: KeyBatch, ts_s: float) -> None:
        """Keep these stored blocks while the request runs, bring them up, and count their hits."""
        catalog = self.catalog
        request_id = len(self._held).to_bytes(8, "little")
        catalog.begin_request(self._session, request_id, self._ns, batch, ts_s)
        self._held.append(request_id)
        if self._is_tiered:
            loads, _ = catalog.prefetch(self._ns, batch, TierId.DRAM, ts_s)
            self._carry(loads, ts_s)
        rows = catalog.books.index.find(batch.fingerprints)
        catalog.books.touch(rows, TouchEvent.HIT, ts_s)

    def _put(self, block_ids: BlockIds, hit: int, ts_s: float) -> int:
        """Store the blocks from `hit` on; how many found room. What is longer than the tier keeps its head."""
        put = 0
        for start in range(hit, len(block_ids), BATCH_KEYS_MAX):
            ids = block_ids[start : start + BATCH_KEYS_MAX]
            reserved = self.catalog.reserve(self._reserve(block_ids, start, ids), ts_s)
            fills = [grant.fill for grant in reserved.grants if grant is not None]
            sums = np.zeros(len(fills), dtype=np.uint64)
            run = self.catalog.whole_run(self._session, fills)
            if run is not None:
                self.catalog.commit_run(run, sums, ts_s)
            else:
                self.catalog.commit(self._session, fills, [{0: 0}] * len(fills), ts_s)
            put += len(fills)
            if FillStatus.NO_SPACE in reserved.status:
                break
            self._account()
        return put

    def _reserve(self, block_ids: BlockIds, start: int, ids: BlockIds) -> Reserve:
        keys = self._keys.batch(ids)
        parents = np.zeros_like(keys.fingerprints)
        parents[1:] = keys.fingerprints[:-1]
        if start:
            parents[0] = self._keys.batch(block_ids[start - 1 : start]).fingerprints[0]
        known = np.ones(len(ids), dtype=np.bool_)
        known[0] = start > 0
        return Reserve(
            session=self._session,
            ns=self._ns,
            shard=0,
            keys=keys,
            parents=Parents(parents, known),
            groups_mask=ONE_GROUP,
            sizes=np.full((len(ids), 1), UNIT_BYTES, dtype=np.uint64),
            last_valid_tokens=0,
            ttl_s=TTL_S,
        )

    def _carry(self, copying: Sequence[Copying], ts_s: float) -> None:
        for each in copying:
            if each.target is TierId.NVME:
                self.written_blocks += len(targets_of(each))
            if isinstance(each, CopyTask):
                self._commit(each, ts_s)
            elif not self.catalog.carriage.commit_run(each, each.targets, ts_s):
                for task in self.catalog.carriage.take_apart(each):
                    self._commit(task, ts_s)

    def _commit(self, task: CopyTask, ts_s: float) -> None:
        stored = [StoredPiece(move.target, move.checksum) for move in task.moves]
        self.catalog.carriage.commit(task.id, stored, ts_s)

    def _account(self) -> None:
        """Carry out the effects: count evictions, and free what a disk would have to discard first."""
        for effect in singly(self.catalog.drain()):
            if isinstance(effect, Freed):
                self._evicted(effect)
                if effect.tier is TierId.NVME:
                    self.catalog.discarded(effect.token)


def _parts(block_ids: BlockIds) -> list[BlockIds]:
    starts = range(0, len(block_ids), BATCH_KEYS_MAX)
    return [block_ids[start : start + BATCH_KEYS_MAX] for start in starts]


def _exact(tier: TierId, units: int) -> TierLimits:
    mark = units / INFINITE_BLOCKS
    return TierLimits(tier, INFINITE_BLOCKS, high=mark, low=mark, sink_share=0.0, admit_hits=0)
