"""What a run found: as JSON, and as tables in text. Pure but for reading and writing nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.peers.contestants import CONTESTANTS
from bench.peers.figures import Failed, Figure, Measured, figures_of
from bench.peers.plan import BATCH_BYTES_MAX, COLD, MIB, Shape, size_words
from bench.peers.targets import Checked, behind, checked

CAP = (
    f"batches of all clients together are capped at {BATCH_BYTES_MAX // MIB} MiB; "
    "a capped cell says how many blocks it has"
)


@dataclass(slots=True)
class Run:
    """All that a run found. `missing`: reasons by contestant. `probes`: values of each round by name."""

    machine: dict[str, str]
    options: dict[str, str]
    cells: list[Measured] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    probes: dict[str, list[float]] = field(default_factory=dict)

    def figures(self) -> list[Figure]:
        return figures_of(self.cells)

    # Any: a JSON object
    def to_json(self) -> dict[str, Any]:
        figures = self.figures()
        return {
            "machine": self.machine,
            "options": self.options,
            "figures": [_flat(figure) for figure in figures],
            "cells": [_flat(cell) for cell in self.cells],
            "failures": [_flat(failure) for failure in self.failures],
            "missing": self.missing,
            "probes": self.probes,
            "targets": [asdict(each) | {"is_met": each.is_met} for each in self.targets()],
            "behind": behind(figures),
        }

    def targets(self) -> list[Checked]:
        return checked(self.figures(), _medians(self.probes))


def tables(run: Run) -> str:
    """The whole report as Markdown: machine, one table a size and kind of cell, targets, what is missing and what failed."""
    parts = [_facts(run.machine), _facts(run.options), CAP]
    figures = run.figures()
    keys = sorted(
        {(f.medium, f.verb, f.shape.block_bytes) for f in figures},
        key=lambda key: (key[0] == COLD, key[2], key[1]),
    )
    for medium, verb, size in keys:
        chosen = [
            figure
            for figure in figures
            if (figure.medium, figure.verb, figure.shape.block_bytes) == (medium, verb, size)
        ]
        beside = "an O_DIRECT read" if medium == COLD else "the shared-memory copy"
        parts += [
            f"### {verb} {size_words(size)}, {medium} (ratio to {beside} of the same visit)",
            cell_table(chosen),
        ]
    parts += ["### Targets", target_table(run.targets())]
    ahead = behind(figures)
    parts.append(
        "### Where a peer is ahead\n\n" + ("\n".join(f"- {a}" for a in ahead) or "nowhere")
    )
    if run.missing:
        parts.append("### Missing\n\n" + _bullets(run.missing))
    if run.failures:
        reasons = {
            f"{each.contestant}, {each.verb} {each.shape.words}, {each.shape.clients} clients": each.reason
            for each in run.failures
        }
        parts.append("### Failed\n\n" + _bullets(reasons))
    return "\n\n".join(parts) + "\n"


def cell_table(figures: Sequence[Figure]) -> str:
    """One row a contestant; for each shape GB/s, p50 (p99) and ratio."""
    shapes = sorted({f.shape for f in figures}, key=lambda s: (s.batch, s.clients))
    by_cell = {(f.contestant, f.shape): f for f in figures}
    header = ["", *(_shape_words(shape) for shape in shapes)]
    names = [each.name for each in CONTESTANTS if any(f.contestant == each.name for f in figures)]
    rows = [[name, *(_cell(by_cell.get((name, shape))) for shape in shapes)] for name in names]
    return _table([header, *rows])


def target_table(targets: Sequence[Checked]) -> str:
    words = {True: "met", False: "NOT MET", None: "not measured"}
    rows = [
        [
            each.name,
            f"{'>=' if each.is_least else '<='} {each.bound:g} {each.unit}",
            "" if each.measured is None else f"{each.measured:.3g} {each.unit}",
            words[each.is_met],
            ""
            if each.echoed is None
            else f"a bare echo and the copy: {each.echoed:.3g} {each.unit}",
        ]
        for each in targets
    ]
    return _table([["target", "bound", "measured", "", "at most, with a message"], *rows])


def duration_words(seconds: float) -> str:
    micros = seconds * 1e6
    return f"{micros:.0f} us" if micros < 10_000 else f"{micros / 1000:.1f} ms"


def _shape_words(shape: Shape) -> str:
    capped = "" if shape.blocks == shape.batch else f" (capped: {shape.blocks})"
    return f"x {shape.batch}{capped}, {shape.clients} client{'s' * (shape.clients > 1)}"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    times = f"{duration_words(figure.p50_s)} ({duration_words(figure.p99_s)})"
    return f"{figure.rate / 1e9:.2f} GB/s, {times}, **{figure.ratio:.2f}**"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _facts(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in facts.items())


def _bullets(lines: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {reason}" for name, reason in lines.items())


def _medians(probes: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sorted(values)[len(values) // 2] for name, values in probes.items() if values}


# Any: a JSON object
def _flat(value: Measured | Failed | Figure) -> dict[str, Any]:
    facts: dict[str, Any] = asdict(value)
    shape: dict[str, Any] = facts.pop("shape")
    return facts | shape | {"blocks": value.shape.blocks}
