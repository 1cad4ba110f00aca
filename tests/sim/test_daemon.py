"""A live replay against a real daemon: it hits what the oracle hits, every byte is right, and the command says so."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstored.cli.replay import replay
from kvstored.client import Client
from kvstored.errors import Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.sim.traces import open_trace

from .oracle import LeafLru
from .test_core import random_kvt1

START_TRIES = 150
TRY_S = 0.2


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("daemon")
    socket = home / "k.sock"
    command = [sys.executable, "-m", "kvstored", "serve", "--dram", "64MiB", "--disk", "64MiB"]
    command += ["--state-dir", str(home / "state"), "--socket", str(socket)]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with (home / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as keeper:
        try:
            _wait_until_ready(keeper, f"unix://{socket}", home / "log")
            yield f"unix://{socket}"
        finally:
            keeper.send_signal(signal.SIGTERM)
            keeper.wait(timeout=40)


def _wait_until_ready(keeper: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(START_TRIES):
        try:
            with Client(address) as client:
                client.call("Stat", pb.StatRequest(), pb.StatResponse)
            return
        except Unavailable:
            pass
        try:
            keeper.wait(TRY_S)
            break
        except subprocess.TimeoutExpired:
            pass
    pytest.fail(f"the daemon did not start: {log.read_text()[-2000:]}")


def replayed(address: str, trace: Path, *flags: str) -> dict[str, object]:
    arguments = [str(trace), "--address", address, "--json", *flags]
    outcome = CliRunner().invoke(replay, arguments)
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(outcome.stdout)
    assert isinstance(figures, dict)
    return figures


def test_one_client_hits_what_the_oracle_hits(address: str, tmp_path: Path) -> None:
    trace = random_kvt1(tmp_path / "trace", seed=1, requests=120)
    oracle = LeafLru(None)
    hits = sum(sum(oracle.request(r.ts_s, r.block_ids).hits) for r in open_trace(trace.path))
    figures = replayed(address, trace.path, "--block-bytes", "5001B")
    assert figures["requests"] == 120
    assert figures["hit_blocks"] == hits
    assert figures["put_blocks"] == len(oracle.stored)
    assert (figures["wrong_blocks"], figures["lost_blocks"]) == (0, 0)
    assert figures["blocks_before"] == 0


def test_a_second_replay_says_that_the_first_one_s_blocks_were_there(
    address: str, tmp_path: Path
) -> None:
    """Its hit ratio of 1 looked like the trace's."""
    trace = random_kvt1(tmp_path / "trace", seed=5, requests=10)
    first = replayed(address, trace.path, "--block-bytes", "4KiB")
    arguments = [str(trace.path), "--address", address, "--block-bytes", "4KiB"]
    again = CliRunner().invoke(replay, arguments)
    assert "of an earlier replay" in again.stderr
    assert (
        replayed(address, trace.path, "--block-bytes", "4KiB")["blocks_before"]
        == first["put_blocks"]
    )


def test_several_clients_on_a_full_daemon_read_no_wrong_byte(address: str, tmp_path: Path) -> None:
    trace = random_kvt1(tmp_path / "trace", seed=2, requests=150)
    figures = replayed(address, trace.path, "--block-bytes", "1MiB", "--clients", "3")
    assert figures["requests"] == 150
    assert figures["wrong_blocks"] == 0
    assert int(str(figures["evicted_blocks"])) > 0
    again = replayed(address, trace.path, "--block-bytes", "1MiB", "--clients", "3")
    assert again["wrong_blocks"] == 0
