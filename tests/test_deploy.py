"""Manifests: their settings exist, and the containers share the socket's directory only."""

import json
import re
from pathlib import Path

import pytest

from kvstored import config

ROOT = Path(__file__).parent.parent
MANIFESTS = sorted((ROOT / "deploy").glob("*.yaml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_settings_in_manifests_exist(path: Path) -> None:
    text = path.read_text()
    named = dict(re.findall(r"(KVSTORED_\w+)(?:, value)?: \"?([\w./]+)\"?", text))
    assert len(named) == 3
    loaded = config.load(environ={**named, "HOME": "/root"})
    assert len(loaded.origins) == 3


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_engine_s_flag_is_json_and_its_socket_is_in_the_shared_directory(path: Path) -> None:
    text = path.read_text()
    (found,) = re.findall(r"--kv-transfer-config=(\{.*\}\})", text, re.DOTALL)
    told = json.loads(re.sub(r"\n\s+", " ", found))
    assert told["kv_load_failure_policy"] == "recompute"
    address = told["kv_connector_extra_config"]["address"]
    assert address == "unix:///run/kvstored/kvstored.sock"
    assert not re.search(r"hostIPC: true|ipc: host|privileged|/dev/shm:", text)
    assert len(re.findall(r"/run/kvstored[],}]", text)) == 2
