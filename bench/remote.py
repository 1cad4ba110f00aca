"""Bytes between a client and a daemon that share no memory: the bulk channel and gRPC streams, both over loopback TCP, beside bare TCP
and Mooncake's TCP way (named as missing where it cannot be installed).

Every case goes through memory that was touched before and is far larger than the caches. All bytes of the last batch of each way are
compared at the end. Loopback is a memory copy into the kernel and one out of it: what a network adds is not here.

`python -m bench.remote [--cells 256KiBx64,1MiBx64,1MiBx1] [--samples N] [--runs N] [--json]`
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from bench.bare_tcp import BareTcp
from bench.machine import Daemon, Report, Row, Sample, interleaved, parser, tell, timed
from bench.peers.adapters import mooncake
from bench.peers.adapters.base import Need
from bench.peers.crew import Crew
from bench.peers.environment import Missing
from bench.peers.processes import ServerFailed
from bench.throughput import Bytes, bench_namespace, new_keys
from kvstored.client import Client, Keys, Namespace
from kvstored.units import parse_size

RATIO_MOONCAKE = 1.3
RING_BYTES = 512 << 20
DRAM = "2GiB"
WAYS = ("bulk", "gRPC")
BARE, BARE_HASH, MOONCAKE = "bare TCP", "bare TCP + xxh3", "Mooncake TCP"
CEILING = (
    "sendall and recv_into of the same buffers over loopback TCP into and out of a memfd of another process; "
    "+ xxh3: each buffer hashed at both ends of a put and by the receiver of a get"
)


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--cells", default="256KiBx64,1MiBx64,1MiBx1")
    flags.add_argument("--samples", type=int, default=15)
    given = flags.parse_args(arguments)
    tell(measured(given), given)


def measured(given: argparse.Namespace) -> Report:
    report = Report("remote", CEILING, given.runs)
    report.notes.append("kvstored hashes at both ends of a put and at the receiver of a get")
    with Daemon(dram=DRAM, tcp=True) as daemon, BareTcp(RING_BYTES) as bare:
        _touch_arena(daemon)
        for cell in given.cells.split(","):
            size, _, batch = cell.rpartition("x")
            report.rows += _rows(daemon, bare, size, int(batch), given, report.notes)
    return report


def _rows(
    daemon: Daemon,
    bare: BareTcp,
    size: str,
    batch: int,
    given: argparse.Namespace,
    notes: list[str],
) -> list[Row]:
    block_bytes = parse_size(size)
    sources = list(np.random.default_rng(1).integers(0, 256, (batch, block_bytes), dtype=np.uint8))
    targets = list(np.ones((batch, block_bytes), dtype=np.uint8))
    cases: dict[str, Sample] = {}
    checks: list[Callable[[], None]] = []
    with ExitStack() as stack:
        for name, is_hashed in ((BARE, False), (BARE_HASH, True)):
            cases |= _bare(bare, name, sources, targets, is_hashed=is_hashed)
        for name, address in zip(WAYS, (daemon.bulk_address, daemon.grpc_address), strict=True):
            client = stack.enter_context(Client(address))
            ours = _Ours(bench_namespace(client, block_bytes), sources, targets)
            cases |= {f"put {name}": ours.put, f"get {name}": ours.get}
            checks.append(ours.check)
        try:
            theirs = stack.enter_context(_mooncake(block_bytes, batch))
            cases |= {f"put {MOONCAKE}": theirs.put, f"get {MOONCAKE}": theirs.get}
            checks.append(theirs.check)
        except (Missing, ServerFailed) as error:
            notes.append(f"{size} x {batch}: {MOONCAKE} is missing: {error}")
        times = interleaved(cases, given.samples, given.runs)
        for check in checks:
            check()
    speeds = {
        name: [block_bytes * batch / taken / 1e9 for taken in each] for name, each in times.items()
    }
    where = f"{size} x {batch}"
    return [
        Row(
            f"{where}: {verb}, {name}",
            "GB/s",
            speeds[f"{verb} {name}"],
            base,
            speeds[f"{verb} {base}"],
            RATIO_MOONCAKE if (name, base) == ("bulk", MOONCAKE) and batch > 1 else None,
        )
        for verb in ("put", "get")
        for name in WAYS
        for base in (BARE, BARE_HASH, MOONCAKE)
        if f"{verb} {base}" in speeds
    ]


def _bare(
    bare: BareTcp, name: str, sources: list[Bytes], targets: list[Bytes], *, is_hashed: bool
) -> dict[str, Sample]:
    return {
        f"put {name}": lambda: timed(lambda: bare.put(sources, is_hashed=is_hashed)),
        f"get {name}": lambda: timed(lambda: bare.get(targets, is_hashed=is_hashed)),
    }


def _touch_arena(daemon: Daemon) -> None:
    """No place is new to the front, which maps it, when it is measured."""
    rows = list(np.ones((64, 1 << 20), dtype=np.uint8))
    with Client(daemon.bulk_address) as client:
        space = bench_namespace(client, 1 << 20)
        for _ in range(parse_size(DRAM) // (64 << 20) + 1):
            space.put(new_keys(len(rows)), rows)


class _Ours:
    def __init__(self, space: Namespace, sources: list[Bytes], targets: list[Bytes]) -> None:
        self._space = space
        self._sources = sources
        self._targets = targets
        self._kept: list[Keys] = []
        self._kept_max = max(RING_BYTES // 4 // sum(source.size for source in sources), 1)
        self.put()

    def put(self) -> float:
        keys = new_keys(len(self._sources))
        taken = timed(lambda: self._put(keys))
        self._kept.append(keys)
        del self._kept[: -self._kept_max]
        return taken

    def get(self) -> float:
        keys = self._kept.pop(0)
        self._kept.append(keys)
        return timed(lambda: self._get(keys))

    def check(self) -> None:
        for target in self._targets:
            target[:] = 0
        self.get()
        assert all(map(np.array_equal, self._targets, self._sources)), "wrong bytes"

    def _put(self, keys: Keys) -> None:
        assert self._space.put(keys, self._sources).committed == len(keys)

    def _get(self, keys: Keys) -> None:
        assert self._space.get(keys, out=self._targets).hits == len(keys)


class _Mooncake:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        crew.all(1, "fill", name="remote")

    def put(self) -> float:
        return self._sample("put")

    def get(self) -> float:
        return self._sample("get")

    def check(self) -> None:
        self._crew.all(1, "check", name="remote")

    def _sample(self, what: str) -> float:
        (taken,) = self._crew.sample(1, "remote", what, budget_s=0.0, least=1, most=1)
        return taken.times[0]


@contextmanager
def _mooncake(block_bytes: int, batch: int) -> Iterator[_Mooncake]:
    """Its server and one client in processes of their own; stopped at the end."""
    environment = mooncake.environment("tcp")
    sets = max(RING_BYTES // 4 // (block_bytes * batch), 2)
    need = Need(
        block_bytes=block_bytes,
        capacity_bytes=2 * sets * batch * block_bytes,
        blocks=batch,
        clients=1,
        has_disk=False,
    )
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        log = stack.enter_context((folder / "worker.log").open("wb"))
        server = stack.enter_context(mooncake.serve(environment, folder, need))
        crew = stack.enter_context(Crew(environment, 1, log.fileno()))
        crew.open("bench.peers.adapters.mooncake", "tcp", server.address)
        crew.begin(
            1, 1, name="remote", block_bytes=block_bytes, blocks=batch, sets=sets, beside="copy"
        )
        yield _Mooncake(crew)


if __name__ == "__main__":
    main()
