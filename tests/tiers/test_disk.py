"""The disk tier: the tier's promises in every mode, and a disk that is full, broken, damaged, of another version, or cut off mid-write."""

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstored.clock import ManualClock
from kvstored.codec.frame import Codec
from kvstored.core.types import UNIT_BYTES, Extent, Place
from kvstored.errors import Corrupt, InvalidArgument, NoSpace, NotFound, StateMismatch, Unavailable
from kvstored.tiers import disk as disk_tier
from kvstored.tiers.base import Counters, Link, ref_of
from kvstored.tiers.disk import Disk, Options
from kvstored.tiers.record import Record
from kvstored.tiers.slabs import SlabIo, aligned
from tests.tiers.conformance import (
    SEGMENT_UNITS,
    Conformance,
    content,
    empty,
    piece,
    read_one,
    run_of,
    same_bytes,
    scan_all,
    scattered,
    write_one,
)
from tests.tiers.disk_faults import EIO, ENOSPC, DyingIo, FailingIo

SMALL = Options(map_bytes=1 << 20, slab_bytes=8 << 20)
LARGE = replace(SMALL, slab_bytes=SEGMENT_UNITS * UNIT_BYTES)


def opened(
    path: Path,
    options: Options = SMALL,
    io: SlabIo | None = None,
    clock: ManualClock | None = None,
) -> Disk:
    """The tier at `path`, with one slab at least."""
    disk = Disk(path, options, clock=clock or ManualClock(), io=io)
    if not disk.segments():
        disk.grow()
    return disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = opened(tmp_path)
    yield disk
    disk.close()


class _DiskConforms(Conformance):
    options = LARGE

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Disk]:
        disk = opened(tmp_path, self.options)
        assert disk.segments() == [(0, SEGMENT_UNITS)]
        yield disk
        disk.close()


class TestRawDirectConforms(_DiskConforms):
    def test_the_page_cache_is_avoided_here(self, tier: Disk) -> None:
        if not tier.is_direct:
            assert not _probe_direct(Path.cwd())


class TestRawBufferedConforms(_DiskConforms):
    options = replace(LARGE, direct=False)

    def test_the_page_cache_is_used(self, tier: Disk) -> None:
        assert not tier.is_direct


class TestZstdConforms(_DiskConforms):
    options = replace(LARGE, codec=Codec.ZSTD)

    def test_what_compresses_takes_fewer_units(self, tier: Disk) -> None:
        stored = write_one(tier, *piece(1, run_of(0, 1 << 20), 1 << 20))
        assert stored.codec == Codec.ZSTD
        assert stored.stored_length < stored.length == 1 << 20
        assert stored.place[0].units < 256

    def test_what_does_not_compress_stays_raw(self, tier: Disk) -> None:
        record, source = piece(1, run_of(0, 4096), 4096)
        assert write_one(tier, record, source).codec == Codec.RAW


class TestShortTransfersConform(Conformance):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Disk]:
        disk = opened(tmp_path, LARGE, FailingIo(step_bytes=2 << 20))
        yield disk
        disk.close()


