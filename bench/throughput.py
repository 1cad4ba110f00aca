"""Bytes in and out of a daemon on the same host, beside what a memory copy of the same buffers takes in the same minute.

Every case goes through its whole memory in turn (arena, or a ring of shared memory for the ceilings), all of it touched before, so
that neither caches nor first-touch page faults favour a side. `get` copies into arrays of the caller, as the ceiling does.

`python -m bench.throughput [--sizes 64KiB,1MiB] [--batches 1,64] [--disk 8GiB] [--runs N] [--json]`
"""

import argparse
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.machine import (
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
from kvstored.client import Client, Gather, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec
from kvstored.units import parse_size

Bytes = NDArray[np.uint8]

RATIO_UNCHECKED, RATIO_CHECKED, RATIO_VIEW = 0.7, 0.8, 5.0
LAYERS = 32
"""Of an engine's cache: a block is a page of each, K and V apart, 64 runs of memory."""
TARGET = ("1MiB", 64)
SAMPLE_BYTES = 768 << 20
SAMPLES_MIN, SAMPLES_MAX = 3, 200
RING_BYTES = 512 << 20
"""Far more than a last-level cache."""
ORDER = {"KVSTORED_POLICY": "lru"}
"""What was put last stays. The default order learns from returns, of which these cases have odd ones, and may evict what is read next."""
WAYS = ("1 thread", "default threads", "default threads, in Python")
"""How many threads the client copies with, and whether in C."""
COPY, COPY_HASH, COPY_PAGES = "copy", "copy + xxh3", "copy into pages"
CEILING = (
    "numpy.copyto of the same number of buffers of the same size into and out of a memfd mapping, "
    "one thread; checked cases: the same and xxh3_64 of each buffer"
)


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--sizes", default="64KiB,1MiB,16MiB")
    flags.add_argument("--batches", default="1,64")
    flags.add_argument("--disk", default="0B", help="also measure the target with such a disk tier")
    given = flags.parse_args(arguments)
    tell(measured(given), given)


def measured(given: argparse.Namespace) -> Report:
    report = Report("throughput", CEILING, given.runs)
    batches = [int(batch) for batch in given.batches.split(",")]
    for size in given.sizes.split(","):
        with Daemon(dram=_dram(parse_size(size) * max(batches)), settings=ORDER) as daemon:
            for batch in batches:
                report.rows += _rows(daemon, size, batch, given.runs, "")
    if parse_size(given.disk):
        size, batch = TARGET
        dram = _dram(parse_size(size) * batch)
        with Daemon(dram=dram, disk=given.disk, settings=ORDER) as daemon:
            report.rows += _rows(daemon, size, batch, given.runs, ", disk on")
    report.notes.append(
        "a view moves no bytes: its figure is how fast blocks come within reach, unchecked, its release riding on the next call"
    )
    report.notes.append(
        "a put always hashes: its record carries the checksum; it is shown against both ceilings"
    )
    return report


def _dram(batch_bytes: int) -> str:
    """As on a small server: what the evictor keeps free (5 % and more) takes in a batch of 1 MiB x 64. And room for six of the
    largest batch below the watermark: what three clients read, and what they put in between."""
    return f"{max(3 << 30, 7 * batch_bytes) >> 20}MiB"


def _rows(daemon: Daemon, size: str, batch: int, runs: int, suffix: str) -> list[Row]:
    block_bytes = parse_size(size)
    cases: dict[str, Sample] = {}
    buffers = _Buffers.made(block_bytes, batch)
    cases |= _ceilings(buffers)
    with (
        Client(daemon.address, copy_threads=1) as one,
        Client(daemon.address) as several,
        client_in_python(daemon.address) as other,
    ):
        spaces = [bench_namespace(client, block_bytes) for client in (one, several, other)]
        for space in spaces:
            _touch_arena(space, buffers)
        for name, space in zip(WAYS, spaces, strict=True):
            cases |= _ours(space, buffers, name)
        samples = min(max(SAMPLE_BYTES // (block_bytes * batch), SAMPLES_MIN), SAMPLES_MAX)
        times = interleaved(cases, samples, runs)
    speeds = {
        name: [block_bytes * batch / taken / 1e9 for taken in each] for name, each in times.items()
    }
    where = f"{size} x {batch}{suffix}"
    is_target = (size, batch) == TARGET
    rows = []
    for name in WAYS:
        for verb, way, base, least in (
            ("put", "in", COPY, RATIO_UNCHECKED),
            ("put", "in", COPY_HASH, RATIO_CHECKED),
            ("get unchecked", "out", COPY, RATIO_UNCHECKED),
            ("get", "out", COPY_HASH, RATIO_CHECKED),
        ):
            mine, top = speeds[f"{verb}, {name}"], speeds[f"{base} {way}"]
            rows.append(
                Row(
                    f"{where}: {verb}, {name}",
                    "GB/s",
                    mine,
                    f"{base} {way}",
                    top,
                    least if is_target else None,
                )
            )
        rows += _layout_rows(where, name, speeds, is_target=is_target)
    return rows


def _layout_rows(
    where: str, name: str, speeds: dict[str, list[float]], *, is_target: bool
) -> list[Row]:
    """Views beside the copy, scatter-gather beside the plain call of the same client."""
    view = RATIO_VIEW if is_target else None
    rows = [
        Row(
            f"{where}: view unchecked, {name}",
            "GB/s",
            speeds[f"view, {name}"],
            f"{COPY} out",
            speeds[f"{COPY} out"],
            view,
        )
    ]
    for verb, plain in (
        ("put_from", "put"),
        ("get_into", "get"),
        ("get_into unchecked", "get unchecked"),
        ("get_into unchecked", COPY_PAGES),
    ):
        mine = speeds.get(f"{verb}, {name}")
        if mine is not None:
            top = speeds[f"{plain}, {name}"]
            rows.append(Row(f"{where}: {verb} {LAYERS} x K,V, {name}", "GB/s", mine, plain, top))
    return rows


@dataclass(frozen=True, slots=True)
class _Buffers:
    """`sources` and `targets` are private, `ring` is shared memory in batches; all touched."""

    sources: list[Bytes]
    targets: list[Bytes]
    ring: list[list[Bytes]]

    @classmethod
    def made(cls, block_bytes: int, batch: int) -> "_Buffers":
        total = block_bytes * batch
        source = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
        target = np.ones(total, dtype=np.uint8)
        shared = shared_memory(max(RING_BYTES // total, 1) * total)
        shared[:] = 1
        ring = [_cut(shared[a : a + total], batch) for a in range(0, shared.size, total)]
        return cls(_cut(source, batch), _cut(target, batch), ring)


def _ceilings(buffers: _Buffers) -> dict[str, Sample]:
    turn_in, turn_out = cycle(buffers.ring), cycle(buffers.ring)

    def copied(targets: list[Bytes], sources: list[Bytes]) -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    def hashed(targets: list[Bytes], sources: list[Bytes], private: list[Bytes]) -> None:
        for target, source, mine in zip(targets, sources, private, strict=True):
            np.copyto(target, source)
            xxhash.xxh3_64_intdigest(mine.data)

    def put(copy: Callable[..., None], *more: list[Bytes]) -> float:
        ring = next(turn_in)
        return timed(lambda: copy(ring, buffers.sources, *more))

    def get(copy: Callable[..., None], *more: list[Bytes]) -> float:
        ring = next(turn_out)
        return timed(lambda: copy(buffers.targets, ring, *more))

    return {
        f"{COPY} in": lambda: put(copied),
        f"{COPY} out": lambda: get(copied),
        f"{COPY_HASH} in": lambda: put(hashed, buffers.sources),
        f"{COPY_HASH} out": lambda: get(hashed, buffers.targets),
    }


def _ours(namespace: Namespace, buffers: _Buffers, name: str) -> dict[str, Sample]:
    batch = len(buffers.sources)
    stored = new_keys(batch)
    kept: list[Keys] = []

    def put() -> float:
        nonlocal stored
        stored = new_keys(batch)
        taken = timed(lambda: _put_all(namespace, stored, buffers.sources))
        kept.append(stored)
        del kept[: -_kept_batches(buffers)]
        return taken

    def get(*, verify: bool) -> float:
        # oldest first: the sources in turn, all of them in DRAM
        keys = kept.pop(0)
        kept.append(keys)
        return timed(lambda: _get_all(namespace, keys, buffers.targets, verify=verify))

    def view() -> float:
        keys = kept.pop(0)
        kept.append(keys)
        return timed(lambda: _view_all(namespace, keys))

    put()  # so that there is something to get, whichever comes first
    cases = {
        f"put, {name}": put,
        f"get unchecked, {name}": lambda: get(verify=False),
        f"get, {name}": lambda: get(verify=True),
        f"view, {name}": view,
    }
    pages = _pages(batch, buffers.sources[0].size)
    if not pages:
        return cases

    turn = cycle(buffers.ring)

    def put_from() -> float:
        keys = new_keys(batch)
        taken = timed(lambda: _put_pages(namespace, keys, pages))
        kept.append(keys)
        del kept[: -_kept_batches(buffers)]
        return taken

    def get_into(*, verify: bool) -> float:
        keys = kept.pop(0)
        kept.append(keys)
        return timed(lambda: _get_pages(namespace, keys, pages, verify=verify))

    return cases | {
        f"{COPY_PAGES}, {name}": lambda: timed(lambda: _copy_pages(next(turn), pages)),
        f"put_from, {name}": put_from,
        f"get_into unchecked, {name}": lambda: get_into(verify=False),
        f"get_into, {name}": lambda: get_into(verify=True),
    }


def _pages(batch: int, block_bytes: int) -> list[Gather]:
    """Pages of an engine, looked at once; none where a block is no multiple of the runs."""
    run_bytes, rest = divmod(block_bytes, 2 * LAYERS)
    if rest:
        return []
    layers = [np.ones((2, batch, run_bytes), dtype=np.uint8) for _ in range(LAYERS)]
    return [Gather.of([layer[:, page] for layer in layers]) for page in range(batch)]


def _put_pages(namespace: Namespace, keys: Keys, pages: list[Gather]) -> None:
    assert namespace.put_from(keys, pages).committed == len(keys)


def _get_pages(namespace: Namespace, keys: Keys, pages: list[Gather], *, verify: bool) -> None:
    assert namespace.get_into(keys, pages, verify=verify).hits == len(keys)


def _copy_pages(sources: list[Bytes], pages: list[Gather]) -> None:
    """What numpy makes of the same pages, one thread: many runs of memory are slower than one, whoever copies."""
    for source, page in zip(sources, pages, strict=True):
        start = 0
        for part, end in zip(page.parts, page.ends, strict=True):
            np.copyto(part, source[start:end].reshape(part.shape))
            start = end


def _view_all(namespace: Namespace, keys: Keys) -> None:
    with namespace.get_view(keys) as view:
        assert view.hits == len(keys)


def _put_all(namespace: Namespace, keys: Keys, sources: list[Bytes]) -> None:
    assert namespace.put(keys, sources).committed == len(keys)


def _get_all(namespace: Namespace, keys: Keys, targets: list[Bytes], *, verify: bool) -> None:
    assert namespace.get(keys, out=targets, verify=verify).hits == len(keys)


def _kept_batches(buffers: _Buffers) -> int:
    """A quarter of the smallest arena: never evicted between two gets, even by three clients' puts."""
    batch_bytes = sum(source.size for source in buffers.sources)
    return max((256 << 20) // batch_bytes, 1)


def _touch_arena(namespace: Namespace, buffers: _Buffers) -> None:
    """Until every page of the arena is mapped in this client: puts of the same bytes go through all of it."""
    block_bytes = buffers.sources[0].size
    keys_a_call = max((64 << 20) // block_bytes, 1)
    rows = [buffers.sources[i % len(buffers.sources)] for i in range(keys_a_call)]
    for _ in range(_capacity_bytes(namespace) // (block_bytes * keys_a_call) + 1):
        namespace.put(new_keys(keys_a_call), rows)


def _capacity_bytes(namespace: Namespace) -> int:
    from kvstored.pb import kvstored_pb2 as pb

    with namespace._link(None) as link:  # noqa: SLF001 - the statistics of the same daemon
        tiers = link.call("Stat", pb.StatRequest(), pb.StatResponse, 10.0).tiers
    return next(tier.granted_bytes for tier in tiers if tier.name == "dram")


def bench_namespace(client: Client, block_bytes: int) -> Namespace:
    return client.open_namespace(
        NamespaceSpec(
            model="bench",
            revision=f"{block_bytes}",
            dtype="uint8",
            layout="flat",
            layout_version=1,
            block_tokens=16,
            groups=(GroupSpec("kv", GroupKind.LINEAR, block_bytes),),
        )
    )


def new_keys(count: int) -> Keys:
    return Keys.opaque([os.urandom(32) for _ in range(count)])


def shared_memory(size_bytes: int) -> Bytes:
    descriptor = os.memfd_create("kvstored-bench")
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8)
    finally:
        os.close(descriptor)


def _cut(memory: Bytes, count: int) -> list[Bytes]:
    return list(memory.reshape(count, -1))


if __name__ == "__main__":
    main()
