"""A whole store in one process: a real arena and lanes, a dict in place of the disk (which may be made to fail), no transport."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored import errors
from kvstored.clock import ManualClock
from kvstored.codec.frame import Codec
from kvstored.core.calls import (
    Acquire,
    FillStatus,
    Granted,
    Limits,
    Parents,
    ReadBlock,
    Reserve,
    TierLimits,
)
from kvstored.core.catalog import Catalog
from kvstored.core.columnar import Grant
from kvstored.core.keys import key_batch
from kvstored.core.namespace import Namespaces
from kvstored.core.types import (
    UNIT_BYTES,
    Access,
    GroupKind,
    GroupSpec,
    KeyBatch,
    Layout,
    NamespaceSpec,
    TierId,
)
from kvstored.metrics import Build, Metrics, Sets
from kvstored.store.clients import Peer, Wish
from kvstored.store.events import Events
from kvstored.store.janitor import Janitor
from kvstored.store.lane import Lane, Urgency
from kvstored.store.registry import Registry
from kvstored.store.sessions import Session
from kvstored.store.shell import Shell, Tiers
from kvstored.store.store import Store, StoreLimits
from kvstored.tiers.arena import Arena
from kvstored.tiers.coding import Coding
from kvstored.tiers.device import Opener, open_device
from kvstored.tiers.disk import Disk
from kvstored.tiers.faulty import Faults, FaultyTier
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.memory import MemoryTier
from kvstored.tiers.projection import Projection
from kvstored.tiers.stand_in import HostDevice
from kvstored.wire.methods import METHODS

T = TypeVar("T")
Bytes = NDArray[np.uint8]
SEGMENT_BYTES = 1 << 20
BLOCK_BYTES = 5000
BLOCK_TOKENS = 16
KEY_BYTES = 32
NO_FAULTS = Faults()


class World:
    """`arena_blocks`, `disk_blocks`: capacities in blocks of the default namespace (two units each). `frames`: a real disk in place of the dict."""

    def __init__(
        self,
        state_dir: Path,
        *,
        arena_blocks: int = 64,
        disk_blocks: int = 256,
        faults: Faults = NO_FAULTS,
        seed: int = 0,
        admit_hits: int = 0,
        arena: Arena | None = None,
        disk: MemoryTier | None = None,
        epoch: int = 1,
        tiers: Sequence[TierLimits] = (),
        policy: str = "composite",
        hbm_blocks: int = 0,
        opener: Opener = open_device,
        hbm_bytes_per_s: int = 0,
        frames: Disk | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.index_share = 0.0
        self.faults: list[tuple[str, BaseException]] = []
        self.arena = arena or Arena(
            SEGMENT_BYTES, incarnation=epoch, available_bytes=lambda: 1 << 40
        )
        self.memory = disk or MemoryTier()
        self.frames = frames
        self.disk = FaultyTier(frames or self.memory, faults, random.Random(seed), time.sleep)
        parts = Tiers(
            arena=self.arena,
            arena_lane=Lane("arena", threads=2, queue_max=256),
            disk=self.disk,
            disk_lane=Lane("disk", threads=3, queue_max=256),
            flush_disk_counters=lambda _: None,
            relink_disk=lambda _: None,
            disk_index_share=lambda: self.index_share,
            unpack_disk=frames.unpack if frames is not None else lambda _: [],
            coding=Coding(Codec.RAW) if frames is None else frames.coding,
            described=lambda items: [None for _ in items],
            projection=Projection(arena_blocks * 2 * UNIT_BYTES, epoch=epoch, tenant="default"),
            hbm=Hbm(["host:0"], SEGMENT_BYTES, opener) if hbm_blocks else None,
            hbm_lane=Lane("hbm", threads=2, queue_max=256) if hbm_blocks else None,
        )
        units = 2
        hbm = TierLimits(TierId.HBM, hbm_blocks * units, high=0.95, low=0.8, lease_share=1.0)
        self.catalog = Catalog(
            tiers=tiers
            or [
                TierLimits(TierId.DRAM, arena_blocks * units, high=0.95, low=0.8, lease_share=1.0),
                TierLimits(
                    TierId.NVME, disk_blocks * units, high=0.95, low=0.8, admit_hits=admit_hits
                ),
                *([hbm] if hbm_blocks else []),
            ],
            policy=policy,
            limits=Limits(quarantine_s=30.0),
            epoch=epoch,
        )
        events = Events(epoch=epoch, now_s=self.clock.now_s)
        self.shell = Shell(self.catalog, parts, events, self.clock, _metrics(), self._report)
        registry = Registry(self.shell, Namespaces(), state_dir)
        limits = StoreLimits(quarantine_s=30.0, hbm_bytes_per_s=hbm_bytes_per_s)
        self.store = Store(self.shell, registry, limits)
        self.janitor = Janitor(self.store)
        self.state_dir = state_dir
        self._connection = 0

    def grow(self) -> None:
        """Give the tiers their space: one segment each, of which the capacity is used."""
        self.catalog.grow(TierId.DRAM, *self.arena.grow())
        whole = (0, SEGMENT_BYTES // UNIT_BYTES)
        self.catalog.grow(TierId.NVME, *(self.frames.grow() if self.frames else whole))
        if self.shell.tiers.hbm is not None:
            self.catalog.grow(TierId.HBM, *self.shell.tiers.hbm.grow())

    async def open(self, spec: NamespaceSpec | None = None) -> Layout:
        return (await self.store.registry.open(spec or spec_of(), supersede=False)).layout

    def session(self, pid: int = 0) -> Session:
        self._connection += 1
        session, _ = self.store.clients.open(Peer(self._connection, pid, "default"), Wish())
        return session

    # ---- put and get as a client does them

    def reserve(
        self,
        session: Session,
        layout: Layout,
        numbers: Sequence[int],
        ttl_s: float = 30.0,
        last_valid_tokens: int = 0,
    ) -> list[Granted | None]:
        keys = keys_of(layout, numbers)
        groups = layout.spec.groups
        sizes = [[group.bytes_per_block for group in groups]] * len(numbers)
        call = Reserve(
            session=session.core,
            ns=layout.id,
            shard=0,
            keys=keys,
            parents=chained(keys),
            groups_mask=(1 << len(groups)) - 1,
            sizes=np.asarray(sizes, dtype=np.uint64).reshape(len(numbers), len(groups)),
            last_valid_tokens=last_valid_tokens,
            ttl_s=ttl_s,
        )
        return self.store.puts.reserve(session, layout, call, tuple(range(len(groups)))).grants

    def write(self, grant: Granted, number: int) -> dict[int, int]:
        """What the client does with its grant: the bytes of block `number`, and their checksums by group."""
        sums: dict[int, int] = {}
        for piece in grant.pieces:
            content = content_of(number, piece.group, piece.length)
            begin = 0
            for view in self.arena.views(piece.place, piece.length):
                view[:] = content[begin : begin + len(view)]
                begin += len(view)
            sums[piece.group] = xxhash.xxh3_64_intdigest(content.tobytes())
        return sums

    def put(
        self, session: Session, layout: Layout, numbers: Sequence[int], last_valid_tokens: int = 0
    ) -> list[FillStatus]:
        """Reserve, write and commit blocks whose bytes follow from their number; statuses of those that were granted."""
        grants = self.reserve(session, layout, numbers, last_valid_tokens=last_valid_tokens)
        written = [
            (grant.fill, self.write(grant, number))
            for number, grant in zip(numbers, grants, strict=True)
            if grant is not None
        ]
        fills = [fill for fill, _ in written]
        return self.store.puts.commit(session, fills, [sums for _, sums in written])

    async def acquire(
        self,
        session: Session,
        layout: Layout,
        numbers: Sequence[int],
        wait_s: float = 5.0,
        tier: TierId = TierId.DRAM,
        layers: int = 0,
    ) -> Grant:
        """In HBM what lies there: required groups."""
        groups = layout.spec.groups
        chosen = [g for g, each in enumerate(groups) if tier is TierId.DRAM or each.is_required]
        call = Acquire(
            session=session.core,
            ns=layout.id,
            shard=0,
            keys=keys_of(layout, numbers),
            groups_mask=sum(1 << g for g in chosen),
            ttl_s=30.0,
            tier=tier,
        )
        return await self.store.acquire(call, layout, wait_s=wait_s, layers=layers)

    def content(self, block: ReadBlock, group: int = 0) -> Bytes:
        piece = block.pieces[group]
        assert piece is not None
        return np.concatenate(self.arena.views(piece.place, piece.length))

    def check_hbm_content(self, block: ReadBlock, number: int) -> None:
        """The same of what was handed out on the GPU, as the GPU has it."""
        for piece in block.pieces:
            if piece is not None:
                device = self.shell.tiers.hbm_records._devices[0]
                assert isinstance(device, HostDevice)
                parts = [
                    device._at(extent.start * UNIT_BYTES, extent.units * UNIT_BYTES)
                    for extent in piece.place
                ]
                found = np.concatenate(parts)[: piece.length]
                expected = content_of(number, piece.group, piece.length)
                np.testing.assert_array_equal(found, expected)

    def check_content(self, block: ReadBlock, number: int) -> None:
        """Every piece that was handed out is as it was put."""
        for piece in block.pieces:
            if piece is not None:
                expected = content_of(number, piece.group, piece.length)
                found = np.concatenate(self.arena.views(piece.place, piece.length))
                np.testing.assert_array_equal(found, expected)

    # ---- the end

    async def settle(self) -> None:
        """Until nothing is on its way any more."""
        lanes = self.shell.tiers.lanes()
        for _ in range(5000):
            self.shell.discard()
            await asyncio.sleep(0.001)
            is_busy = any(lane.queued or lane.running for lane in lanes)
            if not is_busy and not self.store.mover.tasks_now and not self.shell.discards_waiting:
                return
        raise AssertionError("the store does not come to rest")

    async def check_nothing_leaked(self) -> None:
        """Sessions closed and time passed: no fill, lease, task, flight, quarantine or queued work is left."""
        self.disk.faults = NO_FAULTS
        await self.settle()
        for session in self.store.clients.sessions:
            self.store.clients.close(session)
        self.store.clients.stop_watching()
        self.clock.advance(3600.0)
        await self.janitor.expire_once()
        await self.settle()
        counts = self.catalog.counts
        left = {name: counts[name] for name in LEAKS if counts[name]}
        assert not left, left
        assert len(self.store.flights) == 0
        assert self.store.puts.open_fills == 0
        self.catalog.check()
        for use in self.catalog.tier_use():
            assert use.leased_units == use.quarantined_units == 0, use
        assert not self.faults, self.faults

    def close(self) -> None:
        for lane in self.shell.tiers.lanes():
            lane.close()
        if self.shell.tiers.hbm is not None:
            self.shell.tiers.hbm.close()

    def _report(self, what: str, error: BaseException) -> None:
        logging.getLogger(__name__).error(what, exc_info=error)
        self.faults.append((what, error))


LEAKS = ("sessions", "fills", "leases", "requests", "tasks", "quarantined")


def running(world: World, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a test's coroutine and close the world's lanes on the loop, so that their last callbacks run."""

    async def whole() -> T:
        try:
            return await main()
        finally:
            with suppress(AssertionError):
                await world.settle()
            world.close()
            await asyncio.sleep(0)

    return asyncio.run(whole())


