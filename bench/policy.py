"""Eviction policies on the real traces: hit ratio by capacity between LRU and the optimum, and the area of the gap that each closes.

Then two tiers, DRAM of 1 % and NVMe of 9 % of them, on the whole core: hits by tier and what is written to NVMe.

python -m bench.policy [--trace FILE ...] [--policy NAME ...] [--hints outlen,session] [--picture FILE] [--json FILE]
"""

import argparse
import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import REPOSITORY, machine
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import TierId
from kvstored.sim.core import CoreModel
from kvstored.sim.offline import replay_offline
from kvstored.sim.report import offline_setup
from kvstored.sim.sweep import Sweep, plot, sweep, table
from kvstored.sim.traces import open_trace

TRACES = REPOSITORY.parent / "shared" / "traces"
TIERED = (TRACES / "mooncake_conv.kvt.gz",)
DRAM_SHARE, NVME_SHARE = 0.01, 0.09
FILES = ("mooncake_conv.kvt.gz", "mooncake_synth.kvt.gz", "weka_dev.kvt.gz")


def main() -> None:
    flags = argparse.ArgumentParser(prog="python -m bench.policy", description=__doc__)
    flags.add_argument("--trace", action="append", type=Path, default=[])
    flags.add_argument("--policy", action="append", choices=POLICIES, default=[])
    flags.add_argument("--hints", default="", help="of outlen, session")
    flags.add_argument("--picture", type=Path, default=Path("policy.png"))
    flags.add_argument("--json", type=Path)
    given = flags.parse_args()
    console = Console()
    console.print(machine())
    done: list[Sweep] = []
    for path in given.trace or [TRACES / name for name in FILES]:
        trace = open_trace(path)
        hints = [hint for hint in given.hints.split(",") if hint]
        done.append(sweep(trace, given.policy or POLICIES, hints=hints))
        console.print(table(done[-1]))
    tiers = [_two_tiers(path, policy) for path in TIERED for policy in ("lru", "composite")]
    console.print(_tiers_table(tiers))
    plot(done, given.picture)
    console.print(f"the picture is in {given.picture}")
    if given.json:
        results = [each.as_json() for each in done]
        given.json.write_text(
            json.dumps({"machine": machine(), "sweeps": results, "tiers": tiers}, indent=1)
        )


def _two_tiers(path: Path, policy: str) -> dict[str, object]:
    trace = open_trace(path)
    unique = len(np.unique(np.concatenate([request.block_ids for request in trace])))
    tiers = {TierId.DRAM: int(DRAM_SHARE * unique), TierId.NVME: int(NVME_SHARE * unique)}
    model = CoreModel(trace, policy=policy, capacity_blocks=tiers)
    setup = offline_setup(trace, policy=policy, capacity_blocks=tiers)
    done = replay_offline(trace, model, setup, limit=None, advance=lambda _: None)
    return {
        "trace": trace.name,
        "policy": policy,
        "hit_ratio": done.block_hit_ratio,
        "dram_hit_ratio": done.hits[TierId.DRAM] / done.blocks,
        "writes_per_unique_block": done.writes_per_unique_block,
    }


def _tiers_table(rows: list[dict[str, object]]) -> Table:
    view = Table(title=f"DRAM {DRAM_SHARE:.0%}, NVMe {NVME_SHARE:.0%} of the unique blocks")
    for name in rows[0]:
        view.add_column(name.replace("_", " "))
    for row in rows:
        view.add_row(*(f"{x:.4f}" if isinstance(x, float) else str(x) for x in row.values()))
    return view


if __name__ == "__main__":
    main()
