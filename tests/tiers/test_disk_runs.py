"""How the disk tier moves neighbours: few system calls, and what one run brings is judged by itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstored.core.columnar import Places
from kvstored.core.types import UNIT_BYTES, Extent, Place
from kvstored.errors import Corrupt, Unavailable
from kvstored.tiers import views as memory
from kvstored.tiers.base import PieceRun, Views, ref_of
from kvstored.tiers.disk import Disk
from kvstored.tiers.record import Record
from kvstored.tiers.slabs import SlabIo, aligned
from tests.tiers.conformance import content, emptied, piece, plain_run, run_of, same_bytes
from tests.tiers.disk_faults import EIO, FailingIo
from tests.tiers.test_disk import SMALL, opened


def whole(length: int) -> Views:
    """Memory as the arena has it, so that the tier moves it as it is."""
    return [aligned(length)[:length]]


class BadStretch(SlabIo):
    """Reads that begin in these bytes of a slab fail."""

    def __init__(self, begin: int, end: int) -> None:
        self._bad = range(begin, end)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset in self._bad:
            raise OSError(EIO, "bad stretch")
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize(("block_bytes", "count"), [(4096, 256), (16 << 10, 64), (512 << 10, 2)])
def test_neighbours_move_with_one_call_for_every_mib(
    tmp_path: Path, block_bytes: int, count: int
) -> None:
    io = FailingIo()
    disk = opened(tmp_path, replace(SMALL, map_bytes=8 << 20), io)
    pieces = [
        piece(i + 1, run_of(i * block_bytes // UNIT_BYTES, block_bytes), block_bytes)
        for i in range(count)
    ]
    placed: list[tuple[Record, Views]] = []
    for record, source in pieces:
        target = whole(block_bytes)
        memory.copy(source, target)
        placed.append((record, target))
    io.calls.clear()
    stored = [record for record in disk.write(placed) if isinstance(record, Record)]
    assert len(stored) == count
    assert io.calls == ["pwritev", "fdatasync"]
    io.calls.clear()
    targets = [whole(block_bytes) for _ in stored]
    found = disk.read(
        [(ref_of(r), r.place, target) for r, target in zip(stored, targets, strict=True)]
    )
    assert found == stored
    assert io.calls == ["preadv"]
    assert all(same_bytes(t, s) for t, (_, s) in zip(targets, pieces, strict=True))
    disk.close()


@pytest.mark.parametrize(
    ("block_bytes", "count"), [(4096, 375), (16 << 10, 128), (1 << 20, 6), (5 << 19, 3)]
)
def test_runs_of_columns_move_a_mib_a_call_and_commit_once(
    tmp_path: Path, block_bytes: int, count: int
) -> None:
    io = FailingIo()
    disk = opened(tmp_path, replace(SMALL, map_bytes=8 << 20, slab_bytes=16 << 20), io)
    run, records = plain_run(range(1, count + 1), block_bytes)
    calls = -(-count * block_bytes // (1 << 20)) if block_bytes <= 1 << 20 else count * 3
    io.calls.clear()
    assert not disk.write_run(run, records).faults
    assert io.calls == ["pwritev"] * calls + ["fdatasync"]
    assert disk.records() == count
    io.calls.clear()
    target = emptied(run)
    assert not disk.read_run(target).faults
    assert io.calls == ["preadv"] * calls
    assert all(np.array_equal(a, b) for a, b in zip(target.slots, run.slots, strict=True))
    disk.close()


def test_a_run_that_cannot_be_synced_leaves_no_record_and_makes_the_tier_read_only(
    tmp_path: Path,
) -> None:
    io = FailingIo()
    disk = opened(tmp_path, io=io)
    run, records = plain_run(range(1, 9), 4096)
    io.errors["fdatasync"] = EIO
    assert {type(fault) for fault in disk.write_run(run, records).faults.values()} == {Unavailable}
    assert disk.records() == 0
    del io.errors["fdatasync"]
    assert len(disk.write_run(run, records).faults) == 8, "it is read-only now"
    disk.close()


def test_a_part_of_a_run_that_cannot_be_read_takes_only_its_own_pieces_with_it(
    tmp_path: Path,
) -> None:
    disk = opened(tmp_path, io=BadStretch(0, UNIT_BYTES))
    run, records = plain_run(range(1, 5), 4096)
    other, others = plain_run(range(5, 9), 4096, first=100)
    assert not disk.write_run(run, records).faults | disk.write_run(other, others).faults
    places = Places(*map(np.concatenate, zip(run.places, other.places, strict=True)))
    names = np.concatenate([run.fingerprints, other.fingerprints])
    both = PieceRun(names, places, 4096, [aligned(4096) for _ in range(8)])
    came = disk.read_run(both)
    assert {i: type(fault) for i, fault in came.faults.items()} == dict.fromkeys(
        range(4), Unavailable
    )
    assert all(np.array_equal(both.slots[4 + i], other.slots[i]) for i in range(4))
    disk.close()


def test_a_block_of_a_run_that_rots_on_the_disk_is_corrupt_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    disk = opened(tmp_path)
    run, records = plain_run(range(1, 9), 5000)
    assert not disk.write_run(run, records).faults
    with (tmp_path / "slab-00000.dat").open("r+b") as slab:
        slab.seek(int(run.places.start[2]) * UNIT_BYTES + 4999)
        slab.write(b"\x00" if run.slots[2][4999] else b"\x01")
    came = disk.read_run(emptied(run))
    assert {i: type(fault) for i, fault in came.faults.items()} == {2: Corrupt}
    disk.close()


def test_a_run_that_fails_takes_only_its_own_pieces_with_it(tmp_path: Path) -> None:
    disk = opened(tmp_path, io=BadStretch(0, UNIT_BYTES))
    stored = [
        disk.write([piece(i + 1, run_of(start, 9000), 9000)])[0] for i, start in enumerate((0, 100))
    ]
    bad, good = (record for record in stored if isinstance(record, Record))
    targets = [whole(9000), whole(9000)]
    found = disk.read([(ref_of(r), r.place, t) for r, t in zip((bad, good), targets, strict=True)])
    assert isinstance(found[0], Unavailable)
    assert found[1] == good
    assert same_bytes(targets[1], content(2, 9000))
    disk.close()


@pytest.mark.parametrize("bad_units", [(0, 1), (1000, 1001)])
def test_a_piece_of_two_runs_fails_whichever_of_them_fails(
    tmp_path: Path, bad_units: tuple[int, int]
) -> None:
    begin, end = (unit * UNIT_BYTES for unit in bad_units)
    disk = opened(tmp_path, io=BadStretch(begin, end))
    place: Place = (Extent(0, 0, 2), Extent(0, 1000, 1))
    stored = disk.write([piece(1, place, 9000)])[0]
    assert isinstance(stored, Record)
    found = disk.read([(ref_of(stored), stored.place, whole(9000))])
    assert isinstance(found[0], Unavailable)
    disk.close()


def test_a_piece_of_two_runs_is_whole_when_both_are_read(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    place: Place = (Extent(0, 0, 2), Extent(0, 1000, 1))
    stored = disk.write([piece(1, place, 9000)])[0]
    assert isinstance(stored, Record)
    target = whole(9000)
    assert disk.read([(ref_of(stored), stored.place, target)]) == [stored]
    assert same_bytes(target, content(1, 9000))
    disk.close()


class Counting(SlabIo):
    """Bytes of each read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads.append(sum(map(len, buffers)))
        return super().preadv(fd, buffers, offset)


