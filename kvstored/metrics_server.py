"""HTTP for operators: /metrics, /healthz, /readyz. Small on purpose: three answers, bounded everything, no keep-alive.

The text of /metrics is made in a thread of its own, which yields the interpreter lock every switch interval: the loop does not wait for it.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

from kvstored.errors import ConfigError
from kvstored.fields import Endpoint
from kvstored.metrics import Metrics

_CONNECTIONS_MAX = 64
_REQUEST_BYTES_MAX = 16384
_REQUEST_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0
_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """`refresh` runs on the loop before each scrape and sets what is read then (gauges, facts).
    `unready` says why calls cannot be served yet; None when they can.
    """

    def __init__(
        self, metrics: Metrics, *, refresh: Callable[[], None], unready: Callable[[], str | None]
    ) -> None:
        self._metrics = metrics
        self._refresh = refresh
        self._unready = unready
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self, endpoint: Endpoint) -> None:
        """`ConfigError` where the address is taken or not this machine's."""
        try:
            if endpoint.path:
                self._server = await asyncio.start_unix_server(
                    self._connected, endpoint.path, limit=_REQUEST_BYTES_MAX
                )
            else:
                self._server = await asyncio.start_server(
                    self._connected, endpoint.host, endpoint.port, limit=_REQUEST_BYTES_MAX
                )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(
                f"metrics cannot listen: metrics_listen={endpoint} error={reason}; give another --metrics-listen, or off"
            ) from error

    @property
    def port(self) -> int:
        """The one that the kernel chose for port 0."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._server.wait_closed()
            except TimeoutError:
                pass  # a scraper that holds its connection does not hold up the end
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = await self._answer(head)
                writer.write(_response(status, kind, body, with_body=not head.startswith(b"HEAD ")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # who does not speak HTTP in time gets no answer
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, head: bytes) -> tuple[HTTPStatus, str, bytes]:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if self._connections > _CONNECTIONS_MAX:
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, b"too many connections\n"
        if method not in (b"GET", b"HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET\n"
        if path == b"/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, await self._exposition()
        if path == b"/healthz":
            return HTTPStatus.OK, _TEXT, b"ok\n"
        if path == b"/readyz":
            reason = self._unready()
            if reason is None:
                return HTTPStatus.OK, _TEXT, b"ready\n"
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{reason}\n".encode()
        return HTTPStatus.NOT_FOUND, _TEXT, b"/metrics, /healthz, /readyz\n"

    async def _exposition(self) -> bytes:
        self._refresh()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._metrics.exposition)


def _response(status: HTTPStatus, kind: str, body: bytes, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
