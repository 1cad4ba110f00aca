"""The exact offline optimum: Belady on next use, deeper block first on ties, where a block of the request just served may be dropped.

Every use of a block is a use of its parent, so a child is never needed sooner: the optimum keeps prefixes whole by itself, and for blocks of
one size no policy hits more. It needs the whole trace at once.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from kvstored.sim.traces import Request

NEVER = 1 << 62


def optimum_hits(requests: Iterable[Request], capacities_blocks: Iterable[int]) -> list[int]:
    """Hit blocks at each capacity; counted as a replay does, longest stored prefix, cold start included."""
    paths = [request.block_ids.tolist() for request in requests]
    following = _next_uses(paths)
    return [_hits(paths, following, capacity) for capacity in capacities_blocks]


def _next_uses(paths: list[list[int]]) -> list[list[int]]:
    """For each block of each path the number of the next path with it."""
    last: dict[int, int] = {}
    result: list[list[int]] = []
    for number in range(len(paths) - 1, -1, -1):
        path = paths[number]
        result.append([last.get(block, NEVER) for block in path])
        last.update(dict.fromkeys(path, number))
    result.reverse()
    return result


def _hits(paths: list[list[int]], following: list[list[int]], capacity: int) -> int:
    stored: dict[int, int] = {}
    """Next use by block."""
    order: list[tuple[int, int, int]] = []
    """Furthest next use first, then deepest; entries whose next use is past are dropped when they come up."""
    hits = 0
    for path, uses in zip(paths, following, strict=True):
        hits += next((i for i, block in enumerate(path) if block not in stored), len(path))
        for depth, (block, use) in enumerate(zip(path, uses, strict=True)):
            stored[block] = use
            heappush(order, (-use, -depth, block))
        while len(stored) > capacity:
            use, _, block = heappop(order)
            if stored.get(block) == -use:
                del stored[block]
    return hits
