"""The offline optimum against exhaustive search, and against known values of the real traces."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kvstored.sim.optimum import optimum_hits
from kvstored.sim.sweep import Order, sweep
from kvstored.sim.traces import Request, open_trace

from .known import TRACES
from .test_core import random_kvt1


def searched(paths: Sequence[list[int]], capacity: int) -> int:
    """Every set that may be kept after each request, by dynamic programming."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for path in paths:
        after: dict[frozenset[int], int] = {}
        for stored, hits in states.items():
            hit = next((i for i, block in enumerate(path) if block not in stored), len(path))
            union = sorted(stored | set(path))
            for size in range(min(capacity, len(union)) + 1):
                for kept in combinations(union, size):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), hits + hit)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_hits_more(tmp_path: Path, seed: int) -> None:
    trace = random_kvt1(tmp_path / "trace", seed, requests=12)
    paths = [request.block_ids[:4].tolist() for request in trace]
    requests = [Request(0.0, 0, 0, np.array(path, dtype=np.int64)) for path in paths]
    assert optimum_hits(requests, [3]) == [searched(paths, 3)]


@pytest.mark.traces
@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces in ../shared are not here")
@pytest.mark.parametrize(
    ("capacity_blocks", "optimum", "lru", "floor"),
    [(1708, 0.2501, 0.0544, 0.22), (8544, 0.3819, 0.2022, 0.10), (17089, 0.3819, 0.2882, 0.10)],
)
def test_conv_gives_the_known_optimum_and_the_composite_closes_its_floor(
    capacity_blocks: int, optimum: float, lru: float, floor: float
) -> None:
    trace = open_trace(TRACES / "mooncake_conv.kvt.gz")
    done = sweep(trace, [Order("composite")], capacities_blocks=[capacity_blocks])
    assert round(done.optimum[0], 4) == optimum
    assert round(done.lru[0], 4) == lru
    assert done.area_closed(done.lines[1]) >= floor
