"""Replay against a running daemon: match, acquire, put of what was missed, release, with real bytes.

Clients are threads of this process, each with a connection and session of its own; they take the requests of the trace in order.
Their copies, content checks and hashes run outside the GIL. Every block that is read is compared with what its key says.
This module knows no client: sim/daemon.py makes the stores that the threads drive.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import islice
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Protocol

from kvstored.core.types import BATCH_KEYS_MAX
from kvstored.errors import LeaseLost
from kvstored.sim.keys import Content, Contents, block_key
from kvstored.sim.measure import NO_BLOCKS, Recorder, Served, TierBlocks, summed
from kvstored.sim.traces import Request, Trace

BATCH_BYTES_MAX = 64 << 20
"""Bytes in one call, so that the memory of a client stays bounded at any block size."""


class Store(Protocol):
    """What one replay client needs of the store; `root` is the root key of the trace's namespace."""

    @property
    def root(self) -> bytes: ...

    def match(self, keys: Sequence[bytes]) -> TierBlocks:
        """Blocks of the longest readable prefix, by the tier that they are read from."""

    def read(self, keys: Sequence[bytes]) -> AbstractContextManager[Sequence[Content]]:
        """Contents up to the first key that is not there (any more), leased from entry to exit.

        Leaving raises LeaseLost if the lease ended before: what was read is void.
        """

    def put(self, keys: Sequence[bytes], parent: bytes, contents: Sequence[Content]) -> int:
        """How many of these consecutive blocks were stored by this call. `parent`: empty at a root."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """`speed` None: as fast as it goes, else the factor of the trace's pace."""

    block_bytes: int
    speed: float | None
    clients: int
    limit: int | None


@dataclass(slots=True)
class _Timings:
    """Seconds of each call, by operation."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, name: str, begun_s: float) -> None:
        self.seconds.setdefault(name, []).append(perf_counter() - begun_s)


class Driver:
    """Serves requests through one store."""

    def __init__(self, store: Store, block_bytes: int) -> None:
        self._store = store
        self._contents = Contents(block_bytes)
        self._batch = max(1, min(BATCH_KEYS_MAX, BATCH_BYTES_MAX // block_bytes))

    def request(self, request: Request) -> Served:
        """Read what is there and check it, put the rest; all leases are held until the put is done."""
        root = self._store.root
        keys = [block_key(root, block_id) for block_id in request.block_ids.tolist()]
        timings = _Timings()
        matched = self._match(keys, timings)
        read = wrong = put = 0
        try:
            with ExitStack() as leases:
                read, wrong = self._read(keys[: sum(matched)], leases, timings)
                put = self._put(keys, read, timings)
                released_s = perf_counter()
            if sum(matched):
                timings.timed("release", released_s)
        except LeaseLost:
            read = wrong = 0
        lost = sum(matched) - read
        return Served(len(keys), _without(matched, lost), put, wrong, lost, timings.seconds)

    def _match(self, keys: list[bytes], timings: _Timings) -> TierBlocks:
        matched = NO_BLOCKS
        for start in range(0, len(keys), BATCH_KEYS_MAX):
            batch = keys[start : start + BATCH_KEYS_MAX]
            begun_s = perf_counter()
            found = self._store.match(batch)
            timings.timed("match", begun_s)
            matched = summed(matched, found)
            if sum(found) < len(batch):
                break
        return matched

    def _read(self, keys: list[bytes], leases: ExitStack, timings: _Timings) -> tuple[int, int]:
        """How many blocks could be read, and how many of them were wrong."""
        read = wrong = 0
        for start in range(0, len(keys), self._batch):
            batch = keys[start : start + self._batch]
            begun_s = perf_counter()
            contents = leases.enter_context(self._store.read(batch))
            timings.timed("acquire", begun_s)
            pairs = zip(batch, contents, strict=False)
            wrong += sum(not self._contents.is_right(key, content) for key, content in pairs)
            read += len(contents)
            if len(contents) < len(batch):
                break
        return read, wrong

    def _put(self, keys: list[bytes], hit: int, timings: _Timings) -> int:
        put = 0
        for start in range(hit, len(keys), self._batch):
            batch = keys[start : start + self._batch]
            contents = [self._contents.of(key) for key in batch]
            parent = keys[start - 1] if start else b""
            begun_s = perf_counter()
            put += self._store.put(batch, parent, contents)
            timings.timed("put", begun_s)
        return put


class _Feed:
    """Hands out the requests of a trace in order to several threads, each no earlier than its time."""

    def __init__(self, trace: Trace, options: LiveOptions) -> None:
        self._requests = islice(trace, options.limit)
        self._speed = options.speed
        self._lock = Lock()
        self._first_s: float | None = None
        self._begun_s = perf_counter()
        self.stopped = Event()

    def __iter__(self) -> Iterator[tuple[float, Request]]:
        """Requests with their seconds since the first one."""
        while not self.stopped.is_set():
            with self._lock:
                request = next(self._requests, None)
                if request is None:
                    return
                if self._first_s is None:
                    self._first_s = request.ts_s
                since_s = request.ts_s - self._first_s
            if self._speed is not None:
                due_s = self._begun_s + since_s / self._speed
                if self.stopped.wait(max(0.0, due_s - perf_counter())):
                    return
            yield since_s, request


def drive(
    trace: Trace,
    options: LiveOptions,
    connect: Callable[[], AbstractContextManager[Store]],
    advance: Callable[[int], None],
) -> Recorder:
    """Replay with `options.clients` threads and give what they all recorded. The first failure of any stops all and is raised."""
    feed = _Feed(trace, options)
    recorders = [Recorder() for _ in range(options.clients)]
    failures: list[BaseException] = []

    def client(recorder: Recorder) -> None:
        try:
            _serve(feed, connect, options.block_bytes, recorder, advance)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(error)
            feed.stopped.set()

    threads = [
        Thread(target=client, args=(recorder,), name=f"replay-{i}", daemon=True)
        for i, recorder in enumerate(recorders)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        feed.stopped.set()
    if failures:
        raise failures[0]
    total = recorders[0]
    for recorder in recorders[1:]:
        total.merge(recorder)
    return total


def _serve(
    feed: _Feed,
    connect: Callable[[], AbstractContextManager[Store]],
    block_bytes: int,
    recorder: Recorder,
    advance: Callable[[int], None],
) -> None:
    with connect() as store:
        driver = Driver(store, block_bytes)
        for since_s, request in feed:
            begun_s = perf_counter()
            served = driver.request(request)
            recorder.add(since_s, served, perf_counter() - begun_s)
            advance(1)


def _without(matched: TierBlocks, lost: int) -> TierBlocks:
    """Without the blocks that could not be read after all: those of the slowest tier first."""
    left = list(matched)
    for tier in reversed(range(len(left))):
        gone = min(lost, left[tier])
        left[tier] -= gone
        lost -= gone
    hbm, dram, nvme, remote = left
    return (hbm, dram, nvme, remote)
