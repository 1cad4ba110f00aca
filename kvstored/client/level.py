"""Many small blocks of one size out of one segment: where what is done for each block costs more than its bytes."""

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.client.copying import STEP_BYTES, Bytes
from kvstored.client.rows import Rows
from kvstored.core.types import UNIT_BYTES

LEVEL_BYTES_MAX = 8 << 20
"""More is copied by several threads, which takes runs."""
LEVEL_BLOCK_BYTES_MAX = 256 << 10
"""What is done for each larger block costs little beside its bytes."""

LevelRows = Bytes | Sequence[Bytes]
"""One array of rows, or arrays of one row each."""


def level_rows(out: Rows | None, count: int, size: int) -> LevelRows | None:
    """Rows of `size` bytes that can be copied to as they are; None where `out` is something else."""
    if out is None:
        return np.empty((count, size), dtype=np.uint8)
    if isinstance(out, np.ndarray):
        return out if _is_bytes(out, (count, size)) else None
    rows = [row for row in out if _is_bytes(row, (size,))]
    return rows if len(rows) == len(out) == count else None


def copied_level(segment: Bytes, offsets: NDArray[np.int64], rows: LevelRows) -> NDArray[np.uint64]:
    """Checksums of the rows, which have a copy of what lies at the offsets."""
    digest = xxhash.xxh3_64_intdigest
    if not isinstance(rows, np.ndarray):
        sums = [
            _copied(row, segment, start) for row, start in zip(rows, offsets.tolist(), strict=True)
        ]
        return np.array(sums, dtype=np.uint64)
    size, sums = rows.shape[1], list[int]()
    raw, step = rows.reshape(-1).data, max(1, STEP_BYTES // size)
    for first in range(0, len(offsets), step):
        part = rows[first : first + step]
        _take(part, segment, offsets[first : first + step])
        begin = first * size
        sums += [digest(raw[at : at + size]) for at in range(begin, begin + part.size, size)]
    return np.array(sums, dtype=np.uint64)


def _take(rows: Bytes, segment: Bytes, offsets: NDArray[np.int64]) -> None:
    size = rows.shape[1]
    if size % UNIT_BYTES:
        for row, start in zip(rows, offsets.tolist(), strict=True):
            np.copyto(row, segment[start : start + size])
        return
    units = (offsets // UNIT_BYTES)[:, np.newaxis] + np.arange(size // UNIT_BYTES)
    source, target = segment.reshape(-1, UNIT_BYTES), rows.reshape(-1, UNIT_BYTES)
    np.take(source, units.reshape(-1), axis=0, out=target, mode="clip")


def _is_bytes(given: object, shape: tuple[int, ...]) -> TypeGuard[Bytes]:
    if type(given) is not np.ndarray or given.dtype != np.uint8 or given.shape != shape:
        return False
    return given.flags.c_contiguous and given.flags.writeable


def _copied(row: Bytes, segment: Bytes, start: int) -> int:
    np.copyto(row, segment[start : start + row.size])
    return xxhash.xxh3_64_intdigest(row.data)
