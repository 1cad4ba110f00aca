"""The ring of events that engines and routers follow: bounded, numbered, resumable by cursor.

A cursor is the sequence of the last event seen. Who falls behind the ring, or comes from another boot (epoch), is told `lost` and
continues at the oldest event that is left: it has to ask for the state anew.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from kvstored.core.types import TierId

EVENTS_MAX = 65_536


class EventKind(IntEnum):
    """Numbers as on the wire."""

    STORED = 1
    EVICTED = 2
    LOADED = 3
    REMOVED = 4
    CLEARED = 5
    CORRUPTED = 6
    LOST = 7
    NAMESPACE_OPENED = 8
    NAMESPACE_REMOVED = 9
    JOB_DONE = 10
    LOAD_FAILED = 11


@dataclass(frozen=True, slots=True)
class Event:
    sequence: int
    kind: EventKind
    digest: bytes
    key: bytes
    tier: TierId | None
    at_s: float
    parent: bytes = b""
    depth_blocks: int = 0
    job: int = 0


@dataclass(frozen=True, slots=True)
class Polled:
    """`cursor` is where to go on; `lost`: events between the asked cursor and the first one here are gone."""

    events: tuple[Event, ...]
    cursor: int
    lost: bool


class Events:
    """Sequences start at 1 in each epoch. Appending costs a microsecond whether anyone follows or not."""

    def __init__(
        self, *, epoch: int, now_s: Callable[[], float], events_max: int = EVENTS_MAX
    ) -> None:
        self.epoch = epoch
        self._now_s = now_s
        self._ring: deque[Event] = deque(maxlen=events_max)
        self._sequence = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def last(self) -> int:
        """Sequence of the newest event; 0 before the first."""
        return self._sequence

    def add(
        self,
        kind: EventKind,
        *,
        digest: bytes = b"",
        key: bytes = b"",
        tier: TierId | None = None,
        parent: bytes = b"",
        depth_blocks: int = 0,
        job: int = 0,
    ) -> None:
        self._sequence += 1
        at_s = self._now_s()
        self._ring.append(
            Event(self._sequence, kind, digest, key, tier, at_s, parent, depth_blocks, job)
        )
        while self._waiters:
            waiter = self._waiters.pop()
            if not waiter.done():
                waiter.set_result(None)

    def read(self, *, epoch: int, cursor: int, events_max: int) -> Polled:
        """What follows `cursor`, at most `events_max`. Epoch 0 with cursor 0 means: from the oldest that is left, nothing lost."""
        first = self._sequence - len(self._ring) + 1
        is_fresh = epoch == 0 and cursor == 0
        is_known = epoch == self.epoch and first <= cursor + 1 <= self._sequence + 1
        begin = cursor + 1 if is_known else first
        events = tuple(islice(self._ring, begin - first, begin - first + events_max))
        return Polled(
            events,
            cursor=events[-1].sequence if events else begin - 1,
            lost=not is_known and not is_fresh,
        )

    async def poll(self, *, epoch: int, cursor: int, events_max: int, wait_s: float) -> Polled:
        """`read`, waiting up to `wait_s` for a first event."""
        polled = self.read(epoch=epoch, cursor=cursor, events_max=events_max)
        if polled.events or polled.lost or wait_s <= 0:
            return polled
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=wait_s)
        finally:
            self._waiters.discard(waiter)
        return self.read(epoch=epoch, cursor=cursor, events_max=events_max)
