"""The published policies for caches of single blocks, on examples worked by hand and beside those of the daemon where the two are the same."""

from pathlib import Path

import numpy as np
import pytest

from kvstored.sim.lean import LeanModel
from kvstored.sim.optimum import optimum_hits
from kvstored.sim.published import PUBLISHED, BlockCache, PublishedModel
from kvstored.sim.sweep import Order, replayed

from .test_core import random_kvt1


def stored(cache: BlockCache, blocks: int = 200) -> set[int]:
    return {block for block in range(blocks) if block in cache}


def used(policy: str, capacity: int, *blocks: int) -> BlockCache:
    cache = PUBLISHED[policy](capacity)
    for block in blocks:
        cache.use(block)
    return cache


def test_s3fifo_promotes_after_two_uses_or_one() -> None:
    scan = range(100, 120)
    assert stored(used("s3fifo-any", 10, 1, 1, 1, 2, 2, *scan)) == {1, *range(111, 120)}
    assert stored(used("s3fifo-any-1", 10, 1, 1, 1, 2, 2, *scan)) == {1, 2, *range(112, 120)}


def test_s3fifo_takes_a_ghost_into_the_main_queue() -> None:
    cache = used("s3fifo-any", 10, *range(100, 120))
    cache.use(105)
    for block in range(130, 160):
        cache.use(block)
    assert 105 in cache


def test_arc_keeps_what_was_used_twice_from_a_scan_and_moves_its_border() -> None:
    cache = used("arc-any", 4, 1, 2, 1, 2, 10, 11, 12, 13)
    assert stored(cache) == {1, 2, 12, 13}
    cache.use(11)  # a ghost of those used once: the border moves, another one of them goes
    assert stored(cache) == {1, 2, 11, 13}


def test_wtinylfu_lets_nobody_in_who_is_not_used_more_than_who_would_leave() -> None:
    cache = used("wtinylfu-any", 4, 1, 1, 2, 2, 3, 3, 100, 101, 102)
    assert stored(cache) == {1, 2, 3, 102}
    for block in (101, 101, 101, 103):
        cache.use(block)
    assert stored(cache) == {2, 3, 101, 103}


def test_counts_outlive_their_blocks_and_only_gdsf_ages() -> None:
    assert stored(used("lfu-counts", 2, 1, 1, 1, 2, 3, 2, 3)) == {1, 3}
    history = (1, 1, 1, 2, 2, *range(50, 60))
    assert 1 in used("lfu-counts", 2, *history)
    assert 1 not in used("gdsf-counts", 2, *history)


@pytest.mark.parametrize("policy", PUBLISHED)
def test_none_holds_more_than_its_capacity_or_hits_more_than_the_optimum(
    tmp_path: Path, policy: str
) -> None:
    trace = random_kvt1(tmp_path / "trace", 4, requests=300)
    held = list(trace)
    last = int(np.concatenate([request.block_ids for request in held]).max())
    for capacity in (3, 20):
        model = PublishedModel(policy, capacity)
        hits = 0
        for request in held:
            hits += model.request(request.ts_s, request.block_ids).hits[1]
            assert len(stored(model._cache, last + 1)) <= capacity
        assert 0 < hits <= optimum_hits(held, [capacity])[0]
        assert replayed(held, 512, (Order(policy), capacity)).hits == hits


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_for_paths_of_one_block_they_are_the_daemons(policy: str) -> None:
    blocks = np.random.default_rng(3).zipf(1.2, 4000)
    daemons = LeanModel(policy=policy, capacity_blocks=50, block_tokens=512)
    published = PublishedModel(f"{policy}-any", 50)
    paths = [np.asarray([block]) for block in np.minimum(blocks, 3000)]
    ours = sum(daemons.request(0.0, path).hits[1] for path in paths)
    theirs = sum(published.request(0.0, path).hits[1] for path in paths)
    assert theirs > 1000
    assert ours == pytest.approx(theirs, rel=0.01)
