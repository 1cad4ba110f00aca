"""What the default policy makes of a history: in whatever parts a path comes, and after a restart."""

import numpy as np
import pytest

from kvstored.core.calls import TouchEvent
from kvstored.core.policies.composite import Composite
from kvstored.core.policies.profiles import LEFT, Profile, turn_bucket
from kvstored.core.types import Budget, TierId
from kvstored.sim.lean import LeanModel


def ledger() -> tuple[LeanModel, Composite]:
    model = LeanModel(policy="composite", capacity_blocks=1 << 20, block_tokens=512)
    policy = model.policy
    assert isinstance(policy, Composite)
    return model, policy


def classes(model: LeanModel, policy: Composite, ids: range) -> list[Profile]:
    spans = policy._spans
    found = [spans.class_[spans.of(model.block_of((0, number)))] for number in ids]
    return [policy._hazard.profiles[class_] for class_ in found]


@pytest.mark.parametrize("parts", [[20], [1] * 20, [3, 9, 8]])
def test_a_path_is_of_one_class_in_whatever_parts_it_comes(parts: list[int]) -> None:
    model, policy = ledger()
    model._know(100)
    above, begin = -1, 0
    for part in parts:
        rows = model._store(np.arange(begin, begin + part), above, 10.0)
        above, begin = int(rows[-1]), begin + part
    whole, _ = ledger()
    whole.request(10.0, np.arange(20))
    assert isinstance(whole.policy, Composite)
    found = classes(model, policy, range(20))
    assert found == classes(whole, whole.policy, range(20))
    assert len(set(found)) == 1
    assert len(policy._spans) == 1


def test_long_and_short_paths_are_of_different_classes() -> None:
    model, policy = ledger()
    lengths = (1, 4, 16, 64, 65)
    found = set[Profile]()
    for i, length in enumerate(lengths):
        ids = np.arange(1000 * i, 1000 * i + length)
        model.request(100.0 * i, ids)
        found.add(classes(model, policy, range(1000 * i, 1000 * i + 1))[0])
    assert len(found) == 5


def test_a_request_tells_all_that_it_used_of_its_rhythm_and_of_what_came_new() -> None:
    model, policy = ledger()
    model.request(10.0, np.arange(4))
    model.request(50.0, np.arange(20))
    model.request(60.0, np.arange(21))
    first, second, third = classes(model, policy, range(0, 21, 10))
    assert (first.uses, second.uses, third.uses) == (2, 1, 0)
    turns = (turn_bucket(10.0), turn_bucket(40.0))
    assert all((each.turn, each.earlier) == turns for each in (first, second, third))
    assert {each.fresh for each in (first, second, third)} == {0}
    assert (first.size, second.size, third.size) == (0, 2, 0)


def test_what_goes_on_from_evicted_blocks_is_told_of_their_rhythm() -> None:
    """The part that was still stored had been used by others: its own last use says nothing of the path."""
    policies = []
    for capacity in (1 << 20, 12):
        model = LeanModel(policy="composite", capacity_blocks=capacity, block_tokens=512)
        model.request(0.0, np.arange(8))
        for i in range(8):
            other = np.concatenate([np.arange(4), np.arange(100 + 8 * i, 104 + 8 * i)])
            model.request(10.0 + 5 * i, other)
        model.request(100.0, np.arange(9))
        assert isinstance(model.policy, Composite)
        policies.append(classes(model, model.policy, range(4, 9)))
    assert policies[0] == policies[1]


def test_a_branch_that_is_left_keeps_its_history() -> None:
    model, policy = ledger()
    model.request(10.0, np.arange(8))
    before = classes(model, policy, range(4, 8))
    model.request(30.0, np.asarray([0, 1, 2, 3, 100, 101]))
    assert classes(model, policy, range(4, 8)) == [each._replace(left=LEFT) for each in before]
    span = policy._spans.of(model.block_of((0, 5)))
    assert policy._spans.start_s[span] == 10.0


def found_at_start(last_s: list[float], now_s: float) -> tuple[LeanModel, Composite]:
    """One path of so many blocks, found at start in the order of their last uses."""
    model, policy = ledger()
    count = len(last_s)
    rows = model.blocks.take_many(count)
    assert np.array_equal(rows, model.copies.take_many(count))
    model.tree.ensure(model.blocks.capacity)
    model.blocks.first_copy[rows] = model.copies.block[rows] = rows
    model.blocks.last_s[rows] = last_s
    model.copies.tier[rows] = TierId.DRAM
    model.copies.state[rows] = 2
    model.tree.add_run(rows, -1)
    model._prints = np.zeros((model.blocks.capacity, 2), dtype=np.uint64)
    for row in np.lexsort((-rows, last_s)):
        policy.touch(rows[[row]], TouchEvent.FOUND, now_s)
        if row == count - 1:
            policy.offer(int(rows[row]))
    return model, policy


def test_a_path_found_at_start_is_one_span_where_ages_are_not_told_apart() -> None:
    model, policy = found_at_start([1000.0 + i for i in range(40, 0, -1)], 1e6)
    assert len(policy._spans) == 1
    victim = policy.victim(TierId.DRAM, Budget.GLOBAL, 1e6)
    assert victim == 39
    assert policy.follow(model.tree.run_above(39, 40)) == 40


def test_a_path_found_at_start_is_cut_where_ages_differ() -> None:
    _, policy = found_at_start([1990.0] * 10 + [1500.0] * 20 + [100.0] * 10, 2000.0)
    spans = policy._spans
    assert sorted(spans.size[spans.of(row)] for row in (0, 10, 30)) == [10, 10, 20]
    assert [spans.last_s[spans.of(row)] for row in (0, 10, 30)] == [1990.0, 1500.0, 100.0]


def test_nothing_was_asked_for_by_what_is_found_at_start() -> None:
    _, policy = found_at_start([1000.0] * 40, 2000.0)
    hazard, rival = policy._hazard, policy._rival
    assert (hazard.requests, hazard.blocks, rival.asked) == (0, 0, 0)


def test_a_copy_that_is_read_before_the_scan_at_start_ends_may_be_offered() -> None:
    model, policy = ledger()
    rows = model.blocks.take_many(3)
    assert np.array_equal(rows, model.copies.take_many(3))
    model.tree.ensure(model.blocks.capacity)
    model.blocks.first_copy[rows] = model.copies.block[rows] = rows
    model.blocks.last_s[rows] = 50.0
    model.copies.tier[rows] = TierId.DRAM
    model.copies.state[rows] = 2
    model.tree.add_run(rows, -1)
    policy.touch(rows[::-1], TouchEvent.HIT, 60.0)
    policy.offer(int(rows[-1]))
    assert policy.victim(TierId.DRAM, Budget.GLOBAL, 70.0) == rows[-1]
