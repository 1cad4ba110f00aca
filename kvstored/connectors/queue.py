"""Blocks on their way to the daemon: a bounded queue and the one thread that empties it.

The arrays in it are its own: an engine's memory is never held, and never read after a call has returned.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstored.client import Keys
from kvstored.client.copying import Bytes

Done = Callable[[Keys, tuple[bool, ...]], None]
"""Told when a batch has been tried: per key whether it is stored."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one put; `rows` has one array a key and selected group, None where a block has nothing there."""

    keys: Keys
    rows: tuple[tuple[Bytes | None, ...], ...]
    groups: tuple[str, ...] | None
    shard: int
    ends_path: bool
    done: Done | None = None

    @property
    def size_bytes(self) -> int:
        return sum(array.size for row in self.rows for array in row if array is not None)


class StoreQueue:
    """Thread-safe; `store` is called by its thread and must not raise."""

    def __init__(self, store: Callable[[Batch], None], *, bytes_max: int) -> None:
        self._store = store
        self._bytes_max = bytes_max
        self._waiting: deque[Batch] = deque()
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def room_for(self, sizes: Sequence[int]) -> int:
        """How many of the first blocks fit now; one at least where the queue is empty."""
        with self._changed:
            if self._is_closed:
                return 0
            free_bytes = self._bytes_max - self._held_bytes
            fitting = 0
            for size in sizes:
                free_bytes -= size
                if free_bytes < 0:
                    break
                fitting += 1
            return fitting or int(self._held_bytes == 0 and len(sizes) > 0)

    def add(self, batch: Batch) -> None:
        with self._changed:
            self._waiting.append(batch)
            self._held_bytes += batch.size_bytes
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvstored-store", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Whether all of it was stored, or given up, in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held_bytes == 0, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Stores what waits, as long as there is time for it."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._held_bytes -= sum(batch.size_bytes for batch in self._waiting)
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            try:
                self._store(batch)
            finally:
                with self._changed:
                    self._held_bytes -= batch.size_bytes
                    self._changed.notify_all()

    def _next(self) -> Batch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return self._waiting.popleft() if self._waiting else None
