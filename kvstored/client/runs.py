"""Pieces of a call as runs of memory: which private bytes belong to which shared ones, neighbours joined.

Decided for all pieces at once, by columns; only the runs that remain are Python objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvstored.client.copying import STEP_BYTES, Bytes, Run
from kvstored.client.results import Blocks
from kvstored.client.scatter import Gather, Walk, walk_of
from kvstored.client.segments import extent_of
from kvstored.errors import Corrupt
from kvstored.wire.packing import U64S, Pieces

I64S = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """Private sides that lie in one array: piece i has `sizes[i]` bytes at `starts[i]`, 0 where it is not wanted."""

    memory: Bytes
    starts: I64S
    sizes: I64S

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> Bytes | None:
        start, size = int(self.starts[i]), int(self.sizes[i])
        return self.memory[start : start + size] if size else None

    def to_list(self) -> list[Bytes | None]:
        starts, sizes = self.starts.tolist(), self.sizes.tolist()
        return [
            self.memory[a : a + size] if size else None
            for a, size in zip(starts, sizes, strict=True)
        ]


Privates = Packed | Sequence[Bytes | None]


def blocks_made(privates: Privates, good: Sequence[bool]) -> Blocks:
    """The blocks of a get of its private sides."""
    flat = privates.to_list() if isinstance(privates, Packed) else privates
    groups = len(flat) // max(len(good), 1)
    return tuple(
        tuple(flat[i * groups : (i + 1) * groups]) if is_good else None
        for i, is_good in enumerate(good)
    )


def runs_between(
    pieces: Pieces, privates: Privates, segments: dict[int, Bytes]
) -> tuple[list[int], list[Run]]:
    """Numbers of the pieces that have a place and a private side, and the runs that carry them, in their order."""
    if isinstance(privates, Packed) and len(privates) > 1:
        joined = _joined(pieces, privates, segments)
        if joined is not None:
            return joined
    indexes: list[int] = []
    runs: list[Run] = []
    first, extents = pieces.first.tolist(), pieces.extents.tolist()
    for i in range(len(privates)):
        private = privates[i]
        a, b = first[i], first[i + 1]
        if private is None or a == b:
            continue
        shared = tuple(extent_of(segments, *extents[j]) for j in range(a, b))
        if sum(extent.size for extent in shared) != private.size:
            raise Corrupt(f"a place has another size than its piece bytes={private.size}")
        indexes.append(i)
        runs.append(Run(private, shared, (private.size,)))
    return indexes, runs


def walks_between(
    pieces: Pieces,
    gathers: Sequence[Gather | None],
    segments: dict[int, Bytes],
    ranges: tuple[tuple[int, int], ...] | None,
) -> tuple[list[int], list[Walk]]:
    """The same for pieces that are spread over buffers; all are checked before the first byte is copied."""
    indexes: list[int] = []
    walks: list[Walk] = []
    first, extents = pieces.first.tolist(), pieces.extents.tolist()
    for i, gather in enumerate(gathers):
        a, b = first[i], first[i + 1]
        if gather is None or a == b:
            continue
        shared = tuple(extent_of(segments, *extents[j]) for j in range(a, b))
        walks.append(walk_of(shared, gather, ranges))
        indexes.append(i)
    return indexes, walks


def blocks_in_place(pieces: Pieces, segments: dict[int, Bytes], hits: Sequence[bool]) -> Blocks:
    """Read-only arrays over the segments; a piece in several extents is copied: an array has one run of memory."""
    read_only = {number: segment.view() for number, segment in segments.items()}
    for segment in read_only.values():
        segment.flags.writeable = False
    if (
        len(pieces) == len(hits) == len(pieces.extents)
        and (pieces.first[1:] > pieces.first[:-1]).all()
    ):
        return _single_extents(pieces.extents, read_only, hits)
    first, extents = pieces.first.tolist(), pieces.extents.tolist()
    flat: list[Bytes | None] = []
    for i in range(len(first) - 1):
        runs = [extent_of(read_only, *extents[j]) for j in range(first[i], first[i + 1])]
        flat.append(_one_array(runs) if runs else None)
    return blocks_made(flat, hits)


def _single_extents(extents: U64S, segments: dict[int, Bytes], hits: Sequence[bool]) -> Blocks:
    """Of one group, one extent a block: all are checked at once. One by one, 4,096 cost three times as much."""
    ends = extents[:, 1] + extents[:, 2]
    numbers, last = np.unique(extents[:, 0], return_inverse=True)
    sizes = np.array([segments[number].size for number in numbers.tolist()], dtype=np.uint64)
    is_outside = (ends > sizes[last]) | (ends < extents[:, 1])
    if is_outside.any():
        segment, offset, _ = extents[is_outside][0].tolist()
        raise Corrupt(f"a place lies outside its segment segment={segment} offset={offset}")
    places = zip(extents[:, 0].tolist(), extents[:, 1].tolist(), ends.tolist(), hits, strict=True)
    return tuple([(segments[n][a:b],) if is_good else None for n, a, b, is_good in places])


def _one_array(runs: list[Bytes]) -> Bytes:
    if len(runs) == 1:
        return runs[0]
    array = np.concatenate(runs)
    array.flags.writeable = False
    return array


def _joined(
    pieces: Pieces, privates: Packed, segments: dict[int, Bytes]
) -> tuple[list[int], list[Run]] | None:
    """None where a wanted piece is not in one extent."""
    wanted = np.flatnonzero((np.diff(pieces.first) > 0) & (privates.sizes > 0))
    rows = pieces.first[wanted]
    if not len(wanted):
        return [], []
    extents = pieces.extents[rows].astype(np.int64)
    segment, offset, length = extents[:, 0], extents[:, 1], extents[:, 2]
    starts = privates.starts[wanted]
    if not np.array_equal(length, privates.sizes[wanted]):
        return None
    breaks = (
        (segment[1:] != segment[:-1])
        | (offset[1:] != offset[:-1] + length[:-1])
        | (starts[1:] != starts[:-1] + length[:-1])
    )
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(wanted)]
    sizes = length.tolist()
    at = list(zip(segment.tolist(), offset.tolist(), starts.tolist(), strict=True))
    runs: list[Run] = []
    for first, b in pairwise(cuts):
        a = first
        while a < b:
            end, run_bytes = a + 1, sizes[a]
            while end < b and run_bytes + sizes[end] <= STEP_BYTES:
                run_bytes += sizes[end]
                end += 1
            number, begin, start = at[a]
            shared = extent_of(segments, number, begin, run_bytes)
            private = privates.memory[start : start + run_bytes]
            runs.append(Run(private, (shared,), tuple(sizes[a:end])))
            a = end
    return wanted.tolist(), runs
