"""How the disk tier moves neighbours: few system calls, and what one run brings is judged by itself."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstored.core.types import UNIT_BYTES, Extent, Place
from kvstored.errors import Unavailable
from kvstored.tiers import views as memory
from kvstored.tiers.base import Views, ref_of
from kvstored.tiers.record import Record
from kvstored.tiers.slabs import SlabIo, aligned
from tests.tiers.conformance import content, piece, run_of, same_bytes
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


@pytest.mark.parametrize(("block_bytes", "count"), [(4096, 1024), (16 << 10, 256), (1 << 20, 4)])
def test_neighbours_move_with_one_call_for_every_4_mib(
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
