"""Fills, leases, pins, requests and sessions of the catalog: what they protect, and how they end."""

import pytest

from kvstored.core.calls import FillStatus, Leased, Limits, ReadStatus, Reason
from kvstored.core.columnar import FreedMany
from kvstored.core.types import TierId
from kvstored.errors import Busy, InvalidArgument, NoSpace, NotFound
from tests.core.desk import Desk, remove, spec_of

DRAM, NVME = TierId.DRAM, TierId.NVME
GRANTED, NO_SPACE = FillStatus.GRANTED, FillStatus.NO_SPACE
QUARANTINE = Limits(quarantine_s=100, lease_ttl_max_s=50, fill_ttl_max_s=50)


# ---- fills


def test_space_of_an_expired_fill_is_kept_from_others_until_its_writer_is_dead() -> None:
    desk = Desk(dram=1, limits=QUARANTINE)
    late = desk.begin("a", ttl_s=10)
    assert desk.wait(11).fills == 1
    assert desk.put("b") == [NO_SPACE]
    assert desk.commit(late) == [None]  # too late: LOST
    desk.catalog.quarantine.writer_dead(desk.session)
    assert desk.gone() == [("a", Reason.FILL_LOST)]
    assert desk.put("b") == [GRANTED]
    assert not desk.read("b").blocks[0].must_verify


def test_after_its_timer_the_space_is_used_again_but_hashed_at_every_read() -> None:
    desk = Desk(dram=1, limits=QUARANTINE)
    desk.begin("a", ttl_s=10)
    desk.wait(11)
    desk.wait(101)
    assert desk.gone() == [("a", Reason.FILL_LOST)]
    desk.put("b")
    block = desk.read("b").blocks[0]
    assert block.status is ReadStatus.HIT
    assert block.must_verify


def test_a_fill_cannot_be_held_longer_than_the_limit() -> None:
    desk = Desk(limits=QUARANTINE)
    desk.begin("a", ttl_s=1e9)
    assert desk.catalog.next_expiry_s() == desk.now_s + 50


def test_fills_of_one_session_are_bounded() -> None:
    desk = Desk(limits=Limits(fills_per_session_max=2))
    desk.begin("ab")
    with pytest.raises(Busy):
        desk.begin("c")


def test_ids_of_another_boot_are_lost() -> None:
    desk = Desk()
    reserved = desk.begin("a")
    grant = reserved.grants[0]
    assert grant is not None
    old = grant.fill - (1 << 32)
    assert desk.catalog.commit(desk.session, [old], [{}], desk.now_s) == [None]
    assert desk.catalog.release(desk.session, [old], desk.now_s) == [True]


def test_a_fill_of_another_session_is_not_committed() -> None:
    desk = Desk()
    reserved = desk.begin("a")
    other = desk.catalog.open_session(desk.now_s)
    mine, desk.session = desk.session, other
    assert desk.commit(reserved) == [None]
    desk.session = mine
    assert desk.commit(reserved) == [True]


# ---- leases


def test_leased_bytes_stay_whatever_happens_to_the_block() -> None:
    desk = Desk(dram=2)
    desk.put("a")
    lease = desk.read("a")
    assert desk.put("xy") == [GRANTED, NO_SPACE]
    remove(desk.catalog, desk.ns, desk.keys("a"), desk.now_s)
    desk.catalog.check()
    assert desk.there("a") == ""
    assert desk.gone() == []
    assert desk.release(lease)
    assert desk.gone() == [("a", Reason.REMOVED)]


def test_an_expired_lease_is_lost_and_its_bytes_stay_in_quarantine() -> None:
    desk = Desk(dram=1, limits=QUARANTINE)
    desk.put("a")
    lease = desk.read("a")
    assert desk.wait(51).leases == 1
    assert desk.put("b") == [NO_SPACE]
    assert not desk.release(lease)
    desk.wait(101)
    assert desk.put("b") == [GRANTED]


def test_a_renewed_lease_lives_on() -> None:
    desk = Desk(limits=QUARANTINE)
    desk.put("a")
    lease = desk.read("a")
    desk.wait(40)
    assert desk.catalog.renew(desk.session, [lease.lease, 5], 50, desk.now_s) == [False, True]
    assert desk.wait(40).leases == 0
    assert desk.wait(11).leases == 1


