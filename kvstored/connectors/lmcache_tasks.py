"""Tasks of one kind as LMCache's controllers want them: put in at once, done in threads, told by an event, fetched once."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")

log = logging.getLogger("kvstored.connectors")

TASKS_MAX = 256
"""On their way; more are answered at once by what they are without the daemon."""


class Notifier(Protocol):
    """LMCache's event notifier."""

    def notify(self) -> object: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Tasks(Generic[T]):
    """Thread-safe. Every task ends, by what it returned or, where it raised, by `otherwise`."""

    def __init__(self, name: str, notifier: Notifier, *, workers: int) -> None:
        self._name = name
        self._notifier = notifier
        self._threads = ThreadPoolExecutor(workers, f"kvstored-{name}")
        self._lock = threading.Lock()
        self._done: dict[int, T] = {}
        self._next = 0
        self._running = 0
        self._is_closed = False

    @property
    def event_fd(self) -> int:
        return self._notifier.fileno()

    def submit(self, call: Callable[[], T], otherwise: T) -> int:
        with self._lock:
            task = self._next
            self._next += 1
            is_taken = not self._is_closed and self._running < TASKS_MAX
            self._running += is_taken
            if is_taken:
                self._threads.submit(self._run, task, call, otherwise)
                return task
        self._end(task, otherwise)
        return task

    def run_unnoticed(self, call: Callable[[], object]) -> None:
        """Nobody waits for it; nothing happens after `close`."""
        with self._lock:
            if not self._is_closed:
                self._threads.submit(call)

    def pop(self, task: int) -> T | None:
        """Once."""
        with self._lock:
            return self._done.pop(task, None)

    def pop_all(self) -> dict[int, T]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Waits for what runs and drops what has not begun."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._notifier.close()

    def _run(self, task: int, call: Callable[[], T], otherwise: T) -> None:
        result = otherwise
        try:
            result = call()
        except Exception:
            log.exception("LMCache's task failed, a miss: task=%s", self._name)
        with self._lock:
            self._running -= 1
        self._end(task, result)

    def _end(self, task: int, result: T) -> None:
        with self._lock:
            self._done[task] = result
            if not self._is_closed:
                self._notifier.notify()
