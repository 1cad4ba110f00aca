"""What one submission of copies to or from a GPU consists of: runs that the device reaches itself, and bytes that are staged. Pure.

Places in memory are addresses here. Bytes in pinned memory are one run each, others go through a staging buffer of bounded size.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstored.tiers.device import Move
from kvstored.tiers.kernels import RUN

Bytes = NDArray[np.uint8]
ALIGNMENT = 16
"""Staged runs begin at multiples of it, as places in a pool and in the arena do: only then does the kernel copy 16 bytes at once."""


class Pinned:
    """Ranges of addresses that the device reaches itself, by their begins. Whoever adds holds no lock that readers need: both are one step."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, address: int, size_bytes: int) -> None:
        insort(self._ranges, (address, address + size_bytes))

    def addresses(self) -> list[int]:
        return [begin for begin, _ in self._ranges]

    def reach(self, address: int, size_bytes: int) -> tuple[bool, int]:
        """Whether the first bytes of a run are pinned, and how many of it are alike. A run never crosses the end of a range: some copies of
        CUDA refuse that."""
        i = bisect_right(self._ranges, (address, 1 << 64)) - 1
        if i >= 0 and address < self._ranges[i][1]:
            return True, min(size_bytes, self._ranges[i][1] - address)
        following = self._ranges[i + 1][0] if i + 1 < len(self._ranges) else address + size_bytes
        return False, min(size_bytes, following - address)


@dataclass(slots=True)
class Submission:
    """`runs`: the host address of a staged one is its offset in the staging buffer. `staged`: those offsets, and where the bytes come from or go
    to."""

    runs: NDArray[np.void]
    is_staged: NDArray[np.bool_]
    staged: list[tuple[int, Bytes]]


@dataclass(slots=True)
class _Open:
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    is_staged: list[bool] = field(default_factory=list)
    staged: list[tuple[int, Bytes]] = field(default_factory=list)
    staged_bytes: int = 0

    def add(self, host: int, offset: int, size_bytes: int, *, is_staged: bool) -> None:
        self.rows.append((host, offset, size_bytes, 0))
        self.is_staged.append(is_staged)

    def closed(self) -> Submission:
        rows = np.array(self.rows, dtype=RUN)
        return Submission(rows, np.array(self.is_staged, dtype=np.bool_), self.staged)


def planned(
    moves: Sequence[Move], pinned: Pinned, staging_bytes: int, runs_max: int
) -> Iterator[Submission]:
    """Submissions that carry these moves, in their order: one, unless the staging buffer or the list is too small for all."""
    now = _Open()
    for offset, view in _flat(moves):
        address, begin = view.ctypes.data, 0
        while begin < len(view):
            is_pinned, size = pinned.reach(address + begin, len(view) - begin)
            if not is_pinned:
                size = min(size, staging_bytes - now.staged_bytes)
            if size <= 0 or len(now.rows) == runs_max:
                yield now.closed()
                now = _Open()
                continue
            if is_pinned:
                now.add(address + begin, offset + begin, size, is_staged=False)
            else:
                now.add(now.staged_bytes, offset + begin, size, is_staged=True)
                now.staged.append((now.staged_bytes, view[begin : begin + size]))
                now.staged_bytes += -(-size // ALIGNMENT) * ALIGNMENT
            begin += size
    if now.rows:
        yield now.closed()


def _flat(moves: Sequence[Move]) -> Iterator[tuple[int, Bytes]]:
    for offset, views in moves:
        at = offset
        for view in views:
            yield at, view
            at += len(view)
