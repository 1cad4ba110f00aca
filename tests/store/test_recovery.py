"""After a restart: memory and disk give back what was committed, keep aside what was being written, and drop what nobody knows."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstored.core.calls import ReadStatus, Reason
from kvstored.core.types import Layout, TierId
from kvstored.errors import Unavailable
from kvstored.store import recovery
from kvstored.store.recovery import Found, Recovery
from kvstored.store.registry import FILE_NAME
from kvstored.tiers.arena import Arena
from kvstored.tiers.memory import MemoryTier
from tests.store.world import SEGMENT_BYTES, World, content_of, keys_of, running, spec_of


def restarted(world: World, tmp_path: Path) -> World:
    """A second daemon over the first one's memory (by its descriptors) and disk, with the namespaces that it saved."""
    arena = Arena(SEGMENT_BYTES, incarnation=2, available_bytes=lambda: 1 << 40)
    adopted = arena.adopt({name: os.dup(fd) for name, fd in world.arena.fds().items()})
    assert not adopted.refused
    later = World(tmp_path, arena=arena, disk=world.memory, epoch=2)
    later.catalog.recovery.begin(TierId.DRAM)
    later.catalog.recovery.begin(TierId.NVME)
    for segment, units in adopted.segments:
        later.catalog.grow(TierId.DRAM, segment, units)
    later.catalog.grow(TierId.NVME, 0, 4096)
    return later


async def recovered(world: World) -> dict[TierId, Found]:
    again = Recovery(world.shell, world.store.registry.by_digest)
    for tier in (TierId.DRAM, TierId.NVME):
        await again.run(tier)
    world.catalog.check()
    return again.found


def filled(tmp_path: Path) -> tuple[World, Layout]:
    world = World(tmp_path)
    world.grow()

    async def main() -> Layout:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(10))
        await world.janitor.write_back_once()
        await world.settle()
        world.put(session, layout, range(20, 25))
        await world.janitor.flush_counters_once()
        return layout

    return world, running(world, main)


def test_both_tiers_come_back_bit_for_bit(tmp_path: Path) -> None:
    world, before = filled(tmp_path)
    later = restarted(world, tmp_path)

    async def main() -> None:
        layout = await later.open()
        session = later.session()
        early = await later.acquire(session, layout, [0])
        assert early.blocks[0].reason is Reason.RECOVERING
        found = await recovered(later)
        assert (found[TierId.DRAM].kept, found[TierId.NVME].kept) == (15, 10)
        assert layout.digest == before.digest
        numbers = [*range(10), *range(20, 25)]
        grant = await later.acquire(session, layout, numbers)
        for number, block in zip(numbers, grant.blocks, strict=True):
            np.testing.assert_array_equal(later.content(block), content_of(number))
        match = later.store.match(layout, keys_of(layout, range(10)), 0)
        assert match.hit_blocks == 10
        await later.check_nothing_leaked()

    running(later, main)


def test_the_tree_is_the_same_after_a_restart(tmp_path: Path) -> None:
    world, layout = filled(tmp_path)
    later = restarted(world, tmp_path)

    async def main() -> None:
        await later.open()
        await recovered(later)

        def shape(each: World) -> list[tuple[object, ...]]:
            nodes, is_cut = each.catalog.looking.tree_nodes([layout.id], 999)
            assert not is_cut
            return sorted((n.head, n.depth, n.blocks, n.children, n.tier_blocks) for n in nodes)

        assert shape(later) == shape(world)
        await later.check_nothing_leaked()

    running(later, main)


def test_bytes_that_changed_while_nobody_watched_are_served_from_the_disk_or_not_at_all(
    tmp_path: Path,
) -> None:
    world, _ = filled(tmp_path)
    later = restarted(world, tmp_path)

    async def main() -> None:
        layout = await later.open()
        session = later.session()
        await recovered(later)
        for number in (3, 21):
            copies = later.catalog.looking.copies_of(layout.id, name_of(layout, number))
            dram = next(c for c in copies if later.catalog.books.copies.tier[c] == TierId.DRAM)
            piece = next(iter(later.catalog.books.pieces_of(dram)))
            later.arena.views(later.catalog.books.place(piece), 1)[0][0] ^= 1
        grant = await later.acquire(session, layout, [3, 21])
        assert [b.status for b in grant.blocks] == [ReadStatus.MISS] * 2
        assert [b.reason for b in grant.blocks] == [Reason.CORRUPT] * 2
        grant = await later.acquire(session, layout, [3, 21])
        np.testing.assert_array_equal(later.content(grant.blocks[0]), content_of(3))
        assert grant.blocks[1].status is ReadStatus.MISS
        await later.check_nothing_leaked()

    running(later, main)


