"""Predicted working sets: how timely and how right they were."""

from kvstored.core.calls import Reason
from kvstored.core.residents import KEPT_S, SETS_MAX, Residents
from kvstored.core.types import TierId
from tests.core.desk import Desk


def desk_with_cold(names: str, cold: str) -> Desk:
    desk = Desk(dram=16, nvme=16)
    desk.put(names)
    desk.write_back()
    for name in reversed(cold):
        for copy in desk.copies(name):
            if desk.catalog.books.copies.tier[copy] == TierId.DRAM:
                desk.catalog.drop_copy(copy, Reason.DEMAND, desk.now_s)
    return desk


def test_what_is_in_memory_at_the_deadline_is_in_time_and_the_rest_is_late() -> None:
    desk = desk_with_cold("abcd", "cd")
    residents = Residents(desk.catalog.books)
    residents.report(1, desk.ns, desk.keys("abcdX").fingerprints, desk.now_s + 1)
    assert residents.look(desk.now_s).in_time_blocks == 0, "not before its time"
    seen = residents.look(desk.now_s + 1)
    assert (seen.in_time_blocks, seen.late_blocks, seen.late_s) == (2, 2, [])
    assert residents.look(desk.now_s + 2).late_blocks == 0, "once"
    desk.release(desk.read("cd"))
    assert residents.look(desk.now_s + 3.5).late_s == [2.5]
    assert residents.look(desk.now_s + 4).late_s == []


def test_recall_is_what_of_the_reads_was_predicted() -> None:
    desk = desk_with_cold("abcd", "")
    residents = Residents(desk.catalog.books)
    residents.report(1, desk.ns, desk.keys("abc").fingerprints, desk.now_s + 1)
    residents.read(1, desk.ns, desk.keys("bcd").fingerprints)
    residents.read(2, desk.ns, desk.keys("abcd").fingerprints)
    seen = residents.look(desk.now_s)
    assert (seen.predicted_reads, seen.other_reads) == (2, 1), "another session predicted nothing"


def test_a_set_is_forgotten_some_time_after_its_deadline() -> None:
    desk = desk_with_cold("a", "")
    residents = Residents(desk.catalog.books)
    residents.report(1, desk.ns, desk.keys("a").fingerprints, desk.now_s)
    residents.look(desk.now_s + KEPT_S)
    assert len(residents) == 1
    residents.look(desk.now_s + KEPT_S + 0.1)
    assert len(residents) == 0


def test_sets_are_bounded_and_one_a_session() -> None:
    desk = desk_with_cold("a", "")
    residents = Residents(desk.catalog.books)
    names = desk.keys("a").fingerprints
    assert all(residents.report(i % SETS_MAX, desk.ns, names, 1.0) for i in range(SETS_MAX + 9))
    assert not residents.report(SETS_MAX, desk.ns, names, 1.0)
