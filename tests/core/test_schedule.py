"""The scheduler: what it shows is what it does, showing changes nothing, and page-ins come in the order of the objectives."""

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from kvstored.core.calls import Reason
from kvstored.core.page_ins import WANTS_MAX, PageIns
from kvstored.core.plan import OBJECTIVES, Bounds, Decision, Objective, Plan, Signal
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import TierId
from kvstored.fields import OBJECTIVES as OBJECTIVE_NAMES
from tests.core.desk import LINEAR, UNIT, Desk, spec_of

DRAM, NVME = TierId.DRAM, TierId.NVME
ALL = Bounds({DRAM: None, NVME: None}, write_bytes=1 << 30, load_bytes=1 << 30)


def look(desk: Desk, rows_max: int = 1000) -> Plan:
    plan = desk.catalog.scheduler.look(desk.now_s, 0, rows_max)
    desk.catalog.check()
    return plan


def names_of(desk: Desk, plan: Plan) -> list[tuple[str, int]]:
    return [(desk.name_of(each.head), each.blocks) for each in plan.evictions]


# ---- looking


def test_the_names_of_objectives_are_those_of_the_setting() -> None:
    assert tuple(each.value for each in Objective) == OBJECTIVE_NAMES


def test_evictions_are_shown_in_their_order_with_what_becomes_of_the_blocks() -> None:
    desk = Desk(dram=8, nvme=16, high=0.5, low=0.25)
    desk.put("abc")
    desk.write_back()
    desk.put("xyz")
    plan = look(desk)
    shown = [(desk.name_of(e.head), e.blocks, e.decision) for e in plan.evictions]
    assert shown == [("a", 3, Decision.DEMOTE), ("z", 1, Decision.DROP)]
    assert [e.depth for e in plan.evictions] == [0, 2]
    desk.catalog.scheduler.run(ALL, desk.now_s)
    gone = [name for name, reason in desk.gone() if reason is Reason.WATERMARK]
    assert gone == ["c", "b", "a", "z"]


def test_nothing_leaves_below_the_watermark() -> None:
    desk = Desk(dram=8, high=0.9, low=0.5)
    desk.put("abc")
    plan = look(desk)
    assert not plan.evictions
    (room,) = plan.tiers
    assert (room.used_units, room.free_units, room.high_units, room.low_units) == (3, 5, 7, 4)


def test_writes_are_shown_with_their_verdict_and_are_what_is_written() -> None:
    desk = Desk(dram=16, nvme=16, min_benefit_bytes=2 * UNIT)
    desk.put("abc")
    desk.put("x")
    plan = look(desk)
    shown = [(desk.name_of(w.head), w.blocks, w.decision, w.why) for w in plan.writes]
    assert shown == [
        ("a", 3, Decision.ADMIT, "worth it"),
        ("x", 1, Decision.REFUSE, "small"),
    ]
    assert desk.write_back() == ["a", "b", "c"]
    assert not look(desk).writes


def test_what_is_beyond_the_budget_or_not_hit_enough_is_shown_so() -> None:
    desk = Desk(dram=16, nvme=16, write_budget_bytes=2 * UNIT)
    desk.put("abc")
    assert [w.why for w in look(desk).writes] == ["worth it", "budget"]
    full = Desk(dram=8, nvme=4, high=0.5, low=0.5, admit_hits=1)
    full.put("abcd")
    assert [(w.blocks, w.why) for w in look(full).writes] == [(2, "worth it"), (2, "not hit")]


@pytest.mark.parametrize("policy", POLICIES)
def test_looking_changes_nothing(policy: str) -> None:
    for seed in range(5):
        looked, left_alone = (lived(policy, seed, looks=looks) for looks in (True, False))
        assert looked == left_alone, seed


