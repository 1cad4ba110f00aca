"""Blocks read where they lie on NVMe, as the frames that they are stored as: for another host, which decodes them.

Only what was not asked for before: what is used again comes up to memory like any other. Nothing is loaded here, and no byte is looked at; whoever
reads a frame compares its checksum, and the decoded bytes with theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvstored.codec.frame import Codec
from kvstored.core.calls import Acquire, ReadBlock, ReadStatus, Reason
from kvstored.core.columnar import Grant
from kvstored.core.types import Place, TierId, chosen_keys
from kvstored.store.lane import Urgency
from kvstored.store.reads import Reads, missed
from kvstored.store.shell import Shell
from kvstored.tiers.base import PieceRef
from kvstored.tiers.record import Record

_Items = list[tuple[int, PieceRef, Place]]


@dataclass(frozen=True, slots=True)
class StoredGrant:
    """`numbers`: of the keys that `grant` is of; `records`: of its pieces, by place."""

    numbers: tuple[int, ...]
    grant: Grant
    call: Acquire
    records: Mapping[Place, Record]


class StoredReads:
    def __init__(self, shell: Shell, reads: Reads) -> None:
        self._shell = shell
        self._reads = reads

    async def acquire(self, call: Acquire) -> StoredGrant | None:
        """None where none of the keys is such a block."""
        items = self._items(call)
        if not items:
            return None
        wanted = [(ref, place) for _, ref, place in items]
        described = self._shell.tiers.described
        found = await self._shell.tiers.disk_lane.submit(lambda: described(wanted), Urgency.DEMAND)
        records: dict[Place, Record] = {}
        bad: set[int] = set()
        for (i, _, place), record in zip(items, found, strict=True):
            if record is None or not _stands_alone(record) or record.key != call.keys.key(i):
                bad.add(i)
            else:
                records[place] = record
        numbers = tuple(sorted({i for i, _, _ in items} - bad))
        return self._leased(call, numbers, records) if numbers else None

    def _leased(
        self, call: Acquire, numbers: tuple[int, ...], records: Mapping[Place, Record]
    ) -> StoredGrant | None:
        """What became another copy since it was described is a miss."""
        shell = self._shell
        keys = chosen_keys(call.keys, np.asarray(numbers))
        below = replace(call, keys=keys, tier=TierId.NVME, load=False)
        acquired = shell.catalog.acquire(below, shell.now_s())
        shell.apply()
        grant = shell.catalog.grant(acquired.lease, shell.now_s())
        shell.apply()
        blocks = [_known(block, records) for block in grant.blocks]
        if not any(block.status is ReadStatus.HIT for block in blocks):
            if grant.lease:
                self._reads.release(call.session, [grant.lease])
            return None
        return StoredGrant(numbers, Grant(grant.lease, blocks), below, records)

    def _items(self, call: Acquire) -> _Items:
        """Pieces of those keys that lie on NVMe alone and were not used yet, each with its key's number."""
        books = self._shell.catalog.books
        blocks, groups = books.blocks, books.layouts[call.ns].spec.groups
        rows = books.index.find(call.keys.fingerprints)
        wanted = (rows >= 0) & (blocks.ns[rows] == call.ns) & (blocks.hits[rows] == 0)
        wanted &= blocks.fast[rows] == int(TierId.NVME)
        items: _Items = []
        for i in np.flatnonzero(wanted).tolist():
            block = int(rows[i])
            name = call.keys.fingerprints[i].tobytes()
            copies = [books.copy_in(block, TierId.NVME, p) for p in books.needed_parts(block)]
            for piece in (row for copy in copies if copy >= 0 for row in books.pieces_of(copy)):
                group, shard = int(books.pieces.group[piece]), int(books.pieces.shard[piece])
                if call.groups_mask >> group & 1 and shard == (
                    call.shard if groups[group].sharded else 0
                ):
                    items.append((i, PieceRef(name, group, shard), books.place(piece)))
        return items


def _stands_alone(record: Record) -> bool:
    return record.codec == Codec.FRAME and record.base is None


def _known(block: ReadBlock, records: Mapping[Place, Record]) -> ReadBlock:
    pieces = [piece for piece in block.pieces if piece is not None]
    is_same = all(
        piece.place in records and records[piece.place].checksum == piece.checksum
        for piece in pieces
    )
    return block if is_same else missed(block, Reason.NEVER_STORED)
