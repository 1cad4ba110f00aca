"""The known hit ratios of leaf-first LRU on the real traces.

The oracle gives every one of them over whole traces; the real core serves the heads of the same traces exactly as the oracle does, request
by request. Over whole traces the real core takes up to a quarter of an hour: bench/replay_known_values.py.
"""

import pytest

from kvstored.core.types import TierId
from kvstored.sim.core import CoreModel
from kvstored.sim.offline import replay_offline
from kvstored.sim.report import offline_setup
from kvstored.sim.traces import open_trace

from .known import KNOWN, TRACES, Known
from .oracle import LeafLru

pytestmark = [
    pytest.mark.traces,
    pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces in ../shared are not here"),
]

HEAD_PUT_BLOCKS = 12_000
"""Stored anew by each head: several times its capacity, in a few seconds."""


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_the_oracle_gives_the_known_value(known: Known) -> None:
    trace = open_trace(TRACES / known.file)
    capacity = None if known.capacity_blocks is None else {TierId.DRAM: known.capacity_blocks}
    setup = offline_setup(trace, policy="oracle", capacity_blocks=capacity)
    model = LeafLru(known.capacity_blocks)
    done = replay_offline(trace, model, setup, limit=None, advance=lambda _: None)
    assert round(done.block_hit_ratio, 4) == known.ratio


@pytest.mark.parametrize(
    ("file", "capacity_blocks"),
    [
        ("mooncake_conversation.jsonl.gz", 1_000),
        ("mooncake_conversation.jsonl.gz", 3_000),
        ("mooncake_synthetic.jsonl.gz", 1_000),
        ("mooncake_conv.kvt.gz", 1_708),
        ("mooncake_synth.kvt.gz", 3_000),
        ("weka_dev.kvt.gz", 1_687),
        ("ragpulse.kvt.gz", 2_000),
    ],
)
def test_the_core_serves_the_head_of_a_trace_as_the_oracle_does(
    file: str, capacity_blocks: int
) -> None:
    trace = open_trace(TRACES / file)
    core = CoreModel(trace, policy="lru", capacity_blocks={TierId.DRAM: capacity_blocks})
    oracle = LeafLru(capacity_blocks)
    put = 0
    for row, request in enumerate(trace):
        served = core.request(request.ts_s, request.block_ids)
        assert served.hits == oracle.request(request.ts_s, request.block_ids).hits, f"{row=}"
        put += served.put_blocks
        if put > HEAD_PUT_BLOCKS:
            break
    assert put > 2 * capacity_blocks
    core.catalog.check()
