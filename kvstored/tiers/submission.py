"""What one submission of copies to or from a GPU consists of: runs that the device reaches itself, and bytes that are staged. Pure but for
addresses.

Bytes in pinned memory are one run each, by columns: there may be a hundred thousand. Others go through a staging buffer of bounded size.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.tiers.device import Moves
from kvstored.tiers.kernels import RUN

ALIGNMENT = 16
"""Staged runs begin at multiples of it, as places in a pool and in the arena do: only then does the kernel copy 16 bytes at once."""
Row = tuple[int, int, int, int]


class Pinned:
    """Ranges of addresses that the device reaches itself. Exchanged, never changed: copies in other threads look at them."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, address: int, size_bytes: int) -> None:
        ranges = list(self._ranges)
        insort(ranges, (address, address + size_bytes))
        self._ranges = ranges

    def reach_whole(self, moves: Moves) -> NDArray[np.bool_]:
        """Which runs lie within one range. Some copies of CUDA refuse one that crosses the end of a range."""
        ranges = self._ranges
        if not ranges:
            return np.zeros(len(moves), dtype=np.bool_)
        begins, ends = np.array(ranges, dtype=np.uint64).T
        at = np.searchsorted(begins, moves.addresses, side="right") - 1
        ends_within = moves.addresses + moves.sizes <= ends[np.maximum(at, 0)]
        whole: NDArray[np.bool_] = (at >= 0) & ends_within
        return whole

    def reach(self, address: int, size_bytes: int) -> tuple[bool, int]:
        """Whether the first bytes of a run are pinned, and how many of it are alike."""
        ranges = self._ranges
        i = bisect_right(ranges, (address, 1 << 64)) - 1
        if i >= 0 and address < ranges[i][1]:
            return True, min(size_bytes, ranges[i][1] - address)
        following = ranges[i + 1][0] if i + 1 < len(ranges) else address + size_bytes
        return False, min(size_bytes, following - address)


@dataclass(frozen=True, slots=True)
class Submission:
    """`runs`: the host address of a staged one, of which there are `staged` many at the end, is its offset in the staging buffer. `staged`: those
    offsets, and the address and size of what comes from there or goes there."""

    runs: NDArray[np.void]
    staged: Sequence[tuple[int, int, int]]


def planned(
    moves: Moves, pinned: Pinned, staging_bytes: int, runs_max: int
) -> Iterator[Submission]:
    """Submissions that carry these moves: one, unless the staging buffer or the list is too small for all."""
    is_whole = pinned.reach_whole(moves)
    runs = np.zeros(int(np.count_nonzero(is_whole)), dtype=RUN)
    runs["host"] = moves.addresses[is_whole]
    runs["offset"] = moves.offsets[is_whole]
    runs["size"] = moves.sizes[is_whole]
    while len(runs) > runs_max:
        yield Submission(runs[:runs_max], ())
        runs = runs[runs_max:]
    direct: list[Row] = []
    staged: list[Row] = []
    taken: list[tuple[int, int, int]] = []
    level = 0
    for is_pinned, address, offset, size in _cut(moves, ~is_whole, pinned, staging_bytes):
        is_full = len(runs) + len(direct) + len(staged) == runs_max
        if is_full or (not is_pinned and level + size > staging_bytes):
            yield _submission(runs, direct, staged, taken)
            runs, direct, staged, taken, level = runs[:0], [], [], [], 0
        if is_pinned:
            direct.append((address, offset, size, 0))
            continue
        staged.append((level, offset, size, 0))
        taken.append((level, address, size))
        level += -(-size // ALIGNMENT) * ALIGNMENT
    if len(runs) or direct or staged:
        yield _submission(runs, direct, staged, taken)


def _submission(
    runs: NDArray[np.void], direct: list[Row], staged: list[Row], taken: list[tuple[int, int, int]]
) -> Submission:
    more = np.array([*direct, *staged], dtype=RUN)
    return Submission(np.concatenate([runs, more]), taken)


def _cut(
    moves: Moves, chosen: NDArray[np.bool_], pinned: Pinned, size_max: int
) -> Iterator[tuple[bool, int, int, int]]:
    """(pinned, address, offset, size) of parts that are one or the other, each small enough to be staged."""
    columns = (moves.addresses[chosen], moves.offsets[chosen], moves.sizes[chosen])
    for address, offset, left in zip(*(column.tolist() for column in columns), strict=True):
        at = 0
        while at < left:
            is_pinned, size = pinned.reach(address + at, left - at)
            size = size if is_pinned else min(size, size_max)
            yield is_pinned, address + at, offset + at, size
            at += size
