"""What every tier promises: five blocking list-form calls on pieces, two of them also by columns, and the values they take and give.

A tier moves bytes and decides nothing. It blocks, so it is called only from its own lane. Items of one call fare independently: each
gets a record or the error that befell it, in the order of the items. Only a bug raises.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored.codec.unpacked import Unpacked
from kvstored.core.columnar import Places
from kvstored.core.types import Fingerprints, Place
from kvstored.errors import KvstoredError
from kvstored.tiers.record import RECORD, Base, Record, Records, unpack
from kvstored.tiers.record_runs import packed

Views = Sequence[NDArray[np.uint8]]
"""Bytes of one piece in memory: one-dimensional uint8 arrays that follow each other, as `Arena.views` cuts them."""


@dataclass(frozen=True, slots=True)
class PieceRef:
    """Which piece: the 16-byte fingerprint is salted by namespace, so this names it in the whole store."""

    fingerprint: bytes
    group: int
    shard: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Heat, hits and time of last use of one piece, flushed in bulk; they may lag."""

    ref: PieceRef
    place: Place
    hits: int
    last_s: float
    heat: int


@dataclass(frozen=True, slots=True)
class Link:
    """Where the block of one piece stands in the tree since its parent became known; `parent` as in `Record`."""

    ref: PieceRef
    place: Place
    parent: bytes
    depth: int


@dataclass(frozen=True, slots=True)
class ScanBatch:
    """A stretch of a tier's records as columns, for recovery.

    `extents`: shape (sum of extent_counts, 3), rows of (segment, start, units), the extents of each record in turn. `rejected`: records that were
    there and could not be used; the tier has forgotten them or will not serve them. Pass `cursor` to the next call until `done`.
    `left`: how many records the tier may still have from the start of this batch on, 0 where it cannot tell cheaply. `bases`: what records of
    P frames refer to, by their index.
    """

    records: Records
    extent_counts: NDArray[np.uint8]
    extents: NDArray[np.uint32]
    cursor: int
    done: bool
    rejected: int
    left: int = 0
    bases: Mapping[int, Base] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Plain pieces (group 0 of shard 0) of one length, each in one extent of whole units: what comes by the thousand.

    `slots`: memory of each, as large as its extent and aligned to units. What lies there behind its length does not matter, and may be
    written to.
    """

    fingerprints: Fingerprints
    places: Places
    length: int
    slots: Sequence[NDArray[np.uint8]]

    def __len__(self) -> int:
        return len(self.slots)

    def ref(self, i: int) -> PieceRef:
        return PieceRef(self.fingerprints[i].tobytes(), 0, 0)

    def views(self, i: int) -> Views:
        return [self.slots[i][: self.length]]


@dataclass(frozen=True, slots=True)
class Crossed:
    """A piece as it crosses to a GPU, and its record where it comes from."""

    record: Record
    unpacked: Unpacked


@dataclass(frozen=True, slots=True)
class Carried:
    """What came of a run: the records as they lie in the tier, the units of each place that are in use, and what befell which item; a
    record of such an item says nothing."""

    records: Records
    units: NDArray[np.int64]
    faults: dict[int, KvstoredError]


class Tier(Protocol):
    def write(self, items: Sequence[tuple[Record, Views]]) -> list[Record | KvstoredError]:
        """Store each piece at its record's place; durable when it returns.

        The bytes are checked against `record.checksum` on the way (Corrupt: the source is bad). The returned record says what was stored:
        codec, stored length and checksum, and the place cut down to the units in use; the rest of the place is the caller's again.
        """
        ...

    def read(self, items: Sequence[tuple[PieceRef, Place, Views]]) -> list[Record | KvstoredError]:
        """Fill each item's views, whose sizes add up to the piece's length, with its decoded bytes.

        NotFound: another or no piece lies there. Corrupt: a checksum does not match; what the views hold then is not to be used.
        """
        ...

    def write_run(self, run: PieceRun, records: Records) -> Carried:
        """As `write` for each piece, whose record names its place."""
        ...

    def read_run(self, run: PieceRun) -> Carried:
        """As `read` for each piece."""
        ...

    def discard(self, items: Sequence[tuple[PieceRef, Place]]) -> list[Record | None]:
        """Forget each piece if it is still the one at this place; durable when it returns. Gives the record that was there.

        The one list call that raises: NoSpace or Unavailable when nothing can be forgotten durably now. Some may be forgotten, so repeat it.
        """
        ...

    def scan(self, cursor: int, limit: int) -> ScanBatch:
        """The next records, at most `limit`, starting with cursor 0. Pieces written or discarded meanwhile may or may not appear."""
        ...

    def close(self) -> None:
        """Let go of files and memory; what was durable stays."""
        ...


def write_each(tier: Tier, run: PieceRun, records: Records) -> Carried:
    """`write_run` of a tier that has no faster way."""
    unpacked = [unpack(records[i].tobytes(), run.places.place(i)) for i in range(len(run))]
    return carried(run, tier.write([(each, run.views(i)) for i, each in enumerate(unpacked)]))


def read_each(tier: Tier, run: PieceRun) -> Carried:
    """`read_run` of a tier that has no faster way."""
    return carried(
        run, tier.read([(run.ref(i), run.places.place(i), run.views(i)) for i in range(len(run))])
    )


def carried(run: PieceRun, outcomes: Sequence[Record | KvstoredError]) -> Carried:
    records, units = np.zeros(len(run), dtype=RECORD), run.places.units.copy()
    faults: dict[int, KvstoredError] = {}
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, Record):
            records[i] = packed(outcome)
            units[i] = outcome.place[0].units
        else:
            faults[i] = outcome
    return Carried(records, units, faults)


def failed(run: PieceRun, error: KvstoredError) -> Carried:
    """Nothing of the run was carried."""
    nothing = np.zeros(len(run), dtype=RECORD)
    return Carried(nothing, run.places.units, dict.fromkeys(range(len(run)), error))


def ref_of(record: Record) -> PieceRef:
    return PieceRef(record.fingerprint, record.group, record.shard)


def batch_of(
    records: Records, places: Sequence[Place], *, cursor: int, done: bool, rejected: int
) -> ScanBatch:
    """Places of the records, in their order, as columns."""
    flat = [(e.segment, e.start, e.units) for place in places for e in place]
    return ScanBatch(
        records=records,
        extent_counts=np.fromiter(map(len, places), np.uint8, len(places)),
        extents=np.asarray(flat, dtype=np.uint32).reshape(-1, 3),
        cursor=cursor,
        done=done,
        rejected=rejected,
    )
