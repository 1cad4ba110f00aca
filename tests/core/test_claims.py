"""What pins and running requests may hold, and what the end of a request may drop."""

import pytest

from kvstored.core.calls import FillStatus
from kvstored.core.types import TierId
from kvstored.errors import NoSpace
from tests.core.desk import Desk, remove


def pin(desk: Desk, names: str, *, hard: bool = True) -> int:
    namer = desk.namers[0]
    return desk.catalog.pin(
        desk.session,
        namer.layout.id,
        namer.batch(list(names)),
        hard=hard,
        ttl_s=60.0,
        now_s=desk.now_s,
    ).pin


def begin_request(desk: Desk, names: str, name: bytes = b"r") -> None:
    namer = desk.namers[0]
    desk.catalog.begin_request(
        desk.session, name, namer.layout.id, namer.batch(list(names)), desk.now_s
    )


def hits(desk: Desk, names: str) -> int:
    namer = desk.namers[0]
    return desk.catalog.match(namer.layout.id, namer.batch(list(names)), 0, desk.now_s).hit_blocks


def pinned_units(desk: Desk, tier: TierId) -> int:
    return next(use.pinned_units for use in desk.catalog.tier_use() if use.tier is tier)


def test_discard_leaves_blocks_that_another_put_even_when_the_request_named_them() -> None:
    """They were dropped when the request had extended over them."""
    desk = Desk()
    begin_request(desk, "")
    desk.put("ab")  # somebody else's, no request id
    namer = desk.namers[0]
    desk.catalog.extend_request(desk.session, b"r", namer.batch(["a", "b"]), desk.now_s)
    desk.commit(desk.begin("c", under="b", request_id=b"r"))
    assert desk.catalog.complete_request(desk.session, b"r", True, desk.now_s) == 1
    assert hits(desk, "abc") == 2


def test_a_pin_counts_what_is_above_it() -> None:
    """A pin on the last of many blocks held all of them and counted one."""
    desk = Desk(dram=8, pin_share=0.5)
    desk.put("abcdef")
    with pytest.raises(NoSpace):
        pin(desk, "f")
    pin(desk, "d")
    assert pinned_units(desk, TierId.DRAM) == 4


def test_pins_on_one_path_count_each_block_once() -> None:
    desk = Desk(dram=8, pin_share=0.5)
    desk.put("abcd")
    pins = [pin(desk, "d"), pin(desk, "c"), pin(desk, "abcd")]
    assert pinned_units(desk, TierId.DRAM) == 4
    for id_ in pins:
        assert desk.catalog.unpin(id_, desk.now_s)
    assert pinned_units(desk, TierId.DRAM) == 0
    desk.catalog.check()


def test_pinned_blocks_that_are_on_disk_do_not_keep_new_ones_out_of_memory() -> None:
    """Pins on NVMe that were read held the whole of DRAM, whatever their share."""
    desk = Desk(dram=4, nvme=16)
    desk.put("abcd")
    desk.carry(desk.catalog.flush(1 << 30, desk.now_s))
    pin(desk, "ab")
    assert desk.put("wxyz") == [FillStatus.GRANTED] * 4
    assert hits(desk, "ab") == 2


def test_a_pinned_block_without_another_copy_stays_in_memory() -> None:
    desk = Desk(dram=4)
    desk.put("abcd")
    pin(desk, "ab")
    assert desk.put("wxyz") == [FillStatus.GRANTED] * 2 + [FillStatus.NO_SPACE] * 2
    assert hits(desk, "ab") == 2


def test_running_requests_hold_no_more_than_their_share() -> None:
    """One request over the whole arena kept every new block out."""
    desk = Desk(dram=8, lease_share=0.5)
    desk.put("abcdefgh")
    begin_request(desk, "abcdefgh")
    assert desk.put("wxyz") == [FillStatus.GRANTED] * 4
    assert hits(desk, "abcd") == 4
    desk.catalog.complete_request(desk.session, b"r", False, desk.now_s)
    desk.catalog.check()


def test_a_pin_whose_blocks_were_all_removed_ends() -> None:
    """It used up the pin share until its time was over."""
    desk = Desk(dram=8, pin_share=0.5)
    desk.put("abcd")
    pin(desk, "abcd")
    namer = desk.namers[0]
    remove(desk.catalog, namer.layout.id, namer.batch(["c", "d"]), desk.now_s)
    assert (desk.catalog.counts["pins"], pinned_units(desk, TierId.DRAM)) == (1, 2)
    remove(desk.catalog, namer.layout.id, namer.batch(["a", "b"]), desk.now_s)
    assert (desk.catalog.counts["pins"], pinned_units(desk, TierId.DRAM)) == (0, 0)
    desk.catalog.check()
