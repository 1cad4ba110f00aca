"""KvstoredCache in real Transformers: a real model, and small random ones for what is not about a model."""

import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.crash.served import ROOT, Served, wait_until
from tests.e2e.engine import MODEL
from tests.e2e.worker import Worker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
if importlib.util.find_spec("transformers") is None or not MODEL.is_dir():
    reason = "Transformers and its model are not in this environment: make e2e"
    pytest.skip(reason, allow_module_level=True)

MODULE = "tests.e2e.transformers_worker"
BLOCK_TOKENS = 64
BLOCK_BYTES = BLOCK_TOKENS * 4 * 2 * 2 * 64 * 4
"""Of the small models: layers, K and V, heads, dim, float32."""
LIMITS = {"lookup": "500ms", "load": "2s", "store": "2s", "probe": "500ms"}
NEW = 6

Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes daemons, each in a folder of its own; all end with the test."""
    with ExitStack() as stack:

        def make(**sizes: Any) -> Served:
            # Not tmp_path: a socket's path has at most 107 bytes.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs"))
            served = Served(Path(folder), **sizes)
            stack.callback(served.end)
            return served

        yield make


def options(served: Served, **more: Any) -> dict[str, Any]:
    return {"address": served.address, **LIMITS, **more}


def prompt(seed: int, tokens: int = 5 * BLOCK_TOKENS + 9) -> list[int]:
    return [random.Random(seed).randrange(512) for _ in range(tokens)]


def check(engine: Worker, ids: list[int], told: dict[str, Any]) -> None:
    """The same text as without the daemon, and of what was loaded the same bytes."""
    alone = engine("alone", ids=ids, tokens=NEW)
    assert told["ids"] == alone["ids"]
    blocks = told["loaded"] // BLOCK_TOKENS
    assert told["blocks"][:blocks] == alone["blocks"][:blocks]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(MODULE, tmp_path_factory.mktemp("llama") / "log") as made:
        made("model", name="llama")
        yield made


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(MODULE, tmp_path_factory.mktemp("gemma") / "log") as made:
        made("model", name="gemma")
        yield made


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(MODULE, tmp_path_factory.mktemp("smollm2") / "log") as made:
        made("model", name=str(MODEL))
        yield made


class TestRealModel:
    def test_a_prefix_of_2048_tokens_is_loaded_and_the_text_is_the_same(
        self, engine: Worker, serve: Serve, capsys: pytest.CaptureFixture[str]
    ) -> None:
        served = serve()
        served.start()
        assert engine("open", options=options(served), wait_s=10)
        document = engine("encode", text=(ROOT / "LICENSE").read_text())[:2048]
        first, second = (
            [*document, *engine("encode", text=f"\n\nQuestion: {asked}?\nAnswer: ")]
            for asked in ("What is a Licensor", "Is there a warranty")
        )
        stored = engine("ask", ids=first, tokens=NEW)
        assert (stored["loaded"], stored["taken"]) == (0, len(first) // BLOCK_TOKENS)
        assert engine("open", options=options(served), wait_s=10)  # as a new process would
        told, alone = engine("ask", ids=second, tokens=NEW), engine("alone", ids=second, tokens=NEW)
        assert told["loaded"] == 2048
        assert told["ids"] == alone["ids"]
        assert told["blocks"][:32] == stored["blocks"][:32]
        ratio = alone["ttft_s"] / told["ttft_s"]
        times = f"{alone['ttft_s']:.2f} -> {told['ttft_s']:.3f} s, {ratio:.1f} times"
        with capsys.disabled():
            sys.stdout.write(
                f"\nTransformers, SmolLM2-135M bf16, {len(second)} tokens: TTFT {times}\n"
            )

    def test_logits_after_a_loaded_prefix_have_the_bits_of_those_after_a_kept_one(
        self, engine: Worker, serve: Serve, capsys: pytest.CaptureFixture[str]
    ) -> None:
        served = serve()
        served.start()
        assert engine("open", options=options(served), wait_s=10)
        ids = engine("encode", text=(ROOT / "LICENSE").read_text())[:600]
        told = engine("exact", ids=ids, first=512)
        assert told["tokens"] == 512
        assert told["kv_is_equal"]
        assert told["logits_are_equal"]
        assert told["same_choices"] > 0.9  # one pass rounds bfloat16 elsewhere
        with capsys.disabled():
            difference = f"{told['to_one_pass']:.3g}, {told['same_choices']:.0%} same choices"
            sys.stdout.write(f"\nlogits of a split prefill against one pass: {difference}\n")


class TestExact:
    @pytest.mark.parametrize("name", ["llama", "gemma"])
    def test_loaded_kv_and_logits_have_the_bits_of_kept_ones(
        self, name: str, serve: Serve, request: pytest.FixtureRequest
    ) -> None:
        """Gemma's sliding windows too: its layers hold all, its mask leaves out what lies outside."""
        engine = request.getfixturevalue(name)
        served = serve()
        served.start()
        assert engine("open", options=options(served), wait_s=10)
        told = engine("exact", ids=prompt(1), first=4 * BLOCK_TOKENS)
        assert told["tokens"] == 4 * BLOCK_TOKENS
        assert told["kv_is_equal"]
        assert told["logits_are_equal"]
        assert told["to_one_pass"] < 1e-2  # float32, logits of some tens

    def test_a_static_cache_is_filled_and_stored_as_a_dynamic_one(
        self, llama: Worker, serve: Serve
    ) -> None:
        served = serve()
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        for static in (True, False, True):
            told = llama("ask", ids=prompt(2), tokens=NEW, static=static)
            check(llama, prompt(2), told)
        assert told["loaded"] == 5 * BLOCK_TOKENS
        assert told["taken"] == 0

    def test_the_answer_is_stored_and_a_follow_up_loads_it(
        self, llama: Worker, serve: Serve
    ) -> None:
        served = serve()
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        told = llama("ask", ids=prompt(3), tokens=BLOCK_TOKENS)
        follow_up = [*told["ids"], *prompt(4, 20)]
        again = llama("ask", ids=follow_up, tokens=NEW)
        assert again["loaded"] == 6 * BLOCK_TOKENS
        assert again["ids"] == llama("alone", ids=follow_up, tokens=NEW)["ids"]

    def test_what_cannot_be_stored_is_refused_with_what_to_do(
        self, llama: Worker, gemma: Worker, serve: Serve
    ) -> None:
        served = serve()
        served.start()
        assert gemma("open", options=options(served), wait_s=10)
        assert "DynamicCache() without a config" in gemma("refused", kind="windows")
        assert llama("open", options=options(served), wait_s=10)
        assert "one after the other" in llama("refused", kind="batch")
        assert "not empty" in llama("refused", kind="full")
        assert "without beams" in llama("refused", kind="beams")


