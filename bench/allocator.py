"""The arena's space through the real catalog while the sizes of blocks change: how much of it can be used after each turnover.

First 4 KiB blocks until full, then 32 MiB blocks, then a mix of five namespaces from 4 KiB to 96 MiB, put in random turns. A turnover has
put as many bytes as the arena holds. Usable is the share of the arena that readable blocks hold, the mean over the last tenth of a
turnover; the lowest is shown too, which is less by what one block of the largest size leaves open. No bytes move.

`python -m bench.allocator [--arena 1GiB] [--runs N] [--json]`
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

import numpy as np

from bench.machine import Report, Row, parser, tell
from kvstored.core.calls import Limits, Parents, Reserve, TierLimits
from kvstored.core.catalog import Catalog
from kvstored.core.extents import Extents
from kvstored.core.keys import key_batch
from kvstored.core.namespace import Namespaces
from kvstored.core.types import (
    UNIT_BYTES,
    GroupKind,
    GroupSpec,
    Layout,
    NamespaceSpec,
    SessionId,
    TierId,
)
from kvstored.units import parse_size

SEGMENT_BYTES = 64 << 20
SMALL, LARGE = 4 << 10, 32 << 20
MIX = (4 << 10, 64 << 10, 900 << 10, 12_300 << 10, 96 << 20)
"""Bytes of a block of each namespace."""
USABLE_MIN = 0.9
FRAGMENTATION_MAX = 0.05
KEYS_A_CALL = 64


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--arena", default="1GiB")
    given = flags.parse_args(arguments)
    tell(measured(given), given)


def measured(given: argparse.Namespace) -> Report:
    report = Report(
        "allocator", "a whole arena (1.0); the same sizes through the bare allocator", given.runs
    )
    arena_bytes = parse_size(given.arena)
    runs = [_Arena(arena_bytes, seed).phases() for seed in range(given.runs)]
    floor = [_bare_us(seed) for seed in range(given.runs)]
    for phases in zip(*runs, strict=True):
        name = phases[0].name
        is_small = name.startswith("4 KiB")
        report.rows += [
            Row(f"{name}: usable", "of 1", [p.usable for p in phases], least=USABLE_MIN),
            Row(f"{name}: usable, lowest", "of 1", [p.lowest for p in phases]),
            Row(
                f"{name}: fragmentation",
                "of 1",
                [p.fragmentation for p in phases],
                most=FRAGMENTATION_MAX,
            ),
            Row(
                f"{name}: reserve + commit",
                "us a block",
                [p.put_us for p in phases],
                "us: bare take + give" if is_small else "",
                floor if is_small else (),
            ),
        ]
    report.notes.append(f"arena of {given.arena}, segments of {SEGMENT_BYTES >> 20} MiB")
    return report


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    usable: float
    lowest: float
    fragmentation: float
    put_us: float


class _Arena:
    """A catalog with an arena of numbers only."""

    def __init__(self, arena_bytes: int, seed: int) -> None:
        units = arena_bytes // UNIT_BYTES
        self._arena_bytes = arena_bytes
        self._random = random.Random(seed)
        self._catalog = Catalog(
            tiers=[TierLimits(TierId.DRAM, units)], policy="lru", limits=Limits(), epoch=1
        )
        segment_units = SEGMENT_BYTES // UNIT_BYTES
        for segment in range(units // segment_units):
            self._catalog.grow(TierId.DRAM, segment, segment_units)
        self._session = self._catalog.open_session(0.0)
        self._now_s = 0.0
        self._keys = 0
        registry = Namespaces()
        self._layouts = {size: self._opened(registry, size) for size in {SMALL, LARGE, *MIX}}

    def phases(self) -> list[Phase]:
        return [
            self._phase("4 KiB until full", (SMALL,), is_filling=True),
            *(self._phase(f"32 MiB, turnover {i}", (LARGE,)) for i in (1, 2)),
            *(self._phase(f"mix of five, turnover {i}", MIX) for i in (1, 2, 3)),
        ]

    def _phase(self, name: str, sizes: Sequence[int], *, is_filling: bool = False) -> Phase:
        blocks, spent_s, put_bytes = 0, 0.0, 0
        used: list[float] = []
        fragmentation: list[float] = []
        while put_bytes < self._arena_bytes:
            size = self._random.choice(sizes)
            count = min(KEYS_A_CALL, max(LARGE // size, 1))
            start = perf_counter()
            self._put(self._layouts[size], size, count)
            spent_s += perf_counter() - start
            blocks, put_bytes = blocks + count, put_bytes + size * count
            if put_bytes >= (1.0 if is_filling else 0.9) * self._arena_bytes:
                use = self._catalog.tier_use()[0]
                used.append(use.used_units / use.granted_units)
                fragmentation.append(use.fragmentation)
        return Phase(name, fmean(used), min(used), max(fragmentation), spent_s / blocks * 1e6)

    def _put(self, layout: Layout, size: int, count: int) -> None:
        catalog = self._catalog
        self._now_s += 0.001
        first, self._keys = self._keys, self._keys + count
        packed = b"".join(number.to_bytes(32, "big") for number in range(first, self._keys))
        keys = key_batch(packed, 32, layout.seed)
        # one path a call, as an engine puts them
        known = np.ones(count, dtype=np.bool_)
        known[0] = False
        call = Reserve(
            session=SessionId(self._session),
            ns=layout.id,
            shard=0,
            keys=keys,
            parents=Parents(np.roll(keys.fingerprints, 1, axis=0), known),
            groups_mask=1,
            sizes=np.full((count, 1), size, dtype=np.uint64),
            last_valid_tokens=0,
            ttl_s=60.0,
        )
        grants = [grant for grant in catalog.reserve(call, self._now_s).grants if grant]
        fills = [grant.fill for grant in grants]
        sums = np.ones(len(fills), dtype=np.uint64)
        run = catalog.whole_run(self._session, fills)
        if run is not None:
            catalog.commit_run(run, sums, self._now_s)
        else:
            catalog.commit(self._session, fills, [{0: 1}] * len(fills), self._now_s)
        catalog.drain()

    def _opened(self, registry: Namespaces, size: int) -> Layout:
        spec = NamespaceSpec(
            model=f"bench {size}",
            revision="1",
            dtype="uint8",
            layout="flat",
            layout_version=1,
            block_tokens=16,
            groups=(GroupSpec("kv", GroupKind.LINEAR, size),),
            sink_tokens=0,
        )
        layout = registry.open(spec, supersede=False).layout
        self._catalog.add_namespace(layout)
        return layout


def _bare_us(seed: int) -> float:
    """Take and give of one unit with the bare allocator, microseconds."""
    extents = Extents()
    extents.add_segment(0, SEGMENT_BYTES // UNIT_BYTES)
    places = [extents.take(1) or () for _ in range(SEGMENT_BYTES // UNIT_BYTES)]
    random.Random(seed).shuffle(places)
    start = perf_counter()
    for place in places:
        extents.give(place)
        extents.take(1)
    return (perf_counter() - start) / len(places) * 1e6


if __name__ == "__main__":
    main()
