"""Tells the daemon what was read without a message, in batches, so that its policy sees every hit."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvstored.core.types import BATCH_KEYS_MAX
from kvstored.errors import KvstoredError

Report = tuple[bytes, Sequence[bytes]]
"""Digest of a namespace, and keys of one length that were read together, head to tail."""

_EVERY_S = 0.1
_IDLE_S = 2.0
_WAITING_MAX = 65_536
"""Keys that wait to be told. More are not told: a hit that is not seen makes a block look colder than it is, nothing worse."""


class Reports:
    """`tell` sends one batch. The thread lives while there is something to tell, and for moments after. Thread-safe."""

    def __init__(self, tell: Callable[[bytes, Sequence[bytes]], None]) -> None:
        self.untold = 0
        self._tell = tell
        self._waiting: deque[Report] = deque()
        self._keys = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_closed = False

    def add(self, digest: bytes, keys: Sequence[bytes]) -> None:
        with self._lock:
            if self._keys + len(keys) > _WAITING_MAX or self._is_closed:
                self.untold += len(keys)
                return
            self._waiting.append((digest, keys))
            self._keys += len(keys)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvstored-reports", daemon=True)
                thread.start()
                self._thread = thread  # not before: where that was interrupted another one starts
            elif self._keys >= BATCH_KEYS_MAX:
                self._wake.set()

    def flush(self) -> None:
        """Tells what is waiting; what cannot be told is dropped."""
        with self._lock:
            waiting, self._waiting, self._keys = self._waiting, deque(), 0
        while waiting:
            digest, keys = _batch(waiting)
            try:
                self._tell(digest, keys)
            except KvstoredError:
                # the daemon went away, or forgot the namespace with all that was read of it
                self.untold += len(keys)

    def close(self) -> None:
        """Tells what waits; nothing is taken any more."""
        self.flush()
        self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        idle_s = 0.0
        while True:
            self._wake.wait(_EVERY_S)
            with self._lock:
                self._wake.clear()
                idle_s = 0.0 if self._waiting else idle_s + _EVERY_S
                if self._is_closed or idle_s > _IDLE_S:
                    self._thread = None
                    return
            self.flush()


def _batch(waiting: deque[Report]) -> Report:
    """As many reads of one namespace as fit into one call, the latest first: the daemon takes the first for the most recently used."""
    digest, keys = waiting.pop()
    batch = list(keys)
    while waiting:
        other, more = waiting[-1]
        if other != digest or len(more[0]) != len(batch[0]):
            break
        if len(batch) + len(more) > BATCH_KEYS_MAX:
            break
        waiting.pop()
        batch += more
    return digest, batch
