"""Fills belong to their session, and a commit that finds none changes nothing."""

from pathlib import Path

from kvstored.core.calls import FillStatus, ReadStatus
from tests.store.world import World, running


def test_a_fill_is_committed_and_aborted_by_its_own_session_only(tmp_path: Path) -> None:
    """Ids are easy to guess. Naming another's fill made its own commit fail half way: readable in the books, not in the arena."""
    world = World(tmp_path)

    async def main() -> None:
        world.grow()
        layout = await world.open()
        owner, other = world.session(), world.session()
        grants = world.reserve(owner, layout, [1, 2])
        fills = [grant.fill for grant in grants if grant]
        sums = [world.write(g, n) for n, g in zip([1, 2], grants, strict=True) if g]
        puts = world.store.puts
        assert puts.columns_of(other, fills[0]) == ()
        assert puts.commit(other, fills, [{}, {}]) == [FillStatus.LOST] * 2
        puts.abort(other, fills)
        assert puts.commit(owner, fills, sums) == [FillStatus.COMMITTED] * 2
        read = await world.acquire(other, layout, [1, 2])
        assert [block.status for block in read.blocks] == [ReadStatus.HIT] * 2
        await world.check_nothing_leaked()

    running(world, main)


def test_a_fill_named_twice_in_a_commit_is_committed_once(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def main() -> None:
        world.grow()
        layout = await world.open()
        session = world.session()
        (grant,) = world.reserve(session, layout, [1])
        assert grant is not None
        sums = world.write(grant, 1)
        status = world.store.puts.commit(session, [grant.fill] * 2, [sums, sums])
        assert status == [FillStatus.COMMITTED, FillStatus.LOST]
        await world.check_nothing_leaked()

    running(world, main)


def test_a_commit_between_the_end_of_a_fill_and_the_round_that_ends_it_is_lost(
    tmp_path: Path,
) -> None:
    """What is kept for the wire was forgotten a moment before the books ended the fill: its commit then failed half way."""
    world = World(tmp_path)

    async def main() -> None:
        world.grow()
        layout = await world.open()
        session = world.session()
        (grant,) = world.reserve(session, layout, [1], ttl_s=5.0)
        assert grant is not None
        world.clock.advance(5.5)
        world.store.puts.forget_expired()
        assert world.store.puts.commit(session, [grant.fill], [{}]) == [FillStatus.LOST]
        read = await world.acquire(session, layout, [1])
        assert read.blocks[0].status is ReadStatus.MISS
        await world.check_nothing_leaked()

    running(world, main)
