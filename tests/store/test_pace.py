"""Steps of long work follow what they take."""

from kvstored.store.pace import STEP_MAX, STEP_MIN, TURN_S, Pace


def test_steps_grow_while_they_are_short_and_shrink_when_they_are_long() -> None:
    pace = Pace()
    assert pace.step == STEP_MIN
    for _ in range(20):
        pace.took(TURN_S / 10)
    assert pace.step == STEP_MAX
    pace.took(TURN_S * 0.8)
    assert pace.step == STEP_MAX, "as it should be"
    pace.took(TURN_S * 2)
    assert pace.step == STEP_MAX // 2
    for _ in range(20):
        pace.took(1.0)
    assert pace.step == STEP_MIN
