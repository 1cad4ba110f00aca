"""Maps the pages of new mappings before they are used, in the background.

The daemon's memory is backed already, but a process pays a fault for each page that it touches first: a first put into a fresh mapping took
4 to 12 times as long as a later one. Contents are never changed; what fails is left to be faulted in by use.
"""

import ctypes
import errno
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

STEP_BYTES = 2 << 20
"""About a millisecond of faults: whoever needs the process's table of mappings meanwhile waits no longer."""
_MADV_POPULATE_WRITE = 23
_PAGE_BYTES = 4096


class Prefaulter:
    """One thread while there is something to do. `populate` maps the pages of one step."""

    def __init__(self, populate: Callable[[Bytes], object] | None = None) -> None:
        self._populate = populate or Populate()
        self._waiting: deque[Bytes] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, memory: Bytes) -> None:
        """Map all of `memory`, a whole page-aligned mapping, which lives at least until then. Returns at once."""
        with self._lock:
            if self._is_closed:
                return
            self._waiting.append(memory)
            if self._thread is None or not self._thread.is_alive():  # none is left after a fork
                self._thread = threading.Thread(
                    target=self._run, name="kvstored-prefault", daemon=True
                )
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether everything that was added is mapped, within `timeout_s`."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Stop after the step under way; what is waiting stays unmapped."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()

    def _run(self) -> None:
        while (memory := self._taken()) is not None:
            for start in range(0, memory.size, STEP_BYTES):
                if self._is_closed:
                    return
                self._populate(memory[start : start + STEP_BYTES])

    def _taken(self) -> Bytes | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._thread = None
            return None


class Populate:
    """MADV_POPULATE_WRITE (Linux 5.14), called so that the interpreter lock is free meanwhile; else a read of every page."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._madvise = library.madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.is_known = True

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
