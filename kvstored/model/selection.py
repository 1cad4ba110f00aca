"""What selection logs say: how often blocks are selected, how steady that is, and whether a selection predicts the next ones.

A log is lines of JSON (proto/kvstored/v1/selection-log.schema.json). Reports of one set of blocks, group and layer follow on each other; a
gap of `GAP_S` begins a new run. The result can be written as weights, which the daemon takes at its start (`feedback.weights`).
"""

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstored.core.feedback import EVEN_SHARE
from kvstored.errors import InvalidArgument

VERSION = 1
GAP_S = 30.0
HORIZONS = (1, 4, 16, 64)
"""Steps ahead."""
WEIGHT_MIN = 0.05
WEIGHT_STEPS = 16
"""A weight says how well a selection predicts the one so many steps later."""

Mask = NDArray[np.bool_]
Stream = tuple[str, int]
"""Group and layer, -1 where it is not said."""


@dataclass(frozen=True, slots=True)
class Run:
    """Steps of one stream over the same blocks."""

    stream: Stream
    selected: Mask


@dataclass(frozen=True, slots=True)
class StreamStats:
    """`frequency`: share of (step, block) that were selected; `always`, `never`: share of blocks in over 90 % and in none of the steps. `stability`: of two
    steps on end, what both selected of what either did. `reuse`: by steps ahead, how likely what was selected is selected then. `gap_p95`: steps between
    two selections of a block, at most, in 95 % of cases. `weight`: how far a selection tells more of the future than the frequency alone."""

    group: str
    layer: int
    steps: int
    blocks: int
    frequency: float
    always: float
    never: float
    stability: float
    reuse: dict[int, float]
    gap_p95: int
    weight: float


def runs_of(lines: Iterable[str]) -> list[Run]:
    """Refuses a line that is not of the schema, with its number."""
    parts: dict[tuple[str, str, int, bytes], tuple[float, list[Mask]]] = {}
    runs: list[Run] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        key, at_s, selected = _parsed(line, number)
        last_s, masks = parts.get(key, (at_s, []))
        if at_s - last_s > GAP_S:
            runs.append(Run((key[1], key[2]), np.concatenate(masks)))
            masks = []
        masks.append(selected)
        parts[key] = (at_s, masks)
    for key, (_, masks) in parts.items():
        runs.append(Run((key[1], key[2]), np.concatenate(masks)))
    return runs


def stats_of(runs: Sequence[Run]) -> list[StreamStats]:
    """One a group and layer, in their order."""
    streams = sorted({run.stream for run in runs})
    return [_stats(stream, [r.selected for r in runs if r.stream == stream]) for stream in streams]


def weights_text(stats: Sequence[StreamStats]) -> str:
    rows = [{"group": s.group, "layer": s.layer, "weight": round(s.weight, 4)} for s in stats]
    return json.dumps({"version": VERSION, "weights": rows}, indent=1) + "\n"


def load_weights(path: Path) -> dict[Stream, float]:
    """What `weights_text` wrote."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        is_known = given["version"] == VERSION
        rows = {
            (str(row["group"]), int(row["layer"])): float(row["weight"]) for row in given["weights"]
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidArgument(f"no weights of selections: path={path} error={error!r}") from error
    if not is_known or not all(0 <= weight <= 1 for weight in rows.values()):
        raise InvalidArgument(f"weights between 0 and 1 of version {VERSION}: path={path}")
    return rows


# ---- inside


def _parsed(line: str, number: int) -> tuple[tuple[str, str, int, bytes], float, Mask]:
    try:
        given = json.loads(line)
        count, raw = int(given["count"]), base64.b64decode(given["blocks"], validate=True)
        is_known = given["version"] == VERSION and len(raw) == 8 * count > 0
        key = (str(given["namespace"]), str(given["group"]), int(given.get("layer", -1)), raw)
        at_s = float(given["at_s"])
        selected = _selected(given, count)
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise InvalidArgument(f"not a line of a selection log: line={number} {error!r}") from error
    if not is_known:
        raise InvalidArgument(f"not a line of a selection log of version {VERSION}: line={number}")
    return key, at_s, selected


def _selected(given: dict[str, object], count: int) -> Mask:
    if "mass" in given:
        mass = np.asarray(given["mass"], dtype=np.float64)
        if mass.shape != (count,):
            raise ValueError(f"one mass a block: mass={mass.shape} count={count}")
        step: Mask = mass > EVEN_SHARE * mass.sum() / count
        return step[np.newaxis]
    packed = np.frombuffer(base64.b64decode(str(given["selected"]), validate=True), dtype=np.uint8)
    rows = packed.reshape(int(str(given["steps"])), -(-count // 8))
    return np.unpackbits(rows, axis=1, count=count, bitorder="little").astype(np.bool_)


def _stats(stream: Stream, masks: Sequence[Mask]) -> StreamStats:
    steps, blocks = sum(map(len, masks)), sum(mask.shape[1] for mask in masks)
    chosen = sum(int(mask.sum()) for mask in masks)
    frequency = chosen / max(1, sum(mask.size for mask in masks))
    share = np.concatenate([mask.mean(axis=0) for mask in masks])
    reuse = {ahead: _reuse(masks, ahead) for ahead in HORIZONS}
    known = [ahead for ahead in HORIZONS if ahead <= WEIGHT_STEPS and reuse[ahead] >= 0]
    lift = (reuse[known[-1]] - frequency) / (1 - frequency) if known and frequency < 1 else 1.0
    gaps = np.concatenate([_gaps(mask) for mask in masks])
    return StreamStats(
        group=stream[0],
        layer=stream[1],
        steps=steps,
        blocks=blocks,
        frequency=frequency,
        always=float((share > 0.9).mean()),
        never=float((share == 0).mean()),
        stability=_stability(masks),
        reuse={ahead: value for ahead, value in reuse.items() if value >= 0},
        gap_p95=int(np.percentile(gaps, 95, method="inverted_cdf")) if len(gaps) else 0,
        weight=min(1.0, max(WEIGHT_MIN, lift)),
    )


def _reuse(masks: Sequence[Mask], ahead: int) -> float:
    """-1 where no run is so long."""
    pairs = [(mask[:-ahead], mask[ahead:]) for mask in masks if len(mask) > ahead]
    chosen = sum(int(now.sum()) for now, _ in pairs)
    return sum(int((now & then).sum()) for now, then in pairs) / chosen if chosen else -1.0


def _stability(masks: Sequence[Mask]) -> float:
    pairs = [(mask[:-1], mask[1:]) for mask in masks]
    either = sum(int((now | then).sum()) for now, then in pairs)
    return sum(int((now & then).sum()) for now, then in pairs) / either if either else 0.0


def _gaps(mask: Mask) -> NDArray[np.int64]:
    """Steps from each selection of a block to its next one."""
    block, step = np.nonzero(mask.T)
    same = block[1:] == block[:-1]
    gaps: NDArray[np.int64] = np.diff(step)[same]
    return gaps
