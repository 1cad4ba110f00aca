"""The vLLM connector itself, scheduler's and worker's, over vLLM's own types and a real daemon that is absent, killed, hung, slow, full or wrong.

In place of an engine a test steps the two as vLLM does; pages hold random bytes, so that a wrong one shows.
"""

import contextlib
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.crash.served import Served, wait_until

from .engine import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]
if importlib.util.find_spec("vllm") is None or not MODEL.is_dir():
    pytest.skip("vLLM and its model are not in this environment: make e2e", allow_module_level=True)

import torch  # noqa: E402 - only where it is there
from vllm.config import KVEventsConfig, KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.core.kv_cache_utils import KVCacheBlock  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402

from kvstored.connectors.breaker import State  # noqa: E402
from kvstored.connectors.vllm import KvstoredConnector  # noqa: E402
from kvstored.errors import ConfigError  # noqa: E402

TOKENS = 32
PAGES = 24
HEADS, DIM = 3, 64
PAGE_BYTES = HEADS * TOKENS * 2 * DIM * 2
"""Of one layer."""
LAYERS = ("layer.0", "layer.1", "layer.2")


def attention(**changed: Any) -> FullAttentionSpec:
    facts = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**facts, **changed})


ONE_GROUP = (KVCacheGroupSpec(list(LAYERS), attention()),)
HYBRID = (
    KVCacheGroupSpec(["layer.0"], attention()),
    KVCacheGroupSpec(
        ["layer.1", "layer.2"],
        SlidingWindowSpec(
            block_size=TOKENS,
            num_kv_heads=HEADS,
            head_size=DIM,
            dtype=torch.bfloat16,
            sliding_window=40,
        ),
    ),
)


