# ruff: noqa: T201 - figures are shown
"""Real vLLM engines on the CPU with a real model, sharing prefixes through a real daemon. `make e2e` runs it in an environment of its own."""

import importlib.util
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.served import ROOT, Served, wait_until

from .engine import MODEL, Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
if importlib.util.find_spec("vllm") is None or not MODEL.is_dir():
    pytest.skip("vLLM and its model are not in this environment: make e2e", allow_module_level=True)

PREFIX_TOKENS = 2000
BLOCK_TOKENS = 128
HIT_TOKENS = PREFIX_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, dram="512MiB", disk="1GiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def connector(served: Served) -> dict[str, str]:
    return {"address": served.address}


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Engine]:
    with Engine(folder, None) as engine:
        yield engine


@pytest.fixture(scope="module")
def first(folder: Path, connector: dict[str, str]) -> Iterator[Engine]:
    with Engine(folder, connector) as engine:
        yield engine


@pytest.fixture(scope="module")
def second(folder: Path, connector: dict[str, str]) -> Iterator[Engine]:
    with Engine(folder, connector) as engine:
        yield engine


def prompt(engine: Engine, question: str, at: int = 0) -> list[int]:
    """A long document, another one for each `at`, and a question."""
    text = (ROOT / "DESIGN.md").read_text() + (ROOT / "docs/cli.md").read_text()
    document = engine.tokens(text[at * 2000 :])
    return document[:PREFIX_TOKENS] + engine.tokens(f"\nQuestion: {question}\nAnswer:")


@dataclass(frozen=True, slots=True)
class Expected:
    """What vLLM alone says: having computed all of it, and having found the prefix in its own cache.

    These may differ after many tokens: kernels of BF16 round differently for another number of tokens at once. KV that was loaded must give what
    KV that was kept gives.
    """

    computed: tuple[int, ...]
    kept: tuple[int, ...]
    kept_logprobs: tuple[float, ...]


def expected(plain: Engine, asked: list[int], tokens: int) -> Expected:
    plain.forget()
    computed = plain.generate(asked, tokens)
    kept = plain.generate(asked, tokens)
    assert (computed.cached, kept.cached) == (0, HIT_TOKENS)
    return Expected(computed.tokens, kept.tokens, kept.logprobs)


def stored(served: Served) -> None:
    """What engines store in the background has arrived: nothing more comes."""
    seen = [-1]

    def is_quiet() -> bool:
        seen.append(served.stat().counters["put_blocks"])
        return seen[-1] == seen[-2]

    wait_until(is_quiet, 20)


def test_two_engines_say_the_same_and_the_second_computes_only_the_question(
    plain: Engine, first: Engine, second: Engine, served: Served
) -> None:
    asked = prompt(plain, "What is a block?")
    alone = expected(plain, asked, 64)
    assert first.generate(asked, 64).tokens == alone.computed
    stored(served)
    said = second.generate(asked, 64)
    assert said.tokens == alone.kept
    assert said.logprobs == alone.kept_logprobs, "not only the same words"
    assert said.cached == HIT_TOKENS
    assert second.external_hits() == HIT_TOKENS
    metrics = second.metrics()
    assert metrics["vllm:kvstored_hit_dram_tokens"] == HIT_TOKENS
    assert metrics["vllm:kvstored_loaded_blocks"] == HIT_TOKENS // BLOCK_TOKENS
    other = prompt(plain, "What is a tier?")
    assert second.generate(other, 64).tokens == expected(plain, other, 64).kept


def test_the_time_to_the_first_token_of_a_shared_prefix(
    plain: Engine, second: Engine, first: Engine, served: Served
) -> None:
    asked = prompt(plain, "What is a lease?")
    first.generate(asked, 1)
    stored(served)
    without, loaded = [], []
    for _ in range(3):
        plain.forget()
        second.forget()
        without.append(plain.generate(asked, 1).seconds)
        said = second.generate(asked, 1)
        assert said.cached == HIT_TOKENS
        loaded.append(said.seconds)
    ratio = statistics.median(without) / statistics.median(loaded)
    print(
        f"\nTTFT of {PREFIX_TOKENS} shared tokens: {statistics.median(without):.3f} s computed,"
        f" {statistics.median(loaded):.3f} s loaded: {ratio:.1f} times"
    )
    assert ratio > 2


