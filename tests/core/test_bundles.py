"""Bundles are the same in config, daemon and replay, and each signal can be turned alone."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from kvstored.composition import (
    bundle_of,
    core_limits,
    feedback_limits,
    prefetch_limits,
    tier_limits,
)
from kvstored.config import Config, PolicyName
from kvstored.core.bundles import ALL, BUNDLES, DEFAULT, NAMES, Signal, bundle_named
from kvstored.core.hints import Hint
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import TierId
from kvstored.sections import Disk, Signals
from kvstored.sim.core import CoreModel
from tests.sim.test_core import random_kvt1


def config(policy: PolicyName, **switches: str) -> Config:
    signals = Signals.model_validate(switches)
    here = Path("/nowhere")
    disk = Disk(path=here)
    return Config(state_dir=here, socket=here, disk=disk, policy=policy, signals=signals)


def test_the_names_of_the_config_are_those_of_the_core() -> None:
    assert set(get_args(PolicyName)) == set(NAMES)
    assert len(NAMES) == len(BUNDLES) + len(POLICIES)
    assert Config.model_fields["policy"].default == DEFAULT == "combined"


@pytest.mark.parametrize("name", NAMES)
def test_every_bundle_has_an_order_that_is_there(name: str) -> None:
    assert bundle_named(name).policy in POLICIES


def test_the_default_hears_everything_and_discard_nothing() -> None:
    assert bundle_named("combined").signals == ALL
    assert bundle_named("combined").policy == "composite"
    assert bundle_named("discard").signals == frozenset()


def test_sinks_are_exempt_where_the_bundle_or_the_switch_says_so() -> None:
    def share(given: Config) -> float:
        return tier_limits(given, has_disk=True)[0].sink_share

    assert share(config("tiered-lru")) > 0
    assert share(config("discard")) == 0
    assert share(config("discard", sinks="on")) > 0
    assert share(config("combined", sinks="off")) == 0


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("policy", ["combined", "discard"])
def test_a_switch_turns_its_signal_and_no_other(policy: PolicyName, signal: Signal) -> None:
    usual = bundle_of(config(policy)).signals
    assert bundle_of(config(policy, **{signal: "on"})).signals == usual | {signal}
    assert bundle_of(config(policy, **{signal: "off"})).signals == usual - {signal}


def test_hints_and_disk_reach_the_core() -> None:
    assert core_limits(config("combined")).hears_hints
    assert not core_limits(config("prefix-tree")).hears_hints
    assert not core_limits(config("combined", hints="off")).hears_hints
    assert not core_limits(config("discard")).writes_back
    assert core_limits(config("discard", disk="on")).writes_back


def test_attention_and_guesses_are_heard_by_the_bundles_that_have_them() -> None:
    heard = {name for name in BUNDLES if feedback_limits(config(name)).blocks_per_s}
    assert heard == {"combined", "attention"}
    guessed = {name for name in BUNDLES if prefetch_limits(config(name)).signals}
    assert guessed == {"combined", "speculative"}
    assert feedback_limits(config("discard", attention="on")).blocks_per_s
    assert not prefetch_limits(config("combined", guesses="off")).signals


def hits(tmp_path: Path, policy: str, *, hinted: bool) -> tuple[list[int], int]:
    """Hits by request, and copies on NVMe at the end."""
    trace = random_kvt1(tmp_path / "trace", 7, requests=300)
    model = CoreModel(trace, policy=policy, capacity_blocks={TierId.DRAM: 12, TierId.NVME: 40})
    found = []
    for row, request in enumerate(trace):
        hint = Hint(output_tokens=100 * (row % 9), session=str(row % 5)) if hinted else Hint()
        found.append(sum(model.request(request.ts_s, request.block_ids, hint).hits))
    copies = model.catalog.books.copies
    return found, int(np.count_nonzero(copies.tier[copies.block >= 0] == TierId.NVME))


def test_prefix_tree_hears_no_hints_and_combined_does(tmp_path: Path) -> None:
    deaf = hits(tmp_path, "prefix-tree", hinted=False)
    assert hits(tmp_path, "prefix-tree", hinted=True) == deaf
    assert hits(tmp_path, "combined", hinted=False) == deaf
    assert hits(tmp_path, "combined", hinted=True) != deaf


def test_discard_writes_nothing_to_disk(tmp_path: Path) -> None:
    found, on_disk = hits(tmp_path, "discard", hinted=False)
    assert on_disk == 0
    more, on_disk = hits(tmp_path, "tiered-lru", hinted=False)
    assert on_disk > 0
    assert sum(more) > sum(found)
