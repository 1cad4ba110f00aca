"""The bulk channel of a real `kvstored serve`: over its restart, in the child of a fork, and in its metrics."""

import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import Client, GroupKind, GroupSpec, Namespace
from kvstored.errors import Unavailable
from tests.codec import real
from tests.crash.served import ROOT, Served, environment, free_port, kvstored, wait_until

from .test_front import SPEC, rows_of

KV = 3 * 4096
BLOCKS = 40


@dataclass(frozen=True, slots=True)
class Place:
    served: Served
    address: str
    metrics: str

    def counted(self, what: str = "_bulk_") -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as answer:
            text = answer.read().decode()
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        return {name: float(value) for name, value in lines if what in name}

    def settled(self, what: str = "_bulk_") -> dict[str, float]:
        """Once the front, which tells every second, has told all."""
        before = self.counted(what)
        for _ in range(20):
            time.sleep(1.5)
            now = self.counted(what)
            if now == before and now:
                return now
            before = now
        raise AssertionError(f"still counting: {before}")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    listen, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        served = Served(
            Path(folder),
            disk="0B",
            listen=listen,
            metrics_listen=metrics,
            settings={"wire.codec": "lossless"},
        )
        with served:
            yield Place(served, f"bulk://{listen}", metrics)


@pytest.fixture
def client(place: Place) -> Iterator[Client]:
    with Client(place.address, timeout_s=20) as made:
        wait_until(lambda: _is_up(made), what="the front serves")
        yield made


@pytest.fixture
def namespace(client: Client) -> Iterator[Namespace]:
    opened = client.open_namespace(SPEC)
    yield opened
    opened.clear()


def test_blocks_are_there_over_a_restart_and_come_over_a_new_bulk_connection(
    place: Place, client: Client, namespace: Namespace
) -> None:
    keys, rows = namespace.keys(range(16 * BLOCKS)), rows_of(BLOCKS, KV)
    assert namespace.put(keys, rows).committed == BLOCKS
    (before,) = client._transport._bulk._open
    place.served.restart()
    wait_until(lambda: _hits(namespace) == BLOCKS, what="all blocks are read")
    blocks = namespace.get(keys).blocks
    assert all(np.array_equal(block[0], row) for block, row in zip(blocks, rows, strict=True))
    (after,) = client._transport._bulk._open
    assert after is not before
    more = namespace.keys(range(50_000, 50_016))
    assert namespace.put(more, rows[:1]).committed == 1


def test_metrics_count_its_bytes_and_connections(
    place: Place, client: Client, namespace: Namespace
) -> None:
    received = 'kvstored_bulk_bytes_total{direction="received"}'
    sent = 'kvstored_bulk_bytes_total{direction="sent"}'
    accepted = 'kvstored_bulk_accepted_connections_total{answer="opened"}'
    namespace.put(namespace.keys(range(50_000, 50_016)), rows_of(1, KV))
    before = place.settled()
    assert before[accepted] >= 1
    assert before["kvstored_bulk_connections"] == 1
    keys = namespace.keys(range(16 * BLOCKS))
    assert namespace.put(keys, rows_of(BLOCKS, KV)).committed == BLOCKS
    assert namespace.get(keys).hits == BLOCKS
    after = place.settled()
    for direction in (received, sent):
        assert BLOCKS * KV <= after[direction] - before[direction] < BLOCKS * KV * 1.1
    assert after[accepted] == before[accepted]


FORK = """
import os, sys, traceback
import numpy as np
from kvstored.client import Client
from tests.transport.test_front import SPEC, rows_of

client = Client(sys.argv[1], timeout_s=20)
space = client.open_namespace(SPEC)
keys, rows = space.keys(range(16 * 8)), rows_of(8, 3 * 4096)
assert space.put(keys, rows).committed == 8
(parents,) = client._transport._bulk._open

def check(space):
    blocks = space.get(keys).blocks
    assert all(np.array_equal(block[0], row) for block, row in zip(blocks, rows, strict=True))

child = os.fork()
if child == 0:
    try:
        for _ in range(5):
            check(space)
        (own,) = client._transport._bulk._open
        assert own is not parents
        print("child over bulk", flush=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
for _ in range(5):
    check(space)
assert os.waitpid(child, 0)[1] == 0
check(space)
assert client._transport._bulk._open == {parents}
print("parent goes on", flush=True)
space.clear()
client.close()
"""


def test_the_child_of_a_real_fork_has_a_connection_of_its_own(place: Place, client: Client) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, place.address],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["child over bulk", "parent goes on"]


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7441"])
def test_plain_tcp_beyond_loopback_is_refused_before_anything_starts(
    tmp_path: Path, address: str
) -> None:
    flags = ["--state-dir", str(tmp_path / "state"), "--socket", str(tmp_path / "s")]
    done = kvstored("serve", *flags, "--bulk-listen", address)
    assert done.returncode == 78  # EX_CONFIG
    assert "setting bulk_listen: listening beyond loopback needs TLS: value=" in done.stderr
    assert "bulk_tls.certificate" in done.stderr
    assert not (tmp_path / "state").exists()


def _is_up(client: Client) -> bool:
    try:
        client.session()
    except Unavailable:
        time.sleep(0.05)  # gRPC's own back-off
        return False
    return True


def _hits(namespace: Namespace) -> int:
    try:
        return namespace.get(namespace.keys(range(16 * BLOCKS))).hits
    except Unavailable:
        time.sleep(0.05)
        return 0


def test_metrics_count_what_travelled_as_frames(place: Place, client: Client) -> None:
    rows = [np.concatenate([real.plain("a")] * 8)] * 2
    group = GroupSpec("kv", GroupKind.LINEAR, rows[0].size)
    spec = replace(SPEC, dtype="bfloat16", block_tokens=256, groups=(group,), revision="frames")
    before = place.settled("_wire_frame_")
    namespace = client.open_namespace(spec)
    keys = namespace.keys(range(512))
    assert namespace.put(keys, rows).committed == 2
    assert namespace.get(keys).hits == 2
    after = place.settled("_wire_frame_")
    for direction in ("sent", "received"):
        plain, wire = (
            after[name] - before[name]
            for form in ("plain", "wire")
            for name in [
                f'kvstored_wire_frame_bytes_total{{direction="{direction}",form="{form}"}}'
            ]
        )
        assert plain == 2 * rows[0].size
        assert 0 < wire < plain / 1.4
    namespace.clear()
