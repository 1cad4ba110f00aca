"""What one submission at a time to a GPU needs, and the kernels that make plain bytes of what crossed packed.

As `cuda`, which imports CuPy, passes it here and translates what it raises. The device is current in every call.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstored.codec.unpacked import SECTION, Sections
from kvstored.tiers import kernels
from kvstored.tiers import views as memory
from kvstored.tiers.expansion import SUM_BYTES, Extents, hash_tables

STAGING_BYTES = 32 << 20
"""Pinned memory of a call for what is not pinned where it lies: one buffer a thread of the lane."""
RUNS_MAX = 65_536
TABLE_BYTES = RUNS_MAX * kernels.RUN.itemsize
SECTIONS_MAX = TABLE_BYTES // SECTION.itemsize
LOWEST_PRIORITY = 0
"""Of streams: the engine's kernels come first."""
PORTABLE_AND_MAPPED = 1 | 2
TO_DEVICE, TO_HOST = 1, 2
"""Kinds of cudaMemcpy."""
LANE_BYTES = 64
"""Of a piece that is hashed; its hash takes eight more."""
LANE_THREADS = 64
"""A thread goes along one lane of one piece: few of them share a multiprocessor."""
PIECES_MAX = 4096
"""That one call of the kernels hashes."""


class Worker:
    """A stream, pinned staging, and behind it a table, which kernels read where it is. Memory of the device for what crosses packed is taken when it
    is first needed."""

    def __init__(self, cupy: Any) -> None:  # ships no types, so do all that are its
        self._cupy: Any = cupy
        self._runtime: Any = cupy.cuda.runtime
        self._events: list[Event] = []
        self.stream: Any = cupy.cuda.Stream(non_blocking=True, priority=LOWEST_PRIORITY)
        self._address = int(
            self._runtime.hostAlloc(STAGING_BYTES + TABLE_BYTES, PORTABLE_AND_MAPPED)
        )
        whole = memory.at_address(self._address, STAGING_BYTES + TABLE_BYTES)
        self.staging = whole[:STAGING_BYTES]
        self.staging_address = self._address
        self.table_bytes = whole[STAGING_BYTES:]
        self.table = self.table_bytes.view(kernels.RUN)
        self.table_address = self._address + STAGING_BYTES
        self._scratch = self.scratch_bytes = 0

    def event(self, number: int) -> "Event":
        """Kept for the next submissions on this stream: one that waits for a later recording waits longer, never less."""
        while len(self._events) <= number:
            self._events.append(Event(self._cupy))
        return self._events[number]

    def scratch(self, size_bytes: int) -> int:
        """Address of so much memory of the device, whose content is nobody's. Nothing may be under way on the stream."""
        if size_bytes > self.scratch_bytes:
            self.free_scratch()
            self._scratch = int(self._runtime.malloc(size_bytes))
            self.scratch_bytes = size_bytes
        return self._scratch

    def free_scratch(self) -> None:
        if self.scratch_bytes:
            self._runtime.free(self._scratch)
        self._scratch = self.scratch_bytes = 0

    def free(self) -> None:
        self.free_scratch()
        self._events = []
        self._runtime.freeHost(self._address)


class Event:
    """`handle`: for cudaIpcOpenEventHandle, empty where this driver shares no events. `own` ends with this."""

    def __init__(self, cupy: Any) -> None:
        self._runtime: Any = cupy.cuda.runtime
        self.handle = b""
        try:
            self.own: Any = cupy.cuda.Event(disable_timing=True, interprocess=True)
            self.handle = bytes(self._runtime.ipcGetEventHandle(self.own.ptr))
        except self._runtime.CUDARuntimeError:
            self.own = cupy.cuda.Event(disable_timing=True)


class Expander:
    def __init__(self, cupy: Any, module: Any) -> None:
        self._runtime: Any = cupy.cuda.runtime
        found = (module.get_function(name) for name in kernels.EXPANSION)
        self._sections, self._blocks, self._lanes, self._merge = found

    def expand(self, worker: Worker, sections: Sections, packed_bytes: int, pool: int) -> None:
        """Their packed bytes are in the worker's staging. Not waited for."""
        scratch, address = worker.scratch(STAGING_BYTES), worker.staging_address
        self._runtime.memcpyAsync(scratch, address, packed_bytes, TO_DEVICE, worker.stream.ptr)
        np.copyto(worker.table_bytes[: sections.nbytes].view(SECTION), sections)
        arguments = (
            np.uint64(worker.table_address),
            np.uint32(len(sections)),
            np.uint64(scratch),
            np.uint64(pool),
        )
        blocks = min(len(sections), kernels.BLOCKS_MAX)
        with worker.stream:
            self._sections((blocks,), (kernels.THREADS,), arguments)

    def hashes(self, worker: Worker, pieces: Sequence[Extents], pool: int) -> list[int]:
        found: list[int] = []
        for begin in range(0, len(pieces), PIECES_MAX):
            found += self._hashes(worker, pieces[begin : begin + PIECES_MAX], pool)
        return found

    def _hashes(self, worker: Worker, pieces: Sequence[Extents], pool: int) -> list[int]:
        tables = hash_tables(pieces)
        count, sums_bytes = len(pieces), tables.blocks * SUM_BYTES
        sums = worker.scratch(sums_bytes + count * (LANE_BYTES + 8))
        lanes, hashes = sums + sums_bytes, sums + sums_bytes + count * LANE_BYTES
        stretches, rows = tables.stretches.view(np.uint8), tables.pieces.view(np.uint8)
        np.copyto(worker.table_bytes[: len(rows)], rows)
        np.copyto(worker.staging[: len(stretches)], stretches)
        counts, own = np.uint32(count), np.uint64(pool)
        table, stretch = np.uint64(worker.table_address), np.uint64(worker.staging_address)
        numbers = (np.uint32(len(tables.stretches)), np.uint64(tables.blocks))
        with worker.stream:
            grid, threads = (kernels.BLOCKS_MAX,), (kernels.THREADS,)
            self._blocks(grid, threads, (stretch, *numbers, own, np.uint64(sums)))
            lane = (table, counts, own, np.uint64(sums), np.uint64(lanes))
            self._lanes(grid, (LANE_THREADS,), lane)
            self._merge(grid, (LANE_THREADS,), (table, counts, np.uint64(lanes), np.uint64(hashes)))
        size = count * 8
        self._runtime.memcpyAsync(worker.staging_address, hashes, size, TO_HOST, worker.stream.ptr)
        worker.stream.synchronize()
        values: list[int] = worker.staging[:size].view(np.uint64).tolist()
        return values
