"""How soon a killed daemon answers hits again, and how a large NVMe tier is reopened while clients go on.

`kill`: -9 to the daemon, and to keeper and daemon, until a block that was there is read again. `reopen`: records written straight into
the index of a sparse disk tier (4 KiB blocks in chains of CHAIN), then a start of the daemon with a client that puts and gets all the while.

`python -m bench.restart [--records 1000000] [--runs N] [--state-parent DIR] [--json]`
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from bench.machine import REPOSITORY, Report, Row, parser, tell
from kvstored.client import Client, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec
from kvstored.core.keys import key_batch
from kvstored.core.namespace import seed as seed_of
from kvstored.core.types import UNIT_BYTES, Extent
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.shell import fingerprint_bytes
from kvstored.tiers.disk import SLAB_BYTES, map_bytes_for
from kvstored.tiers.disk_env import RecordEnv
from kvstored.tiers.record import ROOT, Record
from kvstored.units import format_size

ANSWER_MAX_S = 2.0
REOPEN_US_MAX = 15.0
"""Of a record, from the start of the daemon on."""
RAM_BYTES_MAX = 200
"""Of a block that lies only on NVMe."""
CHAIN = 16
BATCH = 20_000
KEY_BYTES = 32
PROBE_BYTES = 64 << 10
CEILING = "none: a restart has no ceiling but the start of the interpreter and its imports, shown beside it"


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--records", type=int, default=1_000_000)
    flags.add_argument("--state-parent", type=Path, default=None)
    given = flags.parse_args(arguments)
    report = Report("restart", CEILING, given.runs)
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-", dir=given.state_parent) as folder:
        report.rows += kill_rows(Path(folder) / "kill", given.runs)
        rows, notes = reopen_rows(Path(folder) / "reopen", given.records)
    report.rows += rows
    report.notes += notes
    tell(report, given)


class Serve:
    """`kvstored serve` on one state directory, over several lives."""

    def __init__(self, folder: Path, *, dram: str, disk: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.address = f"unix://{folder / 's'}"
        self._log = (folder / "log").open("ab")
        self._command = [sys.executable, "-m", "kvstored", "serve", "--dram", dram, "--disk", disk]
        self._command += ["--state-dir", str(folder / "state"), "--socket", str(folder / "s")]
        self._command += ["--listen", "off", "--metrics-listen", "off", "--log-format", "json"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, cwd=REPOSITORY, stdout=self._log, stderr=self._log
        )

    def stat(self) -> pb.StatResponse:
        with Client(self.address) as client:
            return client.call("Stat", pb.StatRequest(), pb.StatResponse)

    def answered(self, after_epoch: int = 0) -> pb.StatResponse:
        while True:
            with suppress(KvstoredError):
                stat = self.stat()
                if stat.epoch > after_epoch:
                    return stat
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.002)

    def kill(self, *, keeper: bool) -> None:
        stat = self.stat()
        assert self.process is not None
        if keeper:
            self.process.kill()
            self.process.wait()
        with suppress(ProcessLookupError):
            os.kill(stat.daemon_pid, signal.SIGKILL)
        if keeper:
            self.start()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@contextmanager
def serving(folder: Path, *, dram: str, disk: str) -> Iterator[Serve]:
    serve = Serve(folder, dram=dram, disk=disk)
    serve.start()
    try:
        serve.answered()
        yield serve
    finally:
        serve.stop()


def spec_of(size_bytes: int) -> NamespaceSpec:
    group = GroupSpec("kv", GroupKind.LINEAR, size_bytes)
    return NamespaceSpec(f"bench-{size_bytes}", "1", "bf16", "nhd", 1, 16, (group,), sink_tokens=0)


# ---- kill -9


def kill_rows(folder: Path, runs: int) -> list[Row]:
    taken: dict[str, list[float]] = {"daemon": [], "keeper and daemon": []}
    with serving(folder, dram="1GiB", disk="1GiB") as serve, Client(serve.address) as client:
        namespace = client.open_namespace(spec_of(1 << 20))
        keys = Keys.opaque([i.to_bytes(KEY_BYTES, "big") for i in range(64)])
        namespace.put(keys, [np.full(1 << 20, i, dtype=np.uint8) for i in range(64)])
        namespace.get(keys)
        _until_clean(serve)
        for _ in range(runs):
            for what, values in taken.items():
                begun_s = time.perf_counter()
                serve.kill(keeper=what != "daemon")
                _until_hit(namespace, keys[:1])
                values.append(time.perf_counter() - begun_s)
                while serve.stat().recovering:
                    time.sleep(0.01)
                assert namespace.get(keys).hits == len(keys)
                time.sleep(
                    2.5
                )  # the keeper starts a daemon at once only if the last one lived for a while
    imports = [_import_s() for _ in range(runs)]
    return [
        Row(f"kill -9 of the {what} to the first hit", "s", values, "imports alone", imports, None, None, ANSWER_MAX_S)
        for what, values in taken.items()
    ]  # fmt: skip


def _until_clean(serve: Serve) -> None:
    while any(tier.name == "dram" and tier.dirty_copies for tier in serve.stat().tiers):
        time.sleep(0.02)


def _until_hit(namespace: Namespace, keys: Keys) -> None:
    while True:
        with suppress(KvstoredError):
            if namespace.get(keys).hits:
                return
        time.sleep(0.002)


def _import_s() -> float:
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import kvstored.daemon"], cwd=REPOSITORY, check=True)
    return time.perf_counter() - begun_s


# ---- reopen


def reopen_rows(folder: Path, records: int) -> tuple[list[Row], list[str]]:
    slabs = -(-records * UNIT_BYTES // SLAB_BYTES)
    disk_bytes = 2 * slabs * SLAB_BYTES  # so that nothing is evicted
    spec = spec_of(UNIT_BYTES)
    serve = Serve(folder, dram="256MiB", disk=format_size(disk_bytes))
    serve.start()
    serve.answered()
    with Client(serve.address) as client:
        digest = client.open_namespace(spec).digest
    serve.stop()
    begun_s = time.perf_counter()
    write_records(folder / "state" / "disk", records, digest, disk_bytes)
    made_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    serve.start()
    try:
        stat = serve.answered()
        answered_s = time.perf_counter() - begun_s
        daemon = psutil.Process(stat.daemon_pid)
        private_bytes = _private(daemon)
        with probing(serve) as latencies_s:
            while serve.stat().recovering:
                time.sleep(0.05)
            reopened_s = time.perf_counter() - begun_s
        grown_bytes = _private(daemon) - private_bytes
        with probing(serve) as later_s:
            time.sleep(3)
        with Client(serve.address) as client:
            namespace = client.open_namespace(spec)
            found = sum(1 for tier in namespace.locate(_sample(records)).tiers if tier)
        nvme = serve.stat().tiers[1]
    finally:
        serve.stop()
    assert nvme.copies >= records * 0.999, (nvme.copies, records)
    assert found == len(_sample(records))
    rows = [
        Row(f"start to first answer, {records} records", "s", [answered_s], most=ANSWER_MAX_S),
        Row(
            f"start until {records} records are reopened",
            "s",
            [reopened_s],
            most=max(ANSWER_MAX_S, records * REOPEN_US_MAX / 1e6),
        ),
        Row("records reopened a second", "1/s", [records / (reopened_s - answered_s)]),
        Row("private memory a record", "B", [grown_bytes / records], most=RAM_BYTES_MAX),
        Row("private memory before", "MiB", [private_bytes / 2**20]),
        Row("private memory after", "MiB", [(private_bytes + grown_bytes) / 2**20]),
        *_latency_rows("meanwhile", latencies_s),
        *_latency_rows("afterwards", later_s),
    ]
    return rows, [f"the records were made in {made_s:.0f} s; a probe is a put and a get of 64 KiB"]


def _latency_rows(when: str, values_s: Sequence[float]) -> list[Row]:
    ordered = sorted(values_s)
    return [
        Row(f"put + get {when}, median", "ms", [1000 * statistics.median(ordered)]),
        Row(f"put + get {when}, p99", "ms", [1000 * ordered[int(len(ordered) * 0.99)]]),
        Row(f"put + get {when}, most of {len(ordered)}", "ms", [1000 * ordered[-1]]),
    ]


def _sample(records: int) -> Keys:
    step = max(1, records // 1000)
    numbers = range(0, records, step)
    return Keys.opaque([number.to_bytes(KEY_BYTES, "big") for number in numbers], unchained=True)


def _private(process: psutil.Process) -> int:
    """Without the arena, and without the index's pages in the page cache."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


