"""How many hits any capacity would have, from a sample of the blocks that are asked for, while it runs (SHARDS: Waldspurger et al., FAST 2015).

A block is in the sample if its fingerprint lies below a threshold, so all its uses are or none. For each use of one, what was used since
its last use gives the capacity from which leaf-first LRU hits it. When the sample or its queue is full the threshold sinks. Memory and time
are bounded: `SAMPLES_MAX` blocks, and a few microseconds a sampled use, outside of requests.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

SAMPLES_MAX, QUEUE_MAX = 4096, 4096
HALF_LIFE_S = 86_400.0
"""What was asked for a day ago counts half."""
STEPS, DOUBLINGS = 8, 44
EDGES = [2.0 ** (i / STEPS) for i in range(STEPS * DOUBLINGS)]
"""Capacities in units: a bucket holds uses that need more than the edge before and at most its own."""
_WHOLE = 1 << 64


class Use(NamedTuple):
    low: int
    """Half a fingerprint."""
    units: int
    flops: float


class Path(NamedTuple):
    """`asked`: blocks that a request asked for, head to tail; `above`: what of its path lies above them, from its end upwards."""

    asked: tuple[Use, ...]
    above: tuple[int, ...]


class Curve:
    def __init__(self, samples_max: int = SAMPLES_MAX) -> None:
        self.threshold = _WHOLE
        self.span_s = 0.0
        """Seconds of which it tells, as everything here with older ones counting less."""
        self.blocks = 0.0
        self.flops = 0.0
        self._samples_max = samples_max
        self._hits = np.zeros(len(EDGES))
        self._saved = np.zeros(len(EDGES))
        self._misses = np.zeros(2)
        """Blocks and FLOPs of first uses."""
        self._slot: dict[int, int] = {}
        self._low = [0] * (samples_max + 1)
        self._stamp = np.zeros(samples_max + 1, dtype=np.int64)
        self._units = np.zeros(samples_max + 1)
        self._highest: list[int] = []
        self._clock = 0
        self._queue: deque[Path] = deque()
        self._queued = 0
        self._at_s: float | None = None

    @property
    def sampled_share(self) -> float:
        return self.threshold / _WHOLE

    def add(self, path: Path, blocks: int, flops: float) -> None:
        """`path`: what of it lies below the threshold; `blocks`, `flops`: all that was asked for."""
        self.blocks += blocks
        self.flops += flops
        if not path.asked:
            return
        self._queue.append(path)
        self._queued += len(path.asked)
        if self._queued > QUEUE_MAX:
            self._sink(self.threshold // 2)
            kept: deque[Path] = deque()
            for each in self._queue:
                left = [use for use in each.asked if use.low < self.threshold]
                if left:
                    kept.append(Path(tuple(left), each.above))
            self._queue = kept
            self._queued = sum(len(each.asked) for each in self._queue)

    def digest(self, uses_max: int, now_s: float) -> None:
        """Take in some of what was added."""
        self._age(now_s)
        while self._queue and uses_max > 0:
            path = self._queue.popleft()
            self._queued -= len(path.asked)
            uses_max -= len(path.asked)
            for use in path.asked:
                self._count(use)
            for use in reversed(path.asked):
                self._move(use)
            for low in path.above:
                if low in self._slot:
                    self._touch(low)

    def hits(self, units: float) -> tuple[float, float]:
        """Blocks and FLOPs that so many units would have saved."""
        bucket = bisect_left(EDGES, units)
        if bucket < len(EDGES) and EDGES[bucket] == units:
            bucket, share = bucket + 1, 0.0
        else:
            before = EDGES[bucket - 1] if bucket else 0.0
            after = EDGES[bucket] if bucket < len(EDGES) else units
            share = (units - before) / (after - before) if after > before else 0.0
        blocks, flops = self._rest()
        found = []
        for column, rest in ((self._hits, blocks), (self._saved, flops)):
            part = float(column[bucket]) * share if bucket < len(EDGES) else 0.0
            found.append(float(column[:bucket].sum()) + part + (rest if units >= 1 else 0.0))
        return max(found[0], 0.0), max(found[1], 0.0)

    def points(self) -> list[tuple[float, float, float]]:
        """Capacity, blocks and FLOPs at each edge at which they grow, and at one before each such."""
        grows = np.flatnonzero(self._hits)
        edges = sorted({0, *grows.tolist(), *(grows[grows > 0] - 1).tolist()})
        return [(EDGES[edge], *self.hits(EDGES[edge])) for edge in edges]

    def _rest(self) -> tuple[float, float]:
        """What the sample has too little or too much of all uses: those of the blocks that are used most, so it goes to the smallest
        capacity."""
        if self.sampled_share == 1.0:
            return 0.0, 0.0
        counted = float(self._hits.sum() + self._misses[0])
        saved = float(self._saved.sum() + self._misses[1])
        return self.blocks - counted, self.flops - saved

    def _count(self, use: Use) -> None:
        weight = 1.0 / self.sampled_share
        slot = self._slot.get(use.low)
        if slot is None:
            self._misses += (weight, weight * use.flops)
            return
        count = len(self._slot)
        since = float(self._units[:count] @ (self._stamp[:count] > self._stamp[slot]))
        bucket = bisect_left(EDGES, since * weight + use.units)
        if bucket < len(EDGES):
            self._hits[bucket] += weight
            self._saved[bucket] += weight * use.flops

    def _move(self, use: Use) -> None:
        if use.low >= self.threshold:
            return  # it sank meanwhile
        slot = self._slot.get(use.low)
        if slot is None:
            slot = self._slot[use.low] = len(self._slot)
            self._low[slot] = use.low
            heappush(self._highest, -use.low)
            while len(self._slot) > self._samples_max:
                self._sink(-self._highest[0])
            if use.low >= self.threshold:
                return
        self._units[self._slot[use.low]] = use.units
        self._touch(use.low)

    def _touch(self, low: int) -> None:
        self._clock += 1
        self._stamp[self._slot[low]] = self._clock

    def _sink(self, threshold: int) -> None:
        self.threshold = threshold
        while self._highest and -self._highest[0] >= threshold:
            self._drop(-heappop(self._highest))

    def _drop(self, low: int) -> None:
        """The last slot takes its place."""
        slot, last = self._slot.pop(low), len(self._slot)
        if slot != last:
            moved = self._low[last]
            self._slot[moved] = slot
            self._low[slot] = moved
            self._stamp[slot], self._units[slot] = self._stamp[last], self._units[last]

    def _age(self, now_s: float) -> None:
        before_s, self._at_s = self._at_s, now_s
        if before_s is None or now_s <= before_s:
            return
        left = 0.5 ** ((now_s - before_s) / HALF_LIFE_S)
        self._hits *= left
        self._saved *= left
        self._misses *= left
        self.blocks *= left
        self.flops *= left
        self.span_s = self.span_s * left + now_s - before_s


def sampled(
    lows: Sequence[int], units: int, flops: Sequence[float], curve: Curve
) -> tuple[Use, ...]:
    """Those below the curve's threshold."""
    threshold = curve.threshold
    uses = [Use(low, units, each) for low, each in zip(lows, flops, strict=True) if low < threshold]
    return tuple(uses)
