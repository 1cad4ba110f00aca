"""The store with a GPU's stand-in as its fastest tier: what goes up and comes down, what it holds, and what becomes of it when the device is
lost."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstored.core.calls import ReadStatus, Reason
from kvstored.core.types import Layout, NamespaceSpec, TierId
from kvstored.errors import InvalidArgument, KvstoredError, NoSpace, Unavailable
from kvstored.store import gpu
from kvstored.store.events import EventKind
from kvstored.store.jobs import JobState
from kvstored.tiers.device import Device, Moves
from kvstored.tiers.stand_in import HostDevice
from tests.store.world import World, hybrid_spec, keys_of, running, spec_of

HBM, DRAM, NVME = (1 << tier for tier in (TierId.HBM, TierId.DRAM, TierId.NVME))


def where(world: World, layout: Layout, numbers: Sequence[int]) -> list[int]:
    """Bits of the tiers that hold each block."""
    tiers, _ = world.catalog.locate(layout.id, keys_of(layout, numbers))
    return [int(bits) & 0x7F for bits in tiers]


@pytest.mark.parametrize("spec", [spec_of(), hybrid_spec()], ids=["one group", "hybrid"])
def test_blocks_are_read_on_the_gpu_from_wherever_they_lie(
    tmp_path: Path, spec: NamespaceSpec
) -> None:
    world = World(tmp_path, arena_blocks=16, disk_blocks=64, hbm_blocks=32)
    world.grow()

    async def main() -> None:
        layout = await world.open(spec)
        session = world.session()
        for number in range(24):
            world.put(session, layout, [number])
            await world.janitor.write_back_once()
            await world.settle()
        assert {NVME} <= set(where(world, layout, range(24))), "nothing lies on the disk alone"
        numbers = range(0, 24, 3)
        grant = await world.acquire(session, layout, numbers, tier=TierId.HBM)
        assert [block.status for block in grant.blocks] == [ReadStatus.HIT] * 8
        for number, block in zip(numbers, grant.blocks, strict=True):
            world.check_hbm_content(block, number)
        assert all(bits & HBM for bits in where(world, layout, numbers))
        world.catalog.check()
        world.store.release(session, [grant.lease])
        again = await world.acquire(session, layout, numbers, tier=TierId.HBM)
        assert {block.tier for block in again.blocks} == {TierId.HBM}
        world.store.release(session, [again.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_what_is_leased_on_the_gpu_stays_and_what_is_not_makes_room(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=64, hbm_blocks=8)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for number in range(16):
            world.put(session, layout, [number])
        held = await world.acquire(session, layout, range(6), tier=TierId.HBM)
        other = await world.acquire(session, layout, [8, 9], tier=TierId.HBM)
        world.store.release(session, [other.lease])
        more = await world.acquire(session, layout, range(10, 14), tier=TierId.HBM)
        assert [block.status for block in more.blocks] == [ReadStatus.HIT] * 2 + [
            ReadStatus.MISS
        ] * 2
        assert more.blocks[-1].reason is Reason.NO_SPACE
        for number, block in enumerate(held.blocks):
            world.check_hbm_content(block, number)
        assert where(world, layout, [8, 9]) == [DRAM, DRAM]
        world.store.release(session, [held.lease, more.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_what_only_the_gpu_has_goes_down_before_it_has_to_leave(tmp_path: Path) -> None:
    """Without a disk, where eviction from DRAM would lose it."""
    world = World(tmp_path, arena_blocks=8, disk_blocks=1, hbm_blocks=8, policy="lru")
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for number in range(8):
            world.put(session, layout, [number])
        for number in range(7):
            grant = await world.acquire(session, layout, [number], tier=TierId.HBM)
            world.store.release(session, [grant.lease])
        for number in range(20, 28):
            world.put(session, layout, [number])
        assert where(world, layout, range(7)) == [HBM] * 7
        await world.janitor.demote_once()
        await world.settle()
        lowered = where(world, layout, range(7))
        assert lowered.count(HBM | DRAM) == 7
        for number in range(7):
            grant = await world.acquire(session, layout, [number])
            world.check_content(grant.blocks[0], number)
            world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_a_get_takes_what_only_the_gpu_has(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=4, disk_blocks=1, hbm_blocks=8, policy="lru")
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, [1])
        grant = await world.acquire(session, layout, [1], tier=TierId.HBM)
        world.store.release(session, [grant.lease])
        for number in range(10, 14):
            world.put(session, layout, [number])
        assert where(world, layout, [1]) == [HBM]
        assert world.store.match(layout, keys_of(layout, [1]), 0).tier_blocks == (1, 0, 0, 0)
        below = await world.acquire(session, layout, [1])
        world.check_content(below.blocks[0], 1)
        assert below.blocks[0].tier is TierId.HBM
        world.store.release(session, [below.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_a_prefetch_goes_over_dram_to_the_gpu(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=16, disk_blocks=64, hbm_blocks=16)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for number in range(20):
            world.put(session, layout, [number])
            await world.janitor.write_back_once()
            await world.settle()
        numbers = [0, 1, 2, 19]
        assert where(world, layout, numbers)[:3] == [NVME] * 3
        job = world.store.prefetch(session, layout, keys_of(layout, numbers), 5.0, TierId.HBM)
        await world.settle()
        done = world.store.jobs.status(job.id, "default")
        assert (done.state, done.failed) == (JobState.DONE, 0)
        assert all(bits & HBM for bits in where(world, layout, numbers))
        await world.check_nothing_leaked()

    running(world, main)


def test_removed_and_replaced_blocks_leave_the_gpu_too(tmp_path: Path) -> None:
    world = World(tmp_path, hbm_blocks=16)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, [1, 2, 3])
        grant = await world.acquire(session, layout, [1, 2, 3], tier=TierId.HBM)
        assert await world.store.remove(layout, keys_of(layout, [2, 3])) == 2
        assert where(world, layout, [1, 2, 3]) == [HBM | DRAM, 0, 0]
        world.check_hbm_content(grant.blocks[1], 2)  # its reader keeps the bytes until it is done
        world.store.release(session, [grant.lease])
        assert len(world.shell.tiers.hbm_records._records) == 1
        polled = await world.shell.events.poll(epoch=1, cursor=0, events_max=99, wait_s=0.0)
        kinds = [event.kind for event in polled.events if event.tier is TierId.HBM]
        assert kinds == [EventKind.LOADED] * 3 + [EventKind.REMOVED] * 2
        assert all(event.key for event in polled.events if event.tier is TierId.HBM)
        await world.check_nothing_leaked()

    running(world, main)


def test_resident_groups_and_predicted_sets_go_up_by_themselves(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=64, hbm_blocks=32)
    world.grow()
    dense, *others = hybrid_spec().groups
    spec = replace(hybrid_spec(), groups=(replace(dense, resident=True), *others))

    async def main() -> None:
        layout = await world.open(spec)
        session = world.session()
        world.put(session, layout, range(6))
        await world.janitor.raise_once()
        assert copies_up(world) == 0
        keys = keys_of(layout, range(4))
        world.store.begin_request(session, layout, keys, b"r")
        await world.janitor.raise_once()
        await world.settle()
        assert copies_up(world) == 4
        assert where(world, layout, range(6)) == [DRAM] * 6, "their sparse groups are not there"
        world.store.accesses.reside(session, layout, keys_of(layout, [4, 5]), 1.0)
        await world.janitor.raise_once()
        await world.settle()
        assert where(world, layout, range(6)) == [DRAM] * 4 + [HBM | DRAM] * 2
        await world.check_nothing_leaked()

    running(world, main)


def copies_up(world: World) -> int:
    return world.shell.counts["copies", "dram:hbm"]


# ---- a device that fails


class Losable(HostDevice):
    lost = False

    def upload(self, moves: Moves) -> None:
        if self.lost:
            raise Unavailable("gpu is lost: device=0: Xid 79")
        super().upload(moves)

    def download(self, moves: Moves) -> None:
        if self.lost:
            raise Unavailable("gpu is lost: device=0: Xid 79")
        super().download(moves)


def test_a_lost_device_costs_its_copies_and_nothing_else(tmp_path: Path) -> None:
    made: list[Losable] = []

    def opener(name: str, size_bytes: int) -> Device:
        made.append(Losable(size_bytes))
        return made[-1]

    world = World(tmp_path, arena_blocks=32, disk_blocks=1, hbm_blocks=16, opener=opener)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(8))
        grant = await world.acquire(session, layout, range(8), tier=TierId.HBM)
        made[0].lost = True
        world.put(session, layout, [20])
        late = await world.acquire(session, layout, [20], tier=TierId.HBM)
        assert late.blocks[0].status is ReadStatus.MISS
        with pytest.raises(Unavailable, match="Xid 79"):
            await world.acquire(session, layout, [1], tier=TierId.HBM)
        with pytest.raises(Unavailable, match="read from dram"):
            world.store.prefetch(session, layout, keys_of(layout, [1]), 1.0, TierId.HBM)
        await world.janitor.demote_once()
        assert where(world, layout, range(8)) == [DRAM] * 8
        assert [what for what, _ in world.faults] == [
            "the gpus are lost, and what they held: copies=8"
        ]
        world.faults.clear()
        world.store.release(session, [grant.lease])
        use = {use.tier: use for use in world.catalog.tier_use()}[TierId.HBM]
        assert use.copies == use.used_units == 0
        below = await world.acquire(session, layout, range(8))
        for number, block in enumerate(below.blocks):
            world.check_content(block, number)
        world.store.release(session, [below.lease])
        await world.check_nothing_leaked()

    running(world, main)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("cupy cannot be imported: no module named cupy"),
        Unavailable("gpu cannot be opened: device=0: cudaErrorInsufficientDriver"),
        Unavailable("no such gpu: device=3 devices=1"),
        NoSpace("gpu cannot be opened: device=0: cudaErrorMemoryAllocation: out of memory"),
    ],
    ids=["no cupy", "no driver", "no device", "out of memory"],
)
def test_a_device_that_does_not_open_leaves_the_tier_off_with_the_reason(
    tmp_path: Path, error: KvstoredError
) -> None:
    def opener(name: str, size_bytes: int) -> Device:
        raise error

    world = World(tmp_path, hbm_blocks=16, opener=opener)

    async def main() -> None:
        await gpu.open_pools(world.shell)
        assert world.shell.tiers.hbm_records.fault is error
        refused: list[str] = []
        await gpu.pin_arena(world.shell, 1 << 20, lambda error: refused.append(str(error)))
        assert not refused
        world.catalog.grow(TierId.DRAM, *world.arena.grow())
        layout = await world.open()
        session = world.session()
        world.put(session, layout, [1])
        with pytest.raises(Unavailable, match="read from dram") as refused_read:
            await world.acquire(session, layout, [1], tier=TierId.HBM)
        assert str(error) in str(refused_read.value)
        await world.janitor.demote_once()
        await world.janitor.raise_once()
        grant = await world.acquire(session, layout, [1])
        world.check_content(grant.blocks[0], 1)
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_the_arena_is_pinned_in_the_background_as_it_grows(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=512, hbm_blocks=16)
    world.grow()

    async def main() -> None:
        hbm = world.shell.tiers.hbm_records
        refused: list[str] = []
        pinning = asyncio.ensure_future(
            gpu.pin_arena(world.shell, 2 << 20, lambda error: refused.append(str(error)))
        )
        for _ in range(5000):
            if hbm.pinned_bytes == 1 << 20:
                break
            await asyncio.sleep(0.001)
        assert hbm.pinned_bytes == 1 << 20
        assert not refused
        pinning.cancel()

    running(world, main)


def test_without_gpus_the_tier_is_not_there(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, [1])
        with pytest.raises(InvalidArgument, match=r"hbm\.devices"):
            await world.acquire(session, layout, [1], tier=TierId.HBM)
        await world.check_nothing_leaked()

    running(world, main)


def test_prefetch_leaves_the_link_to_others_and_demand_overtakes_it(tmp_path: Path) -> None:
    world = World(
        tmp_path, hbm_blocks=32, hbm_bytes_per_s=1_000_000
    )  # 4 blocks of burst, 40 of debt
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(20))
        world.store.prefetch(session, layout, keys_of(layout, range(6)), 60.0, TierId.HBM)
        await world.settle()
        assert all(bits & HBM for bits in where(world, layout, range(6)))
        held = world.store.prefetch(session, layout, keys_of(layout, [8, 9]), 60.0, TierId.HBM)
        grant = await world.acquire(session, layout, [12], tier=TierId.HBM)
        assert grant.blocks[0].status is ReadStatus.HIT
        assert world.store.jobs.status(held.id, "default").state is JobState.RUNNING
        assert where(world, layout, [8, 9]) == [DRAM, DRAM]
        world.store.release(session, [grant.lease])
        world.clock.advance(1.0)
        await world.settle()
        assert all(bits & HBM for bits in where(world, layout, [8, 9]))
        assert world.store.jobs.status(held.id, "default").state is JobState.DONE
        await world.check_nothing_leaked()

    running(world, main)
