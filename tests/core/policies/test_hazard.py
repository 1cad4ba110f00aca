"""Classes learn when their blocks return, lean on coarser ones, and what is never used again is worth least."""

import numpy as np
import pytest

from kvstored.core.policies.hazard import Hazard
from kvstored.core.policies.profiles import (
    BOUNDS,
    CLASSES_MAX,
    LEFT,
    LEVELS,
    Profile,
    Profiles,
    pack,
    unpack,
)
from kvstored.core.policies.spells import BINS, HORIZON_S, Spells, bin_of
from kvstored.errors import InvalidArgument

RETURNS, NEVER, UNSEEN = Profile(gap=1), Profile(gap=2), Profile(gap=3)


def learned() -> Hazard:
    """Blocks of one class return after 10 s, those of another never; nobody saw one of the third."""
    hazard = Hazard()
    returns, never = hazard.class_of(RETURNS), hazard.class_of(NEVER)
    for i in range(400):
        at = 100.0 * i
        hazard.requests += 1
        hazard.blocks += 2
        hazard.spells.begin(returns, at, 1)
        hazard.spells.begin(never, at, 1)
        hazard.spells.used(returns, at, at + 10.0, 1)
    hazard.rebuild(40_000.0)
    return hazard


def worth(hazard: Hazard, profile: Profile, age_s: float) -> float:
    rate: float = hazard.rates[hazard.class_of(profile), bin_of(age_s)]
    return rate


def test_a_class_that_returns_is_worth_more_than_one_that_does_not() -> None:
    hazard = learned()
    assert worth(hazard, RETURNS, 1.0) > 10 * worth(hazard, NEVER, 1.0)


def test_what_is_older_than_every_return_of_its_class_is_worth_less_than_before() -> None:
    hazard = learned()
    assert worth(hazard, RETURNS, 60.0) < worth(hazard, RETURNS, 5.0) / 10


def test_a_class_that_nobody_saw_is_worth_what_the_coarser_one_is_before_and_after_tables() -> None:
    hazard = learned()
    for _ in range(2):
        mixed = worth(hazard, UNSEEN, 1.0)
        assert worth(hazard, NEVER, 1.0) < mixed < worth(hazard, RETURNS, 1.0)
        finer = RETURNS._replace(uses=3, turn=4)
        assert worth(hazard, finer, 1.0) == pytest.approx(worth(hazard, RETURNS, 1.0), rel=0.05)
        hazard.rebuild(40_000.0)


def test_tables_that_are_made_part_by_part_are_those_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call for all of 8,000 classes would hold the daemon's loop for 40 ms."""
    whole, parts = learned(), learned()
    monkeypatch.setattr("kvstored.core.policies.hazard.PART_CLASSES", 1)
    whole.requests = parts.requests = 1000
    before, calls = parts.rates, 0
    while parts.rates is before and calls < 10:
        parts.maintain(40_000.0)
        late = parts.class_of(RETURNS._replace(uses=calls % 3))  # comes while they are made
        assert parts.rates[late, 0] > 0
        calls += 1
    assert 2 <= calls < 10
    whole.rebuild(40_000.0)
    for profile in (RETURNS, NEVER, UNSEEN, RETURNS._replace(uses=1)):
        for age_s in (1.0, 60.0, 3000.0):
            assert worth(parts, profile, age_s) == pytest.approx(worth(whole, profile, age_s))
    made = parts.rates
    parts.maintain(40_000.0)
    assert parts.rates is made  # until they are due again


def test_what_a_trait_says_holds_for_classes_that_were_never_seen_with_it() -> None:
    hazard = Hazard()
    for i in range(2000):
        at = 10.0 * i
        hazard.requests += 1
        hazard.blocks += 1
        hint = i % 2
        class_ = hazard.class_of(Profile(gap=1, hint=hint))
        other = hazard.class_of(Profile(gap=2))
        for each in (class_, other):
            hazard.spells.begin(each, at, 1)
        if hint:
            hazard.spells.used(class_, at, at + 4.0, 1)
        if i % 4 < 2:
            hazard.spells.used(other, at, at + 4.0, 1)
    hazard.rebuild(20_000.0)
    plain, said = Profile(gap=2), Profile(gap=2, hint=1)
    assert worth(hazard, said, 1.0) > 1.3 * worth(hazard, plain, 1.0)


def test_spells_beyond_the_horizon_are_counted_as_cut_and_not_kept_one_by_one() -> None:
    hazard = learned()
    assert len(hazard.spells) <= HORIZON_S / 100.0 + 1
    at = hazard.class_of(NEVER) * BINS
    assert sum(hazard.spells.cut[at : at + BINS]) + len(hazard.spells) == 400


