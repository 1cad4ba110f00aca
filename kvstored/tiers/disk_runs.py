"""Runs of plain pieces in the disk tier, as columns: what `Disk` does one by one for all others.

Raw pieces whose records are as expected; whatever else comes up is looked at one by one. The order of a write is the same: payload,
fdatasync, one commit.
"""

from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from kvstored.codec.frame import Codec
from kvstored.core.types import Place
from kvstored.errors import Corrupt, KvstoredError, Unavailable
from kvstored.tiers import record_runs
from kvstored.tiers import views as memory
from kvstored.tiers.base import Carried, PieceRef, PieceRun, Views, failed
from kvstored.tiers.disk_env import RecordEnv, keys_of
from kvstored.tiers.record import EXTENT_BYTES, RECORD, RECORD_BYTES, Record, Records, State
from kvstored.tiers.slabs import Slabs, translated

_VALUE_BYTES = RECORD_BYTES + EXTENT_BYTES
_NO_VALUE = bytes(_VALUE_BYTES)
_ONE_SHOT_BYTES_MAX = 64 << 10
"""A hash of microseconds is not worth letting other threads run: that costs as much again."""

Faults = dict[int, KvstoredError]
ReadSingly = Callable[[Sequence[tuple[PieceRef, Place, Views]]], list[Record | KvstoredError]]


class DiskRuns:
    """`write_failed` and `pause`: a write that failed keeps others away for a while."""

    def __init__(
        self,
        env: RecordEnv,
        slabs: Slabs,
        write_failed: Callable[[OSError], KvstoredError],
        pause: Callable[[], None],
    ) -> None:
        self._env = env
        self._slabs = slabs
        self._write_failed = write_failed
        self._pause = pause

    def write(self, run: PieceRun, records: Records) -> Carried:
        values: dict[str, ArrayLike] = {
            "state": State.READY,
            "leased": 0,
            "owner_pid": 0,
            "codec": int(Codec.RAW),
            "stored_length": run.length,
            "stored_checksum": records["checksum"],
        }
        stored = record_runs.moved(records, run.places, values)
        faults = _unsound(run, stored["checksum"], range(len(run)), "source")
        faults |= self._payload_written(run, _others(run, faults))
        good = _others(run, faults)
        if good:
            try:
                self._enter(run, stored, good)
            except KvstoredError as error:
                if isinstance(error, Unavailable):
                    self._pause()
                faults |= dict.fromkeys(good, error)
        return Carried(stored, run.places.units, faults)

    def read(self, run: PieceRun, singly: ReadSingly) -> Carried:
        try:
            values = self._env.values(keys_of(run.fingerprints))
        except KvstoredError as error:
            return failed(run, error)
        records, is_plain = _known(run, values)
        is_plain &= self._slabs.hold(run.places)
        faults = self._payload_read(run, records["checksum"], np.flatnonzero(is_plain).tolist())
        for i in np.flatnonzero(~is_plain).tolist():
            (outcome,) = singly([(run.ref(i), run.places.place(i), run.views(i))])
            if isinstance(outcome, Record):
                records[i] = record_runs.packed(outcome)
            else:
                faults[i] = outcome
        return Carried(records, run.places.units, faults)

    def _payload_written(self, run: PieceRun, items: list[int]) -> Faults:
        """Durable when it returns."""
        places = run.places.at(items)
        errors = self._slabs.write_slots(places, [run.slots[i] for i in items])
        segments = places.segment.tolist()
        unsynced = self._slabs.sync(set(segments))
        for at, segment in enumerate(segments):
            if segment in unsynced:
                errors.setdefault(at, unsynced[segment])
        return {items[at]: self._write_failed(error) for at, error in errors.items()}

    def _enter(self, run: PieceRun, records: Records, items: list[int]) -> None:
        """The records of these items, in one commit."""
        table = np.empty((len(run), _VALUE_BYTES), dtype=np.uint8)
        table[:, :RECORD_BYTES] = records.view(np.uint8).reshape(len(run), RECORD_BYTES)
        extents = np.frombuffer(record_runs.pack_places(run.places), dtype=np.uint8)
        table[:, RECORD_BYTES:] = extents.reshape(len(run), EXTENT_BYTES)
        raw = table.tobytes()
        values = [raw[i * _VALUE_BYTES : (i + 1) * _VALUE_BYTES] for i in items]
        keys = keys_of(run.fingerprints[np.asarray(items, dtype=np.int64)])
        self._env.put_rows(list(zip(keys, values, strict=True)))

    def _payload_read(
        self, run: PieceRun, checksums: NDArray[np.uint64], items: list[int]
    ) -> Faults:
        """Checked run by run, while bytes are in the cache and other threads read."""
        places, slots = run.places.at(items), [run.slots[i] for i in items]
        faults: Faults = {}
        for moved, error in self._slabs.read_slots(places, slots):
            mine = [items[at] for at in moved]
            if error is None:
                faults |= _unsound(run, checksums, mine, "read")
            else:
                cause = translated(error, "slab cannot be read:")
                faults |= dict.fromkeys(mine, cause)
        return faults


def _known(run: PieceRun, values: Sequence[bytes]) -> tuple[Records, NDArray[np.bool_]]:
    """The records, and which of them are those of raw pieces just as the run has them."""
    raw = b"".join(value if len(value) == _VALUE_BYTES else _NO_VALUE for value in values)
    table = np.frombuffer(raw, dtype=np.uint8).reshape(len(run), _VALUE_BYTES)
    # copied, also of a run of one, which is contiguous as it is: who looks at a piece singly writes its record here
    records = table[:, :RECORD_BYTES].copy().reshape(-1).view(RECORD)
    extents = np.ascontiguousarray(table[:, RECORD_BYTES:]).view("<u4")
    fine = (extents == np.stack(run.places, axis=1)).all(axis=1)
    fine &= record_runs.vouch(records, run.places)
    fine &= (records["fingerprint"] == run.fingerprints).all(axis=1)
    fine &= (records["group"] == 0) & (records["shard"] == 0) & (records["codec"] == int(Codec.RAW))
    fine &= (records["length"] == run.length) & (records["stored_length"] == run.length)
    return records, fine


def _unsound(
    run: PieceRun, checksums: NDArray[np.uint64], items: Sequence[int], what: str
) -> Faults:
    """Which of these items' bytes do not match their checksums."""
    length, slots = run.length, run.slots
    if length <= _ONE_SHOT_BYTES_MAX:
        digest = xxhash.xxh3_64_intdigest
        sums = [digest(slots[i].data[:length]) for i in items]
    else:
        sums = [memory.hash_of(run.views(i)) for i in items]
    wanted = checksums[np.asarray(items, dtype=np.int64)].tolist()
    return {
        i: Corrupt(f"bytes do not match their checksum: when={what} length={length}")
        for i, found, expected in zip(items, sums, wanted, strict=True)
        if found != expected
    }


def _others(run: PieceRun, faults: Faults) -> list[int]:
    return [i for i in range(len(run)) if i not in faults]
