"""Keeps sessions alive while bytes of theirs are under way: a session from another host lives by being used, and one transfer may take longer
than that (`limits.resume_ttl`).
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstored.client.connection import Connection
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb

EVERY_S = 0.5
_IDLE_LOOKS = 20
_DAEMON_S = 5.0


class Transit:
    """Thread-safe. Its thread lives while something is under way, and for a while after; it calls only for what was so at its last look too."""

    def __init__(self, daemon: Path) -> None:
        self._path = str(daemon)
        self._lock = threading.Lock()
        self._under_way: Counter[bytes] = Counter()
        self._thread: threading.Thread | None = None

    @contextmanager
    def of(self, session: bytes) -> Iterator[None]:
        """While bytes of this session are received or sent."""
        with self._lock:
            self._under_way[session] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="transit", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._under_way[session] -= 1
                if not self._under_way[session]:
                    del self._under_way[session]

    def _run(self) -> None:
        known, idle = set[bytes](), 0
        while True:
            time.sleep(EVERY_S)
            with self._lock:
                sessions = set(self._under_way)
                idle = 0 if sessions else idle + 1
                if idle == _IDLE_LOOKS:
                    self._thread = None
                    return
            self._keep(sessions & known)
            known = sessions

    def _keep(self, sessions: set[bytes]) -> None:
        """What cannot be told is told by the transfer's own next call."""
        try:
            if not sessions:
                return
            connection = Connection(self._path, _DAEMON_S)
        except KvstoredError:
            return
        try:
            for session in sessions:
                request = pb.KeepAliveRequest(session=session)
                connection.call("KeepAlive", request, pb.KeepAliveResponse, _DAEMON_S)
        except KvstoredError:
            pass
        finally:
            connection.close()
