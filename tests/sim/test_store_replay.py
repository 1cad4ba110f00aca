"""The policy in the daemon's store does what it does in the simulator: a trace through the in-process Store, with bytes, lanes and two tiers, makes
the evictions of the offline replay in the same order.

Not under the article's fixed mix: it ranks a copy that is loaded by its hits at that moment, and the two count the hit of a read at
different moments.
"""

from pathlib import Path

import numpy as np
import pytest

from kvstored.core.calls import Fingerprint, TierLimits
from kvstored.core.hints import Hint
from kvstored.core.keys import root
from kvstored.core.namespace import Namespaces
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import UNIT_BYTES, Layout, TierId
from kvstored.sim.core import CoreModel
from kvstored.sim.keys import TraceKeys, trace_namespace
from kvstored.sim.traces import Request, Trace
from kvstored.store.events import EventKind
from kvstored.store.sessions import Session
from tests.store.world import SEGMENT_BYTES, World, keys_of, running, spec_of

from .test_core import random_kvt1

UNITS = SEGMENT_BYTES // UNIT_BYTES
DRAM_BLOCKS, NVME_BLOCKS = 16, 64
START_S = 1_000_000.0
"""Of the ManualClock."""
Evictions = dict[TierId, list[int]]


def limits(tier: TierId, blocks: int) -> TierLimits:
    """As the offline replay has them: above its blocks a tier is brought down to them after each request."""
    mark = 2 * blocks / UNITS
    return TierLimits(tier, UNITS, high=mark, low=mark, sink_share=0.0, lease_share=1.0)


class Live:
    """One client of the store, who does what an engine does."""

    def __init__(self, world: World, session: Session, layout: Layout) -> None:
        self.world = world
        self.session = session
        self.layout = layout

    async def request(self, number: int, request: Request, hint: Hint) -> int:
        world, store, ids = self.world, self.world.store, request.block_ids.tolist()
        world.clock.advance(START_S + request.ts_s - world.clock.now_s())
        name = number.to_bytes(8, "little")
        hit = store.match(self.layout, keys_of(self.layout, ids), 0).hit_blocks
        if hit:
            store.begin_request(self.session, self.layout, keys_of(self.layout, ids[:hit]), name)
            grant = await world.acquire(self.session, self.layout, ids[:hit])
            store.release(self.session, [grant.lease])
        self.world.put(self.session, self.layout, ids)
        store.touch(self.layout, keys_of(self.layout, ids), hint)
        if hit:
            store.complete_request(self.session, name, discard=False)
        await world.janitor.write_back_once()
        await world.settle()
        await world.janitor.make_room_once()
        await world.settle()
        await world.janitor.learn_once()
        return hit


@pytest.mark.parametrize("is_hinted", [False, True])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "article"])
def test_the_store_evicts_what_the_offline_replay_evicts_in_the_same_order(
    tmp_path: Path, policy: str, is_hinted: bool
) -> None:
    trace = random_kvt1(tmp_path / "trace", 11, requests=110)
    requests = [request for request in trace if len(request.block_ids)]
    hints = [
        Hint(output_tokens=100 * (n % 9), session=str(n % 5)) if is_hinted else Hint()
        for n in range(len(requests))
    ]
    order: list[tuple[TierId, Fingerprint]] = []
    blocks = {TierId.DRAM: DRAM_BLOCKS, TierId.NVME: NVME_BLOCKS}
    model = CoreModel(trace, policy=policy, capacity_blocks=blocks, evictions=order)
    offline_hits = [
        sum(model.request(START_S + request.ts_s, request.block_ids, hint).hits)
        for request, hint in zip(requests, hints, strict=True)
    ]

    tiers = [limits(tier, count) for tier, count in blocks.items()]
    world = World(tmp_path, policy=policy, tiers=tiers)
    world.grow()

    async def main() -> tuple[list[int], Evictions]:
        live = Live(world, world.session(), await world.open(spec_of()))
        hits = [
            await live.request(n, request, hint)
            for n, (request, hint) in enumerate(zip(requests, hints, strict=True))
        ]
        return hits, evicted(world)

    store_hits, theirs = running(world, main)
    assert store_hits == offline_hits
    ours = by_tier(order, names_of(trace, max(int(each.block_ids.max()) for each in requests)))
    assert min(map(len, ours.values())) > 30
    assert theirs == ours


def evicted(world: World) -> Evictions:
    found: Evictions = {TierId.DRAM: [], TierId.NVME: []}
    read = world.shell.events.read(epoch=1, cursor=0, events_max=100_000)
    assert not read.lost
    for event in read.events:
        if event.kind is EventKind.EVICTED and event.tier is not None:
            found[event.tier].append(int.from_bytes(event.key, "big"))
    return found


def names_of(trace: Trace, last_id: int) -> dict[Fingerprint, int]:
    layout = Namespaces().open(trace_namespace(trace, UNIT_BYTES), supersede=False).layout
    keys = TraceKeys(root(layout.digest), layout.seed).batch(np.arange(last_id + 1))
    return {(low, high): n for n, (low, high) in enumerate(keys.fingerprints.tolist())}


def by_tier(order: list[tuple[TierId, Fingerprint]], names: dict[Fingerprint, int]) -> Evictions:
    found: Evictions = {TierId.DRAM: [], TierId.NVME: []}
    for tier, fingerprint in order:
        found[tier].append(names[fingerprint])
    return found
