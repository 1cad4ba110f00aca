"""The real core, replayed offline, against the plain oracle: equal on every request; and on several tiers."""

from pathlib import Path
from random import Random

import pytest

from kvstored.core.types import TierId
from kvstored.sim.core import CoreModel
from kvstored.sim.traces import Format, Request, Trace, open_trace

from .oracle import LeafLru

TINY = open_trace(Path(__file__).parent / "fixtures" / "tiny.kvt")

CHECK_ROWS = 10
"""A whole check of the books costs more than many requests."""


def random_kvt1(path: Path, seed: int, *, requests: int) -> Trace:
    """Rows that continue or fork recent ones at random, several at one time."""
    random = Random(seed)
    lengths: list[int] = []
    rows = ['#kvt1 {"name": "random", "block_tokens": 16}']
    for row in range(requests):
        ref = random.choice([-1, *range(max(0, row - 40), row)])
        keep = random.randint(0, lengths[ref]) if ref >= 0 else 0
        new = random.choice([0, 1, 1, 2, 3, 9])
        lengths.append(keep + new)
        rows.append(f"{row // 3 * 1000},{(keep + new) * 16},4,{ref},{keep},{new},")
    path.write_text("\n".join(rows) + "\n")
    return Trace(path, Format.KVT1, "random", 16)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 40, None])
@pytest.mark.parametrize("seed", range(4))
def test_lru_hits_what_the_oracle_hits_on_every_request(
    tmp_path: Path, seed: int, capacity: int | None
) -> None:
    trace = random_kvt1(tmp_path / "trace", seed, requests=150)
    blocks = None if capacity is None else {TierId.DRAM: capacity}
    core, oracle = CoreModel(trace, policy="lru", capacity_blocks=blocks), LeafLru(capacity)
    for row, request in enumerate(trace):
        ours = core.request(request.ts_s, request.block_ids)
        theirs = oracle.request(request.ts_s, request.block_ids)
        assert (ours.blocks, ours.hits) == (theirs.blocks, theirs.hits), f"{row=} {seed=}"
        assert stored(core, request) == stored(oracle, request), f"{row=} {seed=}"
        if row % CHECK_ROWS == 0:
            core.catalog.check()
    assert core.catalog.counts["requests"] == core.catalog.counts["fills"] == 0


def stored(model: CoreModel | LeafLru, request: Request) -> int:
    """Blocks of this path that could be hit now."""
    if isinstance(model, LeafLru):
        return sum(block in model.stored for block in request.block_ids.tolist())
    return sum(model.match(request.block_ids, request.ts_s))


@pytest.mark.parametrize("seed", range(4))
def test_a_large_slow_tier_hits_what_was_ever_stored(tmp_path: Path, seed: int) -> None:
    trace = random_kvt1(tmp_path / "trace", seed, requests=150)
    blocks = {TierId.DRAM: 60, TierId.NVME: 10_000}
    model = CoreModel(trace, policy="lru", capacity_blocks=blocks)
    unbounded = LeafLru(None)
    dram = nvme = 0
    for row, request in enumerate(trace):
        served = model.request(request.ts_s, request.block_ids)
        best = unbounded.request(request.ts_s, request.block_ids)
        assert sum(served.hits) == sum(best.hits), f"{row=} {seed=}"
        dram, nvme = dram + served.hits[TierId.DRAM], nvme + served.hits[TierId.NVME]
        if row % CHECK_ROWS == 0:
            model.catalog.check()
    assert dram > 0
    assert nvme > 0
    assert model.catalog.counts["tasks"] == 0


def test_one_row_too_long_for_the_tier_keeps_its_head() -> None:
    model = CoreModel(TINY, policy="lru", capacity_blocks={TierId.DRAM: 2})
    first = next(iter(TINY))
    served = model.request(0.0, first.block_ids)
    assert (served.put_blocks, model.evicted_blocks) == (3, 1)
    assert sum(model.match(first.block_ids, 1.0)) == 2
