"""What `explain` tells of a key."""

from pathlib import Path

from tests.store.world import World, hybrid_spec, keys_of, running


def test_a_stored_block_tells_that_its_state_expired(tmp_path: Path) -> None:
    """Its text named the copies that are there; that a checkpoint had been there, and why it went, was nowhere."""
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout = await world.open(hybrid_spec())
        session = world.session()
        world.put(session, layout, range(2))
        key = keys_of(layout, range(1)).key(0)
        assert "expired" not in world.store.survey.explain(layout, key).text
        world.clock.advance(700.0)
        await world.janitor.expire_once()
        world.clock.advance(5.0)
        verdict = world.store.survey.explain(layout, key)
        assert verdict.reason is None
        assert "window and state expired from dram 5.0 s ago" in verdict.text
        await world.check_nothing_leaked()

    running(world, main)
