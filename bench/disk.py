"""The NVMe tier beside its device: cold reads and writes, of the tier alone and through a daemon, and O_DIRECT on the same filesystem.

A cold read goes around the page cache: the tier opens its slabs with O_DIRECT, and through a daemon the blocks go in turn through far
more than its arena, each located on NVMe only before it is read. The ceilings move as many bytes of a written file into or out of
touched shared memory, 1 MiB a call, one after the other; and reads four at a time, which is about what the device has to give. All bytes
that were read are compared. Beside the cold gets: what CPU the daemon spends on one block.

`python -m bench.disk [--at DIRECTORY] [--samples N] [--runs N] [--json]`
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.machine import Daemon, Report, Row, interleaved, parser, tell, timed
from bench.throughput import new_keys
from kvstored.client import Client, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec
from kvstored.clock import SystemClock
from kvstored.codec.frame import Codec
from kvstored.core.columnar import Places
from kvstored.core.types import UNIT_BYTES
from kvstored.tiers import views
from kvstored.tiers.base import Carried, PieceRun
from kvstored.tiers.disk import Disk, Options, map_bytes_for
from kvstored.tiers.filling import FillingColumns, pack_many
from kvstored.tiers.record import Records

Bytes = NDArray[np.uint8]

CALL_BYTES = 1 << 20
SHAPES = ((1 << 20, 64), (16 << 10, 1024))
"""Size of a block and blocks a call."""
TARGET, TARGET_RATIO = (1 << 20, 64), 0.8
TINY_TARGET, TINY_RATIO, TINY_CPU_US = (16 << 10, 1024), 0.5, 30.0
SETS = 8
"""Batches that take turns: through a daemon that is twice its arena and more."""
LOCATED_ON_NVME = 0b100
SETTLE_S = 60.0
CEILING = (
    "O_DIRECT pread, or pwrite and fdatasync, of as many bytes of one file, 1 MiB a call, one after the other; "
    "x 4: four reads at a time"
)
READS_AT_ONCE = 4
PART_BYTES = 4 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--at", type=Path, default=None, help="a directory on the disk to measure")
    flags.add_argument("--samples", type=int, default=5)
    given = flags.parse_args(arguments)
    tell(measured(given), given)


def measured(given: argparse.Namespace) -> Report:
    report = Report("disk", CEILING, given.runs)
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-", dir=given.at) as scratch:
        for block_bytes, batch in SHAPES:
            with (
                _File.made(Path(scratch) / "ceiling", block_bytes * batch) as file,
                _tier(Path(scratch) / "tier", block_bytes, batch) as tier,
                _daemon(given.at, block_bytes, batch) as cold,
            ):
                cases = {
                    "read": file.read,
                    "read x 4": file.read_at_once,
                    "write": file.write,
                    "tier read": tier.read,
                    "tier write": tier.write,
                    "cold get": cold.get,
                }
                cold.cpu_s.clear()
                times = interleaved(cases, given.samples, given.runs)
                report.rows += _rows(block_bytes, batch, times)
                report.rows.append(_cpu_row(block_bytes, batch, cold.cpu_s, given.runs))
                report.notes += tier.notes()
    return report


def _rows(block_bytes: int, batch: int, times: dict[str, list[float]]) -> list[Row]:
    speeds = {
        name: [block_bytes * batch / taken / 1e9 for taken in each] for name, each in times.items()
    }
    where = f"{block_bytes >> 10} KiB x {batch}"
    shape = (block_bytes, batch)
    targets = {
        ("cold get", "read"): {TARGET: TARGET_RATIO, TINY_TARGET: TINY_RATIO}.get(shape),
        ("tier read", "read"): TARGET_RATIO if shape == TARGET else None,
    }
    return [
        Row(
            f"{where}: {name}",
            "GB/s",
            speeds[name],
            f"O_DIRECT {ceiling}",
            speeds[ceiling],
            targets.get((name, ceiling)),
        )
        for name, ceiling in (
            ("tier read", "read"),
            ("tier read", "read x 4"),
            ("cold get", "read"),
            ("cold get", "read x 4"),
            ("tier write", "write"),
        )
    ]


def _cpu_row(block_bytes: int, batch: int, cpu_s: list[float], runs: int) -> Row:
    samples = len(cpu_s) // runs
    medians = [statistics.median(cpu_s[i * samples : (i + 1) * samples]) for i in range(runs)]
    most = TINY_CPU_US if (block_bytes, batch) == TINY_TARGET else None
    name = f"{block_bytes >> 10} KiB x {batch}: cold get, daemon's CPU a block"
    return Row(name, "us", [median / batch * 1e6 for median in medians], most=most)


@dataclass(frozen=True, slots=True)
class _File:
    """The ceiling: one file, all of it written once, so that a read has to ask the device."""

    fd: int
    memory: Bytes
    turn: Iterator[int]
    pool: ThreadPoolExecutor

    @classmethod
    @contextmanager
    def made(cls, path: Path, batch_bytes: int) -> Iterator["_File"]:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, batch_bytes * SETS)
            memory = shared_memory(batch_bytes)
            memory[:] = random_bytes(batch_bytes)
            turn = cycle(range(0, batch_bytes * SETS, batch_bytes))
            with ThreadPoolExecutor(READS_AT_ONCE) as pool:
                file = cls(fd, memory, turn, pool)
                for _ in range(SETS):
                    file.write()
                yield file
        finally:
            os.close(fd)
            path.unlink()

    def read(self) -> float:
        start = next(self.turn)
        work = partial(self._moved, os.preadv, start)
        return timed(lambda: deque(map(work, self._calls()), 0))

    def read_at_once(self) -> float:
        start = next(self.turn)
        work = partial(self._moved, os.preadv, start)
        return timed(lambda: deque(self.pool.map(work, self._calls()), 0))

    def write(self) -> float:
        start = next(self.turn)

        def durable() -> None:
            for at in self._calls():
                self._moved(os.pwritev, start, at)
            os.fdatasync(self.fd)

        return timed(durable)

    def _calls(self) -> range:
        return range(0, self.memory.size, CALL_BYTES)

    def _moved(
        self, move: Callable[[int, list[memoryview], int], int], start: int, at: int
    ) -> None:
        view = self.memory[at : at + CALL_BYTES]
        assert move(self.fd, [view.data], start + at) == view.size


@dataclass(slots=True)
class _TierCase:
    """The tier alone, in this process; targets and sources lie in shared memory as the arena's do. Read as the daemon's lane does: parts of
    4 MiB on four threads."""

    disk: Disk
    pool: ThreadPoolExecutor
    sources: list[Bytes]
    targets: list[Bytes]
    sets: list[tuple[PieceRun, Records]]
    turn: Iterator[int]

    def write(self) -> float:
        run, records = self.sets[next(self.turn)]
        return timed(lambda: _all_well(self.disk.write_run(run, records)))

    def read(self) -> float:
        run, _ = self.sets[next(self.turn)]
        for target in self.targets:
            target[:1] ^= 0xFF
        count = PART_BYTES // run.length
        parts = [
            PieceRun(
                run.fingerprints[at : at + count],
                run.places.part_of(at, at + count),
                run.length,
                self.targets[at : at + count],
            )
            for at in range(0, len(run), count)
        ]
        taken = timed(lambda: deque(map(_all_well, self.pool.map(self.disk.read_run, parts)), 0))
        for source, target in zip(self.sources, self.targets, strict=True):
            assert np.array_equal(source, target), "the tier read wrong bytes"
        return taken

    def notes(self) -> list[str]:
        return [] if self.disk.is_direct else ["the tier goes through the page cache here"]


@contextmanager
def _tier(directory: Path, block_bytes: int, batch: int) -> Iterator[_TierCase]:
    total = block_bytes * batch
    options = Options(
        map_bytes=map_bytes_for(total * SETS), slab_bytes=total * SETS, codec=Codec.RAW
    )
    disk = Disk(directory, options, clock=SystemClock())
    try:
        disk.grow()
        source, target = shared_memory(total), shared_memory(total)
        source[:] = random_bytes(total)
        sources = list(source.reshape(batch, -1))
        sums = [views.hash_of([each]) for each in sources]
        sets = [_run_of(number, sources, sums) for number in range(SETS)]
        targets = list(target.reshape(batch, -1))
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            case = _TierCase(disk, pool, sources, targets, sets, cycle(range(SETS)))
            for _ in range(SETS):
                case.write()
            yield case
    finally:
        disk.close()


def _run_of(number: int, sources: list[Bytes], sums: list[int]) -> tuple[PieceRun, Records]:
    """One set: its blocks lie back to back on the disk."""
    count, length = len(sources), sources[0].size
    units = length // UNIT_BYTES
    start = (number * count + np.arange(count, dtype=np.int64)) * units
    places = Places(np.zeros_like(start), start, np.full_like(start, units))
    filling = FillingColumns(
        digest=bytes(32),
        keys=np.arange(start[0], start[0] + 4 * count, dtype=np.uint64).tobytes(),
        fingerprints=np.stack([start + 1, start + 2], axis=1).astype(np.uint64),
        parents=np.zeros((count, 2), dtype=np.uint64),
        places=places,
        generations=np.ones(count, dtype=np.uint64),
        depths=np.arange(count),
        heats=np.zeros(count, dtype=np.uint8),
        length=length,
        valid_tokens=16,
        last_s=0.0,
        owner_pid=0,
    )
    records = pack_many(filling)
    records["checksum"] = sums
    return PieceRun(filling.fingerprints, places, length, sources), records


@dataclass(slots=True)
class _ColdCase:
    """A get through a daemon of blocks that it has on NVMe only."""

    namespace: Namespace
    pid: int
    sets: list[Keys]
    sources: list[Bytes]
    targets: list[Bytes]
    turn: Iterator[int]
    cpu_s: list[float] = field(default_factory=list)
    """Of the daemon, all threads, a get."""

    def get(self) -> float:
        keys = self.sets[next(self.turn)]
        located = self.namespace.locate(keys).tiers
        assert all(tiers & 0x7F == LOCATED_ON_NVME for tiers in located), "a block is not cold"
        before_s = self._daemon_cpu_s()
        taken = timed(lambda: self._got(keys))
        self.cpu_s.append(self._daemon_cpu_s() - before_s)
        for source, target in zip(self.sources, self.targets, strict=True):
            assert np.array_equal(source, target), "a cold get gave wrong bytes"
        return taken

    def _daemon_cpu_s(self) -> float:
        return time.clock_gettime(~self.pid << 3 | 2)  # Linux: the CPU clock of a whole process

    def _got(self, keys: Keys) -> None:
        found = self.namespace.get(keys, out=self.targets, load_deadline_s=30.0)
        assert found.hits == len(keys), f"hits={found.hits} reason={found.miss_reason}"


@contextmanager
def _daemon(at: Path | None, block_bytes: int, batch: int) -> Iterator[_ColdCase]:
    total = block_bytes * batch
    dram, disk = total * SETS // 2, max(total * SETS * 2, 1 << 30)
    with (
        Daemon(dram=f"{dram >> 20}MiB", disk=f"{disk >> 20}MiB", state_parent=at) as daemon,
        Client(daemon.address) as client,
    ):
        namespace = client.open_namespace(_spec(block_bytes))
        sources = list(random_bytes(total).reshape(batch, -1))
        targets = list(np.ones(total, dtype=np.uint8).reshape(batch, -1))
        sets = [new_keys(batch) for _ in range(SETS)]
        for keys in sets:
            assert namespace.put(keys, sources).committed == batch
            _settled(daemon)
        # what was put first has left memory; a get of each in turn keeps it so, and maps the arena here
        case = _ColdCase(
            namespace, daemon.stat().daemon_pid, sets, sources, targets, cycle(range(SETS))
        )
        for _ in range(SETS):
            case.get()
        yield case


def _spec(block_bytes: int) -> NamespaceSpec:
    """Without sinks, which would stay in memory."""
    return NamespaceSpec(
        model="bench disk",
        revision=f"{block_bytes}",
        dtype="uint8",
        layout="flat",
        layout_version=1,
        block_tokens=16,
        sink_tokens=0,
        groups=(GroupSpec("kv", GroupKind.LINEAR, block_bytes),),
    )


def _settled(daemon: Daemon) -> None:
    """Wait until everything is written back, so that any of it may leave memory."""
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        if not any(tier.dirty_copies for tier in daemon.stat().tiers if tier.name == "dram"):
            return
        time.sleep(0.05)
    raise RuntimeError(f"blocks are still dirty after seconds={SETTLE_S}")


def _all_well(carried: Carried) -> None:
    assert not carried.faults, f"first fault: {next(iter(carried.faults.values()))}"


def random_bytes(size_bytes: int) -> Bytes:
    return np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)


def shared_memory(size_bytes: int) -> Bytes:
    descriptor = os.memfd_create("kvstored-bench")
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        memory = np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8)
    finally:
        os.close(descriptor)
    memory[:] = 1
    return memory


if __name__ == "__main__":
    main()
