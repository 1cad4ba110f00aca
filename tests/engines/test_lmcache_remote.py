"""LMCache's in-process RemoteBackend over a real daemon, with the connector loaded by the name of its plugin."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstored.errors import ConfigError
from tests.crash.served import Served, wait_until

from .drive_lmcache import CHUNK_BYTES, CHUNK_TOKENS, RemoteDriver, remote_extra_config
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
def drive(folder: Path, served: Served) -> Iterator[Callable[..., RemoteDriver]]:
    made: list[RemoteDriver] = []

    def make(**options: object) -> RemoteDriver:
        made.append(RemoteDriver(folder, served.address, **options))
        made[-1].up()
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_interface_is_the_one_that_the_connector_is_written_for() -> None:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend import connector
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    from kvstored.connectors.lmcache_remote import KvstoredAdapter, KvstoredRemote

    lookup = ["lookup_id", "keys"]
    assert not [
        *abstract_beyond(RemoteConnector, KvstoredRemote),
        *abstract_beyond(connector.ConnectorAdapter, KvstoredAdapter),
        *overridden(RemoteConnector, KvstoredRemote),
        *overridden(connector.ConnectorAdapter, KvstoredAdapter),
        *differences(
            RemoteConnector,
            {
                "__init__": ["config", "metadata"],
                "exists": ["key"],
                "exists_sync": ["key"],
                "get": ["key"],
                "put": ["key", "memory_obj"],
                "batched_get": ["keys"],
                "batched_put": ["keys", "memory_objs"],
                "batched_contains": ["keys"],
                "batched_async_contains": [*lookup, "pin"],
                "batched_get_non_blocking": lookup,
                "reshape_partial_chunk": ["memory_obj", "bytes_read"],
                "remove_sync": ["key"],
                "list": [],
                "close": [],
            },
        ),
        *differences(connector.ConnectorAdapter, {"can_parse": ["url"]}),
        *differences(
            connector.ConnectorContext,
            {
                "__init__": [
                    *("url", "loop", "local_cpu_backend", "config", "metadata", "plugin_name")
                ]
            },
        ),
        *missing(MemoryObj, ["byte_array", "get_size", "ref_count_up", "ref_count_down"]),
        *missing(LMCacheMetadata, ["model_name", "world_size", "chunk_size", "get_shapes"]),
        *missing(CacheEngineKey, ["to_string", "tags"]),
        *missing(LocalCPUBackend, ["allocate"]),
    ]


def test_chunks_come_back_bit_equal(drive: Callable[..., RemoteDriver]) -> None:
    driver = drive()
    assert driver.load(range(6)) == 0
    assert driver.store(range(6)) == 6
    assert driver.load(range(6)) == 6
    assert driver.load([0, 1, 2, 77, 4]) == 3, "the longest prefix"
    assert drive().load(range(6)) == 6, "another engine finds them"


def test_a_short_last_chunk_keeps_its_length(drive: Callable[..., RemoteDriver]) -> None:
    driver = drive()
    tokens = CHUNK_TOKENS - 3
    memory, key = driver.chunk(5, tokens), driver.key(5)
    driver.backend.batched_submit_put_task([key], [memory])
    wait_until(lambda: driver.backend.contains(key))
    memory.ref_count_down()
    found = driver.backend.get_blocking(key)
    size = CHUNK_BYTES * tokens // CHUNK_TOKENS
    assert found.meta.shape[2] == tokens
    assert np.array_equal(np.frombuffer(found.byte_array, np.uint8), content(5, size))
    found.ref_count_down()


def test_tags_and_other_weights_never_hit(drive: Callable[..., RemoteDriver]) -> None:
    driver = drive()
    assert driver.store(range(2)) == 2
    assert driver.backend.contains(driver.key(0))
    assert not driver.backend.contains(driver.key(0, tenant="other"))
    assert drive(revision="weights-2").load(range(2)) == 0


def test_one_key_is_removed(drive: Callable[..., RemoteDriver]) -> None:
    driver = drive()
    assert driver.store(range(3)) == 3
    assert driver.backend.remove(driver.key(1))
    assert not driver.backend.remove(driver.key(1))
    assert [driver.backend.contains(driver.key(i)) for i in range(3)] == [True, False, True]


def test_the_scheduler_s_asynchronous_lookups(drive: Callable[..., RemoteDriver]) -> None:
    driver = drive()
    assert driver.store(range(3)) == 3
    keys = [driver.key(i) for i in (0, 1, 7, 2)]

    def run(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, driver.loop).result(20)

    assert run(driver.backend.batched_async_contains("lookup", keys)) == 2
    found = run(driver.backend.batched_get_non_blocking("lookup", keys))
    assert [np.frombuffer(each.byte_array, np.uint8)[0] for each in found] == [
        content(i, CHUNK_BYTES)[0] for i in (0, 1)
    ]
    for each in found:
        each.ref_count_down()
    assert run(driver.connector.list()) == []


def in_use(driver: RemoteDriver) -> int:
    """Bytes of LMCache's memory that somebody holds."""
    allocator = driver.memory.memory_allocator.pin_allocator
    return int(allocator.address_manager.total_allocated_size)


def test_no_memory_of_lmcache_s_is_kept(drive: Callable[..., RemoteDriver]) -> None:
    driver = drive()
    before = in_use(driver)
    assert driver.store(range(4)) == 4
    assert driver.load(range(4)) == 4
    assert driver.load([0, 1, 99]) == 2
    assert driver.backend.batched_get_blocking([driver.key(98), driver.key(99)]) == [None, None]
    wait_until(lambda: in_use(driver) == before, 5)


def test_a_get_that_nobody_waits_for_any_more_gives_its_memory_back(
    drive: Callable[..., RemoteDriver], served: Served
) -> None:
    driver = drive()
    assert driver.store(range(4)) == 4
    before = in_use(driver)
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        future = asyncio.run_coroutine_threadsafe(
            driver.connector.batched_get([driver.key(i) for i in range(4, 8)]), driver.loop
        )
        wait_until(lambda: in_use(driver) > before, 5)
        future.cancel()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: in_use(driver) == before, 10)


@pytest.mark.parametrize("changed", [{"use_layerwise": True}, {"remote_serde": "cachegen"}])
def test_modes_that_cannot_work_are_refused_with_what_to_set(
    served: Served, drive: Callable[..., RemoteDriver], changed: dict[str, Any]
) -> None:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.storage_backend.connector import CreateConnector

    driver = drive()
    config = LMCacheEngineConfig.from_defaults(
        **{
            "chunk_size": CHUNK_TOKENS,
            "remote_serde": "naive",
            "remote_storage_plugins": ["kvstored"],
            "extra_config": remote_extra_config(served.address),
            **changed,
        }
    )
    with pytest.raises(ConfigError, match="use_layerwise"):
        CreateConnector(
            "plugin://kvstored",
            driver.loop,
            driver.memory,
            config,
            driver.backend.metadata,
            plugin_name="kvstored",
        )
