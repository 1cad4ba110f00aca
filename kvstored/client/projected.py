"""The daemon's projection as a client sees it: mapped read-only, looked up without a message.

What an entry says is a hint until the bytes are copied, the entry is still the same, and the bytes have its checksum. Whatever is odd is
told as not there, and asked of the daemon.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvstored.core.types import UNIT_BYTES
from kvstored.errors import StateMismatch, Unavailable
from kvstored.tiers import entries as layout
from kvstored.tiers.entries import ENTRY_BYTES, TAG_BYTES, WAYS

_ENTRY = struct.Struct("<3Q16s64s3Q")
_SEQUENCE = struct.Struct("<Q")
_HALF = (1 << 64) - 1
_BUCKET_BYTES = WAYS * TAG_BYTES
_BEGIN, _END = layout.COVERED.start, layout.COVERED.stop


class Entry(NamedTuple):
    """`at`: where it lies. `offset`, `length`: bytes in the segment."""

    at: int
    sequence: int
    checksum: int
    generation: int
    segment: int
    offset: int
    length: int


class Index:
    """One boot's projection: refused for a session of another one. Thread-safe, since it only reads."""

    def __init__(self, descriptor: int, epoch: int) -> None:
        """Takes the descriptor over. Raises StateMismatch for whatever is no projection of this epoch."""
        try:
            size_bytes = os.fstat(descriptor).st_size
            memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise Unavailable(f"the projection cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        facts = layout.superblock_in(memory[: layout.SUPERBLOCK_USED_BYTES])
        if facts.epoch != epoch or facts.size_bytes != size_bytes:
            raise StateMismatch(
                f"projection is of another boot: epoch={facts.epoch} expected={epoch} bytes={size_bytes}"
            )
        self._memory = memory
        self._tags_at, self._entries_at = facts.tags_at, facts.entries_at
        self._mask = facts.buckets - 1

    def find(self, keys: Sequence[bytes], digest: bytes, seed: int) -> tuple[list[Entry], int]:
        """An entry a key, NOT_THERE for those that have none; and how many were odd: just written, or torn."""
        found: list[Entry] = []
        odd = 0
        short = digest[: layout.DIGEST_BYTES]
        memory, mask = self._memory, self._mask
        name, digest_of = xxhash.xxh3_128_intdigest, xxhash.xxh3_64_intdigest
        for key in keys:
            fingerprint = name(key, seed)
            bucket = fingerprint >> 64 & mask
            tags_at = self._tags_at + bucket * _BUCKET_BYTES
            tag = (fingerprint & _HALF).to_bytes(TAG_BYTES, "little")
            way = memory[tags_at : tags_at + _BUCKET_BYTES].find(tag)
            if way < 0 or way % TAG_BYTES:
                found.append(NOT_THERE)
                continue
            at = self._entries_at + (bucket * WAYS + way // TAG_BYTES) * ENTRY_BYTES
            raw = memory[at : at + ENTRY_BYTES]
            sequence, checksum, generation, space, named, place, sizes, own = _ENTRY.unpack(raw)
            if sequence & 1 or own != digest_of(raw[_BEGIN:_END]):
                odd += 1
                found.append(NOT_THERE)
                continue
            key_bytes = sizes & layout.KEY_BYTES_MASK
            if space != short or key_bytes != len(key) or named[:key_bytes] != key:
                found.append(NOT_THERE)
                continue
            offset = (place & layout.START_MASK) * UNIT_BYTES
            segment, length = place >> layout.SEGMENT_SHIFT, sizes >> layout.LENGTH_SHIFT
            found.append(Entry(at, sequence, checksum, generation, segment, offset, length))
        return found, odd

    def is_current(self, entry: Entry) -> bool:
        """Whether nothing was written there since it was found. After the bytes were copied."""
        (sequence,) = _SEQUENCE.unpack_from(self._memory, entry.at)
        return bool(sequence == entry.sequence)


NOT_THERE = Entry(0, 0, 0, 0, 0, 0, 0)
"""`length` 0: no block is empty."""