def lived(policy: str, seed: int, *, looks: bool) -> list[tuple[str, Reason]]:
    """What left, in order, in a random life."""
    random = Random(seed)
    desk = Desk(dram=20, nvme=40, policy=policy, high=0.8, low=0.5)
    gone: list[tuple[str, Reason]] = []
    for i in range(60):
        desk.now_s += random.random() * 10
        name = chr(ord("A") + i)
        what = random.random()
        if looks:
            look(desk)
        if what < 0.5:
            above = random.choice([None, chr(ord("A") + random.randrange(max(1, i)))])
            desk.put(name, under=above if above and desk.there(above) else None)
        elif what < 0.7:
            desk.release(desk.read(desk.there("".join(map(chr, range(65, 65 + i)))) or "A"))
        elif what < 0.85:
            desk.write_back()
        else:
            desk.catalog.scheduler.run(Bounds({DRAM: random.choice([1, 3, None])}), desk.now_s)
        desk.catalog.books.policy.maintain(desk.now_s)
        gone += desk.gone()
    return gone


OF_LISTS = ("arc", "s3fifo", "wa")
"""Which of their lists yields is decided only when something leaves."""


def test_what_is_shown_first_leaves_first() -> None:
    exact = [policy for policy in POLICIES if policy not in OF_LISTS]
    for seed in range(40):
        random = Random(seed)
        desk = Desk(dram=30, policy=random.choice(exact), high=0.6, low=0.4)
        for i in range(8):
            desk.now_s += 1
            desk.put("".join(chr(65 + 4 * i + j) for j in range(random.randrange(1, 4))))
            if random.random() < 0.5:
                desk.release(desk.read(desk.there("".join(map(chr, range(65, 97))))[:1]))
        shown = names_of(desk, look(desk))
        desk.gone()
        desk.catalog.scheduler.run(Bounds({DRAM: None}), desk.now_s)
        left = [name for name, _ in desk.gone()]
        assert bool(shown) is bool(left), seed
        if shown:
            head, blocks = shown[0]
            assert left[:blocks][-1] == head, seed


def test_lists_are_cut_where_asked() -> None:
    desk = Desk(dram=16, nvme=16)
    for name in "abcdef":
        desk.put(name)
    plan = look(desk, rows_max=3)
    assert (len(plan.writes), plan.is_cut) == (3, True)
    assert not look(desk, rows_max=6).is_cut


# ---- page-ins


def below_memory(*paths: str, dram: int = 8) -> Desk:
    """These paths lie on NVMe only."""
    desk = Desk(dram=dram, nvme=64)
    for path in paths:
        desk.put(path)
    desk.write_back()
    for path in paths:
        for name in reversed(path):
            for copy in desk.copies(name):
                if desk.catalog.books.copies.tier[copy] == DRAM:
                    desk.catalog.drop_copy(copy, Reason.DEMAND, desk.now_s)
    desk.gone()
    return desk


def want(desk: Desk, path: str, signal: Signal = Signal.REQUEST, in_s: float = 0.0) -> bool:
    deadline_s = desk.now_s + in_s if in_s else 0.0
    return desk.catalog.page_ins.want(
        desk.ns, desk.keys(path).fingerprints, signal, deadline_s, desk.now_s
    )


def paged(desk: Desk, load_bytes: int = 1 << 30) -> str:
    """Names of what a round loads, in its order."""
    loads = desk.catalog.scheduler.run(Bounds(load_bytes=load_bytes), desk.now_s).loads
    names = "".join(desk.name_of(task.fingerprint) for task in desk.singly(loads))
    for task in list(desk.catalog.carriage.tasks.values()):
        desk.carry([task])
    return names


def test_a_wanted_path_comes_up_head_first_and_in_parts() -> None:
    desk = below_memory("abcdef")
    want(desk, "abcdef")
    assert paged(desk, 4 * UNIT) == "abcd"
    assert paged(desk, 1) == "e", "at least one"
    assert paged(desk) == "f"
    assert not desk.catalog.page_ins.wants
    assert +desk.catalog.page_ins.ended == {(Signal.REQUEST, "taken"): 6}


