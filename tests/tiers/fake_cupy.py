# ruff: noqa: N802, N815 - the names are CuPy's
"""The part of CuPy that the tiers use, over host memory: device memory is malloc's, kernels are those of `kernels.cu` compiled for the host.

Work is done when its stream or an event of it is waited for, so memory that is written to before is seen as it would be. What it refuses, CUDA would
refuse: copies and kernels that touch host memory that is neither pinned nor registered, ranges that are registered twice, memory beyond the
device's. Names and signatures are those of CuPy 13 and 14 (tests marked gpu hold them to the real one).
"""

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from kvstored.codec.unpacked import SECTION
from kvstored.tiers import kernels
from kvstored.tiers.expansion import PIECE, STRETCH, SUM_BYTES

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]

OUT_OF_MEMORY, INVALID, LOST, ALREADY_REGISTERED = 2, 1, 46, 712


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class FakeRuntime:
    """`device_bytes`: of each device. `lost`: every call that reaches the device fails from now on."""

    CUDARuntimeError = CUDARuntimeError
    cudaDevAttrCanUseHostPointerForRegisteredMem = 91
    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self, devices: int, device_bytes: int) -> None:
        self.devices = devices
        self.device_bytes = device_bytes
        self.lost = self.can_share = False
        self.reaches_host = 1
        self.allocated: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.events = 0
        self.streams: dict[int, FakeStream] = {}
        self._current = threading.local()

    @property
    def current(self) -> "list[FakeStream]":
        """Of this thread, innermost last."""
        if not hasattr(self._current, "streams"):
            self._current.streams = []
        found: list[FakeStream] = self._current.streams
        return found

    def getDeviceCount(self) -> int:
        return self.devices

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{device:02x}:00.0"

    def deviceGetByPCIBusId(self, bus_id: str) -> int:
        return int(bus_id[5:7], 16)

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        assert attribute == self.cudaDevAttrCanUseHostPointerForRegisteredMem
        return self.reaches_host

    def getDeviceProperties(self, device: int) -> dict[str, bytes]:
        return {"name": b"Fake GPU"}

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 13000

    def malloc(self, size: int) -> int:
        if sum(self.allocated.values()) + size > self.device_bytes:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        address = int(_libc.malloc(size))
        self.allocated[address] = size
        return address

    def free(self, address: int) -> None:
        del self.allocated[address]
        _libc.free(address)

    def hostAlloc(self, size: int, flags: int) -> int:
        assert flags == 3
        address = int(_libc.malloc(size))
        self.pinned[address] = size
        return address

    def freeHost(self, address: int) -> None:
        del self.pinned[address]
        _libc.free(address)

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        assert flags == 3
        if address in self.registered:
            raise CUDARuntimeError(ALREADY_REGISTERED)
        self.registered[address] = size

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind in (1, 2, 3, 4)
        self.reach(source, size)
        self.reach(to, size)
        self.calls.append(f"memcpy {size}")
        self.streams[stream].later(lambda: ctypes.memmove(to, source, size))

    def ipcGetMemHandle(self, address: int) -> bytes:
        assert address in self.allocated
        if not self.can_share:
            raise CUDARuntimeError(INVALID)
        return address.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        assert flags == self.cudaIpcMemLazyEnablePeerAccess
        self.calls.append("ipc open")
        return int.from_bytes(handle, "little")

    def ipcGetEventHandle(self, event: int) -> bytes:
        if not self.can_share:
            raise CUDARuntimeError(INVALID)
        return event.to_bytes(64, "little")

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        assert len(handle) == 64
        self.calls.append("event open")
        return int.from_bytes(handle, "little")

    def eventDestroy(self, event: int) -> None:
        self.calls.append("event destroyed")

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self.calls.append(f"stream {stream} waits for {event}")

    def ipcCloseMemHandle(self, address: int) -> None:
        self.calls.append("ipc close")

    # what a device would notice

    def reach(self, address: int, size: int) -> None:
        """Memory that one copy touches: within one range that was allocated, pinned or registered."""
        if self.lost:
            raise CUDARuntimeError(LOST)
        ranges = [*self.pinned.items(), *self.registered.items(), *self.allocated.items()]
        if not any(a <= address and address + size <= a + s for a, s in ranges):
            raise CUDARuntimeError(INVALID)

    def own(self, address: int, size: int) -> None:
        if not any(a <= address and address + size <= a + s for a, s in self.allocated.items()):
            raise CUDARuntimeError(INVALID)


