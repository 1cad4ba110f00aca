"""Looking inside without changing anything: what is held, why a key is where it is, and whether stored bytes are what they should be.

`verify` reads through the tiers' own scans, beside the running store: a piece that vanished or was replaced while it was looked at is
skipped, one that is there and wrong is dropped from the books.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstored.core.calls import Fingerprint, Reason
from kvstored.core.keys import fingerprint
from kvstored.core.namespace import alias
from kvstored.core.types import Extent, Layout, Place, TierId
from kvstored.core.usage import copy_at
from kvstored.core.views import Verdict
from kvstored.errors import Corrupt
from kvstored.store.lane import Urgency
from kvstored.store.shell import Shell
from kvstored.tiers.base import PieceRef, ScanBatch, ref_of
from kvstored.tiers.record import State

CURSORS_MAX = 256
"""Verifications that may be under way; a tier's own cursor does not fit the wire, and a forgotten one begins anew."""
_BYTES_A_CALL = 256 << 20
"""Of work in a lane: a fraction of a second."""
_BYTES_A_READ = 16 << 20
"""Of memory that a verification of the disk takes."""


@dataclass(frozen=True, slots=True)
class Verified:
    """`cursor` continues where this ended; 0 begins. `pieces` were looked at, `corrupt` of them dropped."""

    cursor: int
    is_done: bool
    pieces: int
    size_bytes: int
    corrupt: int


@dataclass(frozen=True, slots=True)
class _Piece:
    ref: PieceRef
    digest: bytes
    place: Place
    length: int
    checksum: int
    generation: int


class Survey:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._cursors: OrderedDict[int, tuple[TierId, int]] = OrderedDict()
        self._last_cursor = 0

    def explain(self, layout: Layout, key: bytes) -> Verdict:
        shell = self._shell
        return shell.catalog.looking.explain(
            layout.id, fingerprint(key, layout.seed), shell.now_s()
        )

    def elsewhere(self, others: Iterable[tuple[Layout, bytes]]) -> Verdict | None:
        """The first of these namespaces in which its key is stored: who asks meant another one."""
        for layout, key in others:
            verdict = self.explain(layout, key)
            if verdict.reason is None:
                name = f"{alias(layout.spec)} (digest {layout.digest.hex()[:12]})"
                text = f"stored in another namespace: {name}"
                return Verdict(Reason.WRONG_NAMESPACE, (), verdict.at_s, text)
        return None

    async def verify(self, digest: bytes, cursor: int, pieces_max: int) -> Verified:
        """Read and check up to `pieces_max` stored pieces of a namespace (empty digest: of all), DRAM first, then NVMe."""
        tier, at = self._cursors.pop(cursor, (TierId.DRAM, 0))
        tiers = self._shell.tiers
        lane = tiers.arena_lane if tier is TierId.DRAM else tiers.disk_lane
        source = tiers.tier(tier)
        batch = await lane.submit(lambda: source.scan(at, pieces_max), Urgency.BACKGROUND)
        pieces = [piece for piece in pieces_of(batch) if digest in (b"", piece.digest)]
        bad: list[_Piece] = []
        for group in _cut(pieces, _BYTES_A_CALL):
            check = self._bad_in_arena if tier is TierId.DRAM else self._bad_on_disk
            bad.extend(await lane.submit(lambda: check(group), Urgency.BACKGROUND))  # noqa: B023 - awaited in the same turn
        dropped = [self._drop(piece, tier) for piece in bad]
        following = self._following(tier, batch)
        return Verified(
            following,
            is_done=following == 0,
            pieces=len(pieces),
            size_bytes=sum(piece.length for piece in pieces),
            corrupt=sum(dropped),
        )

    def _following(self, tier: TierId, batch: ScanBatch) -> int:
        if batch.done and (tier is TierId.NVME or self._shell.tiers.disk is None):
            return 0
        self._last_cursor += 1
        self._cursors[self._last_cursor] = (TierId.NVME, 0) if batch.done else (tier, batch.cursor)
        if len(self._cursors) > CURSORS_MAX:
            self._cursors.popitem(last=False)
        return self._last_cursor

    def _bad_in_arena(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """In the lane."""
        arena = self._shell.tiers.arena
        good = arena.verify([(piece.place, piece.length, piece.checksum) for piece in pieces])
        return [
            piece
            for piece, is_good in zip(pieces, good, strict=True)
            if not is_good and self._is_same(piece)
        ]

    def _is_same(self, piece: _Piece) -> bool:
        """Whether the arena still holds this very piece: else it was replaced under our eyes."""
        try:
            record = self._shell.tiers.arena.record_at(piece.place)
        except Corrupt:
            return False
        return (
            record.state is State.READY
            and ref_of(record) == piece.ref
            and record.generation == piece.generation
            and record.checksum == piece.checksum
        )

    def _bad_on_disk(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """In the lane. What fails twice is bad; between the two reads a piece that moved is not found any more."""
        return self._corrupt_among(self._corrupt_among(pieces))

    def _corrupt_among(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """Many in one read of the tier: piece by piece, those of 16 KiB came at less than half the speed."""
        disk = self._shell.tiers.tier(TierId.NVME)
        bad: list[_Piece] = []
        for part in _cut(pieces, _BYTES_A_READ):
            items = [(each.ref, each.place, [np.empty(each.length, np.uint8)]) for each in part]
            results = zip(part, disk.read(items), strict=True)
            bad += [each for each, result in results if isinstance(result, Corrupt)]
        return bad

    def _drop(self, piece: _Piece, tier: TierId) -> bool:
        """Whether the books had it there and now have not: the disk's record of a dropped copy goes a little later, and is scanned until then."""
        shell = self._shell
        layout = next(
            (each for each in shell.layouts.values() if each.digest == piece.digest), None
        )
        if layout is None:
            return False
        name = fingerprint_of(piece.ref)
        copy = copy_at(shell.catalog.books, layout.id, name, tier, piece.place)
        if copy is None:
            return False
        shell.catalog.drop_copy(copy, Reason.CORRUPT, shell.now_s())
        shell.counts["corrupt_copies", tier.name.lower()] += 1
        shell.apply()
        return True


def fingerprint_of(ref: PieceRef) -> Fingerprint:
    raw = ref.fingerprint
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


def pieces_of(batch: ScanBatch) -> list[_Piece]:
    """The readable pieces of a scan."""
    places = places_of(batch)
    records = batch.records
    return [
        _Piece(
            PieceRef(row["fingerprint"].tobytes(), int(row["group"]), int(row["shard"])),
            row["digest"].tobytes(),
            places[i],
            int(row["length"]),
            int(row["checksum"]),
            int(row["generation"]),
        )
        for i, row in enumerate(records)
        if row["state"] == State.READY
    ]


def places_of(batch: ScanBatch) -> list[Place]:
    """The place of each record of a scan."""
    extents = [Extent(*row) for row in batch.extents.tolist()]
    places: list[Place] = []
    begin = 0
    for count in batch.extent_counts.tolist():
        places.append(tuple(extents[begin : begin + count]))
        begin += count
    return places


def _cut(pieces: Sequence[_Piece], bytes_max: int) -> list[list[_Piece]]:
    """Groups of about so many bytes, none of them empty."""
    groups: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        if room < piece.length or not groups:
            groups.append([])
            room = bytes_max
        groups[-1].append(piece)
        room -= piece.length
    return groups
