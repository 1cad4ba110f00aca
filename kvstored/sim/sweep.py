"""Hit ratio against capacity for many policies, between leaf-first LRU and the offline optimum; as values, as tables and as a picture."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from time import process_time

import numpy as np
from rich.table import Table

from kvstored.errors import InvalidArgument
from kvstored.sim.hinting import hint_of
from kvstored.sim.lean import LeanModel
from kvstored.sim.optimum import optimum_hits
from kvstored.sim.published import PUBLISHED, PublishedModel
from kvstored.sim.traces import Request, Trace

SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)
"""Of the unique blocks of the trace."""


@dataclass(frozen=True, slots=True)
class Order:
    """A policy of the daemon and which hints of the trace it hears, or one of `PUBLISHED`."""

    policy: str
    hints: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.policy, *(f"+{hint}" for hint in self.hints)))


LRU = Order("lru")
Cell = tuple[Order, int]
"""And a capacity in blocks."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A cell: hit blocks, what each request took, and all of it, in CPU time."""

    hits: int
    took_s: tuple[float, ...]
    total_s: float


@dataclass(frozen=True, slots=True)
class Line:
    """One order: hit ratio by capacity, the time that a request took, and blocks served a second of CPU time."""

    order: Order
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
    orders: Sequence[Order],
    *,
    limit: int | None = None,
    capacities_blocks: Sequence[int] | None = None,
    replay: Callable[[Iterable[Cell]], Iterable[Replayed]] | None = None,
) -> Sweep:
    """Replay all of it once an order and capacity, LRU in any case; capacities default to `SHARES`. Holds the trace in memory. `replay` does it
    in the order of the cells, say in several processes; by default here, one after the other."""
    held = list(islice(trace, limit))
    ids = [request.block_ids for request in held]
    unique = len(np.unique(np.concatenate(ids))) if ids else 0
    blocks = sum(len(path) for path in ids)
    if not blocks:
        raise InvalidArgument(f"nothing to sweep: the trace has no blocks trace={trace.name}")
    capacities = capacities_blocks or [max(1, int(share * unique)) for share in SHARES]
    drawn = tuple(dict.fromkeys((LRU, *orders)))
    cells = product(drawn, capacities)
    found = iter((replay or partial(map, partial(replayed, held, trace.block_tokens)))(cells))
    lines = [_line(order, tuple(islice(found, len(capacities))), blocks) for order in drawn]
    optimum = [hits / blocks for hits in optimum_hits(held, capacities)]
    return Sweep(
        trace.name,
        unique,
        blocks,
        tuple(capacities),
        lines[0].hit_ratios,
        tuple(optimum),
        tuple(lines),
    )


def replayed(requests: Sequence[Request], block_tokens: int, cell: Cell) -> Replayed:
    order, capacity = cell
    model: LeanModel | PublishedModel
    if order.policy in PUBLISHED:
        model = PublishedModel(order.policy, capacity)
    else:
        model = LeanModel(policy=order.policy, capacity_blocks=capacity, block_tokens=block_tokens)
    hits, took_s, begun_s = 0, [], process_time()
    for request in requests:
        asked_s = process_time()
        served = model.request(request.ts_s, request.block_ids, hint_of(request, order.hints))
        took_s.append(process_time() - asked_s)
        hits += sum(served.hits)
    return Replayed(hits, tuple(took_s), process_time() - begun_s)


def table(done: Sweep) -> Table:
    view = Table(title=f"{done.trace}: {done.unique_blocks:,} unique blocks")
    view.add_column("policy")
    for capacity in done.capacities_blocks:
        view.add_column(f"{capacity:,}", justify="right")
    for column in ("area closed", "worst vs LRU", "p50", "blocks/s"):
        view.add_column(column, justify="right")
    for line in done.lines:
        view.add_row(*_figures(done, line), f"{line.p50_us:,.0f} us", f"{line.blocks_per_s:,.0f}")
    view.add_row("optimum", *(f"{ratio:.4f}" for ratio in done.optimum), "100.0 %", "", "", "")
    return view


def markdown(done: Sequence[Sweep]) -> str:
    """One table of all, without what depends on the machine."""
    shares = [f"{blocks / done[0].unique_blocks:.0%}" for blocks in done[0].capacities_blocks]
    columns = ["trace", "order", *shares, "area", "worst"]
    rows = [columns, ["---"] * len(columns)]
    for each in done:
        rows += [[each.trace, *_figures(each, line)] for line in each.lines]
        optimum = [f"{ratio:.4f}" for ratio in each.optimum]
        rows.append([each.trace, "optimum", *optimum, "100.0 %", ""])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


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
            style = ":" if line.order.policy in PUBLISHED else "-"
            panel.plot(shares, line.hit_ratios, style, marker="o", label=line.order.name)
        panel.set(xscale="log", xlabel="capacity, % of unique blocks", title=each.trace)
        panel.set_ylabel("block hit ratio")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot draw the plot path={path}: {error}") from error


def _line(order: Order, found: Sequence[Replayed], blocks: int) -> Line:
    """Of its cells."""
    took_s = [took for cell in found for took in cell.took_s]
    p50, p99 = np.quantile(took_s, (0.5, 0.99)).tolist()
    total_s = sum(cell.total_s for cell in found)
    return Line(
        order,
        tuple(cell.hits / blocks for cell in found),
        1e6 * p50,
        1e6 * p99,
        1e3 * max(took_s),
        blocks * len(found) / max(total_s, 1e-9),
    )


def _figures(done: Sweep, line: Line) -> list[str]:
    return [
        line.order.name,
        *(f"{ratio:.4f}" for ratio in line.hit_ratios),
        f"{100 * done.area_closed(line):.1f} %",
        f"{100 * done.worst(line):+.2f}",
    ]


def _gains(ratios: Sequence[float], above: Sequence[float]) -> list[float]:
    return [ratio - base for ratio, base in zip(ratios, above, strict=True)]


def _over(gains: Sequence[float], possible: Sequence[float]) -> float:
    return sum(gains) / sum(possible) if sum(possible) > 0 else 0.0
