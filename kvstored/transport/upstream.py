"""The gRPC front's way to the daemon: the local channel for asyncio, in raw payloads, over a bounded pool of connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvstored.errors import Busy, Corrupt, DeadlineExceeded, Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.frames import (
    HEADER,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    deadline_field,
    frame,
)
from kvstored.wire.methods import BY_NAME, Method
from kvstored.wire.status import OK, error_of

Response = TypeVar("Response", bound=Message)

_GRACE_S = 1.0
"""Waited beyond the deadline for the daemon's own answer about it."""


class UpstreamLink:
    """One connection, one call at a time. Broken after a failure of the transport or a cancelled call."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._call = 0
        self._is_idle = True
        self.epoch = 0
        """Of the daemon's boot: segments are known by it."""

    @property
    def is_reusable(self) -> bool:
        return self._is_idle and not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()

    async def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response:
        payload = await self.call_raw(BY_NAME[name], request.SerializeToString(), timeout_s)
        try:
            return response.FromString(payload)
        except DecodeError as error:
            raise Corrupt(f"an answer is no {response.DESCRIPTOR.name}") from error

    async def call_raw(self, method: Method, payload: bytes, timeout_s: float) -> bytes:
        """The answer's payload; raises what the daemon answered instead."""
        assert self._is_idle, "the connection is in use or broken"
        self._call += 1
        sent = frame(method.number, deadline_field(timeout_s), self._call, payload)
        self._is_idle = False
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                self._writer.write(sent)
                await self._writer.drain()
                header = await self._reader.readexactly(HEADER_BYTES)
                payload_bytes, _, status, call = HEADER.unpack(header)
                if call != self._call or payload_bytes > PAYLOAD_BYTES_MAX:
                    raise Corrupt(f"the daemon's answer is no frame bytes={payload_bytes}")
                answer = await self._reader.readexactly(payload_bytes)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the daemon did not answer method={method.name}") from error
        except (OSError, EOFError) as error:
            raise Unavailable(f"the connection to the daemon broke: {error}") from error
        self._is_idle = True
        if status != OK:
            raise error_of(status, answer)
        return answer


class Upstream:
    """Connections to one daemon. A daemon that is down is Unavailable at once; more callers than connections are Busy."""

    def __init__(self, path: Path, *, connections_max: int = 512) -> None:
        self.path = path
        self._connections_max = connections_max
        self._in_use = 0
        self._idle: list[UpstreamLink] = []

    @asynccontextmanager
    async def link(self) -> AsyncIterator[UpstreamLink]:
        if self._in_use >= self._connections_max:
            raise Busy(f"too many calls at once calls={self._in_use}")
        self._in_use += 1
        try:
            link = self._take_idle() or await self._connected()
            try:
                yield link
            finally:
                if link.is_reusable:
                    self._idle.append(link)
                else:
                    link.close()
        finally:
            self._in_use -= 1

    async def call_raw(self, method: Method, payload: bytes, timeout_s: float) -> bytes:
        async with self.link() as link:
            return await link.call_raw(method, payload, timeout_s)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> UpstreamLink | None:
        while self._idle:
            link = self._idle.pop()
            if link.is_reusable:
                return link
            link.close()
        return None

    async def _connected(self) -> UpstreamLink:
        try:
            async with asyncio.timeout(5.0):
                reader, writer = await asyncio.open_unix_connection(self.path)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"the daemon is not reachable socket={self.path}: {error}") from error
        link = UpstreamLink(reader, writer)
        try:
            stat = await link.call("Stat", pb.StatRequest(), pb.StatResponse, 5.0)
        except BaseException:
            link.close()
            raise
        link.epoch = stat.epoch
        return link
