"""Pieces that go from NVMe to a GPU packed: what lies there then is what the record says, or the piece is not there, with the fault where it is."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.codec.frame import Codec
from kvstored.codec.unpacked import Crossing
from kvstored.core.types import UNIT_BYTES, Extent, Heat, Place
from kvstored.errors import Corrupt, KvstoredError, NoSpace, Unavailable
from kvstored.tiers import views as memory
from kvstored.tiers.base import Crossed, ref_of
from kvstored.tiers.cuda import CudaDevice
from kvstored.tiers.device import Device, open_device
from kvstored.tiers.disk import Disk
from kvstored.tiers.expansion import Expansion
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.record import Record
from kvstored.tiers.stand_in import HostDevice
from tests.tiers.conformance import read_one, same_bytes, write_one
from tests.tiers.conftest import POOL_BYTES
from tests.tiers.fake_cupy import FakeCupy, FakeRuntime
from tests.tiers.test_coding import FULL_BYTES, block, record_of
from tests.tiers.test_lossy_disk import LOSSY_KV, disk_of

UNITS = -(-FULL_BYTES // UNIT_BYTES)
Gpu = Callable[[str], Hbm]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = disk_of(tmp_path, LOSSY_KV, lossy="cold=int4,shared=int8")
    yield made
    made.close()


@pytest.fixture
def runtime(host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime(devices=2, device_bytes=256 << 20)
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(made, host))
    return made


def crossed(disk: Disk, record: Record) -> Crossed:
    (found,) = disk.unpack([(ref_of(record), record.place, record.length)])
    assert isinstance(found, Crossed), found
    return found


def up(hbm: Hbm, each: Crossed, place: Place) -> Record | KvstoredError:
    (outcome,) = hbm.write_packed([Crossed(replace(each.record, place=place), each.unpacked)])
    return outcome


def one(start: int, segment: int = 0) -> Place:
    return (Extent(segment, start, UNITS),)


PLACES = {
    "one extent": one(3),
    "scattered": (Extent(0, 900, UNITS - 7), Extent(0, 2, 4), Extent(0, 40, 3)),
    "on two gpus": (Extent(0, 900, UNITS - 7), Extent(1, 2, 7)),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("heat", [Heat.RECENT, Heat.SHARED, Heat.COLD])
def test_what_lies_on_the_gpu_is_what_the_disk_would_give(
    disk: Disk, hbm: Hbm, heat: Heat, place: Place
) -> None:
    stored = write_one(disk, replace(record_of(1, block(), at=70), heat=int(heat)), [block()])
    assert stored.codec == Codec.FRAME
    piece = crossed(disk, stored)
    is_lossy = heat is not Heat.RECENT
    if is_lossy:
        assert len(piece.unpacked.packed) < 0.6 * FULL_BYTES, "as many bytes cross"
        assert {*piece.unpacked.sections["crossing"].tolist()} == {Crossing.UNIFORM}
    made = up(hbm, piece, place)
    assert isinstance(made, Record)
    assert (made.codec, made.stored_length, made.checksum) == (0, FULL_BYTES, stored.checksum)
    assert made.flags == stored.flags
    _, below = read_one(disk, stored)
    _, above = read_one(hbm, made)
    assert same_bytes(above, below)
    assert same_bytes(above, [block()]) != is_lossy
    assert hbm.key_at(made.place) == stored.key


def test_many_pieces_are_one_call_of_the_kernels(disk: Disk, runtime: FakeRuntime) -> None:
    hbm = Hbm(["0"], POOL_BYTES, open_device)
    hbm.grow()
    items = []
    for number in range(1, 9):
        record = replace(record_of(number, block(), at=70 * number), heat=int(Heat.COLD))
        each = crossed(disk, write_one(disk, record, [block()]))
        items.append(Crossed(replace(each.record, place=one(number * UNITS)), each.unpacked))
    runtime.calls.clear()
    outcomes = hbm.write_packed(items)
    assert all(isinstance(outcome, Record) for outcome in outcomes)
    expansions = [call for call in runtime.calls if call.startswith("expand")]
    assert len(expansions) == 1
    assert runtime.calls.count("synchronized") == 2
    assert sum(int(c.split()[1]) for c in runtime.calls if c.startswith("memcpy")) < 0.6 * 8 * FULL_BYTES  # fmt: skip
    hbm.close()
    assert not runtime.allocated


def test_what_does_not_fit_into_the_staging_memory_crosses_in_parts(
    disk: Disk, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.tiers.cuda.STAGING_BYTES", 200 << 10)
    hbm = Hbm(["0"], POOL_BYTES, open_device)
    hbm.grow()
    items = []
    for number in range(1, 5):
        heat = Heat.COLD if number % 2 else Heat.RECENT
        record = replace(record_of(number, block(), at=70 * number), heat=int(heat))
        each = crossed(disk, write_one(disk, record, [block()]))
        items.append(Crossed(replace(each.record, place=one(number * UNITS)), each.unpacked))
    outcomes = hbm.write_packed(items)
    assert all(isinstance(outcome, Record) for outcome in outcomes)
    assert sum(call.startswith("expand") for call in runtime.calls) > 3
    hbm.close()


def test_bytes_that_are_not_the_record_s_are_the_source_s_fault(disk: Disk, hbm: Hbm) -> None:
    stored = write_one(disk, record_of(1, block(), at=70), [block()])
    each = crossed(disk, stored)
    other = replace(each.record, checksum=each.record.checksum ^ 1)
    outcome = up(hbm, Crossed(other, each.unpacked), one(3))
    assert isinstance(outcome, Corrupt)
    assert hbm.fault is None
    assert hbm.key_at(one(3)) == b""


class Wrong(HostDevice):
    """Its memory flips a bit."""

    def expand(self, expansion: Expansion) -> list[int]:
        found = super().expand(expansion)
        return [checksum ^ 1 for checksum in found]


def test_a_gpu_that_holds_other_bytes_is_switched_off_and_its_source_stays(disk: Disk) -> None:
    def opener(name: str, size_bytes: int) -> Device:
        return Wrong(size_bytes)

    hbm = Hbm(["host:0"], POOL_BYTES, opener)
    hbm.grow()
    stored = write_one(disk, record_of(1, block(), at=70), [block()])
    each = crossed(disk, stored)
    outcome = up(hbm, each, one(3))
    assert isinstance(outcome, Unavailable)
    assert "other bytes" in str(hbm.fault)
    assert isinstance(up(hbm, each, one(3)), Unavailable)
    hbm.close()


def test_damage_on_disk_is_found_before_anything_crosses(disk: Disk, tmp_path: Path) -> None:
    stored = write_one(disk, record_of(1, block(), at=70), [block()])
    slab = next(tmp_path.glob("slab-*"))
    raw = bytearray(slab.read_bytes())
    raw[stored.place[0].start * UNIT_BYTES + 1000] ^= 1
    slab.write_bytes(raw)
    (found,) = disk.unpack([(ref_of(stored), stored.place, stored.length)])
    assert isinstance(found, Corrupt)
    (short,) = disk.unpack([(ref_of(stored), stored.place, stored.length - 1)])
    assert isinstance(short, Corrupt)


def test_a_gpu_without_room_to_unpack_goes_on_without_the_piece(
    disk: Disk, runtime: FakeRuntime
) -> None:
    device = CudaDevice(0, POOL_BYTES)
    runtime.device_bytes = POOL_BYTES
    hbm = Hbm(["0"], POOL_BYTES, lambda *_: device)
    hbm.grow()
    stored = write_one(disk, record_of(1, block(), at=70), [block()])
    each = crossed(disk, stored)
    for _ in range(3):
        assert isinstance(up(hbm, each, one(3)), NoSpace)
    assert len(runtime.pinned) == 1, "each failure keeps pinned memory"
    assert hbm.fault is None
    runtime.device_bytes = 256 << 20
    assert isinstance(up(hbm, each, one(3)), Record)
    hbm.close()


def test_a_piece_that_lies_raw_crosses_as_it_is(disk: Disk, hbm: Hbm) -> None:
    rng = np.random.default_rng(4)
    noise: NDArray[np.uint8] = rng.integers(0, 256, FULL_BYTES, dtype=np.uint8)
    record = replace(record_of(1, noise, at=70), checksum=memory.hash_of([noise]))
    stored = write_one(disk, record, [noise])
    made = up(hbm, crossed(disk, stored), one(3))
    assert isinstance(made, Record)
    assert same_bytes(read_one(hbm, made)[1], [noise])