def test_what_is_in_memory_already_is_not_loaded() -> None:
    desk = below_memory("abc")
    desk.release(desk.read("a"))
    want(desk, "abc")
    assert paged(desk) == "bc"
    assert desk.catalog.page_ins.ended[Signal.REQUEST, "there"] == 1


def test_a_path_ends_where_a_block_is_missing() -> None:
    desk = below_memory("abcd")
    want(desk, "abXd")
    assert paged(desk) == "ab"
    assert not desk.catalog.page_ins.wants


def test_what_is_late_is_not_loaded() -> None:
    desk = below_memory("ab", "xy")
    want(desk, "ab", in_s=1.0)
    want(desk, "xy", in_s=3.0)
    desk.now_s += 2.0
    assert paged(desk) == "xy"
    assert desk.catalog.page_ins.ended[Signal.REQUEST, "late"] == 2


def test_the_nearer_deadline_goes_first() -> None:
    desk = below_memory("a", "b", "c")
    for name, in_s in (("a", 8.0), ("b", 0.1), ("c", 1.0)):
        want(desk, name, in_s=in_s)
    shown = [desk.name_of(each.head) for each in look(desk).page_ins]
    assert shown == ["b", "c", "a"]
    assert paged(desk) == "bca"


def test_what_is_asked_for_at_the_same_time_keeps_its_order() -> None:
    desk = below_memory("a", "b", "c")
    for name in "cab":
        want(desk, name, in_s=2.0)
    assert paged(desk) == "cab"


def test_the_first_objective_in_which_two_page_ins_differ_decides() -> None:
    """Four paths, each the best by one objective alone."""
    cheap, dear = spec_of("cheap", LINEAR), spec_of("dear", LINEAR)
    cheap, dear = replace(cheap, flops_base=1e9), replace(dear, flops_base=1e12)
    first_of = {
        Objective.HIT_RATE: "h",
        Objective.TRANSFER: "t",
        Objective.DECODE: "d",
        Objective.FOOTPRINT: "f",
    }
    for order in permutations(OBJECTIVES):
        desk = Desk(cheap, dear, dram=32, nvme=64)
        desk.put("tT")
        desk.put("dD")
        desk.put("f")
        desk.put("hH", ns=1)
        wants = PageIns(desk.catalog.books, desk.catalog.carriage.ahead, order)
        soon = desk.now_s + 0.1
        for names, ns, signal, deadline_s in (
            ("hH", 1, Signal.REQUEST, 0.0),
            ("tT", 0, Signal.TRANSFER, soon),
            ("dD", 0, Signal.REQUEST, soon),
            ("f", 0, Signal.REQUEST, 0.0),
        ):
            keys = desk.keys(names, ns=ns)
            wants.want(desk.namers[ns].layout.id, keys.fingerprints, signal, deadline_s, desk.now_s)
        first = wants.ordered(desk.now_s)[0]
        low, high = first.fingerprints[0].tolist()
        names_by = {**desk.namers[0].names, **desk.namers[1].names}
        assert names_by[low, high] == first_of[order[0]], order
        keyed = [wants._key(each, desk.now_s) for each in wants.ordered(desk.now_s)]
        assert keyed == sorted(keyed)


def test_a_full_queue_takes_no_more() -> None:
    desk = below_memory("a")
    assert all(want(desk, "a") for _ in range(WANTS_MAX))
    assert not want(desk, "a")
    assert desk.catalog.page_ins.ended[Signal.REQUEST, "shed"] == 1


def test_page_ins_make_room_only_where_something_may_leave() -> None:
    desk = below_memory("ab", dram=2)
    desk.put("xy")
    read = desk.read("xy")
    want(desk, "ab")
    assert paged(desk) == ""
    assert desk.there("xy") == "xy"
    desk.release(read)