def test_space_that_was_being_written_waits_for_the_death_of_its_writer(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()
    writer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    async def before() -> None:
        layout = await world.open()
        assert None not in world.reserve(world.session(pid=writer.pid), layout, range(3))

    running(world, before)
    later = restarted(world, tmp_path)

    async def after() -> None:
        await later.open()
        found = (await recovered(later))[TierId.DRAM]
        assert (found.writing, found.writers) == (3, {writer.pid})
        later.store.clients.adopt(found.writers)
        use = later.catalog.tier_use()[0]
        assert use.quarantined_units == 3 * 2
        writer.kill()
        writer.wait()
        await wait_until_clean(later)
        assert later.arena.scan(0, 9999).records.size == 0
        await later.check_nothing_leaked()

    running(later, after)


async def wait_until_clean(world: World) -> None:
    for _ in range(500):
        if not world.catalog.counts["quarantined"]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the space is still kept aside")


def test_a_writer_that_is_dead_already_keeps_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()
    writer = subprocess.Popen([sys.executable, "-c", "pass"])
    writer.wait()

    async def before() -> None:
        layout = await world.open()
        world.reserve(world.session(pid=writer.pid), layout, range(3))

    running(world, before)
    later = restarted(world, tmp_path)

    async def after() -> None:
        await later.open()
        found = (await recovered(later))[TierId.DRAM]
        later.store.clients.adopt(found.writers)
        assert later.catalog.counts["quarantined"] == 0
        await later.check_nothing_leaked()

    running(later, after)


def test_records_of_namespaces_that_nobody_knows_are_discarded(tmp_path: Path) -> None:
    world, _ = filled(tmp_path)
    later = restarted(world, tmp_path)

    async def main() -> None:
        await later.open(replace(spec_of(), model="another"))
        found = await recovered(later)
        assert found[TierId.DRAM].kept == found[TierId.NVME].kept == 0
        assert later.memory.scan(0, 99).records.size == 0
        assert later.arena.scan(0, 9999).records.size == 0
        await later.check_nothing_leaked()

    running(later, main)


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_tier_is_recovered_at_once(tmp_path: Path, count: int) -> None:
    world = World(tmp_path)
    world.grow()

    async def before() -> None:
        layout = await world.open()
        world.put(world.session(), layout, range(count))

    running(world, before)
    later = restarted(world, tmp_path)

    async def after() -> None:
        await later.open()
        assert (await recovered(later))[TierId.DRAM].kept == count

    running(later, after)


def name_of(layout: Layout, number: int) -> tuple[int, int]:
    low, high = keys_of(layout, [number]).fingerprints[0].tolist()
    return low, high


@pytest.mark.parametrize("method", ["scan", "discard"])
def test_a_disk_that_fails_for_a_while_delays_recovery_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The error went up through the daemon's task group: one EIO in the scan, and the daemon restarted without end."""
    monkeypatch.setattr(recovery, "RETRY_S", 0.01)
    world, _ = filled(tmp_path)
    (tmp_path / FILE_NAME).unlink()  # no namespace is known: every record is discarded
    later = restarted(world, tmp_path)
    calls = {"n": 0}
    real = getattr(MemoryTier, method)

    def failing(*given: object) -> object:
        calls["n"] += 1
        if calls["n"] <= 3:
            raise Unavailable("EIO")
        return real(*given)

    monkeypatch.setattr(MemoryTier, method, failing)

    async def main() -> None:
        found = await recovered(later)
        assert calls["n"] > 3
        assert found[TierId.NVME].dropped == 10
        assert TierId.NVME not in later.catalog.recovering
        assert [what for what, _ in later.faults] == ["recovery has to wait for its tier"]
        later.faults.clear()
        await later.check_nothing_leaked()

    running(later, main)


def test_slices_shrink_where_their_records_take_long_and_grow_again() -> None:
    # Of records in chains of 2,000 blocks one slice of 512 took 46 ms.
    size = recovery.SLICE_RECORDS
    for _ in range(9):
        size = recovery.paced(size, 0.02)
    assert size == recovery.SLICE_RECORDS_MIN
    assert recovery.paced(size, 0.004) == size
    for _ in range(9):
        size = recovery.paced(size, 0.001)
    assert size == recovery.SLICE_RECORDS
