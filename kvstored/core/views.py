"""What the catalog tells of itself: use of tiers, holdings, verdicts, nodes of the tree. Values only."""

from dataclasses import dataclass

from kvstored.core.calls import Fingerprint, Reason
from kvstored.core.types import Heat, NamespaceId, TierId


@dataclass(frozen=True, slots=True)
class Holding:
    """A lease, fill, pin or request as `kvstored leases` shows it."""

    kind: str
    id: int
    session: int
    ns: int
    blocks: int
    units: int
    begun_s: float
    expires_s: float
    state: str


@dataclass(frozen=True, slots=True)
class TierUse:
    tier: TierId
    capacity_units: int
    granted_units: int
    used_units: int
    copies: int
    dirty_copies: int
    leased_units: int
    pinned_units: int
    quarantined_units: int
    aside_units: int
    kept_units: int
    fragmentation: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a key is where it is, or why it is not."""

    reason: Reason | None
    tiers: tuple[TierId, ...]
    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class TreeNode:
    id: int
    parent: int
    ns: NamespaceId
    head: Fingerprint
    depth: int
    blocks: int
    tokens: int
    children: int
    holds: int
    hits: int
    heat: Heat
    tier_blocks: tuple[int, int, int, int]