def apart(disk: Disk, block_bytes: int, starts: Sequence[int]) -> list[Record]:
    """Pieces that begin at these units."""
    pieces = [
        piece(i + 1, run_of(start, block_bytes), block_bytes) for i, start in enumerate(starts)
    ]
    stored = disk.write([(replace(record, group=0, shard=0), source) for record, source in pieces])
    return [record for record in stored if isinstance(record, Record)]


def read_back(disk: Disk, stored: Sequence[Record], block_bytes: int) -> list[object]:
    targets = [whole(block_bytes) for _ in stored]
    found = disk.read([(ref_of(r), r.place, t) for r, t in zip(stored, targets, strict=True)])
    for i, (outcome, target) in enumerate(zip(found, targets, strict=True)):
        if isinstance(outcome, Record):
            assert same_bytes(target, content(i + 1, block_bytes))
    return list(found)


def read_back_run(disk: Disk, stored: Sequence[Record], block_bytes: int) -> dict[int, object]:
    extents = np.array([record.place[0] for record in stored], dtype=np.int64)
    names = np.array(
        [np.frombuffer(record.fingerprint, dtype=np.uint64) for record in stored], dtype=np.uint64
    )
    run = PieceRun(names, Places(*extents.T), block_bytes, [aligned(block_bytes) for _ in stored])
    came = disk.read_run(run)
    for i in set(range(len(stored))).difference(came.faults):
        assert same_bytes(run.views(i), content(i + 1, block_bytes))
    return dict(came.faults)


