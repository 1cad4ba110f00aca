"""What clients may read without a message: exactly the plain blocks that lie ready in memory and need no look."""

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvstored.client.projected import Index
from kvstored.core.types import Extent, Layout, Place, TierId
from tests.store.test_recovery import filled, recovered, restarted
from tests.store.world import KEY_BYTES, World, hybrid_spec, keys_of, running, spec_of


def shown(world: World, layout: Layout, numbers: range | list[int]) -> list[int]:
    """Which of the blocks the projection tells, one by one and as columns."""
    index = Index(os.dup(world.shell.tiers.projection.read_fd), world.shell.events.epoch)
    keys = [number.to_bytes(KEY_BYTES, "big") for number in numbers]
    many = index.find(keys, layout.digest, layout.seed).lengths
    single = [index.find([key], layout.digest, layout.seed).lengths[0] for key in keys]
    assert many == single
    return [number for number, length in zip(numbers, many, strict=True) if length]


def test_blocks_are_shown_from_their_commit_to_their_removal(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(), world.session()
        grants = world.reserve(session, layout, range(12))
        assert shown(world, layout, range(12)) == []
        written = [(g.fill, world.write(g, n)) for n, g in enumerate(grants) if g]
        world.store.puts.commit(session, [f for f, _ in written], [s for _, s in written])
        assert shown(world, layout, range(12)) == list(range(12))
        await world.store.remove(layout, keys_of(layout, [10, 11]))
        assert shown(world, layout, range(12)) == list(range(10))
        world.put(session, layout, [10])
        assert shown(world, layout, range(12)) == list(range(11))

    running(world, main)


def test_a_removed_block_is_not_shown_any_more_although_somebody_still_reads_it(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(), world.session()
        world.put(session, layout, range(6))
        grant = await world.acquire(session, layout, range(6))
        await world.store.remove(layout, keys_of(layout, [2, 5]))
        assert shown(world, layout, range(6)) == [0, 1, 3, 4]
        world.put(
            session, layout, [5]
        )  # another copy, elsewhere; the old one leaves under its feet
        world.store.release(session, [grant.lease])
        assert shown(world, layout, range(6)) == [0, 1, 3, 4, 5]

    running(world, main)


def test_evicted_blocks_are_not_shown_and_loaded_ones_are_again(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=16)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(), world.session()
        for begin in range(0, 48, 6):
            world.put(session, layout, range(begin, begin + 6))
            await world.janitor.write_back_once()
            await world.settle()
        tiers, _ = world.store.locate(layout, keys_of(layout, range(48)))
        in_memory = [n for n in range(48) if tiers[n] >> 1 & 1]
        assert 0 < len(in_memory) <= 16
        assert shown(world, layout, range(48)) == in_memory
        gone = next(n for n in range(48) if n not in in_memory and tiers[n])
        grant = await world.acquire(session, layout, [gone])
        world.check_content(grant.blocks[0], gone)
        assert shown(world, layout, [gone]) == [gone]

    running(world, main)


@pytest.mark.parametrize("kind", ["hybrid", "mutable", "sharded", "other tenant"])
def test_blocks_that_are_not_plain_are_never_shown(tmp_path: Path, kind: str) -> None:
    spec = {
        "hybrid": hybrid_spec(),
        "mutable": replace(spec_of(), mutable=True),
        "sharded": spec_of(tp=2, sharded=True),
        "other tenant": replace(spec_of(), tenant="other"),
    }[kind]
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(spec), world.session()
        world.put(session, layout, range(6))
        assert len(world.shell.tiers.projection) == 0

    running(world, main)


def test_recovered_blocks_are_shown_once_they_proved_good(tmp_path: Path) -> None:
    world, _ = filled(tmp_path)
    later = restarted(world, tmp_path)

    async def main() -> None:
        layout, session = await later.open(), later.session()
        await recovered(later)
        assert shown(later, layout, range(25)) == []
        later.arena.views(_place(later, layout, 3), 1)[0][0] ^= 1
        grant = await later.acquire(session, layout, range(5))
        assert [block.status.name for block in grant.blocks] == ["HIT"] * 3 + ["MISS", "HIT"]
        assert shown(later, layout, range(25)) == [0, 1, 2, 4]

    running(later, main)


def test_nothing_in_space_where_a_late_writer_may_write_is_shown(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(), world.session()
        world.catalog.books.space.suspect((Extent(0, 0, 8),))
        world.put(session, layout, range(12))
        places = {
            n: world.catalog.books.place(int(world.catalog.books.copies.first_piece[c]))[0].start
            for n, c in enumerate(_copies(world, layout, 12))
        }
        clean = [n for n in range(12) if places[n] >= 8]
        assert 0 < len(clean) < 12
        assert shown(world, layout, range(12)) == clean
        grant = await world.acquire(session, layout, range(12))
        assert all(block.must_verify == (n not in clean) for n, block in enumerate(grant.blocks))
        assert shown(world, layout, range(12)) == clean

    running(world, main)


def test_reads_that_are_told_count_as_hits_however_often_a_key_comes(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(), world.session()
        world.put(session, layout, range(4))
        books = world.catalog.books
        rows = books.index.find(keys_of(layout, range(4)).fingerprints)
        world.clock.advance(5.0)
        assert world.store.was_read(layout, keys_of(layout, [0, 1, 0, 0, 99])) == 2
        assert books.blocks.hits[rows].tolist() == [3, 1, 0, 0]
        assert (books.blocks.last_s[rows] == world.clock.now_s()).tolist() == [True] * 2 + [
            False
        ] * 2
        counts = world.shell.counts
        assert counts["optimistic_keys", ""] == counts["read_keys_hit", "dram"] == 5
        world.catalog.check()

    running(world, main)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_exactly_what_may_be_read_at_once_is_shown(
    tmp_path: Path, seed: int
) -> None:
    world = World(tmp_path, arena_blocks=24, disk_blocks=64, seed=seed)
    world.grow()
    rng = random.Random(seed)

    async def main() -> None:
        layout, session = await world.open(), world.session()
        leases: list[int] = []
        for _ in range(120):
            begin, count = rng.randrange(60), rng.choice([1, 2, 5, 9])
            numbers = list(range(begin, begin + count))
            turn = rng.random()
            if turn < 0.45:
                world.put(session, layout, numbers)
            elif turn < 0.7:
                leases.append((await world.acquire(session, layout, numbers)).lease)
            elif turn < 0.8:
                await world.store.remove(layout, keys_of(layout, numbers))
            elif turn < 0.9:
                await world.janitor.write_back_once()
                await asyncio.sleep(0.002)
            else:
                world.store.release(session, [lease for lease in leases if lease])
                leases = []
            tiers, _ = world.store.locate(layout, keys_of(layout, range(70)))
            assert shown(world, layout, range(70)) == [n for n in range(70) if tiers[n] >> 1 & 1]

    running(world, main)


def _place(world: World, layout: Layout, number: int) -> Place:
    books = world.catalog.books
    block = int(books.index.find(keys_of(layout, [number]).fingerprints)[0])
    copy = next(c for c in books.copies_of(block) if books.copies.tier[c] == int(TierId.DRAM))
    return books.place(int(books.copies.first_piece[copy]))


def _copies(world: World, layout: Layout, count: int) -> list[int]:
    books = world.catalog.books
    rows = books.index.find(keys_of(layout, range(count)).fingerprints)
    return [int(books.blocks.first_copy[row]) for row in rows.tolist()]
