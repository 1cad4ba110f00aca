"""LMCache's StorageManager (its MP server without the network) and its in-process RemoteBackend, with real allocators on the CPU."""

import argparse
import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvstored.connectors.guarded import GuardedNamespace

from .driver import LIMITS, Driver, content

CHUNK_TOKENS = 16
LAYERS, HIDDEN = 2, 32
CHUNK_BYTES = 2 * LAYERS * CHUNK_TOKENS * HIDDEN * 2
WAIT_S = 30.0


def plugin(address: str, **changed: object) -> dict[str, object]:
    return {
        "type": "plugin",
        "module_path": "kvstored.connectors.lmcache_l2",
        "class_name": "KvstoredL2",
        "config_class_name": "KvstoredL2Config",
        "adapter_params": {"address": address, **LIMITS, **changed},
    }


def storage_manager(*adapters: dict[str, object]) -> Any:
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.distributed.storage_manager import StorageManager

    logging.getLogger("lmcache").setLevel(logging.CRITICAL)
    given = argparse.Namespace(l2_adapter=[json.dumps(each) for each in adapters])
    memory = L1MemoryManagerConfig(size_in_bytes=32 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig("noop"),
            l2_adapter_config=parse_args_to_l2_adapters_config(given),
        )
    )


def layout() -> Any:
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc([torch.Size([2, LAYERS, CHUNK_TOKENS, HIDDEN])], [torch.bfloat16])


def object_key(chunk: int, *, model: str = "model", salt: str = "", rank: int = 0) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    kv_rank = ObjectKey.ComputeKVRank(2, rank, 2, rank)
    return ObjectKey(chunk.to_bytes(32, "little"), model, kv_rank, cache_salt=salt)


def until(is_so: Any, wait_s: float = WAIT_S) -> None:
    ends_s = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < ends_s, "not so in time"
        time.sleep(0.005)


class L2Driver(Driver):
    """Through LMCache's store and prefetch controllers."""

    def __init__(self, folder: Path, address: str, **options: object) -> None:
        self.manager = storage_manager(plugin(address, **options))
        self.adapter = self.manager.l2_adapters()[0][1]

    def store(self, chunks: Iterable[int]) -> int:
        keys = [object_key(chunk) for chunk in chunks]
        before = self._told
        for key, memory in self.manager.reserve_write(keys, layout()).items():
            number = int.from_bytes(key.chunk_hash, "little")
            np.frombuffer(memory.byte_array, np.uint8)[:] = content(number, CHUNK_BYTES)
        self.manager.finish_write(keys)
        until(lambda: self._told > before)
        until(lambda: not self.adapter._stores._running)
        stored = sum(self.adapter._ledger.size_of(_block(key)) is not None for key in keys)
        self._forget(keys)
        return stored

    def load(self, chunks: Iterable[int]) -> int:
        from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

        keys = [object_key(chunk) for chunk in chunks]
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout())])
        handle = self.manager.submit_prefetch_task(spec)
        assert self.manager.wait_prefetch_status(handle, WAIT_S), "a prefetch ends"
        hits = self.manager.query_prefetch_status(handle).hit_cells[0].popcount()
        if hits:
            with self.manager.read_prefetched_results(keys[:hits]) as memories:
                assert memories is not None
                for key, memory in zip(keys, memories, strict=False):
                    number = int.from_bytes(key.chunk_hash, "little")
                    loaded = np.frombuffer(memory.byte_array, np.uint8)
                    assert np.array_equal(loaded, content(number, CHUNK_BYTES)), f"chunk {number}"
            self.manager.finish_read_prefetched(keys[:hits])
            self._forget(keys[:hits])
        return int(hits)

    def _forget(self, keys: list[Any]) -> None:
        """In LMCache's own memory, where locks end a moment after their task."""
        until(lambda: self.manager.delete_l1_keys(keys)[1] == 0)

    def guarded(self) -> list[GuardedNamespace]:
        return list(self.adapter._spaces.all().values())

    def close(self) -> None:
        alive = [
            self.manager._store_controller._thread.is_alive(),
            self.manager._prefetch_controller.report_status()["is_healthy"],
        ]
        self.manager.close()
        assert all(alive), "no controller of LMCache died"

    @property
    def _told(self) -> int:
        return int(self.adapter._stores._next)


