"""More memory brings hits nearer, more of the slowest tier brings hits that were misses."""

import pytest

from kvstored.core.types import TierId
from kvstored.core.what_if import Gain, Room, gains


def hits(capacity: float) -> tuple[float, float]:
    """A hit a unit up to a hundred, of ten FLOPs each."""
    return min(capacity, 100.0), 10.0 * min(capacity, 100.0)


def test_more_of_one_tier_alone_is_more_hits() -> None:
    assert gains(hits, [Room(TierId.DRAM, 30.0)], 20.0) == (Gain(TierId.DRAM, 20.0, 200.0, 0.0),)
    assert gains(hits, [Room(TierId.DRAM, 90.0)], 20.0) == (Gain(TierId.DRAM, 10.0, 100.0, 0.0),)


def test_more_memory_above_a_disk_brings_hits_nearer() -> None:
    rooms = [Room(TierId.DRAM, 10.0), Room(TierId.NVME, 50.0)]
    dram, nvme = gains(hits, rooms, 20.0)
    assert dram == Gain(TierId.DRAM, 0.0, 0.0, 20.0)
    assert nvme == Gain(TierId.NVME, 20.0, 200.0, 0.0)


def test_memory_that_outgrows_the_disk_brings_both() -> None:
    rooms = [Room(TierId.DRAM, 40.0), Room(TierId.NVME, 50.0)]
    assert gains(hits, rooms, 20.0)[0] == Gain(TierId.DRAM, 10.0, 100.0, 10.0)


@pytest.mark.parametrize("capacity", [0.0, 50.0, 500.0])
def test_nothing_more_brings_nothing(capacity: float) -> None:
    assert gains(hits, [Room(TierId.DRAM, capacity)], 0.0) == (Gain(TierId.DRAM, 0.0, 0.0, 0.0),)
