"""Runs the benchmarks, each in a process of its own, and prints their tables.

`python -m bench [--only NAME ...] [--json FILE]`. The defaults are small; each benchmark alone takes more arguments: `python -m bench.NAME -h`.
`python -m bench peers [...]` is `python -m bench.peers`: kvstored beside other stores, which it installs first.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from bench.machine import REPOSITORY, Report, machine
from bench.peers.__main__ import main as peers

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "throughput": (),
    "optimistic": (),
    "remote": (),
    "loop": (),
    "disk": (),
    "arena": (),
    "allocator": (),
    "restart": ("--records", "200000"),
    "core_structures": ("--rows", "200000"),
    "catalog_scale": ("--blocks", "200000"),
}
"""By name: the arguments that keep it short."""


def main() -> None:
    if sys.argv[1:2] == ["peers"]:
        peers(sys.argv[2:])
        return
    flags = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    flags.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", default=[])
    flags.add_argument("--json", type=Path, metavar="FILE", help="also write all results there")
    given = flags.parse_args()
    results: dict[str, object] = {}
    failed: list[str] = []
    for name in given.only or BENCHMARKS:
        begun_s = perf_counter()
        output = _run(name)
        if output is None:
            failed.append(name)
            continue
        results[name] = json.loads(output)
        _show(name, output)
        print(f"took: {perf_counter() - begun_s:.0f} s", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(name: str) -> str | None:
    """The JSON of one benchmark, None where it failed; its complaints are on stderr already."""
    command = [sys.executable, "-m", f"bench.{name}", "--json", *BENCHMARKS[name]]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _show(name: str, output: str) -> None:
    """A report as its table; what has another shape as its figures."""
    facts = json.loads(output)
    if "rows" in facts and isinstance(facts["rows"], list):
        Report.from_json(output).show()
        return
    print(f"\n## {name}")
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    for key, value in facts.items():
        if isinstance(value, dict):
            print(*(f"{figure:56} {_number(each)}" for figure, each in value.items()), sep="\n")
        else:
            print(f"{key}: {value}")


def _number(value: object) -> str:
    return f"{value:14,.2f}" if isinstance(value, float | int) else str(value)


if __name__ == "__main__":
    main()
