"""A real model on a real (small) engine, with and without the daemon: the same text, the same bits, less to compute."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.smollm2.engine import BLOCK_TOKENS
from examples.smollm2.tokens import chat
from examples.smollm2.weights import Missing, model_file
from tests.crash.served import ROOT, Served, wait_until
from tests.engine.asking import Asked

# The model's download, once, is no part of any test's time.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60, func_only=True)]

RULES = "You answer questions about a licence, in one short sentence, from its text alone. "
DOCUMENT = (ROOT / "LICENSE").read_text()[1000:2300]


def prompt(question: str, system: str = RULES) -> str:
    return chat(system, f"{DOCUMENT}\n\n{question}")


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return model_file()
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvs") as folder, Served(Path(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def ask(served: Served) -> Iterator[Asked]:
    with Asked(served.address) as engine:
        yield engine


def test_text_and_kv_are_the_same_and_the_second_question_loads_what_the_first_computed(
    ask: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = prompt("What is a Licensor?"), prompt("What is Legal Entity?")
    stored = ask(first, with_daemon=True)
    assert (stored.tokens, stored.trouble) == (0, "")
    alone, helped = ask(second, with_daemon=False), ask(second, with_daemon=True)
    assert helped.text == alone.text != ""
    assert helped.ids == alone.ids
    assert helped.kv == alone.kv != stored.kv
    assert alone.tokens == 0
    assert helped.prompt_tokens - helped.tokens < 2 * BLOCK_TOKENS
    assert helped.by_tier == {"dram": helped.tokens}
    with capsys.disabled():
        ratio = alone.ttft_s / helped.ttft_s
        tokens = f"{helped.tokens} of {helped.prompt_tokens} tokens loaded"
        times = f"{alone.ttft_s:.3f} -> {helped.ttft_s:.3f} s"
        sys.stdout.write(f"\nSmolLM2-135M TTFT {times}, {ratio:.1f} times, {tokens}\n")


def test_a_changed_system_prompt_hits_up_to_the_change_and_no_further(ask: Asked) -> None:
    rules = RULES * 8
    ask(prompt("Who may sign?", f"{rules}Today is Monday."), with_daemon=True)
    before = ask(prompt("Who may sign?", f"{rules}Today is Monday."), with_daemon=True)
    tuesday = prompt("Who may sign?", f"{rules}Today is Tuesday.")
    after, alone = ask(tuesday, with_daemon=True), ask(tuesday, with_daemon=False)
    same = _common(before.prompt_ids, after.prompt_ids)
    assert 2 * BLOCK_TOKENS < same < before.tokens
    assert after.tokens == same // BLOCK_TOKENS * BLOCK_TOKENS
    assert (after.text, after.kv) == (alone.text, alone.kv)
    assert ask(prompt("Who?", f"Never mind. {rules}"), with_daemon=True).tokens == 0


def test_a_killed_daemon_costs_nothing_but_time_and_its_memory_is_still_warm(
    ask: Asked, served: Served
) -> None:
    question = prompt("What is Source form?")
    before = ask(question, with_daemon=True)
    epoch = served.kill_daemon().epoch
    meanwhile = ask(question, with_daemon=True)
    assert (meanwhile.text, meanwhile.kv) == (before.text, before.kv)
    served.answered(after_epoch=epoch)
    served.recovered()
    after = ask(question, with_daemon=True)
    assert (after.text, after.kv) == (before.text, before.kv)
    assert after.by_tier == {"dram": after.tokens}
    assert after.prompt_tokens - after.tokens <= BLOCK_TOKENS


def test_a_new_engine_and_a_new_daemon_find_the_prefix_on_disk(ask: Asked, served: Served) -> None:
    question = prompt("What is Object form?")
    before = ask(question, with_daemon=True)
    wait_until(lambda: not served.stat().tiers[1].dirty_copies, what="all is on disk")
    assert served.terminate() == 0
    alone = ask(question, with_daemon=True)
    assert alone.tokens == 0
    assert alone.trouble
    assert (alone.text, alone.kv) == (before.text, before.kv)
    served.start()
    served.recovered()
    with Asked(served.address) as second:
        after = second(question, with_daemon=True)
    assert after.by_tier == {"nvme": after.tokens}
    assert after.prompt_tokens - after.tokens <= BLOCK_TOKENS
    assert (after.text, after.kv) == (before.text, before.kv)
    assert ask(question, with_daemon=True).by_tier == {"dram": after.tokens}


def _common(one: list[int], other: list[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
