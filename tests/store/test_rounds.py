"""Rounds of the scheduler over real lanes: page-ins are carried, bounded, and stand back for what an engine waits for."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstored.core.calls import Reason
from kvstored.core.plan import Signal
from kvstored.core.types import Layout, TierId
from kvstored.store.lane import Urgency
from kvstored.store.sessions import Session
from kvstored.tiers.faulty import Faults
from tests.store.world import BLOCK_BYTES, NO_FAULTS, World, keys_of, running


def on_disk(
    tmp_path: Path,
    test: Callable[[World, Session, Layout], Awaitable[None]],
    *,
    arena_blocks: int = 8,
) -> None:
    """Eight blocks of their own on NVMe; the last ones lie in memory too, as far as it has room."""
    world = World(tmp_path, arena_blocks=arena_blocks, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(16):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        await test(world, session, layout)
        await world.check_nothing_leaked()

    running(world, main)


def want(world: World, layout: Layout, numbers: list[int], wait_s: float = 0.0) -> bool:
    deadline_s = world.clock.now_s() + wait_s if wait_s else 0.0
    keys = keys_of(layout, numbers)
    return world.catalog.page_ins.want(
        layout.id, keys.fingerprints, Signal.REQUEST, deadline_s, world.clock.now_s()
    )


def in_memory(world: World, layout: Layout, numbers: list[int]) -> list[int]:
    bits, _ = world.store.locate(layout, keys_of(layout, numbers))
    return [n for n, tiers in zip(numbers, bits.tolist(), strict=True) if tiers >> TierId.DRAM & 1]


def test_what_is_wanted_comes_up_without_being_asked_for(tmp_path: Path) -> None:
    async def test(world: World, session: Session, layout: Layout) -> None:
        assert not in_memory(world, layout, [0, 1])
        want(world, layout, [0])
        want(world, layout, [1])
        await world.janitor.page_in_once()
        await world.settle()
        assert in_memory(world, layout, [0, 1]) == [0, 1]
        assert world.shell.counts["prefetched_blocks", "done"] == 2
        assert world.shell.counts["page_in_blocks", "request:taken"] == 2
        block = (await world.acquire(session, layout, [0])).blocks[0]
        world.check_content(block, 0)

    on_disk(tmp_path, test)


def test_a_running_request_has_its_path_by_its_deadline(tmp_path: Path) -> None:
    async def test(world: World, session: Session, layout: Layout) -> None:
        found = world.store.begin_request(session, layout, keys_of(layout, [3]), b"r")
        assert found.tier_blocks[TierId.NVME] == 1
        assert not world.catalog.page_ins.wants, "nothing is loaded that nobody asked for"
        keys = keys_of(layout, [2])
        world.store.begin_request(session, layout, keys, b"s", load_wait_s=1.0)
        await world.janitor.page_in_once()
        await world.settle()
        assert in_memory(world, layout, [2, 3]) == [2]

    on_disk(tmp_path, test)


def test_nothing_is_paged_in_while_an_engine_waits_for_a_load(tmp_path: Path) -> None:
    async def test(world: World, session: Session, layout: Layout) -> None:
        gate = threading.Event()
        for _ in range(3):
            world.shell.tiers.disk_lane.submit(gate.wait, Urgency.DEMAND)
        loading = asyncio.ensure_future(world.acquire(session, layout, [0]))
        await asyncio.sleep(0)
        want(world, layout, [1])
        await world.janitor.page_in_once()
        assert world.catalog.page_ins.wants, "it waits"
        gate.set()
        await loading
        await world.janitor.page_in_once()
        await world.settle()
        assert in_memory(world, layout, [1]) == [1]

    on_disk(tmp_path, test)


def test_few_are_under_way_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.store.rounds.PAGE_IN_BYTES", 2 * BLOCK_BYTES)

    async def test(world: World, session: Session, layout: Layout) -> None:
        gate = threading.Event()
        for _ in range(3):
            world.shell.tiers.disk_lane.submit(gate.wait, Urgency.BACKGROUND)
        for i in range(5):
            want(world, layout, [i])
        for _ in range(3):
            await world.janitor.page_in_once()
        assert world.store.mover.tasks_now == 2
        gate.set()
        await world.settle()
        for _ in range(2):
            await world.janitor.page_in_once()
            await world.settle()
        assert world.shell.counts["prefetched_blocks", "done"] == 5

    on_disk(tmp_path, test)


def test_a_whole_round_does_everything_that_there_is_room_for(tmp_path: Path) -> None:
    async def test(world: World, session: Session, layout: Layout) -> None:
        await world.janitor.make_room_once()
        world.put(session, layout, [40])
        want(world, layout, [0])
        done = world.store.rounds.whole()
        assert (len(done.loads), len(done.writes)) == (1, 1)
        await world.settle()
        assert in_memory(world, layout, [0, 40]) == [0, 40]
        assert all(world.store.locate(layout, keys_of(layout, [40]))[0] >> TierId.NVME & 1)

    on_disk(tmp_path, test, arena_blocks=16)


@pytest.mark.parametrize("faults", [NO_FAULTS, Faults(write_error=0.3)])
def test_what_is_laid_together_on_nvme_reads_as_before_whatever_fails(
    tmp_path: Path, faults: Faults
) -> None:
    world = World(tmp_path, arena_blocks=256, disk_blocks=1024, seed=3)
    world.grow()
    world.catalog.grow(TierId.NVME, 1, 1024)

    async def main() -> None:
        layout, session = await world.open(), world.session()
        heads = [0, 1000, 2000]
        for i in range(32):
            for head in heads:
                world.put(session, layout, [*range(head, head + i + 1)])
            await world.janitor.write_back_once()
            await world.settle()
        for head in heads:
            grant = await world.acquire(session, layout, [*range(head, head + 32)])
            world.store.release(session, [grant.lease])
        world.disk.faults = faults
        for _ in range(12):
            await world.janitor.lay_together_once()
            await world.settle()
            world.store.rounds._write_back_after_s = 0.0  # the pause after a failure
            await world.janitor.write_back_once()
            await world.settle()
        assert world.shell.counts["gathered_blocks", ""] >= 3 * 32
        world.disk.faults = NO_FAULTS
        books = world.catalog.books
        world.store.rounds._write_back_after_s = 0.0
        await world.janitor.write_back_once()
        await world.settle()
        for number in reversed(range(32)):
            for head in heads:
                row = books.index.find(keys_of(layout, [head + number]).fingerprints).item()
                world.catalog.drop_copy(
                    books.copy_in(row, TierId.DRAM, 0), Reason.DEMAND, world.clock.now_s()
                )
        world.shell.apply()
        for head in heads:
            numbers = [*range(head, head + 32)]
            grant = await world.acquire(session, layout, numbers)
            for number, block in zip(numbers, grant.blocks, strict=True):
                world.check_content(block, number)
        await world.check_nothing_leaked()

    running(world, main)
