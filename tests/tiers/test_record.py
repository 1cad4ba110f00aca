"""The record format: packed and unpacked equal, any other bytes are Corrupt, and version 1 stays readable."""

import timeit
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.core.columnar import Places
from kvstored.core.types import KEY_BYTES_MAX, Extent, Place
from kvstored.errors import Corrupt
from kvstored.tiers import record as layout
from kvstored.tiers.filling import FillingColumns, ReadyOne, pack_many, pack_ready
from kvstored.tiers.record import RECORD, RECORD_BYTES, Base, Record, State
from kvstored.tiers.values import LOSSY, pack_value, unpack_value

GOLDEN = Path(__file__).parent / "golden"
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
u8 = st.integers(0, 255)
extents = st.builds(Extent, u32, u32, st.integers(2**31, 2**32 - 1))
places = st.lists(extents, min_size=1, max_size=64).map(tuple)


def golden_records() -> list[Record]:
    one = Record(
        digest=bytes(range(32)),
        key=bytes(range(100, 132)),
        fingerprint=bytes(range(16)),
        group=3,
        shard=7,
        place=(Extent(0, 256, 16),),
        length=65_000,
        checksum=0x0123456789ABCDEF,
        stored_length=60_000,
        stored_checksum=0xFEDCBA9876543210,
        codec=1,
        generation=42,
        parent=bytes(range(16, 32)),
        valid_tokens=256,
        depth=9,
        hits=5,
        last_s=1.75e9,
        heat=2,
        leased=True,
        owner_pid=1234,
    )
    three = replace(
        one,
        key=b"k" * 64,
        place=(Extent(0, 1, 4), Extent(2, 9, 10), Extent(1, 3, 2)),
        state=State.FILLING,
        parent=layout.ROOT,
    )
    return [one, three, replace(one, key=b"8 bytes!", leased=False)]


records = st.builds(
    Record,
    digest=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=8, max_size=64),
    fingerprint=st.binary(min_size=16, max_size=16),
    group=st.integers(0, 2**16 - 1),
    shard=st.integers(0, 2**16 - 1),
    place=places,
    length=u64,
    checksum=u64,
    stored_length=st.integers(0, 2**31 * 4096),
    stored_checksum=u64,
    codec=u8,
    generation=u64,
    parent=st.binary(min_size=16, max_size=16),
    valid_tokens=u32,
    depth=u32,
    hits=u32,
    last_s=st.floats(allow_nan=False),
    heat=u8,
    leased=st.booleans(),
    flags=st.integers(0, 127).map(lambda value: 2 * value),
    content=u32,
    base=st.none()
    | st.builds(
        Base,
        fingerprint=st.binary(min_size=16, max_size=16),
        place=places,
        stored_length=st.integers(0, 2**31 * 4096),
        stored_checksum=u64,
        checksum=u64,
        codec=u8,
    ),
    owner_pid=u32,
    state=st.sampled_from([State.FREE, State.FILLING, State.READY]),
)


def test_a_record_is_256_bytes_and_the_dtype_agrees_with_the_struct() -> None:
    record = golden_records()[0]
    row = np.frombuffer(layout.pack(record), RECORD)[0]
    assert RECORD.itemsize == RECORD_BYTES == len(layout.pack(record))
    assert (row["hits"], row["generation"], row["length"]) == (5, 42, 65_000)
    assert (row["checksum"], row["stored_checksum"]) == (record.checksum, record.stored_checksum)
    assert (row["last_s"], row["heat"], row["owner_pid"], row["leased"]) == (1.75e9, 2, 1234, 1)
    assert row["fingerprint"].tobytes() == record.fingerprint
    assert row["parent"].tobytes() == record.parent
    assert row["digest"].tobytes() == record.digest
    assert row["key"].tobytes()[:32] == record.key
    assert (row["group"], row["shard"], row["codec"], row["extent_count"]) == (3, 7, 1, 1)
    assert (row["extent_units"], row["next_segment"]) == (16, layout.NO_SEGMENT)


@settings(deadline=None)
@given(records)
def test_every_record_survives_packing(record: Record) -> None:
    assert unpack_value(pack_value(record)) == record