class TestIdentity:
    def test_tuned_weights_under_the_same_name_do_not_hit(
        self, llama: Worker, serve: Serve
    ) -> None:
        served = serve()
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        first = llama("ask", ids=prompt(6), tokens=NEW)
        llama("tune", by=0.01)
        try:
            assert llama("open", options=options(served), wait_s=10)
            tuned = llama("ask", ids=prompt(6), tokens=NEW)
            assert tuned["loaded"] == 0
            assert tuned["blocks"] != first["blocks"]
            assert llama("ask", ids=prompt(6), tokens=NEW)["loaded"] == 5 * BLOCK_TOKENS
        finally:
            llama("tune", by=-0.01)

    def test_a_salt_keeps_callers_apart(self, llama: Worker, serve: Serve) -> None:
        served = serve()
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        llama("ask", ids=prompt(7), tokens=NEW, salt="one")
        assert llama("ask", ids=prompt(7), tokens=NEW, salt="another")["loaded"] == 0
        assert llama("ask", ids=prompt(7), tokens=NEW)["loaded"] == 0
        assert llama("ask", ids=prompt(7), tokens=NEW, salt="one")["loaded"] == 5 * BLOCK_TOKENS

    def test_tokens_that_stand_for_an_image_need_its_hash(
        self, llama: Worker, serve: Serve
    ) -> None:
        """The ids of two prompts are the same whatever their images show."""
        served = serve()
        served.start()
        llama("show", image_token=5)
        try:
            assert llama("open", options=options(served), wait_s=10)
            assert "give their hashes as extra_keys" in llama("refused", kind="image")
            shown = [5] * 70 + prompt(8)
            llama("ask", ids=shown, tokens=NEW, salt="hash of a cat")
            assert llama("ask", ids=shown, tokens=NEW, salt="hash of a dog")["loaded"] == 0
            assert llama("ask", ids=shown, tokens=NEW, salt="hash of a cat")["loaded"] > 0
        finally:
            llama("show", image_token=None)


class TestAttention:
    def test_blocks_that_got_more_than_their_share_are_reported(
        self, llama: Worker, serve: Serve
    ) -> None:
        served = serve()
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        llama("ask", ids=prompt(5), tokens=NEW)
        told = llama("attended", ids=prompt(5), block=3)
        assert [score > 0 for score in told["made"]] == [True, False, False, True, False]
        selected = sum(score > 0 for score in told["paid"])
        assert 0 < selected < 5
        assert told["reported"] == selected


