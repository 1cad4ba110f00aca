"""Blocks that come up from the disk by the dozen: one lane call, one commit, one event run and one flight, and every promise kept."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.core.calls import ReadStatus, Reason
from kvstored.core.types import Layout, TierId
from kvstored.store.events import EventKind
from kvstored.store.jobs import JobState
from kvstored.store.sessions import Session
from kvstored.tiers import views as memory
from kvstored.tiers.base import Carried, PieceRun, ref_of
from kvstored.tiers.memory import MemoryTier
from kvstored.tiers.record import Record, Records
from tests.store.world import World, content_of, keys_of, running

BLOCKS = range(12)


class Watched(MemoryTier):
    """Counts calls; `hold` keeps reads waiting; `rotten` blocks of the next read are flipped in memory of the tier."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def read_run(self, run: PieceRun) -> Carried:
        self.reads.append(len(run))
        assert self.gate.wait(20.0)
        return super().read_run(run)

    def write_run(self, run: PieceRun, records: Records) -> Carried:
        self.writes.append(len(run))
        return super().write_run(run, records)

    def rot(self, number: int) -> None:
        """Flip a bit of what is stored of a block."""
        self._stored(number)[1][0] ^= 1

    def exchange(self, number: int) -> None:
        """Other bytes with their own checksum under the same name and place: sound in itself."""
        record, held = self._stored(number)
        held[:] = content_of(number + 1000, 0, len(held))
        other = replace(record, checksum=memory.hash_of([held]))
        self._pieces[ref_of(record)] = (other, held)

    def lose(self, number: int) -> None:
        """A damaged index finds it no more. The books had it for good then: present to every put, a miss to every get."""
        del self._pieces[ref_of(self._stored(number)[0])]

    def _stored(self, number: int) -> tuple[Record, NDArray[np.uint8]]:
        return next(
            each for each in self._pieces.values() if int.from_bytes(each[0].key, "big") == number
        )


@pytest.fixture
def disk() -> Watched:
    return Watched()


@pytest.fixture
def world(tmp_path: Path, disk: Watched) -> World:
    world = World(tmp_path, arena_blocks=24, disk_blocks=128, disk=disk)
    # without the faulty tier around it, whose calls are the single ones
    world.shell.tiers = type(world.shell.tiers)(
        **{
            name: disk if name == "disk" else getattr(world.shell.tiers, name)
            for name in type(world.shell.tiers).__slots__
        }
    )
    world.grow()
    return world


async def chilled(world: World) -> tuple[Layout, Session]:
    """BLOCKS lie on the disk only."""
    layout, session = await world.open(), world.session()
    world.put(session, layout, BLOCKS)
    await world.janitor.write_back_once()
    await world.settle()
    for begin in (100, 124):  # what comes later pushes them out
        world.put(session, layout, range(begin, begin + 24))
        await world.janitor.write_back_once()
        await world.settle()
    assert only_on_disk(world, layout) == len(BLOCKS)
    return layout, session


def only_on_disk(world: World, layout: Layout, numbers: Sequence[int] = BLOCKS) -> int:
    tiers, _ = world.store.locate(layout, keys_of(layout, numbers))
    return int(np.count_nonzero(tiers & 0x7F == 1 << TierId.NVME))


def test_many_cold_blocks_come_up_as_one_run(world: World, disk: Watched) -> None:
    async def main() -> None:
        layout, session = await chilled(world)
        assert disk.writes[0] == len(BLOCKS)
        cursor = world.shell.events.last
        disk.gate.clear()
        reading = asyncio.ensure_future(world.acquire(session, layout, BLOCKS))
        await asyncio.sleep(0.01)
        assert len(set(map(id, world.store.flights._flights.values()))) == 1
        disk.gate.set()
        grant = await reading
        assert grant.many is not None
        assert disk.reads == [len(BLOCKS)]
        assert [b.status for b in grant.blocks] == [ReadStatus.HIT] * len(BLOCKS)
        assert {b.tier for b in grant.blocks} == {TierId.NVME}, "where they were before the load"
        for number, block in zip(BLOCKS, grant.blocks, strict=True):
            np.testing.assert_array_equal(world.content(block), content_of(number))
        events = world.shell.events.read(epoch=1, cursor=cursor, events_max=99).events
        loaded = [event for event in events if event.kind is EventKind.LOADED]
        assert [e.key for e in loaded] == [keys_of(layout, BLOCKS).key(i) for i in BLOCKS]
        assert [e.depth_blocks for e in loaded] == list(BLOCKS)
        world.shell.settle()
        assert world.shell.counts["read_keys_hit", "nvme"] == len(BLOCKS)
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


