"""A whole kvstored (keeper and daemon, no gRPC) for the commands to talk to, and how tests call them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvstored.cli.main import cli
from kvstored.client import Client
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb

ROOT = Path(__file__).parents[2]
Run = Callable[..., Result]


class Served:
    """`serve` as a process of its own, in a directory of its own."""

    def __init__(self, state_dir: Path, **environment: str) -> None:
        self.state_dir = state_dir
        self.socket = state_dir / "kvstored.sock"
        self.environment = {
            "KVSTORED_STATE_DIR": str(state_dir),
            "KVSTORED_SOCKET": str(self.socket),
            "KVSTORED_LISTEN": "off",
            "KVSTORED_METRICS_LISTEN": "off",
            "KVSTORED_DRAM_CAPACITY": "16MiB",
            "KVSTORED_DISK_CAPACITY": "32MiB",
            "KVSTORED_LIMITS_DRAIN": "2s",
            **environment,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.state_dir.parent / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvstored", "serve"],
                env={**os.environ, **self.environment, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log()
            try:
                with Client(f"unix://{self.socket}") as client:
                    client.call("Stat", pb.StatRequest(), pb.StatResponse)
                    return
            except KvstoredError:
                time.sleep(0.05)
        raise AssertionError(f"the daemon does not answer: {self.log()}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            finally:
                self.process.kill()
                self.process.wait(5)
            self.process = None

    def log(self) -> str:
        return (self.state_dir.parent / "log").read_text()


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Served]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        state_dir = Path(folder) / "state"
        state_dir.mkdir(mode=0o700)
        served = Served(state_dir)
        served.start()
        yield served
        served.stop()


@pytest.fixture
def daemon(shared_daemon: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The daemon, which the settings of the commands name; no test shares a namespace with another."""
    for name, value in shared_daemon.environment.items():
        monkeypatch.setenv(name, value)
    return shared_daemon


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings that name an empty state directory, where no daemon runs."""
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        for name, value in Served(Path(folder)).environment.items():
            monkeypatch.setenv(name, value)
        yield Path(folder)


def run(*arguments: str, input: str | bytes | None = None) -> Result:  # noqa: A002 - as click names it
    return CliRunner().invoke(cli, arguments, input=input)


def done(*arguments: str, input: str | bytes | None = None) -> Result:  # noqa: A002
    result = run(*arguments, input=input)
    assert result.exit_code == 0, result.output
    return result


def told(*arguments: str, input: str | bytes | None = None) -> dict[str, Any]:  # noqa: A002
    """The one object that a command prints with --json."""
    value = json.loads(done(*arguments, "--json", input=input).stdout)
    assert isinstance(value, dict)
    return value
