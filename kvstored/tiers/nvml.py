"""How much of a GPU's memory is in use, by NVIDIA's management library: the one figure that can be had before CUDA makes a context."""

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def used_bytes(bus_id: str, library: str = "libnvidia-ml.so.1") -> int:
    """Of the device at this PCI address; 0 where the library is not there or does not know it."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return 0
    device, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlInit_v2():
        return 0
    try:
        name = ctypes.c_char_p(bus_id.encode())
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(name, ctypes.byref(device)):
            return 0
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return 0
        return int(memory.used)
    finally:
        nvml.nvmlShutdown()
