"""Recovery after a restart: records that a tier kept become copies again, in slices, while the store serves.

What is not yet scanned is a miss with reason `recovering`. A record that the books cannot use (unknown namespace, space claimed twice)
is discarded. Space that a client was still writing when the daemon died is kept aside like that of an expired fill.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstored.core.bulk import RecoveredColumns
from kvstored.core.calls import Base, PieceRow, Recovered
from kvstored.core.types import Extent, Heat, Layout, Place, TierId
from kvstored.errors import KvstoredError, StateMismatch
from kvstored.machine import give_back_free_memory
from kvstored.store.lane import Lane, Urgency
from kvstored.store.shell import Shell
from kvstored.tiers.base import PieceRef, ScanBatch
from kvstored.tiers.record import Base as StoredBase
from kvstored.tiers.record import Records, State
from kvstored.tiers.values import LOSSY

SLICE_RECORDS, SLICE_RECORDS_MIN = 512, 16
"""Records that the loop takes up in one turn: 3 ms of 512, but 40 ms where they join long chains."""
SLICE_S_MAX = 0.006
SCAN_RECORDS = 2048
"""Records of one call of the tier: reading them holds the interpreter lock, also while a page of the index comes from the disk."""
RETRY_S = 2.0
DIGEST_BYTES = 32
T = TypeVar("T")


@dataclass(slots=True)
class Found:
    """What recovery of one tier came to: pieces kept, dropped, unusable in the tier, and being written or read at the crash.

    `writers`: processes that were writing; 0 stands for one that cannot be seen.
    """

    kept: int = 0
    dropped: int = 0
    unusable: int = 0
    writing: int = 0
    leased: int = 0
    writers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Slice:
    """Records of a scan and where the extents of each begin in `extents`; `number`: which of the scan's each is, by which `bases` has what it
    refers to."""

    records: Records
    first: NDArray[np.int64]
    counts: NDArray[np.uint8]
    extents: NDArray[np.uint32]
    number: NDArray[np.int64]
    bases: Mapping[int, StoredBase]

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, chosen: NDArray[np.bool_] | slice) -> "Slice":
        return Slice(
            self.records[chosen],
            self.first[chosen],
            self.counts[chosen],
            self.extents,
            self.number[chosen],
            self.bases,
        )

    def base(self, i: int) -> Base | None:
        found = self.bases.get(int(self.number[i]))
        if found is None:
            return None
        low, high = np.frombuffer(found.fingerprint, dtype="<u8").tolist()
        return Base((low, high), found.place)

    def place(self, i: int) -> Place:
        begin = int(self.first[i])
        rows = self.extents[begin : begin + int(self.counts[i])].tolist()
        return tuple(Extent(segment, start, units) for segment, start, units in rows)

    def ref(self, i: int) -> PieceRef:
        record = self.records[i]
        return PieceRef(record["fingerprint"].tobytes(), int(record["group"]), int(record["shard"]))


class Recovery:
    """`layout_of`: whose records a digest names; None for none that is open."""

    def __init__(self, shell: Shell, layout_of: Callable[[bytes], Layout | None]) -> None:
        self._shell = shell
        self._layout_of = layout_of
        self.found: dict[TierId, Found] = {}

    async def run(self, tier: TierId) -> Found:
        """Scan one tier. The caller told the catalog `recovery_begin` before anything could be granted."""
        shell = self._shell
        found = self.found.setdefault(tier, Found())
        lane = shell.tiers.arena_lane if tier is TierId.DRAM else shell.tiers.disk_lane
        source = shell.tiers.tier(tier)
        cursor, is_done, is_first, size = 0, False, True, SLICE_RECORDS
        while not is_done:
            batch = await self._insisted(
                lane,
                lambda at=cursor: source.scan(at, SCAN_RECORDS),  # type: ignore[misc]  # default binds
            )
            found.unusable += batch.rejected
            if is_first:
                is_first = False
                for _ in shell.catalog.recovery.expect(max(0, batch.left)):
                    await asyncio.sleep(0)
            whole, begin = whole_of(batch), 0
            while begin < len(whole):
                begun_s = shell.elapsed_s()
                part = whole.rows(slice(begin, begin + size))
                unwanted = self._take_up(tier, part, found)
                begin += size
                size = paced(size, shell.elapsed_s() - begun_s)
                await self._forget(tier, unwanted)
                await asyncio.sleep(0)
            cursor, is_done = batch.cursor, batch.done
        for dropped in shell.catalog.recovery.finish(tier, shell.now_s()):
            found.dropped += dropped
            shell.apply()
            await asyncio.sleep(0)
            shell.settle()  # of puts that came in between
        give_back_free_memory()
        shell.counts["recovered_copies", tier.name.lower()] += found.kept
        return found

    def _take_up(self, tier: TierId, part: Slice, found: Found) -> list[tuple[PieceRef, Place]]:
        """Give the records to the catalog; those that it does not want."""
        state = part.records["state"]
        is_ready = state == State.READY
        self._set_aside(tier, part.rows(state == State.FILLING), found)
        ready = part if is_ready.all() else part.rows(is_ready)
        dropped: list[tuple[PieceRef, Place]] = []
        for digest, mine in _by_namespace(ready):
            kept = self._recovered(tier, self._layout_of(digest), mine)
            found.kept += int(np.count_nonzero(kept))
            found.leased += int(np.count_nonzero(mine.records["leased"]))
            dropped.extend((mine.ref(i), mine.place(i)) for i in np.flatnonzero(~kept).tolist())
        found.dropped += len(dropped)
        return dropped

    def _recovered(self, tier: TierId, layout: Layout | None, mine: Slice) -> NDArray[np.bool_]:
        """Which of the records of one namespace the catalog took."""
        kept = np.zeros(len(mine), dtype=np.bool_)
        if layout is None:
            return kept
        catalog, now_s = self._shell.catalog, self._shell.now_s()
        is_plain = (mine.counts == 1) & ~np.isin(mine.number, list(mine.bases))
        is_plain &= mine.records["flags"] & LOSSY == 0
        if is_plain.any():
            columns = columns_of(mine if is_plain.all() else mine.rows(is_plain))
            kept[is_plain] = catalog.recovery.recover_many(tier, layout.id, columns, now_s)
        if not is_plain.all():
            pieces = pieces_of(mine.rows(~is_plain))
            kept[~is_plain] = catalog.recovery.recover(tier, layout.id, pieces, now_s)
        self._shell.apply()
        return kept

    def _set_aside(self, tier: TierId, writing: Slice, found: Found) -> None:
        """Keep away from everyone what was being written at the crash."""
        if not len(writing):
            return
        found.writing += len(writing)
        found.writers.update(writing.records["owner_pid"].tolist())
        rows = tuple(
            PieceRow(int(record["group"]), int(record["shard"]), writing.place(i))
            for i, record in enumerate(writing.records)
        )
        self._shell.catalog.recovery.keep_aside(tier, rows, self._shell.now_s())
        self._shell.apply()

    async def _forget(self, tier: TierId, items: list[tuple[PieceRef, Place]]) -> None:
        if not items:
            return
        shell = self._shell
        if tier is TierId.DRAM:
            shell.tiers.arena.mark_free([place for _, place in items])
            return
        disk = shell.tiers.tier(tier)
        await self._insisted(shell.tiers.disk_lane, lambda: disk.discard(items))

    async def _insisted(self, lane: Lane, work: Callable[[], T]) -> T:
        """Again and again while the tier fails: until its records are known nothing may be granted in it, and reads of others go on.
        A damaged index stays so: StateMismatch.
        """
        is_told = False
        while True:
            try:
                return await lane.submit(work, Urgency.BACKGROUND)
            except StateMismatch:
                raise
            except KvstoredError as error:
                if not is_told:
                    self._shell.report("recovery has to wait for its tier", error)
                is_told = True
                await asyncio.sleep(RETRY_S)


def whole_of(batch: ScanBatch) -> Slice:
    counts = batch.extent_counts
    first = np.cumsum(counts, dtype=np.int64) - counts
    return Slice(batch.records, first, counts, batch.extents, np.arange(len(counts)), batch.bases)


def paced(size: int, taken_s: float) -> int:
    """Records of the next slice, after one of so many that took so long."""
    if taken_s > SLICE_S_MAX:
        return max(SLICE_RECORDS_MIN, size // 2)
    if taken_s < SLICE_S_MAX / 3:
        return min(SLICE_RECORDS, size * 2)
    return size


def columns_of(part: Slice) -> RecoveredColumns:
    """Of records with one extent each."""
    records = part.records
    return RecoveredColumns(
        fingerprints=np.ascontiguousarray(records["fingerprint"]),
        parents=np.ascontiguousarray(records["parent"]),
        group=records["group"],
        shard=records["shard"],
        length=records["length"],
        checksum=records["checksum"],
        extents=part.extents[part.first],
        generation=records["generation"],
        depth=records["depth"],
        valid=records["valid_tokens"],
        hits=records["hits"],
        last_s=records["last_s"],
        leased=records["leased"] != 0,
        content=records["content"],
    )


def pieces_of(part: Slice) -> list[Recovered]:
    return [
        Recovered(
            fingerprint=(int(record["fingerprint"][0]), int(record["fingerprint"][1])),
            parent=(int(record["parent"][0]), int(record["parent"][1])),
            group=int(record["group"]),
            shard=int(record["shard"]),
            length=int(record["length"]),
            checksum=int(record["checksum"]),
            place=part.place(i),
            generation=int(record["generation"]),
            depth=int(record["depth"]),
            valid_tokens=int(record["valid_tokens"]),
            hits=int(record["hits"]),
            heat=Heat(min(int(record["heat"]), Heat.COLD)),
            last_s=float(record["last_s"]),
            leased=bool(record["leased"]),
            content=int(record["content"]),
            base=part.base(i),
            lossy=bool(record["flags"] & LOSSY),
        )
        for i, record in enumerate(part.records)
    ]


def _by_namespace(part: Slice) -> Iterator[tuple[bytes, Slice]]:
    """Runs of the records by their digest, each digest once."""
    packed = np.ascontiguousarray(part.records["digest"]).view(np.uint8).reshape(-1, DIGEST_BYTES)
    if len(packed) and (packed == packed[0]).all():
        yield packed[0].tobytes(), part
        return
    digests, which = np.unique(packed, axis=0, return_inverse=True)
    for i, digest in enumerate(digests):
        yield digest.tobytes(), part.rows(which.reshape(-1) == i)
