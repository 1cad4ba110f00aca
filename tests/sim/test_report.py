"""The result of a replay as JSON, table and picture."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvstored.errors import InvalidArgument
from kvstored.sim.offline import replay_offline
from kvstored.sim.report import Result, Setup, as_json, plot, table
from kvstored.sim.traces import open_trace

from .oracle import LeafLru

TINY = Path(__file__).parent / "fixtures" / "tiny.kvt"


def replayed(limit: int | None = None) -> Result:
    setup = Setup("tiny", "offline", "oracle", 16, 4096, 1, {"dram": 4})
    told: list[int] = []
    done = replay_offline(open_trace(TINY), LeafLru(4), setup, limit=limit, advance=told.append)
    assert sum(told) == done.requests
    return done


def test_the_json_object_holds_the_promised_figures() -> None:
    figures = json.loads(json.dumps(as_json(replayed())))
    assert figures["requests"] == 6
    assert figures["blocks"] == 3 + 4 + 4 + 1 + 2 + 5
    assert figures["hit_blocks"] == 0 + 2 + 3 + 1 + 0 + 2
    assert figures["block_hit_ratio"] == round(8 / 19, 6)
    assert figures["put_blocks"] == figures["evicted_blocks"] + 4
    assert figures["wrong_blocks"] == 0
    assert figures["capacity_blocks"] == {"dram": 4}
    assert figures["tier_hit_blocks"] == {"hbm": 0, "dram": 8, "nvme": 0, "remote": 0}
    assert figures["read_bytes"] == 8 * 4096
    assert figures["buckets"]
    assert all(bucket["requests"] for bucket in figures["buckets"]), "none that is empty"


def test_limit_ends_the_replay_early() -> None:
    assert replayed(limit=2).requests == 2
    assert replayed(limit=0).block_hit_ratio == 0.0


def test_the_table_shows_ratio_and_wrong_blocks() -> None:
    console = Console(width=100, record=True, file=StringIO())
    console.print(table(replayed()))
    text = console.export_text()
    assert "0.4211" in text
    assert "wrong blocks" in text


@pytest.mark.parametrize("limit", [0, None])
def test_the_plot_is_a_picture(tmp_path: Path, limit: int | None) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra `plot`) is not installed")
    plot(replayed(limit), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_unknown_format_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra `plot`) is not installed")
    with pytest.raises(InvalidArgument, match="cannot draw"):
        plot(replayed(), tmp_path / "picture.nonsense")
