"""Reads on a GPU that are answered while layers still come: what is told is there, the rest is waited for, and a copy that fails is told too."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstored.core.calls import ReadStatus
from kvstored.core.columnar import Grant
from kvstored.core.types import Layout, TierId
from kvstored.errors import InvalidArgument, LeaseLost, Unavailable
from kvstored.store.sessions import Session
from kvstored.tiers.device import Device
from kvstored.tiers.stand_in import HostCopies, HostDevice
from tests.store.test_hbm import DRAM, HBM, where
from tests.store.world import BLOCK_BYTES, World, content_of, keys_of, running

LAYERS = 10
PART_BYTES = BLOCK_BYTES // LAYERS


class Slow(HostDevice):
    """Copies in order go on when they are let."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.let = [threading.Event() for _ in range(LAYERS)]
        self.fails_at = LAYERS

    def copies(self) -> HostCopies:
        device = self

        class Held(HostCopies):
            def wait(self, number: int) -> None:
                assert device.let[number].wait(20)
                if number == device.fails_at:
                    raise Unavailable("gpu is lost: Xid 79")
                super().wait(number)

        return Held(device)


class Slowly(World):
    def __init__(self, folder: Path) -> None:
        self.made: list[Slow] = []

        def opener(name: str, size_bytes: int) -> Device:
            self.made.append(Slow(size_bytes))
            return self.made[-1]

        super().__init__(folder, hbm_blocks=32, opener=opener)
        self.grow()

    @property
    def device(self) -> Slow:
        return self.made[0]

    def let(self, *parts: int) -> None:
        for part in parts:
            self.device.let[part].set()

    async def early(
        self, session: Session, layout: Layout, numbers: range, layers: int = LAYERS
    ) -> Grant:
        return await self.acquire(session, layout, numbers, tier=TierId.HBM, layers=layers)

    def check_layers(self, grant: Grant, numbers: range, ready: int) -> None:
        """The first layers are there, and no byte of the others."""
        for number, each in zip(numbers, grant.blocks, strict=True):
            piece = each.pieces[0]
            assert piece is not None
            begin = piece.place[0].start * 4096
            found = self.device._at(begin, BLOCK_BYTES)
            expected, upto = content_of(number), ready * PART_BYTES
            np.testing.assert_array_equal(found[:upto], expected[:upto])
            assert not found[upto:].any()


@pytest.fixture
def world(tmp_path: Path) -> Slowly:
    return Slowly(tmp_path)


def test_layers_are_told_as_they_come(world: Slowly) -> None:
    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(6))
        grant = await world.early(session, layout, range(6))
        assert [block.status for block in grant.blocks] == [ReadStatus.HIT] * 6
        arrivals = world.store.reads.arrivals
        assert arrivals.is_arriving(grant.lease)
        waiting = asyncio.ensure_future(wait(world, session, grant.lease, 4))
        for part in range(3):
            world.let(part)
        progress = await world.store.wait_layers(
            session, grant.lease, 3, wait_s=5.0, on_its_way=False
        )
        assert (progress.layers, progress.events) == (3, ())
        world.check_layers(grant, range(6), 3)
        assert not waiting.done()
        late = await world.store.wait_layers(session, grant.lease, 9, wait_s=0.01, on_its_way=False)
        assert late.layers == 3
        world.let(3)
        assert await waiting == 4
        world.let(*range(4, LAYERS))
        assert await wait(world, session, grant.lease, LAYERS) == LAYERS
        await world.settle()
        assert not arrivals.is_arriving(grant.lease)
        for number, block in enumerate(grant.blocks):
            world.check_hbm_content(block, number)
        assert where(world, layout, range(6)) == [HBM | DRAM] * 6
        again = await world.early(session, layout, range(6))
        assert not arrivals.is_arriving(again.lease), "all is there"
        assert await wait(world, session, again.lease, LAYERS) == LAYERS
        world.store.release(session, [grant.lease, again.lease])
        with pytest.raises(LeaseLost):
            await wait(world, session, grant.lease, 1)
        await world.check_nothing_leaked()

    running(world, main)


async def wait(world: World, session: Session, lease: int, layers: int) -> int:
    progress = await world.store.wait_layers(session, lease, layers, wait_s=5.0, on_its_way=False)
    return progress.layers


def test_events_are_told_before_the_layers_are_there(world: Slowly) -> None:
    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(3))
        grant = await world.early(session, layout, range(3))
        ahead = await world.store.wait_layers(session, grant.lease, 7, wait_s=5.0, on_its_way=True)
        assert ahead.layers == 7
        ((pool, handle),) = ahead.events
        assert pool == 0
        assert len(handle.split()) == 3
        world.check_layers(grant, range(3), 0)
        world.let(*range(LAYERS))
        await world.settle()
        whole = await world.store.wait_layers(session, grant.lease, 7, wait_s=5.0, on_its_way=True)
        assert not whole.events
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_a_copy_that_fails_on_the_way_is_told_to_who_waits(world: Slowly) -> None:
    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(3))
        world.device.fails_at = 2
        grant = await world.early(session, layout, range(3))
        world.let(*range(LAYERS))
        with pytest.raises(Unavailable, match="read from dram"):
            await wait(world, session, grant.lease, 3)
        assert await wait(world, session, grant.lease, 2) == 2, "these came before"
        await world.settle()
        assert where(world, layout, range(3)) == [DRAM] * 3
        world.check_layers(grant, range(3), 2)  # and nobody else's bytes come there meanwhile
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_a_source_that_is_bad_is_found_before_its_first_layer_goes(world: Slowly) -> None:
    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(6))
        grant = await world.acquire(session, layout, [2])
        piece = grant.blocks[0].pieces[0]
        assert piece is not None
        world.arena.views(piece.place, piece.length)[0][17] ^= 1
        world.store.release(session, [grant.lease])
        early = await world.early(session, layout, range(6))
        world.let(*range(LAYERS))
        with pytest.raises(Unavailable):
            await wait(world, session, early.lease, LAYERS)
        await world.settle()
        assert where(world, layout, range(6)) == [HBM | DRAM] * 2 + [0] + [HBM | DRAM] * 3
        for number in (0, 1, 3, 4, 5):
            world.check_hbm_content(early.blocks[number], number)
        world.store.release(session, [early.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_a_reader_that_leaves_early_gives_its_lease_back_and_the_copy_goes_on(
    world: Slowly,
) -> None:
    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(4))
        grant = await world.early(session, layout, range(4))
        world.store.release(session, [grant.lease])
        use = {use.tier: use for use in world.catalog.tier_use()}[TierId.HBM]
        assert use.leased_units == 0
        world.let(*range(LAYERS))
        await world.settle()
        assert where(world, layout, range(4)) == [HBM | DRAM] * 4
        await world.check_nothing_leaked()

    running(world, main)


def test_removed_while_they_come_blocks_stay_for_their_reader(world: Slowly) -> None:
    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(2))
        grant = await world.early(session, layout, range(2))
        assert await world.store.remove(layout, keys_of(layout, range(2))) == 2
        world.let(*range(LAYERS))
        assert await wait(world, session, grant.lease, LAYERS) == LAYERS
        world.check_layers(grant, range(2), LAYERS)
        await world.settle()
        assert where(world, layout, range(2)) == [0, 0]
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)


def test_layers_that_pieces_do_not_have_are_refused(world: Slowly) -> None:
    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, [1])
        with pytest.raises(InvalidArgument, match="layers=7"):
            await world.early(session, layout, range(1, 2), layers=7)
        await world.check_nothing_leaked()

    running(world, main)
