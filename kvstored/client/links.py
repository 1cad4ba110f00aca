"""What a namespace asks of its transport: the shape that local and remote links share."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from kvstored.client.channel import Session
from kvstored.client.copying import Bytes
from kvstored.client.results import Block, GetResult
from kvstored.client.rows import Rows
from kvstored.client.scatter import Gather
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb

Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class PutPart:
    """One Reserve and the bytes of its pieces. `generations`: put only where they are still current (ReplaceIf)."""

    request: pb.ReserveRequest
    sources: Sequence[Bytes | None]
    keys: int
    generations: Sequence[int] | None = None
    gathers: Sequence[Gather | None] = ()
    """In place of `sources`, for a link that shares memory."""

    @property
    def groups(self) -> int:
        return len(self.sources or self.gathers) // max(self.keys, 1)


@dataclass(frozen=True, slots=True)
class GetCall:
    """One Acquire, its shape, and where its bytes go."""

    request: pb.AcquireRequest
    keys: int
    groups: int
    out: Rows | None = None
    verify: bool = True
    gathers: Sequence[Gather | None] = ()
    """Buffers in place of `out`, for a link that shares memory; `ranges`: of each piece, None for all of it."""
    ranges: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Leased:
    """Blocks in place, read-only, as long as the lease lives."""

    session: Session
    lease: int
    blocks: tuple[Block | None, ...]
    status: tuple[ReadStatus, ...]
    miss_reason: str


class Link(Protocol):
    """The right to make calls one after the other within one session; from Transport.link, never kept."""

    @property
    def shares_memory(self) -> bool:
        """Whether it takes buffers: what streams joins them first."""
        ...

    @property
    def session(self) -> Session: ...

    def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response: ...

    def put(self, parts: Sequence[PutPart], timeout_s: float) -> list[FillStatus]: ...

    def get(self, call: GetCall, timeout_s: float) -> GetResult: ...

    def lease(self, call: GetCall, timeout_s: float) -> Leased: ...


class Transport(Protocol):
    def link(self, timeout_s: float) -> AbstractContextManager[Link]: ...

    def close(self) -> None:
        """Ends the session."""

    def forked(self) -> None:
        """In the child of a fork: lets go of what the parent uses, without a word to the daemon."""


def milliseconds(seconds_s: float) -> int:
    """As messages have times."""
    if not 0 <= seconds_s < 4_000_000:
        raise InvalidArgument(f"a time is out of range seconds={seconds_s}")
    return round(seconds_s * 1000)