def _probe_direct(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
    except OSError:
        return False
    os.close(fd)
    return True


class TestReopening:
    @pytest.mark.parametrize("codec", list(Codec))
    def test_everything_written_is_there_again(self, tmp_path: Path, codec: Codec) -> None:
        options = replace(SMALL, codec=codec)
        disk = opened(tmp_path, options)
        disk.grow()
        places = [run_of(0, 9000), scattered(50, 4, 1), (Extent(1, 5, 1), Extent(0, 9, 2))]
        stored = [write_one(disk, *piece(i + 1, place, 9000)) for i, place in enumerate(places)]
        disk.flush_counters([Counters(ref_of(stored[1]), stored[1].place, 99, 5.5, 1)])
        disk.close()
        disk = opened(tmp_path, options)
        assert disk.segments() == [(0, 2048), (1, 2048)]
        expected = [stored[0], replace(stored[1], hits=99, last_s=5.5, heat=1), stored[2]]
        assert sorted(scan_all(disk, 2), key=lambda r: r.generation) == expected
        for i, record in enumerate(expected):
            assert same_bytes(read_one(disk, record)[1], content(i + 1, 9000))
        disk.close()

    def test_counters_of_a_piece_that_moved_are_not_overwritten(self, disk: Disk) -> None:
        stored = write_one(disk, *piece(1, run_of(0, 9000), 9000))
        disk.flush_counters([Counters(ref_of(stored), run_of(7, 9000), 99, 5.5, 1)])
        assert scan_all(disk, 9) == [stored]

    def test_a_relinked_piece_keeps_everything_but_its_place_in_the_tree(self, disk: Disk) -> None:
        stored = write_one(disk, *piece(1, scattered(4, 3, 1), 9000))
        disk.relink([Link(ref_of(stored), stored.place, b"p" * 16, 8)])
        disk.relink([Link(ref_of(stored), run_of(0, 9000), b"q" * 16, 9)])
        assert read_one(disk, stored)[0] == replace(stored, parent=b"p" * 16, depth=8)

    def test_a_piece_written_again_lies_at_the_later_place(self, disk: Disk) -> None:
        first = write_one(disk, *piece(1, run_of(0, 9000), 9000))
        second = write_one(disk, *piece(1, run_of(8, 9000), 9000))
        assert disk.discard([(ref_of(first), first.place)]) == [None]
        with pytest.raises(NotFound):
            read_one(disk, first)
        read_one(disk, second)

    def test_a_scan_that_was_cut_short_costs_nothing_where_the_index_is_sound(
        self, tmp_path: Path
    ) -> None:
        """By a kill -9, say: whoever opens it next walks through it, and keeps it."""
        disk = opened(tmp_path)
        disk.grow()
        stored = [write_one(disk, *piece(i + 1, run_of(4 * i, 9000), 9000)) for i in range(2)]
        assert not disk.scan(0, 1).done
        disk.close()
        assert (tmp_path / "index" / "scanning").exists()
        disk = opened(tmp_path)
        assert sorted(scan_all(disk, 1), key=lambda r: r.generation) == stored
        disk.close()
        assert not (tmp_path / "index" / "scanning").exists()

    def test_records_whose_slab_is_gone_are_forgotten(self, tmp_path: Path) -> None:
        disk = opened(tmp_path)
        disk.grow()
        kept = write_one(disk, *piece(1, run_of(0, 9000), 9000))
        lost = write_one(disk, *piece(2, (Extent(0, 9, 1), Extent(1, 9, 2)), 9000))
        disk.close()
        (tmp_path / "slab-00001.dat").unlink()
        disk = opened(tmp_path)
        with pytest.raises(NotFound):
            read_one(disk, lost)
        batch = disk.scan(0, 10)
        assert (len(batch.records), batch.rejected, batch.done) == (1, 1, True)
        assert scan_all(disk, 10) == [kept]
        assert disk.records() == 1
        disk.close()

    def test_damaged_records_are_forgotten(self, tmp_path: Path) -> None:
        disk = opened(tmp_path)
        stored = [write_one(disk, *piece(i, run_of(i * 4, 9000), 9000)) for i in range(1, 8)]
        disk.close()
        _damage_records(tmp_path)
        disk = opened(tmp_path)
        with pytest.raises(Corrupt):
            read_one(disk, stored[1])
        assert disk.scan(0, 100).rejected == 4
        assert disk.records() == 3
        assert sorted(r.generation for r in scan_all(disk, 100)) == [1, 6, 7]
        disk.close()


def _damage_records(path: Path) -> None:
    """Of pieces 2 to 5: flip a bit in the header, in the place, cut the place off, empty it."""
    with lmdb.open(str(path / "index"), max_dbs=2) as env:
        records = env.open_db(b"records")
        with env.begin(write=True, db=records) as txn:
            for i, change in enumerate([_flip(100), _flip(258), lambda v: v[:256], lambda v: b""]):
                key = ref_key(i + 2)
                txn.put(key, change(bytes(txn.get(key) or b"")))


def ref_key(number: int) -> bytes:
    group, shard = number % 3, number % 2
    return number.to_bytes(16, "little") + group.to_bytes(2, "big") + shard.to_bytes(2, "big")


def _flip(at: int) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]

    return change


class TestDamage:
    @pytest.mark.parametrize("codec", list(Codec))
    def test_a_flipped_bit_in_a_slab_is_corrupt_and_never_wrong_bytes(
        self, tmp_path: Path, codec: Codec
    ) -> None:
        disk = opened(tmp_path, replace(SMALL, codec=codec))
        record, source = piece(1, run_of(3, 50_000), 50_000)
        stored = write_one(disk, record, source)
        rng = np.random.default_rng(1)
        for at in [
            0,
            stored.stored_length - 1,
            *rng.integers(0, stored.stored_length, 40).tolist(),
        ]:
            _flip_slab_bit(tmp_path, 3 * UNIT_BYTES + at)
            with pytest.raises(Corrupt):
                read_one(disk, stored)
            _flip_slab_bit(tmp_path, 3 * UNIT_BYTES + at)
        assert same_bytes(read_one(disk, stored)[1], source)
        disk.close()

    def test_a_slab_cut_short_is_an_error_not_bytes(self, tmp_path: Path) -> None:
        disk = opened(tmp_path)
        stored = write_one(disk, *piece(1, run_of(3, 50_000), 50_000))
        os.truncate(tmp_path / "slab-00000.dat", 5 * UNIT_BYTES)
        with pytest.raises(Unavailable, match="shorter"):
            read_one(disk, stored)
        disk.close()


