"""SGLang's HiCacheController with real host pools on the CPU: its storage threads do what they do in a server, only no GPU is behind them."""

import contextlib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvstored.connectors.guarded import GuardedNamespace

from .driver import LIMITS, Driver, content

PAGE_TOKENS = 16
LAYERS, HEADS, HEAD_DIM = 3, 2, 8
PAGES = 320
WAIT_S = 30.0


def prepared() -> None:
    """Imports SGLang where torchvision's compiled operators do not load: they are for CUDA, and nothing here calls them."""
    import torch

    with contextlib.suppress(RuntimeError):  # there already
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # pools here are a few MB, machines may be full
    logging.getLogger("sglang").setLevel(logging.CRITICAL)


_kept: list[Any] = []


def device_pool(layers: int = LAYERS) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=PAGES * PAGE_TOKENS // 2,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def host_pool(
    device: Any, layout: str = "page_first_direct", allocator: str = "shm", layers: int = LAYERS
) -> Any:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        2.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        allocator_type=allocator,
        device_capacity_tokens=PAGES * PAGE_TOKENS // 2,
        start_layer=0,
        end_layer=layers,
    )


@contextlib.contextmanager
def parallel(**changed: int) -> Any:
    """One rank, as if the server had published it."""
    from sglang.srt.runtime_context import get_parallel

    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    with get_parallel().override(**{**ranks, "attn_dcp_size": 1, "attn_dcp_rank": 0, **changed}):
        yield


def group(folder: Path) -> Any:
    """The process group of a single rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    return dist.group.WORLD


def extra_config(address: str, **changed: object) -> dict[str, object]:
    return {
        "backend_name": "kvstored",
        "module_path": "kvstored.connectors.sglang",
        "class_name": "KvstoredHiCache",
        "interface_v1": 1,
        "allocator": "shm",
        "address": address,
        **LIMITS,
        **changed,
    }


class Allocator:
    """What the controller wants of a token allocator."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def get_kvcache(self) -> Any:
        return self.pool


class SglangDriver(Driver):
    def __init__(
        self,
        folder: Path,
        address: str,
        *,
        layout: str = "page_first_direct",
        model: str = "model",
        **options: object,
    ) -> None:
        prepared()
        from sglang.srt.managers.cache_controller import HiCacheController

        device = device_pool()
        self.host = host_pool(device, layout)
        self._ranks = parallel()
        self._ranks.__enter__()
        self.controller = HiCacheController(
            Allocator(device),
            self.host,
            PAGE_TOKENS,
            group(folder),
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE_TOKENS,
            model_name=model,
            storage_backend_extra_config=extra_config(address, **options),
        )
        self.backend = self.controller.storage_backend

    def store(self, chunks: Iterable[int]) -> int:
        numbers = list(chunks)
        tokens = tokens_of(numbers)
        indices = self.host.alloc(len(tokens))
        for i, number in enumerate(numbers):
            self._write(int(indices[i * PAGE_TOKENS]), number)
        self.controller.write_storage(indices, tokens, self._hashes(tokens))
        done = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        self.host.free(indices)
        # As SGLang does with freed pages: somebody else's bytes come to lie there.
        for i in range(len(numbers)):
            self._write(int(indices[i * PAGE_TOKENS]), 1_000_000 + i)
        return int(done.completed_tokens) // PAGE_TOKENS

    def load(self, chunks: Iterable[int]) -> int:
        numbers = list(chunks)
        self.controller.prefetch("request", tokens_of(numbers))
        found = self.controller.prefetch_hit_queue.get(timeout=WAIT_S)
        if not found.storage_hit_count:
            return 0
        found.host_indices = self.host.alloc(found.storage_hit_count)
        self.controller.prefetch_buffer.put(found)
        tokens = 0
        while True:
            told = self.controller.ack_prefetch_queue.get(timeout=WAIT_S)
            tokens = told.completed_tokens if told.completed_tokens is not None else tokens
            if told.completed_req:
                break
        for i, number in enumerate(numbers[: tokens // PAGE_TOKENS]):
            index = int(found.host_indices[i * PAGE_TOKENS])
            assert np.array_equal(self._read(index), self._content(number)), f"chunk {number}"
        self.host.free(found.host_indices)
        return tokens // PAGE_TOKENS

    def guarded(self) -> list[GuardedNamespace]:
        return [space.guarded for space in self.backend.spaces.values()]

    def close(self) -> None:
        threads = (
            self.controller.prefetch_thread,
            self.controller.prefetch_io_aux_thread,
            self.controller.prefetch_sync_thread,
            self.controller.backup_thread,
        )
        alive = [thread.is_alive() for thread in threads]
        self.controller.detach_storage_backend()
        self._ranks.__exit__(None, None, None)
        assert all(alive), "no storage thread of SGLang died"

    # ---- pages

    def _content(self, number: int) -> Any:
        return content(number, 2 * LAYERS * PAGE_TOKENS * HEADS * HEAD_DIM * 2)

    def _write(self, index: int, number: int) -> None:
        import torch

        page = torch.from_numpy(self._content(number)).view(torch.bfloat16)
        self.host.set_from_flat_data_page(index, page)

    def _read(self, index: int) -> Any:
        import torch

        return self.host.get_data_page(index, flat=True).view(torch.uint8).numpy()

    def _hashes(self, tokens: list[int]) -> list[str]:
        from sglang.srt.mem_cache.utils import get_hash_str

        return list(get_hash_str(tokens, None, PAGE_TOKENS))


def tokens_of(chunks: list[int]) -> list[int]:
    return [chunk * PAGE_TOKENS + i for chunk in chunks for i in range(PAGE_TOKENS)]
