"""Bytes of blocks as frames on their way between hosts: which groups gain how much, and threads that encode and decode. Of one end, for all its connections.

A group is looked at beside the transfers, when a full block of it travels that the link could carry faster; until then its bytes go as they are.
Loaded only where frames are offered: the one module of the client that needs the codec.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvstored.client.copying import Bytes, checksum_of
from kvstored.client.gains import Known, looked_at
from kvstored.codec import blocks, header
from kvstored.codec.link import is_faster
from kvstored.core.types import NamespaceSpec
from kvstored.errors import Corrupt
from kvstored.wire.bulk import FRAMED_BYTES_MIN, PIECE_HEAD

Runs = tuple[Bytes, ...]
_THREADS_MAX = 4
_NAMESPACES_MAX = 256
_AHEAD_BYTES = 256 << 20
"""Encoded before they are sent, or received before they are decoded, of all connections; each may have one piece whatever the others have."""
_FASTEST_BYTES_PER_S = 8e9
"""Of links that no group can be too fast for: none is looked at for a faster one."""


@dataclass(frozen=True, slots=True)
class Framed:
    """One piece as it travels. `checksum`: of its plain bytes."""

    head: Bytes
    views: Runs
    checksum: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A piece that is a frame already, or is read as one when its turn comes: `read` runs in one of the threads."""

    size_bytes: int
    read: Callable[[], Framed]


Piece = tuple[int, Runs] | Ready
"""What is sent: a piece with the number of its group (NO_GROUP: as it is), or a frame."""
NO_GROUP = -1


@dataclass(slots=True)
class Moved:
    """Bytes of pieces that travelled as frames, before and after."""

    plain_bytes: int = 0
    wire_bytes: int = 0


