"""Maps the pages of new mappings before they are used, in the background.

The daemon's memory is backed already, but a process pays a fault for each page that it touches first: a first put into a fresh mapping took
4 to 12 times as long as a later one. Contents are never changed; what fails is left to be faulted in by use.
"""

import threading
from collections import deque
from collections.abc import Callable

from kvstored.paging import STEP_BYTES, Bytes, Populate


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
