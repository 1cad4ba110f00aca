"""Bytes between private arrays and mapped segments, with their checksums; large batches on a few threads.

numpy.copyto and xxh3_64().update release the GIL for large arrays, memoryview assignment and one-shot hashes do not. From 4 KiB to 32 MiB
copyto, slice assignment and ctypes.memmove are equally fast; each call costs 0.4 us, so neighbours are copied in one.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored import native
from kvstored.client.segments import extent_of
from kvstored.errors import Corrupt
from kvstored.wire.packing import EXTENT_BYTES, pack_u64, unpack_extents

Bytes = NDArray[np.uint8]
Work = TypeVar("Work")
Made = TypeVar("Made")

STEP_BYTES = 1 << 20
"""Copied, then hashed while it is still in the core's cache. Steps of 256 KiB were a fifth slower."""
_PARALLEL_BYTES, _NATIVE_PARALLEL_BYTES = 4 << 20, 16 << 20
"""Below this a second thread costs more than it saves; in C one is bound by the memory sooner."""
_PAST_CACHE_BYTES = 8 << 20
_CUT_BYTES = 4096
_ONE_SHOT_BYTES = 64 << 10
"""Hashed by the one-shot call, which holds the GIL for the few microseconds that this takes."""


_LOOK_S = 0.0005


class Run(NamedTuple):
    """Pieces that are neighbours on both sides: `sizes` cuts `private`, in order.

    `shared` may be several extents of a single piece; several pieces lie in one and have at most STEP_BYTES together.
    """

    private: Bytes
    shared: tuple[Bytes, ...]
    sizes: tuple[int, ...]


class Copier:
    """A bounded pool of copying threads, started when first needed. `native`: copies in C, where there are any. `parallel_bytes`: less is
    copied by the caller alone."""

    def __init__(self, threads: int) -> None:
        self.native = native.copies
        self.parallel_bytes = _PARALLEL_BYTES if self.native is None else _NATIVE_PARALLEL_BYTES
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def copy_in(self, runs: Sequence[Run]) -> list[int]:
        """Private to shared; the checksum of each piece."""
        return self._copied(runs, _copy_in, inward=True, summed=True)

    def fill(
        self, sources: Sequence[Bytes], segments: Mapping[int, Bytes], extents: bytes
    ) -> bytes:
        """Private arrays to one extent each, in these segments; their checksums, packed as the extents are. LookupError where a segment is none of these."""
        sizes, copies = [source.size for source in sources], self.native
        if copies is None:
            return pack_u64(self.copy_in(_runs_to(sources, segments, extents)))
        past_cache = goes_past_cache(sum(sizes), inward=True)
        if self._is_for_one(sizes):
            return copies.fill(sources, segments, extents, past_cache)

        def filled(a: int, b: int) -> list[bytes]:
            there = extents[EXTENT_BYTES * a : EXTENT_BYTES * b]
            return [copies.fill(sources[a:b], segments, there, past_cache)]

        sums: list[bytes] = self.in_shares(sizes, filled)
        return b"".join(sums)

    def copy_out(self, runs: Sequence[Run]) -> list[int]:
        """Shared to private; the checksum of each private copy."""
        return self._copied(runs, copied_out, inward=False, summed=True)

    def copy_out_unchecked(self, runs: Sequence[Run]) -> list[int]:
        """Shared to private, without hashing; no checksums, so that one large block is shared by the threads as well."""
        if len(runs) == 1 and self._threads > 1 and runs[0].private.size >= self.parallel_bytes:
            runs = _cut(runs[0], self._threads)
        return self._copied(runs, _copy_out_unchecked, inward=False, summed=False)

    def _copied(
        self,
        runs: Sequence[Run],
        copy: Callable[[Run], list[int]],
        *,
        inward: bool,
        summed: bool,
    ) -> list[int]:
        sizes, copies = [run.private.size for run in runs], self.native
        if copies is None:
            return self.spread_out(runs, copy, sizes)
        past_cache = goes_past_cache(sum(sizes), inward=inward)
        return self.in_shares(
            sizes, lambda a, b: copies.copy_runs(runs[a:b], inward, summed, past_cache)
        )

    def spread_out(
        self, work: Sequence[Work], copy: Callable[[Work], list[int]], sizes: Sequence[int]
    ) -> list[int]:
        """What `copy` answers for each work of `sizes` bytes, in order, on every thread. A put does not leave a core to the daemon: that
        was worth it only while its books took as long as the copies."""
        return self.in_shares(sizes, lambda a, b: _copy_each(work[a:b], copy))

    def in_shares(self, sizes: Sequence[int], copy: Callable[[int, int], list[Made]]) -> list[Made]:
        """What `copy` answers for all of so many bytes each, from a to b in each thread, in order."""
        if self._is_for_one(sizes):
            return copy(0, len(sizes))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, "kvstored-copy")
        shares = _shares(sizes, min(self._threads, len(sizes)))
        together = _Together(copy)
        try:
            others = [self._pool.submit(together.run, *share) for share in shares[1:]]
            made = copy(*shares[0])
            for other in others:
                made += other.result()
        except BaseException:
            together.end()
            raise
        return made

    def _is_for_one(self, sizes: Sequence[int]) -> bool:
        """Whether more threads than the caller's would save nothing."""
        return self._threads == 1 or len(sizes) == 1 or sum(sizes) < self.parallel_bytes

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