class TestFaults:
    def test_a_daemon_that_is_absent_at_the_start_is_found_when_it_comes(
        self, llama: Worker, serve: Serve
    ) -> None:
        served = serve()
        assert not llama("open", options=options(served), wait_s=0.5)
        told = llama("ask", ids=prompt(10), tokens=NEW)
        assert (told["loaded"], told["taken"]) == (0, 0)
        check(llama, prompt(10), told)
        served.start()
        assert llama("connected", wait_s=10)
        llama("ask", ids=prompt(10), tokens=NEW)
        assert llama("ask", ids=prompt(10), tokens=NEW)["loaded"] == 5 * BLOCK_TOKENS

    def test_a_killed_daemon_is_a_miss_and_its_blocks_hit_again_after_it(
        self, llama: Worker, serve: Serve
    ) -> None:
        served = serve()
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        llama("ask", ids=prompt(11), tokens=NEW)
        epoch = served.kill_daemon().epoch
        for seed in (11, 12, 11):
            check(llama, prompt(seed), llama("ask", ids=prompt(seed), tokens=NEW))
        served.answered(after_epoch=epoch)
        served.recovered()
        assert llama("connected", wait_s=10)
        told = llama("ask", ids=prompt(11), tokens=NEW)
        assert told["loaded"] == 5 * BLOCK_TOKENS
        check(llama, prompt(11), told)

    def test_a_daemon_that_hangs_costs_no_more_than_the_limits(
        self, llama: Worker, serve: Serve
    ) -> None:
        served = serve()
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        llama("ask", ids=prompt(13), tokens=NEW)
        pid = served.stat().daemon_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            ends = time.monotonic() + 30
            while time.monotonic() < ends:
                told = llama("ask", ids=prompt(13), tokens=NEW)
                assert told["load_s"] < 0.5 + 2 + 1  # lookup, load, and a busy machine
                assert told["store_s"] < 1
                assert told["loaded"] == 0
            check(llama, prompt(13), told)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert llama("connected", wait_s=20)
        wait_until(
            lambda: llama("ask", ids=prompt(13), tokens=NEW)["loaded"] == 5 * BLOCK_TOKENS,
            what="it hits again",
        )

    def test_a_corrupt_block_ends_the_prefix(self, llama: Worker, serve: Serve) -> None:
        served = serve()
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        llama("ask", ids=prompt(14), tokens=NEW)
        wait_until(lambda: not served.stat().tiers[1].dirty_copies, what="all is on disk")
        assert served.terminate() == 0
        (slab,) = (served.state_dir / "disk").glob("slab-*.dat")
        stored = bytearray(slab.read_bytes())
        stored[3 * BLOCK_BYTES + 5000] ^= 1
        slab.write_bytes(stored)
        served.start()
        served.recovered()
        assert llama("connected", wait_s=10)
        told = llama("ask", ids=prompt(14), tokens=NEW)
        assert told["loaded"] == 3 * BLOCK_TOKENS
        check(llama, prompt(14), told)

    def test_a_slow_disk_is_a_miss_in_time(self, llama: Worker, serve: Serve) -> None:
        served = serve()
        flag = served.slowed()
        served.start()
        assert llama("open", options=options(served, load="500ms"), wait_s=10)
        llama("ask", ids=prompt(15), tokens=NEW)
        assert served.terminate() == 0
        served.start()
        served.recovered()
        assert llama("connected", wait_s=10)
        flag.touch()
        told = llama("ask", ids=prompt(15), tokens=NEW)
        assert told["loaded"] == 0
        assert told["load_s"] < 0.5 + 0.5 + 1  # lookup, load, and a busy machine
        check(llama, prompt(15), told)
        flag.unlink()
        wait_until(
            lambda: llama("ask", ids=prompt(15), tokens=NEW)["loaded"] == 5 * BLOCK_TOKENS,
            what="the disk is fast again",
        )

    def test_full_tiers_forget_and_the_engine_goes_on(self, llama: Worker, serve: Serve) -> None:
        # the learned order would see that nothing comes back, and drop what is new first
        served = serve(dram="16MiB", disk="16MiB", settings={"policy": "lru"})
        served.start()
        assert llama("open", options=options(served), wait_s=10)
        for seed in range(100, 140):  # 1.3 MB each
            told = llama("ask", ids=prompt(seed), tokens=NEW)
            assert told["flushed"]
        check(llama, prompt(139), told)
        told = llama("ask", ids=prompt(139), tokens=NEW)
        assert told["loaded"] == 5 * BLOCK_TOKENS
        check(llama, prompt(139), told)
        assert served.stat().blocks < 40 * 5

    def test_a_refused_namespace_turns_the_connector_off_and_says_so(
        self, llama: Worker, serve: Serve
    ) -> None:
        served = serve()
        served.start()
        named = options(served, model="m", revision="r")
        assert llama("open", options=named, wait_s=10)
        assert not llama("open", options=named, wait_s=10, block_tokens=32)
        told = llama("ask", ids=prompt(15), tokens=NEW)
        assert (told["loaded"], told["taken"]) == (0, 0)
        check(llama, prompt(15), told)
        assert "kvstored refuses this engine" in llama.log()
        assert "block_tokens: 64 -> 32" in llama.log()
