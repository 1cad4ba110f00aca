"""The client for asyncio programs: the blocking one on a bounded pool of its own threads, so that bytes never touch the loop."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from google.protobuf.message import Message

from kvstored.client.client import Client
from kvstored.client.keys import ExtraKeys, Keys
from kvstored.client.namespace import Namespace
from kvstored.client.results import Posted
from kvstored.client.view import View
from kvstored.core.keys import Tokens
from kvstored.core.types import NamespaceSpec
from kvstored.errors import Busy, KvstoredError, Unavailable

P = ParamSpec("P")
T = TypeVar("T")
Response = TypeVar("Response", bound=Message)


class AsyncClient:
    """Like Client, which it makes from the same address. Cancelling a call does not undo it; a view that nobody waits for is released.

    At most `calls_max` calls run or wait; more are Busy. Not for use across a fork: make another one in the child.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "",
        timeout_s: float = 30.0,
        threads: int = 8,
        calls_max: int = 256,
    ) -> None:
        self._client = Client(address, name=name, timeout_s=timeout_s)
        self._pool = ThreadPoolExecutor(threads, "kvstored-client")
        self._slots = threading.BoundedSemaphore(calls_max)

    async def open_namespace(
        self, spec: NamespaceSpec, *, supersede: bool = False, timeout_s: float | None = None
    ) -> "AsyncNamespace":
        opened = await self.run(
            functools.partial(
                self._client.open_namespace, spec, supersede=supersede, timeout_s=timeout_s
            )
        )
        return AsyncNamespace(self, opened)

    async def call(
        self,
        name: str,
        request: Message,
        response: type[Response],
        timeout_s: float | None = None,
    ) -> Response:
        return await self.run(
            functools.partial(self._client.call, name, request, response, timeout_s)
        )

    async def flush(self, timeout_s: float | None = None) -> Posted:
        return await self.run(functools.partial(self._client.flush, timeout_s))

    async def run(self, call: Callable[[], T]) -> T:
        """Any blocking call on this client's threads."""
        return await asyncio.wrap_future(self.start(call))

    def start(self, call: Callable[[], T]) -> "Future[T]":
        """As `run`, for a call whose end is not awaited."""
        if not self._slots.acquire(blocking=False):
            raise Busy("too many calls at once")
        try:
            future = self._pool.submit(call)
        except RuntimeError as error:
            self._slots.release()
            raise Unavailable("the client is closed") from error
        future.add_done_callback(lambda _: self._slots.release())
        return future

    async def close(self) -> None:
        """Once is enough. Where this is cancelled, a thread closes it all the same."""
        try:
            closing = self._pool.submit(self._client.close)
        except RuntimeError:  # it was closed before
            return
        self._pool.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(closing))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _async(
    call: Callable[Concatenate[Namespace, P], T],
) -> "Callable[Concatenate[AsyncNamespace, P], Awaitable[T]]":
    async def awaited(self: "AsyncNamespace", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.client.run(functools.partial(call, self.blocking, *args, **kwargs))

    return functools.update_wrapper(awaited, call)


class AsyncNamespace:
    """Namespace with every call awaited; `keys` only computes."""

    def __init__(self, client: AsyncClient, blocking: Namespace) -> None:
        self.client = client
        self.blocking = blocking
        self.digest = blocking.digest
        self.spec = blocking.spec

    def keys(self, tokens: Tokens, extra_keys: ExtraKeys = ()) -> Keys:
        return self.blocking.keys(tokens, extra_keys)

    match = _async(Namespace.match)
    locate = _async(Namespace.locate)
    put = _async(Namespace.put)
    post = _async(Namespace.post)
    put_from = _async(Namespace.put_from)
    replace_if = _async(Namespace.replace_if)
    get = _async(Namespace.get)
    get_into = _async(Namespace.get_into)
    pin = _async(Namespace.pin)
    unpin = _async(Namespace.unpin)
    prefetch = _async(Namespace.prefetch)
    touch = _async(Namespace.touch)
    report = _async(Namespace.report)
    report_access = _async(Namespace.report_access)
    report_resident = _async(Namespace.report_resident)
    remove = _async(Namespace.remove)
    clear = _async(Namespace.clear)
    begin_request = _async(Namespace.begin_request)
    extend_request = _async(Namespace.extend_request)
    complete_request = _async(Namespace.complete_request)

    def get_view(
        self, keys: Keys, *, groups: Sequence[str] | None = None, shard: int = 0, ttl_s: float = 0
    ) -> AbstractAsyncContextManager[View]:
        """Blocks in place for the body of the `async with`, which ends with LeaseLost where the lease did not hold."""
        get = functools.partial(
            self.blocking.get_view, keys, groups=groups, shard=shard, ttl_s=ttl_s
        )
        return self._viewed(get)

    def map_gpu(
        self,
        keys: Keys,
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ttl_s: float = 0,
        layers: int = 0,
    ) -> AbstractAsyncContextManager[View]:
        """The same in GPU memory; see `Namespace.map_gpu`. `View.wait_layers` blocks: run it in a thread."""
        get = functools.partial(
            self.blocking.map_gpu, keys, groups=groups, shard=shard, ttl_s=ttl_s, layers=layers
        )
        return self._viewed(get)

    @asynccontextmanager
    async def _viewed(self, get: Callable[[], View]) -> AsyncIterator[View]:
        acquiring = self.client.start(get)
        try:
            view = await asyncio.wrap_future(acquiring)
        except asyncio.CancelledError:
            # Its thread goes on, and the lease would stay until its TTL.
            acquiring.add_done_callback(_release_unseen)
            raise
        try:
            yield view
        except BaseException:
            with suppress(KvstoredError):
                await self.client.run(view.release)
            raise
        await self.client.run(view.release)


def _release_unseen(acquiring: "Future[View]") -> None:
    """On the thread that acquired, or at once where it never began."""
    if not acquiring.cancelled() and acquiring.exception() is None:
        with suppress(KvstoredError):
            acquiring.result().release()
