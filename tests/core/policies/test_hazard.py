"""Classes learn when their blocks return, and what is never used again is worth least."""

import numpy as np
import pytest

from kvstored.core.policies.hazard import HORIZON_S, Hazard, bin_of
from kvstored.errors import InvalidArgument


def learned() -> Hazard:
    """Blocks of class 0 return after 10 s, those of class 1 never; nobody saw one of class 2."""
    hazard = Hazard(3, 1, lambda _: 0)
    for i in range(400):
        at = 100.0 * i
        hazard.requests += 1
        hazard.blocks += 2
        hazard.begin(0, at, 1)
        hazard.begin(1, at, 1)
        hazard.used(0, at, at + 10.0, 1)
    hazard.rebuild(40_000.0)
    return hazard


def test_a_class_that_returns_is_worth_more_than_one_that_does_not() -> None:
    rates = learned().rates
    assert rates[0][bin_of(1.0)] > 10 * rates[1][bin_of(1.0)]


def test_what_is_older_than_every_return_of_its_class_is_worth_less_than_before() -> None:
    rates = learned().rates
    assert rates[0][bin_of(60.0)] < rates[0][bin_of(5.0)] / 10


def test_a_class_that_nobody_saw_is_worth_what_its_group_is() -> None:
    rates = learned().rates
    assert rates[1][bin_of(1.0)] < rates[2][bin_of(1.0)] < rates[0][bin_of(1.0)]


def test_spells_beyond_the_horizon_are_counted_as_cut_and_not_kept_one_by_one() -> None:
    hazard = learned()
    slots = len(hazard._spells[1].open)
    assert slots <= HORIZON_S / 100.0 + 1
    assert sum(hazard._spells[1].cut) + slots == 400


def test_a_restored_state_goes_on_as_the_saved_one() -> None:
    first, second = learned(), Hazard(3, 1, lambda _: 0)
    second.load(first.dump(40_000.0), 40_000.0)
    assert np.allclose(first.rates, second.rates)
    assert first.dump(40_000.0) == second.dump(40_000.0)
    assert second.is_learned


@pytest.mark.parametrize("bad", [b"", b"KVH2", b"\0" * 1320, b"KVH2" + b"\xff" * 200])
def test_a_state_of_another_shape_is_refused(bad: bytes) -> None:
    hazard = learned()
    before = hazard.dump(40_000.0)
    with pytest.raises(InvalidArgument, match="state"):
        hazard.load(bad, 0.0)
    assert hazard.dump(40_000.0) == before


def test_a_figure_that_is_none_is_refused() -> None:
    hazard = learned()
    before = hazard.dump(40_000.0)
    bad = before[:-8] + np.asarray([np.nan]).tobytes()
    with pytest.raises(InvalidArgument, match="range"):
        hazard.load(bad, 0.0)
    assert hazard.dump(40_000.0) == before
