"""A lane: the threads of one tier, bounded, with demand work overtaking background work.

The rule that everything here serves: *cancelling an await does not stop a thread*. Whoever gave memory to a piece of work may free it
only in the work's completion callback, which runs on the loop, exactly once, after the thread let go. Awaiting only watches.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from kvstored.errors import Busy

T = TypeVar("T")


class Urgency(IntEnum):
    """DEMAND: an engine waits for it. BACKGROUND: write-back, prefetch, scans, growth."""

    DEMAND = 0
    BACKGROUND = 1


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """How a piece of work ended: its value, or what it raised."""

    value: T | None
    error: BaseException | None

    def unwrap(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # None is then a legal T


class Running(Generic[T]):
    """Work on its way through a lane. Awaiting it is shielded: a cancelled waiter neither stops nor frees anything."""

    def __init__(self, future: "asyncio.Future[T]") -> None:
        self._future = future

    def __await__(self) -> Generator[object, None, T]:
        return asyncio.shield(self._future).__await__()

    def when_ended(self, callback: Callable[[Ended[T]], None]) -> None:
        """Call back on the loop, once, when the thread has let go. The only place to free what the work used."""
        self._future.add_done_callback(lambda future: callback(_ended(future)))


@dataclass(slots=True)
class _Job:
    work: Callable[[], object]
    future: "asyncio.Future[object]"


class Lane:
    """`threads` workers and a queue of at most `queue_max` waiting pieces of work.

    At most `background_max` threads (default: all but one) do background work at a time, so that demand always finds a thread soon.
    All methods are called on the loop; `close` joins the threads.
    """

    def __init__(self, name: str, *, threads: int, queue_max: int, background_max: int = 0) -> None:
        assert min(threads, queue_max) >= 1, f"lane without threads or queue: lane={name}"
        self.name = name
        self._queue_max = queue_max
        self._background_max = background_max or max(1, threads - 1)
        self._queues: tuple[deque[_Job], deque[_Job]] = (deque(), deque())
        self._background_now = 0
        self._busy_now = 0
        self._closed = False
        self._wake = threading.Condition()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T], urgency: Urgency = Urgency.DEMAND) -> Running[T]:
        """Queue `work`; Busy when the queue is full or the lane is closed (then nothing was begun).

        Half of the queue is kept for demand, so that a flood of background work never refuses an engine.
        """
        limit = self._queue_max if urgency is Urgency.DEMAND else max(1, self._queue_max // 2)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieved)
        job = _Job(work, future)  # type: ignore[arg-type]  # Future is invariant; the job only sets it
        with self._wake:
            if self._closed or self.queued >= limit:
                raise Busy(f"lane is full: lane={self.name} queued={self.queued} limit={limit}")
            self._queues[urgency].append(job)
            self._wake.notify()
        return Running(future)

    @property
    def threads(self) -> int:
        return len(self._threads)

    @property
    def queued(self) -> int:
        """Waiting pieces of work."""
        return len(self._queues[0]) + len(self._queues[1])

    def depths(self) -> dict[str, int]:
        """Waiting work by `lane:urgency`."""
        return {
            f"{self.name}:{urgency.name.lower()}": len(self._queues[urgency]) for urgency in Urgency
        }

    @property
    def running(self) -> int:
        """Pieces of work that a thread is at."""
        return self._busy_now

    def close(self) -> None:
        """Refuse further work, let the queued finish, and join the threads: blocks for as long as they need.

        Completion callbacks run when the loop turns next, so turn it once more after closing.
        """
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            job, urgency = taken
            value: object = None
            error: BaseException | None = None
            try:
                value = job.work()
            except BaseException as raised:  # noqa: BLE001 - crosses to the loop, which judges it
                error = raised
            with self._wake:
                self._busy_now -= 1
                self._background_now -= urgency is Urgency.BACKGROUND
                self._wake.notify()
            loop = job.future.get_loop()
            try:
                loop.call_soon_threadsafe(_set, job.future, value, error)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                return
            del taken, job, value, error  # hold no buffers while idle

    def _take(self) -> tuple[_Job, Urgency] | None:
        demand, background = self._queues
        with self._wake:
            while True:
                if demand:
                    self._busy_now += 1
                    return demand.popleft(), Urgency.DEMAND
                if background and self._background_now < self._background_max:
                    self._busy_now += 1
                    self._background_now += 1
                    return background.popleft(), Urgency.BACKGROUND
                if self._closed and not background:
                    return None
                self._wake.wait()


def _set(future: "asyncio.Future[object]", value: object, error: BaseException | None) -> None:
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _ended(future: "asyncio.Future[T]") -> Ended[T]:
    error = future.exception()
    return Ended(None if error is not None else future.result(), error)


def _retrieved(future: "asyncio.Future[T]") -> None:
    """Mark the exception as seen: work whose waiters were all cancelled is no "exception was never retrieved"."""
    future.exception()
