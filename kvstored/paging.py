"""Pages of shared mappings: mapped before they are used, and huge where that is asked for."""

import ctypes
import errno
import mmap
import os
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

STEP_BYTES = 2 << 20
"""About a millisecond of faults: whoever needs the process's table of mappings meanwhile waits no longer."""
HUGE_BYTES = 2 << 20
_MADV_POPULATE_READ = 22
_PAGE_BYTES = 4096


class HugePages(StrEnum):
    """`ADVISE`: transparent ones, where the kernel's shmem_enabled is advise or more. `HUGETLB`: of 2 MiB each, which the operator reserved."""

    OFF = "off"
    ADVISE = "advise"
    HUGETLB = "hugetlb"

    @property
    def memfd_flags(self) -> int:
        if self is HugePages.HUGETLB:
            return os.MFD_HUGETLB | os.MFD_HUGE_2MB
        return 0


def back_by_huge(memory: mmap.mmap) -> None:
    """Asks for transparent huge pages and takes them now: later the file has small ones. Where the kernel has none, or is older
    than 5.14, nothing is done. Raises OSError when memory ends."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return
    whole = np.frombuffer(memory, dtype=np.uint8)
    populate = Populate()
    for start in range(0, whole.size, STEP_BYTES):
        code = populate.tried(whole[start : start + STEP_BYTES])
        if code and populate.is_known:
            raise OSError(code, os.strerror(code))


class Populate:
    """MADV_POPULATE_READ (Linux 5.14), called so that the interpreter lock is free meanwhile; else a read of every page.

    Shared memory is mapped for writing by that too, with pages that exist sixteen at a time: 0.25 us a page where populating for writing takes 0.66.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._madvise = library.madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.is_known = True

    def __call__(self, memory: Bytes) -> None:
        if not self.is_known or self.tried(memory):
            touched(memory)

    def all(self, memory: Bytes) -> None:
        """In steps, for others that change the process's mappings."""
        for start in range(0, memory.size, STEP_BYTES):
            self(memory[start : start + STEP_BYTES])

    def tried(self, memory: Bytes) -> int:
        """0, or the error; changes no contents."""
        address = memory.__array_interface__["data"][0]
        if not self._madvise(address, memory.size, _MADV_POPULATE_READ):
            return 0
        code = ctypes.get_errno()
        self.is_known = code not in (errno.EINVAL, errno.ENOSYS)
        return code


def touched(memory: Bytes) -> int:
    """Read one byte of every page: for shared memory that maps it for writing too."""
    return int(memory[::_PAGE_BYTES].max())
