"""Three tiers under random calls: after each of them every derived figure is as recomputed, and what callers hold stays.

The state machine beside this compares eviction with an oracle in two tiers; here the fastest tier comes and goes above them.
"""

import random

import pytest

from kvstored.core.calls import Acquire, CopyTask, Reason, StoredPiece
from kvstored.core.columns import READY
from kvstored.core.copying import Copying, CopyRun
from kvstored.core.types import TierId
from kvstored.errors import InvalidArgument, KvstoredError
from tests.core.hbm_desk import HbmDesk

BLOCKS = 24
STEPS = 400


@pytest.mark.parametrize("policy", ["lru", "composite", "lfu"])
@pytest.mark.parametrize("seed", range(6))
def test_books_of_three_tiers_stay_right_whatever_comes(seed: int, policy: str) -> None:
    desk = HbmDesk(random.Random(seed), policy)
    for _ in range(STEPS):
        desk.step()
        desk.catalog.check()
        desk.check_leases()
    assert min(desk.seen.values()) > 0, desk.seen
    desk.end()


def test_the_gpu_is_filled_from_dram_only() -> None:
    desk = HbmDesk(random.Random(1), "lru")
    desk.put([0, 1, 2, 3])
    desk.write_down()
    desk.leave_memory([0])
    loads, pending = desk.prefetch([0, 1], TierId.HBM)
    assert [load.source for load in loads] == [TierId.DRAM]
    assert len(pending) == 1


def test_a_lost_tier_gives_up_all_its_copies_and_takes_no_more() -> None:
    desk = HbmDesk(random.Random(1), "lru")
    desk.put([0, 1, 2])
    lease = desk.read([0, 1], TierId.HBM)
    desk.finish(desk.prefetch([2], TierId.HBM)[0])
    assert desk.catalog.lose(TierId.HBM, 0.0, 2) == 2
    assert desk.catalog.lose(TierId.HBM, 0.0, 2) == 1
    assert desk.catalog.lose(TierId.HBM, 0.0, 2) == 0
    desk.catalog.check()
    assert desk.prefetch([2], TierId.HBM) == ([], [])
    desk.catalog.release(desk.session, [lease], 0.0)
    use = {use.tier: use for use in desk.catalog.tier_use()}[TierId.HBM]
    assert use.copies == use.used_units == use.leased_units == 0
    desk.catalog.check()


def test_demotion_begins_with_the_coldest_and_only_above_the_low_watermark() -> None:
    desk = HbmDesk(random.Random(1), "lru", has_disk=False)
    desk.put([0, 1, 2, 3])
    for block in (0, 1, 2):
        desk.finish(desk.prefetch([block], TierId.HBM)[0])
    assert desk.catalog.demote(1 << 30, 0.0) == [], "all have a copy below"
    desk.leave_memory([0, 1, 2])
    assert desk.catalog.demote(1 << 30, 0.0) == [], "below the watermark there is time"
    desk.finish(desk.prefetch([3], TierId.HBM)[0])
    begun = desk.catalog.demote(1, 0.0)
    assert [desk.block_of(task) for task in begun] == [0]
    desk.finish(begun)
    desk.catalog.check()


def test_window_and_state_are_not_read_on_the_gpu() -> None:
    desk = HbmDesk(random.Random(1), "lru", is_hybrid=True)
    desk.put([0])
    call = desk.acquire_call([0], TierId.HBM)
    with pytest.raises(InvalidArgument):
        desk.catalog.acquire(
            Acquire(call.session, call.ns, 0, call.keys, 0b111, 10.0, tier=TierId.HBM), 0.0
        )
    assert desk.read([0], TierId.HBM)
