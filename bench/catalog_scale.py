"""The catalog at a million blocks: what a call costs and what a block weighs, without bytes.

`python -m bench.catalog_scale [--blocks N] [--runs N] [--json]`. Every run is a fresh process a tier, filled as a restart fills it. The
blocks are 16-block prompts that 12 conversations share, each 40 blocks long; a block takes one unit, and the tier is full.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.machine import REPOSITORY, Report, Row, parser, tell
from kvstored.core.bulk import RecoveredColumns
from kvstored.core.calls import Acquire, Freed, Limits, Parents, Reserve, TierLimits
from kvstored.core.catalog import Catalog
from kvstored.core.columnar import AnyEffect, FreedMany
from kvstored.core.namespace import Namespaces
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import (
    BATCH_KEYS_MAX,
    UNIT_BYTES,
    Fingerprints,
    GroupKind,
    GroupSpec,
    KeyBatch,
    NamespaceSpec,
    SessionId,
    TierId,
)
from kvstored.machine import give_back_free_memory

PROMPT, TURNS, LENGTH = 16, 12, 40
FAMILY = PROMPT + TURNS * LENGTH
BATCH = 64
SPLITS = 2000
PUTS = 200
SPEC = NamespaceSpec(
    model="m",
    revision="1",
    dtype="bf16",
    layout="nhd",
    layout_version=1,
    block_tokens=16,
    groups=(GroupSpec("kv", GroupKind.LINEAR, UNIT_BYTES),),
    sink_tokens=64,
)
Figures = dict[str, float]
NAMES = {
    "begin and commit of a fill with eviction": "us",
    "acquire, grant and release of 64 keys": "us a key",
    "acquire, grant and release of 4096 keys": "us a key",
    "match of 4096 keys": "us a key",
    "split and join of a run": "us",
    "recovery": "us a block",
}
MEMORY_TARGET = 200.0
COLLECTION, COLLECTION_TARGET = "the collector looks at all of it", 50.0


class Tier:
    """A catalog with one full tier."""

    def __init__(self, tier: TierId, blocks: int, policy: str) -> None:
        self.tier, self.blocks = tier, blocks - blocks % FAMILY
        tiers = [TierLimits(tier, self.blocks)]
        if tier is TierId.NVME:
            tiers.append(TierLimits(TierId.DRAM, 1))
        self.catalog = Catalog(tiers=tiers, policy=policy, limits=Limits(), epoch=1)
        layout = Namespaces().open(SPEC, supersede=False).layout
        self.ns = layout.id
        self.catalog.add_namespace(layout)
        self.catalog.grow(tier, 0, self.blocks)
        self.session = self.catalog.open_session(0.0)
        self.now_s = 1e9

    def fill(self) -> None:
        self.catalog.recovery.begin(self.tier)
        slice_ = 16 * FAMILY
        for start in range(0, self.blocks, slice_):
            rows = np.arange(start, min(start + slice_, self.blocks))
            self.catalog.recovery.recover_many(self.tier, self.ns, _columns(rows), self.now_s)
        self.catalog.recovery.done(self.tier, self.now_s)
        self.catalog.drain()
        give_back_free_memory()  # as the daemon does

    def reserve(self, keys: KeyBatch, parents: Parents) -> Reserve:
        return Reserve(
            session=SessionId(self.session),
            ns=self.ns,
            shard=0,
            keys=keys,
            parents=parents,
            groups_mask=1,
            sizes=np.full((len(keys), 1), UNIT_BYTES, dtype=np.uint64),
            last_valid_tokens=0,
            ttl_s=60.0,
        )

    def put(self, keys: KeyBatch, parents: Parents) -> int:
        """As the daemon does it; answers how many copies were evicted for it."""
        reserved = self.catalog.reserve(self.reserve(keys, parents), self.now_s)
        many = reserved.many
        if many is None or reserved.first:  # single keys
            fills = [grant.fill for grant in reserved.grants if grant is not None]
            assert len(fills) == len(keys), "not granted"
            self.catalog.commit(self.session, fills, [{0: 1}] * len(fills), self.now_s)
        else:
            assert len(many) == len(keys), "not granted"
            ids = range(many.first_fill, many.first_fill + len(many))
            sums = np.ones(len(many), dtype=np.uint64)
            run = self.catalog.whole_run(self.session, ids)
            assert run is not None, "not whole"
            self.catalog.commit_run(run, sums, self.now_s)
        return sum(_freed(effect) for effect in self.catalog.drain())

    def read(self, keys: KeyBatch, *, prove: bool = False) -> None:
        """`prove`: the blocks were looked at after their recovery, as the daemon does before it hands them out."""
        call = Acquire(
            session=SessionId(self.session),
            ns=self.ns,
            shard=0,
            keys=keys,
            groups_mask=1,
            ttl_s=60.0,
        )
        acquired = self.catalog.acquire(call, self.now_s)
        grant = self.catalog.grant(acquired.lease, self.now_s)
        assert grant.lease, "nothing was read"
        for piece in [piece for block in grant.blocks for piece in block.pieces] if prove else ():
            assert piece is not None, "a piece is missing"
            self.catalog.verified(piece.copy)
        self.catalog.release(self.session, [grant.lease], self.now_s)
        self.catalog.drain()


def _freed(effect: AnyEffect) -> int:
    if isinstance(effect, FreedMany):
        return effect.places.size
    return int(isinstance(effect, Freed))


def figures_in_memory(blocks: int, policy: str) -> Figures:
    before = _resident_bytes()
    gc.freeze()  # as the daemon does when it is ready
    tier = Tier(TierId.DRAM, blocks, policy)
    figures = {"recovery": _us(tier.fill) / tier.blocks}
    figures["memory of a block in DRAM"] = (_resident_bytes() - before) / tier.blocks
    figures["match of 4096 keys"] = _match_us(tier)
    for count in (BATCH, BATCH_KEYS_MAX):
        batches = [_path_keys(tier, i, count) for i in range(max(4, 8192 // count))]
        for batch in batches:
            tier.read(batch, prove=True)
        total_us = _us(lambda batches=batches: [tier.read(batch) for batch in batches])
        figures[f"acquire, grant and release of {count} keys"] = total_us / len(batches) / count
    figures["split and join of a run"] = _split_us(tier)
    puts = [_chain(5 * tier.blocks + i * BATCH) for i in range(PUTS + 2 * SPLITS // BATCH + 1)]
    for put in puts[PUTS:]:  # the splits left room
        tier.put(*put)
    evicted: list[int] = []
    total_us = _us(lambda: evicted.extend(tier.put(*batch) for batch in puts[:PUTS]))
    assert sum(evicted) > 0.9 * PUTS * BATCH, "the tier was not full"
    figures["begin and commit of a fill with eviction"] = total_us / PUTS / BATCH
    gc.collect()  # of what waits to be collected, once
    figures[COLLECTION] = _us(gc.collect) / 1000
    return figures


def figures_on_disk(blocks: int, policy: str) -> Figures:
    before = _resident_bytes()
    tier = Tier(TierId.NVME, blocks, policy)
    tier.fill()
    return {"memory of a block on NVMe only": (_resident_bytes() - before) / tier.blocks}


def _match_us(tier: Tier) -> float:
    batches = [_path_keys(tier, i, BATCH_KEYS_MAX) for i in range(20)]
    match = tier.catalog.match
    total_us = _us(lambda: [match(tier.ns, batch, 0, tier.now_s) for batch in batches])
    return total_us / len(batches) / BATCH_KEYS_MAX


def _split_us(tier: Tier) -> float:
    """A new block in the middle of a conversation splits its run, and its removal joins it again."""
    catalog = tier.catalog
    heads = [PROMPT + i % TURNS * LENGTH + LENGTH // 2 + i // TURNS * FAMILY for i in range(SPLITS)]
    heads = [head % tier.blocks for head in heads]
    calls = []
    for i, head in enumerate(heads):
        keys = KeyBatch(b"", 8, _fingerprints(np.asarray([3 * tier.blocks + i])))
        parents = Parents(_fingerprints(np.asarray([head])), np.ones(1, dtype=np.bool_))
        calls.append((keys, parents))
    lost = KeyBatch(b"", 8, _fingerprints(np.arange(tier.blocks - 2 * SPLITS, tier.blocks)))
    catalog.clear_rows(
        tier.ns, catalog.books.index.find(lost.fingerprints), tier.now_s
    )  # room without eviction
    catalog.drain()

    def split_and_join() -> None:
        for keys, parents in calls:
            tier.put(keys, parents)
        for keys, _ in calls:
            catalog.clear_rows(tier.ns, catalog.books.index.find(keys.fingerprints), tier.now_s)
        catalog.drain()

    return _us(split_and_join) / len(calls)


def _columns(rows: np.ndarray) -> RecoveredColumns:
    count = len(rows)
    ones = np.ones(count, dtype=np.uint32)
    parents = _fingerprints(_parents(rows))
    parents[rows % FAMILY == 0] = 0
    return RecoveredColumns(
        fingerprints=_fingerprints(rows),
        parents=parents,
        group=np.zeros(count, dtype=np.uint16),
        shard=np.zeros(count, dtype=np.uint16),
        length=np.full(count, UNIT_BYTES, dtype=np.uint64),
        checksum=np.ones(count, dtype=np.uint64),
        extents=np.stack([0 * ones, rows.astype(np.uint32), ones], axis=1),
        generation=np.ones(count, dtype=np.uint64),
        depth=_depths(rows).astype(np.uint32),
        valid=16 * ones,
        hits=ones,
        last_s=1000.0 + rows % 977,
        leased=np.zeros(count, dtype=np.bool_),
        content=np.zeros(count, dtype=np.uint32),
    )


def _parents(rows: np.ndarray) -> np.ndarray:
    """Number of the block before each: within the prompt, or of the conversation whose first block hangs on the prompt's last."""
    at = rows % FAMILY
    is_first_of_turn = (at >= PROMPT) & ((at - PROMPT) % LENGTH == 0)
    return np.where(is_first_of_turn, rows - at + PROMPT - 1, rows - 1)


