"""What every benchmark shares: the machine in words, interleaved timing, reports with their ceilings, and a real daemon to measure.

Machines are noisy and shared: a figure is the median of a run, shown with the spread over runs; what is compared is measured in turns,
so that a ratio is one of the same minute.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peers.processes import free_port
from kvstored import native
from kvstored.client import Client
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb

REPOSITORY = Path(__file__).resolve().parent.parent
RUNS_MIN = 3
_START_S = 60.0

Sample = Callable[[], float]
"""One measurement; answers how long the measured part took, in seconds."""


def machine() -> dict[str, str]:
    """Cpu, cores, memory, kernel, Python, whether the client copies in C, load and date, as words."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "client in C": native.state,
        "load": f"{os.getloadavg()[0]:.1f}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def client_in_python(address: str, copy_threads: int = 2) -> Client:
    """One that copies and reads without the extension, beside others of the same process."""
    copies, native.copies = native.copies, None
    try:
        return Client(address, copy_threads=copy_threads)
    finally:
        native.copies = copies


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(cases: Mapping[str, Sample], samples: int, runs: int) -> dict[str, list[float]]:
    """The median of each run, by case. The cases take turns, sample by sample, in an order that changes: a copy is slower after
    one that left the caches dirty."""
    order = list(cases)
    shuffled = random.Random(1).shuffle
    medians: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(samples):
            shuffled(order)
            for name in order:
                taken[name].append(cases[name]())
        for name, values in taken.items():
            medians[name].append(statistics.median(values))
    return medians


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: a value a run. `ceiling`: the same of what cannot be beaten, from the same runs.

    `ratio_min`: the target for figure / ceiling; `least`, `most`: targets for the figure itself.
    """

    name: str
    unit: str
    values: Sequence[float]
    ceiling_name: str = ""
    ceiling: Sequence[float] = ()
    ratio_min: float | None = None
    least: float | None = None
    most: float | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def ratios(self) -> list[float]:
        return [mine / top for mine, top in zip(self.values, self.ceiling, strict=False)]

    @property
    def holds(self) -> bool | None:
        """Whether the targets hold; None where there is none."""
        if self.ratio_min is not None and self.ratios:
            return statistics.median(self.ratios) >= self.ratio_min
        if self.least is not None:
            return self.value >= self.least
        return None if self.most is None else self.value <= self.most

    def cells(self) -> tuple[str, ...]:
        ratio = ceiling = ""
        if self.ceiling:
            ceiling = f"{_short(statistics.median(self.ceiling))} {self.ceiling_name}"
            low, high = min(self.ratios), max(self.ratios)
            ratio = f"{statistics.median(self.ratios):.2f} ({low:.2f}-{high:.2f})"
        spread = f"({_short(min(self.values))}-{_short(max(self.values))})"
        return (
            self.name,
            f"{_short(self.value)} {self.unit}",
            spread if len(self.values) > 1 else "",
            ceiling,
            ratio,
            self._target(),
            {None: "", True: "holds", False: "MISSED"}[self.holds],
        )

    def _target(self) -> str:
        if self.ratio_min is not None:
            return f"ratio >= {self.ratio_min}"
        if self.least is not None:
            return f">= {_short(self.least)}"
        return "" if self.most is None else f"<= {_short(self.most)}"


@dataclass(slots=True)
class Report:
    name: str
    ceiling: str
    """What bounds these figures, in words."""
    runs: int
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=machine)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        facts = json.loads(text)
        return cls(**{**facts, "rows": [Row(**row) for row in facts["rows"]]})

    def show(self) -> None:
        print(f"\n## {self.name}")
        print(", ".join(f"{key}: {value}" for key, value in self.machine.items()))
        print(f"ceiling: {self.ceiling}; runs: {self.runs}, shown as median (low-high)")
        header = ("figure", "median", "spread", "ceiling", "ratio", "target", "")
        lines = [header, *(row.cells() for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        for note in self.notes:
            print(f"note: {note}")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    made.add_argument("--runs", type=int, default=RUNS_MIN)
    return made


def tell(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(report.to_json())
    else:
        report.show()


class Daemon:
    """A `kvstored serve` of its own in a temporary state directory, ready and with all its memory committed. `settings`: as variables."""

    def __init__(
        self,
        *,
        dram: str,
        disk: str = "0B",
        grpc: bool = False,
        tcp: bool = False,
        metrics: bool = False,
        state_parent: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings or {}
        self._folder = tempfile.TemporaryDirectory(prefix="kvstored-bench-", dir=state_parent)
        self.folder = Path(self._folder.name)
        self.socket = self.folder / "kvstored.sock"
        self.grpc_socket = self.folder / "grpc.sock"
        self.metrics_socket = self.folder / "metrics.sock"
        self._log = (self.folder / "log").open("wb")
        command = [sys.executable, "-m", "kvstored", "serve", "--dram", dram, "--disk", disk]
        command += ["--state-dir", str(self.folder / "state"), "--socket", str(self.socket)]
        self._port = free_port() if tcp else 0
        at_socket = f"unix:{self.grpc_socket}" if grpc else "off"
        command += ["--listen", f"127.0.0.1:{self._port}" if tcp else at_socket]
        command += ["--metrics-listen", f"unix:{self.metrics_socket}" if metrics else "off"]
        command += ["--log-format", "json"]
        self._command = command
        self._start()

    def __enter__(self) -> Self:
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def grpc_address(self) -> str:
        """With `tcp` only, as the next one."""
        return f"grpc://127.0.0.1:{self._port}"

    @property
    def bulk_address(self) -> str:
        return f"bulk://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The keeper's, which is the others' parent."""
        return self._process.pid

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def stat(self) -> pb.StatResponse:
        with Client(self.address, name="bench stat") as client:
            return client.call("Stat", pb.StatRequest(), pb.StatResponse)

    def restart(self) -> None:
        """Drains and ends it, keeper included, so that its memory is gone; starts it again on the same state directory."""
        self._end()
        self._start()
        self._wait_ready()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            cwd=REPOSITORY,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self._settings},
        )

    def _wait_ready(self) -> None:
        """Segments are made one after the other: all that fit into the capacity are there when no more came for a second."""
        deadline_s = time.monotonic() + _START_S
        granted, since_s = -1, time.monotonic()
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"the daemon ended:\n{self.log()}")
            try:
                tiers = self.stat().tiers
            except KvstoredError:
                time.sleep(0.05)
                continue
            now = sum(tier.granted_bytes for tier in tiers)
            if now != granted:
                granted, since_s = now, time.monotonic()
            is_whole = all(tier.granted_bytes >= tier.capacity_bytes for tier in tiers)
            if is_whole or (granted > 0 and time.monotonic() - since_s > 1.0):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the daemon was not ready in seconds={_START_S}:\n{self.log()}")

    def _stop(self) -> None:
        self._end()
        self._log.close()
        self._folder.cleanup()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _short(value: float) -> str:
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
