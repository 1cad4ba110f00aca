"""The record of one stored piece: 256 bytes, little-endian, the same in the arena's tables and as LMDB value.

An arena record lies in the table at the start unit of its extent and chains to the records (state CONTINUED) of further extents;
an LMDB value is the record followed by all extents. What changes during a piece's life (state, leased, heat, counters, checksums of
bytes that are still being written) lies in the first 40 bytes, outside of the header checksum: a wrong checksum there can
only make good bytes look bad. Everything else is covered by it. No I/O here.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.core.types import EXTENTS_MAX, KEY_BYTES_MAX, KEY_BYTES_MIN, UNIT_BYTES, Extent, Place
from kvstored.errors import Corrupt

MAGIC = b"KVR1"
VERSION = 1
RECORD_BYTES = 256
EXTENT_BYTES = 12
FINGERPRINT_BYTES = 16
ROOT = bytes(FINGERPRINT_BYTES)
"""The parent of a block that has none."""
NO_SEGMENT = 0xFFFF_FFFF
"""`next_segment` of a piece's last extent."""

Records = NDArray[np.void]
"""An array of dtype RECORD."""


class State(IntEnum):
    """Zero is FREE, so an untouched table is empty. CONTINUED marks a further extent of the piece that chains to it."""

    FREE = 0
    FILLING = 1
    READY = 2
    CONTINUED = 3


RECORD = np.dtype(
    [
        ("magic", "S4"),
        ("version", "u1"),
        ("state", "u1"),
        ("leased", "u1"),
        ("heat", "u1"),
        ("hits", "<u4"),
        ("owner_pid", "<u4"),
        ("last_s", "<f8"),
        ("checksum", "<u8"),
        ("stored_checksum", "<u8"),
        ("generation", "<u8"),
        ("digest", "V32"),
        ("fingerprint", "<u8", (2,)),
        ("parent", "<u8", (2,)),
        ("key", "V64"),
        ("length", "<u8"),
        ("stored_length", "<u8"),
        ("place_checksum", "<u8"),
        ("group", "<u2"),
        ("shard", "<u2"),
        ("valid_tokens", "<u4"),
        ("depth", "<u4"),
        ("extent_units", "<u4"),
        ("next_segment", "<u4"),
        ("next_start", "<u4"),
        ("codec", "u1"),
        ("key_bytes", "u1"),
        ("extent_count", "u1"),
        ("flags", "u1"),
        ("content", "<u4"),
        ("reserved", "V16"),
        ("header_checksum", "<u8"),
    ]
)
STATE_OFFSET = 5
LEASED_OFFSET = 6
CHECKSUMS_OFFSET = 24
CHECKSUMS = struct.Struct("<QQ")
"""checksum, stored_checksum."""