class Framing:
    """Thread-safe. Never survives a fork: the child makes another one. Its threads end once nobody has it any more. `always`: wherever a group gains,
    whatever the link."""

    def __init__(self, *, always: bool) -> None:
        self.threads = max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0))))
        self.sent, self.received = Moved(), Moved()
        self._always = always
        self._specs: dict[bytes, NamespaceSpec] = {}
        self._known: dict[tuple[bytes, int], Known] = {}
        self._looking: set[tuple[bytes, int]] = set()
        self._ahead_bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.threads, "frames")

    def take_moved(self) -> tuple[Moved, Moved]:
        """What was received and what was sent as frames since the last call."""
        with self._lock:
            taken = self.received, self.sent
            self.received, self.sent = Moved(), Moved()
        return taken

    def count_received(self, plain_bytes: int, wire_bytes: int) -> None:
        with self._lock:
            self.received.plain_bytes += plain_bytes
            self.received.wire_bytes += wire_bytes

    def learn(self, digest: bytes, spec: NamespaceSpec) -> None:
        with self._lock:
            if len(self._specs) >= _NAMESPACES_MAX and digest not in self._specs:
                self._specs.clear()
                self._known.clear()
            self._specs[digest] = spec

    def may_pay(self, link_bytes_per_s: float) -> bool:
        """Whether any group could gain."""
        return self._always or 0 < link_bytes_per_s < _FASTEST_BYTES_PER_S

    def knows(self, digest: bytes) -> bool:
        return digest in self._specs

    def with_groups(
        self, digest: bytes, groups_mask: int, pieces: Iterable[tuple[int, Runs]]
    ) -> list[tuple[int, Runs]]:
        """Pieces by their numbers among keys x selected groups: each with the number of its group in the namespace. Empty where that is not known."""
        spec = self._specs.get(digest)
        if spec is None:
            return []
        required = [i for i, group in enumerate(spec.groups) if group.is_required]
        chosen = [i for i in range(len(spec.groups)) if groups_mask >> i & 1] or required
        return [(chosen[number % len(chosen)], runs) for number, runs in pieces]

    def pays(
        self,
        digest: bytes,
        pieces: Sequence[tuple[int, Runs]],
        *,
        link_bytes_per_s: float,
        decoders: int,
    ) -> bool:
        """Whether these pieces, each with the number of its group in the namespace, should travel as frames: where most of their bytes gain. What is
        not known of a group is looked at for the next time, with `always` before this returns."""
        spec = self._specs.get(digest)
        if spec is None or not self.may_pay(link_bytes_per_s):
            return False
        gaining = total = 0
        for group, runs in pieces:
            size = size_of(runs)
            total += size
            if size < FRAMED_BYTES_MIN:
                continue
            known = self._known.get((digest, group))
            if known is None or known.left <= 0:
                known = self._looked(spec, digest, group, runs)
            else:
                known.left -= 1
            if known is not None and self._gains(known, link_bytes_per_s, decoders):
                gaining += size
        return 2 * gaining > total

    @contextmanager
    def encoding(self, digest: bytes, pieces: Sequence[Piece]) -> Iterator[Iterator[Framed]]:
        """The pieces in their order, encoded ahead by the threads; their bytes may change again once this is left."""
        ahead: deque[tuple[int, Future[Framed]]] = deque()

        def made() -> Iterator[Framed]:
            for piece in pieces:
                size = piece.size_bytes if isinstance(piece, Ready) else size_of(piece[1])
                while ahead and not self.may_go_ahead(len(ahead), size):
                    yield self._ended(ahead)
                self.goes_ahead(size)
                ahead.append((size, self._started(digest, piece)))
            while ahead:
                yield self._ended(ahead)

        try:
            yield made()
        finally:
            wait([each for _, each in ahead])
            self.goes_ahead(-sum(size for size, _ in ahead))

    @contextmanager
    def decoding(self) -> Iterator["Decoding"]:
        """Its targets are written to until this is left."""
        running = Decoding(self, self._pool)
        try:
            yield running
        finally:
            running.abandon()
            self.count_received(running.moved.plain_bytes, running.moved.wire_bytes)

    def may_go_ahead(self, pieces: int, more_bytes: int) -> bool:
        """Whether a connection that is so many pieces ahead may take another one."""
        return pieces < 2 * self.threads and self._ahead_bytes + more_bytes <= _AHEAD_BYTES

    def goes_ahead(self, more_bytes: int) -> None:
        with self._lock:
            self._ahead_bytes += more_bytes

    # ---- inside

    def _gains(self, known: Known, link_bytes_per_s: float, decoders: int) -> bool:
        if known.plan.is_raw:
            return False
        return self._always or is_faster(known.gain, link_bytes_per_s, self.threads, decoders)

    def _looked(self, spec: NamespaceSpec, digest: bytes, number: int, runs: Runs) -> Known | None:
        group = spec.groups[number]
        key = digest, number
        if size_of(runs) != group.bytes_per_block:
            return None
        with self._lock:
            if key in self._looking:
                return None
            self._looking.add(key)
        plain = np.concatenate(
            runs
        )  # the caller's bytes may be others by the time that they are looked at

        def look() -> None:
            try:
                self._known[key] = looked_at(spec, group, plain)
            finally:
                self._looking.discard(key)

        running = self._pool.submit(look)
        if self._always:
            running.result()
        return self._known.get(key)

    def _started(self, digest: bytes, piece: Piece) -> "Future[Framed]":
        if isinstance(piece, Ready):
            return self._pool.submit(piece.read)
        return self._pool.submit(self._encoded, digest, *piece)

    def _ended(self, ahead: "deque[tuple[int, Future[Framed]]]") -> Framed:
        size, running = ahead[0]
        framed = running.result()
        ahead.popleft()
        self.goes_ahead(-size)
        with self._lock:
            if framed.head[0] & 1 and framed.views[0].size:
                self.sent.wire_bytes += framed.views[0].size
                self.sent.plain_bytes += header.parse(framed.views[0]).plain_bytes
        return framed

    def _encoded(self, digest: bytes, number: int, runs: Runs) -> Framed:
        known, spec, size = (
            self._known.get((digest, number)),
            self._specs.get(digest),
            size_of(runs),
        )
        if known is not None and spec is not None and size >= FRAMED_BYTES_MIN:
            plain = runs[0] if len(runs) == 1 else np.concatenate(runs)
            plan = known.plan.for_share(size, spec.groups[number].bytes_per_block)
            packed = blocks.encode(plain, plan)
            if not plan.is_raw and len(packed) < size:
                return framed(packed)
        return Framed(_head(size, is_frame=False), runs, checksum_of(runs))


