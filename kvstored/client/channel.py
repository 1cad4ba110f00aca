"""A session with the daemon of this host, over a small pool of connections.

All connections carry one session: the first opens it, the others join it by its token, and after a break it is resumed. A daemon
that was restarted has another epoch: that makes another session, and what was leased or filled before is lost.
"""

import math
import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from kvstored.client.connection import Connection
from kvstored.client.lending import Borrowed, Slot, Slots
from kvstored.client.stock import IDLE_S, Stock
from kvstored.clock import Clock
from kvstored.errors import Busy, KvstoredError, Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import pack_u64

Response = TypeVar("Response", bound=Message)

PROTOCOL = 1
CONNECTIONS_MAX = 16
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.02, 0.5
_RELEASES_MAX = 1024
_RIDING_MAX = 16


@dataclass(slots=True, eq=False)
class Session:
    """One session of one boot of the daemon; compared by identity."""

    token: bytes
    epoch: int
    resume_ttl_s: float
    has_projection: bool = False
    busy_poll_s: float = 0.0
    releases: deque[int] = field(default_factory=deque)
    """Leases that ended here and ride on the next Acquire. Beyond the bound they are left to their TTL."""

    def release_later(self, lease: int) -> None:
        if lease and len(self.releases) < _RELEASES_MAX:
            self.releases.append(lease)

    @property
    def may_ride(self) -> bool:
        """Whether few leases wait: those of views, of which a caller may leave many without another Acquire, would add up."""
        return len(self.releases) < _RIDING_MAX

    def take_releases(self) -> list[int]:
        taken = []
        while self.releases:
            try:
                taken.append(self.releases.popleft())
            except IndexError:  # another thread took the last one
                break
        return taken


class Link(Protocol):
    """The right to make calls one after the other, within one session."""

    @property
    def session(self) -> Session: ...

    def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response: ...


@dataclass(slots=True)
class LocalLink:
    session: Session
    connection: Connection
    stock: Stock = field(init=False)
    slot: Slot | None = None
    """While it is lent."""

    def __post_init__(self) -> None:
        self.stock = Stock(self.connection, self.session.token)

    def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response:
        return self.connection.call(name, request, response, timeout_s)


