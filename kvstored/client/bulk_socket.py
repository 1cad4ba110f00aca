"""One end of a bulk connection: frames, and the bytes of pieces straight from and into their arrays.

Blocking, for ordinary threads. Every wait is bounded by STALL_S and every transfer by the call's deadline; after any failure of the
transport the connection is broken for good. No copy is made between the kernel and the arrays.
"""

import math
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import xxhash

from kvstored.client.segments import Bytes
from kvstored.clock import Clock
from kvstored.errors import Corrupt, DeadlineExceeded, KvstoredError, Unavailable
from kvstored.wire.bulk import STALL_S
from kvstored.wire.frames import HEADER, HEADER_BYTES

Runs = tuple[Bytes, ...]
"""One piece where it lies, in order."""
Step = list[tuple[int, memoryview]]
"""Views that travel in one system call, each with the number of its piece."""

_STEP_BYTES = 1 << 20
"""Received, then hashed while it is still in the core's cache."""
_STEP_VIEWS = 256
"""The kernel takes 1024."""


class BulkSocket:
    """Not thread-safe. `close` and `shutdown` may be called from any thread."""

    def __init__(self, connected: socket.socket, clock: Clock) -> None:
        self._socket = connected
        self._clock = clock
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._wait_s = 0.0
        self.is_broken = False
        self.received_bytes = 0
        self.sent_bytes = 0
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self._is_tls:
            connected.settimeout(None)
        self.wait_at_most(STALL_S)

    @property
    def is_quiet(self) -> bool:
        """Whether the connection stands and nothing has come; TLS may have messages of its own in the way."""
        if self.is_broken:
            return False
        if self._is_tls:
            return True
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def wait_at_most(self, seconds_s: float) -> None:
        """For the next byte. Plain sockets block and have it from the kernel: Python's timeouts poll before each call."""
        if self._wait_s == seconds_s:
            return
        self._wait_s = seconds_s
        if self._is_tls:
            self._socket.settimeout(seconds_s)
            return
        fraction, seconds = math.modf(seconds_s)
        packed = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def close(self) -> None:
        self.is_broken = True
        self._socket.close()

    def shutdown(self) -> None:
        """Wakes the thread that waits in it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.is_broken = True

    # ---- frames

    def send_frame(self, sent: bytes) -> None:
        self._send_views([memoryview(sent)])

    def receive_frame(self, payload_bytes_max: int) -> tuple[int, int, int, bytes]:
        """Method, status or deadline, call id, payload. After Corrupt nothing that comes can be understood."""
        header = bytearray(HEADER_BYTES)
        ends_s = self._clock.elapsed_s() + self._wait_s + STALL_S
        self.receive_into(memoryview(header), ends_s)
        payload_bytes, method, status, call = HEADER.unpack(header)
        if payload_bytes > payload_bytes_max:
            raise Corrupt(f"no frame, or too large: bytes={payload_bytes} max={payload_bytes_max}")
        payload = bytearray(payload_bytes)
        self.receive_into(memoryview(payload), ends_s)
        return method, status, call, bytes(payload)

    def receive_into(self, view: memoryview, ends_s: float) -> None:
        """All of it, or an error."""
        while len(view):
            view = view[self._receive([view]) :]
            if len(view):
                self._check(ends_s)

    # ---- pieces

    def send_pieces(self, pieces: Sequence[Runs], ends_s: float) -> None:
        with self._until(ends_s):
            for step in _steps(pieces):
                self._send_views([view for _, view in step])
                self._check(ends_s)

    def send_summed(self, pieces: Sequence[Runs], ends_s: float) -> list[int]:
        """The checksum of each piece, which no one may write meanwhile. Hashed while the kernel sends."""
        sums = _Sums(len(pieces))
        with self._until(ends_s):
            for step in _steps(pieces):
                self._send_views([view for _, view in step])
                sums.add(step)
                self._check(ends_s)
        return sums.ended()

    def receive_summed(self, pieces: Sequence[Runs], ends_s: float) -> list[int]:
        """The checksum of each piece as it lies in its array."""
        sums = _Sums(len(pieces))
        with self._until(ends_s):
            for step in _steps(pieces):
                self._receive_step([view for _, view in step], ends_s)
                sums.add(step)
        return sums.ended()

    # ---- inside

    @contextmanager
    def _until(self, ends_s: float) -> Iterator[None]:
        """No wait is longer than what is left."""
        usual_s = self._wait_s
        self.wait_at_most(min(usual_s, max(ends_s - self._clock.elapsed_s(), 0.01)))
        yield
        self.wait_at_most(usual_s)

    def _receive_step(self, views: list[memoryview], ends_s: float) -> None:
        count = self._receive(views)
        for view in views:
            if count >= len(view):
                count -= len(view)
                continue
            self.receive_into(view[count:], ends_s)
            count = 0
        self._check(ends_s)

    def _receive(self, views: list[memoryview]) -> int:
        try:
            if self._is_tls:
                count = self._socket.recv_into(views[0])
            elif len(views) == 1:
                count = self._socket.recv_into(views[0], len(views[0]), socket.MSG_WAITALL)
            else:
                count = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise self._failed(error) from error
        if count == 0:
            self.is_broken = True
            raise Unavailable("the peer hung up")
        self.received_bytes += count
        return count

    def _send_views(self, views: list[memoryview]) -> None:
        try:
            count = 0 if self._is_tls else self._socket.sendmsg(views)
            for view in views:
                if count >= len(view):
                    count -= len(view)
                    continue
                self._socket.sendall(view[count:])
                count = 0
        except OSError as error:
            raise self._failed(error) from error
        self.sent_bytes += sum(map(len, views))

    def _check(self, ends_s: float) -> None:
        if self._clock.elapsed_s() > ends_s:
            self.is_broken = True
            raise DeadlineExceeded("a transfer took longer than its call may")

    def _failed(self, error: OSError) -> KvstoredError:
        self.is_broken = True
        if isinstance(error, BlockingIOError | TimeoutError):
            return DeadlineExceeded(f"the peer stalled seconds={self._wait_s}")
        return Unavailable(f"the bulk connection broke: {error}")


class _Sums:
    """Checksums of pieces whose bytes come in order."""

    def __init__(self, count: int) -> None:
        self._sums = [0] * count
        self._piece = -1
        self._hasher = xxhash.xxh3_64()

    def add(self, step: Step) -> None:
        for piece, view in step:
            if piece != self._piece:
                self._end()
                self._piece = piece
                self._hasher = xxhash.xxh3_64()
            self._hasher.update(view)

    def ended(self) -> list[int]:
        self._end()
        return self._sums

    def _end(self) -> None:
        if self._piece >= 0:
            self._sums[self._piece] = self._hasher.intdigest()


def _steps(pieces: Sequence[Runs]) -> Iterator[Step]:
    step: Step = []
    step_bytes = 0
    for i, runs in enumerate(pieces):
        for run in runs:
            for start in range(0, run.size, _STEP_BYTES):
                view = run[start : start + _STEP_BYTES].data
                if step and (step_bytes + len(view) > _STEP_BYTES or len(step) == _STEP_VIEWS):
                    yield step
                    step, step_bytes = [], 0
                step.append((i, view))
                step_bytes += len(view)
    if step:
        yield step