class Decoding:
    """Frames of one transfer on their way to their places. Not thread-safe."""

    def __init__(self, framing: Framing, pool: ThreadPoolExecutor) -> None:
        self._framing = framing
        self._pool = pool
        self._running: deque[tuple[int, int, Future[int | None]]] = deque()
        self.moved = Moved()
        self.sums: dict[int, int | None] = {}
        """By number: the checksum of what came of a frame, None where it was damaged."""

    def start(self, number: int, stored: Bytes, target: Runs) -> None:
        while self._running and not self._framing.may_go_ahead(len(self._running), len(stored)):
            self._settle_one()
        self._framing.goes_ahead(len(stored))
        self._running.append((number, len(stored), self._pool.submit(_decoded, stored, target)))
        self.moved.plain_bytes += size_of(target)
        self.moved.wire_bytes += len(stored)

    def settle(self) -> None:
        while self._running:
            self._settle_one()

    def abandon(self) -> None:
        wait([each for _, _, each in self._running])
        self._framing.goes_ahead(-sum(size for _, size, _ in self._running))

    def _settle_one(self) -> None:
        number, size, running = self._running[0]
        self.sums[number] = running.result()
        self._running.popleft()
        self._framing.goes_ahead(-size)


class Unframing:
    """Pieces out of a stream that is cut anywhere: gives their plain bytes to `take`, in order. Corrupt for whatever is not understood."""

    def __init__(
        self,
        sizes: Iterable[int],
        take: Callable[[Bytes], None],
        count: Callable[[int, int], None],
    ) -> None:
        self._sizes = iter(sizes)
        self._take = take
        self._count = count
        self._head = bytearray()
        self._size = 0
        self._stored: Bytes | None = None
        """Of a frame that is coming; `_left`: bytes of it, or of a piece that comes as it is."""
        self._left = 0

    def write(self, data: Bytes) -> None:
        while data.size:
            if not self._left:
                data = data[self._begun(data) :]
                continue
            part, data = data[: self._left], data[self._left :]
            self._left -= part.size
            if self._stored is None:
                self._take(part)
                continue
            begin = self._stored.size - self._left - part.size
            np.copyto(self._stored[begin : begin + part.size], part)
            if not self._left:
                self._decode(self._stored)

    def _begun(self, data: Bytes) -> int:
        """Bytes of the head that were taken."""
        count = min(PIECE_HEAD.size - len(self._head), data.size)
        self._head += data[:count].tobytes()
        if len(self._head) < PIECE_HEAD.size:
            return count
        self._size = next((size for size in self._sizes if size), 0)
        is_frame, size_bytes = head_of(self._head, self._size)
        self._head.clear()
        self._left = size_bytes
        self._stored = np.empty(size_bytes, dtype=np.uint8) if is_frame else None
        return count

    def _decode(self, stored: Bytes) -> None:
        plain = np.empty(self._size, dtype=np.uint8)
        blocks.decode(stored, plain)
        self._count(plain.size, stored.size)
        self._take(plain)


def size_of(runs: Runs) -> int:
    return sum(run.size for run in runs)


def head_of(raw: bytes | bytearray, size: int) -> tuple[bool, int]:
    """Of a piece of `size` bytes: whether a frame of it follows, and how many bytes; Corrupt for a length that it cannot have."""
    told = int(PIECE_HEAD.unpack(raw)[0])
    is_frame, size_bytes = bool(told & 1), told >> 1
    if size_bytes >= size if is_frame else size_bytes != size:
        raise Corrupt(f"a piece of another length: bytes={size_bytes} {is_frame=} {size=}")
    return is_frame, size_bytes


def framed(packed: Bytes) -> Framed:
    """A frame as it is; Corrupt where it is none."""
    return Framed(_head(packed.size, is_frame=True), (packed,), header.parse(packed).checksum)


def _head(size_bytes: int, *, is_frame: bool) -> Bytes:
    return np.frombuffer(PIECE_HEAD.pack(size_bytes << 1 | is_frame), dtype=np.uint8)


DAMAGED = Framed(_head(0, is_frame=True), (np.zeros(0, dtype=np.uint8),), 0)
"""In place of a frame that could not be read: no frame is empty, so the receiver has a miss."""


def _decoded(stored: Bytes, target: Runs) -> int | None:
    """Only frames that stand alone are decoded: one that refers to another block is Corrupt."""
    whole = target[0] if len(target) == 1 else np.empty(size_of(target), dtype=np.uint8)
    try:
        found = blocks.decode(stored, whole)
    except Corrupt:
        return None
    begin = 0
    for run in target if len(target) > 1 else ():
        np.copyto(run, whole[begin : begin + run.size])
        begin += run.size
    return found.checksum
