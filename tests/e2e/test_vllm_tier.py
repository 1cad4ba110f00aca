"""The secondary tier under vLLM 0.33's own factory and tiering manager, with its CPU region as primary tier; what is missing is a GPU in front."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstored.connectors import versions
from tests.crash.served import Served, wait_until

pytestmark = pytest.mark.engine
if not (versions.installed(versions.VLLM) or "").startswith("0.33"):
    pytest.skip("vLLM 0.33 is not in this environment: make e2e", allow_module_level=True)

from vllm.v1.kv_offload.base import (  # noqa: E402 - only where it is there
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import (  # noqa: E402
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvstored.connectors.breaker import State  # noqa: E402
from kvstored.errors import ConfigError  # noqa: E402

CHUNK_BYTES = 8192
CHUNKS = 16
KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(12)]


def offloading_config(model: str, **changed: Any) -> OffloadingConfig:
    facts = {
        "groups": (OffloadingGroupConfig(16, ("layer.0",), 0),),
        "worker_kv_bytes_per_block": CHUNK_BYTES,
        "enable_kv_cache_events": True,
        "extra_config": {},
        "engine_id": "e",
        "model": OffloadingModelConfig(name=model, dtype="bfloat16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    }
    return OffloadingConfig(**{**facts, **changed})


class Node:
    """One vLLM scheduler's worth of tiers: a CPU region and kvstored behind it."""

    made = 0

    def __init__(self, address: str, model: str, **options: Any) -> None:
        Node.made += 1
        region = SharedOffloadRegion(
            f"kvstored-{os.getpid()}-{Node.made}", CHUNKS, None, CHUNK_BYTES, CHUNK_BYTES
        )
        primary = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=region)
        view = primary.get_kv_memoryview()
        config = offloading_config(model)
        spec = SimpleNamespace(
            config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=True)
        )
        told = {"type": "KvstoredTier", "module_path": "kvstored.connectors.vllm_tier"}
        chosen = {"address": address, "probe": "500ms", "load": "1s", "store": "1s", **options}
        self.tier = SecondaryTierFactory.create_secondary_tier({**told, **chosen}, view, spec)
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.memory = np.frombuffer(view, dtype=np.uint8).reshape(CHUNKS, CHUNK_BYTES)
        self._requests = 0

    def connected(self) -> "Node":
        assert self.tier._guarded.connected(20)
        return self

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def put(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        """As the worker does after it has copied from the GPU, until the tier has all."""
        context = self.request()
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        for chunk, row in zip(output.store_spec.chunk_ids, rows, strict=True):
            self.memory[int(chunk)] = row
        self.manager.complete_store(keys, context, True)
        self.manager.on_request_finished(context)
        self.settle()

    def settle(self, wait_s: float = 20.0) -> None:
        def is_done() -> bool:
            self.step()
            self.manager._maybe_process_finished_jobs()
            return not self.manager._jobs

        wait_until(is_done, wait_s, "jobs end")

    def found(
        self, keys: list[bytes], wait_s: float = 20.0
    ) -> tuple[list[LookupResult], ReqContext]:
        """Steps until vLLM has made up its mind about every key."""
        context = self.request()
        ends_s = time.monotonic() + wait_s
        while True:
            results = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results):
                return results, context
            assert time.monotonic() < ends_s, results
            self.step()
            time.sleep(0.005)

    def rows(self, keys: list[bytes], context: ReqContext) -> list[np.ndarray]:
        spec = self.manager.prepare_load(keys, context)
        rows = [self.memory[int(chunk)].copy() for chunk in spec.chunk_ids]
        self.manager.complete_load(keys, context)
        return rows

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()


Open = Callable[..., Node]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        made = Path(name) / "model"
        made.mkdir()
        (made / "config.json").write_text("{}")
        (made / "model.safetensors").write_bytes(bytes(range(256)) * 100)
        yield Path(name)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, dram="64MiB", disk="256MiB") as daemon:
        yield daemon


@pytest.fixture
def node(folder: Path) -> Iterator[Open]:
    made: list[Node] = []

    def make(**options: Any) -> Node:
        model = options.pop("model_path", str(folder / "model"))
        made.append(Node(f"unix://{folder}/s", model, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rows_of(count: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, CHUNK_BYTES), dtype=np.uint8))


def same(found: list[np.ndarray], rows: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, rows, strict=True))


HIT, MISS = LookupResult.HIT, LookupResult.MISS


def test_what_one_engine_offloads_another_one_promotes(served: Served, node: Open) -> None:
    first, second = node().connected(), node().connected()
    rows = rows_of(8)
    first.put(KEYS[:8], rows)
    assert {key for event in first.tier.take_events() for key in event.keys} == set(KEYS[:8])
    results, context = second.found(KEYS)
    assert results == [HIT] * 8 + [MISS] * 4
    assert same(second.rows(KEYS[:8], context), rows)
    second.manager.touch(KEYS[:8], context)
    second.step()
    second.manager.on_request_finished(context)


