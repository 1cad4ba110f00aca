"""What the tiers' books tell of themselves."""

from tests.core.desk import Desk


def test_no_copy_of_the_slowest_tier_is_dirty() -> None:
    """All of them were told to be, for want of a tier below."""
    desk = Desk(dram=4, nvme=4)
    desk.put("ab")
    assert [use.dirty_copies for use in desk.catalog.tier_use()] == [2, 0]
    desk.write_back()
    assert [use.dirty_copies for use in desk.catalog.tier_use()] == [0, 0]
    alone = Desk(dram=4)
    alone.put("ab")
    assert [use.dirty_copies for use in alone.catalog.tier_use()] == [0]
