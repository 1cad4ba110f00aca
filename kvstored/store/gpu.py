"""What the HBM tier needs in the background: its pools opened one by one, and the arena pinned for its devices.

Neither holds up the start: making a CUDA context takes seconds, pinning a second for a few GiB. What is not pinned yet is staged.
"""

import asyncio
from collections.abc import Callable

from kvstored.core.types import UNIT_BYTES, Extent, TierId
from kvstored.errors import KvstoredError
from kvstored.store.lane import Urgency
from kvstored.store.shell import Shell

PIN_UNITS = (64 << 20) // UNIT_BYTES
"""Of one call: it holds the driver's lock, which copies want too, for some 20 ms."""
PIN_LOOK_S = 1.0


async def open_pools(shell: Shell) -> None:
    """All of them, or the tier is off (`Hbm.fault`) for as long as the daemon runs: a broken context does not mend."""
    hbm, lane = shell.tiers.hbm_records, shell.tiers.lane(TierId.HBM)
    for _ in hbm.names:
        try:
            segment, units = await lane.submit(hbm.grow, Urgency.BACKGROUND)
        except KvstoredError as error:
            hbm.fail(error)
            return
        shell.catalog.grow(TierId.HBM, segment, units)
        shell.apply()


async def pin_arena(
    shell: Shell, capacity_bytes: int, refused: Callable[[KvstoredError], None]
) -> None:
    """Segment by segment as the arena grows, up to its capacity or the first refusal."""
    hbm, lane, arena = shell.tiers.hbm_records, shell.tiers.lane(TierId.HBM), shell.tiers.arena
    pinned: dict[int, int] = {}
    while hbm.fault is None:
        for segment, units in arena.segments():
            while (begin := pinned.get(segment, 0)) < units and hbm.fault is None:
                end = min(begin + PIN_UNITS, units)
                place = (Extent(segment, begin, end - begin),)
                (chunk,) = arena.views(place, (end - begin) * UNIT_BYTES)
                try:
                    await lane.submit(lambda: hbm.register(chunk), Urgency.BACKGROUND)  # noqa: B023 - awaited at once
                except KvstoredError as error:
                    refused(error)
                    return
                pinned[segment] = end
        if sum(pinned.values()) * UNIT_BYTES + PIN_UNITS * UNIT_BYTES > capacity_bytes:
            return
        await asyncio.sleep(PIN_LOOK_S)
