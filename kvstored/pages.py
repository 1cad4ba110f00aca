"""Maps pages of shared memory into this process before they are used: each costs a fault otherwise, wherever it is touched first."""

import ctypes
import errno

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

STEP_BYTES = 2 << 20
"""About a millisecond of faults: whoever needs the process's table of mappings meanwhile waits no longer."""
_MADV_POPULATE_WRITE = 23
_PAGE_BYTES = 4096


class Populate:
    """MADV_POPULATE_WRITE (Linux 5.14), called so that the interpreter lock is free meanwhile; else a read of every page."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._madvise = library.madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.is_known = True

    def all(self, memory: Bytes) -> None:
        """In steps, for others that change the process's mappings."""
        for start in range(0, memory.size, STEP_BYTES):
            self(memory[start : start + STEP_BYTES])

    def __call__(self, memory: Bytes) -> None:
        if self.is_known:
            address = memory.__array_interface__["data"][0]
            if not self._madvise(address, memory.size, _MADV_POPULATE_WRITE):
                return
            self.is_known = ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS)
        touched(memory)


def touched(memory: Bytes) -> int:
    """Read one byte of every page: for shared memory that maps it for writing too."""
    return int(memory[::_PAGE_BYTES].max())
