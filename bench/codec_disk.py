"""Real KV through the disk tier: bytes on disk, wall and CPU time of write-back and load, by codec: `python -m bench.codec_disk FILE.npy FOLDER`.

Each codec writes and reads the same blocks in turn, three rounds, one thread, O_DIRECT where the filesystem has it. The ceiling is the row `raw`.
With `--against OTHER.npy` (the same tokens behind another prompt) those are on the disk before, and the rows `P` refer to them.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvstored.clock import SystemClock
from kvstored.codec.frame import Codec
from kvstored.codec.planner import Goal
from kvstored.core.types import (
    UNIT_BYTES,
    Extent,
    GroupKind,
    GroupSpec,
    Layout,
    NamespaceId,
    NamespaceSpec,
)
from kvstored.tiers import slabs
from kvstored.tiers import views as memory
from kvstored.tiers.base import ref_of
from kvstored.tiers.disk import Disk, Options
from kvstored.tiers.record import Base, Record

BLOCK_TOKENS = 256
SLAB_BYTES = 1 << 30
CODECS = {
    "raw": Options(map_bytes=1 << 24, slab_bytes=SLAB_BYTES),
    "zstd": Options(map_bytes=1 << 24, slab_bytes=SLAB_BYTES, codec=Codec.ZSTD),
    "fast": Options(map_bytes=1 << 24, slab_bytes=SLAB_BYTES, codec=Codec.FRAME),
    "small": Options(
        map_bytes=1 << 24, slab_bytes=SLAB_BYTES, codec=Codec.FRAME, codec_goal=Goal.RATIO
    ),
}

Item = tuple[Record, list[np.ndarray]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path, default=None)
    asked = parser.parse_args()
    items = _items(np.load(asked.file))
    bases = _items(np.load(asked.against), after=items) if asked.against else []
    cases = [(name, options, list[Item]()) for name, options in CODECS.items()]
    if bases:
        cases += [(f"P {name}", CODECS[name], bases) for name in ("fast", "small")]
    plain = sum(record.length for record, _ in items)
    best: dict[str, tuple[float, ...]] = {}
    for _ in range(3):
        for name, options, others in cases:
            shutil.rmtree(asked.folder, ignore_errors=True)
            found = _round(asked.folder, options, items, others)
            best[name] = tuple(map(min, best.get(name, found), found))
    shutil.rmtree(asked.folder, ignore_errors=True)
    for name, (stored, write_s, write_cpu_s, read_s, read_cpu_s) in best.items():
        print(
            f"{name:7} {plain / stored:.3f}x  write {plain / write_s / 1e9:.2f} GB/s, CPU {write_cpu_s / plain * 1e9:.2f} s/GB  "
            f"read {plain / read_s / 1e9:.2f} GB/s, CPU {read_cpu_s / plain * 1e9:.2f} s/GB"
        )


def _items(kv: np.ndarray, after: Sequence[Item] = ()) -> list[Item]:
    """`after`: blocks whose numbers and places are taken."""
    items = []
    units = sum(record.place[0].units for record, _ in after)
    for i in range(kv.shape[-2] // BLOCK_TOKENS):
        number = i + len(after)
        part = kv[..., i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS, :]
        plain = slabs.aligned(part.nbytes)[: part.nbytes]
        plain[:] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        size = -(-len(plain) // UNIT_BYTES)
        checksum = memory.hash_of([plain])
        record = Record(
            digest=b"n" * 32, key=number.to_bytes(32, "big"), fingerprint=number.to_bytes(16, "little"), group=0, shard=0,
            place=(Extent(0, units, size),), length=len(plain), checksum=checksum, stored_length=len(plain), stored_checksum=checksum,
        )  # fmt: skip
        items.append((record, [plain]))
        units += size
    return items


def _round(
    folder: Path, options: Options, items: list[Item], bases: list[Item]
) -> tuple[float, ...]:
    """Bytes stored, seconds and CPU seconds of writing, and of reading."""
    disk = Disk(folder, options, clock=SystemClock())
    disk.grow()
    group = GroupSpec("kv", GroupKind.LINEAR, items[0][0].length)
    spec = NamespaceSpec(
        "smollm2", "1", "bfloat16", "lkhtd", 1, block_tokens=BLOCK_TOKENS, groups=(group,)
    )
    disk.coding.learn(Layout(NamespaceId(1), b"n" * 32, 0, spec))
    disk.write(items[:1])  # the plan is made here
    there = _records(disk.write(bases))
    wishes = [Base(fingerprint=r.fingerprint, place=r.place) for r in there] or [None] * len(items)
    items = [(replace(r, base=wish), views) for (r, views), wish in zip(items, wishes, strict=True)]
    stored: list[Record] = []
    write_s, write_cpu_s = _timed(lambda: stored.extend(_records(disk.write(items))))
    target = [[np.full_like(plain, 1) for plain in views] for _, views in items]  # pages are there
    asked = [(ref_of(r), r.place, views) for r, views in zip(stored, target, strict=True)]
    read_s, read_cpu_s = _timed(lambda: _records(disk.read(asked)))
    for (_, source), views in zip(items, target, strict=True):
        assert np.array_equal(source[0], views[0])
    disk.close()
    return float(sum(r.stored_length for r in stored)), write_s, write_cpu_s, read_s, read_cpu_s


def _records(outcomes: list[object]) -> list[Record]:
    records = [outcome for outcome in outcomes if isinstance(outcome, Record)]
    assert len(records) == len(outcomes)
    return [replace(record) for record in records]


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun_s, time.process_time() - begun_cpu_s


if __name__ == "__main__":
    main()
