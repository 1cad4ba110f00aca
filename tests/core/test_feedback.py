"""Attention as advice: it reorders what is about to leave, raises what is selected all the time, and does nothing else."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kvstored.core.calls import Reason
from kvstored.core.columns import FIRST
from kvstored.core.feedback import (
    BURST_S,
    HALF_LIFE_S,
    RAISE_S,
    REPORT_BLOCKS,
    SHED,
    FeedbackLimits,
    Reported,
)
from kvstored.core.plan import Bounds
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import Budget, Part, TierId
from tests.core.desk import LINEAR, SPARSE, Desk, spec_of

DRAM = TierId.DRAM


def report(
    desk: Desk, names: str, selected: str, *, steps: int = 1, part: Part = Part.DENSE
) -> Reported:
    """Each of `steps` selected those in `selected`."""
    rows = desk.catalog.books.index.find(desk.keys(names).fingerprints)
    mask = np.tile([name in selected for name in names], (steps, 1))
    told = desk.catalog.feedback.selected(rows, part, mask, 1.0, desk.now_s)
    desk.catalog.check()
    return told


def left(desk: Desk) -> list[str]:
    return [name for name, _ in desk.gone()]


def full(stable_steps: int = 1000) -> Desk:
    """Four paths of one block each, the oldest first."""
    desk = Desk(dram=4)
    for name in "abcd":
        desk.put(name)
        desk.now_s += 1
    desk.catalog.feedback.limits = FeedbackLimits(sink_steps=8, stable_steps=stable_steps)
    return desk


def test_what_was_not_selected_for_long_leaves_before_what_was() -> None:
    desk = full()
    report(desk, "abcd", "abd", steps=8)
    desk.put("x")
    assert left(desk) == ["c"]
    desk.put("y")
    assert left(desk) == ["a"], "then the policy's order"


def test_it_leaves_alone_where_those_above_it_were_selected() -> None:
    """The run above it left with it, before what the policy would have taken."""
    desk = Desk(dram=8)
    for path in ("x", "y", "z", "abcde"):
        desk.put(path)
        desk.now_s += 1
    desk.catalog.feedback.limits = FeedbackLimits(sink_steps=8, stable_steps=1000)
    report(desk, "abcde", "abcd", steps=8)
    desk.gone()
    desk.put("1234")
    assert left(desk) == ["e", "x", "y", "z"]


def test_a_few_steps_without_a_selection_say_nothing() -> None:
    desk = full()
    report(desk, "abcd", "abd", steps=7)
    desk.put("x")
    assert left(desk) == ["a"]


def test_steps_add_up_over_reports_and_a_selection_ends_them() -> None:
    desk = full()
    report(desk, "c", "", steps=5)
    report(desk, "c", "", steps=5)
    assert desk.catalog.feedback.is_sunk(np.asarray(desk.copies("c")), desk.now_s)[0]
    report(desk, "c", "c")
    assert not desk.catalog.feedback.is_sunk(np.asarray(desk.copies("c")), desk.now_s)[0]


def test_what_was_told_is_forgotten_within_a_minute() -> None:
    desk = full()
    report(desk, "abcd", "abd", steps=64)
    desk.now_s += 2 * HALF_LIFE_S + 1
    desk.put("x")
    assert left(desk) == ["a"]


def test_heat_halves() -> None:
    desk = full()
    report(desk, "a", "a", steps=64)
    row = int(desk.catalog.books.index.find(desk.keys("a").fingerprints)[0])
    heat = desk.catalog.feedback.heat(row, Part.DENSE, desk.now_s)
    assert heat == pytest.approx(1.0, abs=0.01)
    desk.now_s += HALF_LIFE_S
    assert desk.catalog.feedback.heat(row, Part.DENSE, desk.now_s) == pytest.approx(heat / 2)


def test_what_is_selected_all_the_time_counts_as_used_but_not_over_and_over() -> None:
    desk = full(stable_steps=4)
    assert len(report(desk, "ab", "a", steps=10).raised) == 1
    assert len(report(desk, "ab", "a", steps=10).raised) == 0
    desk.put("x")
    assert left(desk) == ["b"]
    desk.now_s += RAISE_S
    assert len(report(desk, "ab", "a", steps=10).raised) == 1


def test_a_stable_block_below_memory_is_wanted() -> None:
    desk = Desk(dram=8, nvme=8)
    desk.put("ab")
    desk.write_back()
    for copy in desk.copies("b"):
        if desk.catalog.books.copies.tier[copy] == DRAM:
            desk.catalog.drop_copy(copy, Reason.DEMAND, desk.now_s)
    told = report(desk, "ab", "ab", steps=16)
    names = [desk.name_of(desk.catalog.books.fingerprint(row)) for row in told.wanted.tolist()]
    assert names == ["b"]


def test_a_block_that_takes_anothers_row_is_not_judged_by_it() -> None:
    desk = full()
    report(desk, "abcd", "", steps=64)
    desk.put("xyz")
    desk.gone()
    rows = np.asarray([copy for name in "xyz" for copy in desk.copies(name)])
    assert not desk.catalog.feedback.is_sunk(rows, desk.now_s).any()


def test_parts_are_told_apart() -> None:
    desk = Desk(spec_of("m", LINEAR, SPARSE), dram=8)
    desk.catalog.feedback.limits = FeedbackLimits(sink_steps=8)
    desk.put("ab")
    report(desk, "ab", "", steps=8, part=Part.SPARSE)
    sunk = {
        Part(int(desk.catalog.books.copies.part[copy])): bool(
            desk.catalog.feedback.is_sunk(np.asarray([copy]), desk.now_s)[0]
        )
        for copy in desk.copies("b")
    }
    assert sunk == {Part.DENSE: False, Part.SPARSE: True}


def test_what_every_step_reads_whole_is_not_cold_for_a_selection() -> None:
    desk = Desk(spec_of("m", replace(LINEAR, resident=True), SPARSE), dram=8)
    desk.catalog.feedback.limits = FeedbackLimits(sink_steps=8)
    desk.put("ab")
    for part in (Part.DENSE, Part.SPARSE):
        report(desk, "ab", "", steps=8, part=part)
    table = desk.catalog.books.copies
    for copy in desk.copies("b"):
        is_sunk = desk.catalog.feedback.is_sunk(np.asarray([copy]), desk.now_s)[0]
        assert is_sunk == (int(table.part[copy]) == Part.SPARSE)


def test_a_flood_of_reports_is_shed() -> None:
    desk = full()
    desk.catalog.feedback.limits = FeedbackLimits(blocks_per_s=4 + REPORT_BLOCKS)
    taken = [report(desk, "abcd", "a").is_taken for _ in range(10)]
    assert taken.count(True) == BURST_S
    desk.now_s += 1
    assert report(desk, "abcd", "a").is_taken
    desk.catalog.feedback.limits = FeedbackLimits(blocks_per_s=0)
    assert report(desk, "abcd", "a") is SHED


def test_mass_below_a_part_of_an_even_share_is_no_selection() -> None:
    desk = full()
    rows = desk.catalog.books.index.find(desk.keys("abcd").fingerprints)
    mass = np.asarray([0.5, 0.4, 0.01, 0.09])
    for _ in range(8):
        desk.catalog.feedback.attended(rows, Part.DENSE, mass, 1.0, desk.now_s)
    sunk = [
        desk.catalog.feedback.is_sunk(np.asarray(desk.copies(n)), desk.now_s)[0] for n in "abcd"
    ]
    assert sunk == [False, False, True, False]


@pytest.mark.parametrize("policy", POLICIES)
def test_feedback_never_evicts_what_is_referenced_and_deletes_nothing_by_itself(
    policy: str,
) -> None:
    for seed in range(8):
        random = Random(seed)
        desk = Desk(dram=24, nvme=24, policy=policy, high=0.9, low=0.6, pin_share=1.0)
        desk.catalog.feedback.limits = FeedbackLimits(sink_steps=2, stable_steps=2)
        names = "".join(map(chr, range(65, 65 + 40)))
        for path in (names[i : i + 4] for i in range(0, 24, 4)):
            desk.put(path)
        held = names[random.randrange(5) * 4 :][:4]
        lease = desk.read(held[:2]) if random.random() < 0.5 else None
        pinned = names[20:22]
        keys = desk.keys(pinned)
        desk.catalog.pin(desk.session, desk.ns, keys, hard=True, ttl_s=1e4, now_s=desk.now_s)
        request = names[12:15]
        desk.catalog.begin_request(desk.session, b"r", desk.ns, desk.keys(request), desk.now_s)
        desk.gone()
        for _ in range(12):
            there = desk.there(names)
            report(desk, there, random.choice(["", there[::3]]), steps=4)
            assert not desk.gone(), "a report deletes nothing"
            desk.now_s += random.random()
        desk.catalog.scheduler.run(Bounds({DRAM: None}), desk.now_s)
        for name in names[24:36]:
            desk.put(name)
        kept = pinned + request + (held[:2] if lease is not None else "")
        assert desk.there(kept) == kept, seed
        for name in request:
            assert DRAM in desk.tiers_of(name), seed


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_never_the_only_criterion(policy: str) -> None:
    """Of many leaves only those that the policy would soon take may leave for it."""
    desk = Desk(dram=64, policy=policy)
    names = [chr(65 + i) for i in range(64)]
    for name in names:
        desk.put(name)
        desk.now_s += 1
    desk.catalog.feedback.limits = FeedbackLimits(sink_steps=2)
    expected, *_, last = order(desk)
    report(desk, last, "", steps=8)
    desk.gone()
    desk.put("é")
    assert left(desk) == [expected]


def clean(policy: str, names: str, *, sink_steps: int = 8) -> Desk:
    """Paths of one block each, the oldest first, that NVMe has too."""
    desk = Desk(dram=len(names), nvme=2 * len(names), policy=policy)
    for name in names:
        desk.put(name)
        desk.now_s += 1
    desk.write_back()
    desk.catalog.feedback.limits = FeedbackLimits(sink_steps=sink_steps, stable_steps=1000)
    desk.gone()
    return desk


MANY = "".join(chr(0x100 + i) for i in range(26))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_loses_nothing_leaves_first_however_late_its_policy_would_take_it(policy: str) -> None:
    desk = clean(policy, MANY)
    ordinary = order(desk)
    unselected = ordinary[18::3]
    report(desk, unselected, "", steps=8)
    assert order(desk)[: len(unselected)] == unselected, (
        "among themselves the order is the policy's"
    )
    for name in unselected:
        desk.put(chr(ord(name) + 0x1000))
        assert desk.tiers_of(name) == {TierId.NVME}, "a demotion, no loss"


def order(desk: Desk) -> str:
    books = desk.catalog.books
    rows = books.policy.peek(DRAM, Budget.GLOBAL, desk.now_s, 1000)
    names = [desk.name_of(books.fingerprint(int(books.copies.block[row]))) for row in rows]
    return "".join(dict.fromkeys(names))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", ["selected", "used", "silence"])
def test_a_cold_block_is_an_ordinary_one_again(policy: str, what: str) -> None:
    """Once attention comes back, a request uses it, or nobody told of it for a minute."""
    desk = clean(policy, MANY)
    before = order(desk)
    cold = before[-1]
    report(desk, cold, "", steps=8)
    assert order(desk)[0] == cold
    if what == "selected":
        report(desk, cold, cold)
    elif what == "used":
        desk.now_s += 1
        desk.release(desk.read(cold))
    else:
        desk.now_s += 2 * HALF_LIFE_S + 1
    desk.put("\u2000")
    table = desk.catalog.books.copies
    here = [copy for copy in desk.copies(cold) if int(table.tier[copy]) == DRAM]
    if policy == "wa" and what == "used":  # which may think that it will not be used again
        assert not here or not table.flags[here[0]] & FIRST
        return
    assert here, "it did not leave first"
    assert not table.flags[here[0]] & FIRST
    assert cold in order(desk)[1:], "but it may leave"


def test_a_use_begins_the_count_of_steps_anew() -> None:
    desk = full()
    report(desk, "a", "", steps=7)
    desk.now_s += 1
    desk.release(desk.read("a"))
    desk.now_s += 1
    report(desk, "a", "", steps=7)
    assert not desk.catalog.feedback.is_sunk(np.asarray(desk.copies("a")), desk.now_s)[0]
    report(desk, "a", "")
    assert desk.catalog.feedback.is_sunk(np.asarray(desk.copies("a")), desk.now_s)[0]


def test_what_leaves_first_for_another_reason_does_not_stop_with_what_was_told() -> None:
    desk = clean("lru", "abcd")
    report(desk, "d", "", steps=8)
    desk.catalog.retire(desk.ns)
    desk.now_s += 2 * HALF_LIFE_S + 1
    desk.put("x")
    (dram,) = (c for c in desk.copies("d") if int(desk.catalog.books.copies.tier[c]) == DRAM)
    assert desk.catalog.books.copies.flags[dram] & FIRST