class _Together(Generic[Made]):
    """Shares of one call. They touch memory that the caller gives back when it fails, or is interrupted: none may run on by itself."""

    def __init__(self, copy: Callable[[int, int], list[Made]]) -> None:
        self._copy = copy
        self._running: list[None] = []
        self._is_over = False

    def run(self, first: int, last: int) -> list[Made]:
        self._running.append(None)  # first, so that whoever ends it sees this or is seen
        try:
            return [] if self._is_over else self._copy(first, last)
        finally:
            self._running.pop()

    def end(self) -> None:
        """Those that run end with their copies, in milliseconds; no other begins. A second interrupt is told when they have ended."""
        self._is_over = True
        interrupt: BaseException | None = None
        while self._running:
            try:
                time.sleep(_LOOK_S)
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt


def goes_past_cache(total_bytes: int, *, inward: bool) -> bool:
    """Whether it is stored without bringing its place into the caches: the copy needs two thirds of the memory's bandwidth then. A put always, since
    nothing of a place that others had is in the caches of who puts (1 MiB with its checksum took 41 us, as the copy alone did, and 52 through them);
    a get where they could not hold it. In Python the C library decides (GLIBC_TUNABLES)."""
    return inward or total_bytes >= _PAST_CACHE_BYTES


def checksum_of(runs: Sequence[Bytes]) -> int:
    if len(runs) == 1 and runs[0].size <= _ONE_SHOT_BYTES:
        return xxhash.xxh3_64_intdigest(runs[0].data)
    hasher = xxhash.xxh3_64()
    for run in runs:
        hasher.update(run.data)
    return hasher.intdigest()


def _copy_each(work: Sequence[Work], copy: Callable[[Work], list[int]]) -> list[int]:
    return [checksum for each in work for checksum in copy(each)]


def _shares(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """At most `count` consecutive shares of about equal bytes, none empty."""
    shares: list[tuple[int, int]] = []
    start, share_bytes, total_bytes = 0, 0, sum(sizes)
    for i, size in enumerate(sizes):
        share_bytes += size
        if share_bytes * count >= total_bytes and len(shares) < count - 1:
            shares.append((start, i + 1))
            start, share_bytes = i + 1, 0
    if start < len(sizes):
        shares.append((start, len(sizes)))
    return shares


def _cut(run: Run, count: int) -> list[Run]:
    """About equal parts of a run, at most `count` of each of its extents."""
    parts, start = list[Run](), 0
    for extent in run.shared:
        step = _CUT_BYTES * -(-extent.size // (count * _CUT_BYTES))
        for at in range(0, extent.size, step):
            shared = extent[at : at + step]
            private = run.private[start + at : start + at + shared.size]
            parts.append(Run(private, (shared,), (shared.size,)))
        start += extent.size
    return parts


def _runs_to(sources: Sequence[Bytes], segments: Mapping[int, Bytes], extents: bytes) -> list[Run]:
    runs = []
    for source, (segment, offset, size) in zip(sources, unpack_extents(extents), strict=True):
        if source.size != size:
            raise Corrupt(f"a place has another size than its piece bytes={source.size}")
        runs.append(Run(source, (extent_of(segments, segment, offset, size),), (size,)))
    return runs


def _copy_in(run: Run) -> list[int]:
    if run.private.size <= STEP_BYTES and len(run.shared) == 1:
        np.copyto(run.shared[0], run.private)
        return _checksums(run)
    hasher = xxhash.xxh3_64()
    for private, shared in _steps(run):
        np.copyto(shared, private)
        hasher.update(private.data)
    return [hasher.intdigest()]


def copied_out(run: Run) -> list[int]:
    """Hashes the private copy: what the daemon's memory holds a moment later does not matter."""
    if run.private.size <= STEP_BYTES and len(run.shared) == 1:
        np.copyto(run.private, run.shared[0])
        return _checksums(run)
    hasher = xxhash.xxh3_64()
    for private, shared in _steps(run):
        np.copyto(private, shared)
        hasher.update(private.data)
    return [hasher.intdigest()]


def _checksums(run: Run) -> list[int]:
    if len(run.sizes) == 1:
        return [checksum_of((run.private,))]
    checksums = []
    start, private = 0, run.private.data
    for size in run.sizes:
        part = private[start : start + size]
        start += size
        if size <= _ONE_SHOT_BYTES:
            checksums.append(xxhash.xxh3_64_intdigest(part))
        else:
            hasher = xxhash.xxh3_64()
            hasher.update(part)
            checksums.append(hasher.intdigest())
    return checksums


def _steps(run: Run) -> Iterator[tuple[Bytes, Bytes]]:
    """Private and shared side of every step, in order."""
    offset = 0
    for extent in run.shared:
        for start in range(0, extent.size, STEP_BYTES):
            shared = extent[start : start + STEP_BYTES]
            yield run.private[offset : offset + shared.size], shared
            offset += shared.size


def _copy_out_unchecked(run: Run) -> list[int]:
    offset = 0
    for extent in run.shared:
        np.copyto(run.private[offset : offset + extent.size], extent)
        offset += extent.size
    return []
