"""`kvstored codec bench`: its figures on real KV, its advice, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvstored.cli.codec import codec
from kvstored.errors import InvalidArgument
from tests.codec import real


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Two heads of 256 tokens each, K then V, of two prompts."""
    paths = {}
    for variant in ("a", "b"):
        path = tmp_path / f"{variant}.npy"
        np.save(path, real.bits(variant))
        paths[variant] = str(path)
    return paths


def run(*arguments: str) -> Result:
    return CliRunner().invoke(codec, ["bench", *arguments])


def figures(*arguments: str) -> dict[str, dict[str, object]]:
    outcome = run("--json", *arguments)
    assert outcome.exit_code == 0, outcome.output
    (file,) = json.loads(outcome.stdout)["files"]
    return {mode["mode"]: mode for mode in file["modes"]}


def test_every_mode_has_a_ratio_and_rates(files: dict[str, str]) -> None:
    modes = figures(files["b"], "--against", files["a"])
    ratio = {name: mode["ratio"] for name, mode in modes.items()}
    assert ratio["plan small"] > ratio["planes"] > ratio["zstd 1 alone"] > 1.2
    assert ratio["P frame small"] >= ratio["P frame"] > 2.9
    assert all(mode["encode_rate"] > 0 and mode["decode_rate"] > 0 for mode in modes.values())
    assert all(mode["error"] is None for mode in modes.values())


def test_lossy_modes_come_with_their_errors(files: dict[str, str]) -> None:
    modes = figures(files["b"], "--lossy")
    int8, int4 = modes["int8 by token"]["error"], modes["int4 by token"]["error"]
    assert isinstance(int8, dict)
    assert isinstance(int4, dict)
    assert 0 < int8["relative"] < int4["relative"] < 0.2
    assert int8["cosine"] > int4["cosine"]
    assert modes["planes"]["error"] is None


def test_advice_names_a_setting_that_exists(files: dict[str, str], tmp_path: Path) -> None:
    outcome = run("--json", "--advise", files["a"])
    advice = json.loads(outcome.stdout)["advice"]
    assert advice["disk.codec"] in {"fast", "small"}
    noise = tmp_path / "noise.npy"
    np.save(noise, np.random.default_rng(1).integers(0, 1 << 16, (2, 256, 64), dtype=np.uint16))
    assert json.loads(run("--json", "--advise", str(noise)).stdout)["advice"]["disk.codec"] == "raw"


def test_the_table_has_a_row_for_each_mode(files: dict[str, str]) -> None:
    outcome = run(files["a"])
    assert outcome.exit_code == 0
    for name in ("planes", "exponents", "symbols:4", "plan fast", "zstd 1 alone", "disk.codec"):
        assert name in outcome.stdout


def test_plot_writes_a_picture(files: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "modes.png"
    assert run(files["a"], "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dtype", "float32"], "dtype does not fit"),
        (["--token-axis", "-1"], "no block along this axis"),
        (["--block-tokens", "512"], "no block along this axis"),
        (["--against", "missing.npy"], "cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    files: dict[str, str], arguments: list[str], reason: str
) -> None:
    outcome = run(files["a"], *arguments)
    assert isinstance(outcome.exception, InvalidArgument)
    assert reason in str(outcome.exception)


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.npy"
    path.write_text("no array")
    assert isinstance(run(str(path)).exception, InvalidArgument)
