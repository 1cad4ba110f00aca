"""FingerprintIndex against a dict, over random and over adversarial fingerprints."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstored.core.index import FingerprintIndex

TOP = (1 << 64) - 1
ANYWHERE = st.tuples(st.integers(0, TOP), st.integers(0, TOP))
# One home slot (the last one, so that probes wrap around), equal low words, and neighbours of both.
CROWDED = st.tuples(st.sampled_from([TOP, TOP - 1, TOP - (1 << 57), 0, 1]), st.integers(0, 40))


def packed(fingerprints: list[tuple[int, int]]) -> np.ndarray:
    return np.array(fingerprints, dtype=np.uint64).reshape(-1, 2)


class IndexAgainstDict(RuleBasedStateMachine):
    @initialize(rows=st.sampled_from([0, 1, 100]))
    def start(self, rows: int) -> None:
        self.index = FingerprintIndex(rows)
        self.model: dict[tuple[int, int], int] = {}
        self.free: list[int] = []

    def new_row(self) -> int:
        return self.free.pop() if self.free else len(self.model)

    @rule(fingerprint=ANYWHERE | CROWDED)
    def put(self, fingerprint: tuple[int, int]) -> None:
        if fingerprint in self.model:
            return
        row = self.new_row()
        self.index.put(row, *fingerprint)
        self.model[fingerprint] = row

    @rule(fingerprints=st.lists(CROWDED | ANYWHERE, unique=True, max_size=60))
    def put_many(self, fingerprints: list[tuple[int, int]]) -> None:
        new = [fingerprint for fingerprint in fingerprints if fingerprint not in self.model]
        rows = []
        for fingerprint in new:
            rows.append(self.new_row())
            self.model[fingerprint] = rows[-1]
        self.index.put_many(np.array(rows, dtype=np.int32), packed(new))

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(min_value=0))
    def pop(self, pick: int) -> None:
        fingerprint = list(self.model)[pick % len(self.model)]
        row = self.model.pop(fingerprint)
        self.index.pop(row)
        self.free.append(row)

    @rule(fingerprints=st.lists(CROWDED | ANYWHERE, max_size=40))
    def find(self, fingerprints: list[tuple[int, int]]) -> None:
        asked = fingerprints + list(self.model)
        rows = self.index.find(packed(asked))
        assert rows.dtype == np.int32
        assert rows.tolist() == [self.model.get(fingerprint, -1) for fingerprint in asked]
        for fingerprint in asked:
            assert self.index.find_one(fingerprint) == self.model.get(fingerprint, -1)

    @invariant()
    def agrees(self) -> None:
        assert len(self.index) == len(self.model)
        for (low, high), row in self.model.items():
            assert self.index.fingerprints[row].tolist() == [low, high]
        self.index.check()


IndexAgainstDict.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestIndexAgainstDict = IndexAgainstDict.TestCase


@given(homes=st.lists(st.integers(0, 63), min_size=33, max_size=64), seed=st.integers(0, 1 << 32))
@settings(deadline=None)
def test_rehash_finds_every_row_whatever_the_home_slots(homes: list[int], seed: int) -> None:
    high = np.random.default_rng(seed).permutation(len(homes))
    index = FingerprintIndex()
    expected = {}
    for row, (home, word) in enumerate(zip(homes, high.tolist(), strict=True)):
        index.put(row, home << 58, word)
        expected[(home << 58, word)] = row
    index.check()
    assert index.find(packed(list(expected))).tolist() == list(expected.values())


def test_thousands_of_equal_low_words_stay_apart() -> None:
    fingerprints = np.full((4_000, 2), TOP, dtype=np.uint64)
    fingerprints[:, 1] = np.arange(4_000)
    rows = np.arange(4_000, dtype=np.int32)
    index = FingerprintIndex()
    for at in range(0, 4_000, 500):
        index.put_many(rows[at : at + 500], fingerprints[at : at + 500])
    for row in range(0, 4_000, 40):
        index.pop(row)
    found = index.find(fingerprints)
    assert np.array_equal(found[found >= 0], rows[rows % 40 != 0])
    index.check()


def test_churn_leaves_no_trace_in_the_table() -> None:
    random = np.random.default_rng(7)
    index = FingerprintIndex(1_000)
    slots = index._slots
    for _ in range(20):
        fingerprints = random.integers(0, TOP, (1_000, 2), dtype=np.uint64)
        index.put_many(np.arange(1_000, dtype=np.int32), fingerprints)
        assert np.array_equal(index.find(fingerprints), np.arange(1_000))
        for row in random.permutation(1_000).tolist():
            index.pop(row)
        assert (index._slots == -1).all()
    assert index._slots is slots


def test_rows_may_be_sparse() -> None:
    index = FingerprintIndex()
    index.put(100_000, 1, 2)
    assert index.find_one((1, 2)) == 100_000
    assert len(index.fingerprints) > 100_000


def test_a_second_put_or_pop_is_a_bug_of_the_caller() -> None:
    index = FingerprintIndex()
    index.put(0, 1, 2)
    with pytest.raises(AssertionError):
        index.put(1, 1, 2)
    index.pop(0)
    with pytest.raises(AssertionError):
        index.pop(0)


def test_nothing_is_found_in_an_empty_index() -> None:
    index = FingerprintIndex()
    assert index.find(packed([(0, 0), (1, 1)])).tolist() == [-1, -1]
    assert index.find(packed([])).tolist() == []