def test_the_next_turn_hits_what_the_answer_before_it_said(
    plain: Engine, first: Engine, second: Engine, served: Served
) -> None:
    asked = prompt(plain, "What is a pin?", at=1)
    answer = first.generate(asked, 200)
    stored(served)
    turn = [*asked, *answer.tokens, *plain.tokens("\nQuestion: And why?\nAnswer:")]
    said = second.generate(turn, 32)
    assert said.cached > len(asked), "blocks that decode filled were stored"
    assert said.cached == (len(asked) + len(answer.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    # The same split without kvstored: the engine that computed the answer goes on with its own blocks.
    assert said.tokens == first.generate(turn, 32).tokens


def test_a_salt_keeps_tenants_apart(
    plain: Engine, first: Engine, second: Engine, served: Served
) -> None:
    asked = prompt(plain, "What is a salt?", at=2)
    first.generate(asked, 1, salt="tenant-a")
    stored(served)
    before = second.external_hits()
    assert second.generate(asked, 1, salt="tenant-b").cached == 0
    assert second.generate(asked, 1).cached == 0
    assert second.external_hits() == before
    assert second.generate(asked, 1, salt="tenant-a").cached == HIT_TOKENS


def test_generation_goes_on_when_the_daemon_is_killed_and_hits_come_back(
    plain: Engine, first: Engine, second: Engine, served: Served
) -> None:
    asked = prompt(plain, "What is a fill?", at=3)
    alone = expected(plain, asked, 250)
    first.generate(asked, 1)
    stored(served)
    second.forget()
    going_on = second.generating(asked, 250)
    last = served.kill_daemon()
    assert going_on.result(120).tokens in (alone.kept, alone.computed)
    served.answered(last.epoch)
    served.recovered()
    # The first calls after it find the daemon gone; the background finds it again.
    second.forget()
    wait_until(lambda: _has_hits(second, asked), 20, "hits come back")
    assert second.generate(asked, 250).tokens == alone.kept


def _has_hits(engine: Engine, asked: list[int]) -> bool:
    engine.forget()
    return engine.generate(asked, 1).cached == HIT_TOKENS


@pytest.fixture(scope="module")
def other_weights(folder: Path) -> Path:
    """The same model with the weights of one layer changed."""
    from safetensors.torch import load_file, save_file

    made = folder / "model"
    shutil.copytree(MODEL, made)
    weights = load_file(made / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    weights[name] = -weights[name]
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def test_other_weights_under_the_same_name_have_no_hits(
    plain: Engine,
    first: Engine,
    served: Served,
    folder: Path,
    connector: dict[str, str],
    other_weights: Path,
) -> None:
    asked = prompt(plain, "What is a block?")
    first.generate(asked, 1)
    stored(served)
    names = {"served_model_name": str(MODEL)}
    with Engine(folder, connector, other_weights, **names) as other:
        said = other.generate(asked, 48)
        assert (said.cached, other.external_hits()) == (0, 0)
        stored(served)
        kept = other.generate(asked, 48)
        other.forget()
        assert other.generate(asked, 48).tokens == kept.tokens
        assert other.external_hits() == HIT_TOKENS, "its own blocks it finds"
    assert plain.generate(asked, 48).tokens != said.tokens, "its weights matter"


def test_another_dtype_of_the_same_weights_is_refused_and_runs_without(
    plain: Engine, first: Engine, served: Served, folder: Path, connector: dict[str, str]
) -> None:
    asked = prompt(plain, "What is a block?")
    first.generate(asked, 1)
    with Engine(folder, connector, kv_cache_dtype="fp8") as other:
        assert len(other.generate(asked, 16).tokens) == 16
        assert other.external_hits() == 0
        assert "dtype: bfloat16/auto -> bfloat16/fp8" in other.said()


def test_layers_are_loaded_while_the_step_runs(
    plain: Engine, first: Engine, served: Served, folder: Path, connector: dict[str, str]
) -> None:
    asked = prompt(plain, "What is a slab?", at=4)
    alone = expected(plain, asked, 48)
    first.generate(asked, 1)
    stored(served)
    options = {**connector, "layerwise": True}
    with Engine(folder, options, async_scheduling=False) as other:
        said = other.generate(asked, 48)
        assert (said.tokens, said.cached) == (alone.kept, HIT_TOKENS)
        assert other.metrics()["vllm:kvstored_loads"] == 4


def test_several_requests_at_once_and_preemption(
    plain: Engine, served: Served, folder: Path, connector: dict[str, str]
) -> None:
    """39 blocks for requests that need 50 in the end: vLLM preempts, and resumes from what is stored."""
    asked = [prompt(plain, "What is a slot?", at=at)[-350:] for at in (5, 6, 7)]
    small = {"block_size": 32, "max_model_len": 1024, "num_gpu_blocks_override": 40}
    with Engine(folder, None, **small) as alone:
        expected = [each.tokens for each in alone.generate_all(asked, 180)]
    with Engine(folder, {**connector, "revision": "preempted"}, **small) as other:
        said = [each.tokens for each in other.generate_all(asked, 180)]
        metrics = other.metrics()
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:kvstored_hit_dram_tokens"] > 0, "resumed from the daemon"
    # Those that were not preempted went through the same computation.
    assert said[0] == expected[0]
    print(
        f"preempted: {[_same(a, b) for a, b in zip(said, expected, strict=True)]} of 180 tokens equal"
    )
    assert min(_same(a, b) for a, b in zip(said, expected, strict=True)) > 50


def _same(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def tiny(folder: Path, kind: str) -> Path:
    """A model of a few layers with random weights: its words mean nothing, but any wrong KV changes them."""
    import torch
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    shape = {
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    torch.manual_seed(0)
    model = (
        Gemma3ForCausalLM(
            Gemma3TextConfig(
                **shape,
                num_hidden_layers=6,
                sliding_window=96,
                layer_types=layers,
                tie_word_embeddings=False,
            )
        )
        if kind == "hybrid"
        else LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4))
    ).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    model.save_pretrained(folder / kind)
    return folder / kind


@pytest.mark.parametrize(("kind", "ranks"), [("hybrid", 1), ("parallel", 2)])
def test_sliding_windows_and_tensor_parallel_ranks(
    served: Served, folder: Path, connector: dict[str, str], kind: str, ranks: int
) -> None:
    """Groups of pages that are freed as the window moves on; and two worker processes, each with its shard."""
    asked = [5 + (i * i * 31) % 990 for i in range(600)]
    hits = 576
    options = {
        "block_size": 32,
        "max_model_len": 2048,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": ranks,
    }
    model = tiny(folder, kind)
    with Engine(folder, connector, model, **options) as one:
        computed = one.generate(asked, 64)
        kept = one.generate(asked, 64)
        stored(served)
    assert (computed.cached, kept.cached) == (0, hits)
    assert len(set(kept.tokens)) > 10, "it does not repeat itself"
    with Engine(folder, connector, model, **options) as other:
        said = other.generate(asked, 64)
        assert (said.cached, other.external_hits()) == (hits, hits)
        assert (said.tokens, said.logprobs) == (kept.tokens, kept.logprobs)
        assert other.metrics()["vllm:kvstored_hit_dram_tokens"] == hits * ranks


def adapter(folder: Path, seed: int) -> Path:
    """LoRA weights for the tiny model, always at the same place under the same name."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    made = folder / "adapter"
    made.mkdir(exist_ok=True)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, 128).to(torch.bfloat16) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, 8).to(torch.bfloat16) * 0.1
    save_file(weights, made / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (made / "adapter_config.json").write_text(json.dumps({**told, "bias": "none"}))
    return made


def test_an_adapter_s_kv_is_its_own_even_when_its_weights_change_under_its_name(
    served: Served, folder: Path, connector: dict[str, str]
) -> None:
    asked = [5 + (i * i * 37) % 990 for i in range(300)]
    hits = 288
    options = {"block_size": 32, "max_model_len": 1024, "skip_tokenizer_init": True}
    lora = {**options, "enable_lora": True, "max_lora_rank": 8}
    model = tiny(folder, "adapted")
    with Engine(folder, connector, model, **lora) as one:
        bare = one.generate(asked, 16)
        first = one.generate(asked, 16, adapter=adapter(folder, 1))
        kept = one.generate(asked, 16, adapter=folder / "adapter")
        stored(served)
    assert (bare.cached, first.cached, kept.cached) == (0, 0, hits)
    assert bare.tokens != first.tokens, "the adapter matters"
    with Engine(folder, connector, model, **lora) as same:
        said = same.generate(asked, 16, adapter=folder / "adapter")
        assert (said.cached, said.logprobs) == (hits, kept.logprobs)
    with Engine(folder, connector, model, **lora) as other:
        said = other.generate(asked, 16, adapter=adapter(folder, 2))
        assert said.cached == 0
        assert said.tokens != first.tokens
