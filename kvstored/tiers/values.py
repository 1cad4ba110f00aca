"""The value of an LMDB record: a record, its extents, and of a P frame what it refers to. No I/O here.

| bytes | of what follows the extents where the record's flags say BASED |
|---|---|
| 0-15 | fingerprint of the block that it refers to |
| 16-39 | stored_length, stored_checksum, checksum of that piece, u64 each |
| 40, 41 | codec, extent_count; then 6 zero bytes |
| 48- | its extents |
| | xxh3-64 of all this |
"""

import struct
from dataclasses import replace

import xxhash

from kvstored.errors import Corrupt
from kvstored.tiers import record as layout
from kvstored.tiers.record import EXTENT_BYTES, RECORD_BYTES, Base, Record

BASED, LOSSY = 1, 2
"""Flags of a record: it refers to another piece; its bytes are near those that were put, not equal, and its checksum is of what they are."""
FLAGS_OFFSET, EXTENT_COUNT_OFFSET = 227, 226
_BASE = struct.Struct("<16sQQQBB6x")
_SUM = struct.Struct("<Q")


def pack_value(record: Record) -> bytes:
    """Whether the record is BASED follows from its base; its own flags never say so."""
    assert not record.flags & BASED
    if record.base is None:
        return layout.pack(record) + layout.pack_place(record.place)
    head = layout.pack(replace(record, flags=record.flags | BASED))
    return head + layout.pack_place(record.place) + _packed(record.base)


def unpack_value(raw: bytes) -> Record:
    """Raises Corrupt for whatever is no record that vouches for its places."""
    end = base_offset(raw)
    record = layout.unpack(raw[:RECORD_BYTES], layout.unpack_place(raw[RECORD_BYTES:end]))
    return replace(record, flags=record.flags & ~BASED, base=base_of(raw))


def base_offset(raw: bytes) -> int:
    """Where the record's own extents end."""
    if len(raw) < RECORD_BYTES:
        raise Corrupt(f"record has a wrong size: bytes={len(raw)} expected={RECORD_BYTES}")
    return RECORD_BYTES + raw[EXTENT_COUNT_OFFSET] * EXTENT_BYTES


def base_of(raw: bytes) -> Base | None:
    """What the record in `raw` refers to; raises Corrupt where its flags say other than what follows its extents."""
    packed = raw[base_offset(raw) :]
    if bool(packed) != bool(raw[FLAGS_OFFSET] & BASED):
        raise Corrupt(f"record has a wrong size: bytes={len(raw)} flags={raw[FLAGS_OFFSET]}")
    return _unpacked(packed) if packed else None


def base_bytes(base: Base) -> int:
    """Of what follows a record's own extents."""
    return _BASE.size + len(base.place) * EXTENT_BYTES + _SUM.size


def lies_at(raw: bytes, place: bytes) -> bool:
    """Whether the record has this packed place, or for a damaged one nothing else behind it."""
    behind = raw[RECORD_BYTES:]
    if behind == place:
        return True
    is_based = bool(raw[FLAGS_OFFSET] & BASED) and behind.startswith(place)
    return is_based and raw[EXTENT_COUNT_OFFSET] * EXTENT_BYTES == len(place)


def _packed(base: Base) -> bytes:
    head = _BASE.pack(
        base.fingerprint,
        base.stored_length,
        base.stored_checksum,
        base.checksum,
        base.codec,
        len(base.place),
    )
    whole = head + layout.pack_place(base.place)
    return whole + _SUM.pack(xxhash.xxh3_64_intdigest(whole))


def _unpacked(raw: bytes) -> Base:
    whole, stated = raw[: -_SUM.size], raw[-_SUM.size :]
    if len(whole) <= _BASE.size or stated != _SUM.pack(xxhash.xxh3_64_intdigest(whole)):
        raise Corrupt(f"record refers to something unknown: bytes={len(raw)}")
    fingerprint, stored_length, stored_checksum, checksum, codec, extents = _BASE.unpack_from(whole)
    place = layout.unpack_place(whole[_BASE.size :])
    if len(place) != extents or stored_length > layout.place_bytes(place):
        raise Corrupt(f"record refers to something larger than its place: {stored_length=}")
    return Base(
        fingerprint=fingerprint,
        place=place,
        stored_length=stored_length,
        stored_checksum=stored_checksum,
        checksum=checksum,
        codec=codec,
    )