def test_leases_hold_no_more_than_their_share() -> None:
    desk = Desk(dram=4, lease_share=0.5)
    desk.put("abcd")
    blocks = desk.read("abc").blocks
    assert [block.status for block in blocks] == [ReadStatus.HIT, ReadStatus.HIT, ReadStatus.MISS]
    assert blocks[2].reason is Reason.NO_SPACE
    again = desk.read("ab").blocks  # the same bytes count once
    assert [block.status for block in again] == [ReadStatus.HIT, ReadStatus.HIT]


def test_a_load_does_not_evict_what_the_same_lease_reads_next() -> None:
    # Keys were held one by one as they were read: loading the head of a path evicted its tail.
    desk = Desk(dram=2, nvme=4)
    desk.put("ab")
    desk.write_back()
    desk.put("x", under="a")
    assert desk.gone() == [("b", Reason.DEMAND)]
    desk.release(desk.read("ax"))
    desk.put("y")
    assert desk.gone() == [("x", Reason.DEMAND)]
    acquired = desk.read("ab").blocks
    assert [block.status for block in acquired] == [ReadStatus.HIT, ReadStatus.HIT]
    assert desk.gone() == [("y", Reason.DEMAND)]


def test_a_copy_that_shrinks_while_read_is_counted_right() -> None:
    # The trim of a load changed its units, not those of the leases: the share ran full of units that nobody held.
    desk = Desk(spec_of("m"), dram=4, nvme=4)
    desk.put("a")
    lease = desk.read("a")
    assert desk.catalog.tier_use()[0].leased_units == 1
    desk.release(lease)
    assert desk.catalog.tier_use()[0].leased_units == 0


def test_the_first_and_the_last_reader_mark_the_records() -> None:
    desk = Desk()
    desk.put("a")
    desk.catalog.drain()
    one, other = desk.read("a"), desk.read("a")
    marks = [effect.leased for effect in desk.catalog.drain() if isinstance(effect, Leased)]
    assert marks == [True]
    desk.release(one)
    desk.release(other)
    marks = [effect.leased for effect in desk.catalog.drain() if isinstance(effect, Leased)]
    assert marks == [False]


def test_a_lease_that_reads_nothing_ends_at_once() -> None:
    desk = Desk()
    assert desk.read("a").lease == 0
    assert desk.catalog.counts["leases"] == 0


# ---- pins


def test_a_hard_pin_stays_a_soft_one_gives_way() -> None:
    desk = Desk(dram=2, pin_share=1.0)
    desk.put("ab")
    pin(desk, "a", hard=True)
    pin(desk, "b", hard=False)
    assert desk.put("x") == [GRANTED]
    assert desk.gone() == [("b", Reason.DEMAND)]
    assert desk.put("y") == [GRANTED]
    assert desk.gone() == [("x", Reason.DEMAND)]
    assert desk.catalog.counts["pins"] == 1


def test_a_soft_pin_does_not_give_way_for_nothing() -> None:
    # A write-back that found no room on the disk released every soft pin, of blocks in memory too.
    desk = Desk(dram=4, nvme=1, pin_share=1.0)
    desk.put("ab")
    pin(desk, "a", hard=False)
    tasks = desk.catalog.write_back(1 << 30, desk.now_s)
    assert len(tasks) == 1
    assert desk.catalog.counts["pins"] == 1
    desk.carry(tasks)


def test_a_pin_holds_its_ancestors() -> None:
    desk = Desk(dram=3, pin_share=1.0)
    desk.put("abc")
    pin(desk, "c", hard=True)
    assert desk.put("x") == [NO_SPACE]


def test_pins_hold_no_more_than_their_share() -> None:
    desk = Desk(dram=4, pin_share=0.5)
    desk.put("abcd")
    pin(desk, "ab", hard=True)
    with pytest.raises(NoSpace):
        pin(desk, "c", hard=True)
    assert desk.catalog.counts["pins"] == 1


