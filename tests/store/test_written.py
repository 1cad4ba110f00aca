"""The day's written bytes over restarts of the daemon."""

from pathlib import Path

from kvstored.core.write_budget import WriteBudget
from kvstored.store import written
from tests.store.world import World, running


def test_what_was_written_is_kept_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=32)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(), world.session()
        world.put(session, layout, range(20))
        await world.janitor.write_back_once()
        await world.settle()
        await world.janitor.save_written_once()
        stored = world.shell.counts["stored_bytes", ""]
        assert world.catalog.admission.budget.spent(world.clock.now_s()) == stored > 0
        next_one = WriteBudget(0)
        assert written.restore(tmp_path, next_one, world.clock.now_s()) == ""
        assert next_one.spent(world.clock.now_s()) == stored
        await world.check_nothing_leaked()

    running(world, main)


def test_a_day_without_writes_leaves_no_file(tmp_path: Path) -> None:
    world = World(tmp_path)
    running(world, world.janitor.save_written_once)
    assert not (tmp_path / written.FILE_NAME).exists()
    assert written.restore(tmp_path, WriteBudget(0), 0.0) == ""


def test_a_damaged_file_is_told_and_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / written.FILE_NAME).write_bytes(b"\xff\xfe{")
    budget = WriteBudget(0)
    assert written.restore(tmp_path, budget, 1e9)
    assert budget.spent(1e9) == 0
