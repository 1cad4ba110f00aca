"""Runs of copies where they differ from single tasks if one is careless: what the state machine seldom meets."""

import pytest

from kvstored.core.calls import Reason
from kvstored.core.copying import CopyRun
from kvstored.core.types import TierId
from tests.core.desk import Desk

DRAM, NVME = TierId.DRAM, TierId.NVME


def stored_below(desk: Desk, names: str) -> None:
    """The chain lies on NVMe only."""
    desk.put(names)
    desk.write_back()
    for name in reversed(names):
        for copy in desk.copies(name):
            if desk.catalog.books.copies.tier[copy] == DRAM:
                desk.catalog.drop_copy(copy, Reason.CORRUPT, desk.now_s)
    desk.catalog.check()


def prefetched(desk: Desk, names: str) -> str:
    copying, pending = desk.catalog.prefetch(desk.ns, desk.keys(names), DRAM, desk.now_s)
    tasks = desk.singly(copying)
    assert sorted(task.target_copy for task in tasks) == sorted(pending)
    desk.catalog.check()
    return "".join(desk.name_of(task.fingerprint) for task in tasks)


@pytest.mark.parametrize("plain_min", [1, 99], ids=["as a run", "one by one"])
def test_a_prefetch_loads_again_what_its_first_blocks_evicted(
    plain_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.core.carriage.PLAIN_MIN", plain_min)
    desk = Desk(dram=4, nvme=16)
    stored_below(desk, "xyz")
    for name in "wpqr":
        desk.put(name)
        desk.write_back()
    # x evicts w, which is the last key of the same call
    assert prefetched(desk, "xyzw") == "xyzw"


@pytest.mark.parametrize("plain_min", [1, 99], ids=["as a run", "one by one"])
def test_a_prefetch_keeps_the_copy_above_what_it_loads(
    plain_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.core.carriage.PLAIN_MIN", plain_min)
    desk = Desk(dram=4, nvme=16)
    stored_below(desk, "abcde")
    for name in ("a", "p", "q", "r"):
        desk.put(name) if name != "a" else desk.release(desk.read("a"))
        desk.write_back()
    assert desk.tiers_of("a") == {DRAM, NVME}, "the oldest in memory"
    assert prefetched(desk, "bcde") == "bcd", "a stays, so that there is room for three"
    assert DRAM in desk.tiers_of("a")


def test_as_many_as_there_is_room_for_come_up_and_the_others_are_told() -> None:
    desk = Desk(dram=4, nvme=16)
    stored_below(desk, "abcd")
    written = desk.begin("wx")
    acquired = desk.catalog.acquire(desk.namers[0].acquire(desk.session, list("abcd")), desk.now_s)
    (run,) = acquired.loads
    assert isinstance(run, CopyRun)
    assert (len(run), run.asked.tolist()) == (2, [0, 1])
    desk.carry(acquired.loads)
    grant = desk.catalog.grant(acquired.lease, desk.now_s)
    assert [block.reason for block in grant.blocks[2:]] == [Reason.NO_SPACE] * 2
    assert desk.there("ab") == "ab"
    assert {"a", "b"} == {name for name in "abcd" if DRAM in desk.tiers_of(name)}
    assert desk.commit(written) == [True, True]


def test_a_lease_that_would_exceed_its_share_goes_key_by_key() -> None:
    desk = Desk(dram=8, nvme=16, lease_share=0.5)
    stored_below(desk, "abcdef")
    grant = desk.read("abcdef")
    assert grant.many is None
    assert [block.reason is Reason.NO_SPACE for block in grant.blocks] == [False] * 4 + [True] * 2


def test_a_run_whose_source_went_bad_meanwhile_is_not_committed_as_one() -> None:
    desk = Desk(dram=8, nvme=16)
    desk.put("abcd")
    (run,) = desk.catalog.write_back(1 << 30, desk.now_s)
    assert isinstance(run, CopyRun)
    for copy in desk.copies("b"):
        if desk.catalog.books.copies.tier[copy] == DRAM:
            desk.catalog.drop_copy(copy, Reason.CORRUPT, desk.now_s)
    assert not desk.catalog.carriage.commit_run(run, run.targets, desk.now_s)
    first, second = desk.catalog.carriage.cut(run, [1, 4])
    assert desk.catalog.carriage.commit_run(first, first.targets, desk.now_s)
    for task in desk.catalog.carriage.take_apart(second):
        desk.catalog.carriage.abort(task.id, Reason.IO_ERROR, desk.now_s)
    desk.catalog.check()
    assert desk.tiers_of("a") == {DRAM, NVME}
    assert desk.tiers_of("c") == {DRAM}
    assert desk.write_back() == ["c", "d"], "they are still dirty"