@dataclass
class Request:
    request_id: str
    num_tokens: int
    seed: int = 0
    num_computed_tokens: int = 0
    lora_request: object = None
    all_token_ids: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    mm_features: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = [self.seed * 1000 + i for i in range(self.num_tokens)]

    @property
    def block_hashes(self) -> list[bytes]:
        return [bytes([self.seed, i]) * 16 for i in range(self.num_tokens // TOKENS)]


class Engine:
    """One scheduler and one worker, stepped by hand."""

    made = 0

    def __init__(
        self, address: str, groups: Sequence[KVCacheGroupSpec] = ONE_GROUP, **options: Any
    ) -> None:
        Engine.made += 1
        config = CONFIG()
        config.cache_config.block_size = TOKENS
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True)
        chosen = {"address": address, "lookup": "500ms", "probe": "500ms", "load": "1s", **options}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvstoredConnector",
            kv_connector_module_path="kvstored.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=chosen,
        )
        cache = KVCacheConfig(
            num_blocks=PAGES,
            kv_cache_tensors=[],
            kv_cache_groups=list(groups),
            kv_cache_layout="LBHNC",
        )
        self.scheduler = KvstoredConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.worker = KvstoredConnector(config, KVConnectorRole.WORKER, cache)
        self.groups = groups
        self.tables: dict[str, tuple[list[Any], ...]] = {}
        self.scheduler._kv_cache_manager = SimpleNamespace(
            get_blocks=lambda name: SimpleNamespace(blocks=self.tables[name])
        )
        torch.manual_seed(Engine.made)
        self.caches = {
            layer: torch.randn(PAGES, HEADS, TOKENS, 2 * DIM).to(torch.bfloat16) for layer in LAYERS
        }
        self.worker.register_kv_caches(self.caches)

    def connected(self) -> "Engine":
        for side in (self.scheduler, self.worker):
            assert side._guarded.connected(20)
        return self

    def admit(
        self, request: Request, first_page: int, own_tokens: int = 0, window_from: int = 0
    ) -> int:
        """Pages `first_page`... in every group; a window group has none before block `window_from`. Tokens to load."""
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, own_tokens)
        assert is_async == (external > 0)
        blocks = -(-request.num_tokens // TOKENS)
        self.tables[request.request_id] = tuple(
            [_block(first_page + i, is_null=bool(g) and i < window_from) for i in range(blocks)]
            for g in range(len(self.groups))
        )
        given = SimpleNamespace(blocks=self.tables[request.request_id])
        self.scheduler.update_state_after_alloc(request, given, external)
        request.num_computed_tokens = own_tokens + external
        return external

    def step(self, *scheduled: tuple[Request, int]) -> KVConnectorOutput:
        tokens = {request.request_id: count for request, count in scheduled}
        output = SimpleNamespace(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens={})
        meta = self.scheduler.build_connector_meta(output)
        for request, count in scheduled:
            request.num_computed_tokens += count
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        for layer in LAYERS:
            self.worker.wait_for_layer_load(layer)
            self.worker.save_kv_layer(layer, self.caches[layer], None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        told = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(told)
        return told

    def loaded(self, request: Request, wait_s: float = 20.0) -> KVConnectorOutput:
        """Empty steps until the request's load is over; failures of all of them."""
        invalid: set[int] = set()
        ends_s = time.monotonic() + wait_s
        while time.monotonic() < ends_s:
            told = self.step()
            invalid |= told.invalid_block_ids
            if request.request_id in told.finished_recving:
                told.invalid_block_ids = invalid
                return told
            time.sleep(0.005)
        raise AssertionError("the load does not end")

    def computed(self, request: Request, first_page: int) -> None:
        """A whole prompt, computed and stored."""
        self.admit(request, first_page)
        self.step((request, request.num_tokens - request.num_computed_tokens))
        assert self.worker._guarded.flush(20)

    def same(self, other: "Engine", pages: dict[int, int], layers: Sequence[str] = LAYERS) -> bool:
        return all(
            torch.equal(self.caches[layer][mine], other.caches[layer][theirs])
            for layer in layers
            for mine, theirs in pages.items()
        )

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def CONFIG() -> Any:  # noqa: N802 - stands for a constant that vLLM changes in place
    return EngineArgs(
        model=str(MODEL), dtype="bfloat16", max_model_len=1024, enforce_eager=True
    ).create_engine_config()


def _block(number: int, *, is_null: bool) -> KVCacheBlock:
    block = KVCacheBlock(block_id=0 if is_null else number)
    block.is_null = is_null
    return block


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        yield Path(name)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, dram="64MiB", disk="256MiB") as daemon:
        yield daemon


Open = Callable[..., Engine]


@pytest.fixture
def engine(folder: Path) -> Iterator[Open]:
    made: list[Engine] = []

    def make(*args: Any, **options: Any) -> Engine:
        made.append(Engine(f"unix://{folder}/s", *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@contextlib.contextmanager
def stopped(served: Served) -> Iterator[None]:
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class TestWhatItDoes:
    def test_pages_of_one_engine_come_to_other_pages_of_another(
        self, served: Served, engine: Open
    ) -> None:
        first, second = engine().connected(), engine().connected()
        first.computed(Request("a", 130), first_page=1)
        asked = Request("b", 130)
        assert second.admit(asked, first_page=10) == 128
        told = second.loaded(asked)
        assert (told.invalid_block_ids, told.failed_recving) == (set(), set())
        assert second.same(first, {10: 1, 11: 2, 12: 3, 13: 4})
        assert not second.same(first, {14: 5})
        sources = second.scheduler.get_external_cache_hit_sources(asked, 128)
        assert sources == {CacheHitSource.HOST: 128}

    def test_statistics_reach_vllm(self, served: Served, engine: Open) -> None:
        first = engine().connected()
        first.computed(Request("a", 130), first_page=1)
        stats = first.worker.get_kv_connector_stats()
        assert stats.data["stored_blocks"] == 4
        again = KvstoredConnector.build_kv_connector_stats(dict(stats.to_dict()))
        assert again.aggregate(stats).reduce()["stored_blocks"] == 8
        assert first.worker.get_kv_connector_stats() is None, "taken once"
        assert first.scheduler.get_kv_connector_stats().data["lookups"] == 1

    def test_stored_blocks_are_events(self, served: Served, engine: Open) -> None:
        first, request = engine().connected(), Request("a", 70)
        first.computed(request, first_page=1)
        first.step()
        events = list(first.scheduler.take_events())
        assert [e.token_ids[0] for e in events] == [0, TOKENS]
        assert events[0].parent_block_hash is None
        assert events[1].parent_block_hash == events[0].block_hashes[0]
        assert {(e.medium, e.block_size) for e in events} == {("KVSTORED", TOKENS)}
        assert list(first.scheduler.take_events()) == []

    def test_pages_may_be_overwritten_when_the_step_is_over(
        self, served: Served, engine: Open
    ) -> None:
        first, second = engine().connected(), engine().connected()
        kept = {layer: cache.clone() for layer, cache in first.caches.items()}
        request = Request("a", 130)
        first.admit(request, first_page=1)
        first.step((request, 130))
        for cache in first.caches.values():
            cache.zero_()
        assert first.worker._guarded.flush(20)
        first.caches = kept
        asked = Request("b", 130)
        assert second.admit(asked, first_page=10) == 128
        second.loaded(asked)
        assert second.same(first, {10: 1, 11: 2, 12: 3, 13: 4})

    def test_a_request_that_ended_gives_its_pages_back_with_the_next_step(
        self, served: Served, engine: Open
    ) -> None:
        first, request = engine().connected(), Request("a", 70)
        first.admit(request, first_page=1)
        first.step((request, 40))
        request.num_tokens = 97
        request.num_computed_tokens = 96
        first.tables["a"] = ([_block(1 + i, is_null=False) for i in range(4)],)
        assert first.scheduler.request_finished_all_groups(request, ([1, 2, 3, 4],)) == (True, None)
        assert first.step().finished_sending == {"a"}
        assert first.worker._guarded.flush(20)
        second, asked = engine().connected(), Request("b", 100)
        assert second.admit(asked, first_page=10) == 96

    def test_a_hybrid_model_loads_only_the_window_that_it_needs(
        self, served: Served, engine: Open
    ) -> None:
        first, second = engine(HYBRID).connected(), engine(HYBRID).connected()
        first.computed(Request("a", 200), first_page=1)
        asked = Request("b", 200)
        assert second.admit(asked, first_page=12, window_from=4) == 192
        before = second.caches["layer.1"][12:16].clone()
        told = second.loaded(asked)
        assert told.failed_recving == set()
        assert second.same(first, {12 + i: 1 + i for i in range(6)}, ["layer.0"])
        assert second.same(first, {16: 5, 17: 6}, ["layer.1", "layer.2"])
        assert torch.equal(second.caches["layer.1"][12:16], before), "pages that are not there"

    def test_a_hybrid_hit_ends_where_its_window_is_stored(
        self, served: Served, engine: Open
    ) -> None:
        first, second = engine(HYBRID).connected(), engine(HYBRID).connected()
        request = Request("a", 200)
        first.admit(request, first_page=1)
        for block in first.tables["a"][1][3:]:
            block.is_null = True
        first.step((request, 200))
        assert first.worker._guarded.flush(20)
        assert second.admit(Request("b", 200), first_page=12) == 96

    def test_what_is_not_understood_turns_it_off(self, served: Served, engine: Open) -> None:
        unknown = KVCacheGroupSpec(list(LAYERS), attention(), enable_kv_transfer=False)
        off, request = engine([unknown]), Request("a", 130)
        assert off.scheduler._guarded is None
        assert off.admit(request, first_page=1) == 0
        assert off.step((request, 130)).finished_recving == set()

    def test_replicated_heads_are_stored_once_for_all_ranks(self) -> None:
        from kvstored.connectors.options import ConnectorOptions
        from kvstored.connectors.vllm_layout import layout_of

        config = CONFIG()
        config.cache_config.block_size = TOKENS
        config.parallel_config.tensor_parallel_size = 4
        latent = MLAAttentionSpec(
            block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
        )
        for spec, is_sharded in ((attention(), True), (latent, False)):
            cache = KVCacheConfig(
                num_blocks=PAGES,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
            )
            layout = layout_of(config, cache, ConnectorOptions())
            assert (layout.spec.tp, layout.groups[0].is_sharded) == (4, is_sharded)
            assert layout.spec.groups[0].sharded == is_sharded
        config.parallel_config.pipeline_parallel_size = 2
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            layout_of(config, cache, ConnectorOptions())

    def test_a_reset_of_vllm_s_cache_is_for_this_engine_alone(
        self, served: Served, engine: Open
    ) -> None:
        first, second = engine().connected(), engine().connected()
        first.computed(Request("a", 130), first_page=1)
        assert second.scheduler.reset_cache() is True
        assert second.admit(Request("b", 130), first_page=10) == 0
        assert first.admit(Request("c", 130), first_page=10) == 128

    def test_options_that_are_not_known_end_the_start(self, engine: Open) -> None:
        with pytest.raises(ConfigError, match="adress"):
            engine(adress="x")


class TestFaults:
    """The engine never crashes, never waits beyond limits, and never gets wrong KV."""

    def test_absent_at_the_start(self, folder: Path, engine: Open) -> None:
        alone, request = engine(), Request("a", 130)
        began_s = time.monotonic()
        alone.computed(request, first_page=1)
        assert not alone.scheduler.request_finished_all_groups(request, ([1],))[0]
        assert time.monotonic() - began_s < 3
        with Served(folder, dram="64MiB", disk="0B"):
            alone.connected().computed(Request("b", 130), first_page=6)
            second = engine().connected()
            assert second.admit(Request("c", 130), first_page=10) == 128

    def test_killed_between_lookup_and_load(self, served: Served, engine: Open) -> None:
        first, second = engine().connected(), engine().connected()
        first.computed(Request("a", 130), first_page=1)
        asked = Request("b", 130)
        assert second.admit(asked, first_page=10) == 128
        last = served.kill_daemon()
        told = second.loaded(asked)
        assert told.invalid_block_ids == {10, 11, 12, 13} or second.same(
            first, {10: 1, 11: 2, 12: 3, 13: 4}
        )
        served.answered(last.epoch)
        served.recovered()
        second.connected()
        again = Request("c", 130)
        wait_until(lambda: second.admit(again, first_page=15) == 128, 20)
        assert second.loaded(again).invalid_block_ids == set()
        assert second.same(first, {15: 1, 16: 2, 17: 3, 18: 4})

    def test_hung_for_half_a_minute(self, served: Served, engine: Open) -> None:
        first, second = engine().connected(), engine().connected()
        first.computed(Request("a", 130), first_page=1)
        asked = Request("b", 130)
        assert second.admit(asked, first_page=10) == 128
        with stopped(served):
            began_s = time.monotonic()
            assert second.loaded(asked, 10).invalid_block_ids == {10, 11, 12, 13}
            computed = Request("c", 130, seed=1)
            assert second.admit(computed, first_page=15) == 0
            second.step((asked, 130), (computed, 130))
            for i in range(20):
                second.admit(Request(f"r{i}", 130, seed=2), first_page=15)
            assert time.monotonic() - began_s < 8
            assert second.worker._guarded.state is State.AWAY
            turns = 0
            while time.monotonic() - began_s < 30:  # the engine goes on as if there were no daemon
                turns += 1
                computed = Request(f"t{turns}", 130, seed=3 + turns % 250)
                assert second.admit(computed, first_page=15) == 0
                second.step((computed, 130))
                time.sleep(0.1)
            assert turns > 50
        second.connected()
        again = Request("d", 130)
        assert second.admit(again, first_page=15) == 128
        assert second.loaded(again).invalid_block_ids == set()

    def test_hung_while_it_stores_what_is_overwritten_meanwhile(
        self, served: Served, engine: Open
    ) -> None:
        first, second = engine().connected(), engine().connected()
        kept = {layer: cache.clone() for layer, cache in first.caches.items()}
        request = Request("a", 130)
        first.admit(request, first_page=1)
        with stopped(served):
            first.step((request, 130))
            for cache in first.caches.values():
                cache.zero_()
        first.worker._guarded.flush(20)
        first.caches = kept
        asked = Request("b", 130)
        hits = second.admit(asked, first_page=10)
        if hits:
            assert second.loaded(asked).invalid_block_ids == set()
            assert second.same(first, {10 + i: 1 + i for i in range(hits // TOKENS)})

    def test_a_slow_disk_is_a_miss_and_no_outage(self, folder: Path, engine: Open) -> None:
        daemon = Served(folder, dram="64MiB", disk="256MiB")
        flag = daemon.slowed()
        with daemon:
            first = engine().connected()
            first.computed(Request("a", 130), first_page=1)
            assert daemon.terminate() == 0, "flushed to disk"
            daemon.start()
            daemon.recovered()
            hasty, asked = engine(load="500ms").connected(), Request("b", 130)
            assert hasty.admit(asked, first_page=10) == 128
            flag.touch()
            began_s = time.monotonic()
            told = hasty.loaded(asked)
            assert told.invalid_block_ids, "its time was over before the disk answered"
            assert time.monotonic() - began_s < 2.5
            assert hasty.worker._guarded.state is State.UP
            flag.unlink()
            time.sleep(3)  # the read that was under way
            again = Request("c", 130)
            assert hasty.admit(again, first_page=15) == 128
            assert hasty.loaded(again).invalid_block_ids == set()
            assert hasty.same(first, {15: 1, 16: 2, 17: 3, 18: 4})

    def test_corrupt_blocks_are_misses(self, folder: Path, engine: Open) -> None:
        # raw, so that the bytes of a page can be found on the disk
        settings = {"disk.codec": "raw"}
        daemon = Served(folder, dram="64MiB", disk="256MiB", settings=settings)
        with daemon:
            first = engine().connected()
            first.computed(Request("a", 130), first_page=1)
            assert daemon.terminate() == 0
            (slab,) = (folder / "state").rglob("slab-*.dat")
            wrong = first.caches["layer.1"][2].view(torch.uint8).numpy().tobytes()[:512]
            content = slab.read_bytes()
            assert content.count(wrong) == 1
            slab.write_bytes(content.replace(wrong, bytes(512)))
            daemon.start()
            daemon.recovered()
            second, asked = engine().connected(), Request("b", 130)
            assert second.admit(asked, first_page=10) == 128
            told = second.loaded(asked)
            assert 11 in told.invalid_block_ids
            assert second.same(first, {10: 1})

    def test_full_tiers(self, folder: Path, engine: Open) -> None:
        with Served(folder, dram="1MiB", disk="0B", settings={"dram.segment": "1MiB"}):
            full = engine().connected()
            began_s = time.monotonic()
            for i in range(10):
                full.computed(Request(f"r{i}", 700, seed=i), first_page=1)
            assert time.monotonic() - began_s < 20
            assert full.worker._guarded.state is State.UP

    def test_a_refused_namespace(self, served: Served, engine: Open) -> None:
        engine(revision="r").connected()
        wider = [KVCacheGroupSpec(list(LAYERS), attention(num_kv_heads=1))]
        other, request = engine(wider, revision="r"), Request("a", 130)
        wait_until(lambda: other.scheduler._guarded.state is State.OFF, 20)
        wait_until(lambda: other.worker._guarded.state is State.OFF, 20)
        assert other.admit(request, first_page=1) == 0
        other.step((request, 130))

    def test_a_failed_load_of_a_hybrid_model_names_the_request(
        self, served: Served, engine: Open
    ) -> None:
        first, second = engine(HYBRID).connected(), engine(HYBRID).connected()
        first.computed(Request("a", 130), first_page=1)
        asked = Request("b", 130)
        assert second.admit(asked, first_page=10) == 128
        assert first.worker._guarded.attempt(lambda namespace: namespace.clear(), 0) > 0
        told = second.loaded(asked)
        assert told.failed_recving == {"b"}
        assert told.invalid_block_ids == set(), "vLLM takes none of a model with several groups"
