"""SGLang's released package over a real daemon: its factory, its controller, its host pools, and its own file backend as the measure."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstored.connectors.breaker import State
from kvstored.errors import ConfigError
from tests.crash.served import Served, wait_until

from .drive_sglang import (
    PAGE_TOKENS,
    SglangDriver,
    device_pool,
    extra_config,
    host_pool,
    parallel,
    prepared,
    tokens_of,
)
from .driver import is_installed
from .signatures import abstract_beyond, differences, missing, overridden

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not is_installed("sglang"), reason="SGLang is not installed here (docs/engines-sglang.md)"
    ),
]


@pytest.fixture(autouse=True)
def _sglang() -> None:
    prepared()


@pytest.fixture
def drive(folder: Path, served: Served) -> Iterator[Callable[..., SglangDriver]]:
    made: list[SglangDriver] = []

    def make(**options: Any) -> SglangDriver:
        made.append(SglangDriver(folder, served.address, **options))
        made[-1].up()
        return made[-1]

    yield make
    for each in made:
        each.close()


def config_of(address: str, **changed: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    known = {field.name for field in dataclasses.fields(HiCacheStorageConfig)}
    facts = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "model",
    }
    of_config = {name: value for name, value in changed.items() if name in known}
    options = {name: value for name, value in changed.items() if name not in known}
    return HiCacheStorageConfig(
        **{**facts, **of_config}, extra_config=extra_config(address, **options)
    )


@pytest.fixture
def backend(served: Served) -> Iterator[Callable[..., Any]]:
    """Backends made by SGLang's factory, with a host pool of their own, connected."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    made: list[Any] = []

    def make(pool: Any | None = None, **changed: Any) -> Any:
        pool = pool or host_pool(device_pool())
        created = StorageBackendFactory.create_backend(
            "dynamic", config_of(served.address, **changed), pool
        )
        made.append(created)
        created.register_mem_pool_host(pool)
        created.on_host_pools_registered()
        for space in created.spaces.values():
            space.guarded.connected(20)
        return created

    yield make
    for each in made:
        each.close()


def hashes_of(count: int, **extra: str) -> list[str]:
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    seed = storage_namespace_seed(extra.get("extra_key"), extra.get("cache_salt"))
    return list(get_hash_str(tokens_of(list(range(count))), seed, PAGE_TOKENS))


def filled(pool: Any, pages: int, seed: int) -> Any:
    """Indices of pages with random content."""
    import torch

    indices = pool.alloc(pages * max(pool.page_size, 1))
    for index in firsts(pool, indices):
        page = pool.get_dummy_flat_data_page()
        bits = torch.from_numpy(
            np.random.default_rng(seed + index).integers(
                0, 256, page.numel() * page.element_size(), dtype=np.uint8
            )
        )
        pool.set_from_flat_data_page(index, bits.view(page.dtype))
    return indices


def firsts(pool: Any, indices: Any) -> list[int]:
    step = max(pool.page_size, 1)
    return [int(indices[i]) for i in range(0, len(indices), step)]


def pages_of(pool: Any, indices: Any) -> list[bytes]:
    import torch

    pages = [pool.get_data_page(i, flat=True).contiguous() for i in firsts(pool, indices)]
    return [page.view(torch.uint8).numpy().tobytes() for page in pages]


# ---- what we rely on


