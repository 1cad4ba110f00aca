"""The SGLang connector over a real daemon, with SGLang's border types only; tests/engines has SGLang itself."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstored.client import Client
from kvstored.connectors import versions
from kvstored.connectors.breaker import State
from kvstored.connectors.sglang_pages import Place, key_of, usable_prefixes
from kvstored.connectors.sglang_selection import WAITING_MAX, Selection, Selections, page_scores
from kvstored.errors import ConfigError
from tests.crash.served import Served, wait_until

from . import stand_ins
from .stand_ins import HiCacheStorageConfig, HostPool, PoolHitPolicy, PoolName, PoolTransfer

OURS = ("kvstored.connectors.sglang", "kvstored.connectors.sglang_engine")
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
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if versions.installed(versions.SGLANG):
        pytest.skip("SGLang itself is here: tests/engines")
    monkeypatch.setattr(versions, "installed", lambda _: "0.5.23")
    with stand_ins.installed(stand_ins.SGLANG, OURS):
        import kvstored.connectors.sglang as module

        yield module


@pytest.fixture
def make(sglang: Any, options: dict[str, str]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def storage(pool: HostPool | None = None, **changed: Any) -> Any:
        given = {**options, "interface_v1": 1, "allocator": "shm", **changed.pop("options", {})}
        made.append(sglang.KvstoredHiCache(HiCacheStorageConfig(given, **changed), {}))
        made[-1].register_mem_pool_host(pool or HostPool())
        return made[-1]

    yield storage
    for each in made:
        each.close()


def up(storage: Any) -> Any:
    assert all(space.guarded.connected(20) for space in storage.spaces.values())
    return storage


def filled(pool: HostPool, pages: int, seed: int = 0) -> Any:
    indices = pool.alloc(pages)
    rng = np.random.default_rng(seed)
    for index in indices[::16]:
        page = pool.page(int(index))
        page[:] = rng.integers(0, 256, page.shape, dtype=np.uint8)
    return indices


def content(pool: HostPool, indices: Any) -> list[bytes]:
    return [pool.page(int(index)).tobytes() for index in indices[::16]]


HASHES = [f"{i:064x}" for i in range(32)]

# ---- keys and prefixes


def test_a_page_s_key_is_its_hash_and_the_rank() -> None:
    suffix = Place(1, 2, 3, 4, 0, 1, 0, 1).suffix
    assert suffix == bytes.fromhex("0100030000000000")
    assert key_of(HASHES[7], suffix) == bytes(31) + b"\x07" + suffix


@pytest.mark.parametrize("text", ["", "no hash", "g" * 64, HASHES[0][:-2]])
def test_any_other_text_has_a_key_of_the_same_size(text: str) -> None:
    assert len(key_of(text, bytes(8))) == 40
    assert key_of(text, bytes(8)) != key_of(text + "x", bytes(8))


@pytest.mark.parametrize(
    ("there", "trailing", "lengths"),
    [
        ("1111", 0, [1, 2, 3, 4]),
        ("1101", 0, [1, 2]),
        ("0111", 0, []),
        ("", 0, []),
        ("0001", 1, [4]),
        ("0101", 1, [2, 4]),
        ("0011", 2, [4]),
        ("1011", 2, [1, 4]),
        ("1111", 2, [1, 2, 3, 4]),
        ("0000", 2, []),
        ("11", 5, [1, 2]),
    ],
)
def test_lengths_at_which_a_prefix_can_be_resumed(
    there: str, trailing: int, lengths: list[int]
) -> None:
    assert usable_prefixes([bit == "1" for bit in there], trailing) == lengths


# ---- over a daemon


def test_pages_are_read_into_the_host_pool_where_they_lie(
    served: Served, make: Callable[..., Any]
) -> None:
    pool = HostPool()
    storage = up(make(pool))
    stored = filled(pool, 4)
    assert storage.batch_set_v1(HASHES[:4], stored) == [True] * 4
    wanted = content(pool, stored)
    pool.page(int(stored[0]))[:] = 0
    assert storage.batch_exists(HASHES[:6]) == 4
    into = pool.alloc(5)
    assert storage.batch_get_v1(HASHES[:5], into) == [True] * 4 + [False]
    assert content(pool, into)[:4] == wanted


def test_a_batch_that_knows_its_prefix_is_linked_to_it(
    served: Served, make: Callable[..., Any]
) -> None:
    storage = up(make())
    pool = storage.mem_pool_host
    storage.batch_set_v1(HASHES[:4], filled(pool, 4))
    told = stand_ins.HiCacheStorageExtraInfo(prefix_keys=HASHES[:4])
    storage.batch_set_v1(HASHES[4:8], filled(pool, 4), told)
    space = storage.spaces["kv"]
    assert space.keys(HASHES[4:8], HASHES[:4]).parent == key_of(HASHES[3], bytes(8))
    assert storage.batch_exists(HASHES[:8]) == 8


def test_ranks_and_side_pools_do_not_meet(served: Served, make: Callable[..., Any]) -> None:
    first, second = (up(make(tp_rank=rank, tp_size=2)) for rank in range(2))
    first.batch_set_v1(HASHES[:4], filled(first.mem_pool_host, 4))
    assert second.batch_exists(HASHES[:4]) == 0
    first.register_mem_host_pool_v2(HostPool(parts=1), PoolName.SWA)
    up(first)
    asked = [PoolTransfer(PoolName.SWA, keys=HASHES[3:4], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    assert first.batch_exists_v2(HASHES[:4], asked).kv_hit_pages == 0
    side = first.spaces["swa"].pool
    one = [PoolTransfer(PoolName.SWA, filled(side, 1), HASHES[2:3])]
    assert first.batch_set_v2(one) == {"swa": [True]}
    assert first.batch_exists_v2(HASHES[:4], asked).restorable_prefix_pages == [3]


def test_the_writer_of_replicated_pages_writes_and_every_rank_reads(
    served: Served, make: Callable[..., Any]
) -> None:
    ranks = [up(make(tp_rank=rank, tp_size=2, is_mla_model=True)) for rank in range(2)]
    assert ranks[1].batch_set_v1(HASHES[:4], filled(ranks[1].mem_pool_host, 4, 1)) == [True] * 4
    assert ranks[1].batch_exists(HASHES[:4]) == 0
    stored = filled(ranks[0].mem_pool_host, 4, 2)
    ranks[0].batch_set_v1(HASHES[:4], stored)
    into = ranks[1].mem_pool_host.alloc(4)
    assert ranks[1].batch_get_v1(HASHES[:4], into) == [True] * 4
    assert content(ranks[1].mem_pool_host, into) == content(ranks[0].mem_pool_host, stored)


def test_without_a_daemon_every_call_is_a_miss_in_time_and_it_is_found_later(
    make: Callable[..., Any], folder: Path
) -> None:
    storage = make()
    pool = storage.mem_pool_host
    began_s = time.perf_counter()
    assert storage.batch_exists(HASHES[:4]) == 0
    assert storage.batch_get_v1(HASHES[:4], filled(pool, 4)) == [False] * 4
    assert storage.batch_set_v1(HASHES[:4], filled(pool, 4)) == [False] * 4
    assert storage.batch_exists_v2(HASHES[:4], None).kv_hit_pages == 0
    assert not storage.clear()
    assert time.perf_counter() - began_s < SLACK_S
    with Served(folder, dram="64MiB", disk="0B"):
        up(storage)
        assert storage.batch_set_v1(HASHES[:4], filled(pool, 4)) == [True] * 4


def test_a_daemon_that_hangs_costs_a_few_limits_and_then_nothing(
    served: Served, make: Callable[..., Any]
) -> None:
    storage = up(make())
    pool = storage.mem_pool_host
    storage.batch_set_v1(HASHES[:4], filled(pool, 4))
    into = pool.alloc(4)
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.perf_counter()
        # what it shows would be read without it
        assert storage.batch_get_v1(HASHES[4:8], into) == [False] * 4
        assert time.perf_counter() - began_s < 0.5 + 1.0 + SLACK_S
        began_s = time.perf_counter()
        for _ in range(20):
            assert storage.batch_exists(HASHES[:4]) == 0
            storage.batch_set_v1(HASHES[:4], into)
        assert time.perf_counter() - began_s < SLACK_S
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: storage.batch_exists(HASHES[:4]) == 4)


def test_a_refused_namespace_turns_it_off(served: Served, make: Callable[..., Any]) -> None:
    spec = make(options={"address": "unix:///nowhere"}).spaces["kv"].guarded.spec
    with Client(served.address) as client:
        client.open_namespace(replace(spec, dtype="other"))
    storage = make()
    wait_until(lambda: storage.spaces["kv"].guarded.state is State.OFF)
    assert storage.batch_set_v1(HASHES[:1], filled(storage.mem_pool_host, 1)) == [False]


def test_a_pool_s_own_exception_is_a_miss(served: Served, make: Callable[..., Any]) -> None:
    storage = up(make())

    def broken(_: object) -> None:
        raise RuntimeError("the host pool is broken")

    storage.mem_pool_host.get_page_buffer_meta = broken
    assert storage.batch_get_v1(HASHES[:2], np.arange(32)) == [False] * 2
    assert storage.batch_set_v1(HASHES[:2], np.arange(32)) == [False] * 2


def test_weights_must_be_told_apart(make: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="revision"):
        make(options={"revision": ""})


# ---- what attention selects


def test_the_share_of_each_page_in_what_was_chosen() -> None:
    chosen = np.array([[[0, 15, 16, -1]], [[16, 47, 9999, -1]]], dtype=np.int32)
    assert page_scores(chosen, pages=3, page_tokens=16, ratio=1) == [0.4, 0.4, 0.2]
    # Rows of four tokens: row 4 begins at token 16.
    rows = np.array([0, 3, 4, 11], dtype=np.int32)
    assert page_scores(rows, pages=3, page_tokens=16, ratio=4) == [0.5, 0.25, 0.25]
    assert page_scores(rows[:0], pages=2, page_tokens=16, ratio=1) == [0.0, 0.0]


def test_a_scheduler_is_never_held_and_what_is_too_much_is_dropped(
    served: Served, make: Callable[..., Any]
) -> None:
    storage = up(make())
    space = storage.spaces["kv"]
    storage.batch_set_v1(HASHES[:4], filled(storage.mem_pool_host, 4))
    begun, go = threading.Event(), threading.Event()

    def keys_of(selection: Selection) -> Any:
        begun.set()
        assert go.wait(10)
        return space.keys(HASHES[: len(selection.tokens) // 16])

    selections = Selections(space.guarded, keys_of, page_tokens=16, ratio=1)
    request = SimpleNamespace(
        origin_input_ids=range(60),
        output_ids_through_stop=range(4),
        extra_key=None,
        cache_salt=None,
        indexer_topk=np.array([[[0, 20]]] * 100, dtype=np.int32),
    )
    selections.finished(request)
    assert begun.wait(10)
    began_s = time.perf_counter()
    for _ in range(1000):
        selections.finished(request)
    assert time.perf_counter() - began_s < SLACK_S
    go.set()
    # The one that was begun, and as many as may wait; two pages of each were chosen.
    wait_until(lambda: selections.told == 2 * (WAITING_MAX + 1))
    selections.close()
