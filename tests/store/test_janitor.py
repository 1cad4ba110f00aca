"""What the janitor does and measures in a round."""

from pathlib import Path

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
