"""The CuPy that is installed has every name that is used, with the arguments that it is called with. Needs no GPU."""

import inspect
import re

import pytest

pytestmark = pytest.mark.gpu

CALLS = {
    "getDeviceCount": (),
    "getDeviceProperties": ("device",),
    "deviceGetPCIBusId": ("device",),
    "deviceGetByPCIBusId": ("pci_bus_id",),
    "deviceGetAttribute": ("attrib", "device"),
    "driverGetVersion": (),
    "runtimeGetVersion": (),
    "malloc": ("size",),
    "free": ("ptr",),
    "hostAlloc": ("size", "flags"),
    "freeHost": ("ptr",),
    "hostRegister": ("ptr", "size", "flags"),
    "hostUnregister": ("ptr",),
    "memcpyAsync": ("dst", "src", "size", "kind", "stream"),
    "ipcGetMemHandle": ("devPtr",),
    "ipcOpenMemHandle": ("handle", "flags"),
    "ipcCloseMemHandle": ("devPtr",),
    "ipcGetEventHandle": ("event",),
    "ipcOpenEventHandle": ("handle",),
    "eventDestroy": ("event",),
    "streamWaitEvent": ("stream", "event", "flags"),
}
"""Of `cupy.cuda.runtime`: what Cython wrote into their docstrings."""
NUMBERS = {
    "cudaDevAttrCanUseHostPointerForRegisteredMem": 91,
    "cudaIpcMemLazyEnablePeerAccess": 1,
    "hostAllocPortable": 1,
    "hostAllocMapped": 2,
    "memcpyHostToDevice": 1,
    "memcpyDeviceToHost": 2,
    "memcpyDefault": 4,
}


@pytest.fixture(autouse=True)
def _gpu() -> None:
    """None is needed here, unlike by the tests beside this one."""


@pytest.fixture(name="cupy")
def _cupy():  # type: ignore[no-untyped-def]  # it ships no types
    return pytest.importorskip("cupy", exc_type=Exception)


@pytest.mark.parametrize("name", list(CALLS))
def test_calls_of_the_runtime_take_what_they_are_given(cupy, name: str) -> None:  # type: ignore[no-untyped-def]  # as above
    found = re.match(rf"{name}\((.*?)\)", getattr(cupy.cuda.runtime, name).__doc__ or "")
    assert found is not None, "no signature to look at"
    names = [part.split("=")[0].split()[-1] for part in found[1].split(",") if part.strip()]
    assert tuple(names) == CALLS[name]


@pytest.mark.parametrize(("name", "value"), NUMBERS.items())
def test_numbers_are_cuda_s(cupy, name: str, value: int) -> None:  # type: ignore[no-untyped-def]  # as above
    assert getattr(cupy.cuda.runtime, name) == value


def test_objects_take_what_they_are_given(cupy) -> None:  # type: ignore[no-untyped-def]  # as above
    event = inspect.signature(cupy.cuda.Event).parameters
    assert {"disable_timing", "interprocess"} <= set(event)
    assert {"non_blocking", "priority"} <= set(inspect.signature(cupy.cuda.Stream).parameters)
    assert all(hasattr(cupy.cuda.Event, each) for each in ("record", "synchronize"))
    assert "intptr_t ptr, size_t size, owner, int device_id" in cupy.cuda.UnownedMemory.__doc__
    assert "BaseMemory mem, ptrdiff_t offset" in cupy.cuda.MemoryPointer.__doc__
    assert "str code=None" in cupy.RawModule.__doc__
    assert "tuple options=()" in cupy.RawModule.__doc__
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)
    for name in ("concatenate", "from_dlpack", "asnumpy", "ndarray"):
        assert hasattr(cupy, name)


def test_the_kernels_compile_with_its_nvrtc(cupy) -> None:  # type: ignore[no-untyped-def]  # as above
    from cupy.cuda import nvrtc

    from kvstored.tiers import kernels

    program = nvrtc.createProgram(kernels.source(), "kernels.cu", [], [])
    nvrtc.compileProgram(program, ["--std=c++14", "--gpu-architecture=sm_90"])
    compiled = nvrtc.getCUBIN(program)
    assert all(name.encode() in compiled for name in (kernels.COPY_RUNS, *kernels.EXPANSION))
