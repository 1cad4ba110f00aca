"""kvstored beside its peers and beside what no store can beat, in one interleaved run: GB/s, p50 and p99 of put and get.

`python -m bench.peers [--quick] [--sizes 4KiB,1MiB] [--batches 1,64] [--clients 1,4] [--peers NAME,...] [--rounds N] [--json FILE]
[--plot FILE] [--tables FILE]`. Peers are installed into environments of their own below the user's cache folder.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.peers import host
from bench.peers.adapters.base import Environment
from bench.peers.contestants import BY_NAME, CONTESTANTS, Contestant, Kind
from bench.peers.environment import Missing
from bench.peers.figures import Failed
from bench.peers.plan import size_words, visits
from bench.peers.plot import plot
from bench.peers.probes import probed
from bench.peers.report import Run, tables
from bench.peers.visit import Pace, environment_of, visited
from kvstored.errors import KvstoredError
from kvstored.units import parse_size

FULL = Pace(budget_s=0.1, warm_up_s=2.0)
QUICK = Pace(budget_s=0.04, warm_up_s=0.3)
QUICK_WITHOUT = "LMCache"
"""Takes longer to start than all others together to measure."""
QUICK_SIZES, QUICK_CLIENTS, QUICK_ROUNDS = "4KiB,1MiB", "1", 1
SIZES, BATCHES, CLIENTS, ROUNDS = "4KiB,64KiB,256KiB,1MiB,4MiB,32MiB", "1,64", "1,4", 3


def main(arguments: Sequence[str] | None = None) -> None:
    given = _flags().parse_args(arguments)
    signal.signal(signal.SIGTERM, _ended)
    chosen = _chosen(given.peers, is_quick=given.quick)
    console = Console(stderr=True)
    run = Run(host.described(), _options(given, chosen))
    environments = _installed(chosen, run, console)
    present = [each for each in chosen if each.name in environments]
    try:
        _measure(given, present, environments, run, console)
    except KeyboardInterrupt:
        console.print("interrupted: what was measured so far follows")
    print(tables(run))
    if given.json:
        given.json.write_text(json.dumps(run.to_json(), indent=1))
    if given.tables:
        given.tables.write_text(tables(run))
    if given.plot and run.cells:
        plot(run.figures(), given.plot)


def _measure(
    given: argparse.Namespace,
    present: Sequence[Contestant],
    environments: dict[str, Environment],
    run: Run,
    console: Console,
) -> None:
    pace = QUICK if given.quick else FULL
    plan = visits(
        [(each.name, each.medium) for each in present],
        [parse_size(size) for size in given.sizes.split(",")],
        [int(batch) for batch in given.batches.split(",")],
        [int(count) for count in given.clients.split(",")],
        given.rounds,
        given.seed,
    )
    is_probing = any(each.kind is Kind.OURS for each in present)
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=len(plan) + given.rounds * is_probing)
        for visit in plan:
            contestant = BY_NAME[visit.contestant]
            words = f"{visit.contestant}, {size_words(visit.block_bytes)}"
            progress.update(task, description=words)
            if not console.is_terminal:  # a log gets a line a visit instead of the bar
                print(f"round {visit.round_ + 1}: {words}", file=sys.stderr, flush=True)
            environment = environments[contestant.name]
            for outcome in visited(visit, contestant, environment, pace, given.log):
                if isinstance(outcome, Failed):
                    run.failures.append(outcome)
                else:
                    run.cells.append(outcome)
            progress.advance(task)
        for _ in range(given.rounds * is_probing):
            progress.update(task, description="probes of the daemon")
            _probe(run)
            progress.advance(task)


def _probe(run: Run) -> None:
    try:
        for name, value in probed().items():
            run.probes.setdefault(name, []).append(value)
    except (KvstoredError, RuntimeError, OSError) as error:
        run.missing["probes of the daemon"] = f"failed: {error}"


def _installed(chosen: Sequence[Contestant], run: Run, console: Console) -> dict[str, Environment]:
    found: dict[str, Environment] = {}
    for each in chosen:
        try:
            with console.status(f"preparing {each.name}"):
                found[each.name] = environment_of(each)
        except Missing as missing:
            run.missing[each.name] = str(missing)
            console.print(f"missing: {each.name}: {missing}")
    return found


def _chosen(names: str, *, is_quick: bool) -> list[Contestant]:
    """By name or by the start of it; all by default. The copies and kvstored always take part."""
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    return [
        each
        for each in CONTESTANTS
        if (not wanted and not (is_quick and each.name == QUICK_WITHOUT))
        or each.module in {"copies", "ours"}
        or any(each.name.lower().startswith(name) for name in wanted)
    ]


def _options(given: argparse.Namespace, chosen: Sequence[Contestant]) -> dict[str, str]:
    return {
        "sizes": given.sizes,
        "batches": given.batches,
        "clients": given.clients,
        "rounds": str(given.rounds),
        "seed": str(given.seed),
        "pace": "quick" if given.quick else "full",
        "contestants": str(len(chosen)),
    }


def _flags() -> argparse.ArgumentParser:
    quick = argparse.ArgumentParser(add_help=False)
    quick.add_argument(
        "--quick", action="store_true", help="fewer cells, one round: a look, not a figure"
    )
    is_quick = quick.parse_known_args()[0].quick
    flags = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, parents=[quick]
    )
    flags.add_argument("--sizes", default=QUICK_SIZES if is_quick else SIZES)
    flags.add_argument("--batches", default=BATCHES)
    flags.add_argument("--clients", default=QUICK_CLIENTS if is_quick else CLIENTS)
    flags.add_argument("--peers", default="", metavar="NAME,...", help="all unless given")
    flags.add_argument("--rounds", type=int, default=QUICK_ROUNDS if is_quick else ROUNDS)
    flags.add_argument("--seed", type=int, default=1, help="of the order of visits and cells")
    flags.add_argument("--json", type=Path, metavar="FILE", help="also write all results there")
    flags.add_argument("--plot", type=Path, metavar="FILE", help="also draw them there (PNG)")
    flags.add_argument("--tables", type=Path, metavar="FILE", help="also write the tables there")
    flags.add_argument(
        "--log",
        type=Path,
        default=Path(tempfile.gettempdir()) / "kvstored-bench-peers.log",
        help="what the workers' libraries print",
    )
    return flags


def _ended(_number: int, _frame: FrameType | None) -> None:
    """As an interrupt: everything that runs is stopped on the way out."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
