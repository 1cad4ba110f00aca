"""The HBM tier: a pool on each configured GPU, cut into slots by the one allocator; records of what lies there stay on the host.

Segment n is the pool of the n-th device, opened by `grow` in the tier's lane: until then nothing of CUDA is imported. Nothing survives
the process: a pool is empty when it is made. When a device is lost the whole tier is: every call says Unavailable from then on, and
`fault` tells why.

`key_at`, `mark_free` and `relink` are a few microseconds an item and may be called on the store's loop.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstored.codec.unpacked import plain_of
from kvstored.core.columnar import Places
from kvstored.core.types import UNIT_BYTES, Extent, Place
from kvstored.errors import Corrupt, KvstoredError, NoSpace, NotFound, Unavailable
from kvstored.tiers import record as layout
from kvstored.tiers import record_runs
from kvstored.tiers import views as memory
from kvstored.tiers.base import (
    Carried,
    Crossed,
    Link,
    PieceRef,
    PieceRun,
    ScanBatch,
    Views,
    batch_of,
    read_each,
    ref_of,
)
from kvstored.tiers.device import Copies, Device, Handle, Moves, Opener, moves_of
from kvstored.tiers.expansion import LENGTH_MIN, expansion_of
from kvstored.tiers.layered import Layers, Runs, Told, runs_of
from kvstored.tiers.record import RECORD, Record, Records, State

_Head = tuple[int, int]


class _Row(NamedTuple):
    """A record among those of the run that it came with: made into a value where somebody looks."""

    rows: Records
    at: int

    def packed(self) -> bytes:
        return bytes(self.rows[self.at].tobytes())

    def units(self) -> int:
        return int(self.rows["extent_units"][self.at])


class Hbm:
    """`names`: one device a segment; `pool_bytes`: of each. `opener` makes them."""

    def __init__(self, names: Sequence[str], pool_bytes: int, opener: Opener) -> None:
        self.names = tuple(names)
        self.pool_bytes = pool_bytes // UNIT_BYTES * UNIT_BYTES
        self._opener = opener
        self._devices: tuple[Device, ...] = ()  # exchanged, never changed: other threads walk it
        self._records: dict[_Head, Record | _Row] = {}
        self._lock = threading.Lock()
        self.fault: KvstoredError | None = None
        self.pinned_bytes = 0

    # Devices

    def grow(self) -> tuple[int, int]:
        """Open the next device; (segment, units). NoSpace, or Unavailable where there is no such device or no CUDA."""
        name = self.names[len(self._devices)]
        device = self._opener(name, self.pool_bytes)
        self._devices = (*self._devices, device)
        return len(self._devices) - 1, self.pool_bytes // UNIT_BYTES

    def handle(self, segment: int) -> Handle:
        if segment >= len(self._devices):
            raise NotFound(f"no such pool: segment={segment}")
        return self._devices[segment].handle

    @property
    def footprint_bytes(self) -> int:
        return sum(device.footprint_bytes for device in self._devices)

    def register(self, chunk: NDArray[np.uint8]) -> None:
        """Pin host memory: the first device does it for all."""
        self._devices[0].register(chunk)
        for other in self._devices[1:]:
            other.share(chunk)
        self.pinned_bytes += len(chunk)

    def fail(self, error: KvstoredError) -> None:
        """The tier is off from now on; the first reason is kept."""
        if self.fault is None:
            self.fault = error

    # The lane

    def write(self, items: Sequence[tuple[Record, Views]]) -> list[Record | KvstoredError]:
        """Bytes are checked where they come from: what is on its way cannot be read again."""
        outcomes = [self._writable(record, source) for record, source in items]
        sound = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Record)]
        with self._lock:
            for i in sound:
                self._records.pop(_head(items[i][0].place), None)
        failed = self._submit(_upload, [(items[i][0].place, items[i][1]) for i in sound])
        if failed is not None:
            outcomes = [failed if isinstance(each, Record) else each for each in outcomes]
        with self._lock:
            for outcome in outcomes:
                if isinstance(outcome, Record):
                    self._records[_head(outcome.place)] = outcome
        return outcomes

    def write_in_order(
        self, items: Sequence[tuple[Record, Views]], layers: Layers, told: Told
    ) -> list[Record | KvstoredError]:
        """As `write`, range of layers by range of layers over all pieces, whose bytes the caller has checked: it does so before the first one goes."""
        with self._lock:
            for record, _ in items:
                self._records.pop(_head(record.place), None)
        try:
            if self.fault is not None:
                raise self._off()
            self._carry(runs_of([(record.place, source) for record, source in items]), layers, told)
        except KvstoredError as error:
            if not isinstance(error, NoSpace):
                self.fail(error)
            return [error] * len(items)
        outcomes = [self._stored(record) for record, _ in items]
        with self._lock:
            self._records.update((_head(outcome.place), outcome) for outcome in outcomes)
        return [*outcomes]

    def _carry(self, runs: Runs, layers: Layers, told: Told) -> None:
        """Everything is on its way before the first wait."""
        copies: dict[int, Copies] = {}
        try:
            for segment in runs.pools():
                copies[segment] = self._devices[segment].copies()
            for part, (begin, end) in enumerate(layers.parts()):
                events = [
                    (segment, each.submit(runs.part(segment, layers.count, begin, end)))
                    for segment, each in copies.items()
                ]
                told.submitted(part, events)
            for part in range(len(layers.ends)):
                for each in copies.values():
                    each.wait(part)
                told.arrived(part)
        finally:
            for each in copies.values():
                each.close()

    def write_packed(self, items: Sequence[Crossed]) -> list[Record | KvstoredError]:
        """As `write`, of records with their places here. What crosses packed is checked where it lies then: its plain bytes were nowhere before."""
        outcomes: list[Record | KvstoredError] = [self._stored(each.record) for each in items]
        with self._lock:
            for each in items:
                self._records.pop(_head(each.record.place), None)
        mine: dict[int, list[int]] = {}
        for i, each in enumerate(items):
            segments = {extent.segment for extent in each.record.place}
            if len(segments) > 1 or each.record.length < LENGTH_MIN:
                (outcomes[i],) = self.write([(each.record, [plain_of(each.unpacked)])])
            else:
                mine.setdefault(segments.pop(), []).append(i)
        for segment, numbers in sorted(mine.items()):
            faults = self._expand(self._devices[segment], [items[i] for i in numbers])
            for i, fault in zip(numbers, faults, strict=True):
                outcomes[i] = outcomes[i] if fault is None else fault
        with self._lock:
            for outcome in outcomes:
                if isinstance(outcome, Record):
                    self._records[_head(outcome.place)] = outcome
        return outcomes

    def _expand(self, device: Device, items: Sequence[Crossed]) -> list[KvstoredError | None]:
        """Each one's fault. A piece whose bytes are bad on the GPU and good here is the GPU's fault, not its source's."""
        if self.fault is not None:
            return [self._off() for _ in items]
        placed = [(each.unpacked, _extents(each.record)) for each in items]
        try:
            found = device.expand(expansion_of(placed))
        except KvstoredError as error:
            if not isinstance(error, NoSpace):
                self.fail(error)
            return [error for _ in items]
        return [
            None if checksum == each.record.checksum else self._judged(each)
            for each, checksum in zip(items, found, strict=True)
        ]

    def _judged(self, each: Crossed) -> KvstoredError:
        if memory.hash_of([plain_of(each.unpacked)]) != each.record.checksum:
            return Corrupt(
                f"decoded bytes do not match their checksum: length={each.record.length}"
            )
        self.fail(Unavailable("the gpu holds other bytes than it was given"))
        return self._off()

    def read(self, items: Sequence[tuple[PieceRef, Place, Views]]) -> list[Record | KvstoredError]:
        outcomes = [self._readable(ref, place, target) for ref, place, target in items]
        sound = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Record)]
        failed = self._submit(_download, [items[i][1:] for i in sound])
        for i in sound:
            record = outcomes[i]
            if failed is not None:
                outcomes[i] = failed
            elif isinstance(record, Record) and memory.hash_of(items[i][2]) != record.checksum:
                outcomes[i] = Corrupt("bytes in the pool do not match their checksum")
        return outcomes

    def write_run(self, run: PieceRun, records: Records) -> Carried:
        faults: dict[int, KvstoredError] = {}
        for i, checksum in enumerate(records["checksum"].tolist()):
            if memory.hash_of(run.views(i)) != checksum:
                faults[i] = Corrupt(f"source does not match its checksum: length={run.length}")
        sound = [i for i in range(len(run)) if i not in faults]
        heads = list(zip(run.places.segment.tolist(), run.places.start.tolist(), strict=True))
        with self._lock:
            for i in sound:
                self._records.pop(heads[i], None)
        failed = self._submit(
            _upload, [(run.places.place(i), [run.slots[i][: run.length]]) for i in sound]
        )
        if failed is not None:
            faults.update(dict.fromkeys(sound, failed))
            return Carried(records, run.places.units, faults)
        units = np.full(len(run), -(-run.length // UNIT_BYTES), dtype=np.int64)
        stored: dict[str, ArrayLike] = {
            "state": State.READY,
            "leased": 0,
            "codec": 0,
            "stored_length": run.length,
            "stored_checksum": records["checksum"],
        }
        rows = record_runs.moved(records, run.places._replace(units=units), stored)
        with self._lock:
            for i in sound:
                self._records[heads[i]] = _Row(rows, i)
        return Carried(rows, units, faults)

    def read_run(self, run: PieceRun) -> Carried:
        return read_each(self, run)

    def discard(self, items: Sequence[tuple[PieceRef, Place]]) -> list[Record | None]:
        with self._lock:
            found = [self._live(ref, place) for ref, place in items]
            for record in found:
                if record is not None:
                    self._records.pop(_head(record.place), None)
        return found

    def scan(self, cursor: int, limit: int) -> ScanBatch:
        with self._lock:
            heads = list(self._records)[cursor : cursor + limit]
            batch = [record for head in heads if (record := self._record(head)) is not None]
            is_done = cursor + limit >= len(self._records)
        return batch_of(
            np.frombuffer(bytearray().join(map(layout.pack, batch)), dtype=RECORD),
            [record.place for record in batch],
            cursor=cursor + limit,
            done=is_done,
            rejected=0,
        )

    def close(self) -> None:
        for device in self._devices:
            device.close()
        self._devices = ()
        self._records = {}

    # Records, on the loop

    def mark_free(self, places: Sequence[Place]) -> None:
        with self._lock:
            for place in places:
                self._records.pop(_head(place), None)

    def free_many(self, places: Places) -> None:
        self.mark_free([places.place(i) for i in range(places.size)])

    def key_at(self, place: Place) -> bytes:
        """Empty where nothing lies there."""
        found = self._records.get(_head(place))
        if isinstance(found, _Row):
            return layout.key_of(found.packed(), 0) if found.units() == place[0].units else b""
        return found.key if found is not None and found.place == place else b""

    def relink(self, items: Sequence[Link]) -> None:
        with self._lock:
            for item in items:
                if record := self._live(item.ref, item.place):
                    linked = replace(record, parent=item.parent, depth=item.depth)
                    self._records[_head(item.place)] = linked

    # Private

    def _writable(self, record: Record, source: Views) -> Record | KvstoredError:
        assert memory.size_of(source) == record.length
        if memory.hash_of(source) != record.checksum:
            return Corrupt(f"source does not match its checksum: length={record.length}")
        return self._stored(record)

    def _stored(self, record: Record) -> Record:
        return replace(
            record,
            place=layout.trimmed(record.place, record.length),
            codec=0,
            stored_length=record.length,
            stored_checksum=record.checksum,
            base=None,
            state=State.READY,
            leased=False,
        )

    def _off(self) -> Unavailable:
        return Unavailable(f"the hbm tier is off: {self.fault}")

    def _readable(self, ref: PieceRef, place: Place, target: Views) -> Record | KvstoredError:
        record = self._live(ref, place)
        if record is None:
            return NotFound("no such piece in the pool")
        if memory.size_of(target) != record.length:
            return Corrupt(f"piece has another length: length={record.length}")
        return record

    def _live(self, ref: PieceRef, place: Place) -> Record | None:
        record = self._record(_head(place))
        is_live = record is not None and record.place == place and ref_of(record) == ref
        return record if is_live else None

    def _record(self, head: _Head) -> Record | None:
        found = self._records.get(head)
        if isinstance(found, _Row):
            return layout.unpack(found.packed(), (Extent(*head, found.units()),))
        return found

    def _submit(
        self, carry: Callable[[Device, Moves], None], items: Sequence[tuple[Place, Views]]
    ) -> KvstoredError | None:
        """One submission on each device that has a part in it."""
        if self.fault is not None:
            return self._off()
        runs: dict[int, list[tuple[int, NDArray[np.uint8]]]] = {}
        for place, views in items:
            _cut(place, views, runs)
        try:
            for segment, mine in sorted(runs.items()):
                carry(self._devices[segment], moves_of(mine))
        except KvstoredError as error:
            if not isinstance(error, NoSpace):
                self.fail(error)
            return error
        return None


def _upload(device: Device, moves: Moves) -> None:
    device.upload(moves)


def _download(device: Device, moves: Moves) -> None:
    device.download(moves)


def _head(place: Place) -> _Head:
    return place[0].segment, place[0].start


def _extents(record: Record) -> list[tuple[int, int]]:
    """Offset and bytes in the pool."""
    found, left = [], record.length
    for extent in layout.trimmed(record.place, record.length):
        size = min(left, extent.units * UNIT_BYTES)
        found.append((extent.start * UNIT_BYTES, size))
        left -= size
    return found


def _cut(place: Place, views: Views, runs: dict[int, list[tuple[int, NDArray[np.uint8]]]]) -> None:
    """The piece as runs that lie together on both sides, by the pool that they are in."""
    rest = list(reversed(views))
    for extent in place:
        at, end = extent.start * UNIT_BYTES, (extent.start + extent.units) * UNIT_BYTES
        while rest and at < end:
            view = rest.pop()
            mine = view[: end - at]
            if len(view) > len(mine):
                rest.append(view[len(mine) :])
            runs.setdefault(extent.segment, []).append((at, mine))
            at += len(mine)
