"""What callers ask of the catalog and what it answers, as values; and the effects that the shell must carry out.

Expected outcomes are values here (granted, present, in progress, no space, a miss). The catalog raises only where the caller must
change course. Values that come by the thousand are named tuples: a frozen dataclass takes three times as long to make.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.types import Heat, KeyBatch, NamespaceId, Part, Place, SessionId, TierId

Fingerprint = tuple[int, int]
"""(low, high) words of a key's 128-bit fingerprint."""
NO_FINGERPRINT: Fingerprint = (0, 0)


class FillStatus(IntEnum):
    """Numbers as on the wire."""

    GRANTED = 1
    PRESENT = 2
    IN_PROGRESS = 3
    NO_SPACE = 4
    COMMITTED = 5
    LOST = 6


class ReadStatus(IntEnum):
    """Numbers as on the wire."""

    HIT = 1
    MISS = 2
    PENDING = 3


class Reason(StrEnum):
    """Why a copy was forgotten, or why a key is not there."""

    NEVER_STORED = "never-stored"
    WATERMARK = "evicted-watermark"
    DEMAND = "evicted-demand"
    RETIRED = "evicted-retired"
    SUPERSEDED = "evicted-superseded"
    EXPIRED = "expired"
    REMOVED = "removed"
    DISCARDED = "discarded"
    REPLACED = "replaced"
    CORRUPT = "corrupt"
    FILL_LOST = "fill-lost"
    INCOMPLETE = "incomplete"
    RECOVERING = "recovering"
    WRONG_NAMESPACE = "wrong-namespace"
    LOSSY = "lossy"
    NO_SPACE = "no-space"
    IO_ERROR = "io-error"
    UNKNOWN = "unknown"


class TouchEvent(IntEnum):
    STORED = 0
    HIT = 1
    HINT = 2
    FOUND = 3
    """At start, from before it; when it was used last is in the column of its block."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Capacity and shares of one tier. `capacity_units` is the configured size, granted segment by segment through `grow`.

    `high`, `low`: watermarks as a share of the capacity. `checkpoint_share`: of the capacity for window and state copies while a
    namespace with such groups is open. `sink_share`: of the capacity that sinks may hold exempt from eviction. `lease_share`,
    `pin_share`: of the capacity that leases and pins may hold. `aside_share`: of the capacity that sessions may hold for puts to come,
    each of them half of that. `admit_hits`: a block is written to this tier once it was hit so
    often, or has children (0: always). `write_budget_bytes`: a day, `min_benefit_bytes`: of a path, both of this tier (0: no bound).
    """

    tier: TierId
    capacity_units: int
    high: float = 1.0
    low: float = 1.0
    checkpoint_share: float = 0.25
    sink_share: float = 0.05
    lease_share: float = 0.8
    pin_share: float = 0.5
    aside_share: float = 0.125
    admit_hits: int = 0
    write_budget_bytes: int = 0
    min_benefit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the books, in counts or seconds, and what they do not do."""

    sessions_max: int = 4096
    fills_per_session_max: int = 65536
    leases_per_session_max: int = 65536
    requests_per_session_max: int = 65536
    pins_max: int = 65536
    lease_ttl_max_s: float = 3600.0
    fill_ttl_max_s: float = 3600.0
    pin_ttl_max_s: float = 30 * 86400.0
    quarantine_s: float = 600.0
    checkpoint_ttl_s: float = 600.0
    incomplete_ttl_s: float = 60.0
    history_max: int = 65536
    hears_hints: bool = True
    """Policies are told what engines say of a request."""
    writes_back: bool = True
    """What is in memory is copied to NVMe; else eviction drops it."""


@dataclass(frozen=True, slots=True)
class Parents:
    """Parent of each key of a call, as fingerprints: `known` False leaves a block where it is (a root until linked later)."""

    fingerprints: NDArray[np.uint64]
    known: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Reserve:
    session: SessionId
    ns: NamespaceId
    shard: int
    keys: KeyBatch
    parents: Parents
    groups_mask: int
    sizes: NDArray[np.uint64]
    """(n, G) bytes of each selected group; 0: not put."""
    last_valid_tokens: int
    ttl_s: float
    request_id: bytes = b""
    hint: Hint = NO_HINT
    contents: NDArray[np.uint32] | None = None
    """Fingerprints of the keys' content keys, 0 for none."""


class GrantedPiece(NamedTuple):
    group: int
    shard: int
    length: int
    place: Place
    generation: int


class Granted(NamedTuple):
    """The right to write: `pieces` in namespace order, only those that this caller has to write."""

    fill: int
    fingerprint: Fingerprint
    parent: Fingerprint
    depth: int
    valid_tokens: int
    heat: Heat
    key_index: int
    pieces: tuple[GrantedPiece, ...]


