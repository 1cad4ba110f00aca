"""The vLLM connector: `KVConnectorBase_V1` over a kvstored daemon, by vLLM's own block hashes.

    --kv-transfer-config '{"kv_connector": "KvstoredConnector", "kv_connector_module_path": "kvstored.connectors.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

A thin border: `vllm_scheduler` plans, `vllm_worker` moves bytes. What cannot be stored, or a daemon that refuses, turns it off; vLLM goes on without.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstored.clock import SystemClock
from kvstored.connectors import versions
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.vllm_layout import layout_of
from kvstored.connectors.vllm_metrics import KvstoredPromMetrics, KvstoredStats
from kvstored.connectors.vllm_pages import pages_by_group
from kvstored.connectors.vllm_plans import EngineLayout, Page, Plans
from kvstored.connectors.vllm_scheduler import SchedulerSide, StoredEvents
from kvstored.connectors.vllm_worker import WorkerSide
from kvstored.core.types import TierId
from kvstored.errors import ConfigError, InvalidArgument

log = logging.getLogger("kvstored.connectors")

MEDIUM = "KVSTORED"
_LAYERWISE = "layerwise"
_SOURCES = {TierId.DRAM: CacheHitSource.HOST, TierId.NVME: CacheHitSource.DISK}
_CLOSE_S = 5.0


@dataclass
class KvstoredMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What the scheduler tells the workers with a step."""

    plans: Plans = field(default_factory=Plans)


@dataclass
class KvstoredWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """Blocks that workers have stored: how many of them, by vLLM's hash."""

    stored: dict[bytes, int] = field(default_factory=dict)

    def aggregate(self, other: "KvstoredWorkerMetadata") -> "KvstoredWorkerMetadata":
        for key, count in other.stored.items():
            self.stored[key] = self.stored.get(key, 0) + count
        return self


class KvstoredConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """One in the scheduler and one in every worker; each has a session of its own with the daemon."""

    def __init__(
        self,
        vllm_config: Any,  # vLLM's own types, here and below
        role: Any,
        kv_cache_config: Any,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        given = dict(transfer.kv_connector_extra_config)
        is_layerwise = given.pop(_LAYERWISE, False) is True
        options = ConnectorOptions.parsed(given)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._guarded: GuardedNamespace | None = None
        self._failed_pages: set[int] = set()
        self._stored: dict[bytes, int] = {}
        self._events: list[BlockStored] = []
        self._warn(transfer, str(vllm_config.cache_config.prefix_caching_hash_algo))
        try:
            layout = layout_of(vllm_config, kv_cache_config, options)
        except (ConfigError, InvalidArgument) as error:
            log.warning("the kvstored connector is off, vLLM goes on without it: %s", error)
            return
        self._guarded = GuardedNamespace(layout.spec, options, name=f"vllm-{role.name.lower()}")
        has_events = self._has_events(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            workers = layout.spec.tp if any(group.is_sharded for group in layout.groups) else 1
            self._scheduler = SchedulerSide(
                layout,
                self._guarded,
                SystemClock(),
                is_layerwise=is_layerwise and self._can_load_in_step(vllm_config, layout),
                is_loading=transfer.is_kv_consumer,
                is_storing=transfer.is_kv_producer,
                events=StoredEvents(workers) if has_events else None,
            )
        else:
            rank = vllm_config.parallel_config.rank % layout.spec.tp
            self._worker = WorkerSide(layout, self._guarded, shard=rank, tells_stored=has_events)

    # ---- worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self._worker is None:
            return
        try:
            blocks = self._kv_cache_config.num_blocks
            self._worker.register(pages_by_group(self._worker.layout, kv_caches, blocks))
        except ConfigError as error:
            log.warning("the kvstored connector stores and loads nothing: %s", error)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._plans())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step()
            self._worker.copy_stores(self._plans())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._worker is None:
            return KVConnectorTransferResults()
        done = self._worker.take_done()
        for key in done.stored:
            self._stored[key] = self._stored.get(key, 0) + 1
        has_one_group = len(self._worker.layout.groups) == 1
        if has_one_group:
            self._failed_pages |= done.failed_pages
        return KVConnectorTransferResults(
            finished_sending=done.sent,
            finished_recving=done.loaded,
            failed_recving=set() if has_one_group else done.failed & done.loaded,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def build_connector_worker_meta(self) -> KvstoredWorkerMetadata | None:
        if not self._stored:
            return None
        stored, self._stored = self._stored, {}
        return KvstoredWorkerMetadata(stored)

    # ---- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0 and not self._scheduler.is_layerwise

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, _tables(blocks.blocks), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        if self._scheduler is None:
            return {}
        by_source: dict[Any, int] = {}
        by_tier = self._scheduler.hit_tokens_by_tier(request, num_external_tokens)
        for tier, tokens in by_tier.items():
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)  # type: ignore[call-overload]  # -1 is no tier
            by_source[source] = by_source.get(source, 0) + tokens
        return by_source

    def build_connector_meta(self, scheduler_output: Any) -> KvstoredMetadata:
        if self._scheduler is None:
            return KvstoredMetadata()
        plans = self._scheduler.planned(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.scheduled_spec_decode_tokens,
            self._tables_of,
        )
        return KvstoredMetadata(plans)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            return
        self._scheduler.reported(
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            connector_output.invalid_block_ids or set(),
        )
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler.events is not None and isinstance(meta, KvstoredWorkerMetadata):
            for key, told in self._scheduler.events.stored(meta.stored):
                self._events.append(
                    BlockStored(
                        block_hashes=[maybe_convert_block_hash(key)],
                        parent_block_hash=maybe_convert_block_hash(told.parent)
                        if told.parent
                        else None,
                        token_ids=list(told.tokens),
                        block_size=self._scheduler.layout.block_tokens,
                        lora_id=told.lora[0] if told.lora else None,
                        medium=MEDIUM,
                        lora_name=told.lora[1] if told.lora else None,
                    )
                )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request, self._tables_of(request.request_id)), None

    def take_events(self) -> Iterable[BlockStored]:
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> bool | None:
        """vLLM's own cache was reset, after a change of weights for one: what is stored under this engine's identity goes too."""
        if self._guarded is None:
            return None
        self._guarded.flush(_CLOSE_S)
        return self._guarded.attempt(lambda namespace: namespace.clear() >= 0, False)

    # ---- both

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that is dropped is a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        return extra_config.get(_LAYERWISE) is True

    def get_kv_connector_stats(self) -> KvstoredStats | None:
        if self._guarded is None:
            return None
        taken = self._guarded.statistics.take()
        return KvstoredStats(data=dict(taken)) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvstoredStats:
        return KvstoredStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> KvstoredPromMetrics:
        return KvstoredPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._guarded is not None:
            self._guarded.close(_CLOSE_S)

    # ---- inside

    def _plans(self) -> Plans:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvstoredMetadata), "vLLM hands back what the scheduler made"
        return metadata.plans

    def _tables_of(self, request_id: str) -> Sequence[Sequence[Page]]:
        assert self._kv_cache_manager is not None, "vLLM binds it before the first step"
        return _tables(self._kv_cache_manager.get_blocks(request_id).blocks)

    @staticmethod
    def _has_events(vllm_config: Any) -> bool:
        events = vllm_config.kv_events_config
        return events is not None and bool(events.enable_kv_cache_events)

    @staticmethod
    def _can_load_in_step(vllm_config: Any, layout: EngineLayout) -> bool:
        """A load that fails while its step runs spoils what the step computes: with steps in flight ahead it could not be kept out."""
        can = len(layout.groups) == 1 and not vllm_config.scheduler_config.async_scheduling
        if not can:
            log.warning(
                "layerwise needs one KV cache group and --no-async-scheduling: loading before the step"
            )
        return can

    @staticmethod
    def _warn(transfer: Any, hash_algorithm: str) -> None:
        version = versions.check(versions.VLLM)
        if versions.is_newer(version, versions.VLLM):
            log.warning(
                "vLLM %s is newer than this connector knows (%s)", version, versions.VLLM.last
            )
        seed = os.environ.get("PYTHONHASHSEED")  # noqa: TID251 - vLLM's own variable, read as vLLM reads it
        if hash_algorithm.startswith("xxhash") and seed is None:
            log.warning(
                "hashes of %s differ in every process, so that nothing stored is found again:"
                " use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED",
                hash_algorithm,
            )
        if transfer.kv_load_failure_policy != "recompute":
            log.warning(
                'a block that was evicted between lookup and load fails its request: set "kv_load_failure_policy": "recompute"'
            )


def _tables(blocks: Sequence[Sequence[Any]]) -> list[list[Page]]:
    return [[None if block.is_null else block.block_id for block in group] for group in blocks]
