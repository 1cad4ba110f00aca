"""Tables of the catalog as columns: numpy arrays by row number, with a free list.

A row that is given back holds its defaults again, so that a stale row number is seen as free. Columns grow by an eighth, since at
a million rows doubling would cost as much memory as the rows.
"""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import Part

FREE, FILLING, READY, DOOMED = 0, 1, 2, 3
"""States of a copy (and, up to READY, of a piece). DOOMED: forgotten, but its space is still read or written."""

QUEUED, CLEAN, SINK, FIRST, UNVERIFIED, SUSPECT, WAITING, TARGET = 1, 2, 4, 8, 16, 32, 64, 128
"""Flags of a copy: in the policy's order; has a copy in a slower tier; counts as exempt sink; first victim; recovered and not yet
checked; in space where a late writer may live; waits for write-back; is being carried here from another tier."""


Defaults = dict[str, tuple[type[np.generic], int]]
"""Type and default of a column by its name."""


class Table:
    """Rows by number; `top` is one past the highest row ever used."""

    defaults: ClassVar[Defaults]

    def __init__(self) -> None:
        self.top = 0
        self.live = 0
        self.capacity = 0
        self._free: list[int] = []
        self._columns: list[tuple[NDArray[Any], int]] = []
        self._grow(1024)

    def take(self) -> int:
        self.live += 1
        if self._free:
            return self._free.pop()
        if self.top == self.capacity:
            self._grow(self.capacity + max(1024, self.capacity // 8))
        self.top += 1
        return self.top - 1

    def take_many(self, count: int) -> NDArray[np.int32]:
        reused = self._free[len(self._free) - min(count, len(self._free)) :]
        del self._free[len(self._free) - len(reused) :]
        fresh = count - len(reused)
        if self.top + fresh > self.capacity:
            self._grow(max(self.top + fresh, self.capacity + self.capacity // 8))
        rows = np.asarray([*reused, *range(self.top, self.top + fresh)], dtype=np.int32)
        self.top += fresh
        self.live += count
        return rows

    def reserve(self, rows: int) -> None:
        """Room for so many rows more, so that none of them has to wait for a copy of all columns."""
        more = rows - len(self._free)
        if self.top + more > self.capacity:
            self._grow(self.top + more)

    def give(self, row: int) -> None:
        for column, default in self._columns:
            column[row] = default
        self.live -= 1
        self._free.append(row)

    def give_many(self, rows: NDArray[np.int32]) -> None:
        at = rows.astype(np.intp)  # else each column converts them, for a microsecond
        for column, default in self._columns:
            column[at] = default
        self.live -= len(rows)
        self._free.extend(rows.tolist())

    def _grow(self, capacity: int) -> None:
        for name, (dtype, default) in self.defaults.items():
            column: NDArray[np.generic] = np.zeros(capacity, dtype=dtype)
            if self.capacity:
                column[: self.capacity] = getattr(self, name)
            if default:
                column[self.capacity :] = default
            setattr(self, name, column)
        self._columns = [
            (getattr(self, name), default) for name, (_, default) in self.defaults.items()
        ]
        self.capacity = capacity


class Blocks(Table):
    """`fast`: the tier that all required parts can be read from (the slowest part's fastest copy), 255 when not readable. `tiers`: bit t where
    tier t holds every required part. `have`: bit g where the window or state group g is complete in some tier. `holds`: fills, leases, requests and
    pins on the block or below it. `valid`: tokens of the block. `content`: fingerprint of its content key, 0 where none was told."""

    ns: NDArray[np.int32]
    first_copy: NDArray[np.int32]
    holds: NDArray[np.int32]
    hits: NDArray[np.uint32]
    last_s: NDArray[np.float64]
    valid: NDArray[np.uint32]
    have: NDArray[np.uint32]
    fast: NDArray[np.uint8]
    tiers: NDArray[np.uint8]
    generation: NDArray[np.uint64]
    content: NDArray[np.uint32]
    defaults: ClassVar[Defaults] = {
        "ns": (np.int32, -1),
        "first_copy": (np.int32, -1),
        "holds": (np.int32, 0),
        "hits": (np.uint32, 0),
        "last_s": (np.float64, 0),
        "valid": (np.uint32, 0),
        "have": (np.uint32, 0),
        "fast": (np.uint8, 255),
        "tiers": (np.uint8, 0),
        "generation": (np.uint64, 0),
        "content": (np.uint32, 0),
    }


class Copies(Table):
    """`kids`: copies of child blocks in the same tier and part. `missing`: pieces of a required part that are not READY yet. `have`: complete
    groups of a window/state copy. `rank`: the policy's order, least first. `readers`: leases and tasks that read it; `fills`: open fills on it."""

    block: NDArray[np.int32]
    next: NDArray[np.int32]
    tier: NDArray[np.uint8]
    part: NDArray[np.uint8]
    state: NDArray[np.uint8]
    flags: NDArray[np.uint8]
    kids: NDArray[np.int32]
    readers: NDArray[np.int32]
    fills: NDArray[np.uint16]
    missing: NDArray[np.uint16]
    first_piece: NDArray[np.int32]
    units: NDArray[np.uint32]
    have: NDArray[np.uint32]
    rank: NDArray[np.int64]
    defaults: ClassVar[Defaults] = {
        "block": (np.int32, -1),
        "next": (np.int32, -1),
        "tier": (np.uint8, 0),
        "part": (np.uint8, 0),
        "state": (np.uint8, 0),
        "flags": (np.uint8, 0),
        "kids": (np.int32, 0),
        "readers": (np.int32, 0),
        "fills": (np.uint16, 0),
        "missing": (np.uint16, 0),
        "first_piece": (np.int32, -1),
        "units": (np.uint32, 0),
        "have": (np.uint32, 0),
        "rank": (np.int64, 0),
    }

    def as_they_leave(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Copies of one touch, the tail's first, in the order of their ranks: tier by tier, so that a path's ranks in one tier have no
        gaps and leave it together; and sparse ones before the others, since what is read of them is a selection: dense rows stay."""
        if len(rows) < 2:
            return rows
        order = 2 * self.tier[rows] + (self.part[rows] != int(Part.SPARSE))
        return rows if (order == order[0]).all() else rows[np.argsort(order, kind="stable")]


class Pieces(Table):
    """`segment`, `start`, `units`: its only extent; a piece of several has units 0 here and its place in `Books.long_places`."""

    copy: NDArray[np.int32]
    next: NDArray[np.int32]
    group: NDArray[np.uint8]
    state: NDArray[np.uint8]
    shard: NDArray[np.uint16]
    segment: NDArray[np.uint16]
    start: NDArray[np.uint32]
    units: NDArray[np.uint32]
    length: NDArray[np.uint32]
    checksum: NDArray[np.uint64]
    defaults: ClassVar[Defaults] = {
        "copy": (np.int32, -1),
        "next": (np.int32, -1),
        "group": (np.uint8, 0),
        "state": (np.uint8, 0),
        "shard": (np.uint16, 0),
        "segment": (np.uint16, 0),
        "start": (np.uint32, 0),
        "units": (np.uint32, 0),
        "length": (np.uint32, 0),
        "checksum": (np.uint64, 0),
    }
