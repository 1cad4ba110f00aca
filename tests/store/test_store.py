"""The store over real memory and a failing disk: bytes come back as they were or not at all, and nothing is left behind."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from kvstored.core.calls import Acquire, FillStatus, ReadStatus, Reason
from kvstored.core.types import Extent, TierId
from kvstored.errors import Busy, KvstoredError, NotFound
from kvstored.store.events import EventKind
from kvstored.store.jobs import JobState
from kvstored.store.lane import Urgency
from kvstored.store.rounds import WRITE_BACK_PAUSE_S
from kvstored.tiers.base import Views, ref_of
from kvstored.tiers.faulty import Faults
from kvstored.tiers.memory import MemoryTier
from kvstored.tiers.record import Record
from tests.store.world import BLOCK_TOKENS, World, content_of, keys_of, running, spec_of


def test_a_block_is_read_as_it_was_put(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        assert world.put(session, layout, range(10)) == [FillStatus.COMMITTED] * 10
        grant = await world.acquire(session, layout, range(12))
        assert [b.status for b in grant.blocks] == [ReadStatus.HIT] * 10 + [ReadStatus.MISS] * 2
        for i in range(10):
            np.testing.assert_array_equal(world.content(grant.blocks[i]), content_of(i))
        assert world.store.release(session, [grant.lease, grant.lease]) == [False, True]
        await world.check_nothing_leaked()

    running(world, main)


def test_written_back_blocks_come_up_again_bit_for_bit(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=16, disk_blocks=100)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for begin in range(0, 64, 8):
            world.put(session, layout, range(begin, begin + 8))
            await world.janitor.write_back_once()
            await world.settle()
        tiers, _ = world.store.locate(layout, keys_of(layout, range(64)))
        assert np.all(tiers & 1 << TierId.NVME), "every block has its copy on the disk"
        for begin in range(0, 64, 8):
            numbers = range(begin, begin + 8)
            grant = await world.acquire(session, layout, numbers)
            assert all(block.status is ReadStatus.HIT for block in grant.blocks)
            for number, block in zip(numbers, grant.blocks, strict=True):
                np.testing.assert_array_equal(world.content(block), content_of(number))
            world.store.release(session, [grant.lease])
        assert world.shell.counts["copies", "nvme:dram"] > 0
        await world.check_nothing_leaked()

    running(world, main)


def test_a_corrupt_source_is_dropped_and_never_reaches_the_disk(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, [1])
        grant = await world.acquire(session, layout, [1])
        piece = grant.blocks[0].pieces[0]
        assert piece is not None
        world.arena.views(piece.place, 1)[0][0] ^= 1
        world.store.release(session, [grant.lease])
        await world.janitor.write_back_once()
        await world.settle()
        grant = await world.acquire(session, layout, [1])
        assert grant.blocks[0].status is ReadStatus.MISS
        assert grant.blocks[0].reason is Reason.CORRUPT
        assert world.shell.counts["corrupt_copies", "dram"] == 1
        kinds = [e.kind for e in world.shell.events.read(epoch=0, cursor=0, events_max=99).events]
        assert EventKind.CORRUPTED in kinds
        await world.check_nothing_leaked()

    running(world, main)


def test_bytes_that_rot_on_the_disk_are_a_miss(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=4, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(8):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        world.disk.faults = Faults(bit_flip=1.0)
        grant = await world.acquire(session, layout, [0])
        assert grant.blocks[0].status is ReadStatus.MISS
        world.disk.faults = Faults()
        grant = await world.acquire(session, layout, [0])
        assert grant.blocks[0].reason is Reason.CORRUPT
        assert world.shell.counts["corrupt_copies", "nvme"] == 1
        await world.check_nothing_leaked()

    running(world, main)


def test_a_read_that_cannot_wait_is_answered_pending_and_its_load_arrives(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=4, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(8):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        grant = await world.acquire(session, layout, [0], wait_s=0.0)
        assert grant.lease == 0
        assert grant.blocks[0].status is ReadStatus.PENDING
        await world.settle()
        events = world.shell.events.read(epoch=0, cursor=0, events_max=999).events
        loaded = [event for event in events if event.kind is EventKind.LOADED]
        assert [event.key for event in loaded] == [keys_of(layout, [0]).key(0)]
        grant = await world.acquire(session, layout, [0], wait_s=0.0)
        np.testing.assert_array_equal(world.content(grant.blocks[0]), content_of(0))
        await world.check_nothing_leaked()

    running(world, main)


def test_a_pending_load_that_fails_is_told_by_an_event(tmp_path: Path) -> None:
    """Who was answered PENDING waited for ever for a LOADED event that never came."""
    world = World(tmp_path, arena_blocks=4, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(8):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        world.disk.faults = Faults(bit_flip=1.0)
        cursor = world.shell.events.last
        grant = await world.acquire(session, layout, [1], wait_s=0.0)
        assert grant.blocks[0].status is ReadStatus.PENDING
        await world.settle()
        polled = world.shell.events.read(epoch=1, cursor=cursor, events_max=99)
        failed = [event for event in polled.events if event.kind is EventKind.LOAD_FAILED]
        key = keys_of(layout, [1]).key(0)
        assert [(e.key, e.digest, e.tier) for e in failed] == [(key, layout.digest, TierId.DRAM)]
        assert (await world.acquire(session, layout, [1])).blocks[0].status is ReadStatus.MISS
        await world.check_nothing_leaked()

    running(world, main)


def test_tokens_and_flops_of_a_read_are_those_of_its_blocks_and_count_once_a_rank_group(
    tmp_path: Path,
) -> None:
    """The position was the index within the call, a partial block counted as a full one, and every rank counted again."""
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        spec = replace(spec_of(tp=2), flops_base=10.0, flops_slope=2.0)
        layout = await world.open(spec)
        session = world.session()
        world.put(session, layout, range(3), last_valid_tokens=4)
        call = Acquire(session.core, layout.id, 0, keys_of(layout, [2, 9]), 1, 30.0)
        grants = [
            await world.store.acquire(replace(call, shard=s), layout, wait_s=1.0) for s in (0, 1)
        ]
        world.shell.settle()
        counts = world.shell.counts
        assert counts["hit_tokens", "dram"] == counts["read_tokens", "hit"] == 4
        assert counts["miss_tokens", "never-stored"] == BLOCK_TOKENS
        assert counts["flops_saved", ""] == 4 * (10 + 2 * (2 * BLOCK_TOKENS + 2))
        assert counts["read_keys_hit", "dram"] == 2
        world.store.release(session, [grant.lease for grant in grants])
        await world.check_nothing_leaked()

    running(world, main)


@pytest.mark.parametrize("count", [1, 8])
def test_what_is_there_is_answered_before_anything_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A load that was not there was put in order by whole books: every answer waited for what is for later."""
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout, session = await world.open(), world.session()
        world.put(session, layout, range(count))
        world.shell.settle()
        touch = MagicMock(wraps=world.shell.behind.books.touch)
        monkeypatch.setattr(world.shell.behind.books, "touch", touch)
        grant = await world.acquire(session, layout, range(count))
        assert all(block.status is ReadStatus.HIT for block in grant.blocks)
        assert (touch.call_count, world.shell.counts["read_keys_hit", "dram"]) == (0, 0)
        world.shell.settle()
        assert (touch.call_count, world.shell.counts["read_keys_hit", "dram"]) == (1, count)
        world.store.release(session, [grant.lease])

    running(world, main)


