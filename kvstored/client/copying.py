"""Bytes between private arrays and mapped segments, with their checksums; large batches on a few threads.

numpy.copyto and xxh3_64().update release the GIL for large arrays, memoryview assignment and one-shot hashes do not.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_STEP_BYTES = 1 << 20
"""Copied, then hashed while it is still in the core's cache. Steps of 256 KiB were a fifth slower."""
_SMALL_BYTES = 256 << 10
"""Up to here a hash in one call, which keeps the interpreter's lock, costs less than giving the lock away."""
_PARALLEL_BYTES = 4 << 20
"""Below this a second thread costs more than it saves."""


class Piece(NamedTuple):
    """One piece of a copy: `private` on this side, in one run; `shared` in mapped segments, in one or more."""

    private: Bytes
    shared: tuple[Bytes, ...]


class Copier:
    """A bounded pool of copying threads, started when first needed."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def copy_in(self, pieces: Sequence[Piece]) -> list[int]:
        """Private to shared; the checksum of each piece. Leaves a core to the daemon, which keeps its books meanwhile."""
        cores = len(os.sched_getaffinity(0))
        return self._spread(pieces, _copy_in, min(self._threads, max(cores - 1, 1)))

    def copy_out(self, pieces: Sequence[Piece]) -> list[int]:
        """Shared to private; the checksum of each private copy."""
        return self._spread(pieces, _copy_out, self._threads)

    def copy_out_unchecked(self, pieces: Sequence[Piece]) -> list[int]:
        """Shared to private, without hashing; zeros."""
        return self._spread(pieces, _copy_out_unchecked, self._threads)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _spread(
        self, pieces: Sequence[Piece], copy: Callable[[Piece], int], threads: int
    ) -> list[int]:
        total_bytes = sum(piece.private.size for piece in pieces)
        if total_bytes < _PARALLEL_BYTES or len(pieces) == 1 or threads == 1:
            return [copy(piece) for piece in pieces]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, "kvstored-copy")
        runs = _runs(pieces, min(threads, len(pieces)), total_bytes)
        others = [self._pool.submit(_copy_run, run, copy) for run in runs[1:]]
        # The copies touch memory that the caller is about to give back: all must have ended, whatever fails.
        try:
            checksums = _copy_run(runs[0], copy)
        finally:
            for other in others:
                other.exception()
        for other in others:
            checksums += other.result()
        return checksums


def checksum_of(runs: Sequence[Bytes]) -> int:
    hasher = xxhash.xxh3_64()
    for run in runs:
        hasher.update(run.data)
    return hasher.intdigest()


def _copy_run(pieces: Sequence[Piece], copy: Callable[[Piece], int]) -> list[int]:
    return [copy(piece) for piece in pieces]


def _runs(pieces: Sequence[Piece], count: int, total_bytes: int) -> list[Sequence[Piece]]:
    """At most `count` consecutive runs of pieces of about equal bytes, none empty."""
    runs: list[Sequence[Piece]] = []
    start, run_bytes = 0, 0
    for i, piece in enumerate(pieces):
        run_bytes += piece.private.size
        if run_bytes * count >= total_bytes and len(runs) < count - 1:
            runs.append(pieces[start : i + 1])
            start, run_bytes = i + 1, 0
    if start < len(pieces):
        runs.append(pieces[start:])
    return runs


def _copy_in(piece: Piece) -> int:
    if piece.private.size <= _SMALL_BYTES and len(piece.shared) == 1:
        np.copyto(piece.shared[0], piece.private)
        return xxhash.xxh3_64_intdigest(piece.private.data)
    hasher = xxhash.xxh3_64()
    for private, shared in _steps(piece):
        np.copyto(shared, private)
        hasher.update(private.data)
    return hasher.intdigest()


def _copy_out(piece: Piece) -> int:
    """Hashes the private copy: what the daemon's memory holds a moment later does not matter."""
    if piece.private.size <= _SMALL_BYTES and len(piece.shared) == 1:
        np.copyto(piece.private, piece.shared[0])
        return xxhash.xxh3_64_intdigest(piece.private.data)
    hasher = xxhash.xxh3_64()
    for private, shared in _steps(piece):
        np.copyto(private, shared)
        hasher.update(private.data)
    return hasher.intdigest()


def _steps(piece: Piece) -> Iterator[tuple[Bytes, Bytes]]:
    """Private and shared side of every step, in order."""
    offset = 0
    for run in piece.shared:
        for start in range(0, run.size, _STEP_BYTES):
            shared = run[start : start + _STEP_BYTES]
            yield piece.private[offset : offset + shared.size], shared
            offset += shared.size


def _copy_out_unchecked(piece: Piece) -> int:
    offset = 0
    for run in piece.shared:
        np.copyto(piece.private[offset : offset + run.size], run)
        offset += run.size
    return 0
