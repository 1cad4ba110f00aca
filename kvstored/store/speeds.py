"""How fast this machine is, as measured while it works: loads from NVMe, copies out of memory, prefill of each namespace."""

from collections.abc import Callable

import numpy as np
import xxhash

from kvstored.core.advice import Prefill, PrefillRun, TierSpeed
from kvstored.core.speed import Line, Speed
from kvstored.core.types import NamespaceId, NamespaceSpec, TierId
from kvstored.store.lane import Ended, Lane, Urgency

NVME_PRIOR = Line(300e-6, 1e-9)
MEMORY_PRIOR = Line(50e-6, 0.2e-9)
"""Until something was loaded or copied: 1 and 5 GB/s."""
BLOCK_S = 8e-6
"""Of messages and books on both sides (docs/benchmarks.md)."""
CALIBRATION_BYTES = 32 << 20
"""More than a core's caches hold: what is loaded lies in none either."""
CALIBRATION_ROUNDS = 3
FADE = 0.9
"""What an earlier prefill weighs when the next one is told."""


class Speeds:
    """`loading_bytes`: what engines wait for now. A load that nobody waits for is behind those, and counts only while it runs."""

    def __init__(self, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._nvme = Speed(NVME_PRIOR)
        self._memory = Speed(MEMORY_PRIOR)
        self._prefill: dict[NamespaceId, tuple[float, float]] = {}
        self._measured: dict[NamespaceId, Prefill] = {}
        self._last_end_s = 0.0
        self.loading_bytes = 0

    # ---- loads

    def load_begun(self, size_bytes: int, urgency: Urgency) -> None:
        self.loading_bytes += size_bytes if urgency is Urgency.DEMAND else 0

    def load_ended(
        self, size_bytes: int, urgency: Urgency, begun_s: float, *, is_good: bool
    ) -> None:
        """`begun_s`: when it was queued. Several are under way at once: what one took is the time since the one before it ended."""
        self.loading_bytes -= size_bytes if urgency is Urgency.DEMAND else 0
        now_s = self._elapsed_s()
        if is_good:
            self._nvme.note(size_bytes, now_s - max(begun_s, self._last_end_s))
        self._last_end_s = now_s

    def calibrate(self, lane: Lane) -> None:
        """Copy and hash some memory in this lane, which is what a client does with what it reads."""
        measured = lane.submit(lambda: copy_seconds(self._elapsed_s), Urgency.BACKGROUND)
        measured.when_ended(self._calibrated)

    def _calibrated(self, ended: Ended[float]) -> None:
        if ended.error is None:
            for _ in range(CALIBRATION_ROUNDS):
                self._memory.note(CALIBRATION_BYTES, ended.unwrap())

    def tiers(self) -> dict[TierId, TierSpeed]:
        memory, line = TierSpeed(self._memory.line, block_s=BLOCK_S), self._nvme.line
        nvme = TierSpeed(line, line.size_s * self.loading_bytes, BLOCK_S)
        return {
            TierId.HBM: memory,
            TierId.DRAM: memory,
            TierId.NVME: nvme,
            TierId.REMOTE: nvme,
        }

    def load_line(self) -> Line:
        """Of bytes that come from NVMe through memory."""
        nvme, memory = self._nvme.line, self._memory.line
        return Line(nvme.fixed_s + memory.fixed_s, nvme.size_s + memory.size_s)

    # ---- prefill

    def measured_prefill(self) -> dict[NamespaceId, Prefill]:
        return dict(self._measured)

    def prefilled(self, ns: NamespaceId, spec: NamespaceSpec, run: PrefillRun) -> None:
        """An engine of the namespace computed this."""
        if run.tokens <= 0 or run.seconds <= 0:
            return
        base, slope = work_of(spec)
        work = (base + slope * (run.first_token + run.tokens / 2)) * run.tokens
        done, took = self._prefill.get(ns, (0.0, 0.0))
        done, took = done * FADE + work, took * FADE + run.seconds
        self._prefill[ns] = (done, took)
        self._measured[ns] = Prefill(done / took, base, slope, "measured")

    def prefill(
        self,
        ns: NamespaceId,
        spec: NamespaceSpec,
        *,
        tokens_per_s: float = 0.0,
        flops_per_s: float = 0.0,
    ) -> Prefill:
        """As the caller says, else as engines of the namespace did; without either, not known."""
        if tokens_per_s > 0:
            return Prefill(tokens_per_s, source="asked")
        if flops_per_s > 0 and spec.flops_base + spec.flops_slope > 0:
            return Prefill(flops_per_s, spec.flops_base, spec.flops_slope, "asked")
        return self._measured.get(ns, Prefill())


def work_of(spec: NamespaceSpec) -> tuple[float, float]:
    """Work of a token: FLOPs where the namespace says them, else 1."""
    if spec.flops_base + spec.flops_slope > 0:
        return spec.flops_base, spec.flops_slope
    return 1.0, 0.0


def copy_seconds(elapsed_s: Callable[[], float]) -> float:
    """The middle one of some rounds."""
    source = np.ones(CALIBRATION_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    rounds = []
    for _ in range(CALIBRATION_ROUNDS):
        begun_s = elapsed_s()
        np.copyto(target, source)
        xxhash.xxh3_64().update(target.data)
        rounds.append(elapsed_s() - begun_s)
    return sorted(rounds)[len(rounds) // 2]
