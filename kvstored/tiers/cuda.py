"""A GPU through CuPy: the pool, streams of its own at the lowest priority, and copies of thousands of pieces as one submission.

The only module that imports CuPy, when a device is made: where the tier is off nothing of CUDA is loaded. Whatever CUDA says becomes a typed
error here: NoSpace where memory lacks, Unavailable for the rest, after which the device is not used any more.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstored.core.devices import HandleKind
from kvstored.errors import NoSpace, Unavailable
from kvstored.tiers import kernels, nvml
from kvstored.tiers import views as memory
from kvstored.tiers.cuda_worker import (
    PORTABLE_AND_MAPPED,
    RUNS_MAX,
    SECTIONS_MAX,
    STAGING_BYTES,
    Expander,
    Worker,
)
from kvstored.tiers.device import Handle, Moves
from kvstored.tiers.expansion import Expansion
from kvstored.tiers.submission import Pinned, Submission, planned

LARGE_BYTES = 512 << 10
"""Runs from this size on go to the copy engines, one call each, which costs less than the time that they take; smaller ones to the kernel."""
OUT_OF_MEMORY = 2
BY_ADDRESS = 4
"""The kind of cudaMemcpy that finds out from the addresses which way it goes."""


class CudaDevice:
    def __init__(self, ordinal: int, size_bytes: int) -> None:
        try:
            import cupy  # noqa: PLC0415 - see the module
        except Exception as error:  # a wheel for another CUDA fails in any way it likes
            wanted = "install the extra cuda12 or cuda13, whichever the driver has"
            raise Unavailable(f"cupy cannot be imported: {error}; {wanted}") from error
        self._cupy: Any = cupy  # ships no types, so do all that are its
        self._runtime: Any = cupy.cuda.runtime
        self._ordinal = ordinal
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._pinned = Pinned()
        self._registered: list[int] = []
        with self._translated("cannot be opened"):
            count = self._runtime.getDeviceCount()
            if ordinal >= count:
                raise Unavailable(f"no such gpu: device={ordinal} devices={count}")
            self._bus_id = str(self._runtime.deviceGetPCIBusId(ordinal))
            used_before = nvml.used_bytes(self._bus_id)
            with self._current():
                self._open()
            self._footprint_bytes = nvml.used_bytes(self._bus_id) - used_before - size_bytes

    def _open(self) -> None:
        attribute = self._runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        self._reaches_host = bool(self._runtime.deviceGetAttribute(attribute, self._ordinal))
        module = self._cupy.RawModule(code=kernels.source(), options=("--std=c++14",))
        self._copy_runs: Any = module.get_function(kernels.COPY_RUNS)
        self._expander = Expander(self._cupy, module)
        self._pool = int(self._runtime.malloc(self._size_bytes))
        self.handle = self._handle()

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def footprint_bytes(self) -> int:
        """As NVML counts it, other processes that came or went meanwhile included; 0 where there is no NVML."""
        return max(0, self._footprint_bytes)

    def _handle(self) -> Handle:
        """NOT_SHARED where the driver does not share memory: with MIG, in some containers and virtual machines."""
        device = self._bus_id.encode()
        try:
            payload = bytes(self._runtime.ipcGetMemHandle(self._pool))
        except self._runtime.CUDARuntimeError:
            return Handle(HandleKind.NOT_SHARED, b"", device)
        return Handle(HandleKind.CUDA_IPC, payload, device)

    def upload(self, moves: Moves) -> None:
        for submission in planned(moves, self._pinned, STAGING_BYTES, RUNS_MAX):
            with self._worker() as worker:
                for begin, address, size in submission.staged:
                    source = memory.at_address(address, size)
                    np.copyto(worker.staging[begin : begin + size], source)
                self._submit(worker, submission, kernels.UPLOAD)

    def download(self, moves: Moves) -> None:
        for submission in planned(moves, self._pinned, STAGING_BYTES, RUNS_MAX):
            with self._worker() as worker:
                self._submit(worker, submission, kernels.DOWNLOAD)
                for begin, address, size in submission.staged:
                    target = memory.at_address(address, size)
                    np.copyto(target, worker.staging[begin : begin + size])

    def expand(self, expansion: Expansion) -> list[int]:
        with self._worker() as worker:
            for window in expansion.windows(STAGING_BYTES, SECTIONS_MAX):
                np.copyto(worker.staging[: len(window.packed)], window.packed)
                with self._translated("is lost"), self._current():
                    self._expander.expand(worker, window.sections, len(window.packed), self._pool)
                    worker.stream.synchronize()  # the staging buffer is free again
            with self._translated("is lost"), self._current():
                return self._expander.hashes(worker, expansion.extents, self._pool)

    def register(self, chunk: NDArray[np.uint8]) -> None:
        if not self._reaches_host:
            raise NoSpace("this gpu does not reach pinned host memory: copies are staged")
        address = chunk.ctypes.data
        try:
            with self._current():
                self._runtime.hostRegister(address, len(chunk), PORTABLE_AND_MAPPED)
        except self._runtime.CUDARuntimeError as error:
            raise NoSpace(f"memory cannot be pinned: bytes={len(chunk)}: {error}") from error
        self._registered.append(address)
        self._pinned.add(address, len(chunk))

    def share(self, chunk: NDArray[np.uint8]) -> None:
        if self._reaches_host:
            self._pinned.add(chunk.ctypes.data, len(chunk))

    def close(self) -> None:
        """What a lost device does not give back ends with the process."""
        runtime = self._runtime
        with suppress(runtime.CUDARuntimeError), self._current():
            for address in self._registered:
                runtime.hostUnregister(address)
            for worker in self._workers:
                worker.free()
            runtime.free(self._pool)
        self._workers, self._idle = [], []

    # Private

    def _submit(self, worker: Worker, submission: Submission, direction: np.uint32) -> None:
        """Everything is on its way before the one wait."""
        runs = submission.runs
        first_staged = len(runs) - len(submission.staged)
        runs["host"][first_staged:] += np.uint64(worker.staging_address)
        is_large = runs["size"] >= LARGE_BYTES
        with self._translated("is lost"), self._current():
            self._copy_small(worker, runs[~is_large], direction)
            for host, offset, size, _ in runs[is_large].tolist():
                self._copy_large(worker, host, self._pool + offset, size, direction)
            worker.stream.synchronize()

    def _copy_small(self, worker: Worker, runs: NDArray[np.void], direction: np.uint32) -> None:
        if not len(runs):
            return
        tiles = kernels.number_tiles(runs)
        np.copyto(worker.table[: len(runs)], runs)
        table, pool = np.uint64(worker.table_address), np.uint64(self._pool)
        blocks = min(tiles, kernels.BLOCKS_MAX)
        arguments = (table, np.uint32(len(runs)), pool, direction)
        with worker.stream:
            self._copy_runs((blocks,), (kernels.THREADS,), arguments)

    def _copy_large(
        self, worker: Worker, host: int, own: int, size: int, direction: np.uint32
    ) -> None:
        to, source = (own, host) if direction == kernels.UPLOAD else (host, own)
        self._runtime.memcpyAsync(to, source, size, BY_ADDRESS, worker.stream.ptr)

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        """One that an exception has left is not used again: its stream may be broken."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            with self._translated("has no staging"), self._current():
                worker = Worker(self._cupy)
            with self._lock:
                self._workers.append(worker)
        try:
            yield worker
        except NoSpace:
            self._rest(worker)
            raise
        self._rest(worker)

    def _rest(self, worker: Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    @contextmanager
    def _current(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self._ordinal):
            yield

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Unavailable, NoSpace):
            raise
        except self._runtime.CUDARuntimeError as error:
            kind = NoSpace if error.status == OUT_OF_MEMORY else Unavailable
            raise kind(f"gpu {what}: device={self._ordinal}: {error}") from error
        except Exception as error:  # the driver and NVRTC have errors of their own
            raise Unavailable(f"gpu {what}: device={self._ordinal}: {error}") from error
