"""One segment of the arena: sealed shared memory for bytes, and a table of records beside it, both held only by descriptors.

The table's first unit is a superblock; record i stands for unit i of the segment. The table is sparse: memory is spent only where records are. A
segment's size never changes (sealed), so a mapping of it never faults.
"""

import fcntl
import mmap
import os
import re
import struct
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.core.types import UNIT_BYTES, Extent
from kvstored.errors import NoSpace, StateMismatch
from kvstored.paging import HugePages, back_by_huge
from kvstored.tiers.record import NO_SEGMENT, RECORD, RECORD_BYTES, Records

VERSION = 1
_MAGIC = b"KVS1"
_SUPERBLOCK = struct.Struct("<4sIIIQ")
_CHECKSUM = struct.Struct("<Q")
_SUPERBLOCK_BYTES = UNIT_BYTES
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NAME = re.compile(r"kvstored-(seg|rec)-(\d{1,9})-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Segment:
    number: int
    units: int
    incarnation: int
    bytes_fd: int
    table_fd: int
    bytes: NDArray[np.uint8]
    table: memoryview
    """The packed records, 256 bytes a unit, without the superblock."""
    rows: Records
    """The same memory as `table`."""
    words: NDArray[np.uint64]
    """And once more, a row of 32 words a record."""

    @property
    def names(self) -> tuple[str, str]:
        """Of the two descriptors, in the descriptor store: bytes, table."""
        tail = f"{self.number}-{self.incarnation:016x}"
        return f"kvstored-seg-{tail}", f"kvstored-rec-{tail}"

    def holds(self, extent: Extent) -> bool:
        return extent.units > 0 and extent.start + extent.units <= self.units

    def close(self) -> None:
        """Close the descriptors; the mapping goes when the last view of it does."""
        os.close(self.bytes_fd)
        os.close(self.table_fd)


@dataclass(frozen=True, slots=True)
class Adopted:
    """Segments taken over as (segment, units), and descriptor names that were refused, each with its reason; those are closed."""

    segments: tuple[tuple[int, int], ...]
    refused: tuple[tuple[str, str], ...]


def segment_cost_bytes(units: int, pages: HugePages) -> int:
    """Memory that a full segment can come to use: its bytes, unless they are of reserved pages, and every record of its table."""
    return (0 if pages is HugePages.HUGETLB else units * UNIT_BYTES) + _table_bytes(units)


def create(number: int, units: int, incarnation: int, pages: HugePages) -> Segment:
    """A segment whose bytes are backed by memory already; raises NoSpace when the kernel has none."""
    assert 0 < units < NO_SEGMENT
    assert number < NO_SEGMENT
    wanted_bytes = units * UNIT_BYTES
    bytes_fd = table_fd = -1
    try:
        bytes_fd = _memfd(f"kvstored-seg-{number}", wanted_bytes, pages.memfd_flags)
        if pages is HugePages.ADVISE:
            back_by_huge(mmap.mmap(bytes_fd, wanted_bytes))
        os.posix_fallocate(bytes_fd, 0, wanted_bytes)
        table_fd = _memfd(f"kvstored-rec-{number}", _table_bytes(units))
        superblock = _SUPERBLOCK.pack(_MAGIC, VERSION, number, units, incarnation)
        os.pwrite(table_fd, superblock + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(superblock)), 0)
        return _mapped(number, units, incarnation, bytes_fd, table_fd)
    except OSError as error:
        for fd in (bytes_fd, table_fd):
            if fd >= 0:
                os.close(fd)
        remedy = "; reserve huge pages: vm.nr_hugepages" if pages is HugePages.HUGETLB else ""
        raise NoSpace(
            f"no memory for a segment: bytes={wanted_bytes} cause={error}{remedy}"
        ) from error


def adopt(bytes_fd: int, table_fd: int) -> Segment:
    """The segment behind two descriptors of an earlier process; raises StateMismatch unless both are whole and of this version."""
    try:
        raw = os.pread(table_fd, _SUPERBLOCK.size + _CHECKSUM.size, 0)
        seals = fcntl.fcntl(bytes_fd, fcntl.F_GET_SEALS)
        sizes = os.fstat(bytes_fd).st_size, os.fstat(table_fd).st_size
    except OSError as error:
        raise StateMismatch(f"descriptor is no arena segment: cause={error}") from error
    if len(raw) != _SUPERBLOCK.size + _CHECKSUM.size:
        raise StateMismatch("arena segment has no superblock")
    magic, version, number, units, incarnation = _SUPERBLOCK.unpack_from(raw)
    (stated,) = _CHECKSUM.unpack_from(raw, _SUPERBLOCK.size)
    if magic != _MAGIC or stated != xxhash.xxh3_64_intdigest(raw[: _SUPERBLOCK.size]):
        raise StateMismatch(f"arena segment has a damaged superblock: magic={magic!r}")
    if version != VERSION:
        raise StateMismatch(f"arena segment is of another version: {version=} expected={VERSION}")
    if seals & _SEALS != _SEALS or sizes != (units * UNIT_BYTES, _table_bytes(units)):
        raise StateMismatch(f"arena segment can change size: {number=} {seals=} {sizes=}")
    return _mapped(number, units, incarnation, bytes_fd, table_fd)


def paired(names: list[str]) -> list[tuple[str, str]]:
    """The (bytes, table) name pairs among descriptor names, by segment number; names that are not of segments are left out.

    A partner that is missing is an empty string.
    """
    found: dict[tuple[int, str], list[str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match:
            pair = found.setdefault((int(match[2]), match[3]), ["", ""])
            pair[match[1] == "rec"] = name
    return [(pair[0], pair[1]) for _, pair in sorted(found.items())]


def _table_bytes(units: int) -> int:
    return _SUPERBLOCK_BYTES + units * RECORD_BYTES


def _memfd(name: str, size_bytes: int, flags: int = 0) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _mapped(number: int, units: int, incarnation: int, bytes_fd: int, table_fd: int) -> Segment:
    for fd in (bytes_fd, table_fd):
        os.set_inheritable(fd, False)
    table = memoryview(mmap.mmap(table_fd, _table_bytes(units)))[_SUPERBLOCK_BYTES:]
    return Segment(
        number=number,
        units=units,
        incarnation=incarnation,
        bytes_fd=bytes_fd,
        table_fd=table_fd,
        bytes=np.frombuffer(mmap.mmap(bytes_fd, units * UNIT_BYTES), dtype=np.uint8),
        table=table,
        rows=np.frombuffer(table, dtype=RECORD),
        words=np.frombuffer(table, dtype=np.uint64).reshape(units, RECORD_BYTES // 8),
    )


def read_rows(segment: Segment, first: int, count: int) -> tuple[int, Records]:
    """Up to `count` rows from the first written one at or after `first`, and its number; none when there is no more.

    Reads through the descriptor: touching holes of the mapping would allocate them.
    """
    offset = _SUPERBLOCK_BYTES + first * RECORD_BYTES
    try:
        written = os.lseek(segment.table_fd, offset, os.SEEK_DATA)
    except OSError:  # ENXIO: holes to the end
        return segment.units, np.zeros(0, dtype=RECORD)
    start = max(first, (written - _SUPERBLOCK_BYTES) // RECORD_BYTES)
    count = min(count, segment.units - start)
    raw = os.pread(segment.table_fd, count * RECORD_BYTES, _SUPERBLOCK_BYTES + start * RECORD_BYTES)
    return start, np.frombuffer(bytearray(raw), dtype=RECORD)