def test_what_lies_between_pieces_is_read_along_where_it_is_no_more_than_they_are(
    tmp_path: Path,
) -> None:
    """Blocks that the codec made smaller lay apart by what they were granted too much: one call each."""
    io = Counting()
    disk = opened(tmp_path, replace(SMALL, map_bytes=8 << 20, slab_bytes=32 << 20), io)
    near = apart(disk, 12 << 10, [4 * i for i in range(64)])
    for read in (read_back, read_back_run):
        io.reads.clear()
        read(disk, near, 12 << 10)
        assert io.reads == [(4 * 64 - 1) * UNIT_BYTES], "16 KiB apart: one call of a MiB"
    far = apart(disk, 4096, [2000 + 3 * i for i in range(16)])
    for read in (read_back, read_back_run):
        io.reads.clear()
        read(disk, far, 4096)
        assert sum(io.reads) <= 2 * 16 * 4096, "never more in vain than what is wanted"
    wide = apart(disk, 128 << 10, [3000 + 64 * i for i in range(4)])
    for read in (read_back, read_back_run):
        io.reads.clear()
        read(disk, wide, 128 << 10)
        assert io.reads == [128 << 10] * 4, "128 KiB between them take longer than a call"
    disk.close()


@pytest.mark.parametrize("read", [read_back, read_back_run])
def test_no_call_is_larger_or_of_more_buffers_for_what_lies_between(
    tmp_path: Path, read: Callable[[Disk, Sequence[Record], int], object]
) -> None:
    io = Counting()
    disk = opened(tmp_path, replace(SMALL, map_bytes=8 << 20, slab_bytes=32 << 20), io)
    stored = apart(disk, 4096, [2 * i for i in range(1500)])
    io.reads.clear()
    read(disk, stored, 4096)
    assert len(io.reads) == 12
    assert max(io.reads) <= 1 << 20
    disk.close()


class BadUnit(SlabIo):
    """Whatever reads this unit fails."""

    def __init__(self, unit: int) -> None:
        self._at = unit * UNIT_BYTES

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= self._at < offset + sum(map(len, buffers)):
            raise OSError(EIO, "bad unit")
        return super().preadv(fd, buffers, offset)


def test_a_bad_unit_between_pieces_is_nobodys_fault_and_one_of_a_piece_is_its_own(
    tmp_path: Path,
) -> None:
    for bad, failing in ((3, []), (4, [1])):
        folder = tmp_path / str(bad)
        disk = opened(folder, io=BadUnit(bad))
        stored = apart(disk, 12 << 10, [0, 4, 8])
        found = read_back(disk, stored, 12 << 10)
        assert [i for i, each in enumerate(found) if isinstance(each, Unavailable)] == failing
        assert sorted(read_back_run(disk, stored, 12 << 10)) == failing
        disk.close()
