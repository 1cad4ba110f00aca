"""Gets without a message, in C and in Python, beside gets by Acquire and beside a copy and a copy and hash of the same bytes, sample by sample in turn.

`--hammer`: instead, processes read blocks of a small arena while others are written over them, every byte compared with what follows from
the key; how many reads were right, wrong, and had to fall back. `python -m bench.optimistic [--sizes 4KiB,1MiB] [--batches 1,64] [--json]`
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.machine import (
    REPOSITORY,
    Daemon,
    Report,
    Row,
    Sample,
    client_in_python,
    interleaved,
    parser,
    tell,
    timed,
)
from bench.throughput import bench_namespace, new_keys, shared_memory
from kvstored.client import Client, Keys, Namespace
from kvstored.units import parse_size

Bytes = NDArray[np.uint8]

CEILING = "numpy.copyto out of a memfd mapping of the same size into the same targets, and xxh3_64 of each; one thread"
WORKING_SET_BYTES = 192 << 20
SAMPLE_BYTES, SAMPLES_MIN, SAMPLES_MAX = 512 << 20, 5, 400
REPEATS_BELOW_BYTES, REPEATS = 256 << 10, 8
"""Gets a sample where one takes little longer than the clock does."""
INTO_SHARE = 0.3
"""Of the reads go into two buffers a block."""
IN_C, IN_PYTHON, ACQUIRED = "optimistic", "optimistic, in Python", "by Acquire"
COPY, COPY_HASH = "copy", "copy + xxh3"
TARGETS = {
    ("4KiB", 64): {COPY: 0.526},
    ("64KiB", 64): {COPY: 0.833},
    ("1MiB", 1): {COPY_HASH: 0.9},
    ("1MiB", 64): {COPY_HASH: 0.9},
}
READERS, HAMMER_DRAM, HAMMER_BLOCKS, HAMMER_BYTES = 2, "4MiB", 24, 256 << 10
"""More blocks than there is room for, put and read in turn; large ones, so that many are written over while they are copied."""


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--sizes", default="4KiB,64KiB,1MiB")
    flags.add_argument("--batches", default="1,64")
    flags.add_argument("--hammer", type=int, default=0, metavar="READS", help="of each process")
    flags.add_argument("--reader", nargs=2, help=argparse.SUPPRESS)
    given = flags.parse_args(arguments)
    if given.reader:
        address, seed = given.reader
        print(*_read(address, int(seed), given.hammer))
        return
    tell(hammered(given) if given.hammer else measured(given), given)


def measured(given: argparse.Namespace) -> Report:
    report = Report("optimistic", CEILING, given.runs)
    with (
        Daemon(dram="1GiB") as daemon,
        Client(daemon.address, copy_threads=1) as client,
        client_in_python(daemon.address, copy_threads=1) as other,
    ):
        for size in given.sizes.split(","):
            for batch in map(int, given.batches.split(",")):
                report.rows += _rows(client, other, size, batch, given.runs)
        reads = client.optimistic_reads()
    report.notes.append(f"optimistic reads: {reads}")
    return report


def _rows(client: Client, other: Client, size: str, batch: int, runs: int) -> list[Row]:
    block_bytes = parse_size(size)
    repeats = REPEATS if block_bytes * batch < REPEATS_BELOW_BYTES else 1
    spaces = {
        name: bench_namespace(each, block_bytes)
        for name, each in zip((IN_C, IN_PYTHON), (client, other), strict=True)
    }
    cases = _cases(spaces, block_bytes, batch, repeats)
    samples = min(max(SAMPLE_BYTES // (block_bytes * batch), SAMPLES_MIN), SAMPLES_MAX)
    times = interleaved(cases, samples, runs)
    in_us = {name: [1e6 * taken / repeats for taken in each] for name, each in times.items()}
    speed = {
        name: [block_bytes * batch / taken / 1e3 for taken in each] for name, each in in_us.items()
    }
    where, least = f"{size} x {batch}", TARGETS.get((size, batch), {})
    return [
        *(Row(f"{where}: p50, {name}", "us", in_us[name]) for name in cases),
        *(
            Row(
                f"{where}: {name}",
                "GB/s",
                speed[name],
                top,
                speed[top],
                least.get(top) if name == IN_C else None,
            )
            for name in (IN_C, IN_PYTHON, ACQUIRED)
            for top in (COPY, COPY_HASH)
        ),
    ]


def _cases(
    spaces: Mapping[str, Namespace], block_bytes: int, batch: int, repeats: int
) -> dict[str, Sample]:
    """Each goes through a working set far larger than a core's caches, or through 64 batches."""
    sets = min(max(WORKING_SET_BYTES // (block_bytes * batch), 2), 64)
    rng = np.random.default_rng(1)
    shared = shared_memory(sets * batch * block_bytes)
    shared[:] = rng.integers(0, 256, shared.size, dtype=np.uint8)
    sources = [list(each) for each in shared.reshape(sets, batch, block_bytes)]
    stored = [new_keys(batch) for _ in range(sets)]
    for keys, rows in zip(stored, sources, strict=True):
        assert spaces[IN_C].put(keys, rows).committed == batch
    targets = list(np.ones((batch, block_bytes), dtype=np.uint8))
    turns = {name: cycle(range(sets)) for name in (IN_C, IN_PYTHON, ACQUIRED, COPY, COPY_HASH)}

    def get(turn: str, namespace: Namespace, *, optimistic: bool) -> None:
        for _ in range(repeats):
            keys = stored[next(turns[turn])]
            assert namespace.get(keys, out=targets, optimistic=optimistic).hits == batch

    def copy(turn: str, *, hashed: bool) -> None:
        for _ in range(repeats):
            for target, source in zip(targets, sources[next(turns[turn])], strict=True):
                np.copyto(target, source)
                if hashed:
                    xxhash.xxh3_64_intdigest(target.data)

    return {
        IN_C: lambda: timed(lambda: get(IN_C, spaces[IN_C], optimistic=True)),
        IN_PYTHON: lambda: timed(lambda: get(IN_PYTHON, spaces[IN_PYTHON], optimistic=True)),
        ACQUIRED: lambda: timed(lambda: get(ACQUIRED, spaces[IN_C], optimistic=False)),
        COPY: lambda: timed(lambda: copy(COPY, hashed=False)),
        COPY_HASH: lambda: timed(lambda: copy(COPY_HASH, hashed=True)),
    }


# ---- hammer


def hammered(given: argparse.Namespace) -> Report:
    report = Report("optimistic, hammered", "none: what counts is that no read is wrong", 1)
    with Daemon(dram=HAMMER_DRAM) as daemon, Client(daemon.address) as client:
        namespace = bench_namespace(client, HAMMER_BYTES)
        command = [sys.executable, "-m", "bench.optimistic", "--hammer", str(given.hammer)]
        readers = [
            subprocess.Popen(
                [*command, "--reader", daemon.address, str(seed)],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in range(READERS)
        ]
        written, contents = 0, _contents()
        for number in cycle(range(0, HAMMER_BLOCKS, 2)):
            if all(reader.poll() is not None for reader in readers):
                break
            keys = Keys.opaque(list(contents)[number : number + 2], unchained=True)
            written += namespace.put(keys, [contents[key] for key in keys]).committed
            if number % 8 == 0:
                namespace.remove(keys)
        answers = [reader.communicate()[0].split() for reader in readers]
    reads, wrong, hits, changed, mismatched = np.array(answers, dtype=np.int64).sum(axis=0)
    report.rows += [
        Row("reads", "keys", [float(reads)]),
        Row("wrong", "keys", [float(wrong)], most=0.0),
        Row("read without a message", "keys", [float(hits)]),
        Row("entry changed, then acquired", "keys", [float(changed)]),
        Row("checksum differed, then acquired", "keys", [float(mismatched)]),
        Row("written meanwhile", "keys", [float(written)]),
    ]
    return report


def _read(address: str, seed: int, count: int) -> tuple[int, int, int, int, int]:
    rng, reads, wrong, contents = random.Random(seed), 0, 0, _contents()
    with Client(address, copy_threads=1) as client:
        namespace = bench_namespace(client, HAMMER_BYTES)
        while reads < count:
            keys = rng.sample(list(contents), rng.choice((1, 2, 6, 6)))
            asked = Keys.opaque(keys, unchained=True)
            reads += len(keys)
            if rng.random() < INTO_SHARE:
                into = np.empty((len(keys), 2, HAMMER_BYTES // 2), dtype=np.uint8)
                filled = namespace.get_into(asked, list(map(list, into))).filled
                rows = [
                    row.reshape(-1)
                    for row, (is_there,) in zip(into, filled, strict=True)
                    if is_there
                ]
                named = [key for key, (is_there,) in zip(keys, filled, strict=True) if is_there]
            else:
                blocks = namespace.get(asked).blocks
                rows = [block[0] for block in blocks if block]
                named = [key for key, block in zip(keys, blocks, strict=True) if block]
            wrong += sum(
                not np.array_equal(row, contents[key]) for key, row in zip(named, rows, strict=True)
            )
        seen = client.optimistic_reads()
    return reads, wrong, seen.hits, seen.changed, seen.mismatched


def _contents() -> dict[bytes, Bytes]:
    """What lies under each key: every word depends on the key and on its position."""
    ramp = np.arange(HAMMER_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    keys = [number.to_bytes(32, "big") for number in range(HAMMER_BLOCKS)]
    return {key: (ramp + np.uint64(xxhash.xxh3_64_intdigest(key))).view(np.uint8) for key in keys}


if __name__ == "__main__":
    main()
