"""A seeded storm of callers that put, read, cancel, vanish and remove, over a disk that fails: whatever happens, nothing leaks and no wrong byte is
served."""

import asyncio
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvstored.core.calls import ReadStatus
from kvstored.core.types import Layout, NamespaceSpec, TierId
from kvstored.errors import KvstoredError, LeaseLost, NoSpace, Unavailable
from kvstored.store.sessions import Session
from kvstored.tiers.device import Moves
from kvstored.tiers.faulty import Faults
from kvstored.tiers.stand_in import HostDevice
from kvstored.tiers.views import at_address
from tests.store.world import World, hybrid_spec, keys_of, running, spec_of

FAULTS = Faults(no_space=0.05, write_error=0.1, read_error=0.1, bit_flip=0.05, delay_s_max=0.004)
BLOCKS = 120
STEPS = 300
CALLERS = 6


class Caller:
    """One engine: a session, and steps drawn from its own random numbers."""

    def __init__(self, world: World, layout: Layout, rng: random.Random) -> None:
        self.world = world
        self.layout = layout
        self.rng = rng
        self.session = world.session()
        self.reads = self.hbm_reads = self.early_reads = self.failed_reads = 0

    async def run(self) -> None:
        for _ in range(STEPS):
            step = self.rng.choice(
                [
                    self.put,
                    self.put,
                    self.read,
                    self.read,
                    self.read,
                    self.hurried_read,
                    self.read_in_hbm,
                    self.forget,
                ]
            )
            with suppress(KvstoredError):
                await step()
            if self.rng.random() < 0.03:
                self.vanish()
            await asyncio.sleep(self.rng.random() * 0.003)

    def path(self) -> range:
        begin = self.rng.randrange(BLOCKS)
        return range(begin, min(BLOCKS, begin + self.rng.randrange(1, 8)))

    async def put(self) -> None:
        numbers = self.path()
        grants = self.world.reserve(self.session, self.layout, numbers)
        await asyncio.sleep(0)
        fills, sums = [], []
        for number, grant in zip(numbers, grants, strict=True):
            if grant is None:
                continue
            if self.rng.random() < 0.1:
                continue  # forgotten: its time runs out, or its session ends
            fills.append(grant.fill)
            sums.append(self.world.write(grant, number))
        if self.rng.random() < 0.1:
            self.world.store.puts.abort(self.session, fills)
        else:
            self.world.store.puts.commit(self.session, fills, sums)

    async def read(self) -> None:
        await self._read(wait_s=1.0)

    async def read_in_hbm(self) -> None:
        if self.world.shell.tiers.hbm is None:
            return
        numbers, layers = self.path(), self.rng.choice([0, 10])
        session, store = self.session, self.world.store
        grant = await self.world.acquire(
            session, self.layout, numbers, wait_s=1.0, tier=TierId.HBM, layers=layers
        )
        try:
            if grant.lease and layers:
                self.early_reads += store.reads.arrivals.is_arriving(grant.lease)
                for layer in (3, layers):
                    await store.wait_layers(
                        session, grant.lease, layer, wait_s=5.0, on_its_way=False
                    )
            for number, block in zip(numbers, grant.blocks, strict=True):
                if block.status is ReadStatus.HIT:
                    self.world.check_hbm_content(block, number)
                    self.hbm_reads += 1
            await asyncio.sleep(self.rng.random() * 0.002)
        except (Unavailable, LeaseLost):
            self.failed_reads += 1  # the copy found no memory on the way, or the session is gone
        finally:
            if grant.lease and self.rng.random() < 0.95:
                store.release(session, [grant.lease])

    async def hurried_read(self) -> None:
        """Cancelled somewhere on its way, as when its caller's deadline passes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.rng.random() * 0.006):
                await self._read(wait_s=1.0)

    async def _read(self, wait_s: float) -> None:
        session: Session = self.session
        numbers = self.path()
        grant = await self.world.acquire(session, self.layout, numbers, wait_s)
        try:
            for number, block in zip(numbers, grant.blocks, strict=True):
                if block.status is ReadStatus.HIT:
                    self.world.check_content(block, number)
                    self.reads += 1
            await asyncio.sleep(self.rng.random() * 0.002)
        finally:
            if grant.lease and self.rng.random() < 0.95:
                self.world.store.release(session, [grant.lease])

    async def forget(self) -> None:
        if self.rng.random() < 0.2:
            await self.world.store.remove(self.layout, keys_of(self.layout, self.path()))
        else:
            has_hbm = self.world.shell.tiers.hbm is not None
            tier = TierId.HBM if has_hbm and self.rng.random() < 0.5 else TierId.DRAM
            job = self.world.store.prefetch(
                self.session, self.layout, keys_of(self.layout, self.path()), 1.0, tier
            )
            if self.rng.random() < 0.5:
                self.world.store.jobs.cancel(job.id, "default")

    def vanish(self) -> None:
        """Its session ends with whatever it held; a new one begins."""
        self.world.store.clients.close(self.session)
        self.session = self.world.session()


class FaultyDevice(HostDevice):
    """Now and then without memory for a submission, slow, or with a bit flipped on the way down."""

    def __init__(self, size_bytes: int, rng: random.Random) -> None:
        super().__init__(size_bytes)
        self._rng = rng
        self._turn = threading.Lock()

    def upload(self, moves: Moves) -> None:
        self._stumble()
        super().upload(moves)

    def download(self, moves: Moves) -> None:
        self._stumble()
        super().download(moves)
        with self._turn:
            if self._rng.random() < 0.1:
                i = self._rng.randrange(len(moves))
                view = at_address(int(moves.addresses[i]), int(moves.sizes[i]))
                view[self._rng.randrange(len(view))] ^= 1

    def _stumble(self) -> None:
        with self._turn:
            is_full, delay_s = self._rng.random() < 0.1, self._rng.random() * 0.004
        time.sleep(delay_s)
        if is_full:
            raise NoSpace("no memory for staging: injected")


@pytest.mark.parametrize("spec", [spec_of(), hybrid_spec()], ids=["one group", "hybrid"])
@pytest.mark.parametrize("hbm_blocks", [0, 16], ids=["", "gpu"])
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_leaks_nothing_and_serves_no_wrong_byte(
    tmp_path: Path, seed: int, hbm_blocks: int, spec: NamespaceSpec
) -> None:
    world = World(
        tmp_path,
        arena_blocks=40,
        disk_blocks=90,
        faults=FAULTS,
        seed=seed,
        hbm_blocks=hbm_blocks,
        opener=lambda _, size_bytes: FaultyDevice(size_bytes, random.Random(seed)),
    )
    world.grow()

    async def housekeeping() -> None:
        while True:
            world.clock.advance(0.5)
            await world.janitor.expire_once()
            await world.janitor.make_room_once()
            await world.janitor.write_back_once()
            if hbm_blocks:
                await world.janitor.demote_once()
            await asyncio.sleep(0.005)

    async def main() -> None:
        layout = await world.open(spec)
        callers = [
            Caller(world, layout, random.Random(seed * 1000 + number)) for number in range(CALLERS)
        ]
        janitor = asyncio.ensure_future(housekeeping())
        await asyncio.gather(*(caller.run() for caller in callers))
        janitor.cancel()
        with suppress(asyncio.CancelledError):
            await janitor
        assert sum(caller.reads for caller in callers) > 50, "the storm read nothing"
        hbm_reads = sum(caller.hbm_reads for caller in callers)
        early_reads = sum(caller.early_reads for caller in callers)
        assert early_reads > 5 or not hbm_blocks, "no read was answered early"
        assert hbm_reads > 20 or not hbm_blocks, "the storm read nothing on the GPU"
        world.catalog.check()
        await world.check_nothing_leaked()

    running(world, main)
