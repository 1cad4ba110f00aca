"""`make demo` says what is so, on a short document."""

import json
import subprocess
import sys
from typing import Any

import pytest

from examples.smollm2.demo import ROUNDS
from examples.smollm2.weights import Missing, model_file
from tests.crash.served import ROOT, environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60, func_only=True)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    try:
        model_file()
    except Missing as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("demo")
    document = folder / "document"
    document.write_text((ROOT / "LICENSE").read_text()[1000:1300])
    command = [sys.executable, "-m", "examples.smollm2", "--json", "--document", document]
    done = subprocess.run(
        [*command, "--picture", folder / "demo.png"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    whole: dict[str, Any] = json.loads(done.stdout)
    return whole


def test_answers_and_kv_are_the_same_in_every_round(told: dict[str, Any]) -> None:
    assert [each["title"] for each in told["rounds"]] == [each.title for each in ROUNDS]
    for each in told["rounds"]:
        assert each["is_same_text"], each
        assert each["is_same_kv"], each
        assert each["text"], each


def test_hits_come_from_where_each_round_left_them(told: dict[str, Any]) -> None:
    first, second, third, changed, another, killed, lost = (
        each["tokens_by_tier"] for each in told["rounds"]
    )
    assert first == {}
    assert second == third == another == killed
    assert second["dram"] > changed["dram"] > 0
    assert lost == {"nvme": second["dram"]}


def test_what_is_saved_follows_from_the_tokens_that_hit(told: dict[str, Any]) -> None:
    for each in told["rounds"]:
        tokens = sum(each["tokens_by_tier"].values())
        assert each["loaded_bytes"] == tokens * 23_040  # 30 layers x K, V x 3 heads x 64 x float16
        assert each["saved_flops"] >= 2 * 134e6 * tokens
        assert (each["saved_flops"] == 0) == (tokens == 0)