@settings(deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_unpack_or_are_corrupt(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack_value(raw)


@settings(deadline=None)
@given(st.data(), records)
def test_a_flipped_bit_is_corrupt_or_lies_in_the_mutable_fields(
    data: st.DataObject, record: Record
) -> None:
    raw = bytearray(pack_value(record))
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[at // 8] ^= 1 << (at % 8)
    try:
        read = unpack_value(bytes(raw))
    except Corrupt:
        return
    assert at // 8 < 40
    assert (
        replace(
            read,
            state=record.state,
            leased=record.leased,
            heat=record.heat,
            hits=record.hits,
            owner_pid=record.owner_pid,
            last_s=record.last_s,
            checksum=record.checksum,
            stored_checksum=record.stored_checksum,
        )
        == record
    )


@settings(deadline=None)
@given(st.lists(records, max_size=8), st.data())
def test_the_batch_check_agrees_with_the_single_one(
    batch: list[Record], data: st.DataObject
) -> None:
    raw = bytearray(b"".join(map(layout.pack, batch)))
    if batch:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(0, 255))
    rows = np.frombuffer(raw, RECORD)
    assert layout.checked(rows).tolist() == [
        _opens(bytes(rows[i : i + 1].tobytes()), record.place) for i, record in enumerate(batch)
    ]


def _opens(raw: bytes, place: Place) -> bool:
    try:
        layout.unpack(raw, place)
    except Corrupt:
        return False
    return True


def test_counters_are_patched_without_the_header_checksum() -> None:
    record = golden_records()[1]
    raw = bytearray(b"ab" + pack_value(record))
    layout.patch_counters(raw, 2, hits=77, last_s=3.5, heat=1)
    assert unpack_value(bytes(raw[2:])) == replace(record, hits=77, last_s=3.5, heat=1)


def golden_reference() -> Record:
    """A piece that refers to another one, in two extents, and is not exact."""
    base = Base(
        fingerprint=bytes(range(50, 66)),
        place=(Extent(1, 7, 3), Extent(0, 99, 8)),
        stored_length=43_000,
        stored_checksum=0x1122334455667788,
        checksum=0x8877665544332211,
        codec=2,
    )
    one = golden_records()[0]
    return replace(one, codec=2, flags=LOSSY, content=0x23456789, base=base)


def test_the_golden_record_of_a_reference_opens() -> None:
    value = (GOLDEN / "record-reference-v1.bin").read_bytes()
    assert unpack_value(value) == golden_reference()
    assert pack_value(golden_reference()) == value


def test_the_golden_records_of_version_1_open() -> None:
    raw = (GOLDEN / "records-v1.bin").read_bytes()
    sizes = [RECORD_BYTES + 12 * len(record.place) for record in golden_records()]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    values = [raw[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert [unpack_value(value) for value in values] == golden_records()
    assert [pack_value(record) for record in golden_records()] == values


def test_digests_of_keeps_trailing_zero_bytes() -> None:
    digests = [b"\0" * 32, b"a" * 31 + b"\0", b"\xff" * 32, b"\0" * 32]
    rows = np.zeros(4, RECORD)
    for row, digest in zip(rows, digests, strict=True):
        row["digest"] = np.void(digest)
    distinct, which = layout.digests_of(rows)
    assert [distinct[i] for i in which] == digests


def test_packing_a_record_takes_less_than_10_us() -> None:
    record = golden_records()[0]
    assert min(timeit.repeat(lambda: layout.pack(record), number=1000, repeat=7)) < 10e-3


@pytest.mark.parametrize("key_bytes", [8, 32, KEY_BYTES_MAX])
def test_the_record_of_one_piece_that_is_ready_is_that_of_one_of_many(key_bytes: int) -> None:
    rng = np.random.default_rng(key_bytes)
    names = rng.integers(0, 1 << 63, (2, 2), dtype=np.uint64)
    extent = Extent(3, 77, 5)
    many = FillingColumns(
        digest=rng.bytes(32),
        keys=rng.bytes(key_bytes),
        fingerprints=names[:1],
        parents=names[1:],
        places=Places(*(np.array([value], dtype=np.int64) for value in extent)),
        generations=np.array([9], dtype=np.uint64),
        depths=np.array([12], dtype=np.int64),
        heats=np.array([2], dtype=np.uint8),
        length=19_000,
        valid_tokens=16,
        last_s=1234.5,
        owner_pid=4321,
    )
    one = ReadyOne(
        digest=many.digest,
        key=many.keys,
        fingerprint=names[0].tobytes(),
        parent=names[1].tobytes(),
        extent=extent,
        generation=9,
        depth=12,
        heat=2,
        length=many.length,
        valid_tokens=many.valid_tokens,
        last_s=many.last_s,
        owner_pid=many.owner_pid,
        checksum=0xFFFF_0000_1234_5678,
    )
    sums = np.array([one.checksum], dtype=np.uint64)
    assert pack_ready(one) == pack_many(many, sums).tobytes()