HEADER_OFFSET, HEADER_END = 40, 248
"""What the header checksum covers."""
MUTABLE = struct.Struct("<4sBBBBIIdQQ")
HEADER = struct.Struct("<Q32s16s16s64sQQQHHIIIIIBBBBI16x")
HEADER_CHECKSUM = struct.Struct("<Q")
_EXTENT = struct.Struct("<III")
_HEAT_HITS, _HEAT_OFFSET = struct.Struct("<BI"), 7
_LAST, _LAST_OFFSET = struct.Struct("<d"), 16
STATE_AND_MORE, CHECKSUM_WORD, GENERATION_WORD, LENGTH_WORD = 0, 3, 5, 22
DIGEST_WORDS, FINGERPRINT_WORDS = slice(6, 10), slice(10, 12)
PARENT_WORDS, KEY_WORDS = slice(12, 14), slice(14, 22)
"""Which of the 32 words of a record these are."""
KEY_BYTES_OFFSET = 225
_PARENT_OFFSET, _KEY_OFFSET = 96, 112


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The piece that a P frame refers to (of the record's group, shard and length). Before it is written only the first two are known."""

    fingerprint: bytes
    place: Place
    stored_length: int = 0
    stored_checksum: int = 0
    checksum: int = 0
    codec: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One piece of one copy: identity, place, what its bytes must be, and where its block stands in the tree.

    `fingerprint` and `parent`: 16 bytes each, low half first. `length`, `checksum`: the decoded bytes; `stored_length`, `stored_checksum`, `codec`:
    the bytes as they lie in the place. `owner_pid`: whose process may still be writing while FILLING. On NVMe only: `content`, fingerprint of the
    content key; `base`, what the piece refers to, or in a write may refer to.
    """

    digest: bytes
    key: bytes
    fingerprint: bytes
    group: int
    shard: int
    place: Place
    length: int
    checksum: int
    stored_length: int
    stored_checksum: int
    codec: int = 0
    generation: int = 0
    parent: bytes = ROOT
    valid_tokens: int = 0
    depth: int = 0
    hits: int = 0
    last_s: float = 0.0
    heat: int = 0
    leased: bool = False
    flags: int = 0
    content: int = 0
    base: Base | None = None
    owner_pid: int = 0
    state: State = State.READY


def pack(record: Record) -> bytes:
    """The head record, which lies at the first extent; 256 bytes."""
    place = record.place
    first = place[0]
    next_segment, next_start = (
        (place[1].segment, place[1].start) if len(place) > 1 else (NO_SEGMENT, 0)
    )
    header = HEADER.pack(
        record.generation,
        record.digest,
        record.fingerprint,
        record.parent,
        record.key,
        record.length,
        record.stored_length,
        place_checksum(place),
        record.group,
        record.shard,
        record.valid_tokens,
        record.depth,
        first.units,
        next_segment,
        next_start,
        record.codec,
        len(record.key),
        len(place),
        record.flags,
        record.content,
    )
    mutable = MUTABLE.pack(
        MAGIC,
        VERSION,
        record.state,
        record.leased,
        record.heat,
        record.hits,
        record.owner_pid,
        record.last_s,
        record.checksum,
        record.stored_checksum,
    )
    return mutable + header + HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))


def pack_continuation(record: Record, i: int) -> bytes:
    """The record at extent `i` >= 1: says only how the chain goes on; the head's `place_checksum` vouches for the whole chain."""
    place = record.place
    next_segment, next_start = (
        (place[i + 1].segment, place[i + 1].start) if i + 1 < len(place) else (NO_SEGMENT, 0)
    )
    header = HEADER.pack(
        record.generation, bytes(32), record.fingerprint, ROOT, b"", 0, 0, 0,
        record.group, record.shard, 0, 0, place[i].units, next_segment, next_start, 0, 0, 0, 0, 0,
    )  # fmt: skip
    mutable = MUTABLE.pack(MAGIC, VERSION, State.CONTINUED, 0, 0, 0, 0, 0.0, 0, 0)
    return mutable + header + HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))


def unpack(raw: bytes | bytearray | memoryview, place: Place) -> Record:
    """The record in `raw`, which must vouch for `place`; raises Corrupt for anything else."""
    if len(raw) != RECORD_BYTES:
        raise Corrupt(f"record has a wrong size: bytes={len(raw)} expected={RECORD_BYTES}")
    fault = _fault_of(raw)
    if fault:
        raise Corrupt(f"record is not usable: {fault}")
    _, _, state, leased, heat, hits, owner_pid, last_s, checksum, stored_checksum = (
        MUTABLE.unpack_from(raw)
    )
    (
        generation, digest, fingerprint, parent, key, length, stored_length, stated_place, group, shard, valid_tokens,
        depth, _, _, _, codec, key_bytes, extent_count, flags, content,
    ) = HEADER.unpack_from(raw, HEADER_OFFSET)  # fmt: skip
    if extent_count != len(place) or stated_place != place_checksum(place):
        raise Corrupt(f"record does not vouch for its place: extents={len(place)}")
    if stored_length > place_bytes(place):
        raise Corrupt(f"record is larger than its place: stored_length={stored_length}")
    return Record(
        digest=digest,
        key=key[:key_bytes],
        fingerprint=fingerprint,
        group=group,
        shard=shard,
        place=place,
        length=length,
        checksum=checksum,
        stored_length=stored_length,
        stored_checksum=stored_checksum,
        codec=codec,
        generation=generation,
        parent=parent,
        valid_tokens=valid_tokens,
        depth=depth,
        hits=hits,
        last_s=last_s,
        heat=heat,
        leased=leased != 0,
        flags=flags,
        content=content,
        owner_pid=owner_pid,
        state=State(state),
    )


def place_bytes(place: Place) -> int:
    return sum(extent.units for extent in place) * UNIT_BYTES


def pack_place(place: Place) -> bytes:
    if len(place) == 1:
        extent = place[0]
        return _EXTENT.pack(extent.segment, extent.start, extent.units)
    return b"".join(_EXTENT.pack(e.segment, e.start, e.units) for e in place)


def place_checksum(place: Place) -> int:
    return xxhash.xxh3_64_intdigest(pack_place(place))


