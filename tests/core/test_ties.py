"""The objectives beyond page-ins: ties among what attention left alone, and what is written first when not all can be."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from kvstored.core.feedback import FeedbackLimits
from kvstored.core.plan import OBJECTIVES, Objective
from kvstored.core.types import UNIT_BYTES, Part, TierId
from tests.core.desk import LINEAR, UNIT, Desk, spec_of

DRAM, NVME = TierId.DRAM, TierId.NVME
LARGE = replace(LINEAR, bytes_per_block=4 * UNIT)
CHEAP = replace(spec_of("cheap", LINEAR), flops_base=1e9)
DEAR = replace(spec_of("dear", LINEAR), flops_base=1e12)
HUGE = replace(spec_of("huge", LARGE), flops_base=4e12)


def cold(desk: Desk, names: str, ns: int = 0) -> None:
    rows = desk.catalog.books.index.find(desk.keys(names, ns=ns).fingerprints)
    nothing = np.zeros((64, len(rows)), dtype=np.bool_)
    desk.catalog.feedback.selected(rows, Part.DENSE, nothing, 1.0, desk.now_s)


@pytest.mark.parametrize("order", list(permutations(OBJECTIVES)))
def test_of_victims_that_attention_left_alone_the_first_objective_that_differs_chooses(
    order: tuple[Objective, ...],
) -> None:
    """Nobody has another copy: `h` saves least a byte, `f` is the largest, `o` was used before both."""
    desk = Desk(DEAR, CHEAP, HUGE, dram=8)  # o, h, f, z and x are in; y needs room
    desk.catalog.scheduler.follow(order)
    desk.put("o")
    desk.put("h", ns=1)
    desk.put("f", ns=2)
    desk.put("z")
    desk.catalog.feedback.limits = FeedbackLimits(sink_steps=8, stable_steps=1000)
    for name, ns in (("o", 0), ("h", 1), ("f", 2)):
        cold(desk, name, ns)
    desk.gone()
    desk.put("x")
    desk.put("y")
    there = {name: bool(desk.tiers_of(name, ns=ns)) for name, ns in (("o", 0), ("h", 1), ("f", 2))}
    is_hit_first = order.index(Objective.HIT_RATE) < order.index(Objective.FOOTPRINT)
    assert there == {"o": True, "h": not is_hit_first, "f": is_hit_first}, order


@pytest.mark.parametrize("order", list(permutations(OBJECTIVES)))
def test_where_not_all_can_be_written_the_objectives_say_what_is(
    order: tuple[Objective, ...],
) -> None:
    """`h` was hit, `r` is held by a running request, `f` is small; the oldest, `o`, is none of it. The day has room for `h`, `r` and `o` or so."""
    small = replace(spec_of("small", LINEAR))
    large = replace(spec_of("large", LARGE))
    budget = 5 * UNIT_BYTES
    desk = Desk(large, small, dram=64, nvme=64, write_budget_bytes=budget)
    desk.catalog.scheduler.follow(order)
    for name in "ohr":
        desk.put(name)
    desk.put("f", ns=1)
    desk.release(desk.read("h"))
    desk.catalog.begin_request(desk.session, b"r", desk.ns, desk.keys("r"), desk.now_s)
    shown = [
        desk.namers[0].names.get(name) or desk.namers[1].names[name]
        for copy, _ in desk.catalog.scheduler.write_back.look(desk.now_s)
        if (name := desk.catalog.books.fingerprint(int(desk.catalog.books.copies.block[copy])))
    ]
    first = {
        Objective.HIT_RATE: "h",
        Objective.TRANSFER: "r",
        Objective.DECODE: "r",
        Objective.FOOTPRINT: "f",
    }
    expected = list(dict.fromkeys(first[objective] for objective in order))
    assert shown == [*expected, "o"], order


def test_where_all_can_be_written_it_goes_down_as_it_came() -> None:
    desk = Desk(dram=64, nvme=64)
    for name in "ohr":
        desk.put(name)
    desk.release(desk.read("h"))
    assert desk.write_back() == ["o", "h", "r"]
