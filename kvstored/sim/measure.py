"""What a replay counts while it runs: bounded, cheap, and mergeable over clients.

Latencies go into logarithmic bins (2 % wide), time into at most `BUCKETS_MAX` equal buckets whose width doubles as the trace goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import TierId

TIERS = len(TierId)
BUCKETS_MAX = 128
BUCKET_MIN_S = 0.125
RATIO = 1.02
BINS = 1200
"""From 1 us to some 5 hours."""

TierBlocks = tuple[int, int, int, int]
"""Blocks by tier, in the order of TierId."""
NO_BLOCKS: TierBlocks = (0, 0, 0, 0)
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Served:
    """One served request. `hits`: blocks of the longest readable prefix by the tier that they were read from.

    `wrong_blocks`: read, but their bytes are not what their key says. `lost_blocks`: matched, but gone when they were to be read.
    `latencies_s`: seconds by operation.
    """

    blocks: int
    hits: TierBlocks
    put_blocks: int
    wrong_blocks: int = 0
    lost_blocks: int = 0
    latencies_s: Mapping[str, Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class Quantiles:
    count: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """A span of trace time; the latencies are those of whole requests."""

    start_s: float
    width_s: float
    requests: int
    blocks: int
    hits: TierBlocks
    latency: Quantiles


def bin_of(seconds: float) -> int:
    micros = seconds * 1e6
    return 0 if micros <= 1 else min(BINS - 1, int(log(micros) / log(RATIO)))


def quantiles(bins: Counts) -> Quantiles:
    """p50 and p99 to within a bin (2 %)."""
    count = int(bins.sum())
    if not count:
        return Quantiles(0, 0.0, 0.0)
    ends = np.cumsum(bins)
    p50, p99 = (int(np.searchsorted(ends, share * count)) for share in (0.5, 0.99))
    return Quantiles(count, RATIO ** (p50 + 0.5) / 1e3, RATIO ** (p99 + 0.5) / 1e3)


class Recorder:
    """Adds up served requests, in total and by bucket of trace time."""

    def __init__(self) -> None:
        self.requests = 0
        self.blocks = 0
        self.put_blocks = 0
        self.wrong_blocks = 0
        self.lost_blocks = 0
        self.hits: TierBlocks = NO_BLOCKS
        self.operations: dict[str, Counts] = {}
        self.width_s = BUCKET_MIN_S
        self.counts: Counts = np.zeros((BUCKETS_MAX, 2 + TIERS), dtype=np.int64)
        self.bins: Counts = np.zeros((BUCKETS_MAX, BINS), dtype=np.int64)

    def add(self, ts_s: float, served: Served, elapsed_s: float) -> None:
        """`ts_s`: seconds since the first request of the trace; `elapsed_s`: how long the whole request took."""
        self.requests += 1
        self.blocks += served.blocks
        self.put_blocks += served.put_blocks
        self.wrong_blocks += served.wrong_blocks
        self.lost_blocks += served.lost_blocks
        self.hits = summed(self.hits, served.hits)
        while ts_s >= self.width_s * BUCKETS_MAX:
            self.coarsen()
        i = int(ts_s / self.width_s)
        self.counts[i] += (1, served.blocks, *served.hits)
        self.bins[i, bin_of(elapsed_s)] += 1
        for name, seconds in (served.latencies_s or {}).items():
            bins = self.operations.setdefault(name, np.zeros(BINS, dtype=np.int64))
            for value in seconds:
                bins[bin_of(value)] += 1

    def merge(self, other: "Recorder") -> None:
        """Add what another client recorded on the same trace; `other` may be made coarser."""
        self.requests += other.requests
        self.blocks += other.blocks
        self.put_blocks += other.put_blocks
        self.wrong_blocks += other.wrong_blocks
        self.lost_blocks += other.lost_blocks
        self.hits = summed(self.hits, other.hits)
        while self.width_s < other.width_s:
            self.coarsen()
        while other.width_s < self.width_s:
            other.coarsen()
        self.counts += other.counts
        self.bins += other.bins
        for name, bins in other.operations.items():
            self.operations.setdefault(name, np.zeros(BINS, dtype=np.int64))
            self.operations[name] += bins

    def latencies(self) -> dict[str, Quantiles]:
        """By operation, and `request` for the whole."""
        operations = {name: quantiles(bins) for name, bins in sorted(self.operations.items())}
        return operations | {"request": quantiles(self.bins.sum(axis=0))}

    def buckets(self) -> tuple[Bucket, ...]:
        """Up to the last bucket in which anything happened."""
        used = np.flatnonzero(self.counts[:, 0])
        last = int(used[-1]) + 1 if len(used) else 0
        return tuple(self._bucket(i) for i in range(last))

    def coarsen(self) -> None:
        """Double the width of the buckets."""
        self.width_s *= 2
        for rows in (self.counts, self.bins):
            half = BUCKETS_MAX // 2
            rows[:half] = rows[0::2] + rows[1::2]
            rows[half:] = 0

    def _bucket(self, i: int) -> Bucket:
        requests, blocks, hbm, dram, nvme, remote = (int(count) for count in self.counts[i])
        return Bucket(
            i * self.width_s,
            self.width_s,
            requests,
            blocks,
            (hbm, dram, nvme, remote),
            quantiles(self.bins[i]),
        )


def summed(a: TierBlocks, b: TierBlocks) -> TierBlocks:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
