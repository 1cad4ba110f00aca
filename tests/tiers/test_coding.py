"""What the disk tier makes of pieces: by plan for each group, raw where nothing is gained, and shown."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.clock import ManualClock
from kvstored.codec.frame import Codec
from kvstored.codec.planner import Goal
from kvstored.core.columnar import Places
from kvstored.core.types import GroupKind, GroupSpec, Layout, NamespaceId, NamespaceSpec
from kvstored.errors import Corrupt
from kvstored.tiers import slabs
from kvstored.tiers import views as memory
from kvstored.tiers.base import PieceRun, ref_of
from kvstored.tiers.coding import Coding
from kvstored.tiers.disk import Disk, Options
from kvstored.tiers.record import Record
from tests.codec import real
from tests.tiers.conformance import piece, read_one, run_of, same_bytes, scattered, write_one

FULL_BYTES = 8 * 32768
OPTIONS = Options(map_bytes=1 << 20, slab_bytes=8 << 20, codec=Codec.FRAME, codec_goal=Goal.RATIO)
KV = GroupSpec("kv", GroupKind.LINEAR, FULL_BYTES)
DIGEST = b"n" * 32


def layout_of(*groups: GroupSpec) -> Layout:
    spec = NamespaceSpec("m", "r", "bfloat16", "l", 1, block_tokens=256, groups=groups)
    return Layout(NamespaceId(1), DIGEST, 0, spec)


def block() -> NDArray[np.uint8]:
    """Eight tiles of real KV."""
    return np.concatenate([real.plain("a"), real.plain("b")] * 2)


def record_of(number: int, plain: NDArray[np.uint8], *, at: int = 0, group: int = 0) -> Record:
    checksum = memory.hash_of([plain])
    return replace(
        piece(number, run_of(at, len(plain)), len(plain))[0],
        digest=DIGEST,
        group=group,
        checksum=checksum,
        stored_checksum=checksum,
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, OPTIONS, clock=ManualClock())
    made.grow()
    made.coding.learn(layout_of(KV, replace(KV, name="other", lossy_ok=True)))
    yield made
    made.close()


def test_a_block_of_kv_takes_fewer_units_and_comes_back_exactly(disk: Disk) -> None:
    stored = write_one(disk, record_of(1, block()), [block()])
    assert stored.codec == Codec.FRAME
    assert stored.place[0].units < 64 * 0.68
    found, target = read_one(disk, stored)
    assert found == stored
    assert same_bytes(target, [block()])


def test_a_piece_in_many_parts_comes_back_into_many_parts(disk: Disk) -> None:
    plain = block()
    record = replace(record_of(1, plain), place=scattered(0, 32, 2))
    stored = write_one(disk, record, [plain[:8192], plain[8192:100_000], plain[100_000:]])
    assert stored.codec == Codec.FRAME
    target = [np.zeros(4096, np.uint8), np.zeros(FULL_BYTES - 4096, np.uint8)]
    disk.read([(ref_of(stored), stored.place, target)])
    assert same_bytes(target, [plain])


def test_a_block_with_fewer_tokens_is_coded_with_the_plan_of_full_ones(disk: Disk) -> None:
    full = write_one(disk, record_of(1, block()), [block()])
    rows = np.concatenate([real.bits("a"), real.bits("b")] * 2)[:, :200]
    part = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    stored = write_one(disk, record_of(2, part, at=100), [part])
    assert stored.codec == Codec.FRAME
    share = full.stored_length / FULL_BYTES
    assert stored.stored_length / len(part) < share * 1.01
    assert same_bytes(read_one(disk, stored)[1], [part])


def test_before_a_full_block_came_and_for_unknown_namespaces_pieces_stay_raw(disk: Disk) -> None:
    part = block()[: FULL_BYTES // 2]
    assert write_one(disk, record_of(1, part), [part]).codec == Codec.RAW
    stranger = replace(record_of(2, block(), at=100), digest=b"x" * 32)
    assert write_one(disk, stranger, [block()]).codec == Codec.RAW


def test_noise_and_small_pieces_stay_raw(disk: Disk) -> None:
    noise = np.random.default_rng(1).integers(0, 256, FULL_BYTES, dtype=np.uint8)
    assert write_one(disk, record_of(1, noise), [noise]).codec == Codec.RAW
    assert disk.coding.may_pack(DIGEST, 0, FULL_BYTES) is False
    small = block()[:61_440]
    assert write_one(disk, record_of(2, small, at=100), [small]).codec == Codec.RAW


def test_a_plan_is_made_anew_at_the_64th_block() -> None:
    coding = Coding(Codec.FRAME)
    coding.learn(layout_of(KV))
    noise = np.random.default_rng(1).integers(0, 256, FULL_BYTES, dtype=np.uint8)
    coding.encoded(record_of(1, noise), [noise])
    record = record_of(2, block())
    chosen = [coding.encoded(record, [block()]).codec for _ in range(63)]
    assert chosen == [Codec.RAW] * 62 + [Codec.FRAME]


@pytest.mark.parametrize(("depth", "is_tried"), [(510, False), (511, True)])
def test_differences_along_tokens_are_tried_from_131072_tokens_on(
    depth: int, is_tried: bool
) -> None:
    steady = np.cumsum(np.random.default_rng(3).integers(-2, 3, (8, 256, 64)), axis=1)
    drifting = (steady + np.arange(64) * 977 + 0x3C00).astype("<u2").reshape(-1).view(np.uint8)
    coding = Coding(Codec.FRAME)
    coding.learn(layout_of(KV))
    coding.encoded(replace(record_of(1, drifting), depth=depth), [drifting])
    (shown,) = coding.shown()
    assert ("tokens" in shown.plan) == is_tried


def test_each_group_shows_its_own_plan_and_what_it_saved(disk: Disk) -> None:
    stored = write_one(disk, record_of(1, block()), [block()])
    noise = np.random.default_rng(1).integers(0, 256, FULL_BYTES, dtype=np.uint8)
    write_one(disk, record_of(2, noise, at=100, group=1), [noise])
    kv, other = disk.coding.shown()
    assert (kv.group, other.group) == ("kv", "other")
    assert kv.plan.startswith("bf16 256x64 symbols")
    assert other.plan == "bf16 raw 1.00x"
    assert (kv.plain_bytes, kv.stored_bytes) == (FULL_BYTES, stored.stored_length)
    disk.coding.forget(DIGEST)
    assert disk.coding.shown() == ()


def test_a_frame_that_changed_on_the_disk_is_corrupt(disk: Disk, tmp_path: Path) -> None:
    stored = write_one(disk, record_of(1, block()), [block()])
    with (tmp_path / "slab-00000.dat").open("r+b") as slab:
        slab.seek(stored.place[0].start * 4096 + stored.stored_length // 2)
        slab.write(b"\xff\x00\xff\x00")
    with pytest.raises(Corrupt):
        read_one(disk, stored)


@pytest.mark.parametrize("count", [1, 2])
def test_coded_blocks_come_back_as_a_run_of_any_length(disk: Disk, count: int) -> None:
    # Of a run of one the records were read-only, and no coded block above 2 MiB could be loaded: each is a run of its own.
    numbers = [6 * (i + 1) for i in range(count)]
    stored = [write_one(disk, record_of(n, block(), at=70 * n), [block()]) for n in numbers]
    fingerprints = np.frombuffer(b"".join(record.fingerprint for record in stored), dtype="<u8")
    places = Places(*np.array([record.place[0] for record in stored], dtype=np.int64).T)
    slots = [slabs.aligned(FULL_BYTES) for _ in stored]
    came = disk.read_run(PieceRun(fingerprints.reshape(-1, 2), places, FULL_BYTES, slots))
    assert not came.faults
    for slot in slots:
        np.testing.assert_array_equal(slot, block())
