"""Lessons are counted in the order in which they came, and it makes no difference when."""

from pathlib import Path

import numpy as np
import pytest

from kvstored.core.policies import lessons
from kvstored.core.policies.composite import Composite
from kvstored.core.policies.lessons import Lessons
from kvstored.core.policies.spells import Spells
from kvstored.sim.lean import LeanModel
from tests.sim.test_core import random_kvt1


def test_they_are_counted_in_their_order_and_once() -> None:
    seen: list[int] = []
    noted = Lessons()
    for number in range(5):
        noted.note(seen.append, number)
    assert not seen
    noted.count()
    noted.count()
    assert seen == [0, 1, 2, 3, 4]


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "NOTES_MAX", 10)
    seen: list[int] = []
    noted = Lessons()
    for number in range(25):
        noted.note(seen.append, number)
        assert len(seen) >= number - 10
    noted.note(seen.append, 25, size=100)
    assert seen == list(range(26))


def test_counted_at_once_or_later_they_teach_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = random_kvt1(tmp_path / "trace", 4, requests=600)
    orders: list[list[int]] = []
    states: list[bytes] = []
    for notes in (0, lessons.NOTES_MAX):
        monkeypatch.setattr(lessons, "NOTES_MAX", notes)
        evicted: list[int] = []
        model = LeanModel(
            policy="composite", capacity_blocks=25, block_tokens=512, evictions=evicted
        )
        for request in trace:
            model.request(request.ts_s, request.block_ids)
        assert isinstance(model.policy, Composite)
        orders.append(evicted)
        states.append(model.policy.dump(1e6))
    assert orders[0] == orders[1]
    assert states[0] == states[1]
    assert len(orders[0]) > 100


def test_what_is_noted_many_times_in_a_row_is_called_once() -> None:
    seen: list[tuple[object, ...]] = []
    noted = Lessons()

    def often(*what: object) -> None:
        seen.append(what)

    for what in ("a", "a", "a", "b", "a"):
        noted.note_often(often, what)
    noted.note(often, "a")
    noted.note_often(often, "a")
    noted.count()
    assert seen == [(3, "a"), (1, "b"), (1, "a"), ("a",), (1, "a")]


def test_so_many_spells_at_once_weigh_as_one_after_the_other() -> None:
    together, singly = Spells(), Spells()
    for spells in (together, singly):
        spells.grow()
        spells.begin(0, 1.0, 3)
    together.begin(0, 1.0, 7, 5)
    for _ in range(5):
        singly.begin(0, 1.0, 7)
    for spells in (together, singly):
        spells.used(0, 1.0, 9.0, 12)
    assert together.ended == singly.ended
    assert np.array_equal(together.with_open(20.0), singly.with_open(20.0))