def test_callers_of_one_block_share_one_load(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=4, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(8):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        world.disk.faults = Faults(delay_s_max=0.05)
        waiters = [asyncio.ensure_future(world.acquire(session, layout, [0])) for _ in range(6)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        grants = await asyncio.gather(*waiters, return_exceptions=True)
        assert isinstance(grants[0], asyncio.CancelledError)
        for grant in grants[1:]:
            assert not isinstance(grant, BaseException)
            np.testing.assert_array_equal(world.content(grant.blocks[0]), content_of(0))
        assert world.shell.counts["copies", "nvme:dram"] == 1
        await world.check_nothing_leaked()

    running(world, main)


def test_another_key_with_the_same_fingerprint_is_a_miss(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, [1])
        real = keys_of(layout, [1])
        forged = keys_of(layout, [2])
        forged.fingerprints[:] = real.fingerprints
        call = Acquire(
            session=session.core, ns=layout.id, shard=0, keys=forged, groups_mask=1, ttl_s=5.0
        )
        grant = await world.store.acquire(call, layout, wait_s=1.0)
        assert grant.lease == 0
        assert grant.blocks[0].status is ReadStatus.MISS
        await world.check_nothing_leaked()

    running(world, main)


def test_a_draining_store_takes_no_fills_and_flushes_everything(tmp_path: Path) -> None:
    world = World(tmp_path, admit_hits=99)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(20))
        open_fill = world.reserve(session, layout, [50])[0]
        assert open_fill is not None
        assert await world.janitor.drain(10.0)
        with pytest.raises(Busy):
            world.reserve(session, layout, [51])
        sums = world.write(open_fill, 50)
        committed = world.store.puts.commit(session, [open_fill.fill], [sums])
        assert committed == [FillStatus.COMMITTED]
        tiers, _ = world.store.locate(layout, keys_of(layout, range(20)))
        assert np.all(tiers & 1 << TierId.NVME)
        await world.check_nothing_leaked()

    running(world, main)


def test_a_drain_gives_up_in_time(tmp_path: Path) -> None:
    world = World(tmp_path, faults=Faults(write_error=1.0))
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(4))
        assert not await world.janitor.drain(0.1)
        await world.check_nothing_leaked()

    running(world, main)


