"""Blocks loaded ahead: held until used, counted as used or wasted, and a signal that guesses badly is paused."""

import pytest

from kvstored.core.calls import Reason
from kvstored.core.plan import SPECULATIVE, Bounds, Signal
from kvstored.core.prefetched import (
    HOLD_S,
    JUDGED_BLOCKS,
    PAUSE_MAX_S,
    PAUSE_S,
    PrefetchLimits,
)
from kvstored.core.turns import (
    BATCHES_MAX,
    CONVERSATIONS_MAX,
    EARLY,
    SIBLINGS_MAX,
    Turns,
)
from kvstored.core.types import NamespaceId, TierId
from kvstored.fields import GUESSES as GUESS_NAMES
from kvstored.metrics import GUESSES as GUESS_LABELS
from tests.core.desk import UNIT, Desk

DRAM = TierId.DRAM
NS = NamespaceId(1)
NAMES = "".join(chr(0x100 + i) for i in range(2 * JUDGED_BLOCKS))


def desk_with_cold(*paths: str, dram: int = 100, share: float = 1.0) -> Desk:
    """These paths lie on NVMe only."""
    desk = Desk(dram=dram, nvme=400)
    desk.catalog.carriage.ahead.limits = PrefetchLimits(share=share)
    for path in paths:
        desk.put(path)
    desk.write_back()
    for name in "".join(paths)[::-1]:
        for copy in desk.copies(name):
            if desk.catalog.books.copies.tier[copy] == DRAM:
                desk.catalog.drop_copy(copy, Reason.DEMAND, desk.now_s)
    desk.gone()
    return desk


def guess(desk: Desk, path: str, signal: Signal = Signal.SESSION) -> str:
    """What a round loads for it."""
    names = desk.keys(path).fingerprints
    desk.catalog.page_ins.want(desk.ns, names, signal, 0.0, desk.now_s)
    return load(desk)


def load(desk: Desk) -> str:
    desk.catalog.carriage.ahead.look(desk.now_s)
    loads = desk.catalog.scheduler.run(Bounds(load_bytes=1 << 30), desk.now_s).loads
    tasks = desk.singly(loads)
    desk.carry(tasks)
    return "".join(desk.name_of(task.fingerprint) for task in tasks)


def outcome(desk: Desk, signal: Signal = Signal.SESSION) -> tuple[int, int, int]:
    ahead = desk.catalog.carriage.ahead
    ahead.look(desk.now_s)
    desk.catalog.check()
    return ahead.ended[signal, "used"], ahead.ended[signal, "wasted"], ahead.ended[signal, "failed"]


def test_the_names_of_guesses_are_those_of_the_setting_and_the_metric() -> None:
    assert sorted(signal.value for signal in SPECULATIVE) == sorted(GUESS_NAMES)
    assert GUESS_NAMES == GUESS_LABELS


def test_what_came_up_stays_until_it_is_used() -> None:
    desk = desk_with_cold("ab", "cd", dram=4)
    assert guess(desk, "ab") == "ab"
    desk.put("wx")
    desk.put("uv")
    assert desk.tiers_of("a") >= {DRAM}
    assert desk.tiers_of("b") >= {DRAM}
    desk.release(desk.read("ab"))
    assert outcome(desk) == (2, 0, 0)
    for name in "qrst":
        desk.put(name)
    assert DRAM not in desk.tiers_of("b"), "like any other block then"


def test_what_is_not_used_in_time_is_waste_and_may_leave() -> None:
    desk = desk_with_cold("ab")
    guess(desk, "ab")
    desk.release(desk.read("a"))
    desk.now_s += HOLD_S - 0.1
    assert outcome(desk) == (0, 0, 0)
    assert desk.catalog.carriage.ahead.held_bytes == 2 * UNIT
    desk.now_s += 0.1
    assert outcome(desk) == (1, 1, 0)
    assert desk.catalog.carriage.ahead.wasted_bytes == UNIT
    assert desk.catalog.carriage.ahead.held_bytes == 0


