"""What is to be done next, as values: page-ins, evictions, write-backs; and the objectives that order them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvstored.core.calls import Fingerprint
from kvstored.core.copying import Copying
from kvstored.core.types import NamespaceId, TierId


class Objective(StrEnum):
    """What scheduling is for. Their order is the operator's: of two page-ins the one that is better by the first objective in which they differ goes first."""

    HIT_RATE = "hit-rate"
    TRANSFER = "transfer"
    DECODE = "decode"
    FOOTPRINT = "footprint"


OBJECTIVES = tuple(Objective)
"""As the defaults have them."""


class Signal(StrEnum):
    """Why blocks are wanted in memory: a running request, as its engine asked, or for another node; an engine's predicted working set. Guesses: what
    attention selects all the time; the last turn of a conversation that goes on; what other requests of a batch run on."""

    REQUEST = "request"
    TRANSFER = "transfer"
    RESIDENT = "resident"
    SELECTION = "selection"
    SESSION = "session"
    SIBLING = "sibling"


SPECULATIVE = frozenset({Signal.SELECTION, Signal.SESSION, Signal.SIBLING})


class Decision(StrEnum):
    """What becomes of blocks of a node of the prefix tree: written to NVMe; not written, though they are nowhere else; gone from memory while NVMe has
    them; gone."""

    ADMIT = "admit"
    REFUSE = "refuse"
    DEMOTE = "demote"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much one round may do. `evict_copies`: by tier; None: down to the low watermark, a tier that is not there: nothing. `gather_bytes`: to
    lay grains together on NVMe."""

    evict_copies: dict[TierId, int | None] = field(default_factory=dict)
    write_bytes: int = 0
    load_bytes: int = 0
    gather_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """What a round did, and the copies that are to be carried for it."""

    evicted: dict[TierId, int]
    writes: Sequence[Copying]
    loads: Sequence[Copying]


@dataclass(frozen=True, slots=True)
class PageIn:
    """Blocks of one path that come up from `source`: so many bytes, `is_loading` already or still queued. `deadline_s`: wall seconds, 0: none."""

    ns: NamespaceId
    head: Fingerprint
    blocks: int
    size_bytes: int
    source: TierId
    signal: str
    deadline_s: float
    is_loading: bool


@dataclass(frozen=True, slots=True)
class NodeMove:
    """A stretch of one node of the prefix tree; `head`: its block nearest to the root, at `depth`. `why` in words of the reasons."""

    ns: NamespaceId
    head: Fingerprint
    depth: int
    blocks: int
    size_bytes: int
    tier: TierId
    decision: Decision
    why: str


@dataclass(frozen=True, slots=True)
class TierRoom:
    """`free_units` of what is granted; eviction begins above `high_units` and ends at `low_units`."""

    tier: TierId
    granted_units: int
    used_units: int
    free_units: int
    high_units: int
    low_units: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next round would do, each list in its order. `is_cut`: there is more than was asked for."""

    tiers: tuple[TierRoom, ...]
    running: int
    page_ins: tuple[PageIn, ...]
    evictions: tuple[NodeMove, ...]
    writes: tuple[NodeMove, ...]
    is_cut: bool
