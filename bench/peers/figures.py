"""From times to figures: quantiles of a cell, medians over rounds, ratios. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.peers.plan import WARM, Shape


@dataclass(frozen=True, slots=True)
class Taken:
    """What one client did in one turn: the time of each call, and of all (gets: with what lay between)."""

    times: list[float]
    wall_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell of one visit. Rates are of all clients together; times are of one call of the whole batch."""

    round_: int
    contestant: str
    shape: Shape
    medium: str
    verb: str
    p50_s: float
    p99_s: float
    rate: float
    copy_p50_s: float
    copy_rate: float
    samples: int

    @property
    def ratio(self) -> float:
        """To the shared-memory copy (from disk: to the O_DIRECT read) in the same visit."""
        return self.rate / self.copy_rate


@dataclass(frozen=True, slots=True)
class Failed:
    """A cell that was not measured, and why."""

    round_: int
    contestant: str
    shape: Shape
    medium: str
    verb: str
    reason: str


@dataclass(frozen=True, slots=True)
class Figure:
    """The medians of a cell over its rounds."""

    contestant: str
    shape: Shape
    medium: str
    verb: str
    p50_s: float
    p99_s: float
    rate: float
    ratio: float
    ratio_least: float
    ratio_most: float
    rounds: int


def measured_of(
    where: tuple[int, str, Shape, str, str],
    turns: Sequence[Sequence[Taken]],
    copies: Sequence[Sequence[Taken]],
) -> Measured:
    """`turns`, `copies`: of each turn what each client did."""
    round_, contestant, shape, medium, verb = where
    pooled, pooled_copies = _pooled(turns), _pooled(copies)
    return Measured(
        round_,
        contestant,
        shape,
        medium,
        verb,
        quantile(pooled, 0.5),
        quantile(pooled, 0.99),
        _rate(turns, shape, medium),
        quantile(pooled_copies, 0.5),
        _rate(copies, shape, medium),
        len(pooled),
    )


def figures_of(cells: Iterable[Measured]) -> list[Figure]:
    """In the order in which the cells first came."""
    grouped: dict[tuple[str, Shape, str, str], list[Measured]] = {}
    for cell in cells:
        key = (cell.contestant, cell.shape, cell.medium, cell.verb)
        grouped.setdefault(key, []).append(cell)
    return [
        Figure(
            *key,
            p50_s=statistics.median(cell.p50_s for cell in group),
            p99_s=statistics.median(cell.p99_s for cell in group),
            rate=statistics.median(cell.rate for cell in group),
            ratio=statistics.median(cell.ratio for cell in group),
            ratio_least=min(cell.ratio for cell in group),
            ratio_most=max(cell.ratio for cell in group),
            rounds=len(group),
        )
        for key, group in grouped.items()
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    assert values, "a quantile is one of something"
    assert 0 < share <= 1, "a share"
    ordered = sorted(values)
    at = -(-len(ordered) * share // 1)
    return ordered[int(at) - 1]


def _pooled(turns: Sequence[Sequence[Taken]]) -> list[float]:
    return [taken for turn in turns for client in turn for taken in client.times]


def _rate(turns: Sequence[Sequence[Taken]], shape: Shape, medium: str) -> float:
    """Of one client what its median call does; of several what they did together until the last was done: with fewer cores than clients
    a median call does not see the waiting. From disk always: what the kernel read ahead makes a median call too fast."""
    if shape.clients == 1 and medium == WARM:
        return shape.batch_bytes / statistics.median(_pooled(turns))
    return statistics.median(
        shape.batch_bytes
        * sum(len(client.times) for client in turn)
        / max(client.wall_s for client in turn)
        for turn in turns
    )
