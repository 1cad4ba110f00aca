"""The blocking client: one object an engine process shares among its threads."""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TypeVar

from google.protobuf.message import Message

from kvstored.client.address import default_address
from kvstored.client.bulk import BulkPool
from kvstored.client.channel import LocalChannel
from kvstored.client.links import Link, Post, Transport, opened
from kvstored.client.local_transport import LocalTransport
from kvstored.client.namespace import Namespace
from kvstored.client.remote import RemoteTransport
from kvstored.client.results import OptimisticReads, Posted
from kvstored.clock import Clock, SystemClock
from kvstored.core.calls import FillStatus
from kvstored.core.types import NamespaceSpec
from kvstored.errors import InvalidArgument, KvstoredError, Unavailable

Response = TypeVar("Response", bound=Message)

_LOCAL, _GRPC_UNIX, _GRPC, _BULK = "unix://", "grpc+unix://", "grpc://", "bulk://"


class Client:
    """A connection to one daemon, made when first needed, and again whenever it broke.

    `address`: `host:port` from anywhere: a daemon on this host is then reached by its local socket, so that bytes go through shared
    memory, any other one by its bulk channel, or by gRPC streams where it has none. `unix:///run/kvstored.sock` is the local socket itself,
    None the default one. `bulk://host:port` never takes the local socket; `grpc://host:port` and `grpc+unix:///path` always stream.

    Thread-safe. While the daemon is down calls raise Unavailable at once. After a fork the child has a session of its own, and leases of
    the parent are lost to it. `timeout_s` bounds each message; a daemon that is up but slow is DeadlineExceeded. `optimistic`: see
    `Namespace.get`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "",
        timeout_s: float = 30.0,
        connect_timeout_s: float = 5.0,
        copy_threads: int = 2,
        optimistic: bool = True,
        clock: Clock | None = None,
    ) -> None:
        if copy_threads < 1 or timeout_s <= 0 or connect_timeout_s <= 0:
            raise InvalidArgument("timeouts and copy_threads are positive")
        self.address = default_address() if address is None else address
        self.timeout_s = timeout_s
        self.optimistic = optimistic
        self._name = name
        self._connect_timeout_s = connect_timeout_s
        self._copy_threads = copy_threads
        self._clock = clock or SystemClock()
        self._is_closed = False
        self._settling = threading.Lock()
        self._counting = threading.Lock()
        self._put: Counter[FillStatus] = Counter()
        """What became of blocks that were to be posted and had to be put."""
        self._start()
        _clients.add(self)

    def open_namespace(
        self, spec: NamespaceSpec, *, supersede: bool = False, timeout_s: float | None = None
    ) -> Namespace:
        """Opens, and makes where new; raises NamespaceMismatch with the difference where the alias means something else.

        `supersede` moves the bare model name to this revision: the earlier one is retired.
        """
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        with self.link(timeout_s) as link:
            return Namespace(self, opened(link, spec, wait_s, supersede=supersede), link.session)

    def call(
        self,
        name: str,
        request: Message,
        response: type[Response],
        timeout_s: float | None = None,
    ) -> Response:
        """Any unary method of the API by its name: Stat, Tree, Explain, PollEvents ..."""
        with self.link(timeout_s) as link:
            wait_s = self.timeout_s if timeout_s is None else timeout_s
            return link.call(name, request, response, wait_s)

    def session(self, timeout_s: float | None = None) -> bytes:
        """The token of this client's session, for `call`."""
        with self.link(timeout_s) as link:
            return link.session.token

    def flush(self, timeout_s: float | None = None) -> Posted:
        """Waits until what was posted is stored, or is known not to be; what became of it since the last flush."""
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        found = Counter[FillStatus]() if self._is_closed else self._transport.flush(wait_s)
        with self._counting:
            put, self._put = self._put, Counter()
        return Posted(found + put)

    def may_post(self, post: Post, timeout_s: float) -> bool:
        return self._is_settled and not self._is_closed and self._transport.post(post, timeout_s)

    def posted(self, status: Sequence[FillStatus]) -> None:
        with self._counting:
            self._put.update(status)

    def optimistic_reads(self) -> OptimisticReads:
        """What became of keys that were looked for without a message, since this client was made; zeros over gRPC."""
        return self._transport.optimistic_reads()

    def link(self, timeout_s: float | None) -> AbstractContextManager[Link]:
        """For the parts of this package: calls within one session."""
        if self._is_closed:
            raise Unavailable("the client is closed")
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        if not self._is_settled:
            self._settle(wait_s)
        return self._transport.link(wait_s)

    def close(self) -> None:
        """Ends the session with its fills and leases. Arrays of views stay readable memory; their leases are lost."""
        if not self._is_closed:
            self._is_closed = True
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def after_fork(self) -> None:
        """In the child: nothing of the parent's is used or told to the daemon. Called by itself."""
        self._transport.forked()
        if not self._is_closed:
            self._settling = threading.Lock()
            self._counting = threading.Lock()
            self._put = Counter()
            self._start()

    def _start(self) -> None:
        self._is_settled = self.address.startswith((_LOCAL, _GRPC, _GRPC_UNIX, _BULK))
        self._transport = self._new_transport()

    def _settle(self, timeout_s: float) -> None:
        """Before the first call to `host:port`: a daemon on this host is spoken to by its local socket."""
        with self._settling:
            remote = self._transport
            if self._is_settled or not isinstance(remote, RemoteTransport):
                return
            socket = remote.near_socket(timeout_s)
            local = self._local_transport(socket) if socket else None
            if local is not None and _is_up(local, timeout_s):
                self._transport = local
                remote.close()
            self._is_settled = True

    def _local_transport(self, path: str) -> LocalTransport:
        channel = LocalChannel(
            path,
            name=self._name or f"pid {os.getpid()}",
            clock=self._clock,
            connect_timeout_s=self._connect_timeout_s,
        )
        return LocalTransport(channel, self._copy_threads)

    def _new_transport(self) -> Transport:
        name = self._name or f"pid {os.getpid()}"
        if self.address.startswith(_LOCAL):
            return self._local_transport(self.address.removeprefix(_LOCAL))
        if self.address.startswith(_GRPC_UNIX):
            target = f"unix://{self.address.removeprefix(_GRPC_UNIX)}"
            return RemoteTransport(target, name=name, clock=self._clock, bulk=None)
        target = self.address.removeprefix(_GRPC).removeprefix(_BULK)
        if "/" in target or not target.rpartition(":")[2].isdigit():
            raise InvalidArgument(
                f"an address is unix:///path, grpc+unix:///path, bulk://host:port or host:port, not {self.address!r}"
            )
        bulk = None if self.address.startswith(_GRPC) else BulkPool(self._clock)
        return RemoteTransport(target, name=name, clock=self._clock, bulk=bulk)


def _is_up(transport: LocalTransport, timeout_s: float) -> bool:
    try:
        with transport.link(timeout_s):
            return True
    except KvstoredError:
        transport.close()
        return False


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _forked() -> None:
    for client in list(_clients):
        client.after_fork()


os.register_at_fork(after_in_child=_forked)