def test_a_load_that_failed_is_no_waste() -> None:
    desk = desk_with_cold("a")
    names = desk.keys("a").fingerprints
    desk.catalog.page_ins.want(desk.ns, names, Signal.SESSION, 0.0, desk.now_s)
    (run,) = desk.catalog.scheduler.run(Bounds(load_bytes=1), desk.now_s).loads
    (task,) = desk.singly([run])
    desk.catalog.carriage.abort(task.id, Reason.IO_ERROR, desk.now_s)
    desk.now_s += HOLD_S
    assert outcome(desk) == (0, 0, 1)


def test_guesses_keep_to_their_share_of_memory_and_wait_for_room() -> None:
    desk = desk_with_cold("abcdef", dram=100, share=0.04)
    assert guess(desk, "abcdef") == "abcd"
    assert load(desk) == ""
    desk.release(desk.read("abcd"))
    assert load(desk) == "ef"


def test_what_an_engine_asked_for_goes_before_guesses_and_beyond_their_share() -> None:
    desk = desk_with_cold("ab", "cdef", dram=100, share=0.02)
    page_ins = desk.catalog.page_ins
    page_ins.want(desk.ns, desk.keys("ab").fingerprints, Signal.SESSION, 0.0, desk.now_s)
    page_ins.want(desk.ns, desk.keys("cdef").fingerprints, Signal.REQUEST, 0.0, desk.now_s)
    assert load(desk) == "cdef"


@pytest.mark.parametrize("signal", sorted(SPECULATIVE))
def test_a_signal_that_wastes_is_paused_twice_as_long_each_time(signal: Signal) -> None:
    desk = desk_with_cold(*NAMES[:JUDGED_BLOCKS])
    pause_s = PAUSE_S
    for _ in range(3):
        for name in NAMES[:JUDGED_BLOCKS]:
            assert guess(desk, name, signal) == name
        desk.now_s += HOLD_S
        assert outcome(desk, signal)[1] > 0
        assert desk.catalog.carriage.ahead.pause_left_s(signal, desk.now_s) == pause_s
        assert guess(desk, NAMES[0], signal) == ""
        assert desk.catalog.page_ins.ended[signal, "shed"] > 0
        desk.now_s += pause_s
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
        evict(desk, NAMES[:JUDGED_BLOCKS])


def test_a_signal_that_is_right_goes_on_and_another_ones_waste_is_not_its() -> None:
    desk = desk_with_cold(*NAMES)
    for name in NAMES[:JUDGED_BLOCKS]:
        guess(desk, name, Signal.SIBLING)
    for name in NAMES[JUDGED_BLOCKS:]:
        guess(desk, name, Signal.SESSION)
        desk.release(desk.read(name))
    desk.now_s += HOLD_S
    assert outcome(desk, Signal.SESSION) == (JUDGED_BLOCKS, 0, 0)
    ahead = desk.catalog.carriage.ahead
    assert ahead.may_guess(Signal.SESSION, desk.now_s)
    assert not ahead.may_guess(Signal.SIBLING, desk.now_s)


def test_what_an_engine_asks_for_is_never_paused() -> None:
    desk = desk_with_cold(*NAMES[:JUDGED_BLOCKS])
    for name in NAMES[:JUDGED_BLOCKS]:
        guess(desk, name, Signal.REQUEST)
    desk.now_s += HOLD_S
    assert outcome(desk, Signal.REQUEST)[1] == JUDGED_BLOCKS
    evict(desk, NAMES[0])
    assert guess(desk, NAMES[0], Signal.REQUEST) == NAMES[0]


def test_a_signal_that_is_off_is_not_loaded() -> None:
    desk = desk_with_cold("ab")
    desk.catalog.carriage.ahead.limits = PrefetchLimits(signals=frozenset({Signal.SIBLING}))
    assert guess(desk, "ab", Signal.SESSION) == ""
    desk.catalog.carriage.ahead.limits = PrefetchLimits(1.0, 0.5, frozenset({Signal.SESSION}))
    assert guess(desk, "ab", Signal.SESSION) == "ab"


