"""What the oracle of the catalog remembers: plain objects that point at each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstored.core.calls import Reason
from kvstored.core.types import Budget, Part, TierId

Piece = tuple[int, int]
"""Group and shard."""
DRAM, NVME = TierId.DRAM, TierId.NVME


@dataclass(eq=False)
class Copy:
    block: Block
    tier: TierId
    part: Part
    pieces: dict[Piece, int] = field(default_factory=dict)
    """Units of each."""
    written: set[Piece] = field(default_factory=set)
    is_ready: bool = False
    is_doomed: bool = False
    reason: Reason = Reason.UNKNOWN
    readers: int = 0
    fills: int = 0
    rank: tuple[int, int] = (0, 0)
    is_first: bool = False
    is_sink: bool = False
    sink_number: int = 0
    due_s: float = -1.0
    """Until when the rest of an incomplete copy has to come."""
    kept_s: float = -1.0
    """Until when a window/state copy lives since it was in use when its time was over."""

    @property
    def units(self) -> int:
        return sum(self.pieces.values())

    @property
    def budget(self) -> Budget:
        return Budget.CHECKPOINT if self.part is Part.CHECKPOINT else Budget.GLOBAL


@dataclass(eq=False)
class Block:
    ns: int
    key: str
    valid: int
    parent: Block | None = None
    children: list[Block] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    """The newest first."""
    holds: int = 0
    hits: int = 0
    last_s: float = 0.0
    life: int = 0


@dataclass(eq=False)
class Fill:
    session: int
    block: Block
    pieces: list[tuple[Copy, Piece]]
    expires_s: float
    request: tuple[int, bytes] | None


@dataclass(frozen=True)
class Aside:
    session: int
    ns: int
    units: int
    peer: int = field(compare=False, default=0)


@dataclass(eq=False)
class Lease:
    session: int
    path: list[Block]
    blocks: list[Block | None]
    copies: list[list[Copy]]
    expires_s: float


@dataclass(eq=False)
class Task:
    source: Copy
    target: Copy


@dataclass(eq=False)
class Pin:
    rows: list[Block]
    path: list[Block]
    is_hard: bool
    expires_s: float


@dataclass(eq=False)
class Request:
    ns: int
    path: list[Block]
    sealed: list[Block]
    recent: list[Block] = field(default_factory=list)
    is_whole: bool = True


@dataclass(eq=False)
class Kept:
    session: int
    until_s: float
    units: int = 0
    freed: tuple[Block, tuple[Piece, ...]] | None = None
    copies: tuple[Copy, ...] = ()


Gone = tuple[TierId, int, str, tuple[Piece, ...], Reason]
EVICTED = (Reason.WATERMARK, Reason.DEMAND, Reason.RETIRED)
