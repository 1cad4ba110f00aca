"""The layout of a projection: what a client needs to know of a block in order to copy it without asking.

A memfd: a superblock of one unit, the tags, the entries. `buckets` (a power of two) of WAYS slots each; a slot is a tag (u64, the low half of the
fingerprint; 0: free) and an entry of 16 words. The bucket is the high half of the fingerprint, masked. All numbers are little-endian.

| word | of an entry |
|---|---|
| 0 | sequence: odd while it is written |
| 1, 2 | xxh3-64 of the block's bytes; generation |
| 3, 4 | the first half of the namespace's digest |
| 5-12 | key, zero padded |
| 13 | segment << 32, first unit |
| 14 | length << 8, bytes of the key |
| 15 | xxh3-64 of words 1-14 |

Used by the daemon, which writes it (projection.py), and by clients, which read it. No I/O here.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvstored.core.types import UNIT_BYTES
from kvstored.errors import StateMismatch

MAGIC = b"KVP1"
VERSION = 1
WAYS = 8
ENTRY_WORDS = 16
ENTRY_BYTES = 8 * ENTRY_WORDS
TAG_BYTES = 8
SUPERBLOCK_BYTES = UNIT_BYTES
SEQUENCE, CHECKSUM, GENERATION, PLACE, SIZES, SUM = 0, 1, 2, 13, 14, 15
"""Words of an entry."""
DIGEST_WORDS, KEY_WORDS = slice(3, 5), slice(5, 13)
NAME_WORDS = slice(DIGEST_WORDS.start, KEY_WORDS.stop)
DIGEST_BYTES = 16
NAME_BYTES = 8 * (NAME_WORDS.stop - NAME_WORDS.start)
COVERED = slice(8, 120)
"""Bytes of an entry that its own checksum covers."""
SEGMENT_SHIFT, LENGTH_SHIFT = 32, 8
START_MASK, KEY_BYTES_MASK = (1 << SEGMENT_SHIFT) - 1, (1 << LENGTH_SHIFT) - 1

_SUPERBLOCK = struct.Struct("<4sIIIQ")
_SUM = struct.Struct("<Q")
SUPERBLOCK_USED_BYTES = _SUPERBLOCK.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Superblock:
    """`epoch`: of the boot of the daemon that writes this projection; for one of another boot it says nothing."""

    epoch: int
    buckets: int

    @property
    def slots(self) -> int:
        return self.buckets * WAYS

    @property
    def tags_at(self) -> int:
        return SUPERBLOCK_BYTES

    @property
    def entries_at(self) -> int:
        return SUPERBLOCK_BYTES + self.slots * TAG_BYTES

    @property
    def size_bytes(self) -> int:
        return self.entries_at + self.slots * ENTRY_BYTES

    def pack(self) -> bytes:
        packed = _SUPERBLOCK.pack(MAGIC, VERSION, self.epoch, WAYS, self.buckets)
        return packed + _SUM.pack(xxhash.xxh3_64_intdigest(packed))


def superblock_in(raw: bytes) -> Superblock:
    """Raises StateMismatch for whatever is no projection of this version."""
    if len(raw) < SUPERBLOCK_USED_BYTES:
        raise StateMismatch(f"projection has no superblock: bytes={len(raw)}")
    magic, version, epoch, ways, buckets = _SUPERBLOCK.unpack_from(raw)
    (stated,) = _SUM.unpack_from(raw, _SUPERBLOCK.size)
    if magic != MAGIC or stated != xxhash.xxh3_64_intdigest(raw[: _SUPERBLOCK.size]):
        raise StateMismatch(f"projection has a damaged superblock: magic={magic!r}")
    if version != VERSION or ways != WAYS or buckets & (buckets - 1) or not buckets:
        raise StateMismatch(f"projection is of another version: {version=} {ways=} {buckets=}")
    return Superblock(epoch, buckets)