def spec_of(model: str = "model", *, tp: int = 1, sharded: bool = False) -> NamespaceSpec:
    group = GroupSpec("kv", GroupKind.LINEAR, BLOCK_BYTES, sharded=sharded)
    return NamespaceSpec(
        model=model,
        revision="1",
        dtype="bf16",
        layout="nhd",
        layout_version=1,
        block_tokens=BLOCK_TOKENS,
        groups=(group,),
        tp=tp,
        sink_tokens=0,
    )


def keys_of(layout: Layout, numbers: Sequence[int]) -> KeyBatch:
    packed = b"".join(number.to_bytes(KEY_BYTES, "big") for number in numbers)
    return key_batch(packed, KEY_BYTES, layout.seed)


def chained(keys: KeyBatch) -> Parents:
    fingerprints = np.zeros((len(keys), 2), dtype=np.uint64)
    fingerprints[1:] = keys.fingerprints[:-1]
    known = np.ones(len(keys), dtype=np.bool_)
    known[:1] = False
    return Parents(fingerprints, known)


def hybrid_spec() -> NamespaceSpec:
    """Every part: a dense and a sparse required group, and a state checkpoint."""
    groups = (
        GroupSpec("dense", GroupKind.LINEAR, 3000),
        GroupSpec("sparse", GroupKind.COMPRESSED, 2000, ratio=4, access=Access.SPARSE),
        GroupSpec("state", GroupKind.STATE, 1000),
    )
    return replace(spec_of("hybrid"), groups=groups)


def content_of(number: int, group: int = 0, size_bytes: int = BLOCK_BYTES) -> Bytes:
    rng = np.random.default_rng([number, group])
    return rng.integers(0, 256, size_bytes, dtype=np.uint8)


def _metrics() -> Metrics:
    kinds = tuple(name for name in vars(errors) if name[0].isupper())
    queues = tuple(f"{lane}:{u.name.lower()}" for lane in ("arena", "disk", "hbm") for u in Urgency)
    methods = tuple(method.name for method in METHODS)
    return Metrics(Sets(methods, (*kinds, "internal"), queues), Build("0", "lru", "raw"))
