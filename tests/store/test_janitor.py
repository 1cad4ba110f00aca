"""What the janitor does and measures in a round."""

from pathlib import Path

import pytest

from kvstored.core.types import TierId
from kvstored.metrics import Metrics
from tests.store.world import World, running


def lag_seconds(metrics: Metrics) -> float:
    """Sum of all observations."""
    found = metrics.registry.get_sample_value("kvstored_evictor_lag_seconds_sum")
    assert found is not None
    return found


def test_the_evictor_is_behind_from_its_own_high_watermark_on(tmp_path: Path) -> None:
    """It was measured above 98 % of the tier, whatever was configured: a tier that stayed at 96 % of 95 % showed no lag."""
    world = World(tmp_path, arena_blocks=50)  # high watermark at 95 %
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(48))
        grant = await world.acquire(session, layout, range(48))  # 96 %, and none may go
        await world.janitor.make_room_once()
        world.clock.advance(2.0)
        await world.janitor.make_room_once()
        assert lag_seconds(world.shell.metrics) == 2.0
        world.store.release(session, [grant.lease])
        await world.janitor.make_room_once()
        assert lag_seconds(world.shell.metrics) == 2.0
        await world.check_nothing_leaked()

    running(world, main)


def test_copies_leave_the_disk_while_its_index_is_nearly_full(tmp_path: Path) -> None:
    """The index refuses writes above 90 %: with small pieces that came long before the watermark of the space, and nothing was evicted."""
    world = World(tmp_path, arena_blocks=4, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(8):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        assert copies_on_disk(world) == 8
        world.index_share = 0.85
        await world.janitor.shed_index_once()
        await world.settle()
        assert copies_on_disk(world) == 8
        world.index_share = 0.86
        await world.janitor.shed_index_once()
        await world.settle()
        assert copies_on_disk(world) == 0
        assert world.shell.counts["evicted_copies", "nvme"] == 8
        await world.check_nothing_leaked()

    running(world, main)


def copies_on_disk(world: World) -> int:
    return next(use.copies for use in world.catalog.tier_use() if use.tier is TierId.NVME)


def test_a_group_commit_gathers_until_enough_is_dirty_or_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, arena_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        monkeypatch.setattr("kvstored.store.janitor.GATHER_S", 60.0)
        world.put(session, layout, [1])
        await world.janitor.gather_once()  # nothing was written for a long time
        await world.settle()
        assert copies_on_disk(world) == 1
        world.put(session, layout, [2])
        await world.janitor.gather_once()
        await world.settle()
        assert copies_on_disk(world) == 1, "it waits for others"
        monkeypatch.setattr("kvstored.store.janitor.GATHER_BYTES", 5 * 8192)
        world.put(session, layout, range(3, 7))
        await world.janitor.gather_once()
        await world.settle()
        assert copies_on_disk(world) == 6
        await world.check_nothing_leaked()

    running(world, main)