class FakeCupy:
    """Stands in `sys.modules["cupy"]`; `host`: the kernels compiled for the host."""

    __version__ = "fake"

    def __init__(self, runtime: FakeRuntime, host: ctypes.CDLL) -> None:
        self._runtime, self._host = runtime, host
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda ordinal: FakeDevice(runtime, ordinal),
            Event=lambda **options: FakeEvent(runtime, options),
            Stream=lambda **options: FakeStream(runtime, options),
            UnownedMemory=FakeMemory,
            MemoryPointer=lambda memory, offset: (memory, offset),
        )
        self.concatenate = np.concatenate

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:
        assert "copy_runs" in code
        return SimpleNamespace(get_function=self._function)

    def ndarray(self, shape: tuple[int], dtype: Any, memptr: Any) -> Any:
        memory, offset = memptr
        array = np.ctypeslib.as_array(
            ctypes.cast(memory.address + offset, ctypes.POINTER(ctypes.c_uint8)), shape
        ).view(Kept)
        array.memory = memory
        return array

    def _function(self, name: str) -> Callable[..., None]:
        widths, check = KERNELS[name]

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[np.generic, ...]) -> None:
            found = tuple(argument.dtype.itemsize for argument in arguments)
            assert found == widths, "arguments of other sizes than the kernel's"
            values = [int(argument) for argument in arguments]
            check(self._runtime, values)
            kinds = {4: ctypes.c_uint, 8: ctypes.c_ulonglong}
            passed = [kinds[width](value) for width, value in zip(widths, values, strict=True)]
            call = getattr(self._host, f"host_{name}")
            stream = self._runtime.current[-1]
            stream.later(lambda: call(grid[0], block[0], *passed))

        return launch


def table_at(address: int, count: int, dtype: np.dtype[Any]) -> Any:
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, (count * dtype.itemsize,)).view(dtype)


def _check_copies(runtime: FakeRuntime, values: list[int]) -> None:
    table, count, pool, _ = values
    runtime.reach(table, count * kernels.RUN.itemsize)
    for host, offset, size, _ in table_at(table, count, kernels.RUN).tolist():
        runtime.reach(host, size)
        runtime.own(pool + offset, size)
    runtime.calls.append(f"kernel {count}")


def _check_sections(runtime: FakeRuntime, values: list[int]) -> None:
    table, count, packed, pool = values
    runtime.reach(table, count * SECTION.itemsize)
    for row in table_at(table, count, SECTION):
        size = (int(row["end"]) - int(row["begin"])) * int(row["width"])
        runtime.own(pool + int(row["target"]), size)
        runtime.own(packed + int(row["source"]), 1)
    runtime.calls.append(f"expand {count}")


def _check_stretches(runtime: FakeRuntime, values: list[int]) -> None:
    table, count, blocks, _, sums = values
    runtime.reach(table, count * STRETCH.itemsize)
    if blocks:
        runtime.own(sums, blocks * SUM_BYTES)


def _check_pieces(runtime: FakeRuntime, values: list[int]) -> None:
    table, count = values[:2]
    runtime.reach(table, count * PIECE.itemsize)
    runtime.own(values[-1], count * 8)
    runtime.calls.append("hash")


KERNELS: dict[str, tuple[tuple[int, ...], Callable[[FakeRuntime, list[int]], None]]] = {
    "copy_runs": ((8, 4, 8, 4), _check_copies),
    "expand_sections": ((8, 4, 8, 8), _check_sections),
    "hash_blocks": ((8, 4, 8, 8, 8), _check_stretches),
    "hash_lanes": ((8, 4, 8, 8, 8), _check_pieces),
    "hash_merge": ((8, 4, 8, 8), _check_pieces),
}
"""Sizes of the arguments, and what of their memory a device would refuse."""


class Kept(np.ndarray[Any, Any]):
    """An array that keeps its memory's owner, as CuPy's do, through slices too."""

    memory: Any = None

    def __array_finalize__(self, other: Any) -> None:
        self.memory = getattr(other, "memory", None)


class FakeMemory:
    def __init__(self, address: int, size: int, owner: object, device: int) -> None:
        self.address, self.owner = address, owner


class FakeDevice:
    def __init__(self, runtime: FakeRuntime, ordinal: int) -> None:
        self._runtime = runtime
        assert ordinal < runtime.devices

    def synchronize(self) -> None:
        self._runtime.calls.append("device synchronized")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeStream:
    """What is put on it happens when somebody waits for it, and not before."""

    def __init__(self, runtime: FakeRuntime, options: dict[str, object]) -> None:
        assert options.get("non_blocking"), "waits for the default stream"
        assert options.get("priority", 0) == 0, "before the engine"
        self._runtime = runtime
        self._work: list[Callable[[], object]] = []
        self.done = 0
        self.ptr = 7 + len(runtime.streams)
        runtime.streams[self.ptr] = self

    def later(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    @property
    def end(self) -> int:
        return self.done + len(self._work)

    def run(self, upto: int) -> None:
        while self.done < upto:
            self._work.pop(0)()
            self.done += 1

    def synchronize(self) -> None:
        self._runtime.calls.append("synchronized")
        self.run(self.end)

    def __enter__(self) -> Self:
        self._runtime.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.current.pop()


class FakeEvent:
    def __init__(self, runtime: FakeRuntime, options: dict[str, object]) -> None:
        assert options["disable_timing"], "CUDA shares no events that take the time"
        runtime.events += 1
        self._runtime, self.ptr = runtime, 1000 + runtime.events
        self._recorded: tuple[FakeStream, int] | None = None

    def record(self, stream: FakeStream) -> None:
        self._runtime.calls.append("recorded")
        self._recorded = stream, stream.end

    def synchronize(self) -> None:
        if self._runtime.lost:
            raise CUDARuntimeError(LOST)
        self._runtime.calls.append("event synchronized")
        assert self._recorded is not None
        stream, upto = self._recorded
        stream.run(upto)