def _flip_slab_bit(path: Path, at: int) -> None:
    fd = os.open(path / "slab-00000.dat", os.O_RDWR)
    byte = os.pread(fd, 1, at)[0]
    os.pwrite(fd, bytes([byte ^ 0x10]), at)
    os.fsync(fd)
    os.close(fd)


class TestVersions:
    @pytest.mark.parametrize("at", [0, 4, 8])
    def test_another_superblock_is_refused_and_erase_starts_cold(
        self, tmp_path: Path, at: int
    ) -> None:
        disk = opened(tmp_path)
        write_one(disk, *piece(1, run_of(0, 9000), 9000))
        disk.close()
        (tmp_path / "other.txt").touch()
        with lmdb.open(str(tmp_path / "index"), max_dbs=2) as env:
            meta = env.open_db(b"meta")
            with env.begin(write=True, db=meta) as txn:
                raw = bytearray(txn.get(b"superblock") or b"")
                raw[at] += 1
                txn.put(b"superblock", bytes(raw))
        with pytest.raises(StateMismatch, match=r"another version.*expected=1.*start cold"):
            opened(tmp_path)
        disk_tier.erase(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
        disk = opened(tmp_path)
        assert scan_all(disk, 10) == []
        disk.close()

    @pytest.mark.parametrize("garbage", [b"x" * 8192, b"\0" * 8192])
    def test_an_index_that_is_none_is_refused(self, tmp_path: Path, garbage: bytes) -> None:
        (tmp_path / "index").mkdir()
        (tmp_path / "index" / "data.mdb").write_bytes(garbage)
        with pytest.raises(StateMismatch, match="damaged or not ours"):
            opened(tmp_path)

    def test_a_truncated_superblock_is_refused(self, tmp_path: Path) -> None:
        opened(tmp_path).close()
        with lmdb.open(str(tmp_path / "index"), max_dbs=2) as env:
            meta = env.open_db(b"meta")
            with env.begin(write=True, db=meta) as txn:
                txn.put(b"superblock", b"KVD1")
        with pytest.raises(StateMismatch, match="damaged superblock"):
            opened(tmp_path)


class TestFullAndBrokenDisks:
    @pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
    @pytest.mark.parametrize(("code", "error"), [(ENOSPC, NoSpace), (EIO, Unavailable)])
    def test_a_failed_write_stores_nothing_and_makes_the_tier_read_only_for_a_while(
        self, tmp_path: Path, call: str, code: int, error: type[Exception]
    ) -> None:
        io, clock = FailingIo(), ManualClock()
        disk = opened(tmp_path, io=io, clock=clock)
        before = write_one(disk, *piece(1, run_of(0, 9000), 9000))
        io.errors[call] = code
        later = piece(2, run_of(8, 9000), 9000)
        with pytest.raises(error):
            write_one(disk, *later)
        io.errors.clear()
        assert disk.is_read_only()
        with pytest.raises(Unavailable, match="read-only"):
            write_one(disk, *later)
        read_one(disk, before)
        assert scan_all(disk, 9) == [before]
        assert disk.discard([(ref_of(before), before.place)]) == [before]
        clock.advance(disk_tier.PAUSE_S + 1)
        assert not disk.is_read_only()
        write_one(disk, *later)
        disk.close()

    def test_a_read_error_fails_its_item_only(self, tmp_path: Path) -> None:
        io = FailingIo()
        disk = opened(tmp_path, io=io)
        stored = write_one(disk, *piece(1, run_of(0, 9000), 9000))
        io.errors["preadv"] = EIO
        with pytest.raises(Unavailable, match="cannot be read"):
            read_one(disk, stored)
        io.errors.clear()
        read_one(disk, stored)
        disk.close()

    def test_a_slab_that_cannot_be_allocated_leaves_nothing_behind(self, tmp_path: Path) -> None:
        io = FailingIo()
        disk = opened(tmp_path, io=io)
        for code, error in ((ENOSPC, NoSpace), (EIO, Unavailable)):
            io.errors["allocate"] = code
            with pytest.raises(error, match="no new slab"):
                disk.grow()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "slab-00000.dat"]
        io.errors.clear()
        assert disk.grow() == (1, 2048)
        disk.close()

    def test_a_small_filesystem_is_no_space_and_deletes_go_on(self, tmp_path: Path) -> None:
        if os.geteuid() != 0 or not _mounted(tmp_path, "size=6m"):
            _fill_by_injection(tmp_path)
            return
        try:
            with pytest.raises(NoSpace):
                Disk(tmp_path, replace(SMALL, map_bytes=8 << 20), clock=ManualClock())
            disk_tier.erase(tmp_path)
            disk = opened(tmp_path, replace(SMALL, slab_bytes=2 << 20))
            stored = write_one(disk, *piece(1, run_of(0, 9000), 9000))
            disk.grow()
            with pytest.raises(NoSpace):
                disk.grow()
            (tmp_path / "filler").write_bytes(bytes(_free_bytes(tmp_path)))
            other = write_one(disk, *piece(2, (Extent(1, 0, 9),), 9000))
            assert disk.discard([(ref_of(stored), stored.place)]) == [stored]
            read_one(disk, other)
            disk.close()
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)

    def test_a_nearly_full_map_refuses_puts_and_allows_deletes(self, tmp_path: Path) -> None:
        disk = opened(tmp_path, replace(SMALL, slab_bytes=64 << 20))
        stored: list[Record] = []
        refused = 0
        for start in range(1, 8000, 250):
            items = [piece(i, (Extent(0, i, 1),), 10) for i in range(start, start + 250)]
            outcomes = disk.write(items)
            stored.extend(o for o in outcomes if isinstance(o, Record))
            refused += sum(isinstance(o, NoSpace) for o in outcomes)
            assert disk.index_used_share() <= 0.91
        assert refused > 0
        assert len(stored) >= 500
        assert not disk.is_read_only()
        removed = disk.discard([(ref_of(record), record.place) for record in stored])
        assert removed == stored
        write_one(disk, *piece(1, (Extent(0, 1, 1),), 10))
        disk.close()

    def test_a_slab_that_was_not_finished_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / "slab-00003.new").write_bytes(b"x")
        opened(tmp_path).close()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["index", "slab-00000.dat"]

    def test_slabs_have_whole_units(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument):
            opened(tmp_path, replace(SMALL, slab_bytes=4097))

    def test_a_directory_that_cannot_be_made_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(Unavailable, match="cannot open the disk tier"):
            opened(tmp_path / "file" / "disk")


