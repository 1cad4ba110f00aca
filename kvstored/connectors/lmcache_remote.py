"""LMCache inside an engine keeps its chunks in kvstored: a connector of its `remote_storage_plugins`.

Written for LMCache 0.5.6 (`versions`). LMCache takes an exception or a hang of a connector for its own: neither happens after it was made.
Threads do the waiting; while one still reads or writes a buffer, it holds a reference of LMCache's to it.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from numpy.typing import NDArray

from kvstored.client import GetResult, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec
from kvstored.connectors import versions
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.identity import namespace_of
from kvstored.connectors.lmcache_objects import unchained, weights_of
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.statistics import Stat
from kvstored.errors import ConfigError

T = TypeVar("T")
Bytes = NDArray[np.uint8]

log = logging.getLogger("kvstored.connectors")

LAYOUT_VERSION = 1
_READABLE = 0x80
_KEYS = 1024
_THREADS = 4
_OF_LMCACHE = frozenset({"module_path", "class_name"})


class KvstoredAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache ships no types
    """What LMCache loads by name, for plugins called `kvstored` or `kvstored.anything`."""

    def __init__(self) -> None:
        super().__init__("plugin://kvstored")

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises ConfigError for an option, a release or a mode of LMCache that cannot work."""
        if context.config is None or context.metadata is None:
            raise ConfigError("LMCache gave the connector no configuration or no metadata")
        return KvstoredRemote(
            context.config,
            context.metadata,
            context.local_cpu_backend,
            plugin=context.plugin_name or "kvstored",
        )


