"""Large pieces over aged small ones: runs are cleared by address, a little at a time."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstored.core.calls import FillStatus, Limits, Parents, Reserve, TierLimits
from kvstored.core.catalog import Catalog
from kvstored.core.clearing import window_max
from kvstored.core.keys import key_batch
from kvstored.core.namespace import Namespaces
from kvstored.core.types import (
    UNIT_BYTES,
    GroupKind,
    GroupSpec,
    Layout,
    NamespaceSpec,
    SessionId,
    TierId,
)

UNITS = 4096
LARGE = 256


@given(st.lists(st.integers(-1, 50), min_size=1, max_size=60), st.data())
def test_window_max_is_the_maximum_of_each_window(values: list[int], data: st.DataObject) -> None:
    width = data.draw(st.integers(1, len(values)))
    naive = [max(values[i : i + width]) for i in range(len(values) - width + 1)]
    assert window_max(np.asarray(values, dtype=np.int64), width).tolist() == naive


class World:
    def __init__(self, segments: int = 2) -> None:
        self.catalog = Catalog(
            tiers=[TierLimits(TierId.DRAM, UNITS)], policy="lru", limits=Limits(), epoch=1
        )
        for segment in range(segments):
            self.catalog.grow(TierId.DRAM, segment, UNITS // segments)
        self.namespaces = Namespaces()
        self.session: SessionId = self.catalog.open_session(0.0)
        self.small = self.namespace("small", 1)
        self.large = self.namespace("large", LARGE)
        self.now_s = 1.0

    def namespace(self, name: str, units: int) -> Layout:
        groups = (GroupSpec("kv", GroupKind.LINEAR, units * UNIT_BYTES),)
        spec = NamespaceSpec(name, "1", "bf16", "x", 1, 16, groups, sink_tokens=0)
        layout = self.namespaces.open(spec, supersede=False).layout
        self.catalog.add_namespace(layout)
        return layout

    def put(
        self, layout: Layout, first: int, count: int, *, chain: bool = False
    ) -> list[FillStatus]:
        self.now_s += 1
        packed = b"".join(i.to_bytes(32, "big") for i in range(first, first + count))
        keys = key_batch(packed, 32, layout.seed)
        known = np.zeros(count, dtype=np.bool_)
        known[1:] = chain
        parents = Parents(np.roll(keys.fingerprints, 1, axis=0), known)
        size = layout.spec.groups[0].bytes_per_block
        sizes = np.full((count, 1), size, dtype=np.uint64)
        call = Reserve(self.session, layout.id, 0, keys, parents, 1, sizes, 0, 60.0)
        reserved = self.catalog.reserve(call, self.now_s)
        fills = [grant.fill for grant in reserved.grants if grant is not None]
        self.catalog.commit(self.session, fills, [{0: 1}] * len(fills), self.now_s)
        self.catalog.drain()
        return reserved.status

    def touch(self, layout: Layout, numbers: list[int]) -> None:
        self.now_s += 1
        packed = b"".join(i.to_bytes(32, "big") for i in numbers)
        self.catalog.touch(layout.id, key_batch(packed, 32, layout.seed), self.now_s)

    def small_left(self) -> int:
        return self.catalog.looking.namespace_use(self.small.id)[0]


def test_a_large_block_over_shuffled_small_ones_costs_a_little_more_than_its_size() -> None:
    """It went through half the arena in the order of the policy, and was refused all the same."""
    world = World()
    world.put(world.small, 0, UNITS)
    order = list(range(UNITS))
    random.Random(1).shuffle(order)
    world.touch(world.small, order)
    for i in range(4):
        before = world.small_left()
        assert world.put(world.large, 10_000 + i, 1) == [FillStatus.GRANTED]
        assert before - world.small_left() <= 2 * LARGE
    world.catalog.check()


def test_one_turnover_to_large_blocks_leaves_nine_tenths_usable() -> None:
    world = World()
    world.put(world.small, 0, UNITS)
    order = list(range(UNITS))
    random.Random(2).shuffle(order)
    world.touch(world.small, order)
    for i in range(UNITS // LARGE):
        assert world.put(world.large, 10_000 + i, 1) == [FillStatus.GRANTED]
    assert world.catalog.looking.namespace_use(world.large.id)[1][1] >= 0.9 * UNITS


def test_the_least_recently_used_neighbours_are_cleared() -> None:
    world = World(segments=1)
    world.put(world.small, 0, UNITS)
    stale = range(1024, 1024 + 2 * LARGE)
    order = [i for i in range(UNITS) if i not in stale]
    random.Random(3).shuffle(order)
    world.touch(world.small, order)
    world.touch(world.small, [1024 + LARGE])  # one in the middle is hot
    world.put(world.large, 10_000, 1)
    hot = key_batch((1024 + LARGE).to_bytes(32, "big"), 32, world.small.seed)
    assert world.catalog.match(world.small.id, hot, 0, world.now_s).hit_blocks == 1


def test_a_chain_in_the_run_leaves_with_what_hangs_below_it() -> None:
    world = World(segments=1)
    for i in range(UNITS // 64):
        world.put(world.small, 64 * i, 64, chain=True)
    order = [64 * i for i in range(UNITS // 64)]
    random.Random(4).shuffle(order)
    for head in order:
        world.touch(world.small, list(range(head, head + 64)))
    for i in range(8):
        assert world.put(world.large, 10_000 + i, 1) == [FillStatus.GRANTED]
        world.catalog.check()


def test_what_is_pinned_stays_and_the_call_is_refused() -> None:
    world = World(segments=1)
    world.put(world.small, 0, UNITS)
    packed = b"".join(i.to_bytes(32, "big") for i in range(0, UNITS, LARGE // 2))
    keys = key_batch(packed, 32, world.small.seed)
    world.catalog.pin(world.session, world.small.id, keys, hard=True, ttl_s=60.0, now_s=world.now_s)
    large = world.namespace("larger", LARGE)
    status = world.put(large, 20_000, 1)
    assert status in ([FillStatus.GRANTED], [FillStatus.NO_SPACE])
    pinned = world.catalog.match(
        world.small.id, key_batch(packed[:32], 32, world.small.seed), 0, world.now_s
    )
    assert pinned.hit_blocks == 1
    assert world.catalog.looking.namespace_use(world.small.id)[0] >= len(keys)
    world.catalog.check()
