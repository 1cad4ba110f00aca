"""LMCache's connectors over a real daemon, with LMCache's border types only; tests/engines has LMCache itself."""

import asyncio
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstored.connectors import versions
from kvstored.connectors.lmcache_books import Ledger, Lock, Locks, Stored
from kvstored.connectors.lmcache_objects import key_of, sort_of
from kvstored.connectors.lmcache_tasks import TASKS_MAX, Tasks
from kvstored.errors import ConfigError
from tests.crash.served import Served, wait_until

from . import stand_ins
from .stand_ins import CacheEngineKey, EngineConfig, EventNotifier, LocalMemory, Memory, ObjectKey

OURS = ("kvstored.connectors.lmcache_l2", "kvstored.connectors.lmcache_remote")
SIZE = 4096
LIMITS = dict.fromkeys(("lookup", "probe", "load", "store"), "500ms")
SLACK_S = 4.0
"""Of a busy machine; what hangs takes longer."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """One daemon for all: each test has weights of its own, and none ends it."""
    with (
        tempfile.TemporaryDirectory(prefix="kvs") as name,
        Served(Path(name), dram="64MiB", disk="0B") as daemon,
    ):
        yield daemon


@pytest.fixture
def served(shared: Served) -> Served:
    return shared


@pytest.fixture
def options(request: pytest.FixtureRequest, folder: Path) -> dict[str, str]:
    """Of a connector: of the daemon where the test has one, else of one that is not there (yet)."""
    has_daemon = "served" in request.fixturenames
    address = request.getfixturevalue("shared").address if has_daemon else f"unix://{folder}/s"
    return {"address": address, **LIMITS, "revision": request.node.name[-60:]}


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if versions.installed(versions.LMCACHE):
        pytest.skip("LMCache itself is here: tests/engines")
    monkeypatch.setattr(versions, "installed", lambda _: "0.5.6")
    with stand_ins.installed(stand_ins.LMCACHE, OURS):
        yield


# ---- keys


def test_an_object_s_key_holds_every_field() -> None:
    base = {"chunk_hash": b"hash", "model_name": "m", "kv_rank": 1 << 24, "object_group_id": 0}
    keys = [
        ObjectKey(**base),
        ObjectKey(**{**base, "chunk_hash": b"hash2"}),
        ObjectKey(**{**base, "chunk_hash": b"has", "model_name": "hm"}),
        ObjectKey(**{**base, "kv_rank": (1 << 24) + 1}),
        ObjectKey(**{**base, "object_group_id": 1}),
        ObjectKey(**{**base, "cache_salt": "s"}),
        ObjectKey(**{**base, "model_name": "ms"}),
    ]
    assert len({key_of(key) for key in keys}) == len(keys)
    # Golden: a change of the layout would lose what is stored without a word.
    assert key_of(keys[0]).hex() == (
        "24467a368dba2ea2b936bcb8cf157a9b55d2417aa7b76ac7849691de617ca47a"
    )


def test_objects_of_one_size_share_a_namespace_whatever_their_rank() -> None:
    first, second = (ObjectKey(b"h", kv_rank=(2 << 24) | (rank << 16)) for rank in range(2))
    assert sort_of(first, 10) == sort_of(second, 10) != sort_of(first, 11)
    assert sort_of(first, 10).world_size == 2


# ---- books


def test_the_ledger_forgets_the_oldest_and_tells_of_it() -> None:
    ledger: Ledger[str] = Ledger(objects_max=2)
    new, forgotten = ledger.add((bytes([i]), Stored(str(i), i, b"ns")) for i in range(3))
    assert ([each.key for each in new], [each.key for each in forgotten]) == (
        ["0", "1", "2"],
        ["0"],
    )
    assert ledger.add([(bytes([2]), Stored("2", 2, b"ns"))]) == ([], [])
    assert ledger.size_of(bytes([2])) == 2
    assert ledger.size_of(bytes([0])) is None
    assert [each.key for each in ledger.remove([bytes([1]), bytes([9])])] == ["1"]
    assert len(ledger) == 1


def test_a_lock_ends_with_its_last_key_and_an_unlock_without_a_lock_is_nothing() -> None:
    locks = Locks()
    first, second = Lock(b"ns", 1, 2), Lock(b"ns", 2, 1)
    assert locks.add([b"a", b"b"], first) == locks.add([b"a"], second) == []
    assert locks.unlock([b"a"]) == []
    assert locks.unlock([b"a", b"x"]) == [second]
    assert locks.unlock([b"b"]) == [first]
    assert locks.unlock([b"b"]) == []
    assert len(locks) == 0


# ---- tasks and their events


def is_told(fd: int, wait_s: float = 10.0) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(wait_s * 1000):
        return False
    os.eventfd_read(fd)
    return True


def test_every_task_ends_is_told_and_answers_once() -> None:
    tasks: Tasks[str] = Tasks("test", EventNotifier(), workers=1)

    def broken() -> str:
        raise RuntimeError("not this time")

    numbers = [tasks.submit(lambda: "done", "failed"), tasks.submit(broken, "failed")]
    found: dict[int, str] = {}
    while len(found) < 2:
        assert is_told(tasks.event_fd)
        found |= tasks.pop_all()
    assert found == dict(zip(numbers, ["done", "failed"], strict=True))
    assert tasks.pop(numbers[0]) is None
    tasks.close()


def test_too_many_tasks_are_answered_at_once() -> None:
    tasks: Tasks[str] = Tasks("test", EventNotifier(), workers=1)
    go = threading.Event()
    for _ in range(TASKS_MAX):
        tasks.submit(lambda: str(go.wait(10)), "failed")
    late = tasks.submit(lambda: "done", "failed")
    assert is_told(tasks.event_fd)
    assert tasks.pop(late) == "failed"
    go.set()
    tasks.close()


def test_after_the_end_a_task_is_answered_and_nothing_is_told() -> None:
    tasks: Tasks[str] = Tasks("test", EventNotifier(), workers=1)
    tasks.close()
    assert tasks.pop(tasks.submit(lambda: "done", "failed")) == "failed"
    tasks.run_unnoticed(lambda: pytest.fail("closed"))


# ---- the L2 adapter over a daemon


@pytest.fixture
def adapter(lmcache: None, options: dict[str, str]) -> Iterator[Any]:
    from kvstored.connectors.lmcache_l2 import KvstoredL2, KvstoredL2Config

    made = KvstoredL2(KvstoredL2Config.from_dict(options))
    yield made
    made.close()


KEYS = [ObjectKey(bytes([i]) * 32) for i in range(8)]
DESCS = {0: stand_ins.MemoryLayoutDesc([stand_ins.Shape((2, 1024))], [np.dtype(np.uint16)])}


def memories(count: int, seed: int = 0) -> list[Memory]:
    rng = np.random.default_rng(seed)
    return [Memory(rng.integers(0, 256, SIZE, dtype=np.uint8)) for _ in range(count)]


def stored(adapter: Any, keys: list[ObjectKey], objects: list[Memory]) -> int:
    task = adapter.submit_store_task(keys, objects)
    assert is_told(adapter.get_store_event_fd())
    return int(adapter.pop_completed_store_tasks()[task])


def looked_up(adapter: Any, keys: list[ObjectKey]) -> str:
    task = adapter.submit_lookup_and_lock_task(keys, DESCS)
    assert is_told(adapter.get_lookup_and_lock_event_fd())
    return str(adapter.query_lookup_and_lock_result(task))


def loaded(adapter: Any, keys: list[ObjectKey], objects: list[Memory]) -> str:
    task = adapter.submit_load_task(keys, objects)
    assert is_told(adapter.get_load_event_fd())
    return str(adapter.query_load_result(task))


def test_objects_come_back_and_are_told_of(adapter: Any, served: Served) -> None:
    wait_until(lambda: stored(adapter, KEYS[:4], memories(4)) == 4 * SIZE)
    before = served.stat().pins
    assert looked_up(adapter, KEYS[:6]) == "111100"
    assert served.stat().pins == before + 1
    into = memories(6, seed=9)
    assert loaded(adapter, KEYS[:6], into) == "111100"
    for got, put in zip(into[:4], memories(4), strict=True):
        assert np.array_equal(got.content, put.content)
    adapter.submit_unlock(KEYS[:4])
    wait_until(lambda: served.stat().pins == before)
    adapter.delete(KEYS[:1])
    assert adapter.told == [("stored", KEYS[:4]), ("accessed", KEYS[:4]), ("deleted", KEYS[:1])]
    assert looked_up(adapter, KEYS[:4]) == "0111"


def test_without_a_daemon_tasks_fail_in_time(adapter: Any) -> None:
    began_s = time.perf_counter()
    assert stored(adapter, KEYS[:2], memories(2)) == -1
    assert looked_up(adapter, KEYS[:2]) == "00"
    assert loaded(adapter, KEYS[:2], memories(2)) == "00"
    adapter.submit_unlock(KEYS[:2])
    adapter.delete(KEYS[:2])
    assert time.perf_counter() - began_s < 0.5 + SLACK_S
    assert not adapter.report_status()["is_healthy"]


def test_a_daemon_that_hangs_costs_a_few_limits_and_then_nothing(
    adapter: Any, served: Served
) -> None:
    wait_until(lambda: stored(adapter, KEYS[:4], memories(4)) >= 0)
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.perf_counter()
        # what it shows would be read without it
        assert loaded(adapter, KEYS[4:8], memories(4)) == "0000"
        assert time.perf_counter() - began_s < 0.5 + 1.0 + SLACK_S
        began_s = time.perf_counter()
        for _ in range(10):
            assert looked_up(adapter, KEYS[:4]) == "0000"
            assert stored(adapter, KEYS[:4], memories(4)) == -1
        assert time.perf_counter() - began_s < SLACK_S
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: looked_up(adapter, KEYS[:4]) == "1111")


def test_what_another_client_removed_leaves_the_accounts(adapter: Any, served: Served) -> None:
    wait_until(lambda: stored(adapter, KEYS[:4], memories(4)) >= 0)
    (space,) = adapter._spaces.all().values()
    from kvstored.connectors.lmcache_objects import unchained

    assert space.attempt(lambda ns: ns.remove(unchained([key_of(KEYS[2])])), 0) == 1
    wait_until(lambda: ("deleted", [KEYS[2]]) in adapter.told)
    assert space.attempt(lambda ns: ns.clear(), 0) == 3
    wait_until(lambda: adapter.report_status()["stored_object_count"] == 0)


# ---- the remote connector over a daemon


@pytest.fixture
def connect(lmcache: None, options: dict[str, str]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def connector(**changed: Any) -> Any:
        from kvstored.connectors.lmcache_remote import KvstoredRemote

        config = EngineConfig(
            {f"remote_storage_plugin.kvstored.{name}": each for name, each in options.items()},
            **changed,
        )
        made.append(KvstoredRemote(config, stand_ins.Metadata(), LocalMemory(), plugin="kvstored"))
        return made[-1]

    yield connector
    for each in made:
        asyncio.run(each.close())


CHUNKS = [CacheEngineKey(f"model@1@0@{i:x}@uint8") for i in range(8)]


def test_chunks_come_back_and_references_are_given_back(
    connect: Callable[..., Any], served: Served
) -> None:
    remote = connect()
    assert remote.guarded.connected(20)
    given = memories(4)
    asyncio.run(remote.batched_put(CHUNKS[:4], given))
    assert [each.references for each in given] == [1] * 4, "what it took it gave back"
    assert remote.batched_contains(CHUNKS[:6]) == 4
    found = asyncio.run(remote.batched_get(CHUNKS[:6]))
    assert found[4:] == [None, None]
    for got, put in zip(found[:4], given, strict=True):
        assert np.array_equal(got.content, put.content)
    assert [each.references for each in remote._memory.given] == [1] * 4 + [0] * 2
    assert remote.remove_sync(CHUNKS[0])
    assert remote.batched_contains(CHUNKS[:4]) == 0


def test_a_short_chunk_keeps_its_length_and_an_odd_one_is_not_stored(
    connect: Callable[..., Any], served: Served
) -> None:
    remote = connect()
    assert remote.guarded.connected(20)
    short = Memory(np.arange(1024, dtype=np.uint16).view(np.uint8)[: 256 * 5].copy())
    odd = Memory(np.ones(100, dtype=np.uint8))
    asyncio.run(remote.batched_put(CHUNKS[:2], [short, odd]))
    found = asyncio.run(remote.batched_get(CHUNKS[:2]))
    assert np.array_equal(found[0].content, short.content)
    assert found[1] is None


def test_a_put_that_nobody_waits_for_keeps_its_buffers_until_they_were_read(
    connect: Callable[..., Any], served: Served
) -> None:
    remote = connect()
    assert remote.guarded.connected(20)
    given = memories(4)
    pid = served.stat().daemon_pid

    async def give_up() -> None:
        put = asyncio.ensure_future(remote.batched_put(CHUNKS[:4], given))
        await asyncio.sleep(0.1)
        put.cancel()
        await asyncio.gather(put, return_exceptions=True)
        assert [each.references for each in given] == [2] * 4

    os.kill(pid, signal.SIGSTOP)
    try:
        asyncio.run(give_up())
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: [each.references for each in given] == [1] * 4)


def test_without_a_daemon_every_call_is_a_miss_in_time(connect: Callable[..., Any]) -> None:
    remote = connect()
    given = memories(2)
    began_s = time.perf_counter()
    assert remote.batched_contains(CHUNKS[:2]) == 0
    assert not remote.exists_sync(CHUNKS[0])
    assert asyncio.run(remote.get(CHUNKS[0])) is None
    assert asyncio.run(remote.batched_get_non_blocking("", CHUNKS[:2])) == []
    asyncio.run(remote.batched_put(CHUNKS[:2], given))
    assert not remote.remove_sync(CHUNKS[0])
    assert time.perf_counter() - began_s < SLACK_S
    assert [each.references for each in (*given, *remote._memory.given)] == [1, 1, 0, 0, 0]


def test_after_the_end_every_call_is_a_miss(connect: Callable[..., Any]) -> None:
    remote = connect()
    asyncio.run(remote.close())
    given = memories(1)
    asyncio.run(remote.put(CHUNKS[0], given[0]))
    assert given[0].references == 1
    assert asyncio.run(remote.get(CHUNKS[0])) is None


@pytest.mark.parametrize("changed", [{"use_layerwise": True}, {"remote_serde": "cachegen"}])
def test_modes_that_cannot_work_are_refused(connect: Callable[..., Any], changed: Any) -> None:
    with pytest.raises(ConfigError, match="use_layerwise"):
        connect(**changed)