def test_the_interface_is_the_one_that_the_connector_is_written_for() -> None:
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from kvstored.connectors.sglang import KvstoredHiCache

    storage = hicache_storage.HiCacheStorage
    moved = ["keys", "host_indices", "extra_info"]
    assert not [
        *abstract_beyond(storage, KvstoredHiCache),
        *overridden(storage, KvstoredHiCache),
        *differences(
            storage,
            {
                "register_mem_pool_host": ["mem_pool_host"],
                "register_mem_host_pool_v2": ["host_pool", "host_pool_name"],
                "on_host_pools_registered": [],
                "batch_exists_v2": ["keys", "pool_transfers", "extra_info"],
                "batch_get_v2": ["transfers", "extra_info"],
                "batch_set_v2": ["transfers", "extra_info"],
                "batch_get_v1": moved,
                "batch_set_v1": moved,
                "batch_get": ["keys", "target_locations", "target_sizes"],
                "batch_set": ["keys", "values", "target_locations", "target_sizes"],
                "get": ["key", "target_location", "target_sizes"],
                "set": ["key", "value", "target_location", "target_sizes"],
                "exists": ["key"],
                "batch_exists": ["keys", "extra_info"],
                "clear": [],
                "get_stats": [],
            },
        ),
        *missing(
            hicache_storage.HiCacheStorageConfig,
            [
                *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size"),
                *("dcp_rank", "dcp_size", "is_mla_model", "enable_storage_metrics"),
                *("model_name", "extra_config", "is_storage_writer"),
            ],
        ),
        *missing(hicache_storage.PoolTransfer, ["name", "host_indices", "keys", "hit_policy"]),
        *missing(
            hicache_storage.PoolTransferResult,
            ["kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"],
        ),
        *missing(hicache_storage.HiCacheStorageExtraInfo, ["prefix_keys"]),
        *missing(hicache_storage.PoolHitPolicy, ["ALL_PAGES", "TRAILING_PAGES", "BLOCK_GROUPS"]),
        *missing(hicache_storage.PoolName, ["KV", "MAMBA", "SWA", "INDEXER"]),
        *differences(
            StorageBackendFactory,
            {"create_backend": ["backend_name", "storage_config", "mem_pool_host", "kwargs"]},
        ),
        *differences(
            HostKVCache,
            {
                "get_data_page": ["index", "flat"],
                "set_from_flat_data_page": ["index", "data_page"],
                "get_dummy_flat_data_page": [],
            },
        ),
        *missing(HiCacheController, ["_page_get_zero_copy", "_page_set_zero_copy"]),
    ]


def test_classes_of_pools_that_hold_a_rank_s_own_bytes_are_still_called_so() -> None:
    from sglang.srt.mem_cache.pool_host import mamba, mha

    from kvstored.connectors.sglang_engine import _SHARDED

    known = {**vars(mha), **vars(mamba)}
    assert not [f"{name} is gone" for name in _SHARDED if name not in known]


# ---- through the controller


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first", "layer_first", "page_head"])
@pytest.mark.parametrize("interface_v1", [1, 0])
def test_pages_come_back_bit_equal_through_the_controller(
    drive: Callable[..., SglangDriver], layout: str, interface_v1: int
) -> None:
    driver = drive(layout=layout, interface_v1=interface_v1)
    assert driver.load(range(6)) == 0
    assert driver.store(range(6)) == 6
    assert driver.load(range(6)) == 6
    assert driver.load([0, 1, 2, 77]) == 3, "the longest prefix"


def test_a_second_engine_finds_what_the_first_stored(drive: Callable[..., SglangDriver]) -> None:
    assert drive().store(range(6)) == 6
    assert drive().load(range(6)) == 6


def test_a_backend_is_detached_and_attached_at_run_time(
    drive: Callable[..., SglangDriver], served: Served
) -> None:
    driver = drive()
    assert driver.store(range(4)) == 4
    driver.controller.detach_storage_backend()
    driver.controller.attach_storage_backend(
        "dynamic", PAGE_TOKENS, "model", extra_config(served.address)
    )
    driver.backend = driver.controller.storage_backend
    driver.up()
    assert driver.load(range(4)) == 4


def test_more_pages_than_the_controller_moves_at_once(drive: Callable[..., SglangDriver]) -> None:
    from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

    driver = drive()
    pages = range(STORAGE_BATCH_SIZE + 20)
    assert driver.store(pages) == len(pages)
    assert driver.load(pages) == len(pages)


# ---- identity


@pytest.mark.parametrize("changed", [{"revision": "weights-2"}, {"model_name": "other"}])
def test_other_weights_or_names_never_hit(
    backend: Callable[..., Any], changed: dict[str, str]
) -> None:
    first = backend()
    hashes = hashes_of(4)
    assert all(first.batch_set_v1(hashes, filled(first.mem_pool_host, 4, 1)))
    assert first.batch_exists(hashes) == 4
    other = backend(**changed)
    assert other.batch_exists(hashes) == 0
    assert other.batch_get_v1(hashes, other.mem_pool_host.alloc(4 * PAGE_TOKENS)) == [False] * 4


def test_another_layout_under_the_same_name_is_refused(backend: Callable[..., Any]) -> None:
    first = backend()
    hashes = hashes_of(4)
    assert all(first.batch_set_v1(hashes, filled(first.mem_pool_host, 4, 1)))
    other = backend(host_pool(device_pool(), "layer_first"))
    assert other.spaces["kv"].guarded.state is State.OFF
    assert other.batch_exists(hashes) == 0


def test_salts_and_adapters_are_in_sglang_s_hashes(backend: Callable[..., Any]) -> None:
    kept = backend()
    assert all(kept.batch_set_v1(hashes_of(4), filled(kept.mem_pool_host, 4, 1)))
    assert kept.batch_exists(hashes_of(4)) == 4
    assert kept.batch_exists(hashes_of(4, cache_salt="tenant")) == 0
    assert kept.batch_exists(hashes_of(4, extra_key="adapter")) == 0


