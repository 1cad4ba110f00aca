"""Pools of a daemon's GPU memory, mapped into this process: arrays over leased blocks, without a copy.

CuPy is imported when the first pool of a real GPU is mapped. Its arrays have `__cuda_array_interface__` and `__dlpack__`, by which PyTorch and
JAX take them as they are; a stand-in's are numpy's. A mapping ends when nothing refers to it any more: memory of a daemon that is gone is
freed only then.
"""

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvstored.client.results import Blocks
from kvstored.client.runs import blocks_made
from kvstored.clock import SystemClock
from kvstored.errors import Corrupt, DeadlineExceeded, Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import Pieces

_LOOK_S = 0.0005
GpuArray = Any
"""cupy.ndarray, which has no types, or numpy's."""
Fetch = Callable[[int], pb.GpuPoolResponse]


class Pool(Protocol):
    """`array`: all of its bytes."""

    array: GpuArray

    def joined(self, runs: Sequence[GpuArray]) -> GpuArray:
        """One array of its own."""
        ...

    def settle(self) -> None:
        """Wait until the GPU is done with what this process has asked of it so far."""
        ...

    def wait_event(self, handle: bytes, stream: int, timeout_s: float) -> None:
        """What is put on this stream from now on comes after the event. Unavailable where the event cannot be opened here."""
        ...


class Pools:
    """Pools by number, each mapped once. Thread-safe."""

    def __init__(self) -> None:
        self._epoch = 0
        self._mapped: dict[int, Pool] = {}
        self._lock = threading.Lock()

    def mapped(self, segment: int, epoch: int, fetch: Fetch) -> Pool:
        """`fetch` asks the daemon how; Unavailable where the pool cannot be shared with this process."""
        with self._lock:
            if epoch != self._epoch:
                self._epoch, self._mapped = epoch, {}
            if segment not in self._mapped:
                self._mapped[segment] = _pool_of(fetch(segment))
            return self._mapped[segment]

    def clear(self) -> None:
        with self._lock:
            self._mapped = {}


def blocks_on_gpu(pieces: Pieces, pools: dict[int, Pool], hits: Sequence[bool]) -> Blocks:
    """Arrays over the pools; a piece in several extents is copied, on its GPU: an array has one run of memory."""
    first, extents = pieces.first.tolist(), pieces.extents.tolist()
    flat: list[GpuArray | None] = []
    for i in range(len(first) - 1):
        mine = extents[first[i] : first[i + 1]]
        runs = [_run_of(pools[segment], offset, length) for segment, offset, length in mine]
        whole = runs[0] if len(runs) == 1 else None
        flat.append(pools[mine[0][0]].joined(runs) if len(runs) > 1 else whole)
    return blocks_made(flat, hits)


def _run_of(pool: Pool, offset: int, length: int) -> GpuArray:
    run = pool.array[offset : offset + length]
    if offset < 0 or run.size != length:
        raise Corrupt(f"a place lies outside its pool: offset={offset} bytes={length}")
    return run


def _pool_of(facts: pb.GpuPoolResponse) -> Pool:
    if facts.kind == pb.HOST_FILE:
        return _HostPool(facts)
    if facts.kind == pb.CUDA_IPC:
        return _CudaPool(facts)
    raise Unavailable(
        "this gpu's memory cannot be shared here (MIG, or no common ipc): read from dram"
    )


class _HostPool:
    def __init__(self, facts: pb.GpuPoolResponse) -> None:
        try:
            with Path(facts.handle.decode()).open("rb") as file:
                mapping = mmap.mmap(
                    file.fileno(), facts.pool_bytes, mmap.MAP_SHARED, mmap.PROT_READ
                )
        except (OSError, ValueError) as error:
            raise Unavailable(f"the stand-in's pool cannot be mapped: {error}") from error
        self.array: GpuArray = np.frombuffer(mapping, dtype=np.uint8)

    def joined(self, runs: Sequence[GpuArray]) -> GpuArray:
        return np.concatenate(runs)

    def settle(self) -> None:
        """Reads of host memory are done when they return."""

    def wait_event(self, handle: bytes, stream: int, timeout_s: float) -> None:
        """A stand-in has no streams: the caller waits."""
        path, word, number = handle.decode().split()
        until_s = SystemClock().elapsed_s() + timeout_s
        try:
            with Path(path).open("rb") as file:
                words = np.frombuffer(
                    mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint64
                )
        except OSError as error:
            raise Unavailable(f"the stand-in's events cannot be mapped: {error}") from error
        while words[int(word)] < int(number):
            if SystemClock().elapsed_s() > until_s:
                raise DeadlineExceeded("the layers did not come in time")
            threading.Event().wait(_LOOK_S)


class _Mapping:
    """What every array over a pool keeps alive: with the last of them the mapping ends."""


def _destroy(runtime: Any, events: dict[bytes, int]) -> None:
    for event in events.values():
        with suppress(runtime.CUDARuntimeError):  # with its daemon it may be gone
            runtime.eventDestroy(event)


class _CudaPool:
    def __init__(self, facts: pb.GpuPoolResponse) -> None:
        try:
            import cupy  # noqa: PLC0415 - an engine without a GPU need not have it
        except Exception as error:  # a wheel for another CUDA fails in any way it likes
            raise Unavailable(f"cupy cannot be imported: {error}; read from dram") from error
        runtime = cupy.cuda.runtime
        self._cupy: Any = cupy
        self._events: dict[bytes, int] = {}
        """Opened once: the daemon records the same few again and again."""
        closing = weakref.finalize(self, _destroy, runtime, self._events)
        closing.atexit = False  # as below
        try:
            device = runtime.deviceGetByPCIBusId(facts.device.decode())
            self._device: Any = cupy.cuda.Device(device)
            with self._device:
                flags = runtime.cudaIpcMemLazyEnablePeerAccess
                address = runtime.ipcOpenMemHandle(facts.handle, flags)
                mapping = _Mapping()
                end = weakref.finalize(mapping, runtime.ipcCloseMemHandle, address)
                end.atexit = False  # CUDA may be gone by then, and takes the mapping with it
                memory = cupy.cuda.UnownedMemory(address, facts.pool_bytes, mapping, device)
                start = cupy.cuda.MemoryPointer(memory, 0)
                self.array: GpuArray = cupy.ndarray(
                    (facts.pool_bytes,), dtype=np.uint8, memptr=start
                )
        except (runtime.CUDARuntimeError, UnicodeDecodeError) as error:
            raise Unavailable(f"the pool cannot be mapped: {error}; read from dram") from error

    def joined(self, runs: Sequence[GpuArray]) -> GpuArray:
        with self._device:
            return self._cupy.concatenate(runs)

    def settle(self) -> None:
        self._device.synchronize()

    def wait_event(self, handle: bytes, stream: int, timeout_s: float) -> None:
        runtime = self._cupy.cuda.runtime
        try:
            with self._device:
                if handle not in self._events:
                    self._events[handle] = runtime.ipcOpenEventHandle(handle)
                runtime.streamWaitEvent(stream, self._events[handle])
        except runtime.CUDARuntimeError as error:
            raise Unavailable(f"an event of the daemon cannot be opened: {error}") from error
