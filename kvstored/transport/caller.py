"""Who calls, and what a channel asks of the daemon: the border between transport and store."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message


@dataclass(frozen=True, slots=True)
class Caller:
    """One connection of the local channel and its peer credentials; `pid` is 0 where the peer's
    namespace hides it.
    """

    connection_id: int
    pid: int
    uid: int
    gid: int
    tenant: str


Answer = Callable[[Any, Caller], Awaitable[Message]]
"""Any: each takes the request class that the method table names for it."""


class Service(Protocol):
    """All methods run on the store's loop. Errors are KvstoredError; anything else is a bug,
    logged, and answered as internal.
    """

    async def call(self, method: str, request: Message, caller: Caller) -> Message:
        """Answers one call. Cancelled when its deadline passes or its connection ends: must leave
        nothing half done.

        OpenSession ties the session to the caller's connection unless `detached`; opened again with
        its token from another connection, it is tied to that one too. It is without connection when
        the last of them has ended.
        """

    def segment_fd(self, segment: int, caller: Caller) -> int:
        """The descriptor to send after `call` answered Segment; it stays the service's own."""

    def projection_fd(self, caller: Caller) -> int:
        """The same after Projection."""

    def answered(self) -> None:
        """The answer of the last `call` was handed to its socket: what could wait for that is done, in the same turn of the loop. `call` must
        not suspend after it has left such work."""

    def connected(self, caller: Caller) -> None: ...

    def disconnected(self, caller: Caller, *, has_hung_up: bool) -> None:
        """Every connected caller ends here exactly once, after its running call has ended. `has_hung_up`: it was the peer who closed the connection."""
