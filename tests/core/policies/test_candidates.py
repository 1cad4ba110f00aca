"""The worst of all classes is found, also where copies went without a word."""

import numpy as np

from kvstored.core.policies.candidates import Candidates
from kvstored.core.policies.spells import BINS, bin_of

RATES = np.stack([np.linspace(2.0, 1.0, BINS), np.linspace(0.4, 2.0, BINS)])
"""Class 0 is worth less the older it is, class 1 more."""


def but(gone: set[int]) -> Candidates:
    """None of these may leave."""
    return Candidates(lambda _, row: None if row in gone else (100.0 * row, 100.0 * row))


def offer(found: Candidates, class_: int, row: int, weight: int = 0) -> None:
    found.push(class_, weight, row, row, 100.0 * row, 100.0 * row)


def filled(gone: set[int]) -> Candidates:
    found = but(gone)
    for row in range(10):
        offer(found, row % 2, row)
    return found


def worst_of(rows: set[int], rates: np.ndarray) -> int:
    return min(rows, key=lambda row: (rates[row % 2, bin_of(1000.0 - 100.0 * row)], row))


def test_the_oldest_of_one_class_or_the_newest_of_another_is_the_worst() -> None:
    assert filled(set()).pop_worst(RATES, 1000.0) == 9
    assert filled({9, 7, 5, 3, 1}).pop_worst(RATES, 1000.0) == 0


def test_a_weight_counts() -> None:
    found = filled(set())
    offer(found, 1, 5, weight=-8)  # a sixteenth of the worth
    assert found.pop_worst(RATES, 1000.0) == 5


def test_what_went_without_a_word_is_passed_over_and_hides_nobody() -> None:
    gone: set[int] = set()
    found = filled(gone)
    for row in (9, 0, 4, 7):
        gone.add(row)
        worst = worst_of(set(range(10)) - gone, RATES)
        assert found.pop_worst(RATES, 1000.0) == worst
        gone.add(worst)
    oldest = min(set(range(10)) - gone)
    assert found.pop_oldest() == oldest
    gone.update(range(10))
    assert found.pop_worst(RATES, 1000.0) is None
    assert found.pop_oldest() is None


def test_what_is_taken_out_does_not_come_again() -> None:
    found, left = filled(set()), set(range(9))
    found.remove(1, 0, 9, 9)
    found.remove(1, 0, 9, 9)
    while left:
        worst = worst_of(left, RATES)
        assert found.pop_worst(RATES, 1000.0) == worst
        left.remove(worst)
    assert found.pop_worst(RATES, 1000.0) is None


def test_of_equals_the_one_whose_spell_began_first_leaves() -> None:
    found = but(set())
    for row in (3, 1, 2):
        offer(found, row % 2, row)
    flat = np.ones((2, BINS))
    assert [found.pop_worst(flat, 1000.0) for _ in range(3)] == [1, 2, 3]


def test_other_tables_at_the_same_time_are_looked_at_anew() -> None:
    found, other = filled(set()), RATES[::-1].copy()
    first = worst_of(set(range(10)), RATES)
    assert found.pop_worst(RATES, 1000.0) == first
    second = worst_of(set(range(10)) - {first}, other)
    assert second != worst_of(set(range(10)) - {first}, RATES)
    assert found.pop_worst(other, 1000.0) == second


def test_copies_that_went_before_they_came_up_take_no_room() -> None:
    gone: set[int] = set()
    found = but(gone)
    for row in range(5000):
        offer(found, 0, row)
        if row % 100:  # one in a hundred stays
            gone.add(row)
    assert found._slots[0, 0].ages.size < 1000
    assert [found.pop_oldest() for _ in range(3)] == [0, 100, 200]