@contextmanager
def probing(serve: Serve) -> Iterator[list[float]]:
    """Another client puts and gets all the while; how long each pair took."""
    taken: list[float] = []
    stop = threading.Event()

    def probe() -> None:
        number = time.time_ns()
        with Client(serve.address) as client:
            namespace = client.open_namespace(spec_of(PROBE_BYTES))
            row = np.zeros(PROBE_BYTES, dtype=np.uint8)
            while not stop.is_set():
                number += 1
                keys = Keys.opaque([number.to_bytes(KEY_BYTES, "big")])
                begun_s = time.perf_counter()
                namespace.put(keys, [row])
                assert namespace.get(keys).hits == 1
                taken.append(time.perf_counter() - begun_s)
                stop.wait(0.002)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield taken
    finally:
        stop.set()
        thread.join()


def write_records(directory: Path, records: int, digest: bytes, disk_bytes: int) -> None:
    """As the disk tier would after putting that many blocks of one unit; the slabs stay holes."""
    for number in range(disk_bytes // SLAB_BYTES):
        with (directory / f"slab-{number:05}.dat").open("ab") as slab:
            slab.truncate(SLAB_BYTES)
    packed = b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(records))
    seed = seed_of(digest)
    names: list[bytes] = []
    for begin in range(0, len(packed), 4096 * KEY_BYTES):
        batch = key_batch(packed[begin : begin + 4096 * KEY_BYTES], KEY_BYTES, seed)
        names += [fingerprint_bytes((low, high)) for low, high in batch.fingerprints.tolist()]
    order = sorted(range(records), key=names.__getitem__)
    env = RecordEnv(directory / "index", map_bytes_for(disk_bytes))
    now_s = time.time()
    for begin in range(0, records, BATCH):
        env.put([_record(i, names, digest, now_s) for i in order[begin : begin + BATCH]])
    env.close()


def _record(i: int, names: Sequence[bytes], digest: bytes, now_s: float) -> Record:
    segment, start = divmod(i, SLAB_BYTES // UNIT_BYTES)
    depth = i % CHAIN
    return Record(
        digest=digest,
        key=i.to_bytes(KEY_BYTES, "big"),
        fingerprint=names[i],
        group=0,
        shard=0,
        place=(Extent(segment, start, 1),),
        length=UNIT_BYTES,
        checksum=i,
        stored_length=UNIT_BYTES,
        stored_checksum=i,
        generation=1 + i,
        parent=names[i - 1] if depth else ROOT,
        valid_tokens=16,
        depth=depth,
        hits=i % 7,
        last_s=now_s - i % 3600,
        heat=3,
    )


if __name__ == "__main__":
    main()
