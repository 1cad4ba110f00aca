"""What the catalog makes of the copies that a scan finds after a restart."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvstored.core.bulk import RecoveredColumns
from kvstored.core.calls import FillStatus, Leased, Limits, PieceRow, Reason, Recovered, Visible
from kvstored.core.types import Extent, Heat, Part, Place, TierId
from tests.core.desk import BLOCK_TOKENS, LINEAR, SHARDED, UNIT, Desk, spec_of

DRAM, NVME = TierId.DRAM, TierId.NVME
LIMITS = Limits(quarantine_s=100)


def found(
    desk: Desk,
    name: str,
    place: Place,
    *,
    parent: str | None = None,
    shard: int = 0,
    group: int = 0,
    generation: int = 9,
    hits: int = 0,
    last_s: float = 500.0,
    leased: bool = False,
    lossy: bool = False,
) -> Recovered:
    low, high = desk.keys(name).fingerprints[0].tolist()
    above = (0, 0)
    if parent is not None:
        parent_low, parent_high = desk.keys(parent).fingerprints[0].tolist()
        above = parent_low, parent_high
    return Recovered(
        fingerprint=(low, high),
        parent=above,
        group=group,
        shard=shard,
        length=UNIT,
        checksum=5,
        place=place,
        generation=generation,
        depth=0,
        valid_tokens=BLOCK_TOKENS,
        hits=hits,
        heat=Heat.COLD,
        last_s=last_s,
        leased=leased,
        lossy=lossy,
    )


def unit(start: int) -> Place:
    return (Extent(0, start, 1),)


def columns(pieces: Sequence[Recovered]) -> RecoveredColumns:
    return RecoveredColumns(
        fingerprints=np.asarray([piece.fingerprint for piece in pieces], dtype=np.uint64),
        parents=np.asarray([piece.parent for piece in pieces], dtype=np.uint64),
        group=np.asarray([piece.group for piece in pieces], dtype=np.uint16),
        shard=np.asarray([piece.shard for piece in pieces], dtype=np.uint16),
        length=np.asarray([piece.length for piece in pieces], dtype=np.uint64),
        checksum=np.asarray([piece.checksum for piece in pieces], dtype=np.uint64),
        extents=np.asarray([piece.place[0] for piece in pieces], dtype=np.uint32),
        generation=np.asarray([piece.generation for piece in pieces], dtype=np.uint64),
        depth=np.asarray([piece.depth for piece in pieces], dtype=np.uint32),
        valid=np.asarray([piece.valid_tokens for piece in pieces], dtype=np.uint32),
        hits=np.asarray([piece.hits for piece in pieces], dtype=np.uint32),
        last_s=np.asarray([piece.last_s for piece in pieces], dtype=np.float64),
        leased=np.asarray([piece.leased for piece in pieces], dtype=np.bool_),
        content=np.asarray([piece.content for piece in pieces], dtype=np.uint32),
    )


@pytest.fixture(params=["one by one", "in columns"])
def is_bulk(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "in columns")


def recover(desk: Desk, tier: TierId, pieces: Sequence[Recovered], *, is_bulk: bool) -> list[bool]:
    if is_bulk:
        kept = desk.catalog.recovery.recover_many(tier, desk.ns, columns(pieces), desk.now_s)
        answer = kept.tolist()
    else:
        answer = desk.catalog.recovery.recover(tier, desk.ns, pieces, desk.now_s)
    desk.catalog.check()
    return list(answer)


def test_children_may_be_found_before_their_parents(is_bulk: bool) -> None:
    desk = Desk(nvme=8)
    desk.catalog.recovery.begin(NVME)
    chain = [("c", "b", 2), ("a", None, 0), ("b", "a", 1)]
    pieces = [found(desk, name, unit(at), parent=parent) for name, parent, at in chain]
    for piece in pieces:
        assert recover(desk, NVME, [piece], is_bulk=is_bulk) == [True]
    assert desk.catalog.recovery.done(NVME, desk.now_s) == 0
    desk.catalog.check()
    assert desk.hits("abc").hit_blocks == 3
    (node,) = desk.catalog.looking.tree_nodes([desk.ns], 9)[0]
    assert (node.blocks, node.depth) == (3, 0)


def test_two_claims_on_one_place_are_both_dropped(is_bulk: bool) -> None:
    # In columns the earlier claimant of the same batch stayed.
    desk = Desk(nvme=8)
    desk.catalog.recovery.begin(NVME)
    pieces = [found(desk, "a", unit(3)), found(desk, "b", unit(3)), found(desk, "c", unit(4))]
    kept = recover(desk, NVME, pieces, is_bulk=is_bulk)
    assert kept[1:] == [False, True]
    assert desk.there("abc") == "c"
    desk.gone()
    desk.catalog.recovery.done(NVME, desk.now_s)
    desk.catalog.check()
    assert desk.catalog.tier_use()[1].used_units == 1


def test_a_third_claim_is_dropped_as_well(is_bulk: bool) -> None:
    # Where the space of the first two was free at once, the third one was believed.
    desk = Desk(dram=8)
    desk.catalog.recovery.begin(DRAM)
    for name in "abc":
        recover(desk, DRAM, [found(desk, name, unit(3))], is_bulk=is_bulk)
    assert desk.there("abc") == ""


def test_a_place_outside_of_the_tier_is_refused_alone(is_bulk: bool) -> None:
    desk = Desk(nvme=4)
    desk.catalog.recovery.begin(NVME)
    pieces = [found(desk, "a", unit(3)), found(desk, "b", unit(4))]
    assert recover(desk, NVME, pieces, is_bulk=is_bulk) == [True, False]
    assert desk.there("ab") == "a"


def test_recovered_memory_is_unverified_until_its_content_is_checked(is_bulk: bool) -> None:
    desk = Desk(dram=8)
    desk.catalog.recovery.begin(DRAM)
    recover(desk, DRAM, [found(desk, "a", unit(0))], is_bulk=is_bulk)
    desk.catalog.recovery.done(DRAM, desk.now_s)
    grant = desk.read("a")
    assert grant.blocks[0].unverified
    (piece,) = grant.blocks[0].pieces
    assert piece is not None
    desk.catalog.verified(piece.copy)
    assert not desk.read("a").blocks[0].unverified


def test_a_generation_is_kept_and_later_ones_are_greater(is_bulk: bool) -> None:
    desk = Desk(dram=8)
    desk.catalog.recovery.begin(DRAM)
    recover(desk, DRAM, [found(desk, "a", unit(0), generation=1 << 40)], is_bulk=is_bulk)
    desk.catalog.recovery.done(DRAM, desk.now_s)
    desk.put("b")
    _, generations = desk.catalog.locate(desk.ns, desk.keys("ab"))
    assert generations[0] == 1 << 40
    assert generations[1] > 1 << 40


def test_what_was_used_last_leaves_last_after_a_restart_too(is_bulk: bool) -> None:
    desk = Desk(dram=3)
    desk.catalog.recovery.begin(DRAM)
    times = {"a": 30.0, "b": 10.0, "c": 20.0}
    pieces = [
        found(desk, name, unit(i), last_s=last_s) for i, (name, last_s) in enumerate(times.items())
    ]
    recover(desk, DRAM, pieces, is_bulk=is_bulk)
    desk.catalog.recovery.done(DRAM, desk.now_s)
    desk.put("xyz")
    assert [name for name, _ in desk.gone()] == ["b", "c", "a"]


def test_recovered_blocks_of_a_retired_namespace_leave_first(is_bulk: bool) -> None:
    # The columns' way did not mark them.
    desk = Desk(spec_of("old"), spec_of("new"), dram=2)
    desk.catalog.retire(desk.ns)
    desk.catalog.recovery.begin(DRAM)
    recover(desk, DRAM, [found(desk, "a", unit(0))], is_bulk=is_bulk)
    desk.catalog.recovery.done(DRAM, desk.now_s)
    desk.put("x", ns=1)
    desk.catalog.touch(desk.ns, desk.keys("a"), desk.now_s)
    desk.put("y", ns=1)
    assert desk.gone() == [("a", Reason.RETIRED)]


def test_nothing_is_granted_in_a_tier_that_is_being_scanned() -> None:
    desk = Desk()
    desk.catalog.recovery.begin(DRAM)
    assert desk.put("a") == [FillStatus.NO_SPACE]
    assert desk.explain("b").reason is Reason.RECOVERING
    desk.catalog.recovery.done(DRAM, desk.now_s)
    assert desk.put("a") == [FillStatus.GRANTED]


def test_what_the_scan_leaves_incomplete_is_dropped_at_its_end() -> None:
    desk = Desk(spec_of("tp", LINEAR, SHARDED, tp=2), nvme=8)
    desk.catalog.recovery.begin(NVME)
    whole = [(0, 0, 0), (1, 0, 1), (1, 1, 2)]
    pieces = [found(desk, "a", unit(at), group=g, shard=shard) for g, shard, at in whole]
    pieces.append(found(desk, "b", unit(5), group=1, shard=1))
    assert recover(desk, NVME, pieces, is_bulk=False) == [True] * 4
    assert desk.catalog.recovery.done(NVME, desk.now_s) == 1
    assert desk.gone() == [("b", Reason.INCOMPLETE)]
    assert desk.there("ab") == "a"
    assert desk.catalog.blocks == 1


def test_a_leased_mark_keeps_the_space_for_a_reader_from_before() -> None:
    desk = Desk(dram=1, limits=LIMITS)
    desk.catalog.recovery.begin(DRAM)
    recover(desk, DRAM, [found(desk, "a", unit(0), leased=True)], is_bulk=True)
    desk.catalog.recovery.done(DRAM, desk.now_s)
    assert desk.put("x") == [FillStatus.NO_SPACE]
    desk.catalog.drain()
    desk.wait(101)
    assert [effect for effect in desk.catalog.drain() if isinstance(effect, Leased)]
    assert desk.put("x") == [FillStatus.GRANTED]


def test_space_that_was_being_filled_at_the_crash_is_kept_aside() -> None:
    desk = Desk(dram=1, limits=LIMITS)
    desk.catalog.recovery.begin(DRAM)
    assert desk.catalog.recovery.keep_aside(DRAM, (PieceRow(0, 0, unit(0)),), desk.now_s)
    desk.catalog.recovery.done(DRAM, desk.now_s)
    assert desk.put("x") == [FillStatus.NO_SPACE]
    desk.wait(101)
    desk.catalog.drain()
    assert desk.put("x") == [FillStatus.GRANTED]
    assert desk.read("x").blocks[0].must_verify


def test_a_copy_on_disk_and_one_in_memory_are_one_block_and_the_latter_is_clean() -> None:
    desk = Desk(dram=4, nvme=4)
    for tier in (NVME, DRAM):
        desk.catalog.recovery.begin(tier)
        recover(desk, tier, [found(desk, "a", unit(1))], is_bulk=True)
        desk.catalog.recovery.done(tier, desk.now_s)
    assert desk.tiers_of("a", Part.DENSE) == {DRAM, NVME}
    assert desk.catalog.tier_use()[0].dirty_copies == 0
    assert desk.write_back() == []


@pytest.mark.parametrize("is_old_first", [True, False])
def test_stale_bytes_of_a_mutable_block_are_refused(is_old_first: bool) -> None:
    # A discard that a crash cut short left the old bytes on disk: they came back beside the new ones, under one key.
    desk = Desk(spec_of("mutable", LINEAR, mutable=True), dram=4, nvme=4)
    desk.catalog.recovery.begin(DRAM)
    desk.catalog.recovery.begin(NVME)
    old, new = (found(desk, "a", unit(1), generation=generation) for generation in (10, 20))
    if is_old_first:
        assert recover(desk, NVME, [old], is_bulk=True) == [True]
        assert recover(desk, DRAM, [new], is_bulk=True) == [True]
    else:
        assert recover(desk, DRAM, [new], is_bulk=True) == [True]
        assert recover(desk, NVME, [old], is_bulk=True) == [False]
    assert desk.tiers_of("a") == {DRAM}
    assert desk.catalog.locate(desk.ns, desk.keys("a"))[1].tolist() == [20]


def test_recovery_announces_nothing(is_bulk: bool) -> None:
    desk = Desk(dram=4)
    desk.catalog.recovery.begin(DRAM)
    recover(desk, DRAM, [found(desk, "a", unit(1))], is_bulk=is_bulk)
    assert not [effect for effect in desk.catalog.drain() if isinstance(effect, Visible)]
