"""The NVMe tier: records in LMDB, bytes in slab files.

A write is payload, fdatasync of the slabs, LMDB commit, in this order, one sync and one commit a call: a record never names bytes that
are not on the disk. A full or failing disk makes the tier read-only for a while; reads and discards go on.
"""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvstored.clock import Clock
from kvstored.codec import frame
from kvstored.codec.frame import Codec
from kvstored.codec.levels import Levels
from kvstored.codec.planner import DELTA_MIN_CONTEXT_TOKENS, Goal
from kvstored.codec.unpacked import Unpacked
from kvstored.core.types import UNIT_BYTES, Place
from kvstored.errors import Corrupt, KvstoredError, NoSpace, NotFound, Unavailable
from kvstored.tiers import record as layout
from kvstored.tiers import slabs
from kvstored.tiers import views as memory
from kvstored.tiers.base import (
    Carried,
    Counters,
    Crossed,
    Link,
    PieceRef,
    PieceRun,
    ScanBatch,
    Views,
    failed,
    write_each,
)
from kvstored.tiers.coding import Coding
from kvstored.tiers.disk_env import KEY_END, Change, RecordEnv, key_of
from kvstored.tiers.disk_reads import DiskReads, known, read_bytes
from kvstored.tiers.disk_runs import DiskRuns
from kvstored.tiers.disk_scan import columns_of
from kvstored.tiers.record import RECORD_BYTES, Record, Records, State
from kvstored.tiers.slabs import Job, SlabIo, Slabs, Staged
from kvstored.tiers.values import LOSSY, pack_value, unpack_value

