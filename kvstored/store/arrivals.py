"""Copies to GPUs that are told of before they are whole: how many layers are on their way, how many are there, and who waits for more."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstored.errors import LeaseLost, Unavailable
from kvstored.tiers.layered import Layers

FAILED = "the copy to the gpu failed: read from dram, or compute"


@dataclass(frozen=True, slots=True)
class Progress:
    """Layers from the first on. `events`: pool and handle, of the last submission that these layers need; none where they are there."""

    layers: int
    events: Sequence[tuple[int, bytes]] = ()


class Arrival:
    """One lease's. `submitted` and `arrived` are called from the thread that copies, the others on the loop."""

    def __init__(self, layers: Layers, copies: frozenset[int]) -> None:
        self.layers = layers
        self.copies = copies
        self._loop = asyncio.get_running_loop()
        self._events: list[Sequence[tuple[int, bytes]]] = []
        self._arrived = 0
        self._has_failed = self._is_void = False
        self._changed = asyncio.Event()

    def submitted(self, part: int, events: Sequence[tuple[int, bytes]]) -> None:
        self._loop.call_soon_threadsafe(self._submit, events)

    def arrived(self, part: int) -> None:
        self._loop.call_soon_threadsafe(self._arrive, part + 1)

    def void(self) -> None:
        """Some of it will never be there: told before the first of it is."""
        self._is_void = True
        self._changed.set()

    def end(self, there: int, failed: int) -> None:
        """As of all that was to be copied."""
        self._has_failed |= failed > 0
        if not failed:
            self._arrived = len(self.layers.ends)
        self._changed.set()

    @property
    def is_whole(self) -> bool:
        return self._arrived == len(self.layers.ends)

    async def wait(self, wanted: int, wait_s: float, *, on_its_way: bool) -> Progress:
        """Until so many layers are there, or with `on_its_way` submitted and their events can be shared; fewer where the time is over."""
        parts = self._parts_of(wanted)
        until_s = self._loop.time() + wait_s
        while True:
            if self._is_void:
                raise Unavailable(FAILED)
            if self._arrived >= parts:
                return Progress(self.layers.ready(self._arrived))
            if self._has_failed:
                raise Unavailable(FAILED)
            if (
                on_its_way
                and len(self._events) >= parts
                and all(h for _, h in self._events[parts - 1])
            ):
                return Progress(self.layers.ends[parts - 1], self._events[parts - 1])
            left_s = until_s - self._loop.time()
            if left_s <= 0:
                return Progress(self.layers.ready(self._arrived))
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                continue

    def _parts_of(self, wanted: int) -> int:
        return next(
            (i for i, end in enumerate(self.layers.ends, 1) if end >= wanted), len(self.layers.ends)
        )

    def _submit(self, events: Sequence[tuple[int, bytes]]) -> None:
        self._events.append(events)
        self._changed.set()

    def _arrive(self, parts: int) -> None:
        self._arrived = max(self._arrived, parts)
        self._changed.set()


class Arrivals:
    """By lease, as long as that is open."""

    def __init__(self, is_open: Callable[[int, int], bool]) -> None:
        self._is_open = is_open
        self._arrivals: dict[int, tuple[int, Arrival]] = {}

    def add(self, session: int, lease: int, arrival: Arrival) -> None:
        self._arrivals = {
            id_: each for id_, each in self._arrivals.items() if self._is_open(each[0], id_)
        }
        self._arrivals[lease] = session, arrival

    def is_arriving(self, lease: int) -> bool:
        return lease in self._arrivals and not self._arrivals[lease][1].is_whole

    async def wait(
        self, session: int, lease: int, layers: int, wait_s: float, *, on_its_way: bool
    ) -> Progress:
        """Of a lease that was answered whole all layers are there. LeaseLost where it has ended."""
        if not self._is_open(session, lease):
            raise LeaseLost(f"no such lease: lease={lease}")
        if lease not in self._arrivals:
            return Progress(layers)
        _, arrival = self._arrivals[lease]
        return await arrival.wait(layers, wait_s, on_its_way=on_its_way)
