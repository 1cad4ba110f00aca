"""What becomes of prefetch jobs: loaded, without room, late, cancelled, failed."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kvstored.core.types import Layout, Place
from kvstored.store.events import EventKind
from kvstored.store.jobs import Job, JobState
from kvstored.store.lane import Urgency
from kvstored.store.sessions import Session
from kvstored.tiers.base import PieceRef, Views
from kvstored.tiers.faulty import Faults
from tests.store.world import World, keys_of, running


def on_disk(tmp_path: Path, test: Callable[[World, Session, Layout], Awaitable[None]]) -> None:
    """Eight blocks, the first of which are on NVMe only: DRAM has room for four."""
    world = World(tmp_path, arena_blocks=4, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(8):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        await test(world, session, layout)
        await world.check_nothing_leaked()

    running(world, main)


def outcome(job: Job) -> tuple[JobState, int, int, int]:
    return job.state, job.blocks, job.done, job.failed


async def queued(world: World, session: Session, layout: Layout) -> tuple[Job, threading.Event]:
    """A job of two blocks that waits behind other work of the lane until the event is set."""
    gate = threading.Event()
    for _ in range(3):
        world.shell.tiers.disk_lane.submit(gate.wait, Urgency.DEMAND)
    return world.store.prefetch(session, layout, keys_of(layout, [0, 1]), 5.0), gate


def test_keys_that_find_no_room_count_as_failed(tmp_path: Path) -> None:
    """They were left out of the job, which then said that it had loaded all."""

    async def test(world: World, session: Session, layout: Layout) -> None:
        held = await world.acquire(session, layout, [5, 6, 7])
        job = world.store.prefetch(session, layout, keys_of(layout, [0, 1, 2, 99]), 5.0)
        assert (job.blocks, job.failed) == (3, 2)
        await world.settle()
        assert outcome(job) == (JobState.DONE, 3, 1, 2)
        kept = await world.acquire(session, layout, [0])
        job = world.store.prefetch(session, layout, keys_of(layout, [1, 2]), 5.0)
        assert outcome(job) == (JobState.FAILED, 2, 0, 2)
        world.store.release(session, [held.lease, kept.lease])

    on_disk(tmp_path, test)


def test_a_load_of_a_run_that_failed_is_told_of_its_own_key(tmp_path: Path) -> None:
    """Of a key before it that is not stored it was told."""

    async def test(world: World, session: Session, layout: Layout) -> None:
        path = [20, 21, 22, 23]
        world.put(session, layout, path)
        await world.janitor.write_back_once()
        await world.settle()
        world.put(session, layout, [30, 31, 32, 33])
        world.disk.faults = Faults(read_error=1.0)
        asked = keys_of(layout, [99, 20, 21, 98, 22, 23])
        job = world.store.prefetch(session, layout, asked, 5.0)
        await world.settle()
        assert outcome(job) == (JobState.FAILED, 4, 0, 4)
        events = world.shell.events.read(epoch=1, cursor=0, events_max=1000).events
        failed = [int.from_bytes(e.key, "big") for e in events if e.kind is EventKind.LOAD_FAILED]
        assert failed == path

    on_disk(tmp_path, test)


def test_a_job_that_needs_nothing_is_done(tmp_path: Path) -> None:
    async def test(world: World, session: Session, layout: Layout) -> None:
        job = world.store.prefetch(session, layout, keys_of(layout, [7, 99]), 5.0)
        assert outcome(job) == (JobState.DONE, 0, 0, 0)

    on_disk(tmp_path, test)


def test_a_job_whose_every_load_failed_is_not_done(tmp_path: Path) -> None:
    async def test(world: World, session: Session, layout: Layout) -> None:
        world.disk.faults = Faults(read_error=1.0)
        job = world.store.prefetch(session, layout, keys_of(layout, [0, 1]), 5.0)
        await world.settle()
        assert outcome(job) == (JobState.FAILED, 2, 0, 2)

    on_disk(tmp_path, test)


@pytest.mark.parametrize("who", ["the status", "the janitor"])
def test_a_job_expires_while_it_waits_and_is_not_carried(tmp_path: Path, who: str) -> None:
    """The deadline was looked at only when a thread took the work up: behind a busy disk a job ran for ever."""

    async def test(world: World, session: Session, layout: Layout) -> None:
        job, gate = await queued(world, session, layout)
        assert world.store.jobs.status(job.id, "default").state is JobState.RUNNING
        world.clock.advance(5.1)
        if who == "the janitor":
            await world.janitor.expire_once()
            assert job.state is JobState.EXPIRED
        assert world.store.jobs.status(job.id, "default").state is JobState.EXPIRED
        gate.set()
        await world.settle()
        assert outcome(job) == (JobState.EXPIRED, 2, 0, 2)

    on_disk(tmp_path, test)


def test_what_a_cancelled_job_had_queued_is_not_carried(tmp_path: Path) -> None:
    async def test(world: World, session: Session, layout: Layout) -> None:
        job, gate = await queued(world, session, layout)
        await asyncio.sleep(0)
        world.store.jobs.cancel(job.id, "default")
        gate.set()
        await world.settle()
        assert outcome(job) == (JobState.CANCELLED, 2, 0, 2)

    on_disk(tmp_path, test)


def test_a_job_that_arrived_whole_is_done_however_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World, session: Session, layout: Layout) -> None:
        begun, gate, read = threading.Event(), threading.Event(), world.disk.read

        def held_read(items: Sequence[tuple[PieceRef, Place, Views]]) -> object:
            begun.set()
            gate.wait()
            return read(items)

        monkeypatch.setattr(world.disk, "read", held_read)
        job = world.store.prefetch(session, layout, keys_of(layout, [0, 1]), 5.0)
        begun.wait(10.0)
        world.clock.advance(6.0)
        gate.set()
        await world.settle()
        assert outcome(job) == (JobState.DONE, 2, 2, 0)

    on_disk(tmp_path, test)
