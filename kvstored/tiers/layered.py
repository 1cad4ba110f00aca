"""Pieces on their way to a GPU layer by layer: which bytes of which runs belong to a range of layers. Pure but for addresses.

A piece holds its layers one after the other, in equal parts, so a range of layers is a range of its bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import UNIT_BYTES, NamespaceSpec, Place
from kvstored.errors import InvalidArgument
from kvstored.tiers.base import Views
from kvstored.tiers.device import Moves

LAYERS_MAX = 4096
PARTS_MAX = 16
"""A submission each: more of them cost more than the earlier start of the first layers saves."""


class Told(Protocol):
    """Called from the thread that copies."""

    def submitted(self, part: int, events: Sequence[tuple[int, bytes]]) -> None:
        """`events`: of each pool in which it has bytes; empty handles where an event cannot be shared."""
        ...

    def arrived(self, part: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Layers:
    """`ends`: the layer before which each part of the copy ends; the last is `count`, into which every piece divides."""

    count: int
    ends: tuple[int, ...]

    def parts(self) -> Iterator[tuple[int, int]]:
        yield from zip((0, *self.ends[:-1]), self.ends, strict=True)

    def ready(self, parts: int) -> int:
        """Layers that so many parts hold."""
        return self.ends[parts - 1] if parts else 0


def layers_in(spec: NamespaceSpec, groups_mask: int, count: int) -> Layers:
    """InvalidArgument where a piece of these groups does not divide into so many."""
    for g, group in enumerate(spec.groups):
        if groups_mask >> g & 1 and (count > LAYERS_MAX or group.bytes_per_block % count):
            raise InvalidArgument(
                f"a piece has no such layers: layers={count} group={group.name!r} bytes={group.bytes_per_block}"
            )
    return layers_of(count)


def layers_of(count: int) -> Layers:
    """In at most PARTS_MAX parts."""
    parts = min(count, PARTS_MAX)
    return Layers(count, tuple(count * part // parts for part in range(1, parts + 1)))


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes by columns; `at`: where each begins in its piece, `lengths`: of that piece."""

    segments: NDArray[np.int64]
    offsets: NDArray[np.int64]
    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    at: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def pools(self) -> list[int]:
        found: list[int] = np.unique(self.segments).tolist()
        return found

    def part(self, segment: int, count: int, begin: int, end: int) -> Moves:
        """What layers `begin` to `end` of `count` have in this pool."""
        low = np.maximum(self.at, self.lengths * begin // count)
        high = np.minimum(self.at + self.sizes, self.lengths * end // count)
        mine = (self.segments == segment) & (low < high)
        skipped = (low - self.at)[mine]
        columns = (self.offsets[mine] + skipped, self.addresses[mine] + skipped, (high - low)[mine])
        return Moves(*(column.astype(np.uint64) for column in columns))


def runs_of(items: Sequence[tuple[Place, Views]]) -> Runs:
    rows = [row for place, views in items for row in _cut(place, views)]
    return Runs(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)


def _cut(place: Place, views: Views) -> Iterator[tuple[int, ...]]:
    """Runs that lie together on both sides."""
    length, done = sum(map(len, views)), 0
    rest = list(reversed(views))
    for extent in place:
        at, end = extent.start * UNIT_BYTES, (extent.start + extent.units) * UNIT_BYTES
        while rest and at < end:
            view = rest.pop()
            size = min(len(view), end - at)
            address = view.__array_interface__["data"][0]
            yield extent.segment, at, address, size, done, length
            if len(view) > size:
                rest.append(view[size:])
            at, done = at + size, done + size
