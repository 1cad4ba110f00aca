"""One blocking connection of the local channel: a frame out, a frame in, with a timeout on every wait."""

import math
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvstored.clock import Clock
from kvstored.errors import (
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    KvstoredError,
    Unavailable,
)
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.frames import (
    HEADER,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    SOCKET_PATH_BYTES_MAX,
    deadline_field,
    frame,
)
from kvstored.wire.methods import BY_NAME, PROJECTION, SEGMENT
from kvstored.wire.status import OK, error_of

Response = TypeVar("Response", bound=Message)

_BUFFER_BYTES = 64 << 10
_ONE_DESCRIPTOR_BYTES = socket.CMSG_LEN(struct.calcsize("i"))
_GRACE_S = 1.0
"""Waited beyond the deadline, so that the daemon's own answer about it arrives."""
_POLL_MS_MAX = 2**31 - 1
_CROWDED_S = 30e-6
"""Between two looks for an answer where others used the core that was offered: who goes on looking then takes it from the daemon."""


class Connection:
    """Not thread-safe: one caller at a time. After any failure of the transport it is broken for good."""

    def __init__(self, path: str, connect_timeout_s: float) -> None:
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise InvalidArgument(
                f"the socket's path is too long max={SOCKET_PATH_BYTES_MAX} path={path}"
            )
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # out of descriptors
            raise Unavailable(f"no socket can be made: {error}; see `ulimit -n`") from error
        self._buffer = bytearray(_BUFFER_BYTES)
        self._call = 0
        self._timeout_s = 0.0
        self._is_idle = False
        self._clock: Clock | None = None
        self._busy_poll_s = 0.0
        self._is_soon = True
        self._owed: tuple[Callable[[], None], Callable[[KvstoredError], None]] | None = None
        try:
            self._socket.settimeout(connect_timeout_s)
            self._socket.connect(path)
            # Python's own timeouts cost a poll before each call: here only who has to wait polls.
            self._socket.settimeout(None)
        except OSError as error:
            self._socket.close()
            raise Unavailable(
                f"the daemon is not reachable: socket={path} error={error}; start it with `kvstored serve`, or name its socket"
            ) from error
        self._answered = _events(self._socket, select.POLLIN)
        self._is_idle = True

    @property
    def is_idle(self) -> bool:
        """False after a failure and in the middle of a call."""
        return self._is_idle

    @property
    def is_reusable(self) -> bool:
        """False after a failure, in the middle of a call, and when the daemon has hung up."""
        if not self._is_idle:
            return False
        if not self._answered.poll(0):  # a quarter of the time of recv, which ends in an exception
            return True
        try:
            peeked = self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(peeked) and self._owed is not None

    def busy_poll(self, window_s: float, clock: Clock) -> None:
        """From now on looks so long for an answer before it sleeps until one comes, as long as answers do come within it: a wake-up takes longer
        than most calls."""
        self._clock = clock if window_s > 0 else None
        self._busy_poll_s = window_s

    def close(self) -> None:
        self._is_idle = False
        self._socket.close()

    def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response:
        self.begin(name, request, timeout_s)
        return self.end(name, response)

    def begin(self, name: str, request: Message, timeout_s: float) -> None:
        """Sends a call whose answer `end` takes; until then the connection is in use."""
        self._send(BY_NAME[name].number, request, timeout_s)

    def end(self, name: str, response: type[Response]) -> Response:
        assert response is BY_NAME[name].response, f"{name} does not answer {response}"
        received = self._receive(self._buffer, 0)
        return _parsed(response, self._answer(received))

    def owe(
        self,
        name: str,
        request: Message,
        response: type[Response],
        taken: Callable[[Response], None],
        timeout_s: float,
        *,
        refused: Callable[[KvstoredError], None] = lambda _: None,
    ) -> None:
        """Sends a call whose answer nobody waits for: it is taken before the next call is sent."""
        self.collect()
        self.begin(name, request, timeout_s)
        self._is_idle = True
        self._owed = lambda: taken(self.end(name, response)), refused

    def collect(self) -> None:
        """Takes the answer that is owed, waiting for it if need be."""
        owed, self._owed = self._owed, None
        if owed is None:
            return
        take, refused = owed
        self._is_idle = False
        try:
            take()
        except KvstoredError as error:
            if not self._is_idle:  # no refusal but a broken connection
                raise
            refused(error)

    def segment(self, segment: int, timeout_s: float) -> tuple[pb.SegmentResponse, int]:
        """The segment's facts and a descriptor, which is the caller's to close."""
        request = pb.SegmentRequest(segment=segment)
        payload, descriptor = self._described(SEGMENT.number, request, timeout_s)
        return _parsed(pb.SegmentResponse, payload), descriptor

    def projection(self, timeout_s: float) -> int:
        """A descriptor of the projection, which is the caller's to close."""
        return self._described(PROJECTION.number, pb.ProjectionRequest(), timeout_s)[1]

    def _described(self, number: int, request: Message, timeout_s: float) -> tuple[bytes, int]:
        self._send(number, request, timeout_s)
        try:
            # Not socket.recv_fds: it forgets its flags, and the descriptor would leak into children.
            self._wait(self._answered)
            first, ancillary, _, _ = self._socket.recvmsg(
                _BUFFER_BYTES, _ONE_DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise self._failed(error) from error
        descriptors = _descriptors(ancillary)
        try:
            if not first:
                raise Unavailable("the daemon hung up")
            self._buffer[: len(first)] = first
            payload = self._answer(self._receive(self._buffer, len(first)))
            if len(descriptors) != 1:
                raise Unavailable(f"an answer came without its descriptor method={number}")
            return payload, descriptors.pop()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _send(self, number: int, request: Message, timeout_s: float) -> None:
        self.collect()
        assert self._is_idle, "the connection is in use or broken"
        if timeout_s <= 0:
            raise DeadlineExceeded("no time is left for the call")
        self._call = self._call % 0xFFFF_FFFF + 1
        # What cannot be sent must leave the connection usable.
        sent = frame(number, deadline_field(timeout_s), self._call, request.SerializeToString())
        self._is_idle = False
        try:
            self._timeout_s = timeout_s
            self._send_all(memoryview(sent))
        except OSError as error:
            raise self._failed(error) from error

    def _send_all(self, unsent: memoryview) -> None:
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait(_events(self._socket, select.POLLOUT))

    def _wait(self, events: select.poll) -> None:
        """Until the socket is ready. Not by its own timeouts: every signal that a handler of the caller takes begins them anew."""
        milliseconds = math.ceil((self._timeout_s + _GRACE_S) * 1000)
        if not events.poll(min(milliseconds, _POLL_MS_MAX)):
            raise BlockingIOError

    def _receive(self, buffer: bytearray, received: int) -> memoryview:
        """The whole frame of an answer, of which `received` bytes are in `buffer` already."""
        view = memoryview(buffer)
        if self._clock is not None and not received:
            received = self._received_first(view, self._clock)
        received = self._receive_up_to(HEADER_BYTES, view, received)
        needed = HEADER_BYTES + self._payload_bytes(view)
        if needed > len(view):
            grown = bytearray(needed)
            grown[:received] = view[:received]
            view = memoryview(grown)
        received = self._receive_up_to(needed, view, received)
        if received > needed:
            raise Corrupt("the daemon's answer has a tail")
        return view[:needed]

    def _received_first(self, view: memoryview, clock: Clock) -> int:
        """Of an answer, its first bytes; 0 where the daemon hung up. Between looks the core is offered to whoever is ready; where somebody is, this
        sleeps."""
        now_s = clock.elapsed_s()
        late_s = now_s + self._busy_poll_s
        try:
            while self._is_soon:
                try:
                    return self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    os.sched_yield()
                looked_s, now_s = now_s, clock.elapsed_s()
                self._is_soon = now_s < late_s
                if now_s - looked_s > _CROWDED_S:
                    break
            self._wait(self._answered)
            received = self._socket.recv_into(view)
        except OSError as error:
            raise self._failed(error) from error
        self._is_soon = clock.elapsed_s() < late_s
        return received

    def _receive_up_to(self, needed: int, view: memoryview, received: int) -> int:
        try:
            while received < needed:
                self._wait(self._answered)
                count = self._socket.recv_into(view[received:])
                if count == 0:
                    raise Unavailable("the daemon hung up")
                received += count
        except OSError as error:
            raise self._failed(error) from error
        return received

    def _payload_bytes(self, view: memoryview) -> int:
        payload_bytes: int = HEADER.unpack_from(view)[0]
        if payload_bytes > PAYLOAD_BYTES_MAX:
            raise Corrupt(f"the daemon's answer is no frame bytes={payload_bytes}")
        return payload_bytes

    def _answer(self, received: memoryview) -> bytes:
        _, _, status, call = HEADER.unpack_from(received)
        if call != self._call:
            raise Corrupt(f"the daemon's answer is to another call id={call} wanted={self._call}")
        self._is_idle = True
        payload = bytes(received[HEADER_BYTES:])
        if status != OK:
            raise error_of(status, payload)
        return payload

    def _failed(self, error: OSError) -> DeadlineExceeded | Unavailable:
        if isinstance(error, BlockingIOError):
            return DeadlineExceeded(f"the daemon did not answer in time seconds={self._timeout_s}")
        return Unavailable(f"the connection to the daemon broke: {error}")


def _events(sock: socket.socket, event: int) -> select.poll:
    made = select.poll()
    made.register(sock, event)
    return made


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    return [
        descriptor
        for level, kind, packed in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in struct.iter_unpack("i", packed[: len(packed) // 4 * 4])
    ]


def _parsed(response: type[Response], payload: bytes) -> Response:
    try:
        return response.FromString(payload)
    except DecodeError as error:
        raise Corrupt(f"an answer is no {response.DESCRIPTOR.name}") from error
