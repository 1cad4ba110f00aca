"""LMCache's released package over a real daemon: its plugin loader, storage manager, controllers, allocators and accounts."""

import json
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstored.client import Client, GroupKind, GroupSpec, NamespaceSpec
from kvstored.errors import ConfigError
from tests.crash.served import Served, wait_until

from .drive_lmcache import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    HIDDEN,
    LAYERS,
    L2Driver,
    layout,
    object_key,
    plugin,
    storage_manager,
)
from .driver import content, is_installed
from .signatures import abstract_beyond, differences, missing, overridden

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not is_installed("lmcache"),
        reason="LMCache is not installed here (docs/engines-lmcache.md)",
    ),
]


@pytest.fixture
def drive(folder: Path, served: Served) -> Iterator[Callable[..., L2Driver]]:
    made: list[L2Driver] = []

    def make(**options: object) -> L2Driver:
        made.append(L2Driver(folder, served.address, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def adapter(served: Served) -> Iterator[Any]:
    """An adapter alone, made by LMCache's factory."""
    made = create(served.address)
    yield made
    made.close()


def create(address: str, **changed: object) -> Any:
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    given = {name: value for name, value in plugin(address, **changed).items() if name != "type"}
    return create_l2_adapter(PluginL2AdapterConfig.from_dict(given))


class Memories:
    """Objects of LMCache's own kind, from its own allocator."""

    def __init__(self) -> None:
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator

        self.allocator = HostMemoryAllocator(8 << 20)

    def of(self, chunks: list[int], *, filled: bool = True) -> list[Any]:
        import torch

        made = []
        for chunk in chunks:
            memory = self.allocator.allocate(
                torch.Size([2, LAYERS, CHUNK_TOKENS, HIDDEN]), torch.bfloat16
            )
            if filled:
                np.frombuffer(memory.byte_array, np.uint8)[:] = content(chunk, CHUNK_BYTES)
            made.append(memory)
        return made


def ended(fd: int, ask: Callable[[], Any]) -> Any:
    """What a controller gets: waits for the event, clears it, asks."""
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(20_000), "the event tells the end of the task"
    consume_fd(fd)
    return ask()


def stored(adapter: Any, keys: list[Any], memories: list[Any]) -> Any:
    task = adapter.submit_store_task(keys, memories)
    done = ended(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert list(done) == [task]
    return done[task]


def looked_up(adapter: Any, keys: list[Any]) -> str:
    task = adapter.submit_lookup_and_lock_task(keys, {0: layout()})
    fd = adapter.get_lookup_and_lock_event_fd()
    found = ended(fd, lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None, "it answers once"
    return bits(found, len(keys))


def loaded(adapter: Any, keys: list[Any], memories: list[Any]) -> str:
    task = adapter.submit_load_task(keys, memories)
    found = ended(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    assert adapter.query_load_result(task) is None, "it answers once"
    return bits(found, len(keys))


def bits(bitmap: Any, count: int) -> str:
    return "".join("1" if bitmap.test(i) else "0" for i in range(count))


# ---- what we rely on


def test_the_interface_is_the_one_that_the_adapter_is_written_for() -> None:
    from lmcache import lmcache_native
    from lmcache.v1 import platform
    from lmcache.v1.distributed import api, internal_api
    from lmcache.v1.distributed.l2_adapters import base, config, plugin_l2_adapter
    from lmcache.v1.memory_management import MemoryObj

    from kvstored.connectors.lmcache_l2 import KvstoredL2, KvstoredL2Config

    interface = base.L2AdapterInterface
    assert not [
        *abstract_beyond(interface, KvstoredL2),
        *abstract_beyond(config.L2AdapterConfigBase, KvstoredL2Config),
        *overridden(interface, KvstoredL2),
        *differences(
            interface,
            {
                "get_store_event_fd": [],
                "get_lookup_and_lock_event_fd": [],
                "get_load_event_fd": [],
                "submit_store_task": ["keys", "objects"],
                "pop_completed_store_tasks": [],
                "submit_lookup_and_lock_task": ["keys", "group_layout_descs"],
                "query_lookup_and_lock_result": ["task_id"],
                "submit_unlock": ["keys"],
                "submit_load_task": ["keys", "objects"],
                "query_load_result": ["task_id"],
                "delete": ["keys"],
                "list_l2_keys": ["model_name", "page_size", "cursor"],
                "get_usage": [],
                "close": [],
                "report_status": [],
                "_notify_keys_stored": ["keys", "sizes"],
                "_notify_keys_accessed": ["keys"],
                "_notify_keys_deleted": ["keys", "sizes"],
            },
        ),
        *differences(plugin_l2_adapter, {"_create_plugin_adapter": ["config", "l1_memory_desc"]}),
        *differences(config.L2AdapterConfigBase, {"from_dict": ["d"], "help": []}),
        *differences(internal_api.L2StoreResult, {"__new__": ["success", "bytes_transferred"]}),
        *missing(
            api.ObjectKey,
            ["chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"],
        ),
        *differences(
            api.ObjectKey,
            {"ComputeKVRank": ["world_size", "global_rank", "local_world_size", "local_rank"]},
        ),
        *missing(api.MemoryLayoutDesc, ["shapes", "dtypes"]),
        *missing(api.KeyListPage, ["entries", "next_page_token"]),
        *missing(api.KeyEntry, ["key", "size_bytes"]),
        *missing(lmcache_native.Bitmap, ["set", "test"]),
        *missing(MemoryObj, ["byte_array", "get_size"]),
        *differences(platform, {"create_event_notifier": []}),
    ]


def test_the_number_of_ranks_lies_where_the_namespace_takes_it_from() -> None:
    from lmcache.v1.distributed.api import ObjectKey

    from kvstored.connectors.lmcache_objects import sort_of

    for world_size in (1, 2, 8):
        rank = ObjectKey.ComputeKVRank(world_size, world_size - 1, world_size, world_size - 1)
        assert ObjectKey.WorldSizeFromKVRank(rank) == world_size
        assert sort_of(ObjectKey(b"hash", "model", rank), 10).world_size == world_size


# ---- events, locks, loads


def test_three_events_are_distinct_and_each_tells_its_own(adapter: Any) -> None:
    memories, keys = Memories(), [object_key(i) for i in range(4)]
    fds = (
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    )
    assert len(set(fds)) == 3
    result = stored(adapter, keys, memories.of([0, 1, 2, 3]))
    assert (result.is_successful(), result.bytes_transferred()) == (True, 4 * CHUNK_BYTES)
    assert looked_up(adapter, [*keys, object_key(99)]) == "11110"
    into = memories.of([0] * 5, filled=False)
    assert loaded(adapter, [*keys, object_key(99)], into) == "11110"
    for i, memory in enumerate(into[:4]):
        assert np.array_equal(np.frombuffer(memory.byte_array, np.uint8), content(i, CHUNK_BYTES))
    assert adapter.pop_completed_store_tasks() == {}
    assert adapter.query_load_result(12345) is None
    quiet = select.poll()
    for fd in fds:
        quiet.register(fd, select.POLLIN)
    assert quiet.poll(0) == [], "events that were taken are gone"


def test_what_is_there_already_is_a_success_without_bytes(adapter: Any) -> None:
    memories, keys = Memories(), [object_key(i) for i in range(4)]
    stored(adapter, keys, memories.of([0, 1, 2, 3]))
    again = stored(adapter, keys, memories.of([0, 1, 2, 3]))
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0)
    assert adapter.get_usage().total_bytes_used == 4 * CHUNK_BYTES


def test_a_lookup_locks_until_every_key_is_unlocked(adapter: Any, served: Served) -> None:
    keys = [object_key(i) for i in range(4)]
    stored(adapter, keys, Memories().of([0, 1, 2, 3]))
    assert looked_up(adapter, keys) == looked_up(adapter, keys[:2]) + "11"
    assert served.stat().pins == 2
    adapter.submit_unlock(keys[:2])
    adapter.submit_unlock(keys[2:])
    wait_until(lambda: served.stat().pins == 1, what="the first lock ended")
    adapter.submit_unlock(keys[:2])
    wait_until(lambda: served.stat().pins == 0, what="the second too")
    adapter.submit_unlock(keys)
    assert adapter.report_status()["locked_key_count"] == 0


def test_unlock_succeeds_without_the_daemon(adapter: Any, served: Served) -> None:
    keys = [object_key(i) for i in range(4)]
    stored(adapter, keys, Memories().of([0, 1, 2, 3]))
    looked_up(adapter, keys)
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        adapter.submit_unlock(keys)
        assert adapter.report_status()["locked_key_count"] == 0
    finally:
        os.kill(pid, signal.SIGCONT)


def test_close_waits_for_what_runs_and_answers_what_comes_later(served: Served) -> None:
    adapter = create(served.address)
    keys, memories = [object_key(i) for i in range(4)], Memories().of([0, 1, 2, 3])
    stored(adapter, keys, memories)
    adapter.submit_load_task(keys, memories)
    adapter.close()
    late = adapter.submit_load_task(keys, memories)
    assert bits(adapter.query_load_result(late), 4) == "0000"
    assert not adapter.pop_completed_store_tasks()
    names = {thread.name.partition("_")[0] for thread in threading.enumerate()}
    assert not names & {"kvstored-store", "kvstored-lookup", "kvstored-load", "kvstored-accounts"}


# ---- through LMCache's storage manager


def test_objects_come_back_bit_equal_through_the_controllers(
    drive: Callable[..., L2Driver],
) -> None:
    driver = drive()
    assert driver.load(range(6)) == 0
    assert driver.store(range(6)) == 6
    assert driver.load(range(6)) == 6
    assert driver.load([0, 1, 2, 77, 4]) == 3, "the longest prefix"


def test_a_second_server_finds_what_the_first_stored(drive: Callable[..., L2Driver]) -> None:
    assert drive().store(range(6)) == 6
    assert drive().load(range(6)) == 6


@pytest.mark.parametrize(
    "changed",
    [{"model": "other"}, {"salt": "tenant"}, {"rank": 1}],
    ids=lambda each: next(iter(each)),
)
def test_other_models_salts_and_ranks_never_hit(adapter: Any, changed: dict[str, Any]) -> None:
    stored(adapter, [object_key(i) for i in range(4)], Memories().of([0, 1, 2, 3]))
    others = [object_key(i, **changed) for i in range(4)]
    assert looked_up(adapter, others) == "0000"
    assert loaded(adapter, others, Memories().of([9] * 4)) == "0000"


def test_other_weights_under_the_same_name_never_hit(adapter: Any, served: Served) -> None:
    keys = [object_key(i) for i in range(4)]
    stored(adapter, keys, Memories().of([0, 1, 2, 3]))
    other = create(served.address, revision="weights-2")
    try:
        assert looked_up(other, keys) == "0000"
    finally:
        other.close()


def test_without_anything_that_tells_the_weights_nothing_is_stored(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = create(served.address, revision="")
    try:
        keys = [object_key(i) for i in range(2)]
        assert not stored(adapter, keys, Memories().of([0, 1])).is_successful()
        assert looked_up(adapter, keys) == "00"
    finally:
        adapter.close()
    told = [each.getMessage() for each in caplog.records if "revision" in each.getMessage()]
    assert len(told) == 1, "what to set is told once"


def test_an_unknown_option_is_refused_with_those_that_there_are(served: Served) -> None:
    with pytest.raises(ConfigError, match=r"adress.*address"):
        create(served.address, adress="x")


def test_an_adapter_is_added_and_removed_at_run_time(served: Served) -> None:
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

    manager = storage_manager()
    try:
        given = plugin(served.address)
        config = PluginL2AdapterConfig.from_dict({k: v for k, v in given.items() if k != "type"})
        name = manager.add_l2_adapter(config)
        assert len(manager.l2_adapters()) == 1
        manager.delete_l2_adapter(name)
        assert manager.l2_adapters() == []
    finally:
        manager.close()


def test_lmcache_s_serialisation_lies_on_top(
    drive: Callable[..., L2Driver], served: Served
) -> None:
    """FP8 objects have another size than LMCache's description of them: the adapter knows those that it stored."""
    from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

    manager = storage_manager({**plugin(served.address), "serde": {"type": "fp8"}})
    try:
        keys = [object_key(i) for i in range(4)]
        wanted = {}
        for key, memory in manager.reserve_write(keys, layout()).items():
            memory.tensor.copy_(memory.tensor.float().normal_().to(memory.tensor.dtype))
            wanted[key] = memory.tensor.clone()
        manager.finish_write(keys)
        inner = manager.l2_adapters()[0][1]._inner
        wait_until(lambda: inner.report_status()["stored_object_count"] == 4)
        assert inner.get_usage().total_bytes_used < 4 * CHUNK_BYTES
        wait_until(lambda: manager.delete_l1_keys(keys)[1] == 0)
        handle = manager.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout())])
        )
        assert manager.wait_prefetch_status(handle, 20)
        assert manager.query_prefetch_status(handle).l2_hit_count == 4
        with manager.read_prefetched_results(keys) as memories:
            for key, memory in zip(keys, memories, strict=True):
                assert (memory.tensor.float() - wanted[key].float()).abs().max() < 0.3
        manager.finish_read_prefetched(keys)
    finally:
        manager.close()


# ---- accounts


class Listener:
    def __init__(self) -> None:
        self.stored: list[tuple[Any, int]] = []
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


def test_listeners_and_accounts_hear_of_everything(adapter: Any) -> None:
    listener = Listener()
    adapter.register_listener(listener)
    keys = [object_key(i, salt="a" if i < 2 else "b") for i in range(4)]
    stored(adapter, keys, Memories().of([0, 1, 2, 3]))
    assert listener.stored == [(key, CHUNK_BYTES) for key in keys]
    loaded(adapter, keys[:3], Memories().of([9, 9, 9]))
    assert listener.accessed == keys[:3]
    adapter.delete([keys[0], object_key(55)])
    assert listener.deleted == keys[:1]
    usage = adapter.get_usage()
    assert usage.bytes_by_cache_salt == {"a": CHUNK_BYTES, "b": 2 * CHUNK_BYTES}
    assert looked_up(adapter, keys) == "0111"


def test_keys_are_listed_page_by_page(adapter: Any) -> None:
    stored(adapter, [object_key(i) for i in range(5)], Memories().of(list(range(5))))
    stored(adapter, [object_key(9, model="other")], Memories().of([9]))
    first = adapter.list_l2_keys("model", page_size=3)
    rest = adapter.list_l2_keys("model", page_size=3, cursor=first.next_page_token)
    listed = [entry.key.to_object_key() for entry in (*first.entries, *rest.entries)]
    assert listed == [object_key(i) for i in range(5)]
    assert rest.next_page_token is None
    assert len(adapter.list_l2_keys().entries) == 6
    with pytest.raises(ValueError, match="page_size"):
        adapter.list_l2_keys(page_size=0)


def test_what_the_daemon_evicts_leaves_the_accounts(folder: Path) -> None:
    with Served(folder, dram="16MiB", disk="0B") as served:
        adapter = create(served.address)
        try:
            listener = Listener()
            adapter.register_listener(listener)
            keys = [object_key(i) for i in range(8)]
            stored(adapter, keys, Memories().of(list(range(8))))
            kind = GroupSpec("kv", GroupKind.LINEAR, 64 << 10)
            spec = NamespaceSpec("filler", "1", "bytes", "any", 1, 16, (kind,))
            with Client(served.address) as client:
                filler = client.open_namespace(spec)
                blocks = filler.keys(range(16 * 400))
                filler.put(blocks, np.zeros((400, 64 << 10), dtype=np.uint8))
            left = [
                key for key, bit in zip(keys, looked_up(adapter, keys), strict=True) if bit == "1"
            ]
            assert len(left) < 8, "the daemon needed the room"
            wait_until(lambda: adapter.get_usage().total_bytes_used == len(left) * CHUNK_BYTES)
            assert sorted(k.chunk_hash for k in listener.deleted) == sorted(
                k.chunk_hash for k in keys if k not in left
            )
        finally:
            adapter.close()


def test_what_a_cold_restart_lost_leaves_the_accounts(served: Served) -> None:
    adapter = create(served.address)
    try:
        stored(adapter, [object_key(i) for i in range(8)], Memories().of(list(range(8))))
        served.kill_both()
        served.start()
        wait_until(lambda: adapter.get_usage().total_bytes_used == 0)
    finally:
        adapter.close()


def test_lmcache_evicts_by_itself_from_a_capacity_on(served: Served) -> None:
    given = plugin(served.address, capacity=f"{10 * CHUNK_BYTES}B")
    given["eviction"] = {"eviction_policy": "LRU", "trigger_watermark": 0.5, "eviction_ratio": 0.5}
    manager = storage_manager(given)
    try:
        adapter = manager.l2_adapters()[0][1]
        assert adapter.supports_global_eviction
        keys = [object_key(i) for i in range(8)]
        for key, memory in manager.reserve_write(keys, layout()).items():
            chunk = int.from_bytes(key.chunk_hash, "little")
            np.frombuffer(memory.byte_array, np.uint8)[:] = content(chunk, CHUNK_BYTES)
        manager.finish_write(keys)
        wait_until(lambda: adapter.report_status().get("stores", 0) >= 1)
        wait_until(lambda: 0 < adapter.get_usage().total_bytes_used <= 5 * CHUNK_BYTES)
        left = adapter.report_status()["stored_object_count"]
        other = create(served.address)  # events of the first are the controllers' own
        try:
            assert looked_up(other, keys).count("1") == left
        finally:
            other.close()
    finally:
        manager.close()


def test_the_status_tells_the_daemon_s_state_and_what_was_done(
    adapter: Any, served: Served
) -> None:
    assert adapter.report_status()["is_healthy"], "nothing was asked for yet"
    stored(adapter, [object_key(i) for i in range(4)], Memories().of([0, 1, 2, 3]))
    status = adapter.report_status()
    assert (status["is_healthy"], status["stored_blocks"]) == (True, 4)
    served.end()
    looked_up(adapter, [object_key(0)])
    assert not adapter.report_status()["is_healthy"]
    json.dumps(adapter.report_status())