class KvstoredRemote(RemoteConnector):  # type: ignore[misc]  # LMCache ships no types
    """Chunks of one engine: a full chunk is a block, a shorter one a partial block."""

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        local_cpu_backend: LocalCPUBackend,
        *,
        plugin: str,
    ) -> None:
        super().__init__(config, metadata)
        self._memory = local_cpu_backend
        self._options = _options_of(config, plugin)
        release = versions.check(versions.LMCACHE)
        if versions.is_newer(release, versions.LMCACHE):
            log.warning("LMCache %s is newer than this connector is tested with", release)
        if config.use_layerwise or config.remote_serde not in (None, "naive"):
            raise ConfigError(
                "kvstored keeps whole chunks as they are: set use_layerwise to false and remote_serde to naive"
                f" use_layerwise={config.use_layerwise} remote_serde={config.remote_serde}"
            )
        self.guarded = GuardedNamespace(
            self._spec(metadata, release), self._options, name="lmcache-remote"
        )
        self._threads = ThreadPoolExecutor(_THREADS, "kvstored-lmcache")

    # ---- lookups

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self.batched_contains([key]) == 1

    async def exists(self, key: CacheEngineKey) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Chunks there before the first that is not."""
        found = 0
        for start in range(0, len(keys), _KEYS):
            part = [key_of(key) for key in keys[start : start + _KEYS]]
            there = self.guarded.attempt(self._located(part), [False])
            run = next((i for i, is_there in enumerate(there) if not is_there), len(there))
            found += run
            if run < len(part):
                break
        return found

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        return await self._in_thread(lambda: self.batched_contains(keys), 0)

    # ---- loads

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        nothing: list[MemoryObj | None] = [None] * len(keys)
        return await self._in_thread(lambda: self._load(keys), nothing, unwanted=_release)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey]
    ) -> list[MemoryObj]:
        """Those before the first that is not there."""
        found = await self.batched_get(keys)
        run = next((i for i, memory in enumerate(found) if memory is None), len(found))
        _release(found[run:])
        return [memory for memory in found[:run] if memory is not None]

    # ---- stores

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: list[MemoryObj]
    ) -> None:
        """Whoever waits may give up: the buffers are held until they were read."""
        for memory in memory_objs:
            memory.ref_count_up()
        await self._in_thread(
            lambda: self._store(keys, memory_objs),
            None,
            ended=lambda: _release(memory_objs),
        )

    # ---- the rest

    def remove_sync(self, key: CacheEngineKey) -> bool:
        part = unchained([key_of(key)])
        wait_s = self._options.store_s
        return self.guarded.attempt(lambda ns: ns.remove(part, timeout_s=wait_s) > 0, False)

    async def close(self) -> None:
        """Buffers of LMCache are not touched afterwards."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.guarded.close()

    # ---- inside: in threads

    def _located(self, part: Sequence[bytes]) -> Callable[[Namespace], list[bool]]:
        def locate(namespace: Namespace) -> list[bool]:
            told = namespace.locate(unchained(list(part)), timeout_s=self._options.lookup_s)
            return [bool(tiers & _READABLE) for tiers in told.tiers]

        return locate

    def _load(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        memories = [
            self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt) for _ in keys
        ]
        wanted = [i for i, memory in enumerate(memories) if memory is not None]
        if not wanted:
            return [None] * len(keys)
        block_keys = unchained([key_of(keys[i]) for i in wanted])
        into = [_bytes_of(memories[i]) for i in wanted]
        wait_s = self._options.load_s

        def read(namespace: Namespace) -> GetResult:
            return namespace.get(
                block_keys,
                out=into,
                verify=self._options.verify,
                load_deadline_s=wait_s,
                timeout_s=wait_s,
            )

        self.guarded.statistics.count(Stat.LOADS)
        try:
            found = self.guarded.attempt(read, None)
            sizes = [0] * len(wanted) if found is None else _sizes(found)
        except BaseException:
            _release(memories)
            raise
        self.guarded.statistics.count(Stat.LOADED_BYTES, sum(sizes))
        for i, size in zip(wanted, sizes, strict=True):
            memories[i] = self._fitted(memories[i], size)
        return memories

    def _fitted(self, memory: MemoryObj, size_bytes: int) -> MemoryObj | None:
        """With the shape of what was read; a block of a size that is no chunk is none."""
        if 0 < size_bytes <= self.full_chunk_size_bytes and not size_bytes % self.single_token_size:
            return self.reshape_partial_chunk(memory, size_bytes)
        memory.ref_count_down()
        return None

    def _store(self, keys: Sequence[CacheEngineKey], memories: Sequence[MemoryObj]) -> None:
        whole: list[int] = []
        for i, memory in enumerate(memories):
            size = memory.get_size()
            if size == self.full_chunk_size_bytes:
                whole.append(i)
            elif size and not size % self.single_token_size and size < self.full_chunk_size_bytes:
                partial_key = Keys.opaque(
                    [key_of(keys[i])],
                    unchained=True,
                    last_valid_tokens=size // self.single_token_size,
                )
                self.guarded.store(partial_key, [_bytes_of(memory)])
        if whole:
            block_keys = unchained([key_of(keys[i]) for i in whole])
            self.guarded.store(block_keys, [_bytes_of(memories[i]) for i in whole])

    async def _in_thread(
        self,
        call: Callable[[], T],
        otherwise: T,
        *,
        unwanted: Callable[[T], object] | None = None,
        ended: Callable[[], object] | None = None,
    ) -> T:
        """`unwanted` gets what nobody waits for any more; `ended` is called once the thread is done with it, whatever became of it."""
        try:
            running: Future[T] = self._threads.submit(call)
        except RuntimeError:  # closed
            if ended is not None:
                ended()
            return otherwise
        if ended is not None:
            running.add_done_callback(lambda _: ended())
        try:
            return await asyncio.shield(asyncio.wrap_future(running))
        except asyncio.CancelledError:
            if running.cancelled():  # by `close`, not by who waits
                return otherwise
            if unwanted is not None:
                running.add_done_callback(partial(_give_back, unwanted))
            raise
        except Exception:
            log.exception("LMCache's call failed, a miss")
            return otherwise

    def _spec(self, metadata: LMCacheMetadata, release: str) -> NamespaceSpec:
        model = self._options.model or metadata.model_name
        shapes = [tuple(shape) for shape in self.meta_shapes]
        dtypes = ",".join(str(dtype).removeprefix("torch.") for dtype in self.meta_dtypes)
        return namespace_of(
            model=f"{model}#lmcache-{metadata.world_size}",
            revision=f"{weights_of(model, self._options)}+lmcache{release}",
            dtype=dtypes,
            layout=f"lmcache {self.meta_fmt} {shapes}",
            layout_version=LAYOUT_VERSION,
            block_tokens=metadata.chunk_size,
            groups=[GroupSpec("chunk", GroupKind.LINEAR, self.full_chunk_size_bytes)],
            tp=metadata.world_size,
            tenant=self._options.tenant,
        )

    # The last of all: its name hides the type from what follows.
    async def list(self) -> list[str]:
        """The daemon knows hashes of keys only."""
        return []


def key_of(key: CacheEngineKey) -> bytes:
    """Its text has model, rank, hash, dtype and tags; of chunks only, since layers are refused."""
    return hashlib.sha256(b"lmcache chunk 1" + key.to_string().encode()).digest()


def _options_of(config: LMCacheEngineConfig, plugin: str) -> ConnectorOptions:
    """`remote_storage_plugin.NAME.OPTION` of the extra config."""
    prefix = f"remote_storage_plugin.{plugin}."
    given = {
        name.removeprefix(prefix): value
        for name, value in (config.extra_config or {}).items()
        if name.startswith(prefix)
    }
    return ConnectorOptions.parsed(
        {name: value for name, value in given.items() if name not in _OF_LMCACHE}
    )


def _bytes_of(memory: MemoryObj) -> Bytes:
    return np.frombuffer(memory.byte_array, dtype=np.uint8)


def _sizes(found: GetResult) -> list[int]:
    """Of what was read, 0 for a miss."""
    return [0 if block is None or block[0] is None else block[0].size for block in found.blocks]


def _release(memories: Sequence[MemoryObj | None]) -> None:
    for memory in memories:
        if memory is not None:
            memory.ref_count_down()


def _give_back(unwanted: Callable[[T], object], ended: "Future[T]") -> None:
    if not ended.cancelled() and ended.exception() is None:
        unwanted(ended.result())