class RemoteDriver(Driver):
    """Through LMCache's RemoteBackend, which loads the connector by its plugin's name."""

    def __init__(self, folder: Path, address: str, **options: object) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        logging.getLogger("lmcache").setLevel(logging.CRITICAL)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=0.05,
            remote_serde="naive",
            remote_storage_plugins=["kvstored"],
            extra_config=remote_extra_config(address, **options),
        )
        metadata = LMCacheMetadata(
            model_name="model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, CHUNK_TOKENS, 1, HIDDEN),
            chunk_size=CHUNK_TOKENS,
        )
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.backend = RemoteBackend(
            config, metadata, self.loop, self.memory, dst_device="cpu", plugin_name="kvstored"
        )
        self.shape = torch.Size([2, LAYERS, CHUNK_TOKENS, HIDDEN])

    @property
    def connector(self) -> Any:
        return self.backend.connection.getWrappedConnector()

    def key(self, chunk: int, **tags: str) -> Any:
        import torch
        from lmcache.utils import CacheEngineKey

        configs = {f"lmcache.tag.{name}": value for name, value in tags.items()}
        return CacheEngineKey("model", 1, 0, 0x1234_0000 + chunk, torch.bfloat16, configs)

    def chunk(self, number: int, tokens: int = CHUNK_TOKENS) -> Any:
        """A memory object with a chunk's bytes; the caller's reference."""
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        shape = torch.Size([2, LAYERS, tokens, HIDDEN])
        memory = self.memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        assert memory is not None, "LMCache has memory: none was leaked"
        size = CHUNK_BYTES * tokens // CHUNK_TOKENS
        np.frombuffer(memory.byte_array, np.uint8)[:] = content(number, size)
        return memory

    def store(self, chunks: Iterable[int]) -> int:
        numbers = list(chunks)
        before = sum(each.statistics.totals()["stored_blocks"] for each in self.guarded())
        done = threading.Event()
        left = [len(numbers)]

        def told(_: object) -> None:
            left[0] -= 1
            if not left[0]:
                done.set()

        memories = [self.chunk(number) for number in numbers]
        keys = [self.key(number) for number in numbers]
        self.backend.batched_submit_put_task(keys, memories, on_complete_callback=told)
        assert done.wait(WAIT_S), "a put ends"
        for i, memory in enumerate(memories):
            # As LMCache does with freed memory: another chunk's bytes come to lie there.
            np.frombuffer(memory.byte_array, np.uint8)[:] = content(1_000_000 + i, CHUNK_BYTES)
            memory.ref_count_down()
        after = sum(each.statistics.totals()["stored_blocks"] for each in self.guarded())
        return int(after - before)

    def load(self, chunks: Iterable[int]) -> int:
        numbers = list(chunks)
        keys = [self.key(number) for number in numbers]
        hits = self.backend.batched_contains(keys)
        if not hits:
            return 0
        loaded = 0
        for number, memory in zip(
            numbers, self.backend.batched_get_blocking(keys[:hits]), strict=False
        ):
            if memory is None:
                break
            found = np.frombuffer(memory.byte_array, np.uint8)
            assert np.array_equal(found, content(number, CHUNK_BYTES)), f"chunk {number}"
            memory.ref_count_down()
            loaded += 1
        return loaded

    def guarded(self) -> list[GuardedNamespace]:
        return [self.connector.guarded]

    def close(self) -> None:
        self.backend.close()
        assert self.thread.is_alive(), "LMCache's event loop lives"
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
        self.memory.memory_allocator.close()


def remote_extra_config(address: str, **changed: object) -> dict[str, object]:
    options = {
        "module_path": "kvstored.connectors.lmcache_remote",
        "class_name": "KvstoredAdapter",
        "address": address,
        **LIMITS,
        **changed,
    }
    return {f"remote_storage_plugin.kvstored.{name}": value for name, value in options.items()}


def _block(key: Any) -> bytes:
    from kvstored.connectors.lmcache_objects import key_of

    return key_of(key)
