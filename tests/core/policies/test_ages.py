"""Rows stay in the order of their numbers, whatever is added and taken out; against a sorted list."""

from random import Random

import pytest

from kvstored.core.policies.ages import Ages


@pytest.mark.parametrize("seed", range(6))
def test_it_is_a_sorted_list(seed: int) -> None:
    random = Random(seed)
    ages, truth = Ages(), list[tuple[int, int]]()
    for row in range(4000):
        number = random.randrange(600) if seed % 2 else row - random.randrange(50)
        ages.add(number, row)
        truth.append((number, row))
        truth.sort()
        draw = random.random()
        if draw < 0.2:
            number, row_ = random.choice(truth)
            ages.remove(number, row_)
            truth.remove((number, row_))
        elif draw < 0.3:
            assert ages.pop_first() == truth.pop(0)
        elif draw < 0.4:
            assert ages.pop_last() == truth.pop()
        assert ages.size == len(truth)
        if truth:
            assert ages.first() == truth[0]
            assert ages.last() == truth[-1]
    ages.keep(lambda _, row: row % 3 == 0)
    kept = [each for each in truth if each[1] % 3 == 0]
    assert [ages.pop_first() for _ in range(ages.size)] == kept


def test_what_is_not_there_is_not_taken_out() -> None:
    ages = Ages()
    ages.remove(1, 1)
    ages.add(5, 1)
    ages.remove(5, 2)
    ages.remove(4, 1)
    assert ages.size == 1
