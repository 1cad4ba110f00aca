"""Blocks that lie packed on a real disk go straight to the GPU: no copy in DRAM, and what is read there is what the disk has."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstored.clock import ManualClock
from kvstored.codec import levels
from kvstored.codec.frame import Codec
from kvstored.core.calls import ReadBlock, ReadStatus, Reason
from kvstored.core.types import UNIT_BYTES, GroupKind, GroupSpec, Layout, TierId
from kvstored.store.jobs import JobState
from kvstored.store.sessions import Session
from kvstored.tiers.disk import Disk, Options
from kvstored.tiers.stand_in import HostDevice
from kvstored.tiers.views import hash_of
from tests.codec import real
from tests.store import world as worlds
from tests.store.test_hbm import DRAM, HBM, NVME, where
from tests.store.world import Bytes, World, keys_of, running, spec_of
from tests.tiers.test_coding import FULL_BYTES

SPEC = replace(
    spec_of(),
    dtype="bfloat16",
    block_tokens=256,
    groups=(GroupSpec("kv", GroupKind.LINEAR, FULL_BYTES, lossy_ok=True),),
)


def kv_of(number: int, group: int = 0, size_bytes: int = FULL_BYTES) -> Bytes:
    """Real KV, its tokens in another order."""
    rows = np.concatenate([real.bits("a"), real.bits("b")] * 2)
    order = np.random.default_rng(number).permutation(rows.shape[1])
    return np.ascontiguousarray(rows[:, order]).reshape(-1).view(np.uint8)


@pytest.fixture(params=["off", "cold=int4,shared=int4"], ids=["exact", "lossy"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setattr(worlds, "content_of", kv_of)
    options = Options(
        map_bytes=1 << 20,
        slab_bytes=8 << 20,
        codec=Codec.FRAME,
        lossy=levels.parsed(request.param),
    )
    disk = Disk(tmp_path / "disk", options, clock=ManualClock())
    # four blocks of a quarter MiB in memory, four on the GPU, 32 on the disk
    made = World(
        tmp_path, frames=disk, policy="lru", arena_blocks=128, disk_blocks=1024, hbm_blocks=128
    )
    made.grow()
    yield made
    disk.close()


async def on_disk_alone(world: World, session: Session, layout: Layout, count: int) -> None:
    """So many blocks, and four more that pushed them out of memory."""
    for number in range(count + 4):
        world.put(session, layout, [number])
        await world.janitor.write_back_once()
        await world.settle()
    assert where(world, layout, range(count)) == [NVME] * count


def copied(world: World) -> dict[str, int]:
    counts = world.shell.counts
    return {what: n for (name, what), n in counts.items() if name == "copies" and n}


def check(world: World, blocks: Sequence[ReadBlock], numbers: Sequence[int]) -> None:
    """The GPU holds what was put, or what a lossy frame of it decodes to."""
    (device,) = world.shell.tiers.hbm_records._devices
    assert isinstance(device, HostDevice)
    for number, each in zip(numbers, blocks, strict=True):
        piece = each.pieces[0]
        assert piece is not None
        (extent,) = piece.place
        found = device._at(extent.start * UNIT_BYTES, piece.length)
        assert hash_of([found]) == piece.checksum
        assert np.array_equal(found, kv_of(number)) != each.lossy


def test_a_read_on_the_gpu_takes_packed_blocks_straight_up(world: World) -> None:
    async def main() -> None:
        layout = await world.open(SPEC)
        session = world.session()
        await on_disk_alone(world, session, layout, 3)
        is_lossy = bool(world.shell.tiers.coding._lossy)
        grant = await world.acquire(session, layout, range(3), tier=TierId.HBM)
        assert [block.status for block in grant.blocks] == [ReadStatus.HIT] * 3
        assert where(world, layout, range(3)) == [HBM | NVME] * 3
        assert copied(world) == {"dram:nvme": 7, "nvme:hbm": 3}
        check(world, grant.blocks, [0, 1, 2])
        assert {block.lossy for block in grant.blocks} == {is_lossy}
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_what_is_in_dram_too_goes_from_there_and_the_rest_straight(world: World) -> None:
    async def main() -> None:
        layout = await world.open(SPEC)
        session = world.session()
        await on_disk_alone(world, session, layout, 2)
        grant = await world.acquire(session, layout, [0, 5, 1], tier=TierId.HBM)
        assert [block.status for block in grant.blocks] == [ReadStatus.HIT] * 3
        assert where(world, layout, [0, 5, 1]) == [HBM | NVME, HBM | DRAM | NVME, HBM | NVME]
        check(world, grant.blocks, [0, 5, 1])
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_a_prefetch_goes_straight_up_too_and_a_get_finds_it_there(world: World) -> None:
    async def main() -> None:
        layout = await world.open(SPEC)
        session = world.session()
        await on_disk_alone(world, session, layout, 3)
        keys = keys_of(layout, [0, 2])
        job = world.store.prefetch(session, layout, keys, 5.0, TierId.HBM)
        await world.settle()
        done = world.store.jobs.status(job.id, "default")
        assert (done.state, done.blocks, done.failed) == (JobState.DONE, 2, 0)
        assert where(world, layout, range(3)) == [HBM | NVME, NVME, HBM | NVME]
        below = await world.acquire(session, layout, [0])
        assert copied(world)["hbm:dram"] == 1, "read from the disk again"
        piece = below.blocks[0].pieces[0]
        assert piece is not None
        assert hash_of([world.content(below.blocks[0])]) == piece.checksum
        world.store.release(session, [below.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_it_may_leave_the_gpu_as_the_disk_has_it_and_is_kept_when_the_disk_loses_it(
    world: World,
) -> None:
    async def main() -> None:
        layout = await world.open(SPEC)
        session = world.session()
        await on_disk_alone(world, session, layout, 5)
        for number in range(5):  # the GPU holds four
            grant = await world.acquire(session, layout, [number], tier=TierId.HBM)
            assert grant.blocks[0].status is ReadStatus.HIT
            world.store.release(session, [grant.lease])
        assert where(world, layout, range(5)) == [NVME] + [HBM | NVME] * 4
        books = world.catalog.books
        assert books.space.books[TierId.HBM].dirty == 0
        row = int(books.index.find(keys_of(layout, [4]).fingerprints)[0])
        world.catalog.drop_copy(books.copy_in(row, TierId.NVME, 0), Reason.IO_ERROR, 0.0)
        world.shell.apply()
        assert where(world, layout, [4]) == [HBM]
        await world.janitor.demote_once()
        await world.settle()
        assert where(world, layout, [4]) == [HBM | DRAM]
        await world.check_nothing_leaked()

    running(world, main)


def test_damage_on_the_disk_is_a_miss_and_the_copy_is_dropped(world: World, tmp_path: Path) -> None:
    async def main() -> None:
        layout = await world.open(SPEC)
        session = world.session()
        await on_disk_alone(world, session, layout, 2)
        slab = next((tmp_path / "disk").glob("slab-*"))
        raw = np.fromfile(slab, dtype=np.uint8)
        raw[1000::4096] ^= 1
        raw.tofile(slab)
        grant = await world.acquire(session, layout, [0, 1], tier=TierId.HBM)
        assert [block.status for block in grant.blocks] == [ReadStatus.MISS] * 2
        assert where(world, layout, [0, 1]) == [0, 0]
        assert world.shell.counts["corrupt_copies", "nvme"] == 2
        await world.check_nothing_leaked()

    running(world, main)