def test_a_prefetch_job_ends_and_can_be_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=4, disk_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(8):
            world.put(session, layout, [i])
            await world.janitor.write_back_once()
            await world.settle()
        job = world.store.prefetch(session, layout, keys_of(layout, [0, 1]), 5.0)
        await world.settle()
        status = world.store.jobs.status(job.id, "default")
        assert (status.state, status.done, status.failed) == (JobState.DONE, 2, 0)
        job = world.store.prefetch(session, layout, keys_of(layout, [2, 3]), 5.0)
        assert world.store.jobs.cancel(job.id, "default").state is JobState.CANCELLED
        await world.settle()
        assert job.done + job.failed == job.blocks
        with pytest.raises(NotFound):
            world.store.jobs.status(job.id, "other tenant")
        await world.check_nothing_leaked()

    running(world, main)


def test_verify_finds_rot_in_both_tiers_and_drops_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(6))
        await world.janitor.write_back_once()
        await world.settle()
        grant = await world.acquire(session, layout, [3])
        piece = grant.blocks[0].pieces[0]
        assert piece is not None
        world.arena.views(piece.place, 1)[0][0] ^= 1
        world.store.release(session, [grant.lease])
        cursor, pieces, corrupt, is_done = 0, 0, 0, False
        while not is_done:
            verified = await world.store.survey.verify(layout.digest, cursor, 4)
            cursor, is_done = verified.cursor, verified.is_done
            pieces, corrupt = pieces + verified.pieces, corrupt + verified.corrupt
        assert (pieces, corrupt) == (12, 1)
        grant = await world.acquire(session, layout, [3])
        np.testing.assert_array_equal(world.content(grant.blocks[0]), content_of(3))
        await world.check_nothing_leaked()

    running(world, main)


def test_space_of_a_closed_session_is_kept_until_its_writer_is_dead(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=4)
    world.grow()
    writer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    async def main() -> None:
        layout = await world.open()
        late = world.session(pid=writer.pid)
        assert None not in world.reserve(late, layout, range(4))
        world.store.clients.close(late)
        session = world.session(pid=os.getpid())
        assert world.reserve(session, layout, range(10, 12)) == [None, None]
        writer.kill()
        for _ in range(500):
            await asyncio.sleep(0.01)
            if not world.catalog.counts["quarantined"]:
                break
        assert None not in world.reserve(session, layout, range(10, 12))
        await world.check_nothing_leaked()

    running(world, main)
    writer.wait()


def test_a_late_writer_is_never_served_after_the_quarantine(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=1)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        late = world.reserve(session, layout, [1], ttl_s=1.0)[0]
        assert late is not None
        world.clock.advance(2.0)
        await world.janitor.expire_once()
        assert world.store.puts.commit(session, [late.fill], [{0: 1}]) == [FillStatus.LOST]
        assert world.reserve(session, layout, [2]) == [None]
        world.clock.advance(60.0)
        await world.janitor.expire_once()
        assert world.put(session, layout, [2]) == [FillStatus.COMMITTED]
        grant = await world.acquire(session, layout, [2])
        assert grant.blocks[0].must_verify
        world.store.release(session, [grant.lease])
        world.write(late, 1)
        grant = await world.acquire(session, layout, [2])
        assert grant.blocks[0].status is ReadStatus.MISS
        await world.check_nothing_leaked()

    running(world, main)


