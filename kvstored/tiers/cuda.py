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
        with self.translated("cannot be opened"):
            count = self._runtime.getDeviceCount()
            if ordinal >= count:
                raise Unavailable(f"no such gpu: device={ordinal} devices={count}")
            self._bus_id = str(self._runtime.deviceGetPCIBusId(ordinal))
            used_before = nvml.used_bytes(self._bus_id)
            with self.current():
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
        unpacking = sum(worker.scratch_bytes for worker in self._workers)
        return max(0, self._footprint_bytes) + unpacking

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

    def copies(self) -> "CudaCopies":
        return CudaCopies(self, self._pinned)

    def expand(self, expansion: Expansion) -> list[int]:
        with self._worker() as worker:
            for window in expansion.windows(STAGING_BYTES, SECTIONS_MAX):
                np.copyto(worker.staging[: len(window.packed)], window.packed)
                with self.translated("is lost"), self.current():
                    self._expander.expand(worker, window.sections, len(window.packed), self._pool)
                    worker.stream.synchronize()  # the staging buffer is free again
            with self.translated("is lost"), self.current():
                return self._expander.hashes(worker, expansion.extents, self._pool)

    def register(self, chunk: NDArray[np.uint8]) -> None:
        if not self._reaches_host:
            raise NoSpace("this gpu does not reach pinned host memory: copies are staged")
        address = chunk.ctypes.data
        try:
            with self.current():
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
        with suppress(runtime.CUDARuntimeError), self.current():
            for address in self._registered:
                runtime.hostUnregister(address)
            for worker in self._workers:
                worker.free()
            runtime.free(self._pool)
        self._workers, self._idle = [], []

    # For copies in order

    def _submit(self, worker: Worker, submission: Submission, direction: np.uint32) -> None:
        """Everything is on its way before the one wait."""
        with self.translated("is lost"), self.current():
            self.begin(worker, submission, direction)
            worker.stream.synchronize()

    def begin(
        self, worker: Worker, submission: Submission, direction: np.uint32, row: int = 0
    ) -> None:
        """The submission on the worker's stream, not waited for; the device is current. `row`: of the worker's table, from which on it is free."""
        runs = submission.runs
        first_staged = len(runs) - len(submission.staged)
        runs["host"][first_staged:] += np.uint64(worker.staging_address)
        is_large = runs["size"] >= LARGE_BYTES
        self._copy_small(worker, runs[~is_large], direction, row)
        for host, offset, size, _ in runs[is_large].tolist():
            self._copy_large(worker, host, self._pool + offset, size, direction)

    def _copy_small(
        self, worker: Worker, runs: NDArray[np.void], direction: np.uint32, row: int
    ) -> None:
        if not len(runs):
            return
        tiles = kernels.number_tiles(runs)
        np.copyto(worker.table[row : row + len(runs)], runs)
        address = np.uint64(worker.table_address + row * kernels.RUN.itemsize)
        blocks = min(tiles, kernels.BLOCKS_MAX)
        arguments = (address, np.uint32(len(runs)), np.uint64(self._pool), direction)
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
        worker = self.take()
        try:
            yield worker
        except NoSpace:
            self.rest(worker)
            raise
        self.rest(worker)

    def take(self) -> Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        with self.translated("has no staging"), self.current():
            worker = Worker(self._cupy)
        with self._lock:
            self._workers.append(worker)
        return worker

    def rest(self, worker: Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self._ordinal):
            yield

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Unavailable, NoSpace):
            raise
        except self._runtime.CUDARuntimeError as error:
            if error.status == OUT_OF_MEMORY:
                raise NoSpace(f"gpu lacks memory: device={self._ordinal}: {error}") from error
            raise Unavailable(f"gpu {what}: device={self._ordinal}: {error}") from error
        except Exception as error:  # the driver and NVRTC have errors of their own
            raise Unavailable(f"gpu {what}: device={self._ordinal}: {error}") from error


class CudaCopies:
    """On one stream. The table of the kernel and the staging memory are used up before they are waited for."""

    def __init__(self, device: CudaDevice, pinned: Pinned) -> None:
        self._device, self._pinned = device, pinned
        self._worker = device.take()
        self._row = self._submitted = self._waited = 0
        self._is_staging = False

    def submit(self, moves: Moves) -> bytes:
        device, worker = self._device, self._worker
        with device.translated("is lost"), device.current():
            for submission in planned(moves, self._pinned, STAGING_BYTES, RUNS_MAX):
                self._make_room(submission)
                for begin, address, size in submission.staged:
                    np.copyto(
                        worker.staging[begin : begin + size], memory.at_address(address, size)
                    )
                    self._is_staging = True
                device.begin(worker, submission, kernels.UPLOAD, self._row)
                self._row += len(submission.runs)
            event = worker.event(self._submitted)
            event.own.record(worker.stream)
        self._submitted += 1
        return event.handle

    def _make_room(self, submission: Submission) -> None:
        is_full = self._row + len(submission.runs) > RUNS_MAX
        if is_full or (submission.staged and self._is_staging):
            self._worker.stream.synchronize()
            self._row, self._is_staging = 0, False

    def wait(self, number: int) -> None:
        with self._device.translated("is lost"), self._device.current():
            self._worker.event(number).own.synchronize()
        self._waited = number + 1

    def close(self) -> None:
        """A stream on which something failed is not used again."""
        if self._waited == self._submitted:
            self._device.rest(self._worker)
