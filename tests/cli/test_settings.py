"""serve, config and restart as far as they go without a daemon."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstored.cli import main
from kvstored.cli.serve import plan
from kvstored.config import load


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(main.cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_config_shows_values_with_their_origins(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text('policy = "composite"')
    shown = json.loads(_run("config", "--config", str(file), "--dram", "2GiB", "--json"))
    assert shown["dram.capacity"]["value"] == "2GiB"
    assert shown["dram.capacity"]["origin"] == "flag"
    assert shown["policy"]["origin"] == f"file {file}"
    assert shown["limits.drain"]["origin"] == "default"
    table = _run("config", "--config", str(file))
    assert f"file {file}" in table


def test_serve_refuses_a_bare_number_and_a_typo_before_it_starts_anything(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text('[dram]\ncapcity = "1GiB"')
    for flags, words in (
        (["--config", str(file)], "did you mean dram.capacity"),
        (["--dram", "64"], "64GiB"),
        (["--dram", "1024TiB"], "does not fit"),
    ):
        result = CliRunner().invoke(main.cli, ["serve", *flags])
        assert result.exit_code == 78
        assert words in result.stderr


def test_a_refusal_exits_with_78(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvstored", "config", "--dram", "64"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 78
    assert "write for example 64GiB" in capsys.readouterr().err


def test_restart_without_a_daemon_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvstored", "restart", "--state-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 69
    assert "no kvstored runs" in capsys.readouterr().err


def test_without_a_grpc_address_there_is_no_front(tmp_path: Path) -> None:
    flags = {"state_dir": str(tmp_path)}
    both = plan(load(flags=flags, environ={}).config)
    one = plan(load(flags={**flags, "listen": "off"}, environ={}).config)
    assert [child.name for child in both.children] == ["daemon", "front"]
    assert [child.name for child in one.children] == ["daemon"]
    assert [child.keeps_fds for child in both.children] == [True, False]


def test_hidden_commands_stay_out_of_the_help() -> None:
    names = {line.split()[0] for line in _run("--help").splitlines() if line[2:3].strip()}
    assert {"serve", "restart", "config"} <= names
    assert not {"daemon", "front"} & names
