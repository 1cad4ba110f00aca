"""What is worth being written to NVMe, and the budget of a day."""

from random import Random

import pytest

from kvstored.core.admission import Refusal
from kvstored.core.advice import Prefill
from kvstored.core.calls import Limits, TierLimits
from kvstored.core.catalog import Catalog
from kvstored.core.speed import Line
from kvstored.core.types import TierId
from kvstored.core.write_budget import HOUR_S, WriteBudget, WriteState
from kvstored.errors import InvalidArgument
from tests.core.desk import BLOCK_TOKENS, UNIT, Desk

DAY_S = 24 * HOUR_S


def desk_with(**limits: int) -> Desk:
    return Desk(dram=32, nvme=32, **limits)


# ---- the budget


def test_no_day_sees_more_than_the_budget_whatever_is_asked_for() -> None:
    for seed in range(30):
        random = Random(seed)
        budget = WriteBudget(1000)
        now_s, written = 1e9 + random.random() * HOUR_S, list[tuple[float, int]]()
        for _ in range(600):
            now_s += random.expovariate(1 / 900)
            size = random.randrange(1, 60)
            if size <= budget.left(now_s):
                budget.spend(size, now_s)
                written.append((now_s, size))
            in_a_day = sum(each for at, each in written if at > now_s - DAY_S)
            assert in_a_day <= 1000, seed
        assert sum(size for _, size in written) > 3000, "it goes on after a day"


def test_it_closes_when_it_is_used_up_and_opens_some_way_below() -> None:
    budget = WriteBudget(100)
    now_s = 1e9
    for i in range(10):
        budget.spend(10, now_s + i * HOUR_S)
    now_s += 9 * HOUR_S
    assert (budget.state(now_s), budget.left(now_s)) == (WriteState.CLOSED, 0)
    budget.refund(4, now_s)
    assert budget.state(now_s) is WriteState.CLOSED, "96 % is not far enough below"
    budget.refund(2, now_s)
    assert (budget.state(now_s), budget.left(now_s)) == (WriteState.CAREFUL, 6)


def test_it_is_careful_from_four_fifths_until_seven_tenths() -> None:
    budget = WriteBudget(100)
    states = []
    for size in (79, 1, -5, -4, -2):
        budget.spend(max(size, 0), 1e9)
        budget.refund(max(-size, 0), 1e9)
        states.append(budget.state(1e9))
    open_, careful = WriteState.OPEN, WriteState.CAREFUL
    assert states == [open_, careful, careful, careful, open_]


def test_a_restart_goes_on_with_the_same_day() -> None:
    first, second = WriteBudget(100), WriteBudget(100)
    first.spend(97, 1e9)
    first.refuse()
    second.load(first.dump(), 1e9 + HOUR_S)
    assert second.spent(1e9 + HOUR_S) == 97
    assert second.state(1e9 + HOUR_S) is WriteState.CLOSED
    assert second.spent(1e9 + 30 * HOUR_S) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "state": 0, "hours": {}}',
        '{"version": 1, "state": 7, "hours": {}}',
        '{"version": 1, "state": 0, "hours": {"x": 1}}',
        '{"version": 1, "state": 0, "hours": {"1": -5}}',
        '{"version": 1, "state": 0, "hours": 3}',
    ],
)
def test_a_damaged_count_changes_nothing(text: str) -> None:
    budget = WriteBudget(100)
    budget.spend(50, 1e9)
    with pytest.raises(InvalidArgument):
        budget.load(text, 1e9)
    assert budget.spent(1e9) == 50


def test_without_a_budget_it_only_counts() -> None:
    budget = WriteBudget(0)
    budget.spend(1 << 50, 1e9)
    assert budget.state(1e9) is WriteState.OPEN
    assert budget.left(1e9) > 1 << 60
    assert budget.spent(1e9) == 1 << 50


# ---- write-back under a budget


@pytest.mark.parametrize("count", [2, 20], ids=["one by one", "as a run"])
def test_write_back_stops_at_the_budget_and_goes_on_a_day_later(count: int) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"[: count + 2]
    desk = desk_with(write_budget_bytes=count * UNIT)
    desk.put(names)
    assert desk.write_back() == list(names[:count])
    assert desk.write_back() == []
    assert desk.catalog.admission.budget.spent(desk.now_s) == count * UNIT
    desk.now_s += DAY_S
    assert desk.write_back() == []
    desk.now_s += HOUR_S
    assert desk.write_back() == list(names[count:]), "in their order"


def test_the_drain_writes_beyond_the_budget_and_is_counted() -> None:
    desk = desk_with(write_budget_bytes=UNIT)
    desk.put("abc")
    desk.carry(desk.catalog.flush(1 << 30, desk.now_s))
    assert desk.catalog.admission.budget.spent(desk.now_s) == 3 * UNIT


