"""Latency of the calls that carry no bytes: match, acquire and release, over the local channel and over gRPC.

`python -m bench.loop [--samples N] [--runs N] [--json]`: p50 and p99 of each run. The ceiling is an echo of as many bytes over a Unix
socket between two processes, and for gRPC the same call over the local channel.
"""

import argparse
import os
import socket
import struct
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Self

import numpy as np

from bench.machine import Daemon, Report, Row, parser, tell
from bench.throughput import bench_namespace, new_keys
from kvstored.client import Client, Keys, Namespace
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import pack_u64

BLOCK_BYTES = 4096
MATCH_KEYS = (1, 64, 4096)
ACQUIRE_KEYS = (1, 64, 1000)
Quantiles = tuple[float, float]
"""p50 and p99 in microseconds."""


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--samples", type=int, default=300)
    given = flags.parse_args(arguments)
    tell(measured(given), given)


def measured(given: argparse.Namespace) -> Report:
    report = Report(
        "loop",
        "an echo of the request's bytes over a Unix socket; gRPC: the local channel",
        given.runs,
    )
    with (
        Daemon(dram="256MiB", grpc=True) as daemon,
        Client(daemon.address, copy_threads=1) as local,
        Client(f"grpc+unix://{daemon.grpc_socket}") as remote,
    ):
        stored = new_keys(max(MATCH_KEYS))
        bench_namespace(local, BLOCK_BYTES).put(
            stored, [np.ones(BLOCK_BYTES, np.uint8)] * len(stored)
        )
        for count in MATCH_KEYS:
            report.rows += _match_rows(local, remote, stored[:count], given)
        for count in ACQUIRE_KEYS:
            report.rows += _acquire_rows(local, stored[:count], given)
    return report


def _match_rows(local: Client, remote: Client, keys: Keys, given: argparse.Namespace) -> list[Row]:
    spaces = [bench_namespace(client, BLOCK_BYTES) for client in (local, remote)]
    samples = max(given.samples // (1 + len(keys) // 64), 20)
    with Echo(len(keys.message().packed)) as echo:
        runs = [
            [
                _quantiles(call, samples)
                for call in (echo.call, *(_matching(s, keys) for s in spaces))
            ]
            for _ in range(given.runs)
        ]
    echoes, locals_, remotes = zip(*runs, strict=True)
    return [
        *_rows(f"match {len(keys)} keys, local", locals_, "echo", echoes),
        *_rows(f"match {len(keys)} keys, gRPC", remotes, "local", locals_),
    ]


def _acquire_rows(local: Client, keys: Keys, given: argparse.Namespace) -> list[Row]:
    space = bench_namespace(local, BLOCK_BYTES)
    samples = max(given.samples // (1 + len(keys) // 16), 20)
    session = local.session()
    request = pb.AcquireRequest(session=session, namespace=space.digest, keys=keys.message())

    def acquired() -> None:
        answer = local.call("Acquire", request, pb.AcquireResponse)
        assert not any(status != pb.HIT for status in answer.status), "the keys are there"
        release = pb.ReleaseRequest(session=session, leases=pack_u64([answer.lease]))
        local.call("Release", release, pb.ReleaseResponse)

    with Echo(len(request.keys.packed)) as echo:
        runs = [
            [_quantiles(call, samples) for call in (echo.twice, acquired)]
            for _ in range(given.runs)
        ]
    echoes, ours = zip(*runs, strict=True)
    return _rows(f"acquire + release {len(keys)} keys", ours, "two echoes", echoes)


def _matching(space: Namespace, keys: Keys) -> Callable[[], None]:
    def matched() -> None:
        assert space.match(keys).hit_blocks == len(keys)

    return matched


def _rows(
    name: str, ours: Sequence[Quantiles], floor_name: str, floor: Sequence[Quantiles]
) -> list[Row]:
    return [
        Row(f"{name}: {word}", "us", [q[i] for q in ours], floor_name, [q[i] for q in floor])
        for i, word in enumerate(("p50", "p99"))
    ]


def _quantiles(call: Callable[[], None], samples: int) -> Quantiles:
    taken = []
    for _ in range(samples):
        start = perf_counter()
        call()
        taken.append((perf_counter() - start) * 1e6)
    p50, p99 = np.quantile(taken, (0.5, 0.99)).tolist()
    return p50, p99


class Echo:
    """Another process that sends back what it gets; ends with `close`."""

    def __init__(self, size_bytes: int) -> None:
        self._message = struct.pack("<I", size_bytes) + bytes(size_bytes)
        self._socket, theirs = socket.socketpair()
        self._child = os.fork()
        if not self._child:
            self._socket.close()
            _echo(theirs, len(self._message))
            os._exit(0)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self._child, 0)

    def call(self) -> None:
        self._socket.sendall(self._message)
        left = len(self._message)
        while left:
            left -= len(self._socket.recv(left))

    def twice(self) -> None:
        self.call()
        self.call()


def _echo(peer: socket.socket, message_bytes: int) -> None:
    """Until the other side closes; only system calls, since this is a forked child."""
    while True:
        message = b""
        while len(message) < message_bytes:
            received = peer.recv(message_bytes - len(message))
            if not received:
                return
            message += received
        peer.sendall(message)


if __name__ == "__main__":
    main()
