"""The rival is leaf-first LRU: its hits are counted from last uses alone, and a learned order that falls behind gives way."""

from random import Random

import pytest

from kvstored.core.policies.rival import Rival


@pytest.mark.parametrize("seed", range(5))
def test_its_hits_are_those_of_a_real_lru_whatever_is_stored_here(seed: int) -> None:
    random, rival, capacity = Random(seed), Rival(), 20
    last_s: dict[int, float] = {}
    order: list[int] = []  # a plain LRU, oldest first
    ours = hits = 0
    for step in range(2000):
        now_s = 10.0 * step
        block = random.randrange(60) if random.random() < 0.5 else random.randrange(15)
        if block in last_s:
            was_stored = random.random() < 0.5
            rival.used(1, last_s[block], now_s, was_stored=was_stored)
            ours += was_stored
            hits += block in order
        else:
            rival.began(1, now_s)
        last_s[block] = now_s
        order = [*(each for each in order if each != block), block][-capacity:]
        rival.judge(
            min(capacity, len(last_s)), 1
        )  # as if of one request: what is ahead or behind is little
    assert rival.asked == 2000
    assert rival.lead == ours - hits
    assert hits > 100


def test_who_falls_behind_gives_way_and_gets_another_chance_later() -> None:
    rival = Rival()
    for step in range(1000):
        rival.began(10, 10.0 * step)
    rival.judge(5000, 1000)
    assert not rival.is_ahead
    for step in range(500):  # what LRU would have hit is not stored
        rival.used(1, 9000.0, 10_000.0 + step, was_stored=False)
    rival.judge(5000, 1500)
    assert rival.is_ahead
    for step in range(30_000):
        rival.began(10, 20_000.0 + 10.0 * step)
    rival.judge(5000, 31_500)
    assert not rival.is_ahead


def test_forgotten_ghosts_are_no_more_counted() -> None:
    rival = Rival()
    rival.began(5, 0.0)
    rival.began(5, 100.0)
    rival.forgotten(5, 0.0)
    rival.judge(5, 2)
    rival.used(5, 100.0, 200.0, was_stored=True)
    assert rival.lead == 0


def test_it_follows_a_wall_clock_and_long_silence_in_bounded_steps() -> None:
    """It once counted the seconds since 1970 one by one, and a daemon hung at its first eviction."""
    rival = Rival()
    rival.began(5, 1.8e9)
    rival.judge(5, 1)
    rival.began(5, 1.8e9 + 1_000_000.0)
    for _ in range(20):
        rival.judge(5, 2)
    rival.used(5, 1.8e9, 1.8e9 + 1_000_001.0, was_stored=True)
    assert rival.lead == 5  # LRU holds the later ones