def test_what_the_codec_saved_goes_back_to_the_budget() -> None:
    desk = desk_with(write_budget_bytes=10 * UNIT)
    desk.put("ab")
    desk.write_back()
    desk.catalog.admission.budget.settle(2 * UNIT, UNIT // 2, desk.now_s)
    assert desk.catalog.admission.budget.spent(desk.now_s) == UNIT // 2


@pytest.mark.parametrize("count", [2, 20], ids=["one by one", "as a run"])
def test_one_hit_wonders_are_left_out_once_the_budget_runs_low(count: int) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"[:count]
    desk = desk_with(write_budget_bytes=100 * UNIT)
    desk.catalog.admission.budget.spend(85 * UNIT, desk.now_s)
    desk.put(names)
    assert desk.write_back() == []
    assert desk.catalog.admission.take_refused() == {Refusal.ONE_HIT: count}
    desk.release(desk.read(names))
    assert desk.write_back() == list(names[:15])


# ---- worth


@pytest.mark.parametrize("count", [2, 20], ids=["one by one", "as a run"])
def test_a_short_path_is_not_written_and_a_long_one_is_whole(count: int) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"[:count]
    desk = desk_with(min_benefit_bytes=(count + 1) * UNIT)
    desk.put(names)
    assert desk.write_back() == []
    assert desk.catalog.admission.take_refused() == {Refusal.SMALL: count}
    desk.put("Z", under=names[-1])
    desk.release(desk.read(names))
    assert sorted(desk.write_back()) == sorted(f"{names}Z")


def test_what_several_paths_share_is_worth_writing_though_it_is_small() -> None:
    desk = desk_with(min_benefit_bytes=3 * UNIT)
    desk.put("ab")
    desk.put("x", under="a")
    assert desk.write_back() == ["a"]


FAST_DISK, SLOW_DISK = Line(0.0, 1e-9), Line(0.0, 1e-3)


@pytest.mark.parametrize("count", [2, 20], ids=["one by one", "as a run"])
def test_what_is_computed_faster_than_loaded_is_not_written(count: int) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"[:count]
    desk = desk_with()
    know(desk, SLOW_DISK, tokens_per_s=1000.0)
    desk.put(names)
    assert desk.write_back() == []
    assert desk.catalog.admission.take_refused() == {Refusal.RECOMPUTE: count}
    know(desk, FAST_DISK, tokens_per_s=1000.0)
    desk.release(desk.read(names))
    assert desk.write_back() == list(names)


def test_where_no_engine_told_its_speed_everything_is_worth_it() -> None:
    desk = desk_with()
    desk.catalog.admission.know(SLOW_DISK, {})
    desk.put("ab")
    assert desk.write_back() == ["a", "b"]


def test_a_speed_at_the_edge_does_not_flap() -> None:
    desk = desk_with()
    edge = BLOCK_TOKENS / 1000 / UNIT
    """Of a disk as fast as computing."""
    verdicts = []
    for i, factor in enumerate([0.9, 1.1, 0.95, 1.12, 0.9]):
        know(desk, Line(0.0, edge * factor), tokens_per_s=1000.0)
        name = "abcde"[i]
        desk.put(name)
        verdicts.append(desk.write_back() == [name])
    assert verdicts == [True] * 5
    know(desk, Line(0.0, edge * 1.2), tokens_per_s=1000.0)
    desk.put("f")
    assert desk.write_back() == []


def know(desk: Desk, load: Line, *, tokens_per_s: float) -> None:
    desk.catalog.admission.know(load, {desk.ns: Prefill(tokens_per_s)})


def test_what_is_stored_before_the_disk_has_any_space_is_written_once_it_has() -> None:
    # It had been refused like a one-hit wonder on a full disk, and waited for a hit: the first slab of a slow disk takes longer than the first put.
    desk = Desk(nvme=0)
    layout = desk.namers[0].layout
    tiers = [
        TierLimits(tier, 8, lease_share=1.0, admit_hits=1) for tier in (TierId.DRAM, TierId.NVME)
    ]
    desk.catalog = Catalog(tiers=tiers, policy="lru", limits=Limits(), epoch=7)
    desk.catalog.grow(TierId.DRAM, 0, 8)
    desk.catalog.add_namespace(layout)
    desk.session = desk.catalog.open_session(desk.now_s)
    desk.put("ab")
    assert desk.write_back() == []
    desk.catalog.grow(TierId.NVME, 0, 8)
    assert desk.write_back() == ["a", "b"]