def test_what_left_the_primary_tier_comes_back(served: Served, node: Open) -> None:
    only = node().connected()
    rows = rows_of(12)
    only.put(KEYS, rows)
    others = [make_offload_key(bytes([100 + i]) * 32, 0) for i in range(CHUNKS)]
    only.put(others, rows_of(CHUNKS, seed=9))
    results, context = only.found(KEYS)
    assert results == [HIT] * 12
    assert same(only.rows(KEYS, context), rows)


def test_a_block_that_went_between_lookup_and_load_is_a_miss_and_the_others_stay(
    served: Served, node: Open
) -> None:
    first, second = node().connected(), node().connected()
    rows = rows_of(4)
    first.put(KEYS[:4], rows)
    context = second.request()
    for _ in range(200):
        if all(second.tier.lookup(key, context) is HIT for key in KEYS[:4]):
            break
        second.tier.on_schedule_end(None)
        time.sleep(0.01)
    from kvstored.client import Keys

    gone = Keys.opaque([KEYS[2]], unchained=True)
    assert first.tier._guarded.attempt(lambda ns: ns.remove(gone), 0) == 1
    results, late = second.found(KEYS[:4])
    assert results == [HIT, HIT, MISS, HIT]
    assert same(second.rows([KEYS[0], KEYS[1], KEYS[3]], late), [rows[0], rows[1], rows[3]])


def test_a_daemon_that_is_absent_then_comes(folder: Path, node: Open) -> None:
    alone = node()
    alone.put(KEYS[:4], rows_of(4))
    results, _ = alone.found(KEYS[4:6])
    assert results == [MISS, MISS]
    with Served(folder, dram="64MiB", disk="0B"):
        alone.connected()
        alone.put(KEYS[4:8], rows_of(4, seed=1))
        results, _ = node().connected().found(KEYS[:8])
        assert results == [MISS] * 4 + [HIT] * 4


def test_a_killed_daemon_fails_jobs_and_hits_come_back(served: Served, node: Open) -> None:
    first = node().connected()
    rows = rows_of(4)
    first.put(KEYS[:4], rows)
    last = served.kill_daemon()
    first.put(KEYS[4:8], rows_of(4, seed=1))
    served.answered(last.epoch)
    served.recovered()
    second = node().connected()
    results, context = second.found(KEYS[:8])
    assert results == [HIT] * 4 + [MISS] * 4
    assert same(second.rows(KEYS[:4], context), rows)


def test_a_hung_daemon_holds_no_job_for_longer_than_its_limits(served: Served, node: Open) -> None:
    first, second = node().connected(), node().connected()
    first.put(KEYS[:4], rows_of(4))
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        first.put(KEYS[4:8], rows_of(4, seed=1))
        results, _ = second.found(KEYS[:4])
        assert results == [MISS] * 4
        second.tier.drain_jobs()
        assert time.monotonic() - began_s < 12
        assert first.tier._guarded.state is State.AWAY
        while time.monotonic() - began_s < 30:
            asked_s = time.monotonic()
            results, _ = second.found(KEYS[:4])
            assert results == [MISS] * 4
            assert time.monotonic() - asked_s < 4
            time.sleep(0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    first.connected()
    results, _ = node().connected().found(KEYS[:4])
    assert results == [HIT] * 4


def test_stores_that_would_wait_too_long_are_shed_and_fail(served: Served, node: Open) -> None:
    shedding = node(queue="16KiB").connected()
    job = TransferJob(
        job_id=1,
        keys=KEYS[:4],
        chunk_ids=np.arange(4),
        is_promotion=False,
        req_context=ReqContext("r"),
    )
    shedding.tier._storing_chunks = 2
    shedding.tier.submit_store(job)
    (result,) = shedding.tier.get_finished_jobs()
    assert (result.job_id, result.success) == (1, False)
    shedding.tier._storing_chunks = 0


def test_other_weights_or_another_layout_share_nothing(
    served: Served, node: Open, folder: Path
) -> None:
    node().connected().put(KEYS[:4], rows_of(4))
    other = folder / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "model.safetensors").write_bytes(bytes(25_600))
    results, _ = node(model_path=str(other)).connected().found(KEYS[:4])
    assert results == [MISS] * 4


def test_weights_that_cannot_be_told_apart_are_refused_at_the_start(node: Open) -> None:
    with pytest.raises(ConfigError, match='set "revision"'):
        node(model_path="organisation/model")
    assert node(model_path="organisation/model", revision="abc").tier is not None


def test_options_that_are_not_known_are_refused_by_name(node: Open) -> None:
    with pytest.raises(ConfigError, match="adress"):
        node(adress="x")
