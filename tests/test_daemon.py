"""The daemon as a process of its own under a keeper of a few lines: ready, warm after a kill, drained at SIGTERM."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.client import Client, GroupKind, GroupSpec, NamespaceSpec
from kvstored.config import load
from kvstored.core.types import TierId
from kvstored.keeper import EXIT_REFUSED
from kvstored.notify import Listener
from kvstored.pb import kvstored_pb2 as pb
from tests.codec import real

ROOT = Path(__file__).parents[1]
BLOCK_BYTES = 64 << 10
BLOCKS = 64
SPEC = NamespaceSpec(
    model="m",
    revision="1",
    dtype="bf16",
    layout="nhd",
    layout_version=1,
    block_tokens=16,
    groups=(GroupSpec("kv", GroupKind.LINEAR, BLOCK_BYTES),),
)


class TinyKeeper:
    """Starts the daemon, keeps the descriptors that it stores, and hands them to the next one."""

    def __init__(self, folder: Path, **flags: str) -> None:
        self.socket = folder / "s"
        self.listener = Listener()
        self.kept: dict[str, int] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "log"
        self.stderr = self.log.open("ab")
        given = {
            "state_dir": str(folder / "state"),
            "socket": str(self.socket),
            "listen": "off",
            "metrics_listen": "off",
            "dram.capacity": "128MiB",
            "dram.segment": "32MiB",
            "disk.capacity": "256MiB",
        }
        self.config = load(flags=given | flags, environ={}).config

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        config_fd = os.memfd_create("config", 0)
        os.write(config_fd, self.config.to_json().encode())
        self.process = subprocess.Popen(
            [sys.executable, "-c", _STARTER, str(config_fd), str(os.getpid()), *self.kept],
            cwd=ROOT,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("KVSTORED_")},
                "NOTIFY_SOCKET": self.listener.address,
                "KEPT": " ".join(str(fd) for fd in self.kept.values()),
                "PYTHONPATH": str(ROOT),
            },
            pass_fds=[config_fd, *self.kept.values()],
            stderr=self.stderr,
        )
        os.close(config_fd)
        self.until_ready()

    def until_ready(self) -> None:
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            if any(("READY", "1") in fields for fields in self.receive()):
                return
            time.sleep(0.01)
        raise AssertionError("the daemon is not ready")

    def receive(self) -> Iterator[list[tuple[str, str]]]:
        while (message := self.listener.receive()) is not None:
            fields = dict(message.fields)
            if fields.get("FDSTORE") == "1":
                (self.kept[fields["FDNAME"]],) = message.fds
            elif "FDSTOREREMOVE" in fields:
                os.close(self.kept.pop(fields["FDNAME"]))
            yield message.fields

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)
        list(self.receive())

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(40)
        list(self.receive())
        return code

    def forget(self) -> None:
        """As when the keeper ends: memory is gone."""
        for fd in self.kept.values():
            os.close(fd)
        self.kept = {}

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.forget()
        self.listener.close()
        self.stderr.close()


_STARTER = """
import fcntl, os, sys
from kvstored.notify import LISTEN_FDS_START, handed_down
from tests.codec import real
config, keeper, *names = sys.argv[1:]
config = fcntl.fcntl(int(config), fcntl.F_DUPFD, 300)
kept = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 300) for fd in os.environ.pop("KEPT").split()]
for i, fd in enumerate(kept):
    os.dup2(fd, LISTEN_FDS_START + i)
    os.close(fd)
command = ["-m", "kvstored", "daemon", "--config-fd", str(config), "--keeper-pid", keeper]
os.execve(sys.executable, [sys.executable, *command], handed_down(os.environ, names, os.getpid()))
"""
"""Becomes the daemon with the kept descriptors where systemd's protocol wants them."""


@pytest.fixture
def folder() -> Iterator[Path]:
    # not tmp_path: a socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        yield Path(name)


@contextlib.contextmanager
def kept(folder: Path, **flags: str) -> Iterator[TinyKeeper]:
    keeper = TinyKeeper(folder, **flags)
    try:
        keeper.start()
        yield keeper
    finally:
        keeper.close()


def test_put_and_get_through_the_socket(folder: Path) -> None:
    with kept(folder) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(SPEC)
        keys = namespace.keys(range(16 * BLOCKS))
        assert namespace.match(keys).hit_blocks == 0
        namespace.put(keys, contents())
        assert namespace.match(keys).hit_blocks == BLOCKS
        check(namespace.get(keys).blocks)


def test_memory_is_warm_after_a_kill(folder: Path) -> None:
    with kept(folder, **{"disk.capacity": "0B"}) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(SPEC)
        keys = namespace.keys(range(16 * BLOCKS))
        namespace.put(keys, contents())
        for _ in range(3):
            keeper.kill()
            keeper.start()
            wait_until_recovered(client)
            check(namespace.get(keys).blocks)
        more = namespace.keys(range(5, 5 + 16 * BLOCKS))
        namespace.put(more, contents())
        check(namespace.get(more).blocks)


def test_memory_is_warm_after_sighup_and_a_kill_loses_no_segment(folder: Path) -> None:
    with kept(folder, **{"disk.capacity": "0B"}) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(SPEC)
        keys = namespace.keys(range(16 * BLOCKS))
        namespace.put(keys, contents())
        wait_until(lambda: len(list(keeper.receive())) >= 0 and len(keeper.kept) == 8)
        assert keeper.stop(signal.SIGHUP) == 0
        keeper.start()
        wait_until_recovered(client)
        check(namespace.get(keys).blocks)
        stat = client.call("Stat", pb.StatRequest(), pb.StatResponse)
        assert stat.tiers[0].granted_bytes == 128 << 20