def test_a_process_that_dies_frees_its_sessions_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=8)
    world.grow()
    writer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    async def main() -> None:
        layout = await world.open()
        dead = world.session(pid=writer.pid)
        world.put(dead, layout, range(4))
        leases = [await world.acquire(dead, layout, [i % 4]) for i in range(100)]
        assert all(lease.lease for lease in leases)
        world.reserve(dead, layout, range(10, 14))
        writer.kill()
        for _ in range(500):
            await asyncio.sleep(0.01)
            if not world.store.clients.sessions.of_pid(writer.pid):
                break
        counts = world.catalog.counts
        assert (counts["leases"], counts["fills"], counts["quarantined"]) == (0, 0, 0)
        with pytest.raises(NotFound):
            await world.acquire(dead, layout, [0])
        await world.check_nothing_leaked()

    running(world, main)
    writer.wait()


def test_a_full_lane_aborts_copies_and_leaks_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=64)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(4))
        lane = world.shell.tiers.disk_lane
        gate = threading.Event()
        blocked = [lane.submit(lambda: gate.wait(10.0)) for _ in range(3)]
        while lane.running < 3:  # noqa: ASYNC110 - a few looks
            await asyncio.sleep(0.001)
        with suppress(Busy):
            while True:
                lane.submit(lambda: None, Urgency.BACKGROUND)
        await world.janitor.write_back_once()
        assert world.store.mover.tasks_now == 0
        gate.set()
        for work in blocked:
            await work
        await asyncio.sleep(WRITE_BACK_PAUSE_S)
        await world.janitor.write_back_once()
        await world.settle()
        tiers, _ = world.store.locate(layout, keys_of(layout, range(4)))
        assert np.all(tiers & 1 << TierId.NVME)
        await world.check_nothing_leaked()

    running(world, main)


class Halving(MemoryTier):
    """Stores every piece in half of its space, as a codec does."""

    def write(self, items: Sequence[tuple[Record, Views]]) -> list[Record | KvstoredError]:
        stored = super().write(items)
        for i, record in enumerate(stored):
            assert isinstance(record, Record)
            first = record.place[0]
            kept = replace(record, place=(Extent(first.segment, first.start, 1),))
            self._pieces[ref_of(kept)] = (kept, self._pieces[ref_of(kept)][1])
            stored[i] = kept
        return stored


def test_a_block_removed_while_it_is_written_leaves_no_record_on_the_disk(tmp_path: Path) -> None:
    world = World(tmp_path, disk=Halving())
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, [1, 2])
        await world.janitor.write_back_once()
        assert await world.store.remove(layout, keys_of(layout, [1])) == 1
        await world.settle()
        assert len(world.memory.scan(0, 99).records) == 1
        grant = await world.acquire(session, layout, [1, 2])
        assert [b.status for b in grant.blocks] == [ReadStatus.MISS, ReadStatus.HIT]
        await world.check_nothing_leaked()

    running(world, main)


def test_a_large_namespace_is_cleared_and_room_is_made_in_slices(tmp_path: Path) -> None:
    """One call over a million blocks would hold the loop for a minute: whoever asks meanwhile is served in between."""
    world = World(tmp_path, arena_blocks=120)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        world.put(session, layout, range(100))
        assert world.catalog.make_room(TierId.DRAM, world.clock.now_s(), 5) == 0
        world.put(session, layout, range(200, 217))
        turns = [world.catalog.make_room(TierId.DRAM, world.clock.now_s(), 5) for _ in range(6)]
        world.shell.apply()
        assert turns == [5, 5, 5, 5, 1, 0], "from 117 blocks down to 80 % of 120, five at a time"
        assert await world.store.clear(layout) == 96
        assert world.catalog.tier_use()[0].copies == 0
        await world.check_nothing_leaked()

    running(world, main)


def test_a_block_that_takes_the_row_of_one_that_is_being_removed_stays(tmp_path: Path) -> None:
    world = World(tmp_path, arena_blocks=120)
    world.grow()

    async def main() -> None:
        layout = await world.open()
        session = world.session()
        for i in range(100):  # roots, which leave in this order
            world.put(session, layout, [i])
        removing = asyncio.ensure_future(world.store.remove(layout, keys_of(layout, range(100))))
        await asyncio.sleep(0)
        assert world.catalog.tier_use()[0].copies > 10, "it goes in slices"
        await world.store.remove(layout, keys_of(layout, range(90, 100)))
        world.put(session, layout, range(200, 210))
        assert await removing == 90
        tiers, _ = world.store.locate(layout, keys_of(layout, range(210)))
        assert np.flatnonzero(tiers).tolist() == list(range(200, 210))
        await world.check_nothing_leaked()

    running(world, main)
