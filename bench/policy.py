"""Eviction policies on the real traces: hit ratio by capacity between LRU and the optimum, and the area of the gap that each closes.

python -m bench.policy [--trace FILE ...] [--policy NAME ...] [--hints outlen,session] [--picture FILE] [--json FILE]
"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from bench.machine import REPOSITORY, machine
from kvstored.core.policies.named import POLICIES
from kvstored.sim.sweep import Sweep, plot, sweep, table
from kvstored.sim.traces import open_trace

TRACES = REPOSITORY.parent / "shared" / "traces"
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
    plot(done, given.picture)
    console.print(f"the picture is in {given.picture}")
    if given.json:
        results = [each.as_json() for each in done]
        given.json.write_text(json.dumps({"machine": machine(), "sweeps": results}, indent=1))


if __name__ == "__main__":
    main()