class Committed(NamedTuple):
    """A fill that became part of its copy. `visible`: the block can be read now (all required groups of all shards are there)."""

    fill: int
    pieces: tuple[GrantedPiece, ...]
    visible: bool


@dataclass(frozen=True, slots=True)
class Acquire:
    session: SessionId
    ns: NamespaceId
    shard: int
    keys: KeyBatch
    groups_mask: int
    ttl_s: float
    load: bool = True
    """Whether copies that are only in slower tiers are brought up."""
    tier: TierId = TierId.DRAM
    """Where they are read: HBM takes required groups from copies in DRAM."""
    exact: bool = False
    """Whether blocks that are not what was put are misses."""


class Base(NamedTuple):
    """A piece on NVMe that another one may refer to (group, shard and length are the same), by its block's fingerprint."""

    fingerprint: Fingerprint
    place: Place


@dataclass(frozen=True, slots=True)
class PieceMove:
    """`base`: what it may be stored against; it is kept until the task has ended, and longer if it was."""

    group: int
    shard: int
    length: int
    checksum: int
    source: Place
    target: Place
    base: Base | None = None


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Bytes to carry from one tier to another. The source is leased and the target reserved until commit_copy or abort_copy.
    `content`: fingerprint of the block's content key, 0 where it has none."""

    id: int
    ns: NamespaceId
    fingerprint: Fingerprint
    parent: Fingerprint
    part: Part
    source: TierId
    target: TierId
    source_copy: int
    target_copy: int
    moves: tuple[PieceMove, ...]
    depth: int
    valid_tokens: int
    hits: int
    heat: Heat
    generation: int
    content: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(move.length for move in self.moves)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """How a piece of a task came to lie in the target: `place` is the kept head of the reserved one. `refers`: to the move's base. `lossy`: what
    lies there decodes to is not what was put; `checksum` is of that."""

    place: Place
    checksum: int
    refers: bool = False
    lossy: bool = False


class ReadPiece(NamedTuple):
    """A readable piece; `copy` is its copy row, for `verified` and `drop_copy`."""

    group: int
    shard: int
    length: int
    checksum: int
    place: Place
    copy: int


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """One key of a grant. `pieces` in namespace order of the selected groups, None where the group is not there.

    `tier` is where it was read from before any load. `unverified`: recovered after a restart or in suspect space; check the content
    before handing it out.
    """

    status: ReadStatus
    tier: TierId
    generation: int
    pieces: tuple[ReadPiece | None, ...]
    unverified: bool
    must_verify: bool
    reason: Reason
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Pinned:
    pin: int
    blocks: int
    bytes: int


class PieceRow(NamedTuple):
    """A piece of a forgotten copy."""

    group: int
    shard: int
    place: Place


class Freed(NamedTuple):
    """A copy was forgotten. DRAM: mark its records free at once, the space may be granted again by the next call.
    NVMe: discard the records, then call `discarded(token)`; the space is not granted again before."""

    tier: TierId
    ns: NamespaceId
    fingerprint: Fingerprint
    pieces: tuple[PieceRow, ...]
    reason: Reason
    token: int
    units: int


class Hidden(NamedTuple):
    """A copy in DRAM was forgotten while it is still read: nobody new may read it from now on. Its `Freed` follows with its last reader."""

    fingerprint: Fingerprint
    pieces: tuple[PieceRow, ...]


class Visible(NamedTuple):
    """A block became readable (first copy of its last missing part), or a further tier holds it."""

    ns: NamespaceId
    fingerprint: Fingerprint
    tier: TierId
    depth: int
    pieces: tuple[PieceRow, ...]


@dataclass(frozen=True, slots=True)
class Leased:
    """The first lease on DRAM copies began, or the last one ended: their records carry the mark over a crash.

    `heads`: segment and first unit of each piece.
    """

    heads: list[tuple[int, int]]
    leased: bool


@dataclass(frozen=True, slots=True)
class Linked:
    """The parent of a stored block became known: the records of its copies in this tier name it from now on."""

    tier: TierId
    fingerprint: Fingerprint
    parent: Fingerprint
    depth: int
    pieces: tuple[PieceRow, ...]


Effect = Freed | Hidden | Visible | Leased | Linked


@dataclass(frozen=True, slots=True)
class Recovered:
    """One piece found by a tier's scan at start; `leased` as its record says."""

    fingerprint: Fingerprint
    parent: Fingerprint
    group: int
    shard: int
    length: int
    checksum: int
    place: Place
    generation: int
    depth: int
    valid_tokens: int
    hits: int
    heat: Heat
    last_s: float
    leased: bool
    content: int = 0
    base: Base | None = None
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Expired:
    fills: int
    leases: int
    pins: int
    copies: int
