"""SGLang's HiCache keeps its pages in kvstored: `--hicache-storage-backend dynamic` with this module and `KvstoredHiCache`.

Written for SGLang 0.5.23 (`versions`). Its storage threads die of an exception, so nothing of the data path raises: what cannot be had is a miss,
what cannot be stored is told as not stored. Pages are copied before a call returns, since SGLang gives them to others then.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvstored.clock import SystemClock
from kvstored.connectors import versions
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.sglang_engine import (
    follow_selection,
    is_replicated,
    model_of,
    storage_metrics,
)
from kvstored.connectors.sglang_pages import (
    HostPool,
    Indices,
    Place,
    PoolSpace,
    tensor_bytes,
    usable_prefixes,
)
from kvstored.errors import ConfigError

T = TypeVar("T")

log = logging.getLogger("kvstored.connectors")

_OF_SGLANG = frozenset(
    {
        *("backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        "hicache_storage_pass_prefix_keys",
    }
)
"""Of the extra config; the rest is ours."""
_REPORT = "report_selection"
_SAMPLES_MAX = 1024


class KvstoredHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no types
    """One a rank. A host pool gets a namespace when SGLang registers it; raises ConfigError for an option or a release that cannot work."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, object]) -> None:
        self._config = storage_config
        given: dict[str, object] = dict(storage_config.extra_config or {})
        self._in_place = bool(given.get("interface_v1", 0))
        self._options = ConnectorOptions.parsed(
            {name: value for name, value in given.items() if name not in (*_OF_SGLANG, _REPORT)}
        )
        release = versions.check(versions.SGLANG)
        if versions.is_newer(release, versions.SGLANG):
            log.warning("SGLang %s is newer than this connector is tested with", release)
        self._model = model_of(storage_config, self._options, release)
        self._clock = SystemClock()
        self._spaces: dict[str, PoolSpace] = {}
        self._reports = bool(given.get(_REPORT, False))
        self._unfollow: Callable[[], None] | None = None
        self._samples = threading.Lock()
        self._reset_samples()

    # ---- host pools

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        self.mem_pool_host = mem_pool_host
        if not self._is_logical:
            self._open(mem_pool_host, PoolName.KV, in_place=self._in_place)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: PoolName) -> None:
        if host_pool_name != PoolName.KV:
            self._open(host_pool, host_pool_name, in_place=True)

    def on_host_pools_registered(self) -> None:
        """All pools are known: the one that attention selects from is told what it selected, where the user wants that."""
        if self._reports and self._unfollow is None:
            self._unfollow = self._safely("follow", lambda: follow_selection(self._spaces), None)

    @property
    def spaces(self) -> dict[str, PoolSpace]:
        """By the name of the pool, for statistics and reports."""
        return dict(self._spaces)

    # ---- pages of the main pool

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._safely("batch_exists", lambda: self._kv_prefix(keys, extra_info), 0)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Indices,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        def read() -> list[bool]:
            if self._is_logical:
                return [True] * len(keys)
            space = self._spaces[PoolName.KV]
            return self._read(space, keys, host_indices, _prefix(extra_info))

        return self._safely("batch_get_v1", read, [False] * len(keys))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Indices,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        def write() -> list[bool]:
            if self._is_logical:
                return [True] * len(keys)
            space = self._spaces[PoolName.KV]
            return self._write(space, keys, host_indices, _prefix(extra_info))

        return self._safely("batch_set_v1", write, [False] * len(keys))

    # ---- whole pages as flat tensors: without `interface_v1`

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[Any] | None = None,
        target_sizes: object = None,
    ) -> list[Any]:
        def read() -> list[Any]:
            space = self._spaces[PoolName.KV]
            targets = [tensor_bytes(target) for target in target_locations or ()]
            if space.in_place or len(targets) != len(keys):
                return [None] * len(keys)
            came = space.guarded.load(space.keys(keys), targets).whole
            return [
                target if is_there else None
                for target, is_there in zip(target_locations or (), came, strict=True)
            ]

        return self._safely("batch_get", read, [None] * len(keys))

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: object = None
    ) -> Any | None:
        return self.batch_get([key], [target_location] if target_location is not None else None)[0]

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        def write() -> bool:
            space = self._spaces[PoolName.KV]
            if space.in_place or values is None or len(values) != len(keys):
                return False
            if not self._config.is_storage_writer:
                return True
            flats = [value.contiguous() for value in values]
            pages = [tensor_bytes(flat) for flat in flats]
            return all(space.guarded.store(space.keys(keys), pages))

        return self._safely("batch_set", write, otherwise=False)

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        return self.batch_set([key], [value] if value is not None else None)

    # ---- several pools: hybrid models

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        def ask() -> PoolTransferResult:
            pages = len(keys) if self._is_logical else self._kv_prefix(keys, extra_info)
            hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
            restorable = set(range(1, pages + 1))
            for transfer in pool_transfers or ():
                if not restorable:
                    break
                usable = self._usable(transfer, keys[:pages])
                if usable:
                    hits[transfer.name] = usable[-1]
                restorable.intersection_update(usable)
            lengths = sorted(restorable)
            return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

        return self._safely("batch_exists_v2", ask, PoolTransferResult(0, {}, []))

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {each.name: self._transferred(each, self._read, extra_info) for each in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {each.name: self._transferred(each, self._write, extra_info) for each in transfers}

    # ---- the rest

    def clear(self) -> bool:
        """Forgets every block of this engine's namespaces, those of other ranks too; whether the daemon did."""
        cleared = [
            space.guarded.attempt(lambda namespace: namespace.clear() >= 0, otherwise=False)
            for space in self._spaces.values()
        ]
        return all(cleared)

    def get_stats(self) -> Any | None:
        """SGLang's StorageMetrics since the last time, where it wants them."""
        if not self._config.enable_storage_metrics:
            return None
        with self._samples:
            loads, stores = self._loads, self._stores
            self._reset_samples()
        return storage_metrics(loads, stores)

    def close(self) -> None:
        if self._unfollow is not None:
            self._unfollow()
        for space in self._spaces.values():
            space.guarded.close()

    # ---- inside

    @property
    def _is_logical(self) -> bool:
        """An anchor without memory of its own: the other pools hold everything."""
        return self.mem_pool_host.kv_buffer is None

    def _open(self, pool: HostPool, name: PoolName, *, in_place: bool) -> None:
        config = self._config
        is_shared = is_replicated(config, pool, name)
        place = Place(
            tp=0 if is_shared else config.tp_rank,
            tp_size=1 if is_shared else config.tp_size,
            pp=config.pp_rank,
            pp_size=config.pp_size,
            cp=config.attn_cp_rank,
            cp_size=config.attn_cp_size,
            dcp=config.dcp_rank,
            dcp_size=config.dcp_size,
        )
        before = self._spaces.pop(name, None)
        if before is not None:
            before.guarded.close()
        try:
            self._spaces[name] = PoolSpace(
                pool,
                str(name),
                in_place=in_place,
                model=self._model,
                place=place,
                is_shared=is_shared,
                options=self._options,
            )
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"the pages of this host pool can be stored neither in place nor flat: {error};"
                f" try --hicache-mem-layout page_first_direct pool={name} layout={pool.layout}"
            ) from error

    def _kv_prefix(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None) -> int:
        if self._is_logical or not keys:
            return 0
        space = self._spaces[PoolName.KV]
        return space.guarded.lookup(space.keys(keys, _prefix(extra_info))).hit_blocks

    def _usable(self, transfer: PoolTransfer, keys: list[str]) -> list[int]:
        """Lengths of the prefix that this pool can serve."""
        space = self._spaces[transfer.name]
        if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
            return list(
                range(1, len(keys) + 1)
            )  # a second form of the pages: it never bounds the hit
        trailing = 0
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            trailing = max(1, len(transfer.keys or ()))
        return usable_prefixes(space.there(space.keys(keys, unchained=True)), trailing)

    def _transferred(
        self,
        transfer: PoolTransfer,
        move: Callable[[PoolSpace, list[str], Indices, list[str] | None, bool], list[bool]],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        hashes: list[str] = transfer.keys or []

        def moved() -> list[bool]:
            is_chain = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
            prefix = _prefix(extra_info)
            space = self._spaces[transfer.name]
            return move(space, hashes, transfer.host_indices, prefix, not is_chain)

        if not hashes or transfer.host_indices is None:
            return [False] * len(hashes)
        return self._safely(f"pool {transfer.name}", moved, [False] * len(hashes))

    def _read(
        self,
        space: PoolSpace,
        hashes: list[str],
        indices: Indices,
        prefix: list[str] | None,
        unchained: bool = False,
    ) -> list[bool]:
        began_s = self._clock.elapsed_s()
        came = space.load(space.keys(hashes, prefix, unchained=unchained), indices)
        self._sample(self._loads, came, space, began_s)
        return came

    def _write(
        self,
        space: PoolSpace,
        hashes: list[str],
        indices: Indices,
        prefix: list[str] | None,
        unchained: bool = False,
    ) -> list[bool]:
        if space.is_shared and not self._config.is_storage_writer:
            return [True] * len(hashes)  # the one rank that writes for all has the same bytes
        began_s = self._clock.elapsed_s()
        stored = space.store(space.keys(hashes, prefix, unchained=unchained), indices)
        self._sample(self._stores, stored, space, began_s)
        return stored

    def _sample(
        self, samples: list[tuple[int, float]], moved: list[bool], space: PoolSpace, began_s: float
    ) -> None:
        pages = moved.count(True)
        seconds = max(self._clock.elapsed_s() - began_s, 1e-9)
        with self._samples:
            if pages and len(samples) < _SAMPLES_MAX:
                samples.append((pages, pages * space.page_bytes / seconds / (1 << 30)))

    def _reset_samples(self) -> None:
        self._loads: list[tuple[int, float]] = []
        self._stores: list[tuple[int, float]] = []

    def _safely(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception:
            log.exception("SGLang's call failed, a miss: call=%s", what)
            return otherwise


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    return extra_info.prefix_keys if extra_info is not None else None
