"""What more space in a tier would bring, from the curve of hits by capacity.

A slower tier holds what the faster ones hold: what it has more of is hits that were misses, what memory has more of is mostly hits that came
from the slower tier before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstored.core.types import TierId

Hits = Callable[[float], tuple[float, float]]
"""Blocks and FLOPs that a capacity saves."""


@dataclass(frozen=True, slots=True)
class Room:
    """`capacity`: of decoded bytes, in the units of the curve."""

    tier: TierId
    capacity: float


@dataclass(frozen=True, slots=True)
class Gain:
    """`blocks`, `flops`: hits that are misses now. `nearer_blocks`: hits that a slower tier has now."""

    tier: TierId
    blocks: float
    flops: float
    nearer_blocks: float


def gains(hits: Hits, rooms: Sequence[Room], more: float) -> tuple[Gain, ...]:
    """What `more` in each of these tiers alone would bring; fastest first."""
    whole = max((room.capacity for room in rooms), default=0.0)
    found = []
    for room in rooms:
        grown = room.capacity + more
        before, after = hits(whole), hits(max(grown, whole))
        blocks = after[0] - before[0]
        nearer = hits(grown)[0] - hits(room.capacity)[0] - blocks
        found.append(Gain(room.tier, blocks, after[1] - before[1], max(nearer, 0.0)))
    return tuple(found)
