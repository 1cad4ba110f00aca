"""The published policies do what their papers say, on examples worked by hand: paths of one block, so that nothing but the algorithm decides."""

from math import inf

import numpy as np
import pytest

from kvstored.core.policies.arc import OFTEN, ONCE, Arc
from kvstored.core.policies.lists import NO_LIST, Listed
from kvstored.core.policies.s3fifo import MAIN, SMALL, S3Fifo
from kvstored.core.policies.wa import Category, Wa
from kvstored.sim.lean import LeanModel


class Cache:
    """Blocks asked for one after the other, a second each."""

    def __init__(self, policy: str, blocks: int) -> None:
        self.model = LeanModel(policy=policy, capacity_blocks=blocks, block_tokens=16)
        self.now_s = 0.0

    def ask(self, *blocks: int) -> list[int]:
        """Hits, by 0 and 1."""
        hits = []
        for block in blocks:
            self.now_s += 1.0
            hits.append(self.model.request(self.now_s, np.asarray([block])).hits[1])
        return hits

    @property
    def stored(self) -> set[int]:
        return {block for block in range(2000) if self.list_of(block) != NO_LIST}

    def list_of(self, block: int) -> int:
        policy = self.model.policy
        assert isinstance(policy, Listed)
        if block >= len(self.model._row):
            return NO_LIST
        row = self.model.block_of((0, block))
        return NO_LIST if row < 0 else int(policy.lists_of(np.asarray([row]))[0])


# ---- S3-FIFO


def test_s3fifo_lets_one_hit_wonders_go_and_keeps_what_was_hit_twice() -> None:
    cache = Cache("s3fifo", 10)
    cache.ask(1, 1, 1, 2, 2)
    cache.ask(*range(100, 120))
    assert cache.list_of(1) == MAIN
    assert cache.list_of(2) == NO_LIST  # one hit is not enough
    assert cache.ask(1, 2) == [1, 0]


def test_s3fifo_takes_a_ghost_of_the_small_queue_into_the_main_one() -> None:
    cache = Cache("s3fifo", 4)
    for block in (1, 2, 3):
        cache.ask(block, block, block)
    cache.ask(50, 51, 52, 53)  # 1 to 3 move on, 50 leaves
    assert cache.stored == {1, 2, 3, 53}
    assert [cache.list_of(block) for block in (1, 2, 3, 53)] == [MAIN, MAIN, MAIN, SMALL]
    assert cache.ask(52) == [0]
    assert cache.list_of(52) == MAIN


def test_s3fifo_remembers_as_many_ghosts_as_its_main_queue_has_room_for() -> None:
    """It were as many as the main queue had, which is none before the first ghost returns: where blocks are used once at first nothing ever got there."""
    cache = Cache("s3fifo", 10)
    cache.ask(*range(50, 80))
    assert [cache.list_of(block) for block in range(70, 80)] == [SMALL] * 10
    cache.ask(60)  # the tenth before what is stored
    assert cache.list_of(60) == SMALL
    cache.ask(65)
    assert cache.list_of(65) == MAIN


def test_the_small_queue_has_a_tenth_whatever_was_ever_stored() -> None:
    """What came in was counted against the sum, so the small queue was over its tenth for good and the main one never gave anything back."""
    cache = Cache("s3fifo", 20)
    for block in range(500):
        cache.ask(block, block, block)
    policy = cache.model.policy
    assert isinstance(policy, S3Fifo)
    assert sum(policy._sizes) == len(cache.stored) == 20
    assert policy._sizes[SMALL] <= 3


def test_the_hand_of_the_small_queue_sends_inner_blocks_on() -> None:
    """They stayed and filled it beyond its tenth, so that each new leaf left at once: S3-FIFO hit half of what leaf-first LRU hits on agents."""
    cache = Cache("s3fifo", 40)
    conversation = np.arange(1, 31)
    for _ in range(3):
        cache.model.request(cache.now_s, conversation)
    cache.ask(*range(200, 240))
    assert [cache.list_of(block) for block in (1, 15, 30)] == [MAIN, MAIN, MAIN]
    assert cache.stored >= set(range(1, 31))
    assert cache.ask(*range(230, 240)) == [1] * 10


def test_s3fifo_gives_the_main_queue_another_round_for_each_use() -> None:
    cache = Cache("s3fifo", 3)
    for block in (1, 2, 3):
        cache.ask(block, block, block)
    cache.ask(50)  # all of them into the main queue, 50 is the small one
    cache.ask(1, 1)
    for block in (60, 61):
        cache.ask(block, block, block)
    assert 1 in cache.stored
    assert 2 not in cache.stored


# ---- ARC


def arc(blocks: int) -> tuple[Cache, Arc]:
    cache = Cache("arc", blocks)
    policy = cache.model.policy
    assert isinstance(policy, Arc)
    return cache, policy


