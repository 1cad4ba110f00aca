"""Copies on their way between tiers, as values: a task a copy, or one run for many plain blocks that were begun together.

A run is the same right as its tasks: its ids are theirs, and `each` turns it into them. As long as nothing happens to one of its blocks
alone it ends in one step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import CopyTask, PieceMove
from kvstored.core.columnar import Places, named
from kvstored.core.types import Fingerprints, Heat, NamespaceId, Part, Rows, TierId


@dataclass(frozen=True, slots=True, eq=False)
class CopyRun:
    """Plain copies of one namespace with the ids `first`, `first` + 1, ..., from one tier to another; `length`: bytes of each.

    `asked`: which key of the call that asked for it each block was; of a write-back the index alone.
    """

    first: int
    ns: NamespaceId
    part: Part
    source: TierId
    target: TierId
    source_copies: Rows
    target_copies: Rows
    fingerprints: Fingerprints
    parents: Fingerprints
    depths: NDArray[np.int64]
    hits: NDArray[np.uint32]
    heats: NDArray[np.uint8]
    generations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    sources: Places
    targets: Places
    asked: NDArray[np.int64]
    length: int
    valid_tokens: int

    def __len__(self) -> int:
        return len(self.target_copies)

    @property
    def size_bytes(self) -> int:
        return self.length * len(self)

    @property
    def ids(self) -> range:
        return range(self.first, self.first + len(self))

    def part_of(self, begin: int, end: int) -> "CopyRun":
        """Its copies from `begin` to before `end`."""
        here = slice(begin, end)
        return replace(
            self,
            first=self.first + begin,
            source_copies=self.source_copies[here],
            target_copies=self.target_copies[here],
            fingerprints=self.fingerprints[here],
            parents=self.parents[here],
            depths=self.depths[here],
            hits=self.hits[here],
            heats=self.heats[here],
            generations=self.generations[here],
            checksums=self.checksums[here],
            sources=self.sources.part_of(begin, end),
            targets=self.targets.part_of(begin, end),
            asked=self.asked[here],
        )

    def each(self) -> Iterator[CopyTask]:
        fingerprints, parents = named(self.fingerprints), named(self.parents)
        for i, (fingerprint, parent) in enumerate(zip(fingerprints, parents, strict=True)):
            move = PieceMove(
                group=0,
                shard=0,
                length=self.length,
                checksum=int(self.checksums[i]),
                source=self.sources.place(i),
                target=self.targets.place(i),
            )
            yield CopyTask(
                id=self.first + i,
                ns=self.ns,
                fingerprint=fingerprint,
                parent=parent,
                part=self.part,
                source=self.source,
                target=self.target,
                source_copy=int(self.source_copies[i]),
                target_copy=int(self.target_copies[i]),
                moves=(move,),
                depth=int(self.depths[i]),
                valid_tokens=self.valid_tokens,
                hits=int(self.hits[i]),
                heat=Heat(int(self.heats[i])),
                generation=int(self.generations[i]),
            )


Copying = CopyTask | CopyRun


def copies_in(copying: Copying) -> int:
    return len(copying) if isinstance(copying, CopyRun) else 1


def bytes_in(copying: Copying) -> int:
    if isinstance(copying, CopyRun):
        return copying.size_bytes
    return sum(move.length for move in copying.moves)


def targets_of(copying: Copying) -> list[int]:
    """The target copies."""
    if isinstance(copying, CopyRun):
        rows: list[int] = copying.target_copies.tolist()
        return rows
    return [copying.target_copy]


@dataclass(frozen=True, slots=True)
class Acquired:
    """A lease in the making. `loads` are new copies to carry, `pending` every target copy row (of these and of earlier ones
    still under way) to wait for before `grant`, `hits` the block rows that it reads, head to tail."""

    lease: int
    loads: list[Copying]
    pending: list[int]
    hits: Rows