def test_each_rank_has_its_own_pages(backend: Callable[..., Any]) -> None:
    hashes = hashes_of(4)
    first, second = backend(tp_rank=0, tp_size=2), backend(tp_rank=1, tp_size=2)
    stored = filled(first.mem_pool_host, 4, 1)
    assert all(first.batch_set_v1(hashes, stored))
    assert second.batch_exists(hashes) == 0
    assert all(second.batch_set_v1(hashes, filled(second.mem_pool_host, 4, 2)))
    into = first.mem_pool_host.alloc(4 * PAGE_TOKENS)
    assert all(first.batch_get_v1(hashes, into))
    assert pages_of(first.mem_pool_host, into) == pages_of(first.mem_pool_host, stored)


def mla_pool() -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(
        size=512,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        2.0,
        0,
        PAGE_TOKENS,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=512,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
    )


def test_mla_pages_are_stored_once_and_read_by_every_rank(
    backend: Callable[..., Any], served: Served
) -> None:
    hashes = hashes_of(4)
    ranks = [backend(mla_pool(), is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    assert [each._config.is_storage_writer for each in ranks] == [True, False]
    assert all(ranks[1].batch_set_v1(hashes, filled(ranks[1].mem_pool_host, 4, 9)))
    assert ranks[1].batch_exists(hashes) == 0, "this rank does not write"
    stored = filled(ranks[0].mem_pool_host, 4, 1)
    assert all(ranks[0].batch_set_v1(hashes, stored))
    into = ranks[1].mem_pool_host.alloc(4 * PAGE_TOKENS)
    assert all(ranks[1].batch_get_v1(hashes, into))
    assert pages_of(ranks[1].mem_pool_host, into) == pages_of(ranks[0].mem_pool_host, stored)
    (space,) = ranks[0].spaces.values()
    assert space.guarded.statistics.totals()["stored_blocks"] == 4


def test_without_anything_that_tells_the_weights_it_does_not_start(
    backend: Callable[..., Any],
) -> None:
    with pytest.raises(ConfigError, match="revision"):
        backend(revision="")


def test_a_folder_of_weights_tells_them_apart(backend: Callable[..., Any], folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"1" * 4096)
    first = backend(model_name=str(folder), revision="")._model.revision
    assert backend(model_name=str(folder), revision="")._model.revision == first
    weights.write_bytes(b"2" * 4096)
    assert backend(model_name=str(folder), revision="")._model.revision != first


def test_an_unknown_option_is_refused_with_those_that_there_are(
    backend: Callable[..., Any],
) -> None:
    with pytest.raises(ConfigError, match=r"adress.*address"):
        backend(adress="x")


# ---- several pools: SGLang's own file backend is the measure


def mamba_pool() -> Any:
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, 16, 4, 8, dtype=torch.float32),
        conv=(torch.zeros(3, 16, 8, 4, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(
        info, 4.0, 0, device_capacity=16, pin_memory=False, layout="page_first_direct"
    )


@pytest.fixture
def both(backend: Callable[..., Any], folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Ours and SGLang's file backend with the same pools: pages of all layers, a window, and states."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName

    pools = {
        PoolName.KV: host_pool(device_pool()),
        PoolName.INDEXER: host_pool(device_pool(1), layers=1),
        PoolName.SWA: host_pool(device_pool(2), layers=2),
        PoolName.MAMBA: mamba_pool(),
    }
    ours = backend(pools[PoolName.KV])
    config = config_of("")
    theirs = HiCacheFile(
        dataclasses.replace(config, extra_config={}), file_path=str(folder / "files")
    )
    theirs.register_mem_pool_host(pools[PoolName.KV])
    for name, pool in pools.items():
        ours.register_mem_host_pool_v2(pool, name)
        theirs.register_mem_host_pool_v2(pool, name)
    for space in ours.spaces.values():
        assert space.guarded.connected(20)
    return ours, theirs, pools


def transfer(name: Any, keys: list[str], indices: Any = None, policy: str = "all_pages") -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

    return PoolTransfer(
        name=name, keys=keys, host_indices=indices, hit_policy=PoolHitPolicy(policy)
    )


HAVE = {
    "everything": (range(8), range(8), range(8), range(8)),
    "a hole in the pages": ([0, 1, 2, 4, 5], range(8), range(8), range(8)),
    "the indexer ends early": (range(8), range(5), range(8), range(8)),
    "a window at the end": (range(8), range(8), [5, 6, 7], [7]),
    "a window in the middle": (range(8), range(8), [2, 3, 7], [3, 7]),
    "states at two places": (range(8), range(8), range(8), [3, 5]),
    "no state": (range(8), range(8), range(8), []),
    "nothing": ([], [], [], []),
}


@pytest.mark.parametrize("have", HAVE)
def test_hits_of_several_pools_are_those_of_sglang_s_own_backend(
    both: tuple[Any, Any, dict[str, Any]], have: str
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    ours, theirs, pools = both
    hashes = hashes_of(8)
    names = (PoolName.KV, PoolName.INDEXER, PoolName.SWA, PoolName.MAMBA)
    for name, pages in zip(names, HAVE[have], strict=True):
        pool = pools[name]
        for page in pages:
            indices = filled(pool, 1, page)
            if name == PoolName.KV:
                assert ours.batch_set_v1([hashes[page]], indices) == [True]
                assert theirs.set(hashes[page], pool.get_data_page(firsts(pool, indices)[0]))
                continue
            one = [transfer(name, [hashes[page]], indices)]
            assert ours.batch_set_v2(one) == theirs.batch_set_v2(one) == {name: [True]}
    asked = [
        transfer(PoolName.INDEXER, hashes),
        transfer(PoolName.SWA, hashes[-2:], policy="trailing_pages"),
        transfer(PoolName.MAMBA, hashes[-1:], policy="trailing_pages"),
    ]
    found, wanted = (each.batch_exists_v2(hashes, asked) for each in (ours, theirs))
    assert found.kv_hit_pages == wanted.kv_hit_pages
    assert found.restorable_prefix_pages == wanted.restorable_prefix_pages
    assert found.extra_pool_hit_pages == wanted.extra_pool_hit_pages
    assert ours.batch_exists(hashes) == theirs.batch_exists(hashes)


def test_every_pool_reads_back_what_it_stored(both: tuple[Any, Any, dict[str, Any]]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    ours, _, pools = both
    hashes = hashes_of(3)
    sides = (PoolName.INDEXER, PoolName.SWA, PoolName.MAMBA)
    stored = {name: filled(pools[name], 3, i) for i, name in enumerate(sides)}
    ours.batch_set_v2([transfer(name, hashes, stored[name]) for name in sides])
    into = {name: filled(pools[name], 3, 99) for name in sides}
    assert ours.batch_get_v2([transfer(name, hashes, into[name]) for name in sides]) == {
        name: [True] * 3 for name in sides
    }
    for name in sides:
        assert pages_of(pools[name], into[name]) == pages_of(pools[name], stored[name])


def test_an_anchor_without_memory_leaves_the_pages_to_the_other_pools(
    backend: Callable[..., Any],
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    anchor = LogicalHostPool(64 * PAGE_TOKENS, PAGE_TOKENS)
    pool = host_pool(device_pool())
    ours = backend(anchor)
    ours.register_mem_host_pool_v2(pool, PoolName.DEEPSEEK_V4_C4)
    assert ours.spaces[PoolName.DEEPSEEK_V4_C4].guarded.connected(20)
    hashes = hashes_of(4)
    indices = anchor.alloc(4 * PAGE_TOKENS)
    assert ours.batch_set_v1(hashes, indices) == ours.batch_get_v1(hashes, indices) == [True] * 4
    asked = [transfer(PoolName.DEEPSEEK_V4_C4, hashes)]
    assert ours.batch_exists_v2(hashes, asked).kv_hit_pages == 0
    ours.batch_set_v2([transfer(PoolName.DEEPSEEK_V4_C4, hashes[:3], filled(pool, 3, 1))])
    assert ours.batch_exists_v2(hashes, asked).kv_hit_pages == 3


# ---- the rest


def test_clear_forgets_and_close_ends_quietly(backend: Callable[..., Any]) -> None:
    ours = backend()
    hashes = hashes_of(4)
    assert all(ours.batch_set_v1(hashes, filled(ours.mem_pool_host, 4, 1)))
    assert ours.clear()
    assert ours.batch_exists(hashes) == 0
    ours.close()
    assert ours.batch_exists(hashes) == 0
    assert ours.batch_set_v1(hashes, filled(ours.mem_pool_host, 4, 1)) == [False] * 4


def test_metrics_are_sglang_s_and_taken_once(backend: Callable[..., Any]) -> None:
    assert backend().get_stats() is None, "SGLang did not ask for them"
    ours = backend(enable_storage_metrics=True)
    hashes = hashes_of(4)
    indices = filled(ours.mem_pool_host, 4, 1)
    assert all(ours.batch_set_v1(hashes, indices))
    assert all(ours.batch_get_v1(hashes, indices))
    taken = ours.get_stats()
    assert (taken.backup_pgs, taken.prefetch_pgs) == ([4], [4])
    assert taken.backup_bandwidth[0] > 0
    assert taken.prefetch_bandwidth[0] > 0
    assert ours.get_stats().backup_pgs == []


def test_nothing_that_sglang_gives_makes_the_data_path_raise(backend: Callable[..., Any]) -> None:
    ours = backend()
    wrong = filled(ours.mem_pool_host, 3, 1)[:-1]
    assert ours.batch_set_v1(hashes_of(3), wrong) == [False] * 3
    assert ours.batch_get_v1(hashes_of(3), None) == [False] * 3
    assert ours.batch_get_v1([], wrong[:0]) == []
    assert ours.batch_exists([]) == 0
    assert ours.get("no hash at all") is None
    assert not ours.set("no hash at all", None)
    assert not ours.exists("no hash at all")
    assert ours.batch_get_v2([transfer("swa", hashes_of(2), wrong)]) == {"swa": [False] * 2}
    assert ours.batch_exists_v2(hashes_of(2), [transfer("swa", hashes_of(2))]).kv_hit_pages == 0


def test_the_ranks_of_a_server_reach_the_connector(served: Served, folder: Path) -> None:
    with parallel(tp_rank=0, tp_size=1):
        driver = SglangDriver(folder, served.address)
        try:
            driver.up()
            (space,) = driver.backend.spaces.values()
            assert space.guarded.spec.model.endswith("tp1pp1cp1dcp1")
            assert space.guarded.spec.block_tokens == PAGE_TOKENS
        finally:
            driver.close()


# ---- what attention selects


def test_what_the_capturer_collected_of_a_request_is_told_to_the_daemon(
    backend: Callable[..., Any],
) -> None:
    """SGLang's own capturer and scheduler method; the requests and their choices are ours."""
    import torch
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor as Processor,
    )
    from sglang.srt.state_capturer.indexer_topk import (
        IndexerTopkCapturer,
        set_global_indexer_capturer,
    )

    assert not [
        *differences(Processor, {"_maybe_collect_indexer_topk": ["req"]}),
        *differences(
            IndexerTopkCapturer,
            {"get_topk": ["req_pool_idx", "seqlen", "req_to_token_pool", "start_len"]},
        ),
    ]
    before = Processor._maybe_collect_indexer_topk
    ours = backend(report_selection=True)
    hashes = hashes_of(4)
    assert all(ours.batch_set_v1(hashes, filled(ours.mem_pool_host, 4, 1)))

    layers, chosen, tokens = 2, 3, 4 * PAGE_TOKENS
    collected = torch.full((tokens, layers, chosen), -1, dtype=torch.int32)
    collected[-1, 0, :] = torch.tensor([0, 3, 2 * PAGE_TOKENS + 5])
    capturer = IndexerTopkCapturer.__new__(IndexerTopkCapturer)
    capturer.host_cache = SimpleNamespace(buffer=collected)
    set_global_indexer_capturer(capturer)
    slots = SimpleNamespace(req_to_token=torch.arange(tokens).reshape(1, -1))
    request = SimpleNamespace(
        origin_input_ids=tokens_of([0, 1, 2]),
        output_ids_through_stop=[*tokens_of([3]), 7],
        extra_key=None,
        cache_salt=None,
        kv=SimpleNamespace(req_pool_idx=0),
        indexer_topk=None,
    )
    touched: list[tuple[bytes, ...]] = []
    space = ours.spaces["kv"]
    attempt = space.guarded.attempt

    def seen(call: Any, otherwise: Any) -> Any:
        class Names:
            def report(self, keys: Any, scores: list[float]) -> int:
                touched.append(
                    tuple(k for k, score in zip(keys.keys, scores, strict=True) if score)
                )
                return int(attempt(lambda ns: ns.report(keys, scores), 0))

        return call(Names())

    space.guarded.attempt = seen
    try:
        processor = SimpleNamespace(req_to_token_pool=slots)
        Processor._maybe_collect_indexer_topk(processor, request)
        wait_until(lambda: touched, what="the daemon is told")
    finally:
        set_global_indexer_capturer(None)
        space.guarded.attempt = attempt
    wanted = space.keys(hashes).keys
    assert touched == [(wanted[0], wanted[2])]
    ours.close()
    assert Processor._maybe_collect_indexer_topk is before, "SGLang is as it was"
