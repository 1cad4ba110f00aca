"""Eviction policies on the real traces: hit ratio by capacity between LRU and the optimum, and the area of the gap that each closes.

Then two tiers, DRAM of 1 % and NVMe of 9 % of them, on the whole core: hits by tier and what is written to NVMe.

python -m bench.policy [--trace FILE ...] [--policy NAME ...] [--hints LIST] [--jobs N] [--picture FILE] [--tables FILE] [--json FILE]
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import REPOSITORY, machine
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import TierId
from kvstored.sim.core import CoreModel
from kvstored.sim.offline import replay_offline
from kvstored.sim.published import PUBLISHED
from kvstored.sim.report import offline_setup
from kvstored.sim.sweep import Cell, Order, Replayed, Sweep, markdown, plot, replayed, sweep, table
from kvstored.sim.traces import Request, open_trace

TRACES = REPOSITORY.parent / "shared" / "traces"
TIERED = (TRACES / "mooncake_conv.kvt.gz",)
DRAM_SHARE, NVME_SHARE = 0.01, 0.09
FILES = ("mooncake_conv.kvt.gz", "mooncake_synth.kvt.gz", "weka_dev.kvt.gz")
ORDERS = (*POLICIES, *PUBLISHED)
COLUMNS = 160
"""Tables are not cut where there is no terminal."""


def main() -> None:
    flags = argparse.ArgumentParser(prog="python -m bench.policy", description=__doc__)
    flags.add_argument("--trace", action="append", type=Path, default=[])
    flags.add_argument("--policy", action="append", choices=ORDERS, default=[])
    flags.add_argument("--hints", default="outlen,session", help="what composite hears once more")
    flags.add_argument("--jobs", type=int, default=1, help="processes side by side")
    flags.add_argument("--picture", type=Path, default=Path("bench-policy.png"))
    flags.add_argument("--tables", type=Path, default=Path("bench-policy.md"))
    flags.add_argument("--json", type=Path, default=Path("bench-policy.json"))
    given = flags.parse_args()
    console = Console(width=max(COLUMNS, Console().width))
    console.print(machine())
    orders = [Order(policy) for policy in given.policy or ORDERS]
    if Order("composite") in orders and given.hints:
        at = orders.index(Order("composite"))
        orders.insert(at + 1, Order("composite", tuple(given.hints.split(","))))
    done: list[Sweep] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=spawn) as pool:
        for path in given.trace or [TRACES / name for name in FILES]:
            replay = partial(pool.map, partial(_replayed, path))
            done.append(sweep(open_trace(path), orders, replay=replay))
            console.print(table(done[-1]))
    tiers = [_two_tiers(path, policy) for path in TIERED for policy in ("lru", "composite")]
    console.print(_tiers_table(tiers))
    plot(done, given.picture)
    given.tables.write_text(markdown(done))
    results = [each.as_json() for each in done]
    facts = {"machine": machine(), "sweeps": results, "tiers": tiers}
    given.json.write_text(json.dumps(facts, indent=1))
    console.print(f"in {given.picture}, {given.tables} and {given.json}")


def _replayed(path: Path, cell: Cell) -> Replayed:
    requests, block_tokens = _held(path)
    return replayed(requests, block_tokens, cell)


@cache
def _held(path: Path) -> tuple[list[Request], int]:
    """Once a process."""
    trace = open_trace(path)
    return list(trace), trace.block_tokens


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