class LocalChannel:
    """Thread-safe. Never survives a fork: the client makes a new one in the child."""

    def __init__(self, path: str, *, name: str, clock: Clock, connect_timeout_s: float) -> None:
        self._path = path
        self._name = name
        self.clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._slots = Slots(CONNECTIONS_MAX)
        self._idle: deque[LocalLink] = deque()
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._connecting = Slots(1)
        self._session: Session | None = None
        self._failures = 0
        self._retry_at_s = 0.0
        self._is_closed = False

    def link(self, timeout_s: float) -> AbstractContextManager[LocalLink]:
        """A connection of the current session, which is opened or resumed first where need be.

        Raises Unavailable at once while the daemon is down, and Busy when no connection becomes free in time.
        """
        return Borrowed(self, timeout_s)

    def borrow(self, timeout_s: float) -> LocalLink:
        slot = self._slots.acquire(timeout_s)
        if slot is None:
            raise Busy(f"all connections are in use connections={CONNECTIONS_MAX}")
        return self._lent(slot, timeout_s)

    def borrow_another(self, timeout_s: float) -> LocalLink | None:
        """For who has one already: None where all are in use, since two such callers could wait for each other."""
        slot = self._slots.acquire(0.0)
        return None if slot is None else self._lent(slot, timeout_s)

    def _lent(self, slot: Slot, timeout_s: float) -> LocalLink:
        try:
            link = self._take_idle() or self._connected(timeout_s)
            try:
                unused_since_s = self.clock.elapsed_s() - IDLE_S
                link.stock.give_back(timeout_s, unused_since_s=unused_since_s)
            except BaseException:
                self._keep(link)
                raise
        except BaseException:
            self._slots.release(slot)
            raise
        link.slot = slot
        return link

    def give_back(self, link: LocalLink) -> None:
        slot, link.slot = link.slot, None
        try:
            self._keep(link)
        except BaseException:
            self._close(link.connection)  # an interrupt: nobody would take it any more
            raise
        finally:
            if slot is not None:
                self._slots.release(slot)

    def close(self) -> None:
        """Ends the session where the daemon is reachable; its fills and leases end with it."""
        if self._is_closed:
            return
        session = self._session
        try:
            if session is not None:
                with self.link(self._connect_timeout_s) as link:
                    self._release(session, link)
                    for each in (link, *self._idle):
                        each.stock.give_back(self._connect_timeout_s, unused_since_s=math.inf)
                        each.connection.collect()
                    request = pb.CloseSessionRequest(session=session.token)
                    link.call(
                        "CloseSession", request, pb.CloseSessionResponse, self._connect_timeout_s
                    )
        except KvstoredError:
            # The daemon is gone, or forgets the session by itself: either way nothing is left to do.
            pass
        finally:
            self._is_closed = True
            while self._idle:
                self._close(self._idle.pop().connection)

    def forked(self) -> None:
        """In the child: closes its copies of all sockets, those in use by the parent's threads too, or else the daemon would
        never see the parent's connections end.
        """
        self._is_closed = True
        for connection in list(self._open):
            connection.close()

    def _close(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()

    def _release(self, session: Session, link: LocalLink) -> None:
        """What it is done with must not look like what it may still read: that is kept aside when the session ends."""
        leases = session.take_releases()
        if leases and link.session is session:
            request = pb.ReleaseRequest(session=session.token, leases=pack_u64(leases))
            link.call("Release", request, pb.ReleaseResponse, self._connect_timeout_s)

    def _take_idle(self) -> LocalLink | None:
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return None
            if link.session is self._session and link.connection.is_reusable:
                return link
            self._close(link.connection)

    def _keep(self, link: LocalLink) -> None:
        if link.connection.is_idle and not self._is_closed:  # who takes it looks closer
            self._idle.append(link)
        else:
            self._close(link.connection)

    def _connected(self, timeout_s: float) -> LocalLink:
        if self._is_closed:
            raise Unavailable("the client is closed")
        turn = self._connecting.acquire(timeout_s)
        if turn is None:
            raise Busy("another thread is still connecting")
        try:
            wait_s = self._retry_at_s - self.clock.now_s()
            if 0 < wait_s <= _BACKOFF_MAX_S:
                raise Unavailable(f"the daemon is not reachable, next try in seconds={wait_s:.3f}")
            try:
                link = self._opened(min(timeout_s, self._connect_timeout_s))
            except KvstoredError:
                backoff_s = min(_BACKOFF_FIRST_S * 2 ** min(self._failures, 10), _BACKOFF_MAX_S)
                self._failures += 1
                self._retry_at_s = self.clock.now_s() + backoff_s
                raise
            self._failures = 0
            return link
        finally:
            self._connecting.release(turn)

    def _opened(self, timeout_s: float) -> LocalLink:
        """A new connection that has opened, joined or resumed the session."""
        known = self._session
        connection = Connection(self._path, timeout_s)
        self._open.add(connection)
        try:
            answer = connection.call(
                "OpenSession",
                pb.OpenSessionRequest(
                    client=self._name,
                    resume_token=known.token if known is not None else b"",
                    protocol=PROTOCOL,
                ),
                pb.OpenSessionResponse,
                timeout_s,
            )
        except BaseException:
            self._close(connection)
            raise
        if known is None or (known.token, known.epoch) != (answer.token, answer.epoch):
            known = Session(
                answer.token,
                answer.epoch,
                answer.resume_ttl_ms / 1000,
                answer.projection,
                answer.busy_poll_us / 1e6,
            )
            self._session = known
        connection.busy_poll(known.busy_poll_s, self.clock)
        return LocalLink(known, connection)
