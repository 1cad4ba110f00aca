"""What explain and the tree say of a block, in words."""

import pytest

from kvstored.core import looking
from kvstored.core.calls import Reason
from tests.core.desk import Desk


def test_a_stored_block_is_told_by_its_tiers_and_its_warmth() -> None:
    """It was `stored: part 0 in dram readers=0; part 0 in nvme readers=0; heat=cold hits=0 holds=0`."""
    desk = Desk(dram=8, nvme=8)
    desk.put("ab")
    desk.write_back()
    assert desk.explain("b").text.startswith("in dram and nvme; ")
    assert desk.explain("b").text.endswith("0 hits")
    read = desk.read("b")
    assert "1 hit, being read" in desk.explain("b").text
    desk.release(read)
    nodes, _ = desk.catalog.looking.tree_nodes({namer.layout.id for namer in desk.namers}, 10)
    assert [node.tier_blocks for node in nodes] == [(0, 2, 2, 0)], "each tier that holds a block"


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_words_that_fit_a_line(reason: Reason) -> None:
    text = looking.GONE[reason].format("remote")
    assert len(f"{text}, 1234567.8 s ago") <= 80
