"""The daemon's projection as a client sees it: mapped read-only, looked up without a message.

What an entry says is a hint until the bytes are copied, the entry is still the same, and the bytes have its checksum. Whatever is odd is
told as not there, and asked of the daemon.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored import native
from kvstored.core.keys import key_batch
from kvstored.core.types import UNIT_BYTES, KeyBatch
from kvstored.errors import StateMismatch, Unavailable
from kvstored.tiers import entries as layout
from kvstored.tiers.entries import ENTRY_BYTES, ENTRY_WORDS, TAG_BYTES, WAYS

_ENTRY = struct.Struct("<3Q16s64s3Q")
_SEQUENCE = struct.Struct("<Q")
_HALF = (1 << 64) - 1
_BUCKET_BYTES = WAYS * TAG_BYTES
MANY = 4
"""Fewer keys are not worth the arrays."""
_BEGIN, _END = layout.COVERED.start, layout.COVERED.stop
_ONE, _UNIT_BYTES = np.uint64(1), np.uint64(UNIT_BYTES)
_KEY_BYTES_MASK, _START_MASK = np.uint64(layout.KEY_BYTES_MASK), np.uint64(layout.START_MASK)
_LENGTH_SHIFT, _SEGMENT_SHIFT = np.uint64(layout.LENGTH_SHIFT), np.uint64(layout.SEGMENT_SHIFT)


@dataclass(slots=True)
class Found:
    """One row a key; `lengths` 0 where it is not there: no block is empty. `slots` and `sequences`: the entries, as they were.
    `offsets`: bytes in the segment. `odd`: entries that were being written, or torn."""

    slots: list[int]
    sequences: list[int]
    checksums: list[int]
    generations: list[int]
    segments: list[int]
    offsets: list[int]
    lengths: list[int]
    odd: int = 0


@dataclass(frozen=True, slots=True)
class FoundMany:
    """The same as columns."""

    slots: NDArray[np.int64]
    sequences: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    generations: NDArray[np.uint64]
    segments: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    odd: int

    @property
    def level_bytes(self) -> int:
        """What each block has, where all of them are there, of one size, in one segment; else 0."""
        first = int(self.lengths[0])
        is_level = (self.lengths == first) & (self.segments == self.segments[0])
        return first if is_level.all() else 0

    def singly(self) -> Found:
        return Found(
            self.slots.tolist(),
            self.sequences.tolist(),
            self.checksums.tolist(),
            self.generations.tolist(),
            self.segments.tolist(),
            self.offsets.tolist(),
            self.lengths.tolist(),
            self.odd,
        )


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
        self.facts = (memory, facts.tags_at, facts.entries_at, facts.buckets)
        """As calls in C take them: the memory, where tags and entries begin, buckets."""
        self._tags_at, self._entries_at = facts.tags_at, facts.entries_at
        self._mask = facts.buckets - 1
        words = np.frombuffer(memory, dtype=np.uint64)
        self._tags = words[facts.tags_at // 8 : facts.entries_at // 8].reshape(-1, WAYS)
        self._entries = words[facts.entries_at // 8 :].reshape(-1, ENTRY_WORDS)

    def may_have(self, packed: bytes, key_bytes: int, seed: int) -> bool:
        """Whether any of the packed keys has an entry, by its tag alone: wrong once in 2**60."""
        if native.copies is not None:
            return native.copies.may_have(*self.facts, packed, key_bytes, seed)
        if len(packed) < MANY * key_bytes:
            keys = (packed[i : i + key_bytes] for i in range(0, len(packed), key_bytes))
            return any(self._slot_of(xxhash.xxh3_128_intdigest(key, seed)) >= 0 for key in keys)
        fingerprints = key_batch(packed, key_bytes, seed).fingerprints
        buckets = (fingerprints[:, 1] & np.uint64(self._mask)).astype(np.int64)
        return bool((self._tags[buckets] == fingerprints[:, :1]).any())

    def are_unchanged(self, found: FoundMany) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = self._entries[found.slots, 0] == found.sequences
        return same

    def is_unchanged(self, slot: int, sequence: int) -> bool:
        at = self._entries_at + slot * ENTRY_BYTES
        now: int = _SEQUENCE.unpack_from(self._memory, at)[0]
        return now == sequence

    def unchanged(self, found: Found) -> list[bool]:
        """Whether nothing was written to each entry since it was found. After the bytes were copied."""
        if len(found.slots) < MANY:
            return list(map(self.is_unchanged, found.slots, found.sequences))
        now = self._entries[found.slots, 0].tolist()
        return [then == sequence for then, sequence in zip(found.sequences, now, strict=True)]

    def find(self, keys: Sequence[bytes], digest: bytes, seed: int) -> Found:
        """The same as `find_many` without arrays, which cost more than they save for a key or two."""
        count, memory, short = len(keys), self._memory, digest[: layout.DIGEST_BYTES]
        none = [0] * count
        found = Found(none, none[:], none[:], none[:], none[:], none[:], none[:])
        for i, key in enumerate(keys):
            slot = self._slot_of(xxhash.xxh3_128_intdigest(key, seed))
            if slot < 0:
                continue
            at = self._entries_at + slot * ENTRY_BYTES
            raw = memory[at : at + ENTRY_BYTES]
            sequence, checksum, generation, space, named, place, sizes, own = _ENTRY.unpack(raw)
            if sequence & 1 or own != xxhash.xxh3_64_intdigest(raw[_BEGIN:_END]):
                found.odd += 1
                continue
            key_bytes = sizes & layout.KEY_BYTES_MASK
            if space != short or key_bytes != len(key) or named[:key_bytes] != key:
                continue
            found.slots[i], found.sequences[i] = slot, sequence
            found.checksums[i], found.generations[i] = checksum, generation
            found.segments[i] = place >> layout.SEGMENT_SHIFT
            found.offsets[i] = (place & layout.START_MASK) * UNIT_BYTES
            found.lengths[i] = sizes >> layout.LENGTH_SHIFT
        return found

    def _slot_of(self, fingerprint: int) -> int:
        """-1 where no tag is the same."""
        bucket = fingerprint >> 64 & self._mask
        at = self._tags_at + bucket * _BUCKET_BYTES
        tag = (fingerprint & _HALF).to_bytes(TAG_BYTES, "little")
        way = self._memory[at : at + _BUCKET_BYTES].find(tag)
        return -1 if way % TAG_BYTES else bucket * WAYS + way // TAG_BYTES

    def find_many(self, keys: Sequence[bytes], digest: bytes, seed: int) -> FoundMany:
        """Keys of one length."""
        key_bytes = len(keys[0])
        batch = key_batch(b"".join(keys), key_bytes, seed)
        buckets = (batch.fingerprints[:, 1] & np.uint64(self._mask)).astype(np.int64)
        # where no tag is the same, the first way's entry has another key
        same = self._tags[buckets] == batch.fingerprints[:, :1]
        slots = buckets * WAYS + same.argmax(axis=1)
        rows = self._entries[slots]
        is_mine = (rows[:, layout.NAME_WORDS] == _names(batch, digest)).all(axis=1)
        sizes, places = rows[:, layout.SIZES], rows[:, layout.PLACE]
        is_mine &= sizes & _KEY_BYTES_MASK == key_bytes
        is_whole = rows[:, layout.SUM] == _sums(rows)
        is_whole &= rows[:, layout.SEQUENCE] & _ONE == 0
        lengths = (sizes >> _LENGTH_SHIFT).view(np.int64)
        odd = 0
        if not (is_mine & is_whole).all():
            is_there = same.any(axis=1)
            lengths[~(is_there & is_whole & is_mine)] = 0
            odd = int(np.count_nonzero(is_there & ~is_whole))
        return FoundMany(
            slots=slots,
            sequences=rows[:, layout.SEQUENCE],
            checksums=rows[:, layout.CHECKSUM],
            generations=rows[:, layout.GENERATION],
            segments=(places >> _SEGMENT_SHIFT).view(np.int64),
            offsets=((places & _START_MASK) * _UNIT_BYTES).view(np.int64),
            lengths=lengths,
            odd=odd,
        )


def _names(batch: KeyBatch, digest: bytes) -> NDArray[np.uint64]:
    """What the name words of an entry are for each key of this namespace."""
    named = np.zeros((len(batch), layout.NAME_BYTES), dtype=np.uint8)
    named[:, : layout.DIGEST_BYTES] = np.frombuffer(digest, np.uint8, layout.DIGEST_BYTES)
    keys = np.frombuffer(batch.packed, dtype=np.uint8).reshape(-1, batch.key_bytes)
    named[:, layout.DIGEST_BYTES : layout.DIGEST_BYTES + batch.key_bytes] = keys
    return named.view(np.uint64)


def _sums(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    raw, digest = rows.tobytes(), xxhash.xxh3_64_intdigest
    at = range(0, len(raw), ENTRY_BYTES)
    return np.array([digest(raw[i + _BEGIN : i + _END]) for i in at], dtype=np.uint64)
