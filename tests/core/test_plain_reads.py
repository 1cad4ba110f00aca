"""Leases on many plain blocks at once say and do what a lease on the same keys one by one does."""

import pytest

from kvstored.core.calls import ReadStatus, Reason, StoredPiece
from kvstored.core.columnar import Grant
from kvstored.core.copying import Acquired
from kvstored.core.types import GroupKind, GroupSpec, TierId
from tests.core.desk import UNIT, Desk, spec_of
from tests.core.test_plain_copies import stored_below

HBM, DRAM, NVME = TierId.HBM, TierId.DRAM, TierId.NVME


@pytest.fixture(params=[1, 99], ids=["by columns", "one by one"], autouse=True)
def plain_min(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    least: int = request.param
    monkeypatch.setattr("kvstored.core.plain_reads.PLAIN_MIN", least)
    return least


def acquired(desk: Desk, names: str) -> Acquired:
    found = desk.catalog.acquire(desk.namers[0].acquire(desk.session, list(names)), desk.now_s)
    desk.catalog.check()
    return found


def hits_of(desk: Desk, name: str) -> int:
    books = desk.catalog.books
    low, high = desk.keys(name).fingerprints[0].tolist()
    return int(books.blocks.hits[books.index.find_one((low, high))])


def lose(desk: Desk, name: str, tier: TierId) -> None:
    """As if its bytes there had gone bad."""
    for copy in desk.copies(name):
        if desk.catalog.books.copies.tier[copy] == tier:
            desk.catalog.drop_copy(copy, Reason.CORRUPT, desk.now_s)
    desk.catalog.check()


def granted(desk: Desk, lease: int) -> Grant:
    grant = desk.catalog.grant(lease, desk.now_s)
    desk.catalog.check()
    return grant


def in_hbm_too(desk: Desk, names: str) -> None:
    copying, _ = desk.catalog.prefetch(desk.ns, desk.keys(names), HBM, desk.now_s)
    desk.carry(copying)


def test_what_comes_up_from_a_copy_that_went_bad_is_no_hit() -> None:
    """By columns it was one: counted, waited for, and read or not by the luck of the load, while match said that it is not there."""
    desk = Desk(dram=8, nvme=16)
    stored_below(desk, "abcd")
    loading = acquired(desk, "abcd")
    lose(desk, "c", NVME)
    assert desk.hits("abcd").hit_blocks == 2
    again = acquired(desk, "abcd")
    assert [hits_of(desk, name) for name in "abcd"] == [2, 2, 1, 2]
    assert again.pending == [copy for copy in loading.pending if copy not in desk.copies("c")]
    for task in desk.singly(loading.loads):
        desk.catalog.carriage.abort(task.id, Reason.CORRUPT, desk.now_s)
    desk.catalog.check()
    grant = granted(desk, again.lease)
    assert [block.status for block in grant.blocks] == [ReadStatus.MISS] * 4
    assert grant.blocks[2].reason is Reason.INCOMPLETE
    granted(desk, loading.lease)
    assert desk.there("abcd") == ""
    assert not desk.catalog.counts["leases"]


def test_a_load_evicts_nothing_that_its_lease_reads() -> None:
    """Of a block that a GPU has too the copy in memory left, and the lease read the bytes of whatever took its row."""
    desk = Desk(dram=8, nvme=32, hbm=4)
    stored_below(desk, "abcd")
    desk.release(desk.read("ab"))
    in_hbm_too(desk, "ab")
    desk.put("wxyzst")
    desk.write_back()
    found = acquired(desk, "abcd")
    desk.carry(found.loads)
    grant = granted(desk, found.lease)
    assert [block.status for block in grant.blocks] == [ReadStatus.HIT] * 4
    for name, block in zip("abcd", grant.blocks, strict=True):
        (piece,) = block.pieces
        assert piece is not None
        assert piece.copy in desk.copies(name)
    assert len({piece.place for block in grant.blocks for piece in block.pieces if piece}) == 4
    assert desk.release(grant)


def test_what_comes_down_from_a_gpu_is_read_from_there() -> None:
    """By columns it was told to come from NVMe."""
    desk = Desk(dram=8, nvme=16, hbm=4)
    desk.put("a")
    in_hbm_too(desk, "a")
    lose(desk, "a", DRAM)
    assert desk.tiers_of("a") == {HBM}
    copying = desk.catalog.demotion.flush(1 << 30, desk.now_s)
    found = acquired(desk, "a")
    desk.carry(copying)
    assert [block.tier for block in granted(desk, found.lease).blocks] == [HBM]


def test_what_a_disk_keeps_in_less_comes_up_in_its_whole_length() -> None:
    desk = Desk(spec_of("m", GroupSpec("kv", GroupKind.LINEAR, 2 * UNIT)), dram=4, nvme=16)
    desk.put("a")
    for task in desk.singly(desk.catalog.write_back(1 << 30, desk.now_s)):
        (move,) = task.moves
        (place,) = move.target
        stored = StoredPiece((place._replace(units=1),), 1)
        desk.catalog.carriage.commit(task.id, [stored], desk.now_s)
    lose(desk, "a", DRAM)
    written = desk.begin("xy")
    assert acquired(desk, "a").loads == [], "one unit is not enough"
    assert desk.commit(written)