def test_a_pin_ends_with_its_time() -> None:
    desk = Desk(dram=1, pin_share=1.0)
    desk.put("a")
    pin(desk, "a", hard=True, ttl_s=10)
    assert desk.wait(11).pins == 1
    assert desk.put("x") == [GRANTED]
    with pytest.raises(InvalidArgument):
        pin(desk, "x", hard=True, ttl_s=1e12)


def pin(desk: Desk, names: str, *, hard: bool, ttl_s: float = 60.0) -> int:
    pinned = desk.catalog.pin(
        desk.session, desk.ns, desk.keys(names), hard=hard, ttl_s=ttl_s, now_s=desk.now_s
    )
    desk.catalog.check()
    return pinned.pin


# ---- requests


def test_discard_frees_only_what_the_request_added_and_nobody_else_uses() -> None:
    desk = Desk()
    desk.put("ab")
    desk.catalog.begin_request(desk.session, b"r", desk.ns, desk.keys("ab"), desk.now_s)
    desk.commit(desk.begin("cde", under="b", request_id=b"r"))
    other = desk.read("abc")  # another request goes on from c
    assert complete(desk, discard=True) == 2
    assert desk.there("abcde") == "abc"
    desk.release(other)


def test_a_request_that_ends_as_cache_keeps_everything() -> None:
    desk = Desk()
    desk.catalog.begin_request(desk.session, b"r", desk.ns, desk.keys("ab"), desk.now_s)
    desk.commit(desk.begin("ab", request_id=b"r"))
    assert complete(desk, discard=False) == 0
    assert desk.there("ab") == "ab"
    with pytest.raises(NotFound):
        complete(desk, discard=False)


def test_a_running_request_keeps_its_path() -> None:
    desk = Desk(dram=2)
    desk.put("ab")
    desk.catalog.begin_request(desk.session, b"r", desk.ns, desk.keys("ab"), desk.now_s)
    assert desk.put("x") == [NO_SPACE]
    complete(desk, discard=False)
    assert desk.put("x") == [GRANTED]


def complete(desk: Desk, *, discard: bool) -> int:
    dropped = desk.catalog.complete_request(desk.session, b"r", discard, desk.now_s)
    desk.catalog.check()
    return dropped


def test_many_removed_blocks_leave_together_when_their_last_reader_does() -> None:
    """One by one they held the loop for a tenth of a second where 4,096 had been removed under a view."""
    desk = Desk(dram=8)
    desk.put("abcdefgh")
    grant = desk.read("abcdefgh")
    remove(desk.catalog, desk.ns, desk.keys("abcdefgh"), desk.now_s)
    desk.catalog.drain()
    assert desk.release(grant)
    desk.catalog.check()
    (freed,) = desk.catalog.drain()
    assert isinstance(freed, FreedMany)
    assert (len(list(freed.each())), freed.reason) == (8, Reason.REMOVED)
    assert desk.put("klmnopqr") == [GRANTED] * 8


# ---- sessions


def test_what_a_dead_session_held_is_free_at_once() -> None:
    desk = Desk(dram=2)
    desk.put("a")
    desk.read("a")
    desk.begin("b")
    desk.catalog.close_session(desk.session, desk.now_s, writer_dead=True)
    desk.catalog.check()
    desk.session = desk.catalog.open_session(desk.now_s)
    assert desk.put("xy") == [GRANTED, GRANTED]


def test_what_a_session_held_whose_process_may_live_is_kept_aside() -> None:
    desk = Desk(dram=2, limits=QUARANTINE)
    desk.put("a")
    desk.read("a")
    desk.begin("b")
    gone = desk.session
    desk.catalog.close_session(gone, desk.now_s, writer_dead=False)
    assert desk.catalog.quarantine.has(gone)
    desk.session = desk.catalog.open_session(desk.now_s)
    assert desk.put("x") == [NO_SPACE]
    desk.catalog.quarantine.writer_dead(gone)
    assert not desk.catalog.quarantine.has(gone)
    assert desk.put("x") == [GRANTED]


def test_an_ended_session_has_to_be_opened_anew() -> None:
    desk = Desk()
    desk.catalog.close_session(desk.session, desk.now_s, writer_dead=True)
    with pytest.raises(NotFound):
        desk.begin("a")
