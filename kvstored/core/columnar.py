"""Answers and effects of many plain blocks in one value each, as columns: what a call with thousands of keys is made of.

Plain: a block of one piece in one extent (core/plain.py). The same facts, one block at a time, are in calls.py; `each` and `singly` turn
these into those.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import (
    Effect,
    FillStatus,
    Fingerprint,
    Freed,
    Granted,
    GrantedPiece,
    PieceRow,
    ReadBlock,
    ReadPiece,
    ReadStatus,
    Reason,
    Visible,
)
from kvstored.core.types import Extent, Fingerprints, Heat, NamespaceId, Place, Rows, TierId


class Places(NamedTuple):
    """One extent a piece: segments, first units, units."""

    segment: NDArray[np.int64]
    start: NDArray[np.int64]
    units: NDArray[np.int64]

    @property
    def size(self) -> int:
        return len(self.start)

    def place(self, i: int) -> Place:
        return (Extent(int(self.segment[i]), int(self.start[i]), int(self.units[i])),)

    def part_of(self, begin: int, end: int) -> "Places":
        return Places(*(column[begin:end] for column in self))

    def at(self, rows: Sequence[int]) -> "Places":
        which = np.asarray(rows, dtype=np.int64)
        return Places(*(column[which] for column in self))


def no_places() -> Places:
    nothing = np.empty(0, dtype=np.int64)
    return Places(nothing, nothing, nothing)


def places_in(runs: Iterable[Extent], units: int) -> Places:
    """The places of `units` each that lie back to back in these runs."""
    parts = [np.arange(run.start, run.start + run.units, units, dtype=np.int64) for run in runs]
    segments = [
        np.full(len(part), run.segment, dtype=np.int64)
        for run, part in zip(runs, parts, strict=True)
    ]
    start = np.concatenate(parts)
    return Places(np.concatenate(segments), start, np.full(len(start), units, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class GrantedMany:
    """Rights to write consecutive keys from `first_key` on, with consecutive fills; `length`: bytes of each piece."""

    first_fill: int
    first_key: int
    fingerprints: Fingerprints
    parents: Fingerprints
    depths: NDArray[np.int64]
    heats: NDArray[np.uint8]
    generations: NDArray[np.uint64]
    places: Places
    valid_tokens: int
    length: int

    def __len__(self) -> int:
        return self.places.size

    def each(self) -> Iterator[Granted]:
        fingerprints = named(self.fingerprints)
        parents = named(self.parents)
        for i, (fingerprint, parent) in enumerate(zip(fingerprints, parents, strict=True)):
            piece = GrantedPiece(0, 0, self.length, self.places.place(i), int(self.generations[i]))
            yield Granted(
                fill=self.first_fill + i,
                fingerprint=fingerprint,
                parent=parent,
                depth=int(self.depths[i]),
                valid_tokens=self.valid_tokens,
                heat=Heat(int(self.heats[i])),
                key_index=self.first_key + i,
                pieces=(piece,),
            )


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a reservation came to: `first` key by key, then the keys of `many`, then `no_space` keys that nothing was left for."""

    first: list[Granted | FillStatus]
    many: GrantedMany | None = None
    no_space: int = 0

    @property
    def status(self) -> list[FillStatus]:
        first = [FillStatus.GRANTED if isinstance(o, Granted) else o for o in self.first]
        many = 0 if self.many is None else len(self.many)
        return first + [FillStatus.GRANTED] * many + [FillStatus.NO_SPACE] * self.no_space

    @property
    def grants(self) -> list[Granted | None]:
        first = [o if isinstance(o, Granted) else None for o in self.first]
        many = [] if self.many is None else self.many.each()
        return [*first, *many, *[None] * self.no_space]


@dataclass(frozen=True, slots=True)
class ReadMany:
    """What a lease on plain blocks reads, one row a key: `copies` -1 for a miss, whose reason is in `reasons` by its key's index.
    `depths`, `tokens`: of each block, of a full one at depth 0 for a miss; `places` says nothing of a miss. `tiers`: where each was
    before any load.

    All of it lies in memory when it is granted, and none of it has to be looked at before it is handed out.
    """

    copies: Rows
    depths: NDArray[np.int64]
    tokens: NDArray[np.int64]
    generations: NDArray[np.uint64]
    places: Places
    lengths: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    tiers: NDArray[np.uint8]
    reasons: dict[int, Reason]

    @property
    def hits(self) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = self.copies >= 0
        return there

    @property
    def hit_places(self) -> Places:
        hits = self.hits
        return Places(*(column[hits] for column in self.places))

    def each(self) -> list[ReadBlock]:
        return [self._block(i, copy) for i, copy in enumerate(self.copies.tolist())]

    def _block(self, i: int, copy: int) -> ReadBlock:
        tier = TierId(int(self.tiers[i]))
        if copy < 0:
            reason = self.reasons[i]
            return ReadBlock(ReadStatus.MISS, tier, 0, (None,), False, False, reason)
        piece = ReadPiece(
            group=0,
            shard=0,
            length=int(self.lengths[i]),
            checksum=int(self.checksums[i]),
            place=self.places.place(i),
            copy=copy,
        )
        return ReadBlock(
            status=ReadStatus.HIT,
            tier=tier,
            generation=int(self.generations[i]),
            pieces=(piece,),
            unverified=False,
            must_verify=False,
            reason=Reason.UNKNOWN,
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """What a lease reads: key by key, or `many` and then nothing in `single`. Lease 0 where nothing is read."""

    lease: int
    single: list[ReadBlock]
    many: ReadMany | None = None

    @property
    def blocks(self) -> list[ReadBlock]:
        return self.single if self.many is None else self.many.each()


@dataclass(frozen=True, slots=True)
class FreedMany:
    """As `Freed` for plain copies in memory."""

    tier: TierId
    ns: NamespaceId
    fingerprints: Fingerprints
    places: Places
    reason: Reason

    def each(self) -> Iterator[Freed]:
        for i, fingerprint in enumerate(named(self.fingerprints)):
            row = PieceRow(0, 0, self.places.place(i))
            units = int(self.places.units[i])
            yield Freed(self.tier, self.ns, fingerprint, (row,), self.reason, 0, units)


@dataclass(frozen=True, slots=True)
class VisibleMany:
    """As `Visible` for plain blocks.

    `lines`: where their records lie in memory, if that is not where they became visible. `is_load`: the bytes came up from a slower tier.
    """

    ns: NamespaceId
    fingerprints: Fingerprints
    tier: TierId
    depths: Rows
    places: Places
    lines: Places | None = None
    is_load: bool = False

    def each(self) -> Iterator[Visible]:
        for i, fingerprint in enumerate(named(self.fingerprints)):
            row = PieceRow(0, 0, self.places.place(i))
            yield Visible(self.ns, fingerprint, self.tier, int(self.depths[i]), (row,))


AnyEffect = Effect | FreedMany | VisibleMany


def singly(effects: Iterable[AnyEffect]) -> Iterator[Effect]:
    """The effects with those of many blocks taken apart, in order."""
    for effect in effects:
        if isinstance(effect, FreedMany | VisibleMany):
            yield from effect.each()
        else:
            yield effect


def named(fingerprints: Fingerprints) -> list[Fingerprint]:
    return [(low, high) for low, high in fingerprints.tolist()]
