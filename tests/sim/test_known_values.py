"""The oracle itself gives every known value, so that what equals it on every request gives them too."""

import pytest

from kvstored.sim.offline import replay_offline
from kvstored.sim.report import Setup
from kvstored.sim.traces import open_trace

from .known import KNOWN, TRACES, Known
from .oracle import LeafLru

pytestmark = [
    pytest.mark.traces,
    pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces in ../shared are not here"),
]


def ignored(_: int) -> None:
    pass


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_the_oracle_gives_the_known_value(known: Known) -> None:
    trace = open_trace(TRACES / known.file)
    capacity = None if known.capacity_blocks is None else {"dram": known.capacity_blocks}
    setup = Setup(trace.name, "offline", "oracle", trace.block_tokens, 0, 1, capacity)
    model = LeafLru(known.capacity_blocks)
    done = replay_offline(trace, model, setup, limit=None, advance=ignored)
    assert round(done.block_hit_ratio, 4) == known.ratio
