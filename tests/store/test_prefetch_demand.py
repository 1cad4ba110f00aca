"""Page-ins never delay what an engine waits for: a seeded simulation of engines and guesses over a disk in virtual time.

The lane is simulated with the rules of `store/lane.py` (demand first, background on part of the threads), so that the same life can be
lived with and without guesses, to the microsecond. Store, scheduler and catalog are real.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TypeVar

import pytest

from kvstored.core.plan import Signal
from kvstored.core.prefetched import PrefetchLimits
from kvstored.core.types import Layout
from kvstored.store.lane import Running, Urgency
from kvstored.store.sessions import Session
from tests.store.world import World, keys_of, running

T = TypeVar("T")
THREADS, BACKGROUND_MAX = 4, 2
CALL_S = 0.002
"""Of any call of the disk."""
BLOCKS = 96


@dataclass
class Call:
    work: Callable[[], object]
    future: "asyncio.Future[object]"
    urgency: Urgency
    asked_s: float
    begun_s: float = -1.0


@dataclass
class VirtualLane:
    """`waits`: of demand, until a thread took it; `overtaken`: background begun while demand waited for a thread or for its bytes."""

    now_s: Callable[[], float]
    queued_: list[Call] = field(default_factory=list)
    at: list[Call] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    overtaken: int = 0
    background: int = 0
    name: str = "disk"

    @property
    def queued(self) -> int:
        return len(self.queued_)

    @property
    def running(self) -> int:
        return len(self.at)

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Running[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = Call(work, future, urgency, self.now_s())  # type: ignore[arg-type]  # as Lane has it
        if urgency is Urgency.BACKGROUND and self._has_demand():
            self.overtaken += 1
        self.background += urgency is Urgency.BACKGROUND
        self.queued_.append(call)
        self.begin()
        return Running(future)

    def close(self) -> None:
        pass

    def begin(self) -> None:
        for call in sorted(self.queued_, key=lambda call: call.urgency):
            background = sum(each.urgency is Urgency.BACKGROUND for each in self.at)
            is_held = call.urgency is Urgency.BACKGROUND and background >= BACKGROUND_MAX
            if len(self.at) < THREADS and not is_held:
                self.queued_.remove(call)
                call.begun_s = self.now_s()
                if call.urgency is Urgency.DEMAND:
                    self.waits.append(call.begun_s - call.asked_s)
                self.at.append(call)

    def end_until_now(self) -> None:
        for call in [each for each in self.at if each.begun_s + CALL_S <= self.now_s() + 1e-9]:
            self.at.remove(call)
            call.future.set_result(call.work())
        self.begin()

    def _has_demand(self) -> bool:
        return any(each.urgency is Urgency.DEMAND for each in (*self.queued_, *self.at))


@dataclass
class Life:
    """What a simulated time was like. `took_s`: how long each read took; `background`: calls of the disk that stand back for what an engine waits for."""

    waits: list[float]
    took_s: list[float]
    overtaken: int
    background: int
    guessed: int


def lived(tmp_path: Path, seed: int, *, engines: int, guesses: bool) -> Life:
    folder = tmp_path / f"{seed}-{guesses}"
    folder.mkdir()
    world = World(folder, arena_blocks=48, disk_blocks=256, policy="lru")
    world.grow()
    took_s: list[float] = []

    async def main() -> Life:
        layout, session = await world.open(), world.session()
        for number in range(BLOCKS):
            world.put(session, layout, [number])
            await world.janitor.write_back_once()
            await world.settle()
        world.shell.tiers.disk_lane.close()
        lane = VirtualLane(world.clock.now_s)
        world.shell.tiers = replace(world.shell.tiers, disk_lane=lane)  # type: ignore[arg-type]  # stands in
        world.catalog.carriage.ahead.limits = PrefetchLimits(share=0.3, waste_max=1.0)
        random = Random(seed)
        reads: list[asyncio.Future[None]] = []
        for _ in range(400):
            number, target = random.randrange(BLOCKS), random.randrange(BLOCKS)
            wanted, goes = random.random() < 0.3, random.random() < 0.15
            if wanted and guesses:
                names = keys_of(layout, [number]).fingerprints
                page_ins = world.catalog.page_ins
                page_ins.want(layout.id, names, Signal.SESSION, 0.0, world.clock.now_s())
            reads = [each for each in reads if not each.done()]
            if goes and len(reads) < engines:
                reads.append(asyncio.ensure_future(read(world, session, layout, target, took_s)))
            for _ in range(4):
                await asyncio.sleep(0)
            await world.janitor.page_in_once()
            world.clock.advance(CALL_S / 4)
            lane.end_until_now()
            for _ in range(8):
                await asyncio.sleep(0)
            world.store.rounds.settle()
        while reads or lane.queued or lane.running:
            world.clock.advance(CALL_S)
            lane.end_until_now()
            for _ in range(8):
                await asyncio.sleep(0)
            reads = [each for each in reads if not each.done()]
        guessed = world.shell.counts["prefetched_blocks", "done"]
        await world.check_nothing_leaked()
        return Life(lane.waits, took_s, lane.overtaken, lane.background, guessed)

    return running(world, main)


async def read(
    world: World, session: Session, layout: Layout, number: int, took_s: list[float]
) -> None:
    begun_s = world.clock.now_s()
    grant = await world.acquire(session, layout, [number])
    took_s.append(world.clock.now_s() - begun_s)
    world.check_content(grant.blocks[0], number)
    world.store.release(session, [grant.lease])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("engines", [1, 2, 6])
def test_no_page_in_begins_while_an_engine_waits_and_demand_finds_a_thread(
    tmp_path: Path, seed: int, engines: int
) -> None:
    alone, guessing = (
        lived(tmp_path, seed, engines=engines, guesses=guesses) for guesses in (False, True)
    )
    assert guessing.guessed > 0 == alone.guessed
    assert guessing.overtaken == 0
    assert guessing.background > 0 == alone.background, "a guess is no demand"
    if engines <= THREADS - BACKGROUND_MAX:
        assert max(guessing.waits, default=0.0) == 0.0
    else:
        assert max(guessing.waits, default=0.0) <= max([*alone.waits, CALL_S])
    assert max(guessing.took_s) <= max(alone.took_s) + CALL_S
