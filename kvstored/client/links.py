"""What a namespace asks of its transport: the shape that local and remote links share."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message

from kvstored.client.channel import Session
from kvstored.client.copying import Bytes
from kvstored.client.gpu import Pool
from kvstored.client.hints import hint_message
from kvstored.client.keys import Keys
from kvstored.client.results import Block, GetResult, OpenedNamespace, OptimisticReads
from kvstored.client.rows import Rows
from kvstored.client.scatter import Gather
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.types import NamespaceSpec
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.namespaces import message_of, spec_of

Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Plain:
    """Of a part of full blocks in one whole piece each, which may go to places set aside: the namespace's digest, the seed of its
    fingerprints, bytes of a block."""

    namespace: bytes
    seed: int
    block_bytes: int


class Said(NamedTuple):
    """What a put says of all its blocks."""

    shard: int = 0
    ends_path: bool = True
    request_id: bytes = b""
    fill_ttl_s: float = 0
    hint: Hint = NO_HINT

    def tell(self, request: pb.ReserveRequest) -> None:
        request.shard = self.shard
        request.ends_path = self.ends_path
        request.request_id = self.request_id
        if self.fill_ttl_s:
            request.fill_ttl_ms = milliseconds(self.fill_ttl_s)
        hint = hint_message(self.hint)
        if hint is not None:
            request.hint.CopyFrom(hint)


class Post(NamedTuple):
    """Full blocks of a plain namespace that nobody waits for, one array each. `session`: in which the namespace is open."""

    session: Session
    plain: Plain
    keys: Keys
    sources: Sequence[Bytes]
    hint: Hint


class Aside(NamedTuple):
    """How the daemon hears of a plain part whose bytes lie in places set aside; the part's own request is within this one."""

    plain: Plain
    request: pb.PutAsideRequest


class PutPart(NamedTuple):
    """One Reserve and the bytes of its pieces. `generations`: put only where they are still current (ReplaceIf)."""

    request: pb.ReserveRequest
    sources: Sequence[Bytes | None]
    keys: int
    generations: Sequence[int] | None = None
    gathers: Sequence[Gather | None] = ()
    """In place of `sources`, for a link that shares memory."""
    aside: Aside | None = None

    @property
    def groups(self) -> int:
        return len(self.sources or self.gathers) // max(self.keys, 1)

    def joined(self) -> "PutPart":
        """For a link that takes no buffers: their bytes copied into one run a piece."""
        sources = [None if gather is None else gather.joined() for gather in self.gathers]
        return self._replace(sources=sources, gathers=())


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


class Glance(NamedTuple):
    """A get of a plain namespace that may go without a message. `gathers` and `ranges`: as of a GetCall."""

    digest: bytes
    seed: int
    keys: Keys
    out: Rows | None
    gathers: Sequence[Gather | None] = ()
    ranges: tuple[tuple[int, int], ...] | None = None

    def part(self, indexes: Sequence[int]) -> "Glance":
        """Of these keys, which are no path any more."""
        keys = self.keys
        has_last = bool(indexes) and indexes[-1] == len(keys) - 1
        chosen = Keys(
            tuple([keys.keys[i] for i in indexes]),
            last_valid_tokens=keys.last_valid_tokens if has_last else 0,
            unchained=True,
        )
        out = None if self.out is None else [self.out[i] for i in indexes]
        return Glance(self.digest, self.seed, chosen, out)


@dataclass(frozen=True, slots=True)
class Leased:
    """Blocks in place, read-only, as long as the lease lives."""

    session: Session
    lease: int
    held_until_s: float
    """By the link's clock: until then it held for sure."""
    lossy: bytes
    """One byte a key, as in AcquireResponse; empty where all are exact."""
    bytes: int
    blocks: tuple[Block | None, ...]
    status: tuple[ReadStatus, ...]
    miss_reason: str
    settle: Callable[[], None] = lambda: None
    """Called before the lease ends: waits for readers that the caller cannot see, a GPU's."""
    pools: Mapping[int, Pool] | None = None
    """Where layers of it may still be on their way to; None where all is there."""


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

    def glance(self, glance: Glance, timeout_s: float) -> GetResult | None:
        """What can be read without a message, all other keys as misses; None where that is nothing."""

    def get(self, call: GetCall, timeout_s: float) -> GetResult: ...

    def get_each(self, calls: Sequence[GetCall], timeout_s: float) -> list[GetResult]:
        """One after the other, but that a link that shares memory copies what one found while others load."""
        ...

    def lease(self, call: GetCall, timeout_s: float) -> Leased: ...

    def lease_on_gpu(self, call: GetCall, timeout_s: float) -> Leased:
        """The same in GPU memory; Unavailable where that is not shared."""
        ...

    def wait_layers(self, leased: Leased, layers: int, stream: int | None, timeout_s: float) -> int:
        """How many from the first on are there, or come before what is put on this stream from now on."""
        ...

    def release(self, leased: Leased, timeout_s: float) -> bool:
        """Ends the lease; whether it held until now."""
        ...


class Linked(Protocol):
    """What a namespace needs of its client."""

    timeout_s: float
    optimistic: bool

    def link(self, timeout_s: float | None) -> AbstractContextManager[Link]: ...

    def may_post(self, post: Post, timeout_s: float) -> bool:
        """Whether it is on its way; else it has to be put."""
        ...

    def posted(self, status: Sequence[FillStatus]) -> None:
        """What became of blocks that were to be posted and had to be put."""
        ...


def opened(
    link: Link, spec: NamespaceSpec, timeout_s: float, *, supersede: bool
) -> OpenedNamespace:
    request = pb.OpenNamespaceRequest(namespace=message_of(spec), supersede=supersede)
    answer = link.call("OpenNamespace", request, pb.OpenNamespaceResponse, timeout_s)
    return OpenedNamespace(
        answer.digest, spec_of(answer.namespace, caller_tenant=spec.tenant), answer.created
    )


class Transport(Protocol):
    def link(self, timeout_s: float) -> AbstractContextManager[Link]: ...

    def close(self) -> None:
        """Ends the session."""

    def optimistic_reads(self) -> OptimisticReads: ...

    def post(self, post: Post, timeout_s: float) -> bool:
        """Whether it is on its way: its bytes were taken, and the daemon hears of them within moments. Else nothing was done."""
        ...

    def flush(self, timeout_s: float) -> Counter[FillStatus]:
        """Waits for what is on its way; what became of blocks since the last time."""
        ...

    def forked(self) -> None:
        """In the child of a fork: lets go of what the parent uses, without a word to the daemon."""


def milliseconds(seconds_s: float) -> int:
    """As messages have times."""
    if not 0 <= seconds_s < 4_000_000:
        raise InvalidArgument(f"a time is out of range seconds={seconds_s}")
    return round(seconds_s * 1000)
