"""The server of the local channel: frames and descriptors on a Unix socket, on the store's own loop.

Raw sockets and `add_reader`, because asyncio's transports cannot send descriptors. Knows frames and methods; what a call does is the
service's. Whatever a peer sends, the worst that happens is that its connection is closed, with a log line.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from kvstored import logs
from kvstored.clock import SystemClock
from kvstored.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvstoredError,
)
from kvstored.pb import kvstored_pb2 as pb
from kvstored.transport.caller import Caller, Service
from kvstored.transport.polling import BusyPoll
from kvstored.transport.sockets import credentials, listen
from kvstored.wire.frames import (
    HEADER,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    frame,
)
from kvstored.wire.methods import BY_NUMBER, Method
from kvstored.wire.status import OK, failure_of, status_of

log = logs.get("local channel")

TENANT = "default"
"""Of every caller, until the configuration maps peer credentials to tenants."""
_RECV_BYTES = 256 << 10
_ACCEPTS_MAX = 64
"""Connections accepted in one turn of the loop."""


@dataclass(frozen=True, slots=True)
class LocalLimits:
    """`stall_s`: how long the rest of a message may take, in both directions."""

    connections: int = 4096
    payload_bytes: int = PAYLOAD_BYTES_MAX
    stall_s: float = 10.0


def one_tenant(uid: int, gid: int) -> str:  # noqa: ARG001 - the shape of every mapping
    return TENANT


class LocalServer:
    """Listens at `path`. Connections are tasks of the group given to `start`; `stop` ends them and removes the socket."""

    def __init__(
        self,
        service: Service,
        path: Path,
        *,
        mode: int = 0o600,
        tenant_of: Callable[[int, int], str] = one_tenant,
        limits: LocalLimits | None = None,
        polling: BusyPoll | None = None,
    ) -> None:
        self.service = service
        self.limits = limits or LocalLimits()
        self._polling = polling or BusyPoll(0, SystemClock())
        self._path = path
        self._mode = mode
        self._tenant_of = tenant_of
        self._connections: dict[int, _Connection] = {}
        self._last_id = 0
        self._listener: socket.socket | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Binds and listens. The caller holds the state directory's lock, so a socket that lies at `path` is a dead daemon's."""
        assert self._listener is None, "started twice"
        self._listener = listen(self._path, self._mode)
        self._tasks = tasks
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """No new connections; the open ones are cancelled, and ended when this returns."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        self._path.unlink(missing_ok=True)
        running = [c.task for c in self._connections.values() if c.task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_MAX):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                log.exception("accepting failed")
                self._pause_accepting()
                return
            self._open(sock)

    def _pause_accepting(self) -> None:
        """Out of descriptors, say: a readable listener would spin the loop."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(0.2, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _open(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if len(self._connections) >= self.limits.connections:
            log.warning("connection refused", connections=len(self._connections))
            sock.close()
            return
        self._last_id += 1
        pid, uid, gid = credentials(sock)
        caller = Caller(
            connection_id=self._last_id,
            pid=pid,
            uid=uid,
            gid=gid,
            tenant=self._tenant_of(uid, gid),
        )
        connection = _Connection(self.service, sock, caller, self.limits, self._polling)
        self._connections[caller.connection_id] = connection
        assert self._tasks is not None
        task = self._tasks.create_task(
            connection.run(), name=f"local connection {caller.connection_id}"
        )
        connection.task = task
        task.add_done_callback(lambda _: self._forget(caller.connection_id))

    def _forget(self, connection_id: int) -> None:
        # A task that was cancelled before its first step never ran its own clean-up.
        self._connections.pop(connection_id).sock.close()


class _EndedError(Exception):
    """The connection is over; the reason is for the log, empty for an ordinary end."""


class _HungUpError(_EndedError):
    """By the peer."""