def _depths(rows: np.ndarray) -> np.ndarray:
    at = rows % FAMILY
    return np.where(at < PROMPT, at, PROMPT + (at - PROMPT) % LENGTH)


def _fingerprints(numbers: np.ndarray) -> Fingerprints:
    """Spread over all 64 bits, as hashes are."""
    low = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return np.stack([low, low ^ np.uint64(0x5555)], axis=1)


def _path_keys(tier: Tier, family: int, count: int) -> KeyBatch:
    start = family * FAMILY * 17 % (tier.blocks - count)
    return KeyBatch(b"", 8, _fingerprints(np.arange(start, start + count)))


def _chain(first: int) -> tuple[KeyBatch, Parents]:
    numbers = np.arange(first, first + BATCH)
    known = np.ones(BATCH, dtype=np.bool_)
    known[0] = False
    return KeyBatch(b"", 8, _fingerprints(numbers)), Parents(_fingerprints(numbers - 1), known)


def _us(work: Callable[[], object]) -> float:
    begun_s = time.process_time()
    work()
    return (time.process_time() - begun_s) * 1e6


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _run(tier: TierId, blocks: int, policy: str) -> Figures:
    command = [sys.executable, "-m", "bench.catalog_scale", "--blocks", str(blocks)]
    done = subprocess.run(
        [*command, "--policy", policy, "--one", tier.name],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: Figures = json.loads(done.stdout)
    return figures


def report_of(runs: Sequence[Figures], blocks: int, policy: str) -> Report:
    def values(name: str) -> list[float]:
        return [run[name] for run in runs]

    rows = [Row(name, unit, values(name)) for name, unit in NAMES.items()]
    rows.append(Row("memory of a block in DRAM", "bytes", values("memory of a block in DRAM")))
    rows.append(Row(COLLECTION, "ms", values(COLLECTION), most=COLLECTION_TARGET))
    on_disk = "memory of a block on NVMe only"
    rows.append(Row(on_disk, "bytes", values(on_disk), most=MEMORY_TARGET))
    return Report(
        name=f"catalog with {blocks:,} blocks, {policy}",
        ceiling="one thread of Python; no bytes are moved",
        runs=len(runs),
        rows=rows,
    )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--blocks", type=int, default=1_000_000)
    flags.add_argument("--policy", choices=POLICIES, default="composite")
    flags.add_argument("--one", choices=["DRAM", "NVME"], help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.one:
        figures = figures_in_memory if given.one == "DRAM" else figures_on_disk
        print(json.dumps(figures(given.blocks, given.policy)))
        return
    runs = [
        _run(TierId.DRAM, given.blocks, given.policy)
        | _run(TierId.NVME, given.blocks, given.policy)
        for _ in range(given.runs)
    ]
    tell(report_of(runs, given.blocks, given.policy), given)


if __name__ == "__main__":
    main()
