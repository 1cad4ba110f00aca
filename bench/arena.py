"""What a large arena costs: the time until a daemon with one is ready, and what a client's first touch of its memory adds to a put.

The daemon commits memory segment by segment behind its start. A client pays a page fault for each page that its process touches first;
it maps the pages of a new segment in the background. A put into a segment whose pages are mapped is the ceiling of one into a fresh
segment; what faults cost without that thread is shown too.

`python -m bench.arena [--ready 16GiB] [--segment 256MiB] [--runs N] [--json]`; `--ready 16GiB` needs as much free memory, for seconds.
"""

import argparse
import os
import time
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np

from bench.machine import Daemon, Report, Row, parser, tell, timed
from bench.throughput import bench_namespace, new_keys
from kvstored.client import Client
from kvstored.client.prefault import Prefaulter
from kvstored.errors import KvstoredError
from kvstored.units import parse_size

BLOCK_BYTES, BATCH = 1 << 20, 32
SEGMENTS = 4
SMALL = "64MiB"
"""An arena that costs nothing: what a start takes anyway."""
READY_MAX_S = 2.0
START_S = 30.0
CEILING = "a put of as many bytes into memory that this client has touched before"


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--ready", default="1GiB", help="capacity of the arena that is started")
    flags.add_argument("--segment", default="256MiB", help="size of a segment that is touched")
    given = flags.parse_args(arguments)
    tell(measured(given), given)


def measured(given: argparse.Namespace) -> Report:
    report = Report("arena", CEILING, given.runs)
    ready: dict[str, list[float]] = {SMALL: [], given.ready: []}
    for _ in range(given.runs):
        for dram, taken in ready.items():
            taken.append(_ready_s(dram))
    report.rows.append(Row(f"ready with {SMALL}", "s", ready[SMALL]))
    report.rows.append(Row(f"ready with {given.ready}", "s", ready[given.ready], most=READY_MAX_S))
    fresh: dict[bool, list[float]] = {True: [], False: []}
    later: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(given.runs):
        for is_prefaulted in (False, True):
            first_s, later_s = _puts(parse_size(given.segment), is_prefaulted=is_prefaulted)
            fresh[is_prefaulted].append(BLOCK_BYTES * BATCH / first_s / 1e9)
            later[is_prefaulted].append(BLOCK_BYTES * BATCH / later_s / 1e9)
    for is_prefaulted, name in ((False, "faulted by the put"), (True, "prefaulted")):
        report.rows.append(
            Row(
                f"first puts, segments of {given.segment}, {name}",
                "GB/s",
                fresh[is_prefaulted],
                "later put",
                later[is_prefaulted],
            )
        )
    return report


class _Answering(Daemon):
    """Ready means here that it answers; it grows on behind."""

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            try:
                self.stat()
            except KvstoredError:
                time.sleep(0.01)
            else:
                return
        raise RuntimeError(f"no answer within seconds={START_S}:\n{self.log()}")


def _ready_s(dram: str) -> float:
    begun_s = time.perf_counter()
    with _Answering(dram=dram):
        return time.perf_counter() - begun_s


def _puts(segment_bytes: int, *, is_prefaulted: bool) -> tuple[float, float]:
    """Seconds of a put into fresh memory and of one into touched memory: means over a whole arena of SEGMENTS."""
    capacity_bytes = segment_bytes * SEGMENTS
    sources = [np.full(BLOCK_BYTES, 7, dtype=np.uint8)] * BATCH
    calls = capacity_bytes * 9 // 10 // (BLOCK_BYTES * BATCH)
    with (
        patch.object(Prefaulter, "add", Prefaulter.add if is_prefaulted else _left_out),
        patch.dict(os.environ, {"KVSTORED_DRAM_SEGMENT": f"{segment_bytes >> 20}MiB"}),
        Daemon(dram=f"{capacity_bytes >> 20}MiB") as daemon,
        Client(daemon.address) as client,
    ):
        namespace = bench_namespace(client, BLOCK_BYTES)

        def put() -> None:
            assert namespace.put(new_keys(BATCH), sources).committed == BATCH

        first_s = [timed(put) for _ in range(calls)]
        namespace.clear()
        later_s = [timed(put) for _ in range(calls)]
    return sum(first_s) / calls, sum(later_s) / calls


def _left_out(self: Prefaulter, memory: object) -> None:
    """No prefault."""


if __name__ == "__main__":
    main()