def test_sigterm_writes_everything_to_the_disk(folder: Path) -> None:
    with kept(folder, **{"disk.admit_hits": "255"}) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(SPEC)
        keys = namespace.keys(range(16 * BLOCKS))
        namespace.put(keys, contents())
        assert keeper.stop() == 0
        assert not keeper.socket.exists()
        keeper.forget()
        keeper.start()
        wait_until_recovered(client)
        assert namespace.match(keys).tier_blocks == (0, 0, BLOCKS, 0)
        check(namespace.get(keys).blocks)
        assert all(bits & 1 << TierId.DRAM for bits in namespace.locate(keys).tiers)


def test_compressed_blocks_come_back(folder: Path) -> None:
    with kept(folder, **{"disk.codec": "zstd"}) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(SPEC)
        keys = namespace.keys(range(16 * BLOCKS))
        halves = [np.where(np.arange(BLOCK_BYTES) % 2, block, 0) for block in contents()]
        namespace.put(keys, [half.astype(np.uint8) for half in halves])
        assert keeper.stop() == 0
        keeper.forget()
        keeper.start()
        wait_until_recovered(client)
        blocks = namespace.get(keys).blocks
        for block, half in zip(blocks, halves, strict=True):
            assert block is not None
            np.testing.assert_array_equal(block[0], half)
        nvme = client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[1]
        assert nvme.used_bytes < BLOCKS * BLOCK_BYTES * 0.75


@pytest.mark.parametrize("codec", ["fast", "small"])
def test_real_kv_is_stored_by_a_plan_that_stat_shows(folder: Path, codec: str) -> None:
    """Eight tiles of 256 tokens and 64 channels, each block with one value of its own."""
    kv = np.concatenate([real.bits("a"), real.bits("b")] * 2).reshape(-1)
    rows = [[np.concatenate([[i], kv[1:]]).astype(np.uint16).view(np.uint8)] for i in range(BLOCKS)]
    group = GroupSpec("kv", GroupKind.LINEAR, len(rows[0][0]))
    spec = replace(SPEC, block_tokens=256, groups=(group,))
    with kept(folder, **{"disk.codec": codec}) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(spec)
        keys = namespace.keys(range(256 * BLOCKS))
        namespace.put(keys, rows)
        deadline = time.monotonic() + 20
        while client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[0].dirty_copies:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        nvme = client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[1]
        assert nvme.codec == codec
        assert nvme.used_bytes < BLOCKS * group.bytes_per_block * 0.72
        (shown,) = nvme.groups
        assert shown.plan.startswith("bf16 256x64 ")
        assert nvme.codec_ratio == pytest.approx(shown.plain_bytes / shown.stored_bytes)
        assert nvme.codec_ratio > 1.4
        assert keeper.stop() == 0
        keeper.forget()
        keeper.start()
        wait_until_recovered(client)
        for found, row in zip(namespace.get(keys).blocks, rows, strict=True):
            assert found is not None
            np.testing.assert_array_equal(found[0], row[0])


def test_a_disk_that_cannot_be_used_leaves_dram_serving(folder: Path) -> None:
    (folder / "file").write_text("no directory")
    flags = {"disk.path": str(folder / "file" / "below")}
    with kept(folder, **flags) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(SPEC)
        keys = namespace.keys(range(16 * BLOCKS))
        namespace.put(keys, contents())
        check(namespace.get(keys).blocks)
        stat = client.call("Stat", pb.StatRequest(), pb.StatResponse)
        assert [(tier.name, tier.state) for tier in stat.tiers] == [("dram", "on"), ("nvme", "off")]
        assert stat.tiers[1].capacity_bytes == 256 << 20


def test_a_client_that_falls_silent_holds_nothing_for_long(folder: Path) -> None:
    """The lease of its last get lived for the default of 30 s, and kept what it had copied long ago from being evicted."""
    with kept(folder) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(SPEC)
        keys = namespace.keys(range(16 * BLOCKS))
        namespace.put(keys, contents())
        check(namespace.get(keys, optimistic=False).blocks)
        (lease,) = client.call("Leases", pb.LeasesRequest(), pb.LeasesResponse).leases
        assert 0 < lease.expires_in_s <= 10


def test_metrics_are_served_with_what_the_store_counted(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {"metrics_listen": f"127.0.0.1:{port}"}
    with kept(folder, **flags) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(SPEC)
        keys = namespace.keys(range(16 * BLOCKS))
        namespace.put(keys, contents())
        namespace.get(keys, optimistic=False)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert float(lines["kvstored_put_blocks_total"]) == BLOCKS
        assert float(lines['kvstored_hit_tokens_total{tier="dram"}']) == 16 * BLOCKS
        assert float(lines['kvstored_tier_capacity_bytes{tier="dram"}']) == 128 << 20
        assert float(lines['kvstored_request_seconds_count{method="Acquire"}']) >= 1
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
            assert answer.status == 200


def test_an_address_in_use_is_refused_with_its_exit_code(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        keeper = TinyKeeper(folder, metrics_listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with contextlib.closing(keeper), pytest.raises(AssertionError, match="metrics_listen"):
            keeper.start()
        assert keeper.process is not None
        assert keeper.process.returncode == EXIT_REFUSED


def contents() -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(7)
    return list(rng.integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8))


def check(blocks: tuple[object, ...]) -> None:
    for block, expected in zip(blocks, contents(), strict=True):
        assert isinstance(block, tuple), "a block is missing"
        np.testing.assert_array_equal(block[0], expected)


def wait_until_recovered(client: Client) -> None:
    wait_until(lambda: not client.call("Stat", pb.StatRequest(), pb.StatResponse).recovering)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
