"""Lessons are counted in the order in which they came, and it makes no difference when."""

from pathlib import Path

import pytest

from kvstored.core.policies import lessons
from kvstored.core.policies.composite import Composite
from kvstored.core.policies.lessons import Lessons
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
