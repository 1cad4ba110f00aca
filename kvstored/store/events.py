"""The ring of events that engines and routers follow: bounded, numbered, resumable by cursor.

A cursor is the sequence of the last event seen. Who falls behind the ring, or comes from another boot (epoch), is told `lost` and
continues at the oldest event that is left: it has to ask for the state anew.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import KEY_BYTES_MAX, TierId

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
class EventRun:
    """Events of one kind and time with the sequences `first`, `first` + 1, ..., taken apart only when somebody reads them.

    `keys`: 64 bytes each, padded, with their lengths; `parents`: 16 bytes each, or none.
    """

    first: int
    kind: EventKind
    digest: bytes
    tier: TierId
    at_s: float
    keys: bytes
    key_bytes: NDArray[np.uint8]
    parents: bytes = b""
    depths: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.key_bytes)

    def each(self, begin: int) -> Iterator[Event]:
        """Those from sequence `begin` on."""
        for i in range(max(begin - self.first, 0), len(self)):
            key = self.keys[i * KEY_BYTES_MAX : i * KEY_BYTES_MAX + int(self.key_bytes[i])]
            yield Event(
                sequence=self.first + i,
                kind=self.kind,
                digest=self.digest,
                key=key,
                tier=self.tier,
                at_s=self.at_s,
                parent=self.parents[16 * i : 16 * (i + 1)],
                depth_blocks=0 if self.depths is None else int(self.depths[i]),
            )


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
        self._ring: deque[Event | EventRun] = deque()
        self._events_max = events_max
        self._kept = 0
        """Events in the ring."""
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
        event = Event(self._sequence, kind, digest, key, tier, at_s, parent, depth_blocks, job)
        self._append(event, 1)

    def add_run(
        self,
        kind: EventKind,
        *,
        digest: bytes,
        tier: TierId,
        keys: bytes,
        key_bytes: NDArray[np.uint8],
        parents: bytes = b"",
        depths: NDArray[np.int32] | None = None,
    ) -> None:
        """As `add` for each key, in order."""
        first, at_s = self._sequence + 1, self._now_s()
        run = EventRun(first, kind, digest, tier, at_s, keys, key_bytes, parents, depths)
        self._sequence += len(run)
        self._append(run, len(run))

    def _append(self, entry: Event | EventRun, count: int) -> None:
        self._ring.append(entry)
        self._kept += count
        while self._kept - _count(self._ring[0]) >= self._events_max:
            self._kept -= _count(self._ring.popleft())
        while self._waiters:
            waiter = self._waiters.pop()
            if not waiter.done():
                waiter.set_result(None)

    def read(self, *, epoch: int, cursor: int, events_max: int) -> Polled:
        """What follows `cursor`, at most `events_max`. Epoch 0 with cursor 0 means: from the oldest that is left, nothing lost."""
        first = self._sequence - self._kept + 1
        is_fresh = epoch == 0 and cursor == 0
        is_known = epoch == self.epoch and first <= cursor + 1 <= self._sequence + 1
        begin = cursor + 1 if is_known else first
        events = tuple(islice(self._from(begin), events_max))
        return Polled(
            events,
            cursor=events[-1].sequence if events else begin - 1,
            lost=not is_known and not is_fresh,
        )

    def _from(self, begin: int) -> Iterator[Event]:
        for entry in self._ring:
            if isinstance(entry, EventRun):
                yield from entry.each(begin)
            elif entry.sequence >= begin:
                yield entry

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


def _count(entry: Event | EventRun) -> int:
    return len(entry) if isinstance(entry, EventRun) else 1
