"""The DRAM tier: shared-memory segments that clients map, with records that outlive the daemon.

The `mark_*` and `*_many` calls, `set_leased`, `record_at`, `key_at` and `views` are a few microseconds an item and may be called on the store's loop; all
others block and belong to the lane. A place's head record is the one at its first unit. Who may write where is the catalog's decision.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvstored.core.columnar import Places
from kvstored.core.types import EXTENTS_MAX, UNIT_BYTES, Extent, Place
from kvstored.errors import (
    Corrupt,
    InvalidArgument,
    KvstoredError,
    NoSpace,
    NotFound,
    StateMismatch,
)
from kvstored.paging import HUGE_BYTES, HugePages, Populate
from kvstored.tiers import base, marks
from kvstored.tiers import record as layout
from kvstored.tiers import segment as shared
from kvstored.tiers import views as memory
from kvstored.tiers.base import Carried, Counters, PieceRef, PieceRun, ScanBatch, Views
from kvstored.tiers.filling import FillingColumns, ReadyOne
from kvstored.tiers.marks import Lineages
from kvstored.tiers.record import NO_SEGMENT, RECORD_BYTES, Record, Records, State
from kvstored.tiers.segment import Segment

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


class Arena:
    """`incarnation`: a number of this run, so that a later segment of the same number has another descriptor name.

    `available_bytes`: memory that this process may still take, by its cgroup and the machine; a segment is made only when
    `reserve_bytes` would be left.
    """

    def __init__(
        self,
        segment_bytes: int,
        *,
        incarnation: int,
        available_bytes: Callable[[], int],
        reserve_bytes: int = 256 << 20,
        pages: HugePages = HugePages.OFF,
    ) -> None:
        page_bytes = HUGE_BYTES if pages is HugePages.HUGETLB else UNIT_BYTES
        if segment_bytes <= 0 or segment_bytes % page_bytes:
            raise InvalidArgument(f"segment is no multiple of {page_bytes}: {segment_bytes=}")
        self._pages = pages
        self._units = segment_bytes // UNIT_BYTES
        self._incarnation = incarnation
        self._available_bytes = available_bytes
        self._reserve_bytes = reserve_bytes
        self._grow_lock = threading.Lock()
        self._populate = Populate()
        self._segments: dict[int, Segment] = {}  # exchanged, never changed: other threads walk it
        self._adopted: set[int] = set()

    # Segments

    def grow(self) -> tuple[int, int]:
        """Make one more segment, backed by memory before it is granted; (segment, units). Raises NoSpace."""
        needed_bytes = shared.segment_cost_bytes(self._units, self._pages) + self._reserve_bytes
        with self._grow_lock:
            available_bytes = self._available_bytes()
            if available_bytes < needed_bytes:
                raise NoSpace(f"no memory for a segment: {needed_bytes=} {available_bytes=}")
            number = next(n for n in range(NO_SEGMENT) if n not in self._segments)
            segment = shared.create(number, self._units, self._incarnation, self._pages)
            self._segments = {**self._segments, number: segment}
        return number, self._units

    def grow_mapped(self) -> tuple[int, int]:
        """The same with all its pages mapped into this process: a quarter of a second a GiB, which what comes from a disk saves."""
        number, units = self.grow()
        self._populate.all(self._segments[number].bytes)
        return number, units

    def adopt(self, fds: Mapping[str, int]) -> shared.Adopted:
        """Take over the segments of an earlier process from its named descriptors; other names are left alone.

        Owns every segment descriptor from here on. Contents are read by `scan`.
        """
        taken: list[tuple[int, int]] = []
        refused: list[tuple[str, str]] = []
        for pair in shared.paired(sorted(fds)):
            names = [name for name in pair if name]
            try:
                segment = self._adopted_segment([fds[name] for name in names])
            except StateMismatch as error:
                refused.extend((name, str(error)) for name in names)
                for name in names:
                    os.close(fds[name])
                continue
            self._segments = {**self._segments, segment.number: segment}
            self._adopted.add(segment.number)
            taken.append((segment.number, segment.units))
        return shared.Adopted(tuple(taken), tuple(refused))

    def fds(self) -> dict[str, int]:
        """Every descriptor that must outlive this process, by its name in the descriptor store."""
        return {
            name: fd
            for each in self._segments.values()
            for name, fd in zip(each.names, (each.bytes_fd, each.table_fd), strict=True)
        }

    def segment_fd(self, number: int) -> int:
        """The descriptor that a client maps; stays the arena's."""
        if number not in self._segments:
            raise NotFound(f"no such segment: segment={number}")
        return self._segments[number].bytes_fd

    def segments(self) -> list[tuple[int, int]]:
        return [(segment.number, segment.units) for segment in self._segments.values()]

    # Records, on the loop

    def views(self, place: Place, length: int) -> list[NDArray[np.uint8]]:
        """The first `length` bytes of the place, one writable view an extent."""
        assert length <= layout.place_bytes(place), "view beyond its place"
        found: list[NDArray[np.uint8]] = []
        for extent in place:
            count = min(length, extent.units * UNIT_BYTES)
            if not count:
                break
            start = extent.start * UNIT_BYTES
            found.append(self._segments[extent.segment].bytes[start : start + count])
            length -= count
        return found

    def mark_filling(self, records: Sequence[Record]) -> None:
        """Write each record, state FILLING, before its place is granted to a writer."""
        for record in records:
            assert record.state is State.FILLING
            self._put(record)

    def mark_ready(self, items: Sequence[tuple[Place, int]]) -> None:
        """Each (place, checksum of its bytes) becomes readable: the checksum first, then the state as one store."""
        for place, checksum in items:
            head = place[0]
            table, at = self._segments[head.segment].table, head.start * RECORD_BYTES
            assert table[at + layout.STATE_OFFSET] == State.FILLING, "ready without filling"
            layout.CHECKSUMS.pack_into(table, at + layout.CHECKSUMS_OFFSET, checksum, checksum)
            table[at + layout.STATE_OFFSET] = State.READY

    def mark_free(self, places: Sequence[Place]) -> None:
        """Forget what lies at each place, head first."""
        for place in places:
            for extent in place:
                table = self._segments[extent.segment].table
                table[extent.start * RECORD_BYTES + layout.STATE_OFFSET] = State.FREE

    def slots(self, places: Places) -> list[NDArray[np.uint8]]:
        """All bytes of each place, of one extent each, as one writable view."""
        return marks.slots(self._segments, places)

    def put_many(self, records: Records, places: Places) -> None:
        """Records of pieces that are about to be ready, state FILLING, at their places of one extent each."""
        marks.put(self._segments, records, places)

    def fill_many(
        self, filling: FillingColumns, checksums: NDArray[np.uint64] | None = None
    ) -> None:
        """`mark_filling` for many plain pieces; with the checksums of their bytes, which are there, `mark_ready` too."""
        marks.fill(self._segments, filling, checksums)

    def fill_one(self, ready: ReadyOne) -> None:
        """The same of one piece, whose bytes are there."""
        marks.make_one(self._segments, ready)

    def ready_many(self, places: Places, checksums: NDArray[np.uint64]) -> None:
        """`mark_ready` for many pieces of one extent each."""
        marks.make_ready(self._segments, places, checksums)

    def free_many(self, places: Places) -> None:
        marks.make_free(self._segments, places)

    def lineages(self, places: Places) -> Lineages:
        """`lineage_at` for many pieces of one extent each."""
        return marks.lineages(self._segments, places)

    def heads(self, places: Places) -> NDArray[np.uint64]:
        """The records themselves, unchecked, as rows of words: for pieces of one extent each."""
        return marks.heads(self._segments, places)

    def have_keys(self, places: Places, keys: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which of the records at these places have the key in their row of `keys`, (n, bytes of a key)."""
        return marks.have_keys(self._segments, places, keys)

    def set_leased(self, heads: Sequence[tuple[int, int]], *, leased: bool) -> None:
        """What is leased when the daemon dies has readers that the next one must wait for. `heads`: segment and first unit."""
        for segment, start in heads:
            table = self._segments[segment].table
            table[start * RECORD_BYTES + layout.LEASED_OFFSET] = leased

    def record_at(self, place: Place) -> Record:
        """The record of exactly this place, whatever its state; raises Corrupt when there is none."""
        head, at = place[0], place[0].start * RECORD_BYTES
        return layout.unpack(self._segments[head.segment].table[at : at + RECORD_BYTES], place)

    def key_at(self, place: Place) -> bytes:
        """The full key, unchecked, to compare with the asked one."""
        head = place[0]
        return layout.key_of(self._segments[head.segment].table, head.start * RECORD_BYTES)

    def lineage_at(self, place: Place) -> tuple[bytes, bytes]:
        """The full key and the parent's fingerprint, unchecked: a tenth of the cost of `record_at`."""
        head = place[0]
        table, at = self._segments[head.segment].table, head.start * RECORD_BYTES
        return layout.key_of(table, at), layout.parent_of(table, at)

    def flush_counters(self, items: Sequence[Counters]) -> None:
        for item in items:
            head = item.place[0]
            table, at = self._segments[head.segment].table, head.start * RECORD_BYTES
            layout.patch_counters(table, at, hits=item.hits, last_s=item.last_s, heat=item.heat)

    def relink(self, items: Sequence[base.Link]) -> None:
        """Write where blocks stand in the tree now. A crash in between loses the copy, not its bytes' correctness."""
        for item in items:
            record = self._live_record(item.ref, item.place)
            if record:
                self._put(replace(record, parent=item.parent, depth=item.depth))

    # The lane

    def verify(self, items: Sequence[tuple[Place, int, int]]) -> list[bool]:
        """Whether the bytes of each (place, length, checksum) have that checksum."""
        return [
            memory.hash_of(self.views(place, length)) == checksum
            for place, length, checksum in items
        ]

    def write(self, items: Sequence[tuple[Record, Views]]) -> list[Record | KvstoredError]:
        return [self._written(record, source) for record, source in items]

    def read(self, items: Sequence[tuple[PieceRef, Place, Views]]) -> list[Record | KvstoredError]:
        return [self._read(ref, place, target) for ref, place, target in items]

    def write_run(self, run: PieceRun, records: Records) -> Carried:
        return base.write_each(self, run, records)

    def read_run(self, run: PieceRun) -> Carried:
        return base.read_each(self, run)

    def discard(self, items: Sequence[tuple[PieceRef, Place]]) -> list[Record | None]:
        found = [self._live_record(ref, place) for ref, place in items]
        self.mark_free([record.place for record in found if record])
        return found

    def scan(self, cursor: int, limit: int) -> ScanBatch:
        """Records FILLING or READY, segment by segment, looking at `limit` table rows a call.

        A damaged record of an adopted segment is marked free; grant nothing in such a segment before its scan has passed.
        """
        assert limit > 0
        number, first = cursor >> _ROW_BITS, cursor & _ROW_MASK
        following = sorted(n for n in self._segments if n >= number)
        if not following:
            return base.batch_of(
                np.zeros(0, dtype=layout.RECORD), [], cursor=cursor, done=True, rejected=0
            )
        segment = self._segments[following[0]]
        first = first if segment.number == number else 0
        start, rows = shared.read_rows(segment, first, limit)
        candidates = np.flatnonzero(
            (rows["state"] != State.FREE) & (rows["state"] != State.CONTINUED)
        )
        places, kept = self._places_of(segment, start, rows, candidates)
        if (rejected := len(candidates) - len(kept)) and segment.number in self._adopted:
            segment.rows["state"][start + np.setdiff1d(candidates, kept)] = State.FREE
        following_row = start + len(rows)
        if following_row < segment.units:
            cursor, done = segment.number << _ROW_BITS | following_row, False
        else:
            cursor, done = (segment.number + 1) << _ROW_BITS, len(following) == 1
        return base.batch_of(rows[kept], places, cursor=cursor, done=done, rejected=rejected)

    def close(self) -> None:
        """Close all descriptors; views that are still held stay mapped until dropped."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}

    # Private

    def _adopted_segment(self, fds: list[int]) -> Segment:
        if len(fds) != 2:
            raise StateMismatch("arena segment has only one of its two descriptors")
        segment = shared.adopt(*fds)
        if segment.number in self._segments:
            raise StateMismatch(f"arena segment is there twice: segment={segment.number}")
        return segment

    def _put(self, record: Record) -> None:
        """Chained records, then the head's tail, then its first word with the state: nothing is seen before it is whole."""
        for i in range(1, len(record.place)):
            self._store(record.place[i], layout.pack_continuation(record, i))
        self._store(record.place[0], layout.pack(record))

    def _store(self, extent: Extent, packed: bytes) -> None:
        table, at = self._segments[extent.segment].table, extent.start * RECORD_BYTES
        table[at + layout.STATE_OFFSET] = State.FREE
        table[at + 8 : at + RECORD_BYTES] = packed[8:]
        table[at : at + 8] = packed[:8]

    def _written(self, record: Record, source: Views) -> Record | KvstoredError:
        assert memory.size_of(source) == record.length
        place = layout.trimmed(record.place, record.length)
        stored = replace(
            record,
            place=place,
            codec=0,
            stored_length=record.length,
            stored_checksum=record.checksum,
            state=State.FILLING,
            leased=False,
        )
        self.mark_filling([stored])
        target = self.views(place, record.length)
        memory.copy(source, target)
        if memory.hash_of(target) != record.checksum:
            self.mark_free([place])
            return Corrupt(f"source does not match its checksum: length={record.length}")
        self.mark_ready([(place, record.checksum)])
        return replace(stored, state=State.READY)

    def _read(self, ref: PieceRef, place: Place, target: Views) -> Record | KvstoredError:
        record = self._live_record(ref, place)
        if record is None or record.state is not State.READY:
            return NotFound("no such piece in the arena")
        if memory.size_of(target) != record.length:
            return Corrupt(f"piece has another length: length={record.length}")
        memory.copy(self.views(place, record.length), target)
        if memory.hash_of(target) != record.checksum:
            return Corrupt("bytes in the arena do not match their checksum")
        return record

    def _live_record(self, ref: PieceRef, place: Place) -> Record | None:
        if any(e.segment not in self._segments for e in place):
            return None
        try:
            record = self.record_at(place)
        except Corrupt:
            return None
        is_live = record.state in (State.FILLING, State.READY) and base.ref_of(record) == ref
        return record if is_live else None

    def _places_of(
        self, segment: Segment, start: int, rows: Records, candidates: NDArray[np.intp]
    ) -> tuple[list[Place], NDArray[np.intp]]:
        """The places of those candidates (indexes into rows) that are whole, and which they are."""
        sound = candidates[layout.checked(rows[candidates])]
        heads = rows[sound]
        columns = (
            sound.tolist(),
            heads["extent_units"].tolist(),
            heads["next_segment"].tolist(),
            heads["place_checksum"].tolist(),
        )
        places: list[Place] = []
        kept: list[int] = []
        for i, units, next_segment, checksum in zip(*columns, strict=True):
            head = Extent(segment.number, start + i, units)
            place = (head,) if next_segment == NO_SEGMENT else self._chain(head)
            if layout.place_checksum(place) == checksum and self._is_inside(place):
                places.append(place)
                kept.append(i)
        return places, np.asarray(kept, dtype=np.intp)

    def _chain(self, head: Extent) -> Place:
        """Follow the chain from a head; whatever it leads to is checked by the head's place checksum."""
        place = [head]
        while len(place) < EXTENTS_MAX:
            last = place[-1]
            row = self._segments[last.segment].rows[last.start]
            segment, start = int(row["next_segment"]), int(row["next_start"])
            if segment not in self._segments or start >= self._segments[segment].units:
                break
            units = int(self._segments[segment].rows[start]["extent_units"])
            place.append(Extent(segment, start, units))
        return tuple(place)

    def _is_inside(self, place: Place) -> bool:
        return all(
            e.segment in self._segments and self._segments[e.segment].holds(e) for e in place
        )