def unpack_place(raw: bytes) -> Place:
    """1 to 64 extents; raises Corrupt for any other input."""
    if len(raw) % EXTENT_BYTES or not 0 < len(raw) <= EXTENTS_MAX * EXTENT_BYTES:
        raise Corrupt(f"place has a wrong size: bytes={len(raw)}")
    return tuple(Extent(*words) for words in _EXTENT.iter_unpack(raw))


def trimmed(place: Place, size_bytes: int) -> Place:
    """The units of `place` that the first `size_bytes` bytes touch."""
    capacity_bytes = place_bytes(place)
    assert 0 < size_bytes <= capacity_bytes, "more bytes than the place has"
    if capacity_bytes - size_bytes < UNIT_BYTES:
        return place
    units = -(-size_bytes // UNIT_BYTES)
    kept: list[Extent] = []
    for extent in place:
        kept.append(Extent(extent.segment, extent.start, min(extent.units, units)))
        units -= kept[-1].units
        if not units:
            break
    return tuple(kept)


def key_of(raw: bytes | memoryview, offset: int) -> bytes:
    """The key in the packed record at `offset`, which is not checked."""
    key = offset + _KEY_OFFSET
    return bytes(raw[key : key + raw[offset + KEY_BYTES_OFFSET]])


def parent_of(raw: bytes | memoryview, offset: int) -> bytes:
    """The parent's fingerprint in the packed record at `offset`, which is not checked."""
    parent = offset + _PARENT_OFFSET
    return bytes(raw[parent : parent + 16])


def patch_counters(
    raw: bytearray | memoryview, offset: int, *, hits: int, last_s: float, heat: int
) -> None:
    """Overwrite the counters of the packed record at `offset`; the header checksum does not cover them."""
    _HEAT_HITS.pack_into(raw, offset + _HEAT_OFFSET, heat, hits)
    _LAST.pack_into(raw, offset + _LAST_OFFSET, last_s)


def checked(records: Records) -> NDArray[np.bool_]:
    """Which of a batch are records of this version with a header that matches its checksum; about 0.4 us each."""
    if not len(records):
        return np.zeros(0, dtype=np.bool_)
    records = np.ascontiguousarray(records)
    sums = checksums(records.view(np.uint8).data, HEADER_OFFSET, HEADER_END, RECORD_BYTES)
    key_bytes = records["key_bytes"]
    mask: NDArray[np.bool_] = (
        (records["magic"] == MAGIC)
        & (records["version"] == VERSION)
        & (records["state"] <= State.CONTINUED)
        & (records["header_checksum"] == sums)
        & (key_bytes >= KEY_BYTES_MIN)
        & (key_bytes <= KEY_BYTES_MAX)
    )
    return mask


def checksums(raw: bytes | memoryview, begin: int, end: int, step: int) -> NDArray[np.uint64]:
    """xxh3-64 of bytes `begin` to `end` of each `step` bytes."""
    digest, span = xxhash.xxh3_64_intdigest, end - begin
    sums = [digest(raw[i : i + span]) for i in range(begin, len(raw), step)]
    return np.asarray(sums, dtype=np.uint64)


def digests_of(records: Records) -> tuple[list[bytes], NDArray[np.intp]]:
    """The distinct namespace digests of a batch and, per record, which one it has."""
    packed = np.ascontiguousarray(records["digest"]).view("S32")
    distinct, which = np.unique(packed, return_inverse=True)
    return [bytes(digest).ljust(32, b"\0") for digest in distinct], which


def _fault_of(raw: bytes | bytearray | memoryview) -> str:
    """Why these 256 bytes are no record of this version; empty when they are one."""
    magic, version, state = bytes(raw[0:4]), raw[4], raw[STATE_OFFSET]
    if magic != MAGIC:
        return f"magic={magic!r}"
    if version != VERSION:
        return f"version={version} expected={VERSION}"
    if state > State.CONTINUED:
        return f"state={state}"
    (stated,) = HEADER_CHECKSUM.unpack_from(raw, HEADER_END)
    if stated != xxhash.xxh3_64_intdigest(raw[HEADER_OFFSET:HEADER_END]):
        return "header does not match its checksum"
    if state != State.CONTINUED and not KEY_BYTES_MIN <= raw[KEY_BYTES_OFFSET] <= KEY_BYTES_MAX:
        return f"key_bytes={raw[KEY_BYTES_OFFSET]}"
    return ""
