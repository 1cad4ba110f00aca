"""Grows the tiers to their configured capacity, segment by segment, in the background.

Memory is committed and files are allocated before the catalog may grant them, so a page without backing never ends a client.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvstored.core.types import UNIT_BYTES, TierId
from kvstored.errors import KvstoredError
from kvstored.store.lane import Lane, Urgency
from kvstored.store.shell import Shell

RETRY_S = 15.0


@dataclass(frozen=True, slots=True)
class Grower:
    """`grow` makes one more segment and tells its number and units, in the lane; it may raise NoSpace. `grew` is called on the loop after
    each segment, before anything is granted in it; `refused` once for each new refusal."""

    shell: Shell
    tier: TierId
    grow: Callable[[], tuple[int, int]]
    lane: Lane
    capacity_bytes: int
    segment_bytes: int
    grew: Callable[[int], None]
    refused: Callable[[TierId, KvstoredError], None]

    def is_whole(self) -> bool:
        """Whether one more segment would exceed the capacity; the first is always made."""
        granted_bytes = self.granted_bytes()
        return granted_bytes > 0 and granted_bytes + self.segment_bytes > self.capacity_bytes

    def granted_bytes(self) -> int:
        use = next(use for use in self.shell.catalog.tier_use() if use.tier is self.tier)
        return use.granted_units * UNIT_BYTES

    async def grow_once(self) -> None:
        """One segment; raises what the tier raised."""
        segment, units = await self.lane.submit(self.grow, Urgency.BACKGROUND)
        self.grew(segment)
        self.shell.catalog.grow(self.tier, segment, units)
        self.shell.apply()

    async def run(self) -> None:
        """Until the capacity is reached; what is refused now is tried again later."""
        is_refused = False
        while not self.is_whole():
            try:
                await self.grow_once()
                is_refused = False
            except KvstoredError as error:
                if not is_refused:
                    self.refused(self.tier, error)
                is_refused = True
                await asyncio.sleep(RETRY_S)
