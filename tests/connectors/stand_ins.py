"""The types at the border of SGLang and LMCache, as far as our connectors touch them, where the engines themselves are not installed.

Their own packages are tested in tests/engines; this lets what is ours run in every test run.
"""

import dataclasses
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

# ---- SGLang


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclasses.dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclasses.dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclasses.dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None


@dataclasses.dataclass
class HiCacheStorageConfig:
    extra_config: dict[str, object]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str = "model"

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == 0


class HiCacheStorage:
    pass


class HostPool:
    """Pages of `parts` runs each, apart in memory; an index is a token, as in SGLang."""

    layout = "stand-in"
    dtype = "torch.uint8"
    page_size = 16

    def __init__(self, pages: int = 32, parts: int = 2, part_bytes: int = 2048) -> None:
        self.kv_buffer = np.zeros((parts, pages, part_bytes), dtype=np.uint8)
        self._free = list(range(pages))

    def alloc(self, pages: int) -> NDArray[np.int64]:
        taken, self._free = self._free[:pages], self._free[pages:]
        return np.concatenate([np.arange(16) + 16 * page for page in taken])

    def page(self, index: int) -> NDArray[np.uint8]:
        return self.kv_buffer[:, index // 16]

    def get_page_buffer_meta(self, indices: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        runs = [run for index in indices[::16] for run in self.page(int(index))]
        return [run.ctypes.data for run in runs], [run.nbytes for run in runs]


# ---- LMCache


class Bitmap:
    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, i: int) -> None:
        self._bits[i] = True

    def __str__(self) -> str:
        return "".join("1" if bit else "0" for bit in self._bits)


@dataclasses.dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 1 << 24
    object_group_id: int = 0
    cache_salt: str = ""

    def to_encoded_object_key(self) -> "ObjectKey":
        return self


@dataclasses.dataclass(frozen=True)
class KeyEntry:
    key: ObjectKey
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class KeyListPage:
    entries: tuple[KeyEntry, ...]
    next_page_token: str | None


class Shape(tuple[int, ...]):
    __slots__ = ()

    def numel(self) -> int:
        return int(np.prod(self))


@dataclasses.dataclass
class MemoryLayoutDesc:
    shapes: list[Shape]
    dtypes: list[Any]


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> Self:
        return super().__new__(cls, bytes_transferred if success else -1)


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.told: list[tuple[str, list[ObjectKey]]] = []

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.told.append(("stored", keys))

    def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.told.append(("accessed", keys))

    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.told.append(("deleted", keys))


class EventNotifier:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class Memory:
    """An object of LMCache's; `references` as LMCache counts them."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self.content = content
        self.references = 1

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.content)

    def get_size(self) -> int:
        return self.content.nbytes

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1


class RemoteConnector:
    """Chunks of 16 tokens of 256 bytes."""

    def __init__(self, config: Any, metadata: Any) -> None:
        self.meta_shapes, self.meta_dtypes, self.meta_fmt = [(4096,)], ["torch.uint8"], "KV"
        self.full_chunk_size_bytes, self.single_token_size = 4096, 256

    def reshape_partial_chunk(self, memory: Memory, bytes_read: int) -> Memory:
        memory.content = memory.content[:bytes_read]
        return memory


class ConnectorAdapter:
    def __init__(self, schema: str = "") -> None:
        self.schema = schema


@dataclasses.dataclass
class Metadata:
    model_name: str = "model"
    world_size: int = 1
    chunk_size: int = 16


@dataclasses.dataclass
class EngineConfig:
    extra_config: dict[str, object]
    use_layerwise: bool = False
    remote_serde: str | None = "naive"


class LocalMemory:
    """Gives memory and remembers what it gave."""

    def __init__(self) -> None:
        self.given: list[Memory] = []

    def allocate(self, *_: object) -> Memory:
        self.given.append(Memory(np.zeros(4096, dtype=np.uint8)))
        return self.given[-1]


@dataclasses.dataclass(frozen=True)
class CacheEngineKey:
    text: str

    def to_string(self) -> str:
        return self.text


@contextmanager
def installed(modules: dict[str, dict[str, object]], ours: Sequence[str]) -> Iterator[None]:
    """These modules, and `ours` loaded over them, for a while."""
    before = dict(sys.modules)
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(contents)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in {each.split(".")[0] for each in modules} or name in ours:
                del sys.modules[name]


def _no_server() -> None:
    raise ValueError("no server here")


SGLANG: dict[str, dict[str, object]] = {
    "torch": {"arange": np.arange},
    "huggingface_hub": {"try_to_load_from_cache": lambda *_, **__: None},
    "huggingface_hub.errors": {"HFValidationError": ValueError},
    "sglang.srt.runtime_context": {"get_server_args": _no_server},
    "sglang.srt.mem_cache.hicache_storage": {
        each.__name__: each
        for each in (
            *(HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolHitPolicy),
            *(PoolName, PoolTransfer, PoolTransferResult),
        )
    },
}
LMCACHE: dict[str, dict[str, object]] = {
    "lmcache.lmcache_native": {"Bitmap": Bitmap},
    "lmcache.utils": {"CacheEngineKey": CacheEngineKey},
    "lmcache.v1.config": {"LMCacheEngineConfig": EngineConfig},
    "lmcache.v1.metadata": {"LMCacheMetadata": Metadata},
    "lmcache.v1.memory_management": {"MemoryObj": Memory},
    "lmcache.v1.platform": {"create_event_notifier": EventNotifier},
    "lmcache.v1.distributed.api": {
        each.__name__: each for each in (KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey)
    },
    "lmcache.v1.distributed.internal_api": {
        "L1MemoryDesc": object,
        "L2StoreResult": L2StoreResult,
    },
    "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    "lmcache.v1.distributed.l2_adapters.config": {"L2AdapterConfigBase": object},
    "lmcache.v1.storage_backend.connector": {
        "ConnectorAdapter": ConnectorAdapter,
        "ConnectorContext": object,
    },
    "lmcache.v1.storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
    "lmcache.v1.storage_backend.local_cpu_backend": {"LocalCPUBackend": LocalMemory},
}