def _mounted(path: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _free_bytes(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _fill_by_injection(path: Path) -> None:
    """Where no filesystem can be mounted: the same, with the error injected."""
    io = FailingIo()
    disk = opened(path, io=io)
    stored = write_one(disk, *piece(1, run_of(0, 9000), 9000))
    io.errors["allocate"] = ENOSPC
    with pytest.raises(NoSpace):
        disk.grow()
    assert disk.discard([(ref_of(stored), stored.place)]) == [stored]
    disk.close()


class TestInMemory:
    def test_a_slab_that_memory_has_no_room_for_is_refused_and_the_next_is_not(
        self, tmp_path: Path
    ) -> None:
        spare = [16 << 20]
        options = Options(map_bytes=1 << 20, slab_bytes=8 << 20, spare_bytes=lambda: spare[0])
        disk = Disk(tmp_path / "disk", options, clock=ManualClock())
        disk.grow()
        spare[0] -= 1
        with pytest.raises(NoSpace, match="lower disk.capacity"):
            disk.grow()
        assert len(disk.segments()) == 1
        spare[0] += 1
        disk.grow()
        disk.close()


class TestOrder:
    def test_one_call_is_one_sync_a_slab_and_one_commit(self, tmp_path: Path) -> None:
        io = FailingIo()
        disk = opened(tmp_path, io=io)
        disk.grow()
        io.calls.clear()
        items = [piece(i, (Extent(i % 2, i * 4, 3),), 9000) for i in range(1, 60)]
        assert all(isinstance(outcome, Record) for outcome in disk.write(items))
        assert io.calls[-2:] == ["fdatasync", "fdatasync"]
        assert set(io.calls[:-2]) == {"pwritev"}
        disk.close()

    def test_neighbours_are_read_with_one_call(self, tmp_path: Path) -> None:
        io = FailingIo()
        disk = opened(tmp_path, io=io)
        items = [piece(i, (Extent(0, i * 2, 2),), 8192) for i in range(1, 33)]
        stored = [outcome for outcome in disk.write(items) if isinstance(outcome, Record)]
        io.calls.clear()
        reads = [(ref_of(r), r.place, empty(8192)) for r in reversed(stored)]
        assert disk.read(reads) == stored[::-1]
        assert io.calls == ["preadv"]
        disk.close()

    @pytest.mark.parametrize("codec", list(Codec))
    @pytest.mark.parametrize("fatal", [*range(10), 100])
    def test_after_a_kill_only_whole_pieces_are_there(
        self, tmp_path: Path, fatal: int, codec: Codec
    ) -> None:
        """The child writes batches of three and says so after each; -9 comes in one of its slab calls, or after the last."""
        options = replace(SMALL, codec=codec)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _write_until_killed(tmp_path, options, fatal, writer)
            finally:
                os._exit(1)
        os.close(writer)
        assert os.waitpid(child, 0)[1] == 9
        acknowledged = os.read(reader, 100)
        os.close(reader)
        disk = opened(tmp_path, options)
        found = {record.generation: record for record in scan_all(disk, 100)}
        assert set(acknowledged) <= set(found)
        for number, record in found.items():
            assert same_bytes(read_one(disk, record)[1], content(number, 20_000))
        assert len(found) - len(acknowledged) in {0, 3}
        disk.close()


def _write_until_killed(path: Path, options: Options, fatal: int, acknowledge: int) -> None:
    disk = opened(path, options, DyingIo(fatal))
    for first in (1, 4, 7):
        numbers = range(first, first + 3)
        items = [piece(i, scattered(i * 20, 5, 1), 20_000) for i in numbers]
        assert all(isinstance(outcome, Record) for outcome in disk.write(items))
        os.write(acknowledge, bytes(numbers))
    os.kill(os.getpid(), 9)


class TestWrittenAgainElsewhere:
    """A grain is laid together: its pieces get other places and their old ones are discarded, in whichever order the lane comes to it."""

    @pytest.mark.parametrize("dies", ["write", "sync", "between", "end"])
    @pytest.mark.parametrize("is_discarded_first", [False, True])
    def test_a_kill_leaves_every_piece_whole_at_one_place_or_none(
        self, tmp_path: Path, dies: str, is_discarded_first: bool
    ) -> None:
        child = os.fork()
        if child == 0:
            try:
                _lay_together_until_killed(tmp_path, dies, is_discarded_first)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 9
        disk = opened(tmp_path)
        found = {record.generation: record for record in scan_all(disk, 100)}
        for number, record in found.items():
            assert same_bytes(read_one(disk, record)[1], content(number, 4096))
        places = [record.place for _, record in sorted(found.items())]
        is_committed = dies == "end" or (dies == "between" and not is_discarded_first)
        if is_committed:
            assert places == [_together(number) for number in _GRAIN]
        else:
            assert places == ([] if is_discarded_first else [_strewn(n) for n in _GRAIN])
        disk.close()


_GRAIN = range(1, 5)


def _strewn(number: int) -> Place:
    return run_of(10 * number, 4096)


def _together(number: int) -> Place:
    return run_of(100 + number, 4096)


def _lay_together_until_killed(path: Path, dies: str, is_discarded_first: bool) -> None:
    disk = opened(path)
    strewn = disk.write([piece(number, _strewn(number), 4096) for number in _GRAIN])
    refs = [(ref_of(record), record.place) for record in strewn if isinstance(record, Record)]
    disk.close()
    fatal = {"write": 0, "sync": 1}.get(dies)
    disk = opened(path, io=None if fatal is None else DyingIo(fatal))
    if is_discarded_first:
        disk.discard(refs)
        if dies == "between":
            os.kill(os.getpid(), 9)
    outcomes = disk.write([piece(number, _together(number), 4096) for number in _GRAIN])
    assert all(isinstance(outcome, Record) for outcome in outcomes)
    if not is_discarded_first:
        if dies == "between":
            os.kill(os.getpid(), 9)
        disk.discard(refs)
    os.kill(os.getpid(), 9)


def test_memory_for_the_disk_is_aligned_and_ends_in_zeros_whatever_lay_there_before() -> None:
    # What lies behind a block's last byte in its last unit is written along: it may not be another's.
    for size in (1, UNIT_BYTES, UNIT_BYTES + 1, 3 << 20):
        dirty = np.full(size + 2 * UNIT_BYTES, 0xA5, dtype=np.uint8)
        del dirty
        made = aligned(size)
        assert made.ctypes.data % UNIT_BYTES == 0
        assert len(made) == -(-size // UNIT_BYTES) * UNIT_BYTES
        assert not made[-UNIT_BYTES:].any()
