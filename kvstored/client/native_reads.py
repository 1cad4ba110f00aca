"""Gets without a message, copied and looked at again in C: what optimistic.py does with numpy, in two calls whatever the number of keys.

Python stays in between: it maps segments, allocates what is read into, and refuses buffers that do not fit.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstored import native
from kvstored.client.channel import LocalLink
from kvstored.client.copying import Bytes, Copier, goes_past_cache
from kvstored.client.links import Glance
from kvstored.client.projected import Index
from kvstored.client.reports import Reports
from kvstored.client.results import Blocks, GetResult, OptimisticReads
from kvstored.client.rows import plain_rows, privates_of
from kvstored.client.runs import Packed, Privates, blocks_made
from kvstored.client.scatter import walk_of
from kvstored.client.segments import extent_of
from kvstored.core.calls import ReadStatus
from kvstored.core.types import TierId
from kvstored.errors import Corrupt, InvalidArgument

Table = NDArray[np.uint64]
Mapped = Callable[[LocalLink, Iterable[int], float], dict[int, Bytes]]

_HIT, _MISS = ReadStatus.HIT, ReadStatus.MISS
_DRAM = bytes([TierId.DRAM])
_TIERS = bytes([TierId.DRAM if verdict == native.HIT else 255 for verdict in range(256)])
"""Of each verdict."""
_MISFITS = (BufferError, TypeError, ValueError)


class _Targets(NamedTuple):
    """Where blocks go: `into` as `native.read` takes it, and what makes the blocks of the answer."""

    into: native.Array | tuple[object, ...]
    blocks: Callable[[list[bool]], Blocks]


class NativeReads:
    """Of one client in one process; `reads` counts what became of the keys."""

    def __init__(
        self,
        copies: native.Copies,
        copier: Copier,
        reports: Reports,
        reads: OptimisticReads,
        mapped: Mapped,
    ) -> None:
        self._copies = copies
        self._copier = copier
        self._reports = reports
        self._reads = reads
        self._mapped = mapped

    def read(
        self, link: LocalLink, index: Index, glance: Glance, timeout_s: float
    ) -> GetResult | None:
        """As `Optimistic.read`: keys of one length."""
        keys, out, reads = glance.keys.keys, glance.out, self._reads
        count = len(keys)
        rows = None if out is None else plain_rows(out, count)
        stride = 0 if rows is None else rows.size // count
        table = np.empty((count, native.FOUND_COLUMNS), dtype=np.uint64)
        absent, odd, total_bytes, numbers = self._copies.find(
            *index.facts, keys, glance.digest, glance.seed, stride, table
        )
        reads.changed += odd
        reads.absent += absent - odd
        if absent == count or (glance.gathers and (absent or None in glance.gathers)):
            return None
        segments = self._mapped(link, numbers, timeout_s)
        targets = _targets_of(table, total_bytes, rows, glance)
        verdicts = bytearray(count)
        where = index.facts, table, total_bytes, segments, glance.ranges, verdicts
        try:
            self._copied(targets.into, *where)
        except LookupError as error:
            raise Corrupt(f"the projection names a place that is none: {error}") from error
        except _MISFITS:
            targets = _fitting(table, segments, glance)
            self._copied(targets.into, *where)
        return self._result(table, targets, glance, verdicts)

    def _copied(
        self,
        into: native.Array | tuple[object, ...],
        facts: tuple[object, int, int, int],
        table: Table,
        total_bytes: int,
        segments: dict[int, Bytes],
        ranges: native.Ranges,
        verdicts: bytearray,
    ) -> None:
        past_cache = goes_past_cache(total_bytes, inward=False)

        def read(first: int, last: int) -> list[int]:
            self._copies.read(
                *facts, table, first, last, segments, into, ranges, past_cache, verdicts
            )
            return []

        if total_bytes < self._copier.parallel_bytes:
            read(0, len(table))
        else:
            self._copier.in_shares(table[:, native.LENGTH].tolist(), read)

    def _result(
        self, table: Table, targets: _Targets, glance: Glance, verdicts: bytearray
    ) -> GetResult | None:
        keys, reads = glance.keys.keys, self._reads
        count, hits = len(keys), verdicts.count(native.HIT)
        reads.changed += verdicts.count(native.CHANGED)
        reads.mismatched += verdicts.count(native.MISMATCHED)
        if not hits or (glance.gathers and hits < count):
            return None
        reads.hits += hits
        generations = tuple(table[:, native.GENERATION].tolist())
        if hits == count:
            self._reports.add(glance.digest, keys)
            return GetResult(
                blocks=() if glance.gathers else lambda: targets.blocks([True] * count),
                status=(_HIT,) * count,
                tiers=_DRAM * count,
                generations=generations,
                miss_reason="",
                corrupt=0,
                filled=((True,),) * count if glance.gathers else (),
            )
        good = [verdict == native.HIT for verdict in verdicts]
        self._reports.add(glance.digest, [k for k, hit in zip(keys, good, strict=True) if hit])
        return GetResult(
            blocks=lambda: targets.blocks(good),
            status=tuple([_HIT if hit else _MISS for hit in good]),
            tiers=bytes(verdicts).translate(_TIERS),
            generations=generations,
            miss_reason="",
            corrupt=0,
        )


def is_spread(glance: Glance) -> bool:
    """Whether its buffers are all known to C: those of many short runs are not."""
    return all(gather is None or gather.spread is not None for gather in glance.gathers)


def _targets_of(table: Table, total_bytes: int, rows: Bytes | None, glance: Glance) -> _Targets:
    """`rows`: the bytes of `out`, where it is one array. Nothing is looked at here: the call refuses what does not fit."""
    if rows is not None:
        return _Targets(rows, partial(_packed, table, rows))
    if glance.gathers:
        return _Targets(tuple([each and each.spread for each in glance.gathers]), _no_blocks)
    if glance.out is None:
        memory = np.empty(total_bytes, dtype=np.uint8)
        return _Targets(memory, partial(_packed, table, memory))
    return _Targets(tuple(glance.out), partial(_blocks_in, table, glance))


def _fitting(table: Table, segments: dict[int, Bytes], glance: Glance) -> _Targets:
    """The same with every buffer looked at: raises InvalidArgument where one is not of its block."""
    if glance.gathers:
        places = table[:, [native.SEGMENT, native.OFFSET, native.LENGTH]].tolist()
        for place, gather in zip(places, glance.gathers, strict=True):
            assert gather is not None, "looked at before"
            walk_of((extent_of(segments, *place),), gather, glance.ranges)
        raise InvalidArgument("buffers do not fit their pieces")
    privates = _privates(table, glance)
    assert not isinstance(privates, Packed), "rows of one array were given as such"
    return _Targets(tuple(privates), partial(blocks_made, privates))


def _packed(table: Table, memory: Bytes, good: list[bool]) -> Blocks:
    places = table.astype(np.int64)
    return blocks_made(Packed(memory, places[:, native.START], places[:, native.LENGTH]), good)


def _blocks_in(table: Table, glance: Glance, good: list[bool]) -> Blocks:
    return blocks_made(_privates(table, glance), good)


def _privates(table: Table, glance: Glance) -> Privates:
    lengths = table[:, native.LENGTH]
    return privates_of(lengths[:, np.newaxis], (lengths > 0).astype(np.uint8), glance.out)


def _no_blocks(_good: list[bool]) -> Blocks:
    return ()