def test_blocks_that_are_removed_while_they_are_held_leave_no_trace() -> None:
    desk = desk_with_cold("ab")
    guess(desk, "ab")
    desk.catalog.remove_namespace(desk.ns, desk.now_s)
    desk.gone()
    desk.catalog.check()
    desk.now_s += HOLD_S
    assert outcome(desk) == (0, 0, 2)
    assert desk.catalog.blocks == 0


def test_a_round_looks_at_few_paths_and_holds_few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.core.page_ins.LOOKS_MAX", 2)
    monkeypatch.setattr("kvstored.core.prefetched.AHEAD_MAX", 3)
    desk = desk_with_cold(*NAMES[:5])
    for name in NAMES[:5]:
        names = desk.keys(name).fingerprints
        desk.catalog.page_ins.want(desk.ns, names, Signal.SESSION, 0.0, desk.now_s)
    assert [load(desk) for _ in range(3)] == [NAMES[:2], NAMES[2:3], ""]


def evict(desk: Desk, names: str) -> None:
    for name in names:
        for copy in desk.copies(name):
            if desk.catalog.books.copies.tier[copy] == DRAM:
                desk.catalog.drop_copy(copy, Reason.DEMAND, desk.now_s)
    desk.gone()


# ---- who comes back


def test_a_conversation_is_known_by_where_its_last_turn_ended() -> None:
    turns = Turns()
    assert turns.begun((NS, "s"), 0.0) is None
    turns.ended((NS, "s"), (1, 2), 10.0)
    turns.ended((NS, "s"), (3, 4), 11.0)
    assert turns.begun((NS, "s"), 12.0) == (3, 4)
    assert turns.begun((NamespaceId(2), "s"), 12.0) is None


def test_the_next_turn_is_expected_a_little_before_its_usual_pause_is_over() -> None:
    turns = Turns()
    turns.ended((NS, "s"), (1, 1), 0.0)
    assert not list(turns.due(1e9)), "no pause is known yet"
    turns.begun((NS, "s"), 10.0)
    turns.ended((NS, "s"), (2, 2), 20.0)
    assert not list(turns.due(20.0 + EARLY * 10.0 - 0.01))
    assert list(turns.due(20.0 + EARLY * 10.0)) == [(NS, (2, 2))]
    assert not list(turns.due(1e9)), "once"


def test_a_conversation_that_went_on_is_not_expected_any_more() -> None:
    turns = Turns()
    turns.ended((NS, "s"), (1, 1), 0.0)
    turns.begun((NS, "s"), 10.0)
    turns.ended((NS, "s"), (2, 2), 20.0)
    turns.begun((NS, "s"), 21.0)
    turns.ended((NS, "s"), (3, 3), 22.0)
    assert [leaf for _, leaf in turns.due(1e9)] == [(3, 3)]


def test_siblings_of_a_batch_are_its_latest_other_paths() -> None:
    turns = Turns()
    assert turns.joined(NS, b"b", (1, 0)) == []
    assert turns.joined(NS, b"b", (2, 0)) == [(1, 0)]
    assert turns.joined(NS, b"b", (1, 0)) == [(2, 0)]
    assert turns.joined(NS, b"c", (9, 0)) == []
    for i in range(100):
        others = turns.joined(NS, b"b", (100 + i, 0))
    assert len(others) == SIBLINGS_MAX
    assert others[-1] == (198, 0)


def test_all_of_it_is_bounded() -> None:
    turns = Turns()
    for i in range(CONVERSATIONS_MAX + 10):
        turns.ended((NS, str(i)), (i, 0), 0.0)
    assert len(turns) == CONVERSATIONS_MAX
    for i in range(BATCHES_MAX + 10):
        turns.joined(NS, i.to_bytes(4, "big"), (i, 0))
    assert turns.joined(NS, (0).to_bytes(4, "big"), (1, 1)) == []
