"""The worst of all classes is found, also where copies went without a word."""

import numpy as np

from kvstored.core.policies.candidates import Candidates
from kvstored.core.policies.hazard import BINS

RATES = np.stack([np.linspace(2.0, 1.0, BINS), np.linspace(0.4, 2.0, BINS)])
"""Class 0 is worth less the older it is, class 1 more."""


def filled(gone: set[int]) -> Candidates:
    found = Candidates(lambda _, row: row not in gone)
    for row in range(10):
        found.push(row % 2, 0, (100.0 * row, row, row, row))
    return found


def test_the_oldest_of_one_class_or_the_newest_of_another_is_the_worst() -> None:
    assert filled(set()).worst(RATES, 1000.0) == 9
    assert filled({9, 7, 5, 3, 1}).worst(RATES, 1000.0) == 0


def test_a_weight_counts() -> None:
    found = filled(set())
    found.push(1, -8, (50.0, 50, 50, 50))  # a sixteenth of the worth
    assert found.worst(RATES, 1000.0) == 50


def test_what_went_without_a_word_is_passed_over() -> None:
    gone: set[int] = set()
    found = filled(gone)
    assert found.worst(RATES, 1000.0) == 9
    gone.add(9)
    assert found.worst(RATES, 1000.0) == 0
    assert found.oldest(float) == 0
    gone.update({0, 1})
    assert found.worst(RATES, 1000.0) == 2
    assert found.oldest(float) == 2
    gone.update(range(10))
    assert found.worst(RATES, 1000.0) is None
    assert found.oldest(float) is None


def test_of_equals_the_one_whose_spell_began_first_leaves() -> None:
    found = Candidates(lambda _spell, _row: True)
    for row in (3, 1, 2):
        found.push(row % 2, 0, (0.0, 10 - row, 0, row))
    flat = np.ones((2, BINS))
    assert found.worst(flat, 10.0) == 3