SLAB_BYTES = 1 << 30
PAUSE_S = 30.0
_INDEX = "index"
_READ_ONLY = "disk tier is read-only for a while after a failed write"
_WINDOW_BYTES = 64 << 20
"""Bytes of pieces that are staged in memory at once; a larger piece goes alone."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """`map_bytes`: bound of the LMDB map, all of it taken from the disk at start. `pause_s`: how long a failed write keeps others away."""

    map_bytes: int
    slab_bytes: int = SLAB_BYTES
    codec: Codec = Codec.RAW
    codec_level: int = frame.LEVEL_DEFAULT
    codec_goal: Goal = Goal.SPEED
    delta_min_context_tokens: int = DELTA_MIN_CONTEXT_TOKENS
    references: bool = True
    lossy: Levels = field(default_factory=dict)
    direct: bool = True
    pause_s: float = PAUSE_S
    spare_bytes: Callable[[], int] | None = None
    """What memory has left, where the slabs take memory themselves."""


def map_bytes_for(capacity_bytes: int) -> int:
    """Room for a record of every 4 KiB unit (about 450 bytes with LMDB's own). The file is sparse and grows with its records only."""
    return min(max(capacity_bytes // 8, 16 << 20), 256 << 30) // UNIT_BYTES * UNIT_BYTES


def erase(directory: Path) -> None:
    """Remove a disk tier's files, and only those: the cold start after StateMismatch."""
    shutil.rmtree(directory / _INDEX, ignore_errors=True)
    for path in directory.glob("slab-*"):
        path.unlink(missing_ok=True)


class Disk:
    """Opens or makes the tier in `directory`; raises StateMismatch when it is another version's (then `erase`), NoSpace, Unavailable."""

    def __init__(
        self, directory: Path, options: Options, *, clock: Clock, io: SlabIo | None = None
    ) -> None:
        self._options = options
        self.coding = Coding(
            options.codec,
            level=options.codec_level,
            goal=options.codec_goal,
            delta_min_context_tokens=options.delta_min_context_tokens,
            references=options.references,
            lossy=options.lossy,
        )
        self._clock = clock
        self._write_lock = threading.Lock()
        self._grow_lock = threading.Lock()
        self._read_only_until_s = 0.0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._slabs = Slabs(
                directory,
                slab_bytes=options.slab_bytes,
                direct=options.direct,
                io=io or SlabIo(),
            )
            try:
                self._env = RecordEnv(directory / _INDEX, options.map_bytes)
            except BaseException:
                self._slabs.close()
                raise
            self._runs = DiskRuns(self._env, self._slabs, self._failed, self._pause)
            self._reads = DiskReads(self._env, self._slabs, self.coding.decoded)
        except OSError as error:
            raise slabs.translated(error, f"cannot open the disk tier: {directory=!s}") from error

    @property
    def is_direct(self) -> bool:
        """Whether bytes go around the page cache."""
        return self._slabs.is_direct

    def is_read_only(self) -> bool:
        return self._clock.now_s() < self._read_only_until_s

    def index_used_share(self) -> float:
        """Of the map's pages; puts are refused above 0.9, so evict well before."""
        return self._env.used_share()

    def records(self) -> int:
        return self._env.count()

    def segments(self) -> list[tuple[int, int]]:
        return self._slabs.segments()

    def grow(self) -> tuple[int, int]:
        """One more slab file, its space allocated; (segment, units). Raises NoSpace or Unavailable."""
        with self._grow_lock:
            self._check_spare()
            return self._slabs.grow()

    def _check_spare(self) -> None:
        """A page that a memory limit does not allow is no error but the end of the process: half of what is left stays."""
        spare = self._options.spare_bytes() if self._options.spare_bytes is not None else None
        slab_bytes = self._options.slab_bytes
        if spare is not None and spare < 2 * slab_bytes:
            raise NoSpace(
                f"no memory for a slab in memory: bytes={slab_bytes} available={spare}; lower disk.capacity"
            )

    def write(self, items: Sequence[tuple[Record, Views]]) -> list[Record | KvstoredError]:
        with self._write_lock:
            if self.is_read_only():
                error = Unavailable(_READ_ONLY)
                return [error for _ in items]
            outcomes: list[Record | KvstoredError] = []
            for window in _windows(items, lambda item: item[0].length):
                outcomes.extend(self._payload_written(window))
            self._sync(outcomes)
            self._commit(outcomes)
            return outcomes

    def read(self, items: Sequence[tuple[PieceRef, Place, Views]]) -> list[Record | KvstoredError]:
        try:
            found = self._env.get([ref for ref, _, _ in items])
        except KvstoredError as error:
            return [error for _ in items]
        outcomes = [
            self._readable(record, place, memory.size_of(target))
            for record, (_, place, target) in zip(found, items, strict=True)
        ]
        sizes = [read_bytes(o) if isinstance(o, Record) else 0 for o in outcomes]
        for window in _windows(range(len(items)), sizes.__getitem__):
            self._reads.fill(window, items, outcomes)
        return outcomes

    def unpack(self, items: Sequence[tuple[PieceRef, Place, int]]) -> list[Crossed | KvstoredError]:
        """Pieces of these lengths for a GPU, which does the rest of their decoding: as `read`, but that their plain bytes were not seen yet."""
        try:
            found = self._env.get([ref for ref, _, _ in items])
        except KvstoredError as error:
            return [error for _ in items]
        outcomes = [
            self._readable(record, place, length)
            for record, (_, place, length) in zip(found, items, strict=True)
        ]
        sizes = [o.length + read_bytes(o) if isinstance(o, Record) else 0 for o in outcomes]
        unpacked: dict[int, Unpacked] = {}
        for window in _windows(range(len(items)), sizes.__getitem__):
            self._reads.unpack(window, outcomes, unpacked)
        return [
            Crossed(each, unpacked[i]) if isinstance(each, Record) else each
            for i, each in enumerate(outcomes)
        ]

    def described(self, items: Sequence[tuple[PieceRef, Place]]) -> list[Record | None]:
        """The record of each piece, None where another one or none lies there, or it is damaged."""
        found = self._env.get([ref for ref, _ in items])
        return [
            record
            if isinstance(record, Record) and record.place == place and self._is_held(place)
            else None
            for record, (_, place) in zip(found, items, strict=True)
        ]

    def write_run(self, run: PieceRun, records: Records) -> Carried:
        digests, _ = layout.digests_of(records)
        if any(self.coding.may_pack(digest, 0, run.length) for digest in digests):
            return write_each(self, run, records)
        with self._write_lock:
            if self.is_read_only():
                return failed(run, Unavailable(_READ_ONLY))
            return self._runs.write(run, records)

    def read_run(self, run: PieceRun) -> Carried:
        return self._runs.read(run, self.read)

    def discard(self, items: Sequence[tuple[PieceRef, Place]]) -> list[Record | None]:
        """As every tier's; raises NoSpace or Unavailable when the index cannot be written: what was not forgotten is still there."""
        keys = [(key_of(ref), layout.pack_place(place)) for ref, place in items]
        return [_record_or_none(value) for value in self._env.remove(keys)]

    def flush_counters(self, items: Sequence[Counters]) -> None:
        """Raises NoSpace or Unavailable; nothing is lost but the counts."""
        self._env.rewrite(
            [_change(item.ref, item.place, partial(_counted, item)) for item in items]
        )

    def relink(self, items: Sequence[Link]) -> None:
        """Write where blocks stand in the tree now. Raises NoSpace or Unavailable."""
        self._env.rewrite([_change(item.ref, item.place, partial(_linked, item)) for item in items])

    def scan(self, cursor: int, limit: int) -> ScanBatch:
        """Records in key order. Those that cannot be used are deleted on the way."""
        raw = self._env.batch(cursor, limit)
        columns = columns_of(raw.values, self._slabs.segments())
        unusable = np.flatnonzero(~columns.is_usable).tolist()
        self._env.remove([(raw.keys[i], raw.values[i][RECORD_BYTES:]) for i in unusable])
        return ScanBatch(
            records=columns.records,
            extent_counts=columns.extent_counts,
            extents=columns.extents,
            bases=columns.bases,
            cursor=raw.cursor,
            done=raw.cursor == KEY_END,
            rejected=len(unusable),
            left=self._env.count(),
        )

    def close(self) -> None:
        self._env.close()
        self._slabs.close()

    # Writing

    def _payload_written(
        self, items: Sequence[tuple[Record, Views]]
    ) -> list[Record | KvstoredError]:
        outcomes: list[Record | KvstoredError] = []
        jobs: list[Job] = []
        for i, (record, source) in enumerate(items):
            outcome = self._encoded(record, source)
            if isinstance(outcome, KvstoredError):
                outcomes.append(outcome)
                continue
            stored, staging = outcome
            outcomes.append(stored)
            jobs.extend(slabs.jobs_of(i, staging.aligned, stored.place))
        for i, error in self._slabs.write(jobs).items():
            outcomes[i] = self._failed(error)
        return outcomes

    def _encoded(self, record: Record, source: Views) -> tuple[Record, Staged] | KvstoredError:
        """What will be stored, in memory that can be written as it is."""
        assert memory.size_of(source) == record.length
        if memory.hash_of(source) != record.checksum:
            return Corrupt(f"source does not match its checksum: length={record.length}")
        base, plain = self._reads.base(record) or (None, None)
        reference = known(base, plain) if base is not None and plain is not None else None
        encoded = self.coding.encoded(record, source, reference)
        lossy = encoded.decoded_checksum
        stored_length = memory.size_of(encoded.stored)
        staging = slabs.staged(encoded.stored)
        staging.fill()
        written = replace(
            record,
            place=layout.trimmed(record.place, stored_length),
            codec=int(encoded.codec),
            stored_length=stored_length,
            stored_checksum=encoded.checksum,
            base=base if encoded.refers else None,
            checksum=record.checksum if lossy is None else lossy,
            flags=record.flags if lossy is None else record.flags | LOSSY,
            state=State.READY,
            leased=False,
            owner_pid=0,
        )
        return written, staging

    def _sync(self, outcomes: list[Record | KvstoredError]) -> None:
        """Make the payload durable; an item in a slab that cannot be synced has failed."""
        touched = {e.segment for o in outcomes if isinstance(o, Record) for e in o.place}
        failed = self._slabs.sync(touched)
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, Record):
                error = next(
                    (failed[e.segment] for e in outcome.place if e.segment in failed), None
                )
                if error:
                    outcomes[i] = self._failed(error)

    def _commit(self, outcomes: list[Record | KvstoredError]) -> None:
        records = [outcome for outcome in outcomes if isinstance(outcome, Record)]
        if not records:
            return
        try:
            self._env.put(records)
        except KvstoredError as error:
            if isinstance(error, Unavailable):
                self._pause()
            outcomes[:] = [error if isinstance(o, Record) else o for o in outcomes]

    def _failed(self, error: OSError) -> KvstoredError:
        self._pause()
        return slabs.translated(error, "slab cannot be written:")

    def _pause(self) -> None:
        self._read_only_until_s = self._clock.now_s() + self._options.pause_s

    # Reading

    def _readable(
        self, record: Record | Corrupt | None, place: Place, length: int
    ) -> Record | KvstoredError:
        if isinstance(record, Corrupt):
            return record
        if record is None or record.place != place or not self._is_held(place):
            return NotFound("no such piece on disk")
        if record.codec == Codec.RAW and record.stored_length != record.length:
            return Corrupt(f"raw piece has two lengths: stored_length={record.stored_length}")
        if length != record.length:
            return Corrupt(f"piece has another length: length={record.length}")
        if record.base is not None and not self._is_held(record.base.place):
            return Corrupt("piece refers to a place that is not there")
        return record

    def _is_held(self, place: Place) -> bool:
        return all(self._slabs.holds(extent) for extent in place)


def _change(ref: PieceRef, place: Place, apply: Callable[[bytes], bytes]) -> Change:
    return Change(key_of(ref), layout.pack_place(place), apply)


def _counted(counters: Counters, value: bytes) -> bytes:
    patched = bytearray(value)
    layout.patch_counters(
        patched, 0, hits=counters.hits, last_s=counters.last_s, heat=counters.heat
    )
    return bytes(patched)


def _linked(link: Link, value: bytes) -> bytes:
    """A damaged record stays as it is, for a read or scan to find."""
    try:
        record = unpack_value(value)
    except Corrupt:
        return value
    return pack_value(replace(record, parent=link.parent, depth=link.depth))


def _windows(items: Sequence[T], size_of: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Consecutive items of at most _WINDOW_BYTES in all; a larger one alone."""
    start, held_bytes = 0, 0
    for i, item in enumerate(items):
        size_bytes = size_of(item)
        if i > start and held_bytes + size_bytes > _WINDOW_BYTES:
            yield items[start:i]
            start, held_bytes = i, 0
        held_bytes += size_bytes
    if start < len(items):
        yield items[start:]


def _record_or_none(value: bytes | None) -> Record | None:
    """A damaged record is forgotten all the same, there is nothing to tell of it."""
    if value is None:
        return None
    try:
        return unpack_value(value)
    except Corrupt:
        return None
