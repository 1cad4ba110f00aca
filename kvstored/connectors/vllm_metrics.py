"""What the connector did, in vLLM's own statistics: its log line and its /metrics.

Kept beside vLLM's `vllm:external_prefix_cache_hits`, which vLLM counts itself.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstored.connectors.statistics import Stat

METRIC_PREFIX = "vllm:kvstored_"


class KvstoredStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Sums by the names of `Stat`; picklable, as vLLM sends it between its processes."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: "KvstoredStats") -> "KvstoredStats":
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(amount, 6) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KvstoredPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """One counter a name, `vllm:kvstored_hit_dram_tokens` and so on."""

    def __init__(
        self,
        vllm_config: Any,  # vLLM's own types
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = metric_types[Counter]
        self._by_engine: dict[int, dict[str, Any]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        for stat in Stat:
            counter = made(
                name=METRIC_PREFIX + stat.value,
                documentation=f"kvstored connector: {stat.value.replace('_', ' ')}.",
                labelnames=labelnames,
            )
            for engine, values in per_engine_labelvalues.items():
                self._by_engine[engine][stat.value] = counter.labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, float], engine_idx: int = 0) -> None:
        counters = self._by_engine.get(engine_idx, {})
        for name, amount in transfer_stats_data.items():
            if amount > 0 and name in counters:
                counters[name].inc(amount)
