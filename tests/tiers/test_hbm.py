"""The HBM tier on a stand-in for a GPU keeps the promises of every tier, and goes off with a reason when its device does."""

from collections.abc import Iterator

import pytest

from kvstored.core.types import UNIT_BYTES
from kvstored.errors import InvalidArgument, KvstoredError, NoSpace, NotFound, Unavailable
from kvstored.tiers import views as memory
from kvstored.tiers.base import Link, Tier, ref_of
from kvstored.tiers.device import Device, Moves, moves_of, open_device
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.record import Record
from kvstored.tiers.stand_in import HostDevice
from tests.tiers.conformance import (
    SEGMENT_UNITS,
    Conformance,
    content,
    empty,
    piece,
    read_one,
    run_of,
    scattered,
    write_one,
)

POOL_BYTES = SEGMENT_UNITS * UNIT_BYTES


def opened(*names: str, pool_bytes: int = POOL_BYTES) -> Hbm:
    hbm = Hbm(names, pool_bytes, open_device)
    for _ in names:
        hbm.grow()
    return hbm


class TestHbmConforms(Conformance):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        hbm = opened("host:0")
        yield hbm
        hbm.close()


class Counted(HostDevice):
    """Counts submissions, and is lost when told."""

    lost = False

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.submissions: list[int] = []

    def upload(self, moves: Moves) -> None:
        self._submitted(moves)
        super().upload(moves)

    def download(self, moves: Moves) -> None:
        self._submitted(moves)
        super().download(moves)

    def _submitted(self, moves: Moves) -> None:
        if self.lost:
            raise Unavailable("device lost: Xid 79")
        self.submissions.append(len(moves))


def counted(devices: int) -> tuple[Hbm, list[Counted]]:
    made: list[Counted] = []

    def opener(name: str, size_bytes: int) -> Device:
        made.append(Counted(size_bytes))
        return made[-1]

    hbm = Hbm([f"host:{i}" for i in range(devices)], 1 << 20, opener)
    for _ in range(devices):
        hbm.grow()
    return hbm, made


def test_a_call_is_one_submission_a_device_however_many_pieces_it_has() -> None:
    hbm, (first, second) = counted(2)
    items = [piece(i, run_of(i * 2, 5000), 5000) for i in range(1, 40)]
    other, source = piece(50, (run_of(4, 9000)[0]._replace(segment=1),), 9000)
    stored = hbm.write([*items, (other, source)])
    assert all(isinstance(each, Record) for each in stored)
    assert (first.submissions, second.submissions) == ([39], [1])
    records = [each for each in stored if isinstance(each, Record)]
    hbm.read([(ref_of(r), r.place, empty(r.length)) for r in records])
    assert (first.submissions, second.submissions) == ([39, 39], [1, 1])
    hbm.close()


def test_pieces_in_many_extents_come_back_whole() -> None:
    hbm, _ = counted(1)
    record, source = piece(3, scattered(0, 5, 2), 5 * 2 * UNIT_BYTES - 7)
    cut = [source[0][:5000], source[0][5000:5001], source[0][5001:]]
    found, target = read_one(hbm, write_one(hbm, record, cut))
    assert memory.hash_of(target) == found.checksum
    hbm.close()


def test_a_lost_device_turns_the_tier_off_and_the_first_reason_is_kept() -> None:
    hbm, (device,) = counted(1)
    stored = write_one(hbm, *piece(1, run_of(0, 5000), 5000))
    device.lost = True
    outcomes = hbm.read([(ref_of(stored), stored.place, empty(5000))])
    assert [type(each) for each in outcomes] == [Unavailable]
    assert "Xid 79" in str(hbm.fault)
    device.lost = False
    later = hbm.write([piece(2, run_of(4, 5000), 5000)])
    assert [type(each) for each in later] == [Unavailable]
    assert "Xid 79" in str(later[0])
    hbm.close()


def test_a_write_that_fails_leaves_nothing_readable() -> None:
    hbm, (device,) = counted(1)
    first = write_one(hbm, *piece(1, run_of(0, 5000), 5000))
    device.lost = True
    hbm.write([piece(2, run_of(0, 5000), 5000)])
    device.lost, hbm.fault = False, None
    with pytest.raises(NotFound):
        read_one(hbm, first)
    assert hbm.key_at(first.place) == b""
    hbm.close()


def test_bytes_that_somebody_wrote_over_are_never_handed_out() -> None:
    """A pool is mapped by its clients, and CUDA IPC has no read-only mapping."""
    hbm, (device,) = counted(1)
    stored = write_one(hbm, *piece(1, run_of(0, 5000), 5000))
    device.upload(moves_of([(4000, content(9, 3)[0])]))
    outcome = hbm.read([(ref_of(stored), stored.place, empty(5000))])[0]
    assert isinstance(outcome, KvstoredError)
    assert "checksum" in str(outcome)
    hbm.close()


def test_late_parents_are_written_into_the_records() -> None:
    hbm, _ = counted(1)
    stored = write_one(hbm, *piece(1, run_of(0, 5000), 5000))
    parent = b"p" * 16
    hbm.relink([Link(ref_of(stored), stored.place, parent, 7)])
    found, _ = read_one(hbm, stored)
    assert (found.parent, found.depth) == (parent, 7)
    assert hbm.key_at(stored.place) == stored.key
    hbm.mark_free([stored.place])
    assert hbm.key_at(stored.place) == b""
    hbm.close()


def test_a_pool_without_memory_is_no_space() -> None:
    with pytest.raises(NoSpace):
        open_device("host:0", 1 << 50)
    with pytest.raises(InvalidArgument):
        open_device("gpu", 1 << 20)
