"""Cost of the core's data structures at a million rows, beside what bare Python costs on this machine.

`python bench/core_structures.py [--rows N] [--runs N] [--json]`: median of the runs, each in a fresh
process, so that resident memory is that of one structure alone.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvstored.core.extents import Extents
from kvstored.core.index import FingerprintIndex
from kvstored.core.tree import PrefixTree
from kvstored.core.types import BATCH_KEYS_MAX, Fingerprints, Place

SEED = 1
SEGMENT_UNITS = 262_144
SAMPLES = 200

Figures = dict[str, float]
"""Microseconds an operation, or bytes an entry, by name."""


class Stopwatch:
    """Microseconds an operation of the block that it surrounds."""

    def __init__(self) -> None:
        self.figures: Figures = {}

    @contextmanager
    def per(self, name: str, operations: int) -> Iterator[None]:
        start = perf_counter()
        yield
        self.figures[f"{name} (us)"] = (perf_counter() - start) / operations * 1e6

    def bytes_each(self, name: str, grown_bytes: int, count: int) -> None:
        self.figures[f"{name} (bytes)"] = grown_bytes / count


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fingerprints_of(rows: int) -> Fingerprints:
    random = np.random.default_rng(SEED)
    return random.integers(0, 2**64 - 1, (rows, 2), dtype=np.uint64)


def floor(rows: int) -> Figures:
    """What the loop and one dict operation cost; and the two random gathers that a find cannot avoid."""
    watch = Stopwatch()
    table: dict[int, int] = {}
    keys = fingerprints_of(rows)
    scalars = keys[:, 0].tolist()
    with watch.per("floor: dict store", rows):
        for row, key in enumerate(scalars):
            table[key] = row  # noqa: PERF403 - the loop is what is measured
    slots = np.random.default_rng(SEED).permutation(2 * rows).astype(np.int32) // 2
    picks = np.random.default_rng(SEED).integers(0, len(slots), (SAMPLES, BATCH_KEYS_MAX))
    with watch.per(f"floor: two gathers of {BATCH_KEYS_MAX}", SAMPLES):
        for pick in picks:
            keys.take(slots[pick], axis=0)
    return watch.figures


def index(rows: int) -> Figures:
    watch = Stopwatch()
    keys = fingerprints_of(rows)
    pairs = keys.tolist()
    before = resident_bytes()
    table = FingerprintIndex(rows)
    with watch.per("index put", rows):
        for row, (low, high) in enumerate(pairs):
            table.put(row, low, high)
    watch.bytes_each("index entry", resident_bytes() - before, rows)
    random = np.random.default_rng(SEED)
    batches = [keys[random.integers(0, rows, BATCH_KEYS_MAX)] for _ in range(SAMPLES)]
    with watch.per(f"index find {BATCH_KEYS_MAX} there", SAMPLES):
        for batch in batches:
            table.find(batch)
    batches = [batch ^ np.uint64(1 << 63 | 1) for batch in batches]
    with watch.per(f"index find {BATCH_KEYS_MAX} missing", SAMPLES):
        for batch in batches:
            table.find(batch)
    out = random.permutation(rows)[: rows // 4].tolist()
    with watch.per("index pop", len(out)):
        for row in out:
            table.pop(row)
    grown = FingerprintIndex()
    numbers = np.arange(rows, dtype=np.int32)
    longest = 0.0
    with watch.per("index put_many and growth, a row", rows):
        for at in range(0, rows, BATCH_KEYS_MAX):
            start = perf_counter()
            grown.put_many(numbers[at : at + BATCH_KEYS_MAX], keys[at : at + BATCH_KEYS_MAX])
            longest = max(longest, perf_counter() - start)
    watch.figures["index longest growth (us)"] = longest * 1e6
    return watch.figures


def extents(rows: int) -> Figures:
    watch = Stopwatch()
    allocator = Extents()
    for segment in range(rows // SEGMENT_UNITS + 2):
        allocator.add_segment(segment, SEGMENT_UNITS)
    places: list[Place] = [()] * rows
    with watch.per("extents take, filling", rows):
        for i in range(rows):
            places[i] = allocator.take(1) or ()
    order = np.random.default_rng(SEED).permutation(rows)[: rows // 2].tolist()
    with watch.per("extents give and take, full", len(order)):
        for i in order:
            allocator.give(places[i])
            places[i] = allocator.take(1) or ()
    before = resident_bytes()
    with watch.per("extents give, random half", len(order)):
        for i in order:
            allocator.give(places[i])
    runs = sum(1 for _ in allocator.free_runs())
    watch.bytes_each("extents free run, random half", resident_bytes() - before, runs)
    watch.figures["extents free runs (count)"] = runs
    with watch.per("extents claim", len(order)):
        for i in order:
            allocator.claim(places[i][0])
    for i in order:
        allocator.give(places[i])
    while allocator.largest_units >= 1_000:
        allocator.take(allocator.largest_units)
    with watch.per("extents take gathered and give", SAMPLES):
        for _ in range(SAMPLES):
            allocator.give(allocator.take(allocator.largest_units * 10) or ())
    return watch.figures


def tree(rows: int) -> Figures:
    """Conversations: runs of 20 blocks, each going on from anywhere, or a new root one time in ten."""
    watch = Stopwatch()
    random = np.random.default_rng(SEED)
    numbers = np.arange(rows)
    branches = (random.random(rows) * numbers).astype(int)
    parents = np.where(random.random(rows) < 0.05, branches, numbers - 1)
    parents[random.random(rows) < 0.005] = -1
    before = resident_bytes()
    prefixes = PrefixTree(rows + 1)
    pairs = list(enumerate(parents.tolist()))
    with watch.per("tree add and link", rows):
        for row, parent in pairs:
            prefixes.add(row)
            if parent >= 0:
                prefixes.link(row, parent)
    del pairs
    watch.bytes_each("tree row", resident_bytes() - before, rows)
    watch.figures["tree nodes (count)"] = prefixes.node_count
    inner = np.flatnonzero(prefixes.children == 1)
    inner = random.choice(inner, rows // 10).tolist()
    with watch.per("tree split and merge (a leaf in a run and out)", len(inner)):
        for row in inner:
            prefixes.add(rows)
            prefixes.link(rows, row)
            prefixes.remove(rows)
    leaves = np.flatnonzero(prefixes.children == 0)
    with watch.per("tree path, a block", int(prefixes.depth[leaves[:1_000]].sum()) + 1_000):
        for row in leaves[:1_000].tolist():
            prefixes.path(row)
    leaves = leaves[leaves < rows]
    leaves = leaves[prefixes.node[leaves] >= 0].tolist()
    with watch.per("tree remove", len(leaves)):
        for row in leaves:
            prefixes.remove(row)
    return watch.figures


SECTIONS: dict[str, Callable[[int], Figures]] = {
    "floor": floor,
    "index": index,
    "extents": extents,
    "tree": tree,
}


def measured(section: str, rows: int, runs: int) -> Figures:
    """Median of each figure over runs in processes of their own."""
    command = [sys.executable, __file__, "--rows", str(rows), "--section", section]
    results: list[Figures] = [
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for _ in range(runs)
    ]
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--section", choices=SECTIONS, help="one run of one section, as JSON")
    arguments = parser.parse_args()
    if arguments.section:
        print(json.dumps(SECTIONS[arguments.section](arguments.rows)))
        return
    figures: Figures = {}
    for section in SECTIONS:
        figures |= measured(section, arguments.rows, arguments.runs)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    facts = {"machine": machine, "rows": arguments.rows, "runs": arguments.runs}
    if arguments.json:
        print(json.dumps(facts | {"figures": figures}))
        return
    print(*(f"{name}: {value}" for name, value in facts.items()), sep=", ")
    for name, value in figures.items():
        rate = f"{1e6 / value:14,.0f} /s" if name.endswith("(us)") else ""
        print(f"{name:56}{value:12,.2f}{rate}")


if __name__ == "__main__":
    main()
