"""The curve of hits by capacity is what leaf-first LRU hits: exactly where every block is in the sample, nearly where few are."""

from collections.abc import Iterator
from pathlib import Path as File
from random import Random

import numpy as np
import pytest

from kvstored.core.curve import HALF_LIFE_S, QUEUE_MAX, Curve, Path, Use
from kvstored.core.types import TierId
from kvstored.sim.core import CoreModel
from tests.sim.oracle import LeafLru
from tests.sim.test_core import random_kvt1

SPREAD = 0x9E3779B97F4A7C15
WHOLE = 1 << 64


def paths(seed: int, families: int, requests: int) -> Iterator[list[int]]:
    """Chats: each has a path that grows, and begins with one of a few prompts; some are asked for much more often."""
    random = Random(seed)
    lengths = [0] * families
    for _ in range(requests):
        family = min(int(random.paretovariate(0.5)) - 1, families - 1)
        lengths[family] += random.randrange(4)
        prompt = range(10**6 + 8 * (family % 5), 10**6 + 8 * (family % 5) + 8)
        yield [*prompt, *range(1000 * family, 1000 * family + lengths[family])]


def ask(curve: Curve, path: list[int], hit: int, now_s: float, *, flops: float = 1.0) -> None:
    """As the books tell it: what is hit, then what is stored below it."""
    for asked, above in ((path[:hit], []), (path[hit:], path[:hit][::-1])):
        uses = [Use(block * SPREAD % WHOLE, 1, flops) for block in asked]
        uses = [use for use in uses if use.low < curve.threshold]
        lows = tuple(block * SPREAD % WHOLE for block in above)
        curve.add(Path(tuple(uses), lows), len(asked), flops * len(asked))
        curve.digest(1 << 30, now_s)


@pytest.mark.parametrize("seed", range(4))
def test_with_every_block_in_the_sample_it_is_leaf_lru_at_any_capacity(seed: int) -> None:
    capacities = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096]
    oracles = {capacity: LeafLru(capacity) for capacity in capacities}
    hits = dict.fromkeys(capacities, 0)
    curve = Curve()
    for path in paths(seed, 60, 400):
        asked = {
            capacity: sum(oracle.request(0.0, np.asarray(path)).hits)
            for capacity, oracle in oracles.items()
        }
        for capacity, hit in asked.items():
            hits[capacity] += hit
        ask(curve, path, asked[64], 0.0, flops=3.0)
    assert curve.sampled_share == 1.0
    assert {capacity: curve.hits(capacity) for capacity in capacities} == {
        capacity: (hit, 3.0 * hit) for capacity, hit in hits.items()
    }
    assert hits[1] < hits[64] < hits[512]


@pytest.mark.parametrize("seed", range(3))
def test_with_few_blocks_in_the_sample_it_is_near(seed: int) -> None:
    capacities = [256, 1024, 4096]
    oracles = {capacity: LeafLru(capacity) for capacity in capacities}
    hits, blocks = dict.fromkeys(capacities, 0), 0
    curve = Curve(samples_max=1024)
    for path in paths(seed, 2000, 2500):
        blocks += len(path)
        for capacity, oracle in oracles.items():
            hits[capacity] += sum(oracle.request(0.0, np.asarray(path)).hits)
        ask(curve, path, 0, 0.0)
    assert curve.sampled_share < 0.5
    for capacity in capacities:
        assert curve.hits(capacity)[0] / blocks == pytest.approx(hits[capacity] / blocks, abs=0.02)


def test_the_core_tells_it_of_what_is_asked_for(tmp_path: File) -> None:
    trace = random_kvt1(tmp_path / "trace", 3, requests=300)
    model = CoreModel(trace, policy="combined", capacity_blocks={TierId.DRAM: 32, TierId.NVME: 60})
    oracles = {capacity: LeafLru(capacity) for capacity in (8, 32, 128, 2048)}
    hits, blocks, asked = dict.fromkeys(oracles, 0), 0, model.catalog.books.asked
    for request in trace:
        blocks += len(request.block_ids)
        for capacity, oracle in oracles.items():
            hits[capacity] += sum(oracle.request(0.0, request.block_ids).hits)
        model.request(request.ts_s, request.block_ids)
        asked.digest(0.0)
    assert asked.curve.blocks == blocks
    assert {capacity: asked.curve.hits(capacity)[0] for capacity in hits} == hits


def test_sample_and_queue_are_bounded_however_many_blocks_come() -> None:
    curve = Curve(samples_max=100)
    for start in range(0, 200_000, 50):
        uses = [Use(block * SPREAD % WHOLE, 1, 1.0) for block in range(start, start + 50)]
        kept = tuple(use for use in uses if use.low < curve.threshold)
        curve.add(Path(kept, ()), 50, 50.0)
        assert curve._queued <= QUEUE_MAX + 50
        if not start % 10_000:
            curve.digest(64, 0.0)
        assert len(curve._slot) == len(curve._highest) <= 100
    assert curve.sampled_share < 0.01
    assert curve.hits(1 << 30)[0] <= curve.blocks


def test_between_two_edges_it_grows_evenly() -> None:
    curve = Curve()
    for _ in range(2):
        ask(curve, list(range(1000)), 0, 0.0)
    low, high = curve.hits(512)[0], curve.hits(1024)[0]
    grown = [curve.hits(units)[0] for units in range(512, 1025, 32)]
    assert grown == sorted(grown)
    assert (grown[0], grown[-1]) == (low, high) == (512.0, 1000.0)


def test_its_points_say_all_of_it() -> None:
    curve = Curve()
    for path in paths(1, 60, 400):
        ask(curve, path, len(path) // 2, 0.0)
    points = curve.points()
    capacities = [capacity for capacity, _, _ in points]
    assert capacities == sorted(set(capacities))
    for units in (*range(1, 600), 5000, 1 << 30):
        blocks = float(np.interp(units, capacities, [blocks for _, blocks, _ in points]))
        assert blocks == pytest.approx(curve.hits(units)[0])


def test_what_was_asked_for_long_ago_counts_less() -> None:
    curve = Curve()
    ask(curve, [1, 2], 0, 0.0)
    ask(curve, [1, 2], 2, 0.0)
    assert curve.hits(100)[0] == 2.0
    curve.digest(1, HALF_LIFE_S)
    assert curve.hits(100)[0] == 1.0
    assert curve.blocks == 2.0