def test_arc_keeps_what_was_used_twice_from_a_scan() -> None:
    cache, _ = arc(4)
    cache.ask(1, 2, 1, 2)
    assert [cache.list_of(block) for block in (1, 2)] == [OFTEN, OFTEN]
    cache.ask(*range(10, 30))
    assert cache.stored >= {1, 2}
    assert cache.list_of(29) == ONCE


def test_arc_moves_its_border_by_ghosts_of_either_list() -> None:
    cache, policy = arc(4)
    cache.ask(1, 2, 1, 2, 10, 11, 12, 13)
    assert cache.stored == {1, 2, 12, 13}
    assert policy.once_target == 0.0
    cache.ask(11)  # left from those used once
    assert policy.once_target == 1.0
    assert cache.list_of(11) == OFTEN
    assert cache.stored == {1, 2, 11, 13}
    cache.ask(13)
    assert cache.list_of(13) == OFTEN
    cache.ask(14)  # none is over the border now: the oldest of those used often goes
    assert cache.stored == {2, 11, 13, 14}
    cache.ask(1)
    assert policy.once_target == 0.0
    assert cache.list_of(1) == OFTEN


def test_arc_never_remembers_more_than_twice_what_it_holds() -> None:
    cache, policy = arc(8)
    for block in np.random.default_rng(1).zipf(1.3, 2000).tolist():
        cache.ask(min(block, 1500))
        gone = policy._gone
        assert policy._sizes[ONCE] + len(gone[ONCE]) <= 9
        assert sum(policy._sizes) + len(gone[ONCE]) + len(gone[OFTEN]) <= 17
        assert len(cache.stored) <= 8


# ---- the workload-aware policy


def test_wa_expects_a_use_by_share_mean_and_age() -> None:
    category = Category()
    category.ended, category.reused, category.reuse_s = 4.0, 1.0, 10.0
    assert category.used_within(inf, 0.0) == pytest.approx(0.25)
    assert category.used_within(10.0, 0.0) == pytest.approx(0.25 * (1 - np.exp(-1)))
    aged = 0.25 * np.exp(-2)
    assert category.used_within(inf, 20.0) == pytest.approx(aged / (aged + 0.75))


def test_wa_counts_a_use_after_an_eviction_as_a_use() -> None:
    cache = Cache("wa", 2)
    policy = cache.model.policy
    assert isinstance(policy, Wa)
    cache.ask(1, 2, 3)
    once = policy.categories[0]
    assert 1 not in cache.stored
    assert (once.ended, once.reused, once.reuse_s) == (3.0, 1.0, 60.0)
    cache.ask(1)
    assert (once.reused, once.reuse_s) == (2.0, 63.0)
    # what came back was counted as ended when it left, and something left for it
    assert sum(category.ended for category in policy.categories) == 2 * policy.lists + 2


def test_wa_keeps_the_category_that_comes_back() -> None:
    cache = Cache("wa", 6)
    for _ in range(40):  # 1 and 2 return every few seconds, all else never
        cache.ask(1, 2)
        cache.ask(*range(int(cache.now_s) + 100, int(cache.now_s) + 104))
    assert cache.stored >= {1, 2}


@pytest.mark.parametrize("policy", ["s3fifo", "arc", "wa"])
def test_sizes_of_the_lists_are_exact(policy: str) -> None:
    cache = Cache(policy, 12)
    listed = cache.model.policy
    assert isinstance(listed, Listed)
    for block in np.random.default_rng(2).integers(0, 40, 500).tolist():
        cache.ask(block)
        lists = [cache.list_of(each) for each in cache.stored]
        assert listed._sizes[1:] == [lists.count(i + 1) for i in range(listed.lists)]


# ---- the article's mix and LFU


@pytest.mark.parametrize(("policy", "kept"), [("lfu", 1), ("article", 2)])
def test_the_articles_mix_weighs_time_among_what_was_hit_where_lfu_counts(
    policy: str, kept: int
) -> None:
    cache = Cache(policy, 2)
    cache.ask(*[1] * 8)
    cache.now_s = 1000.0
    cache.ask(2)
    cache.model._capacity_blocks = 1
    cache.ask(2)
    assert cache.ask(kept) == [1]
    assert cache.model.blocks.live == 1


@pytest.mark.parametrize("policy", ["lfu", "article"])
def test_both_let_what_was_never_hit_go_first_and_so_keep_what_was_hit_for_good(
    policy: str,
) -> None:
    """A full tier has as many new blocks as must leave for them. That is why the two hit the same on real traces, up to ties of one millisecond."""
    cache = Cache(policy, 3)
    cache.ask(1, 1, 2, 2)
    cache.now_s = 1e6
    cache.ask(*range(10, 100))
    assert cache.ask(1, 2, 99) == [1, 1, 1]
