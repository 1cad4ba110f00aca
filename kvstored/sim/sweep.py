"""Hit ratio against capacity for many policies, between leaf-first LRU and the offline optimum; as values, as a table and as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from time import process_time

import numpy as np
from rich.table import Table

from kvstored.errors import InvalidArgument
from kvstored.sim.hinting import hint_of
from kvstored.sim.lean import LeanModel
from kvstored.sim.optimum import optimum_hits
from kvstored.sim.traces import Request, Trace

SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)
"""Of the unique blocks of the trace."""


@dataclass(frozen=True, slots=True)
class Line:
    """One policy: hit ratio by capacity, the time that a request took, and blocks served a second of CPU time."""

    policy: str
    hit_ratios: tuple[float, ...]
    p50_us: float
    p99_us: float
    max_ms: float
    blocks_per_s: float


@dataclass(frozen=True, slots=True)
class Sweep:
    trace: str
    unique_blocks: int
    blocks: int
    hints: tuple[str, ...]
    capacities_blocks: tuple[int, ...]
    lru: tuple[float, ...]
    optimum: tuple[float, ...]
    lines: tuple[Line, ...]

    def area_closed(self, line: Line) -> float:
        """Share of the area between LRU and the optimum; 0 where there is none."""
        return _over(_gains(line.hit_ratios, self.lru), _gains(self.optimum, self.lru))

    def worst(self, line: Line) -> float:
        """The most that it is below LRU at any capacity, as a (negative) difference of hit ratios, or its least gain."""
        return min(_gains(line.hit_ratios, self.lru))

    def as_json(self) -> dict[str, object]:
        lines = [
            asdict(line)
            | {"area_closed": self.area_closed(line), "worst_below_lru": self.worst(line)}
            for line in self.lines
        ]
        return asdict(self) | {"lines": lines}


def sweep(
    trace: Trace,
    policies: Sequence[str],
    *,
    limit: int | None = None,
    hints: Sequence[str] = (),
    capacities_blocks: Sequence[int] | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Replay all of it once a policy and capacity; capacities default to `SHARES`. Holds the trace in memory."""
    held = list(islice(trace, limit))
    ids = [request.block_ids for request in held]
    unique = len(np.unique(np.concatenate(ids))) if ids else 0
    blocks = sum(len(path) for path in ids)
    if not blocks:
        raise InvalidArgument(f"nothing to sweep: the trace has no blocks trace={trace.name}")
    capacities = capacities_blocks or [max(1, int(share * unique)) for share in SHARES]
    optimum = [hits / blocks for hits in optimum_hits(held, capacities)]
    lines = []
    for policy in dict.fromkeys(("lru", *policies)):
        advance(policy)
        lines.append(_line(held, policy, capacities, tuple(hints), blocks, trace.block_tokens))
    return Sweep(
        trace.name,
        unique,
        blocks,
        tuple(hints),
        tuple(capacities),
        lines[0].hit_ratios,
        tuple(optimum),
        tuple(lines),
    )


def table(done: Sweep) -> Table:
    hints = f", hints {', '.join(done.hints)}" if done.hints else ""
    view = Table(title=f"{done.trace}: {done.unique_blocks:,} unique blocks{hints}")
    view.add_column("policy")
    for capacity in done.capacities_blocks:
        view.add_column(f"{capacity:,}", justify="right")
    for column in ("area closed", "worst vs LRU", "p50", "blocks/s"):
        view.add_column(column, justify="right")
    for line in done.lines:
        view.add_row(
            line.policy,
            *(f"{ratio:.4f}" for ratio in line.hit_ratios),
            f"{100 * done.area_closed(line):.1f} %",
            f"{100 * done.worst(line):+.2f}",
            f"{line.p50_us:,.0f} us",
            f"{line.blocks_per_s:,.0f}",
        )
    view.add_row("optimum", *(f"{ratio:.4f}" for ratio in done.optimum), "100.0 %", "", "", "")
    return view


def plot(done: Sequence[Sweep], path: Path) -> None:
    """A panel a trace; the suffix of `path` says the format."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise InvalidArgument("a plot needs matplotlib: pip install 'kvstored[plot]'") from error
    figure = Figure(figsize=(6 * len(done), 5), layout="constrained")
    panels = figure.subplots(1, len(done), squeeze=False)[0]
    for panel, each in zip(panels, done, strict=True):
        shares = [100 * blocks / each.unique_blocks for blocks in each.capacities_blocks]
        panel.plot(shares, each.optimum, "k--", label="optimum")
        for line in each.lines:
            panel.plot(shares, line.hit_ratios, marker="o", label=line.policy)
        panel.set(xscale="log", xlabel="capacity, % of unique blocks", title=each.trace)
        panel.set_ylabel("block hit ratio")
        panel.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot draw the plot path={path}: {error}") from error


def _line(
    requests: Sequence[Request],
    policy: str,
    capacities: Sequence[int],
    hints: tuple[str, ...],
    blocks: int,
    block_tokens: int,
) -> Line:
    ratios, took_s = [], []
    begun_s = process_time()
    for capacity in capacities:
        model = LeanModel(policy=policy, capacity_blocks=capacity, block_tokens=block_tokens)
        hit = 0
        for request in requests:
            asked_s = process_time()
            served = model.request(request.ts_s, request.block_ids, hint_of(request, hints))
            took_s.append(process_time() - asked_s)
            hit += sum(served.hits)
        ratios.append(hit / blocks)
    p50, p99 = np.quantile(took_s, (0.5, 0.99)).tolist()
    return Line(
        policy,
        tuple(ratios),
        1e6 * p50,
        1e6 * p99,
        1e3 * max(took_s),
        blocks * len(capacities) / max(process_time() - begun_s, 1e-9),
    )


def _gains(ratios: Sequence[float], above: Sequence[float]) -> list[float]:
    return [ratio - base for ratio, base in zip(ratios, above, strict=True)]


def _over(gains: Sequence[float], possible: Sequence[float]) -> float:
    return sum(gains) / sum(possible) if sum(possible) > 0 else 0.0