@pytest.mark.parametrize(
    "harm", [Watched.rot, Watched.exchange, Watched.lose], ids=["rotten", "another's", "lost"]
)
def test_a_corrupt_block_of_a_run_is_a_miss_with_reason_and_count(
    world: World, disk: Watched, harm: Callable[[Watched, int], None]
) -> None:
    async def main() -> None:
        layout, session = await chilled(world)
        harm(disk, 5)
        cursor = world.shell.events.last
        grant = await world.acquire(session, layout, BLOCKS)
        for number, block in zip(BLOCKS, grant.blocks, strict=True):
            if number == 5:
                assert block.status is ReadStatus.MISS
            else:
                np.testing.assert_array_equal(world.content(block), content_of(number))
        assert world.shell.counts["corrupt_copies", "nvme"] == 1
        assert world.shell.counts["copies", "nvme:dram"] == len(BLOCKS) - 1
        events = world.shell.events.read(epoch=1, cursor=cursor, events_max=99).events
        failed = [event.key for event in events if event.kind is EventKind.LOAD_FAILED]
        assert failed == [keys_of(layout, BLOCKS).key(5)]
        world.store.release(session, [grant.lease])
        again = await world.acquire(session, layout, [5])
        assert again.blocks[0].reason is Reason.CORRUPT
        world.put(session, layout, [5])
        assert only_on_disk(world, layout, [5]) == 0, "it can be put again"
        grant = await world.acquire(session, layout, [5])
        assert grant.blocks[0].status is ReadStatus.HIT
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_blocks_removed_while_their_run_is_on_its_way_are_misses_and_free_nothing_early(
    world: World, disk: Watched
) -> None:
    async def main() -> None:
        layout, session = await chilled(world)
        disk.gate.clear()
        reading = asyncio.ensure_future(world.acquire(session, layout, BLOCKS))
        await asyncio.sleep(0.01)
        assert await world.store.remove(layout, keys_of(layout, [10, 11])) == 2
        # the thread still writes there: new blocks must not get that space
        taken = {p.segment << 32 | p.start for p in loading_places(world)}
        assert len(taken) == len(BLOCKS)
        world.put(session, layout, range(200, 230))
        given = {
            p.segment << 32 | p.start
            for grant in world.reserve(session, layout, range(300, 324))
            if grant is not None
            for p in grant.pieces[0].place
        }
        assert not given & taken
        disk.gate.set()
        grant = await reading
        status = [block.status for block in grant.blocks]
        assert status == [ReadStatus.HIT] * 10 + [ReadStatus.MISS] * 2
        for number, block in list(zip(BLOCKS, grant.blocks, strict=True))[:10]:
            np.testing.assert_array_equal(world.content(block), content_of(number))
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def loading_places(world: World) -> list[object]:
    runs = world.catalog.carriage.runs.values()
    return [run.targets.place(i)[0] for run in runs for i in range(len(run))]


