"""Recovery after a restart: records that a tier kept become copies again, in slices, while the store serves.

What is not yet scanned is a miss with reason `recovering`. A record that the books cannot use (unknown namespace, space claimed twice)
is discarded. Space that a client was still writing when the daemon died is kept aside like that of an expired fill.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstored.core.calls import PieceRow, Recovered
from kvstored.core.types import Heat, Layout, Place, TierId
from kvstored.store.lane import Urgency
from kvstored.store.shell import Shell, fingerprint_bytes
from kvstored.store.survey import places_of
from kvstored.tiers.base import PieceRef, ScanBatch
from kvstored.tiers.record import Records, State

SLICE_RECORDS = 512
"""Records that the loop takes up in one turn: a few milliseconds."""
SCAN_RECORDS = 8192


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
        cursor, is_done = 0, False
        while not is_done:
            batch = await lane.submit(
                lambda at=cursor: source.scan(at, SCAN_RECORDS),  # type: ignore[misc]  # default binds
                Urgency.BACKGROUND,
            )
            found.unusable += batch.rejected
            await self._take_up(tier, batch, found)
            cursor, is_done = batch.cursor, batch.done
        shell.catalog.recovery_done(tier, shell.now_s())
        shell.apply()
        return found

    async def _take_up(self, tier: TierId, batch: ScanBatch, found: Found) -> None:
        places = places_of(batch)
        for begin in range(0, len(batch.records), SLICE_RECORDS):
            end = begin + SLICE_RECORDS
            dropped = self._slice(tier, batch.records[begin:end], places[begin:end], found)
            await self._forget(tier, dropped)
            await asyncio.sleep(0)

    def _slice(
        self, tier: TierId, records: Records, places: list[Place], found: Found
    ) -> list[tuple[PieceRef, Place]]:
        """Give the records to the catalog; those that it does not want."""
        shell = self._shell
        by_digest: dict[bytes, list[int]] = defaultdict(list)
        for i, digest in enumerate(_digests(records)):
            by_digest[digest].append(i)
        dropped: list[tuple[PieceRef, Place]] = []
        for digest, rows in by_digest.items():
            layout = self._layout_of(digest)
            chosen = records[rows]
            pieces = recovered_of(chosen, [places[i] for i in rows])
            pieces = self._set_aside(tier, chosen, pieces, found)
            kept = [False] * len(pieces)
            if layout is not None:
                kept = shell.catalog.recover(tier, layout.id, pieces, shell.now_s())
                shell.apply()
            found.kept += sum(kept)
            found.leased += sum(piece.leased for piece in pieces)
            dropped.extend(
                (_ref(piece), piece.place)
                for piece, is_kept in zip(pieces, kept, strict=True)
                if not is_kept
            )
        found.dropped += len(dropped)
        return dropped

    def _set_aside(
        self, tier: TierId, records: Records, pieces: list[Recovered], found: Found
    ) -> list[Recovered]:
        """Keep away from everyone what was being written at the crash; the pieces that are whole."""
        writing = np.flatnonzero(records["state"] == State.FILLING).tolist()
        if not writing:
            return pieces
        found.writers.update(records["owner_pid"][writing].tolist())
        found.writing += len(writing)
        rows = tuple(
            PieceRow(piece.group, piece.shard, piece.place)
            for piece in map(pieces.__getitem__, writing)
        )
        self._shell.catalog.keep_aside(tier, rows, self._shell.now_s())
        self._shell.apply()
        busy = set(writing)
        return [piece for i, piece in enumerate(pieces) if i not in busy]

    async def _forget(self, tier: TierId, items: list[tuple[PieceRef, Place]]) -> None:
        if not items:
            return
        shell = self._shell
        if tier is TierId.DRAM:
            shell.tiers.arena.mark_free([place for _, place in items])
            return
        disk = shell.tiers.tier(tier)
        await shell.tiers.disk_lane.submit(lambda: disk.discard(items), Urgency.BACKGROUND)


def recovered_of(records: Records, places: list[Place]) -> list[Recovered]:
    """Columns to values, without touching numpy once a field."""
    columns = zip(
        records["fingerprint"].tolist(),
        records["parent"].tolist(),
        records["group"].tolist(),
        records["shard"].tolist(),
        records["length"].tolist(),
        records["checksum"].tolist(),
        places,
        records["generation"].tolist(),
        records["depth"].tolist(),
        records["valid_tokens"].tolist(),
        records["hits"].tolist(),
        records["heat"].tolist(),
        records["last_s"].tolist(),
        records["leased"].tolist(),
        strict=True,
    )
    heats = [*Heat] + [Heat.COLD] * (256 - len(Heat))
    return [
        Recovered(
            fingerprint=(name[0], name[1]),
            parent=(parent[0], parent[1]),
            group=group,
            shard=shard,
            length=length,
            checksum=checksum,
            place=place,
            generation=generation,
            depth=depth,
            valid_tokens=valid,
            hits=hits,
            heat=heats[heat],
            last_s=last_s,
            leased=bool(leased),
        )
        for (
            name,
            parent,
            group,
            shard,
            length,
            checksum,
            place,
            generation,
            depth,
            valid,
            hits,
            heat,
            last_s,
            leased,
        ) in columns
    ]


def _digests(records: Records) -> list[bytes]:
    packed = np.ascontiguousarray(records["digest"]).tobytes()
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


def _ref(piece: Recovered) -> PieceRef:
    return PieceRef(fingerprint_bytes(piece.fingerprint), piece.group, piece.shard)
