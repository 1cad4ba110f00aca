"""What is measured while the store works, and the advice that comes of it."""

import asyncio
import threading
from pathlib import Path

import pytest

from kvstored.core.advice import LoadQuestion, PrefillRun
from kvstored.core.types import Match
from kvstored.store.lane import Urgency
from kvstored.store.speeds import NVME_PRIOR, Speeds
from tests.store.world import BLOCK_BYTES, World, keys_of, running, spec_of


class Seconds:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_loads_that_run_at_once_count_by_when_they_end() -> None:
    clock = Seconds()
    speeds = Speeds(clock)
    for _ in range(100):
        begun_s = clock.now_s
        for _ in range(4):
            speeds.load_begun(1 << 20, Urgency.DEMAND)
        for _ in range(4):
            clock.now_s += 1e-3
            speeds.load_ended(1 << 20, Urgency.DEMAND, begun_s, is_good=True)
    line = speeds._nvme.line
    assert line.seconds(1 << 20) == pytest.approx(1e-3, rel=0.1), "1 MiB a millisecond, not 4"


def test_only_what_an_engine_waits_for_is_a_queue() -> None:
    speeds = Speeds(Seconds())
    speeds.load_begun(1 << 30, Urgency.BACKGROUND)
    assert speeds.tiers()[2].queue_s == 0.0
    speeds.load_begun(1 << 30, Urgency.DEMAND)
    assert speeds.tiers()[2].queue_s == pytest.approx((1 << 30) * NVME_PRIOR.size_s)
    speeds.load_ended(1 << 30, Urgency.DEMAND, 0.0, is_good=False)
    assert speeds.tiers()[2].queue_s == 0.0


def test_prefill_is_as_asked_else_as_measured_else_not_known() -> None:
    speeds, spec = Speeds(Seconds()), spec_of()
    assert speeds.prefill(1, spec).source == ""
    speeds.prefilled(1, spec, PrefillRun(tokens=1000, seconds=0.5))
    measured = speeds.prefill(1, spec)
    assert (measured.work_per_s, measured.source) == (2000.0, "measured")
    assert speeds.prefill(2, spec).source == "", "another namespace is another engine"
    asked = speeds.prefill(1, spec, tokens_per_s=7.0)
    assert (asked.work_per_s, asked.source) == (7.0, "asked")


def test_the_queue_of_loads_is_part_of_the_advice_and_leaves_it_with_them(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=4, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(), world.session()
        for i in range(8):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        keys = keys_of(layout, [0])

        def ask(tokens_per_s: float = 1e4) -> Match:
            found = world.store.match(layout, keys, 0)
            question = LoadQuestion(prefill_tokens_per_s=tokens_per_s)
            return world.store.advised(layout, keys, found, question)

        idle = ask().advice
        assert idle is not None
        assert idle.load_bytes == (0, 0, BLOCK_BYTES, 0)
        assert idle.queue_s == 0.0
        gate = threading.Event()
        for _ in range(3):
            world.shell.tiers.disk_lane.submit(gate.wait, Urgency.DEMAND)
        loading = asyncio.ensure_future(world.acquire(session, layout, [1, 2]))
        await asyncio.sleep(0)
        busy = ask().advice
        assert busy is not None
        assert busy.queue_s > 0 < busy.total_load_s - idle.total_load_s
        gate.set()
        grant = await loading
        world.store.release(session, [grant.lease])
        after = ask().advice
        assert after is not None
        assert after.queue_s == 0.0
        await world.check_nothing_leaked()

    running(world, main)


def test_a_calibration_measures_memory(tmp_path: Path) -> None:
    world = World(tmp_path)
    ticks = iter(range(1000))
    speeds = Speeds(lambda: next(ticks) * 1e-3)
    before = speeds.tiers()[1].line

    async def main() -> None:
        speeds.calibrate(world.shell.tiers.arena_lane)
        await world.settle()
        await asyncio.sleep(0)

    running(world, main)
    assert speeds.tiers()[1].line != before