class _Connection:
    """One peer: reads frames as they come, answers them one after the other."""

    def __init__(
        self,
        service: Service,
        sock: socket.socket,
        caller: Caller,
        limits: LocalLimits,
        polling: BusyPoll,
    ) -> None:
        self.sock = sock
        self.task: asyncio.Task[None] | None = None
        self._service = service
        self._caller = caller
        self._limits = limits
        self._polling = polling
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._frame_bytes = 0
        """Of the first frame, 0 until its header is there."""
        self._waiter: asyncio.Future[None] | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._ended: _EndedError | None = None
        self._is_reading = False

    async def run(self) -> None:
        self._service.connected(self._caller)
        try:
            self._read_on()
            while True:
                await self._frame_received()
                await self._answer(*self._take_frame())
        except _EndedError as ended:
            self._ended = ended
        except Exception:
            # The border of the task: a bug here must not end the daemon's task group.
            log.exception("connection failed", pid=self._caller.pid)
        finally:
            if self._ended is not None and str(self._ended):
                log.warning("connection closed", reason=str(self._ended), pid=self._caller.pid)
            self._stop_reading()
            self._cancel_stall()
            self.sock.close()
            has_hung_up = isinstance(self._ended, _HungUpError)
            self._service.disconnected(self._caller, has_hung_up=has_hung_up)

    # ---- receiving

    def _read_on(self) -> None:
        if not self._is_reading and self._ended is None:
            self._loop.add_reader(self.sock, self._readable)
            self._is_reading = True

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._loop.remove_reader(self.sock)
            self._is_reading = False

    def _readable(self) -> None:
        try:
            received = self.sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(_HungUpError(f"receiving failed: {error}"))
            return
        if not received:
            self._end(_HungUpError("a message was half sent" if self._received else ""))
            return
        self._received += received
        self._look_at_received()

    def _look_at_received(self) -> None:
        """Knows the first frame's size as soon as its header is there; bounds what is held while a call runs."""
        if self._frame_bytes == 0 and len(self._received) >= HEADER_BYTES:
            payload_bytes = HEADER.unpack_from(self._received)[0]
            if payload_bytes > self._limits.payload_bytes:
                self._end(_EndedError(f"a message is too large bytes={payload_bytes}"))
                return
            self._frame_bytes = HEADER_BYTES + payload_bytes
        if self._has_frame():
            self._polling.received()
            self._cancel_stall()
            self._wake()
            if len(self._received) > self._frame_bytes + _RECV_BYTES:
                self._stop_reading()
        elif self._received and self._stall is None:
            self._stall = self._loop.call_later(self._limits.stall_s, self._stalled)

    def _has_frame(self) -> bool:
        return 0 < self._frame_bytes <= len(self._received)

    def _stalled(self) -> None:
        self._end(_EndedError(f"a message was half sent for {self._limits.stall_s} s"))

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _end(self, ended: _EndedError) -> None:
        """The peer is gone: whatever its call waits for has no reader any more."""
        if self._ended is None:
            self._ended = ended
        self._stop_reading()
        if self._waiter is not None:
            self._wake()
        elif self.task is not None:
            self.task.cancel()

    def _wake(self) -> None:
        if self._waiter is not None:
            _set(self._waiter)

    async def _frame_received(self) -> None:
        while not self._has_frame():
            if self._ended is not None:
                raise self._ended
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _take_frame(self) -> tuple[int, int, int, bytes]:
        _, method, deadline, call = HEADER.unpack_from(self._received)
        payload = bytes(memoryview(self._received)[HEADER_BYTES : self._frame_bytes])
        del self._received[: self._frame_bytes]
        self._frame_bytes = 0
        self._look_at_received()
        if len(self._received) <= _RECV_BYTES:
            self._read_on()
        return method, deadline, call, payload

    # ---- answering

    async def _answer(self, number: int, deadline: int, call: int, payload: bytes) -> None:
        descriptor: int | None = None
        try:
            method = _method(number)
            request = _parsed(method, payload)
            response = await self._called(method, request, deadline)
            answer = frame(number, OK, call, response.SerializeToString())
            if isinstance(request, pb.SegmentRequest):
                descriptor = self._service.segment_fd(request.segment, self._caller)
            elif isinstance(request, pb.ProjectionRequest):
                descriptor = self._service.projection_fd(self._caller)
        except KvstoredError as error:
            answer = _failed(number, call, error)
        except Exception:
            log.exception("a call failed", method=number, pid=self._caller.pid)
            answer = _failed(
                number, call, KvstoredError("internal error: the daemon's log has the details")
            )
        try:
            unsent = self._sent(memoryview(answer), descriptor)
        finally:
            self._service.answered()
            self._polling.answered(self._loop.call_soon)
        while unsent:
            await self._writable()
            # a descriptor goes with the first byte
            unsent = self._sent(unsent, descriptor if len(unsent) == len(answer) else None)

    async def _called(self, method: Method, request: Message, deadline: int) -> Message:
        if method.is_prompt or not deadline:
            return await self._service.call(method.name, request, self._caller)
        try:
            async with asyncio.timeout(deadline / 100) as timeout:
                return await self._service.call(method.name, request, self._caller)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineExceeded(
                f"the deadline passed method={method.name} seconds={deadline / 100}"
            ) from error

    def _sent(self, unsent: memoryview, descriptor: int | None) -> memoryview:
        """What is left of it after as much as the socket takes now."""
        while unsent:
            try:
                if descriptor is None:
                    sent = self.sock.send(unsent)
                else:
                    sent = socket.send_fds(self.sock, [unsent], [descriptor])
                    descriptor = None
            except BlockingIOError:
                break
            except OSError as error:
                raise _HungUpError(f"sending failed: {error}") from error
            unsent = unsent[sent:]
        return unsent

    async def _writable(self) -> None:
        writable = self._loop.create_future()
        self._loop.add_writer(self.sock, _set, writable)
        try:
            async with asyncio.timeout(self._limits.stall_s):
                await writable
        except TimeoutError as error:
            raise _EndedError(f"an answer was not taken within {self._limits.stall_s} s") from error
        finally:
            self._loop.remove_writer(self.sock)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _method(number: int) -> Method:
    if number not in BY_NUMBER:
        raise InvalidArgument(f"this daemon has no such method number={number}; is it older?")
    return BY_NUMBER[number]


def _parsed(method: Method, payload: bytes) -> Message:
    try:
        return method.request.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument(
            f"a request is no {method.request.DESCRIPTOR.name} bytes={len(payload)}"
        ) from error


def _failed(number: int, call: int, error: KvstoredError) -> bytes:
    return frame(number, status_of(error).number, call, failure_of(error).SerializeToString())
