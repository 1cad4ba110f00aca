"""The whole of it: keeper, daemon and gRPC front, as `serve` starts them with the usual settings."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.statedir import read_status
from tests.cli.conftest import ROOT, Served, done, told

BLOCK = 8192
PUT = ("--block-bytes", "8KiB", "--block-tokens", "4")
TOKENS = ("--tokens", "1,2,3,4,5,6,7,8")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        whole = Served(Path(folder) / "state", KVSTORED_LISTEN=f"127.0.0.1:{port}")
        whole.state_dir.mkdir()
        for name, value in whole.environment.items():
            monkeypatch.setenv(name, value)
        whole.start()
        yield whole
        whole.stop()


def test_restart_replaces_daemon_and_front_and_dram_stays(served: Served) -> None:
    # The front never told the keeper that it was ready, so restart waited its minute and gave up.
    content = os.urandom(BLOCK * 2)
    told("put", "m@1", *TOKENS, *PUT, input=content)
    before = told("stat")
    assert told("restart", "--timeout", "30s")["restarted_in_s"] < 30
    after = told("stat")
    assert after["keeper_pid"] == before["keeper_pid"]
    assert after["daemon_pid"] != before["daemon_pid"]
    assert done("get", "m@1", *TOKENS).stdout_bytes == content


def test_with_json_every_line_of_every_process_is_an_object_on_stdout() -> None:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        state = Path(folder) / "state"
        state.mkdir()
        environment = {**Served(state).environment, "KVSTORED_LISTEN": f"unix:{folder}/front"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstored", "serve", "--json", "--log-format", "console"],
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        lines = []
        while [each["event"] for each in lines].count("child ready") < 2:
            lines.append(json.loads(process.stdout.readline()))
        process.terminate()
        rest, errors = process.communicate(timeout=30)
    lines += map(json.loads, rest.splitlines())
    assert {"keeper", "kvstored.daemon"} <= {each["logger"] for each in lines}
    assert errors == b""
    assert process.returncode == 0


def test_stat_names_the_front_before_it_served_anyone(served: Served) -> None:
    """It was 0 until the first call over gRPC."""
    status = read_status(str(served.state_dir))
    assert status is not None
    assert told("stat")["front_pid"] == status.children["front"].pid > 0


def test_put_and_get_over_grpc_are_those_over_the_socket(served: Served, tmp_path: Path) -> None:
    address = ("--address", served.environment["KVSTORED_LISTEN"])
    told("restart", "--timeout", "30s")  # the front is ready after it
    content = os.urandom(BLOCK * 2)
    assert told("put", "m@1", *TOKENS, *PUT, *address, input=content)["committed"] == 2
    assert done("get", "m@1", *TOKENS).stdout_bytes == content
    out = tmp_path / "out"
    assert told("get", "m@1", *TOKENS, *address, "--out", str(out))["read_blocks"] == 2
    assert out.read_bytes() == content
    assert told("stat", *address)["front_pid"] > 0