def test_a_cancelled_read_frees_nothing_that_its_thread_still_writes(
    world: World, disk: Watched
) -> None:
    async def main() -> None:
        layout, session = await chilled(world)
        disk.gate.clear()
        reading = asyncio.ensure_future(world.acquire(session, layout, BLOCKS))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert world.catalog.counts["tasks"] == len(BLOCKS)
        taken = {p.segment << 32 | p.start for p in loading_places(world)}
        world.put(session, layout, range(200, 230))
        copies = [c for n in range(200, 230) for c in places_of(world, layout, n)]
        assert not {c for c in copies if c in taken}
        disk.gate.set()
        await world.settle()
        assert only_on_disk(world, layout) == 0, "the load went on: it is worth having"
        await world.check_nothing_leaked()

    running(world, main)


def places_of(world: World, layout: Layout, number: int) -> list[int]:
    books = world.catalog.books
    low, high = keys_of(layout, [number]).fingerprints[0].tolist()
    return [
        segment << 32 | start
        for copy in world.catalog.looking.copies_of(layout.id, (low, high))
        if books.copies.tier[copy] == TierId.DRAM
        for segment, start in books.heads_of(copy)
    ]


def test_a_read_that_cannot_wait_for_a_run_is_answered_pending(world: World, disk: Watched) -> None:
    async def main() -> None:
        layout, session = await chilled(world)
        disk.gate.clear()
        grant = await world.acquire(session, layout, BLOCKS, wait_s=0.02)
        assert grant.lease == 0
        assert {block.status for block in grant.blocks} == {ReadStatus.PENDING}
        second = asyncio.ensure_future(world.acquire(session, layout, BLOCKS))
        await asyncio.sleep(0.01)
        disk.gate.set()
        blocks = (await second).blocks
        assert disk.reads == [len(BLOCKS)], "one flight a block and tier"
        for number, block in zip(BLOCKS, blocks, strict=True):
            np.testing.assert_array_equal(world.content(block), content_of(number))
        await world.check_nothing_leaked()

    running(world, main)


def test_a_prefetch_that_nobody_wants_any_more_is_aborted_untouched(
    world: World, disk: Watched
) -> None:
    async def main() -> None:
        layout, session = await chilled(world)
        blocker = threading.Event()
        lane = world.shell.tiers.disk_lane
        busy = [lane.submit(lambda: blocker.wait(20.0)) for _ in range(3)]
        job = world.store.prefetch(session, layout, keys_of(layout, BLOCKS), 5.0)
        assert job.blocks == len(BLOCKS)
        world.store.jobs.cancel(job.id, "default")
        blocker.set()
        for work in busy:
            await work
        await world.settle()
        assert disk.reads == []
        assert (job.done, job.failed, job.state) == (0, len(BLOCKS), JobState.CANCELLED)
        assert only_on_disk(world, layout) == len(BLOCKS)
        await world.check_nothing_leaked()

    running(world, main)


def test_a_prefetched_run_is_a_hit_without_another_load(world: World, disk: Watched) -> None:
    async def main() -> None:
        layout, session = await chilled(world)
        job = world.store.prefetch(session, layout, keys_of(layout, BLOCKS), 5.0)
        await world.settle()
        assert (job.done, job.failed, job.state) == (len(BLOCKS), 0, JobState.DONE)
        grant = await world.acquire(session, layout, BLOCKS)
        assert grant.many is not None
        assert disk.reads == [len(BLOCKS)]
        await world.check_nothing_leaked()

    running(world, main)


def test_a_source_of_a_run_that_rots_in_memory_never_reaches_the_disk(
    world: World, disk: Watched
) -> None:
    async def main() -> None:
        layout, session = await world.open(), world.session()
        world.put(session, layout, BLOCKS)
        grant = await world.acquire(session, layout, BLOCKS)
        piece = grant.blocks[7].pieces[0]
        assert piece is not None
        world.arena.views(piece.place, 1)[0][0] ^= 1
        world.store.release(session, [grant.lease])
        await world.janitor.write_back_once()
        await world.settle()
        assert disk.writes == [len(BLOCKS)]
        assert len(disk.scan(0, 99).records) == len(BLOCKS) - 1
        assert world.shell.counts["corrupt_copies", "dram"] == 1
        await world.check_nothing_leaked()

    running(world, main)
