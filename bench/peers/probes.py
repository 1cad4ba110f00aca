"""Figures of the daemon that no put or get shows: many keys matched and acquired, how late its loop gets under load, its private memory."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.machine import Daemon
from bench.peers.figures import quantile
from bench.peers.processes import dies_with_us
from bench.peers.targets import LOOP_LAG, MATCH_1000, MATCH_4096, PRIVATE_MEMORY
from bench.throughput import bench_namespace, new_keys
from kvstored.client import Client, Keys, Namespace

BLOCK_BYTES = 4096
BLOCKS = 100_000
KEYS_A_CALL = 1000
CALLS = 20
LOAD_S = 20.0
LAG_S = 0.1
"""The period with which the store's loop looks at its own lateness."""
_IDLE = """
import asyncio, json, sys
async def main(period, seconds):
    loop, late = asyncio.get_running_loop(), []
    end = loop.time() + seconds
    while loop.time() < end:
        due = loop.time() + period
        await asyncio.sleep(period)
        late.append(max(0.0, loop.time() - due))
    print(json.dumps(late))
asyncio.run(main(float(sys.argv[1]), float(sys.argv[2])))
"""


def probed() -> dict[str, float]:
    """One value of each, in the units of the targets."""
    with (
        Daemon(dram="768MiB", metrics=True) as daemon,
        Client(daemon.address, name="bench probes") as client,
    ):
        space = bench_namespace(client, BLOCK_BYTES)
        values = {
            MATCH_1000: _match_and_acquire_ms(space, 1000),
            MATCH_4096: _match_and_acquire_ms(space, 4096),
        }
        values[LOOP_LAG] = _lag_above_idle_ms(daemon, bench_namespace(client, 16 * BLOCK_BYTES))
        rows = [np.ones(BLOCK_BYTES, np.uint8)] * KEYS_A_CALL
        for _ in range(BLOCKS // KEYS_A_CALL):
            space.put(new_keys(KEYS_A_CALL), rows)
        stat = daemon.stat()
        values[PRIVATE_MEMORY] = _private_mb(stat.daemon_pid)
        if stat.blocks < BLOCKS:
            raise RuntimeError(f"too few blocks were kept: blocks={stat.blocks}")
    return values


def _match_and_acquire_ms(space: Namespace, count: int) -> float:
    keys = new_keys(count)
    space.put(keys, [np.ones(BLOCK_BYTES, np.uint8)] * count)

    def matched_and_acquired() -> None:
        assert space.match(keys).hit_blocks == count, "they were put"
        with space.get_view(keys) as view:
            assert view.hits == count, "they were put"

    taken = [_timed(matched_and_acquired) for _ in range(CALLS)]
    space.remove(keys)
    return quantile(taken, 0.5) * 1e3


def _lag_above_idle_ms(daemon: Daemon, space: Namespace) -> float:
    """Both processes look how late a timer comes while batches of 64 x 64 KiB are put and got: the daemon's loop, and one with nothing else to do."""
    command = [sys.executable, "-c", _IDLE, str(LAG_S), str(LOAD_S)]
    before = _lag_buckets(daemon)
    with subprocess.Popen(dies_with_us(command), stdout=subprocess.PIPE, text=True) as idle:
        _load(space)
        output, _ = idle.communicate(timeout=10 * LOAD_S)
    after = _lag_buckets(daemon)
    late = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    return max(0.0, (_bound_of(late, 0.99) - quantile(json.loads(output), 0.99)) * 1e3)


def _load(space: Namespace) -> None:
    block_bytes = 16 * BLOCK_BYTES
    rows = list(np.ones((64, block_bytes), np.uint8))
    out = list(np.ones((64, block_bytes), np.uint8))
    until = time.monotonic() + LOAD_S
    stored: list[Keys] = []
    while time.monotonic() < until:
        keys = new_keys(64)
        assert space.put(keys, rows).committed == 64, "there is room"
        assert space.get(keys, out=out).hits == 64, "they were put"
        stored.append(keys)
        if len(stored) > 8:
            space.remove(stored.pop(0))
    for keys in stored:
        space.remove(keys)


def _lag_buckets(daemon: Daemon) -> dict[float, float]:
    """Cumulative counts by upper bound in seconds."""
    name = "kvstored_loop_lag_seconds_bucket{le="
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(str(daemon.metrics_socket))
        connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: bench\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return {float(line.split('"')[1]): float(line.rpartition(" ")[2]) for line in lines}


def _bound_of(cumulative: dict[float, float], share: float) -> float:
    """The upper bound of the bucket that holds the quantile."""
    ordered = sorted(cumulative.items())
    wanted = share * ordered[-1][1]
    return next(bound for bound, count in ordered if count >= wanted)


def _private_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024 / 1e6


def _timed(work: Callable[[], None]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun
