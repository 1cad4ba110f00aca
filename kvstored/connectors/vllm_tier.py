"""A secondary tier of vLLM's `TieringOffloadingSpec` (0.33): vLLM moves KV between GPU and host memory, kvstored keeps what leaves it.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "block_size": 256,
        "secondary_tiers": [{"type": "KvstoredTier", "module_path": "kvstored.connectors.vllm_tier"}]}}

Runs in vLLM's scheduler and touches no GPU. Every call of vLLM returns at once: threads of its own load, store and look up.
"""

import hashlib
import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from huggingface_hub import try_to_load_from_cache
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstored.client import GroupKind, GroupSpec, Keys, NamespaceSpec
from kvstored.clock import SystemClock
from kvstored.connectors import identity, versions
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.statistics import Stat
from kvstored.core.types import BATCH_KEYS_MAX
from kvstored.errors import ConfigError

log = logging.getLogger("kvstored.connectors")

LAYOUT_VERSION = 1
_READABLE = 1 << 7
"""Of what `locate` tells."""
_LOADS_AT_ONCE = 2
_TOUCHED_MAX = 4096
_CLOSE_S = 5.0


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's own batching of lookups over steps, of this tier's keys."""

    def __init__(self, tier_type: str, guarded: GuardedNamespace) -> None:
        self._guarded = guarded
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: object) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(keys), BATCH_KEYS_MAX):
            part = keys[start : start + BATCH_KEYS_MAX]
            located = self._guarded.attempt(
                partial(_located, keys=Keys.opaque(part, unchained=True)), (0,) * len(part)
            )
            found += [bool(tiers & _READABLE) for tiers in located]
        return found


class KvstoredTier(SecondaryTierManager):  # type: ignore[misc]  # as above
    """`options`: those of `ConnectorOptions`, and vLLM's `locality`."""

    medium: ClassVar[Any] = Medium.STORAGE
    # DRAM or NVMe: vLLM asks for one word a tier.
    cache_hit_source: ClassVar[Any] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: Any,  # vLLM's own types, here and below
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        versions.check(versions.VLLM_TIER)
        self.locality = None if locality is None else Locality(locality)
        parsed = ConnectorOptions.parsed(options)
        spec = namespace_of(offloading_spec.config, parsed, chunk_bytes=self.block_size_bytes)
        self._guarded = GuardedNamespace(spec, parsed, name="vllm-tier")
        self._lookups = _Lookups(tier_type, self._guarded)
        self._memory = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(
            -1, self.block_size_bytes
        )
        self._clock = SystemClock()
        self._loads = ThreadPoolExecutor(_LOADS_AT_ONCE, "kvstored-load")
        self._stores = ThreadPoolExecutor(1, "kvstored-tier")
        self._store_chunks_max = max(parsed.queue_bytes // self.block_size_bytes, 1)
        self._storing_chunks = 0
        self._lock = threading.Lock()
        self._running: set[Future[None]] = set()
        self._finished: list[JobResult] = []
        self._missed: list[bytes] = []
        self._touched: dict[bytes, None] = {}
        self._has_events = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._events: list[OffloadingEvent] = []

    # ---- lookups

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()
        if self._touched:
            keys, self._touched = list(self._touched), {}
            self._submit(self._stores, partial(self._touch, keys))

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        if len(self._touched) + len(keys) <= _TOUCHED_MAX:
            self._touched |= dict.fromkeys(keys)

    # ---- jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Sheds the job when too much waits already: vLLM takes it as a store that failed."""
        count = len(job_metadata.keys)
        with self._lock:
            is_shed = self._storing_chunks > 0 and (
                self._storing_chunks + count > self._store_chunks_max
            )
            if not is_shed:
                self._storing_chunks += count
        if is_shed:
            self._guarded.statistics.count(Stat.SHED_QUEUE_BLOCKS, count)
            self._end(job_metadata, [False] * count, began_s=self._clock.elapsed_s())
        else:
            self._submit(self._stores, partial(self._store, job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(self._loads, partial(self._load, job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._lock:
            finished, self._finished = self._finished, []
            missed, self._missed = self._missed, []
        # Else vLLM would ask for the same load again and again.
        self._lookups.mark_miss(missed)
        return finished

    def drain_jobs(self) -> None:
        """Each job ends within the limits of its calls, so this does."""
        with self._lock:
            running = set(self._running)
        wait(running)

    def take_events(self) -> Iterable[OffloadingEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        self._loads.shutdown(wait=True, cancel_futures=True)
        self._stores.shutdown(wait=True, cancel_futures=True)
        self._lookups.shutdown()
        self._guarded.close(_CLOSE_S)
        # vLLM releases the memory now, which it can only when nobody looks at it.
        self._memory = np.empty((0, self.block_size_bytes), dtype=np.uint8)

    # ---- threads

    def _submit(self, threads: ThreadPoolExecutor, call: Any) -> None:
        future = threads.submit(call)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: "Future[None]") -> None:
        with self._lock:
            self._running.discard(future)

    def _store(self, job: Any) -> None:
        began_s = self._clock.elapsed_s()
        stored: Sequence[bool] = [False] * len(job.keys)
        try:
            stored = self._in_parts(job, self._guarded.store)
        finally:
            with self._lock:
                self._storing_chunks -= len(job.keys)
            self._end(job, stored, began_s)

    def _load(self, job: Any) -> None:
        began_s = self._clock.elapsed_s()
        loaded: Sequence[bool] = [False] * len(job.keys)
        try:
            loaded = self._in_parts(job, lambda keys, rows: self._guarded.load(keys, rows).whole)
        finally:
            self._end(job, loaded, began_s)

    def _in_parts(self, job: Any, call: Any) -> list[bool]:
        keys = list(job.keys)
        rows = [self._memory[int(chunk)] for chunk in job.chunk_ids]
        done: list[bool] = []
        for start in range(0, len(keys), BATCH_KEYS_MAX):
            stop = start + BATCH_KEYS_MAX
            done += call(Keys.opaque(keys[start:stop], unchained=True), rows[start:stop])
        return done

    def _end(self, job: Any, done: Sequence[bool], began_s: float) -> None:
        keys = list(job.keys)
        good = [key for key, is_good in zip(keys, done, strict=True) if is_good]
        result = JobResult(
            job_id=job.job_id,
            success=len(good) == len(keys),
            successful_keys=tuple(good) if job.is_promotion and good else None,
            transfer_time=self._clock.elapsed_s() - began_s,
            transfer_bytes=len(good) * self.block_size_bytes,
        )
        with self._lock:
            self._finished.append(result)
            if job.is_promotion:
                self._missed += [
                    key for key, is_good in zip(keys, done, strict=True) if not is_good
                ]
            elif good and self._has_events:
                event = OffloadingEvent(good, self.medium, removed=False, locality=self.locality)
                self._events.append(event)

    def _touch(self, keys: list[bytes]) -> None:
        self._guarded.attempt(lambda ns: ns.touch(Keys.opaque(keys, unchained=True)), 0)


def namespace_of(config: Any, options: ConnectorOptions, *, chunk_bytes: int) -> NamespaceSpec:
    """Of vLLM's offloading configuration: a chunk holds all workers' parts, of one group, whose number is in the key."""
    version = versions.minor(versions.check(versions.VLLM_TIER))
    parallel = config.parallel
    facts = [
        [asdict(group) for group in config.groups],
        asdict(config.cache),
        config.worker_kv_bytes_per_block,
        [parallel.world_size, parallel.pcp_size, parallel.dcp_size],
        config.replicated_layout,
        config.canonical_layout,
    ]
    shape = hashlib.sha256(repr(facts).encode()).hexdigest()[: identity.FINGERPRINT_LETTERS]
    tokens = min(group.tokens_per_block for group in config.groups) * config.cache.blocks_per_chunk
    return identity.namespace_of(
        model=options.model or config.model.name,
        revision=f"{options.revision or _revision(config.model.name)}+vllm{version}",
        dtype=config.model.dtype,
        layout=f"vllm-chunk-{config.kv_cache_layout or 'default'}-{shape}",
        layout_version=LAYOUT_VERSION,
        block_tokens=tokens,
        groups=[GroupSpec("chunk", GroupKind.LINEAR, chunk_bytes)],
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        tenant=options.tenant,
    )


def _revision(model: str) -> str:
    """Of a folder, or of what the hub's cache has under this name."""
    folder = Path(model)
    if not folder.is_dir():
        cached = try_to_load_from_cache(model, "config.json")
        folder = Path(cached).parent if isinstance(cached, str) else folder
    weights = identity.weights_fingerprint(folder) if folder.is_dir() else ""
    if not weights:
        raise ConfigError(
            f'the weights of this model cannot be told apart from others: model={model}; set "revision" of the tier'
        )
    return identity.revision_of(weights, {"config": (folder / "config.json").read_text()})


def _located(namespace: Any, keys: Keys) -> tuple[int, ...]:  # Any: partial of a Namespace call
    found: tuple[int, ...] = namespace.locate(keys).tiers
    return found
