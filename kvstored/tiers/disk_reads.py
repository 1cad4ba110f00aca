"""Bytes of single pieces on their way out of the slabs: read, checked, decoded, and for P frames what they refer to as well."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstored.codec import frame
from kvstored.codec.blocks import Known
from kvstored.codec.elements import Bytes
from kvstored.codec.frame import Codec
from kvstored.codec.header import Reference
from kvstored.codec.unpacked import Unpacked, unpack
from kvstored.core.types import Place
from kvstored.errors import Corrupt, KvstoredError
from kvstored.tiers import record as layout
from kvstored.tiers import slabs
from kvstored.tiers import views as memory
from kvstored.tiers.base import PieceRef, Views
from kvstored.tiers.disk_env import RecordEnv
from kvstored.tiers.record import Base, Record
from kvstored.tiers.slabs import Job, Slabs, Staged

Items = Sequence[tuple[PieceRef, Place, Views]]


@dataclass(frozen=True, slots=True)
class _Coming:
    """A piece that is being read, and what it refers to."""

    record: Record
    staged: Staged
    base: Staged | None


class DiskReads:
    """`decoded` is told what each frame took of a thread's CPU."""

    def __init__(
        self, env: RecordEnv, slabs_: Slabs, decoded: Callable[[Record, float], None]
    ) -> None:
        self._env = env
        self._slabs = slabs_
        self._decoded = decoded

    def fill(
        self, window: Sequence[int], items: Items, outcomes: list[Record | KvstoredError]
    ) -> None:
        """Fill the targets of those items of the window whose outcome is a record so far.

        A piece is checked and decoded as soon as its last run is there, while its bytes are in the cache; meanwhile the lane's other
        threads read.
        """
        coming = {
            i: _Coming(record, _staged_for_read(record, items[i][2]), _base(record))
            for i in window
            if isinstance(record := outcomes[i], Record)
        }
        self._read(coming, outcomes, lambda i, each: _finish_read(each, items[i][2]))

    def unpack(
        self,
        window: Sequence[int],
        outcomes: list[Record | KvstoredError],
        unpacked: dict[int, Unpacked],
    ) -> None:
        """The same into memory of their own, with nothing undone but what a GPU cannot."""
        coming = {
            i: _Coming(record, Staged([slabs.aligned(record.stored_length)]), _base(record))
            for i in window
            if isinstance(record := outcomes[i], Record)
        }

        def finish(i: int, each: _Coming) -> None:
            unpacked[i] = _unpacked(each)

        self._read(coming, outcomes, finish)

    def _read(
        self,
        coming: dict[int, _Coming],
        outcomes: list[Record | KvstoredError],
        finish: Callable[[int, _Coming], None],
    ) -> None:
        jobs = [job for i, each in coming.items() for job in _jobs(i, each)]
        missing = Counter(job.item for job in jobs)
        for moved in self._slabs.read(jobs):
            missing.subtract(moved.items)
            for i in dict.fromkeys(moved.items):
                if moved.error is not None:
                    outcomes[i] = slabs.translated(moved.error, "slab cannot be read:")
                elif not missing[i] and isinstance(outcomes[i], Record):
                    outcomes[i] = self._finished(i, coming.pop(i), finish)

    def _finished(
        self, i: int, coming: _Coming, finish: Callable[[int, _Coming], None]
    ) -> Record | Corrupt:
        begun_s = time.thread_time()
        try:
            finish(i, coming)
        except Corrupt as error:
            return error
        if coming.record.codec != Codec.RAW:
            self._decoded(coming.record, time.thread_time() - begun_s)
        return coming.record

    def base(self, record: Record) -> tuple[Base, Bytes] | None:
        """The piece that `record` may be stored against, with its plain bytes; None where it is not there any more, or not sound."""
        wish = record.base
        if wish is None:
            return None
        (found,) = self._env.get([PieceRef(wish.fingerprint, record.group, record.shard)])
        if not isinstance(found, Record) or found.place != wish.place or found.base is not None:
            return None
        plain = np.empty(record.length, dtype=np.uint8)
        if found.length != record.length or found.digest != record.digest:
            return None
        outcomes: list[Record | KvstoredError] = [found]
        ref = PieceRef(wish.fingerprint, record.group, record.shard)
        self.fill([0], [(ref, wish.place, [plain])], outcomes)
        if not isinstance(outcomes[0], Record):
            return None
        complete = replace(
            wish,
            stored_length=found.stored_length,
            stored_checksum=found.stored_checksum,
            checksum=found.checksum,
            codec=found.codec,
        )
        return complete, plain


def read_bytes(record: Record) -> int:
    """What reading a piece takes from the disk."""
    return record.stored_length + (record.base.stored_length if record.base else 0)


def known(base: Base, plain: Bytes) -> Known:
    """As the codec wants what a frame refers to."""
    return Known(Reference(base.fingerprint, base.checksum), plain)


def _staged_for_read(record: Record, target: Views) -> Staged:
    """Raw bytes go straight to the target where they can; a frame goes to memory of its own."""
    if record.codec == Codec.RAW:
        return slabs.staged(target)
    return Staged([slabs.aligned(record.stored_length)])


def _base(record: Record) -> Staged | None:
    return Staged([slabs.aligned(record.base.stored_length)]) if record.base else None


def _jobs(i: int, coming: _Coming) -> list[Job]:
    record, base = coming.record, coming.record.base
    place = layout.trimmed(record.place, record.stored_length)
    jobs = slabs.jobs_of(i, coming.staged.aligned, place)
    if base is not None and coming.base is not None:
        jobs += slabs.jobs_of(
            i, coming.base.aligned, layout.trimmed(base.place, base.stored_length)
        )
    return jobs


def _finish_read(coming: _Coming, target: Views) -> None:
    """Check what was read, decode it, and check what came of it."""
    record, staged = coming.record, coming.staged
    staged.spill()
    if record.codec != Codec.RAW:
        references = _references(coming)
        stored = staged.aligned[0][: record.stored_length]
        _check_stored(stored, record.stored_checksum)
        frame.decode(record.codec, stored, target, references)
    if memory.hash_of(target) != record.checksum:
        raise Corrupt("bytes on disk do not match their checksum")


def _unpacked(coming: _Coming) -> Unpacked:
    """Checked as it was stored; its plain bytes are checked where they come to lie."""
    record = coming.record
    stored = coming.staged.aligned[0][: record.stored_length]
    _check_stored(stored, record.stored_checksum)
    return unpack(record.codec, stored, record.length, _references(coming))


def _references(coming: _Coming) -> tuple[Known, ...]:
    base = coming.record.base
    if base is None or coming.base is None:
        return ()
    stored = coming.base.aligned[0][: base.stored_length]
    _check_stored(stored, base.stored_checksum)
    plain = np.empty(coming.record.length, dtype=np.uint8)
    frame.decode(base.codec, stored, [plain])
    if memory.hash_of([plain]) != base.checksum:
        raise Corrupt("bytes that a piece refers to do not match their checksum")
    return (known(base, plain),)


def _check_stored(stored: Bytes, checksum: int) -> None:
    if memory.hash_of([stored]) != checksum:
        raise Corrupt("stored bytes on disk do not match their checksum")
