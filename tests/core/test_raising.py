"""What goes up to a GPU by itself: resident groups of running requests, and predicted sets as far as there is room; and what stays there."""

from dataclasses import replace

import numpy as np
import pytest

from kvstored.core.calls import Reason
from kvstored.core.columns import READY
from kvstored.core.types import Part, TierId
from tests.core.desk import LINEAR, SHARDED, SPARSE, STATE, UNIT, Desk, spec_of

HCA = replace(LINEAR, name="hca", resident=True)
HYBRID = spec_of("h", HCA, SPARSE, STATE)


def desk_of(*, hbm: int = 8, low: float = 0.9, gpus: int = 1, tp: int = 1) -> Desk:
    spec = HYBRID if tp == 1 else spec_of("h", replace(SHARDED, resident=True), SPARSE, tp=tp)
    return Desk(spec, spec_of("plain"), dram=64, hbm=hbm, low=low, high=0.95, gpus=gpus)


def run(desk: Desk, names: str, *, ns: int = 0, request: bytes = b"r") -> None:
    layout = desk.namers[ns].layout
    keys = desk.keys(names, ns=ns)
    desk.catalog.begin_request(desk.session, request, layout.id, keys, desk.now_s)


def raised(desk: Desk, *sets: tuple[str, int], bytes_max: int = 1 << 30) -> None:
    wanted = [
        (desk.namers[ns].layout.id, desk.keys(names, ns=ns).fingerprints) for names, ns in sets
    ]
    desk.carry(desk.raising.begin(wanted, bytes_max, desk.now_s))
    desk.catalog.check()


def on_gpu(desk: Desk, part: Part, names: str, *, ns: int = 0) -> str:
    """Of these blocks those whose part a GPU has."""
    table = desk.catalog.books.copies
    return "".join(
        name
        for name in names
        if any(
            table.tier[copy] == TierId.HBM
            and table.part[copy] == part
            and table.state[copy] == READY
            for copy in desk.copies(name, ns=ns)
        )
    )


def test_resident_groups_of_a_running_request_go_up_and_nothing_else_does() -> None:
    desk = desk_of()
    desk.put("abcd")
    desk.put("wxyz")
    raised(desk)
    assert on_gpu(desk, Part.DENSE, "abcdwxyz") == "", "nobody reads them"
    run(desk, "abcd")
    raised(desk)
    assert on_gpu(desk, Part.DENSE, "abcdwxyz") == "abcd"
    assert on_gpu(desk, Part.SPARSE, "abcdwxyz") == ""
    assert desk.raising.begin([], 1 << 30, desk.now_s) == [], "they are there"


def test_they_stay_while_they_are_referenced_and_make_room_for_themselves() -> None:
    desk = desk_of(hbm=6)
    desk.put("abc", ns=1)
    loads, _ = desk.catalog.prefetch(
        desk.namers[1].layout.id, desk.keys("abc", ns=1), TierId.HBM, desk.now_s
    )
    desk.carry(loads)
    assert on_gpu(desk, Part.DENSE, "abc", ns=1) == "abc"
    desk.put("pqrstu")
    run(desk, "pqrstu")
    raised(desk)
    assert on_gpu(desk, Part.DENSE, "abc", ns=1) == ""
    assert len(on_gpu(desk, Part.DENSE, "pqrstu")) == 5, "others have left as far as they are read"
    before = on_gpu(desk, Part.DENSE, "pqrstu")
    desk.put("ijklmn")
    run(desk, "ijklmn", request=b"s")
    raised(desk)
    assert on_gpu(desk, Part.DENSE, "pqrstu") == before, "a referenced one left for another"
    desk.catalog.complete_request(desk.session, b"r", False, desk.now_s)
    raised(desk)
    assert len(on_gpu(desk, Part.DENSE, "ijklmn")) == 5


def test_a_namespace_without_resident_groups_is_left_alone() -> None:
    desk = desk_of()
    desk.put("abc", ns=1)
    run(desk, "abc", ns=1)
    raised(desk)
    assert on_gpu(desk, Part.DENSE, "abc", ns=1) == ""


def test_a_predicted_set_takes_what_is_free_and_pushes_nothing_out() -> None:
    desk = desk_of(hbm=8, low=0.75)
    desk.put("ab", ns=1)
    desk.carry(
        desk.catalog.prefetch(
            desk.namers[1].layout.id, desk.keys("ab", ns=1), TierId.HBM, desk.now_s
        )[0]
    )
    desk.put("pqrst", ns=1)
    raised(desk, ("pqrst", 1))
    assert on_gpu(desk, Part.DENSE, "abpqrst", ns=1) == "abpq", (
        "up to 3/4 of what is not for states"
    )


def test_all_parts_of_a_predicted_set_go_up() -> None:
    desk = desk_of()
    desk.put("ab")
    raised(desk, ("ab", 0))
    assert on_gpu(desk, Part.DENSE, "ab") == on_gpu(desk, Part.SPARSE, "ab") == "ab"
    assert desk.hits("ab").tier_blocks[TierId.HBM] == 2


def test_a_round_is_bounded_and_goes_on_head_first() -> None:
    desk = desk_of()
    desk.put("abcdef")
    run(desk, "abcdef")
    for count in (2, 4, 6):
        raised(desk, bytes_max=2 * UNIT)
        assert on_gpu(desk, Part.DENSE, "abcdef") == "abcdef"[:count]


def test_what_is_not_in_memory_goes_up_when_it_is() -> None:
    desk = Desk(HYBRID, dram=64, nvme=64, hbm=8)
    desk.put("ab")
    desk.write_back()
    table = desk.catalog.books.copies
    for name in "ab":
        for copy in desk.copies(name):
            if table.tier[copy] == TierId.DRAM:
                desk.catalog.drop_copy(copy, Reason.CORRUPT, desk.now_s)
    run(desk, "ab")
    raised(desk)
    assert on_gpu(desk, Part.DENSE, "ab") == ""
    layout = desk.namers[0].layout
    desk.carry(desk.catalog.prefetch(layout.id, desk.keys("ab"), TierId.DRAM, desk.now_s)[0])
    raised(desk)
    assert on_gpu(desk, Part.DENSE, "ab") == "ab"


def test_shards_of_resident_groups_go_to_the_gpu_of_their_rank() -> None:
    desk = desk_of(gpus=2, hbm=16, tp=2)
    for shard in range(2):
        desk.put("ab", shard=shard)
    run(desk, "ab")
    raised(desk)
    books = desk.catalog.books
    found = {
        (int(books.pieces.shard[row]), books.place(row)[0].segment)
        for copy in desk.copies("a")
        if int(books.copies.tier[copy]) == TierId.HBM
        for row in books.pieces_of(copy)
    }
    assert found == {(0, 0), (1, 1)}


@pytest.mark.parametrize("is_lost", [True, False])
def test_without_a_gpu_nothing_goes_up(is_lost: bool) -> None:
    desk = desk_of() if is_lost else Desk(HYBRID, dram=64)
    desk.put("ab")
    run(desk, "ab")
    if is_lost:
        desk.catalog.demotion.lose(desk.now_s, 100)
    names = [(desk.ns, np.asarray(desk.keys("ab").fingerprints))]
    assert desk.raising.begin(names, 1 << 30, desk.now_s) == []
