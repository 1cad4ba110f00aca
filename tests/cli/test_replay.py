"""`kvstored replay` as a command: its flags, its figures offline, and what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstored.cli.replay import replay
from kvstored.errors import InvalidArgument

FIXTURES = Path(__file__).parents[1] / "sim" / "fixtures"
TINY = str(FIXTURES / "tiny.kvt")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(replay, [TINY, *arguments])


def figures(*arguments: str) -> dict[str, object]:
    outcome = run("--offline", "--json", *arguments)
    assert outcome.exit_code == 0, outcome.output
    whole = json.loads(outcome.stdout)
    assert isinstance(whole, dict)
    return whole


def test_offline_json_is_one_object_with_the_promised_figures() -> None:
    whole = figures("--capacity-blocks", "4")
    promised = ("requests", "blocks", "hit_blocks", "put_blocks", "evicted_blocks", "wrong_blocks")
    assert [whole[name] for name in promised] == [6, 19, 8, 11, 7, 0]
    assert whole["block_hit_ratio"] == round(8 / 19, 6)


def test_offline_without_a_capacity_evicts_nothing() -> None:
    whole = figures()
    assert (whole["hit_blocks"], whole["evicted_blocks"]) == (10, 0)
    assert whole["capacity_blocks"] is None


def test_limit_replays_the_first_requests_only() -> None:
    assert figures("--limit", "2")["requests"] == 2


def test_tiers_add_up_and_the_slow_one_serves_what_the_fast_one_lost() -> None:
    whole = figures("--tiers", "dram=4,nvme=100")
    assert whole["hit_blocks"] == 10
    assert whole["capacity_blocks"] == {"dram": 4, "nvme": 100}
    by_tier = whole["tier_hit_blocks"]
    assert isinstance(by_tier, dict)
    assert by_tier["nvme"] > 0
    assert by_tier["dram"] + by_tier["nvme"] == 10


@pytest.mark.parametrize("policy", ["lru", "composite"])
def test_every_policy_can_be_replayed(policy: str) -> None:
    assert figures("--policy", policy)["policy"] == policy


def test_the_table_names_the_figures() -> None:
    outcome = run("--offline", "--capacity-blocks", "4")
    assert outcome.exit_code == 0
    assert "block hit ratio" in outcome.stdout
    assert "0.4211" in outcome.stdout
    assert "from dram" in outcome.stdout
    assert "from nvme" not in outcome.stdout, "there is no such tier"
    assert "from nvme" in run("--offline", "--tiers", "dram=4,nvme=100").stdout


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra `plot`) is not installed")
    picture = tmp_path / "picture.png"
    outcome = run("--offline", "--plot", str(picture))
    assert outcome.exit_code == 0
    assert f"the plot is in {picture}" in outcome.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--block-bytes", "65536"), "unit"),
        (("--block-bytes", "64KX"), "unit"),
        (("--speed", "fast"), "1, 10 or max"),
        (("--speed", "0"), "1, 10 or max"),
        (("--clients", "0"), "--clients"),
        (("--limit", "0"), "--limit"),
        (("--offline", "--block-bytes", "4KiB"), "no meaning with --offline"),
        (("--offline", "--speed", "1"), "no meaning with --offline"),
        (("--policy", "lru"), "needs --offline"),
        (("--capacity-blocks", "5"), "needs --offline"),
        (("--offline", "--policy", "mru"), "mru"),
        (("--offline", "--tiers", "dram"), "dram=1000"),
        (("--offline", "--tiers", "nvme=5"), "dram is always a tier"),
        (("--offline", "--tiers", "dram=5", "--capacity-blocks", "5"), "--tiers for several"),
    ],
)
def test_flags_that_make_no_sense_are_refused_with_what_does(
    arguments: tuple[str, ...], words: str
) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert words in outcome.output


def test_a_malformed_trace_is_an_invalid_argument(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("hello\n")
    outcome = CliRunner().invoke(replay, [str(path), "--offline"])
    assert isinstance(outcome.exception, InvalidArgument)
