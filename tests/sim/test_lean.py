"""The lean model and the whole core hit the same blocks under every policy; and what is stored stays whole.

They once parted under the composite: entries of candidates outlived the rank that they were made with, and the last block of a session was
known by its row, so both depended on how rows are numbered.
"""

from pathlib import Path

import pytest

from kvstored.core.hints import Hint
from kvstored.core.policies.named import POLICIES
from kvstored.core.policies.s3fifo import S3Fifo
from kvstored.core.types import TierId
from kvstored.sim.core import CoreModel
from kvstored.sim.lean import LeanModel

from .oracle import LeafLru
from .test_core import random_kvt1


@pytest.mark.parametrize("capacity", [3, 13, 40])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("hinted", [False, True])
def test_the_lean_model_evicts_what_the_core_evicts(
    tmp_path: Path, policy: str, capacity: int, hinted: bool
) -> None:
    trace = random_kvt1(tmp_path / "trace", 7, requests=400)
    lean = LeanModel(policy=policy, capacity_blocks=capacity, block_tokens=trace.block_tokens)
    core = CoreModel(trace, policy=policy, capacity_blocks={TierId.DRAM: capacity})
    for row, request in enumerate(trace):
        hint = Hint(output_tokens=100 * (row % 9), session=str(row % 5)) if hinted else Hint()
        ours = lean.request(request.ts_s, request.block_ids, hint)
        theirs = core.request(request.ts_s, request.block_ids, hint)
        assert (ours.hits, ours.put_blocks) == (theirs.hits, theirs.put_blocks), f"{row=}"
        assert lean.evicted_blocks == core.evicted_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_gives_the_same_evictions_and_prefixes_stay_whole(
    tmp_path: Path, policy: str
) -> None:
    trace = random_kvt1(tmp_path / "trace", 3, requests=400)
    orders: list[list[int]] = [[], []]
    for order in orders:
        model = LeanModel(policy=policy, capacity_blocks=25, block_tokens=512, evictions=order)
        for request in trace:
            model.request(request.ts_s, request.block_ids)
            model.tree.check()
            assert model.blocks.live <= 25
    assert orders[0] == orders[1]
    assert orders[0]


@pytest.mark.parametrize("policy", ["lru", "composite"])
def test_before_anything_is_learned_the_composite_is_leaf_lru(tmp_path: Path, policy: str) -> None:
    trace = random_kvt1(tmp_path / "trace", 5, requests=24)
    model, oracle = LeanModel(policy=policy, capacity_blocks=12, block_tokens=512), LeafLru(12)
    for request in trace:
        ours = model.request(request.ts_s, request.block_ids)
        assert ours.hits == oracle.request(request.ts_s, request.block_ids).hits


@pytest.mark.parametrize("capacity", [13, 40])
def test_s3fifo_lets_runs_go_as_it_would_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    trace = random_kvt1(tmp_path / "trace", 9, requests=400)
    orders: list[list[int]] = [[], []]
    for order in orders:
        model = LeanModel(
            policy="s3fifo", capacity_blocks=capacity, block_tokens=512, evictions=order
        )
        for request in trace:
            model.request(request.ts_s, request.block_ids)
        monkeypatch.setattr(S3Fifo, "follow", lambda self, rows: 1)
    assert orders[0] == orders[1]
