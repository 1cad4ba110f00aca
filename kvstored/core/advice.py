"""Load or recompute: how long the blocks of a hit take to load, how long their tokens take to compute, and where to cut between the two.

Pure arithmetic over a path. Time runs from now: what is queued before a load is part of it. All of it is a prediction.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.speed import Line
from kvstored.core.types import Advice, TierId

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prefill:
    """How fast an engine computes: `work_per_s` of `base` + `slope` x position a token. FLOPs where those are known, else tokens (base 1).
    0: not known. `source`: asked, measured or empty."""

    work_per_s: float = 0.0
    base: float = 1.0
    slope: float = 0.0
    source: str = ""

    def seconds(self, ends: Floats) -> Floats:
        """To compute all tokens before each of these positions."""
        return (self.base * ends + self.slope * ends * ends / 2) / self.work_per_s


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """`line`: of bytes as they are decoded; `queue_s`: until what is asked for now begins; `block_s`: what a block costs whatever its bytes."""

    line: Line
    queue_s: float = 0.0
    block_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HitPath:
    """The readable blocks of a hit from the first token on. `is_boundary`: where a path that ends after the block can be resumed from (window and
    state groups); `resume_bytes`: what is read there beside the blocks."""

    tiers: NDArray[np.uint8]
    size_bytes: NDArray[np.int64]
    tokens: NDArray[np.int64]
    is_boundary: NDArray[np.bool_]
    resume_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadQuestion:
    """What a caller of Match wants to know: which prefix can be loaded within `deadline_s` (0: no deadline), and what its own prefill speed makes of
    it. Speeds of 0 are left to what was measured."""

    deadline_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    prefill_flops_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """What an engine computed: `tokens` from position `first_token` on, in so long."""

    tokens: int
    seconds: float
    first_token: int = 0


def advise(
    path: HitPath,
    speeds: Mapping[TierId, TierSpeed],
    prefill: Prefill,
    deadline_s: float | None = None,
) -> Advice:
    """The best of all cuts at boundaries; of equal ones what loads more, since that leaves the engine free."""
    count = len(path.tokens)
    ends = np.concatenate(([0], np.cumsum(path.tokens))).astype(np.float64)
    loads = _prefix_seconds(path, speeds)
    usable = np.concatenate(([True], path.is_boundary))
    cuts = np.flatnonzero(usable)
    last = int(cuts[-1])
    split, split_s, overlap, overlap_s, prefill_s = last, float(loads[last]), 0, 0.0, 0.0
    if prefill.work_per_s > 0 and count:
        computed = prefill.seconds(ends)
        prefill_s = float(computed[-1])
        split, split_s = _least(cuts[::-1], (loads + (prefill_s - computed))[cuts][::-1])
        overlap, overlap_s = _overlapped(path, speeds, computed)
    in_time = cuts if deadline_s is None else cuts[loads[cuts] <= deadline_s]
    deadline = int(in_time[-1]) if len(in_time) else 0
    by_tier = [_of_tier(path, speeds, tier) for tier in TierId]
    return Advice(
        load_bytes=(by_tier[0][0], by_tier[1][0], by_tier[2][0], by_tier[3][0]),
        load_s=(by_tier[0][1], by_tier[1][1], by_tier[2][1], by_tier[3][1]),
        queue_s=max(
            (speed.queue_s for tier, speed in speeds.items() if tier in path.tiers), default=0.0
        ),
        total_load_s=float(loads[-1]),
        prefill_s=prefill_s,
        prefill_source=prefill.source if prefill.work_per_s > 0 else "",
        split_blocks=split,
        split_tokens=int(ends[split]),
        split_s=split_s,
        overlap_blocks=overlap,
        overlap_s=overlap_s,
        deadline_blocks=deadline,
        deadline_tokens=int(ends[deadline]),
    )


def _prefix_seconds(path: HitPath, speeds: Mapping[TierId, TierSpeed]) -> Floats:
    """To load the first 0, 1, ... blocks: tiers one after the other, and what comes up from below memory is copied out of it as well."""
    seconds = np.zeros(len(path.tokens) + 1)
    resume = np.zeros(len(path.tokens))
    for tier, speed in speeds.items():
        mine = path.tiers == int(tier)
        line = _through_memory(tier, speeds)
        seconds[1:] += np.cumsum(np.where(mine, path.size_bytes, 0)) * line.size_s
        seconds[1:] += np.cumsum(mine) * speed.block_s
        seconds[1:] += (
            np.maximum.accumulate(mine) * (speed.queue_s + line.fixed_s) if len(mine) else 0.0
        )
        resume[mine] = path.resume_bytes * line.size_s
    seconds[1:] += resume
    return seconds


def _overlapped(
    path: HitPath, speeds: Mapping[TierId, TierSpeed], computed: Floats
) -> tuple[int, float]:
    """Compute from the head, load from the tail: done when the slower of the two is. Whoever resumes at the end has to find it usable."""
    if not path.is_boundary[-1]:
        return len(path.tokens), float(computed[-1])
    turned = HitPath(
        path.tiers[::-1], path.size_bytes[::-1], path.tokens[::-1], path.is_boundary[::-1]
    )
    loads = _prefix_seconds(turned, speeds)[::-1].copy()
    loads[:-1] += path.resume_bytes * _through_memory(TierId(int(path.tiers[-1])), speeds).size_s
    both = np.maximum(computed, loads)
    return _least(np.arange(len(both)), both)


def _through_memory(tier: TierId, speeds: Mapping[TierId, TierSpeed]) -> Line:
    line = speeds[tier].line
    if tier <= TierId.DRAM:
        return line
    memory = speeds[TierId.DRAM].line
    return Line(line.fixed_s + memory.fixed_s, line.size_s + memory.size_s)


def _of_tier(path: HitPath, speeds: Mapping[TierId, TierSpeed], tier: TierId) -> tuple[int, float]:
    mine = path.tiers == int(tier)
    size_bytes = int(path.size_bytes[mine].sum())
    if not size_bytes:
        return 0, 0.0
    speed = speeds[tier]
    blocks_s = speed.block_s * int(np.count_nonzero(mine))
    return size_bytes, speed.queue_s + blocks_s + _through_memory(tier, speeds).seconds(size_bytes)


def _least(cuts: NDArray[np.int64], seconds: Floats) -> tuple[int, float]:
    """The first cut with the least time."""
    at = int(np.argmin(seconds))
    return int(cuts[at]), float(seconds[at])
