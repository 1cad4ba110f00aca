"""A tier of plain dicts: the simplest thing that keeps the promises of `Tier`. For tests of what uses a tier."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import Place
from kvstored.errors import Corrupt, KvstoredError, NotFound
from kvstored.tiers import record as layout
from kvstored.tiers import views as memory
from kvstored.tiers.base import (
    Carried,
    PieceRef,
    PieceRun,
    ScanBatch,
    Views,
    batch_of,
    read_each,
    ref_of,
    write_each,
)
from kvstored.tiers.record import RECORD, Record, Records, State


class MemoryTier:
    """Lives as long as the object; `close` forgets nothing, so that a test can reopen it by using it again."""

    def __init__(self) -> None:
        self._pieces: dict[PieceRef, tuple[Record, NDArray[np.uint8]]] = {}

    def write(self, items: Sequence[tuple[Record, Views]]) -> list[Record | KvstoredError]:
        return [self._written(record, source) for record, source in items]

    def read(self, items: Sequence[tuple[PieceRef, Place, Views]]) -> list[Record | KvstoredError]:
        return [self._read(ref, place, target) for ref, place, target in items]

    def write_run(self, run: PieceRun, records: Records) -> Carried:
        return write_each(self, run, records)

    def read_run(self, run: PieceRun) -> Carried:
        return read_each(self, run)

    def discard(self, items: Sequence[tuple[PieceRef, Place]]) -> list[Record | None]:
        found: list[Record | None] = []
        for ref, place in items:
            record, _ = self._pieces.get(ref, (None, None))
            is_there = record is not None and record.place == place
            if is_there:
                del self._pieces[ref]
            found.append(record if is_there else None)
        return found

    def scan(self, cursor: int, limit: int) -> ScanBatch:
        stored = [record for record, _ in self._pieces.values()]
        batch = stored[cursor : cursor + limit]
        return batch_of(
            np.frombuffer(bytearray().join(map(layout.pack, batch)), dtype=RECORD),
            [record.place for record in batch],
            cursor=cursor + len(batch),
            done=cursor + len(batch) >= len(stored),
            rejected=0,
        )

    def close(self) -> None:
        pass

    def _written(self, record: Record, source: Views) -> Record | KvstoredError:
        held = np.empty(record.length, dtype=np.uint8)
        memory.copy(source, [held])
        if memory.hash_of([held]) != record.checksum:
            return Corrupt(f"source does not match its checksum: length={record.length}")
        stored = replace(
            record,
            place=layout.trimmed(record.place, record.length),
            codec=0,
            stored_length=record.length,
            stored_checksum=record.checksum,
            base=None,
            state=State.READY,
            leased=False,
        )
        self._pieces[ref_of(stored)] = (stored, held)
        return stored

    def _read(self, ref: PieceRef, place: Place, target: Views) -> Record | KvstoredError:
        record, held = self._pieces.get(ref, (None, None))
        if record is None or held is None or record.place != place:
            return NotFound("no such piece in memory")
        if memory.size_of(target) != record.length:
            return Corrupt(f"piece has another length: length={record.length}")
        memory.copy([held], target)
        if memory.hash_of(target) != record.checksum:
            return Corrupt("bytes in memory do not match their checksum")
        return record
