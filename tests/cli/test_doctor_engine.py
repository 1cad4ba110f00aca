"""`kvstored doctor --engine`: what it says about an engine that is here, absent, old, or cannot reach the daemon."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstored.cli import checks_engine
from kvstored.cli.checks import Level
from kvstored.cli.checks_engine import ENGINES
from kvstored.connectors import versions
from tests.cli.conftest import ROOT, Served, run

VLLM, LMCACHE, SGLANG = ENGINES["vllm"], ENGINES["lmcache"], ENGINES["sglang"]


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: version)


def test_an_engine_that_is_not_here_is_told_where_to_ask(daemon: Served) -> None:
    answer = run("doctor", "--engine", "sglang", "--json")
    checks = {each["name"]: each for each in json.loads(answer.stdout)["checks"]}
    assert answer.exit_code == 1
    assert checks["engine"]["level"] == "fail"
    assert "the engine's own" in checks["engine"]["remedy"]
    assert checks["socket"]["level"] == "ok"
    assert str(daemon.socket) in checks["set"]["text"]


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.31.2", "fail"), ("0.32.0", "ok"), ("0.33.9", "ok"), ("0.40.0", "warn")],
)
def test_the_release_is_weighed(monkeypatch: pytest.MonkeyPatch, version: str, level: str) -> None:
    installed(monkeypatch, version)
    found = checks_engine.version(versions.VLLM)
    assert found.level == level
    assert version in found.text
    assert bool(found.remedy) == (level != "ok")


def test_hashes_that_differ_from_process_to_process_are_told() -> None:
    assert checks_engine.hashes(VLLM, None).level is Level.OK
    assert checks_engine.hashes(VLLM, "0").level is Level.OK
    assert checks_engine.hashes(VLLM, "random").level is Level.FAIL
    assert checks_engine.hashes(LMCACHE, None).level is Level.WARN
    assert checks_engine.hashes(LMCACHE, "0").level is Level.OK


def test_block_sizes_are_a_multiple_of_the_engine_s_page() -> None:
    assert checks_engine.blocks(VLLM, 256).level is Level.OK
    assert checks_engine.blocks(VLLM, None).level is Level.OK
    wrong = checks_engine.blocks(VLLM, 100)
    assert (wrong.level, wrong.remedy) == (Level.FAIL, "96 or 112")
    assert checks_engine.blocks(SGLANG, 1).level is Level.OK
    assert checks_engine.blocks(SGLANG, 0).level is Level.FAIL


def test_a_socket_that_is_not_there_or_does_not_answer_fails(tmp_path: Path) -> None:
    absent = checks_engine.reachable(tmp_path / "s")
    assert (absent.level, "--socket" in absent.remedy) == (Level.FAIL, True)
    (tmp_path / "file").write_text("")
    assert checks_engine.reachable(tmp_path / "file").level is Level.FAIL


def test_a_socket_of_another_user_fails_with_both_ids(
    daemon: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_engine.os, "access", lambda *_: False)
    found = checks_engine.reachable(daemon.socket)
    assert found.level is Level.FAIL
    assert f"uid {os.getuid()}" in found.text
    assert "socket_mode = 0660" in found.remedy


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_what_to_set_is_valid_json_that_names_a_class(name: str) -> None:
    words = shlex.split(ENGINES[name].arguments("unix:///run/kvstored/kvstored.sock"))
    told: dict[str, Any] = json.loads(words[-1])
    module = told.get("kv_connector_module_path") or told["module_path"]
    class_name = told.get("kv_connector") or told["class_name"]
    source = (ROOT / module.replace(".", "/")).with_suffix(".py")
    if source.exists():  # connectors come one by one
        assert f"class {class_name}(" in source.read_text()
    assert "unix:///run/kvstored/kvstored.sock" in words[-1]


def test_packages_that_the_client_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks_engine.packages().level is Level.OK
    monkeypatch.setattr(checks_engine.importlib.util, "find_spec", lambda _: None)
    found = checks_engine.packages()
    assert (found.level, found.remedy) == (Level.FAIL, "pip install numpy xxhash protobuf")


def test_no_engine_is_imported() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch','vllm','sglang','lmcache')));"
        "from kvstored.cli import checks_engine"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=50, check=False)
    assert done.returncode == 0