def test_a_spell_weighs_the_same_in_whatever_parts_it_ends() -> None:
    whole, parts = Spells(), Spells()
    for spells in (whole, parts):
        spells.grow()
        spells.begin(0, 10.0, 100)
    whole.used(0, 10.0, 20.0, 100)
    for _ in range(4):
        parts.used(0, 10.0, 20.0, 25)
    assert parts.ended[bin_of(10.0)] == pytest.approx(whole.ended[bin_of(10.0)])
    assert 1 < whole.ended[bin_of(10.0)] < 100


def test_a_spell_weighs_the_same_in_whatever_parts_it_comes() -> None:
    spells = Spells()
    spells.grow()
    spells.grow()
    spells.begin(0, 10.0, 100)
    spells.begin(1, 10.0, 1)
    for size in range(1, 100):
        spells.extend(1, 10.0, size, 1)
    assert spells.with_open(20.0)[1] == pytest.approx(spells.with_open(20.0)[0])


def test_a_spell_that_goes_on_as_another_one_is_at_risk_in_each_for_its_part() -> None:
    spells = Spells()
    spells.grow()
    spells.grow()
    spells.begin(0, 0.0, 1)
    spells.turn(0, 1, 0.0, 100.0, 1)
    spells.used(1, 0.0, 1000.0, 1)
    _, exposed = spells.at_risk(2000.0)
    turned, ended = bin_of(100.0), bin_of(1000.0)
    assert exposed[0].tolist() == [1.0] * turned + [0.5] + [0.0] * (BINS - 1 - turned)
    assert exposed[1].tolist() == (
        [0.0] * turned + [0.5] + [1.0] * (ended - turned) + [0.0] * (BINS - 1 - ended)
    )


def test_open_spells_are_bounded_and_the_oldest_are_cut_for_others() -> None:
    spells = Spells(open_max=10)
    spells.grow()
    for i in range(100):
        spells.begin(0, 10.0 * i, 1)
    assert len(spells) == 10
    assert sum(spells.cut) == pytest.approx(90)
    assert len(spells._names) <= 11


def test_classes_are_bounded_and_what_is_new_then_is_of_its_level_alone() -> None:
    profiles, found = Profiles(), set[int]()
    for packed in range(0, 3_000_000, 37):
        profile = unpack(packed)
        if profile is not None:
            found.add(profiles.number(profile))
    assert len(profiles) <= CLASSES_MAX
    late = Profile(uses=1, gap=1, size=2, turn=3, earlier=6, hint=29)
    number = profiles.number(late)
    assert len(profiles) <= CLASSES_MAX
    assert profiles.profiles[number].hint == 0
    assert profiles.nodes[number] == node_of(late)


def node_of(profile: Profile) -> int:
    fresh = Profiles()
    return fresh.nodes[fresh.number(profile)]


@pytest.mark.parametrize("profile", [Profile(), Profile(2, 1, 0, 4, 5, 3, LEFT, 31)])
def test_a_profile_has_a_number_that_says_all_of_it(profile: Profile) -> None:
    assert unpack(pack(profile)) == profile
    assert unpack(pack(Profile(*(bound - 1 for bound in BOUNDS))) + 1) is None
    assert node_of(profile) < LEVELS[-1]


def test_a_restored_state_goes_on_as_the_saved_one() -> None:
    first, second = learned(), Hazard()
    second.load(first.dump(40_000.0), 40_000.0)
    for profile in (RETURNS, NEVER, UNSEEN):
        for age_s in (1.0, 60.0, 3000.0):
            assert worth(first, profile, age_s) == pytest.approx(worth(second, profile, age_s))
    assert first.dump(40_000.0) == second.dump(40_000.0)
    assert second.is_learned


@pytest.mark.parametrize("bad", [b"", b"KVH4", b"\0" * 1320, b"KVH3" + b"\xff" * 200])
def test_a_state_of_another_shape_is_refused(bad: bytes) -> None:
    hazard = learned()
    before = hazard.dump(40_000.0)
    with pytest.raises(InvalidArgument, match="state"):
        hazard.load(bad, 0.0)
    assert hazard.dump(40_000.0) == before


@pytest.mark.parametrize(("at", "figure"), [(-8, np.nan), (24, 0.5), (24, 1e18), (32, -1.0)])
def test_a_figure_that_is_none_is_refused(at: int, figure: float) -> None:
    hazard = learned()
    before = hazard.dump(40_000.0)
    bad = bytearray(before)
    where = at % len(bad)
    bad[where : where + 8] = np.asarray([figure], dtype="<f8").tobytes()
    with pytest.raises(InvalidArgument, match="range"):
        hazard.load(bytes(bad), 0.0)
    assert hazard.dump(40_000.0) == before
