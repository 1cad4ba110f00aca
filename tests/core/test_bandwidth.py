"""The bucket of copy bandwidth: no more than its rate over time, demand before background, reservations honoured and bounded."""

import pytest

from kvstored.core.bandwidth import BURST_S, DEBT_S, SHARE_MIN, Bandwidth

RATE = 1_000_000_000
PIECE = 4_000_000


def carried(bandwidth: Bandwidth, end_s: float, take: str = "take_background") -> int:
    """Bytes that pass until `end_s`, asking again when told."""
    now_s, passed = 0.0, 0
    while now_s < end_s:
        wait_s = getattr(bandwidth, take)(PIECE, now_s)
        passed += 0 if wait_s else PIECE
        now_s += wait_s
    return passed


def test_without_a_bound_everything_passes_at_once() -> None:
    bandwidth = Bandwidth(0)
    assert bandwidth.take_background(1 << 50, 0.0) == 0.0
    assert bandwidth.reserve(1, RATE, 10.0, 0.0) == 0


@pytest.mark.parametrize("take", ["take_background", "take_demand"])
def test_over_time_no_more_passes_than_the_rate(take: str) -> None:
    passed = carried(Bandwidth(RATE), 4.0, take)
    slack = (BURST_S + DEBT_S) * RATE + PIECE
    assert 0.8 * 4 * RATE < passed <= 4 * RATE + slack


def test_demand_overtakes_what_waits_in_the_background() -> None:
    bandwidth = Bandwidth(RATE)
    while not bandwidth.take_background(PIECE, 0.0):
        pass
    assert bandwidth.take_demand(PIECE, 0.0) == 0.0
    assert bandwidth.take_background(PIECE, 0.0) > PIECE / RATE


def test_demand_cannot_owe_without_end() -> None:
    bandwidth = Bandwidth(RATE)
    taken = 0
    while not bandwidth.take_demand(PIECE, 0.0):
        taken += PIECE
    assert taken <= (BURST_S + DEBT_S) * RATE + PIECE


def test_a_reservation_is_left_to_its_owner_until_it_ends() -> None:
    bandwidth = Bandwidth(RATE)
    assert bandwidth.reserve(1, RATE // 2, 2.0, 0.0) == RATE // 2
    during = carried(bandwidth, 2.0)
    assert during <= 2.0 * RATE / 2 + BURST_S * RATE + PIECE
    assert bandwidth.reserve(2, 1, 1.0, 2.0) == RATE - 1, "the first one ended by itself"


def test_reservations_cannot_take_all_and_are_replaced_by_their_owner() -> None:
    bandwidth = Bandwidth(RATE)
    assert bandwidth.reserve(1, 10 * RATE, 1.0, 0.0) == int(SHARE_MIN * RATE)
    assert bandwidth.reserve(1, RATE // 4, 1.0, 0.0) == RATE - RATE // 4
    assert bandwidth.reserve(1, 0, 1.0, 0.0) == RATE
