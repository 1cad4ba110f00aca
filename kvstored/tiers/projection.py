"""What clients may read without a message, as the daemon writes it: plain blocks that lie ready in memory and need no look before they are read.

A cache of the books with bounded places: a block that finds none is read by Acquire, as everything else. It decides nothing and locks
nothing; the store's loop is its only writer. A few microseconds a call and well below one a block. The layout is in entries.py.

The order that readers rely on: an entry is withdrawn before its space can be granted again (the shell does both in one turn), and every
change is between an odd and an even sequence. On machines that reorder stores the checksums of the entry and of the bytes still tell.
"""

import fcntl
import mmap
import os

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.core.columnar import Places
from kvstored.core.types import Fingerprints
from kvstored.tiers import entries as layout
from kvstored.tiers import record
from kvstored.tiers.entries import ENTRY_BYTES, ENTRY_WORDS, WAYS, Superblock

SHARE = 32
"""The table is at most this part of the memory that it describes: enough for all blocks of 8 KiB and more."""
BUCKETS_MIN, BUCKETS_MAX = 64, 1 << 21

_SEAL_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE: mappings that exist may write, none made later
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

Slots = NDArray[np.int64]


class Projection:
    """`read_fd`: for clients; nothing can be written through it, nor through what it is opened again as. `displaced`: entries that had
    to make room for others."""

    def __init__(self, capacity_bytes: int, *, epoch: int, tenant: str) -> None:
        self.tenant = tenant
        self.superblock = Superblock(epoch, _buckets_for(capacity_bytes))
        self.displaced = 0
        size_bytes = self.superblock.size_bytes
        fd = os.memfd_create("kvstored-projection", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            memory = mmap.mmap(fd, size_bytes)
            _seal(fd)
            self.read_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        packed = self.superblock.pack()
        memory[: len(packed)] = packed
        words = np.frombuffer(memory, dtype=np.uint64)
        tags_at, entries_at = self.superblock.tags_at // 8, self.superblock.entries_at // 8
        self._tags = words[tags_at:entries_at]
        self._by_bucket = self._tags.reshape(-1, WAYS)
        self._entries = words[entries_at:].reshape(-1, ENTRY_WORDS)
        self._turn = 0

    def publish(self, records: NDArray[np.uint64], places: Places) -> None:
        """Blocks as their records (n, 32 words) tell, of one extent each, distinct; they may be there already."""
        fingerprints = records[:, record.FINGERPRINT_WORDS]
        self._clear(self._slots_of(fingerprints))
        slots, kept = self._free_slots(fingerprints)
        rows = _entries_of(records[kept], _place_words(places)[kept])
        self.displaced += int(np.count_nonzero(self._tags[slots]))
        self._write(slots, rows, fingerprints[kept, 0])

    def withdraw(self, fingerprints: Fingerprints, places: Places) -> None:
        """Those of the blocks that are here with these very places: another copy of a block may have come meanwhile."""
        slots = self._slots_of(fingerprints)
        there = slots >= 0
        there &= self._entries[slots, layout.PLACE] == _place_words(places)
        self._clear(np.where(there, slots, -1))

    def __len__(self) -> int:
        return int(np.count_nonzero(self._tags))

    def close(self) -> None:
        """Clients that have it mapped keep reading what it said last, until they see that the daemon is gone."""
        os.close(self.read_fd)

    def _slots_of(self, fingerprints: Fingerprints) -> Slots:
        """-1 where there is none."""
        buckets = self._buckets_of(fingerprints)
        same = self._by_bucket[buckets] == fingerprints[:, :1]
        slots = buckets * WAYS + same.argmax(axis=1)
        return np.where(same.any(axis=1), slots, -1)

    def _free_slots(self, fingerprints: Fingerprints) -> tuple[Slots, Slots]:
        """A slot each, free ones first, and for which of the fingerprints: of more than a bucket has ways the others go without."""
        buckets = self._buckets_of(fingerprints)
        self._turn += 1
        ways = (np.arange(WAYS) + self._turn) % WAYS
        order = np.argsort((self._by_bucket[buckets] != 0) * WAYS + ways, axis=1)
        rank = _ranks(buckets)
        kept = np.flatnonzero(rank < WAYS)
        return buckets[kept] * WAYS + order[kept, rank[kept]], kept

    def _buckets_of(self, fingerprints: Fingerprints) -> Slots:
        mask = np.uint64(self.superblock.buckets - 1)
        return (fingerprints[:, 1] & mask).astype(np.int64)

    def _write(self, slots: Slots, rows: NDArray[np.uint64], tags: NDArray[np.uint64]) -> None:
        entries, sequence = self._entries, self._entries[slots, 0]
        entries[slots, 0] = sequence + np.uint64(1)
        entries[slots, 1:] = rows[:, 1:]
        self._tags[slots] = tags
        entries[slots, 0] = sequence + np.uint64(2)

    def _clear(self, slots: Slots) -> None:
        """-1 among them is none."""
        there = slots[slots >= 0]
        if len(there):
            nothing = np.zeros((len(there), ENTRY_WORDS), dtype=np.uint64)
            self._write(there, nothing, nothing[:, 0])


def _buckets_for(capacity_bytes: int) -> int:
    slot_bytes = ENTRY_BYTES + layout.TAG_BYTES
    most = max(capacity_bytes // SHARE // slot_bytes // WAYS, 1)
    return min(max(1 << most.bit_length() - 1, BUCKETS_MIN), BUCKETS_MAX)


def _seal(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:  # a kernel before 5.1: clients of the same user could open it for writing, against themselves
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)


def _ranks(buckets: Slots) -> Slots:
    """How many before each have the same bucket."""
    count = len(buckets)
    order = np.argsort(buckets, kind="stable")
    ordered = buckets[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]][:count]
    begins = np.maximum.accumulate(np.where(first, np.arange(count), 0))
    ranks = np.empty(count, dtype=np.int64)
    ranks[order] = np.arange(count) - begins
    return ranks


def _place_words(places: Places) -> NDArray[np.uint64]:
    words: NDArray[np.int64] = places.segment << layout.SEGMENT_SHIFT | places.start
    return words.astype(np.uint64)


def _entries_of(records: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    rows = np.zeros((len(records), ENTRY_WORDS), dtype=np.uint64)
    rows[:, layout.CHECKSUM] = records[:, record.CHECKSUM_WORD]
    rows[:, layout.GENERATION] = records[:, record.GENERATION_WORD]
    rows[:, layout.DIGEST_WORDS] = records[:, record.DIGEST_WORDS][:, :2]
    rows[:, layout.KEY_WORDS] = records[:, record.KEY_WORDS]
    rows[:, layout.PLACE] = places
    key_bytes = records.view(np.uint8)[:, record.KEY_BYTES_OFFSET].astype(np.uint64)
    lengths = records[:, record.LENGTH_WORD] << np.uint64(layout.LENGTH_SHIFT)
    rows[:, layout.SIZES] = lengths | key_bytes
    raw, covered, digest = rows.tobytes(), layout.COVERED, xxhash.xxh3_64_intdigest
    at = range(0, len(raw), ENTRY_BYTES)
    sums = (digest(raw[i + covered.start : i + covered.stop]) for i in at)
    rows[:, layout.SUM] = np.fromiter(sums, np.uint64, len(rows))
    return rows
