"""Copies found by a tier's scan at start come back into the books.

Each found piece claims its space; two that claim the same space are both dropped. Parents that were not found yet stand in as rows without
copies. What a scan leaves incomplete is dropped at its end, and ranks follow the recorded times.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.bulk import RecoveredColumns, is_plain, recover_plain
from kvstored.core.calls import (
    NO_FINGERPRINT,
    Base,
    Freed,
    PieceRow,
    Reason,
    Recovered,
    TouchEvent,
)
from kvstored.core.columns import FILLING, READY, UNVERIFIED
from kvstored.core.frames import NOBODY
from kvstored.core.quarantine import Quarantine
from kvstored.core.referring import found_again
from kvstored.core.sorting import in_order
from kvstored.core.types import Extent, NamespaceId, Part, Place, Rows, TierId, as_rows

SLICE_COPIES = 1024
"""Copies that are ranked at once."""
SLICE_DROPS = 128
EXPECTED_SHARE = 32
SLICE_ROWS = 131_072
"""Rows of the table of copies that are looked through at once."""
NO_SESSION = 0
"""Of rights from before a restart."""


class Recovery:
    def __init__(self, books: Books, quarantine: Quarantine) -> None:
        self._books = books
        self._quarantine = quarantine
        self._contested: dict[TierId, list[Extent]] = {}

    def begin(self, tier: TierId) -> None:
        """Until `done` nothing is granted in this tier, and misses say that it is recovering."""
        self._books.recovering.add(tier)
        self._books.space.books[tier].extents.begin_claims()

    def expect(self, records: int) -> Iterator[None]:
        """Make room for so many records more, a table a step: growing by an eighth each time took 20 ms and more of a million.

        A part is added for blocks that are put meanwhile, and rows that are never used cost little.
        """
        books = self._books
        for table in (books.blocks, books.copies, books.pieces):
            table.reserve(records + records // EXPECTED_SHARE)
            yield
        books.tree.ensure(books.blocks.capacity)
        yield
        books.index.reserve(books.blocks.capacity)

    def recover(
        self, tier: TierId, ns: NamespaceId, pieces: Sequence[Recovered], now_s: float
    ) -> list[bool]:
        """Which pieces were taken; the others are the shell's to discard. They announce no events: they were there before."""
        before = len(self._books.effects)
        kept = [self._recover_one(tier, ns, piece, now_s) for piece in pieces]
        fresh = self._books.effects[before:]
        self._books.effects[before:] = [effect for effect in fresh if isinstance(effect, Freed)]
        return kept

    def recover_many(
        self, tier: TierId, ns: NamespaceId, columns: RecoveredColumns, now_s: float
    ) -> NDArray[np.bool_]:
        """The same for many pieces of one extent each."""
        books = self._books
        kept = np.zeros(len(columns), dtype=np.bool_)
        plain = is_plain(books, books.layouts[ns], columns)
        if tier is TierId.NVME and len(books.space.frames):
            plain &= ~self._are_orphans(columns)
        rows = np.flatnonzero(plain)
        kept[rows] = self._take_many(tier, columns.extents[rows].astype(np.int64), now_s)
        taken = np.flatnonzero(kept)
        for group in np.unique(columns.group[taken]):
            recover_plain(books, tier, ns, columns, taken[columns.group[taken] == group])
        others = np.flatnonzero(~plain).tolist()
        kept[others] = self.recover(tier, ns, [columns.piece(i) for i in others], now_s)
        return kept

    def keep_aside(self, tier: TierId, rows: tuple[PieceRow, ...], now_s: float) -> bool:
        """Space that was being filled at the crash: its writer may live. False where something else claims it."""
        claimed = tuple(row for row in rows if self._claim(tier, row.place))
        if claimed:
            self._quarantine.keep_space(
                NO_SESSION, tier, NamespaceId(-1), NO_FINGERPRINT, claimed, now_s
            )
        return len(claimed) == len(rows)

    def done(self, tier: TierId, now_s: float) -> int:
        """All of `finish` at once; how many copies were dropped as incomplete."""
        return sum(self.finish(tier, now_s))

    def finish(self, tier: TierId, now_s: float) -> Iterator[int]:
        """The scan is over: drops incomplete copies and ranks the rest by recorded time, in slices of a few milliseconds, after each
        of which it yields how many it dropped. Other calls may come in between; the tier is open when it ends."""
        books = self._books
        while not books.space.books[tier].extents.settle():
            yield 0
        parts: list[tuple[Rows, NDArray[np.float64], Rows]] = []
        for begin in range(0, books.copies.top, SLICE_ROWS):
            yield from self._drop_incomplete(self._rows_of(tier, FILLING, begin), tier, now_s)
            rows = self._rows_of(tier, READY, begin)
            at = books.copies.block[rows]
            parts.append((rows, books.blocks.last_s[at], -books.tree.depth[at]))
            yield 0
        if not parts:
            parts.append((as_rows([]), np.zeros(0), as_rows([])))
        rows, last_s, minus_depth = (np.concatenate(column) for column in zip(*parts, strict=True))
        for chosen in in_order(last_s, minus_depth):
            for begin in range(0, len(chosen), SLICE_COPIES):
                self._rank(tier, rows[chosen[begin : begin + SLICE_COPIES]], now_s)
                yield 0
            if not len(chosen):
                yield 0
        books.recovering.discard(tier)
        books.history.began_late()
        self._contested.pop(tier, None)

    def _drop_incomplete(self, rows: Rows, tier: TierId, now_s: float) -> Iterator[int]:
        books, copies = self._books, self._books.copies
        for begin in range(0, len(rows), SLICE_DROPS):
            dropped = 0
            for copy in rows[begin : begin + SLICE_DROPS].tolist():
                is_mine = copies.block[copy] >= 0 and int(copies.tier[copy]) == tier
                if is_mine and copies.state[copy] == FILLING and not copies.fills[copy]:
                    books.drop_copy(copy, Reason.INCOMPLETE, now_s)
                    dropped += 1
            yield dropped

    def _rows_of(self, tier: TierId, state: int, begin: int) -> Rows:
        copies = self._books.copies
        here = slice(begin, min(begin + SLICE_ROWS, copies.top))
        mine = (copies.tier[here] == int(tier)) & (copies.block[here] >= 0)
        return (begin + np.flatnonzero(mine & (copies.state[here] == state))).astype(np.int32)

    def _rank(self, tier: TierId, rows: Rows, now_s: float) -> None:
        """Those that are still here of some copies, in the order of their times."""
        books, copies = self._books, self._books.copies
        is_here = (copies.block[rows] >= 0) & (copies.tier[rows] == int(tier))
        rows = rows[is_here & (copies.state[rows] == READY)]
        if not len(rows):
            return
        at = copies.block[rows]
        books.policy.touch(rows, TouchEvent.FOUND, now_s)
        if books.retired:
            books.policy.first(rows[np.isin(books.blocks.ns[at], list(books.retired))])
        books.consider_blocks(np.unique(at))

    def _recover_one(self, tier: TierId, ns: NamespaceId, piece: Recovered, now_s: float) -> bool:
        books = self._books
        spec = books.layouts[ns].spec
        if piece.group >= len(spec.groups) or piece.shard >= spec.shards:
            return False
        is_orphan = tier is TierId.NVME and books.space.frames.is_orphan(piece.place)
        if not is_orphan and not self._take(tier, piece.place, now_s):
            return False
        if piece.base is not None and not self._refer(
            tier, piece, spec.groups[piece.group].part, now_s
        ):
            books.space.books[tier].extents.give(piece.place)
            return False
        part = spec.groups[piece.group].part
        block = books.ensure_block(ns, piece.fingerprint, piece.valid_tokens)
        if spec.mutable and books.blocks.first_copy[block] >= 0:
            block = self._newest(ns, block, piece, now_s)
        copy = books.copy_in(block, tier, part)
        if not books.resize(block, piece.valid_tokens) or self._is_stale(block, piece):
            return self._refuse(tier, piece.place, block)
        if copy >= 0 and books.piece_in(copy, piece.group, piece.shard) >= 0:
            return self._refuse(tier, piece.place, block)
        books.blocks.content[block] = books.blocks.content[block] or piece.content
        self._link(ns, block, piece)
        self._date(tier, block, piece)
        if copy < 0:
            copy = books.open_copy(block, tier, part)
            if tier <= TierId.DRAM:
                books.copies.flags[copy] |= UNVERIFIED
        row = books.add_piece(copy, piece.group, piece.shard, piece.length, piece.place)
        if is_orphan:
            books.space.frames.adopt(piece.place, copy)
        books.piece_ready(row, piece.checksum, piece.last_s)
        if piece.lossy:
            books.space.frames.lossy.add(copy)
        if tier is TierId.NVME:
            found_again(books, copy)
        if piece.leased and not books.copies.readers[copy]:
            books.read(copy)
            self._quarantine.keep_copies(NO_SESSION, (copy,), now_s)
        return True

    def _take(self, tier: TierId, place: Place, now_s: float) -> bool:
        """Claims space for a record. Where another one claims it nobody can tell which is right: both go, and any later one."""
        contested = self._contested.setdefault(tier, [])
        if not any(_meets(contested, extent) for extent in place):
            if self._claim(tier, place):
                return True
            if not all(self._books.space.books[tier].extents.has(extent) for extent in place):
                return False  # from before the tier was made smaller
            contested.extend(place)
            self._drop_claimants(tier, place, now_s)
        return False

    def _take_many(
        self, tier: TierId, extents: NDArray[np.int64], now_s: float
    ) -> NDArray[np.bool_]:
        """The same for many records, of which those that meet each other go."""
        book = self._books.space.books[tier].extents
        contested = self._contested.setdefault(tier, [])
        is_fit = np.ones(len(extents), dtype=np.bool_)
        for segment, start, units in contested:
            met = (extents[:, 0] == segment) & (extents[:, 1] < start + units)
            is_fit &= ~(met & (extents[:, 1] + extents[:, 2] > start))
        taken = np.zeros(len(extents), dtype=np.bool_)
        taken[is_fit] = book.claim_many(extents[is_fit])
        for row in extents[is_fit & ~taken].tolist():
            extent = Extent(*row)
            if book.has(extent):  # else it is from before the tier was made smaller
                contested.append(extent)
                self._drop_claimants(tier, (extent,), now_s)
        return taken

    def _claim(self, tier: TierId, place: Place) -> bool:
        extents = self._books.space.books[tier].extents
        claimed: list[Extent] = []
        for extent in place:
            if not extents.claim(extent):
                if claimed:
                    extents.give(tuple(claimed))
                return False
            claimed.append(extent)
        return True

    def _refer(self, tier: TierId, piece: Recovered, part: Part, now_s: float) -> bool:
        """Keep the extent that a piece refers to, whose own record may have been found before, may come later, or be gone."""
        frames, base = self._books.space.frames, piece.base
        assert base is not None
        owner = NOBODY
        if not frames.has_base(base.place):
            owner = self._owner(base, piece, part)
            if owner == NOBODY:
                if not self._take(tier, base.place, now_s):
                    return False
                frames.keep(base.place)
        frames.refer(piece.place, base.place, owner)
        return True

    def _owner(self, base: Base, piece: Recovered, part: Part) -> int:
        """The copy on NVMe of which this base is the same piece."""
        books = self._books
        block = books.index.find_one(base.fingerprint)
        copy = books.copy_in(block, TierId.NVME, part) if block >= 0 else -1
        row = books.piece_in(copy, piece.group, piece.shard) if copy >= 0 else -1
        return copy if row >= 0 and books.place(row) == base.place else NOBODY

    def _refuse(self, tier: TierId, place: Place, block: int) -> bool:
        """The space is free, but for what others need of it."""
        space = self._books.space
        if tier is not TierId.NVME:
            space.books[tier].extents.give(place)
        elif not space.frames.is_orphan(place):
            for needless in space.frames.leaving((place,)):
                space.books[tier].extents.give(needless)
        self._books.drop_idle(block)
        return False

    def _are_orphans(self, columns: RecoveredColumns) -> NDArray[np.bool_]:
        is_orphan = self._books.space.frames.is_orphan
        return np.array([is_orphan((Extent(*row),)) for row in columns.extents.tolist()])

    def _newest(self, ns: NamespaceId, block: int, piece: Recovered, now_s: float) -> int:
        """In a mutable namespace other generations are other bytes: older ones that were found before leave."""
        books = self._books
        if books.blocks.generation[block] >= piece.generation:
            return block
        for copy in list(books.copies_of(block)):
            books.drop_copy(copy, Reason.REPLACED, now_s)
        return books.ensure_block(ns, piece.fingerprint, piece.valid_tokens)

    def _is_stale(self, block: int, piece: Recovered) -> bool:
        books = self._books
        is_stored = books.layout_of(block).spec.mutable and books.blocks.first_copy[block] >= 0
        return bool(is_stored and books.blocks.generation[block] != piece.generation)

    def _link(self, ns: NamespaceId, block: int, piece: Recovered) -> None:
        books = self._books
        is_root = piece.parent in (NO_FINGERPRINT, piece.fingerprint)
        if is_root or books.tree.parent[block] >= 0:
            return
        parent = books.ensure_block(ns, piece.parent, books.layouts[ns].spec.block_tokens)
        books.link(block, parent)
        books.drop_idle(parent)

    def _date(self, tier: TierId, block: int, piece: Recovered) -> None:
        blocks = self._books.blocks
        blocks.hits[block] = max(int(blocks.hits[block]), piece.hits)
        blocks.last_s[block] = max(float(blocks.last_s[block]), piece.last_s)
        if piece.generation and (blocks.first_copy[block] < 0 or tier <= TierId.DRAM):
            blocks.generation[block] = piece.generation
            self._books.saw_generation(piece.generation)

    def _drop_claimants(self, tier: TierId, place: Place, now_s: float) -> None:
        books, pieces = self._books, self._books.pieces
        live = pieces.copy[: pieces.top] >= 0
        for extent in place:
            end = extent.start + extent.units
            start = pieces.start[: pieces.top].astype(np.int64)
            overlap = live & (pieces.segment[: pieces.top] == extent.segment)
            overlap &= (start < end) & (start + pieces.units[: pieces.top] > extent.start)
            rows = {int(row) for row in np.flatnonzero(overlap)}
            rows.update(row for row, long in books.long_places.items() if _meets(long, extent))
            rows.update(self._referring_to(extent))
            for copy in {int(pieces.copy[row]) for row in rows}:
                if int(books.copies.tier[copy]) == tier and books.copies.block[copy] >= 0:
                    books.drop_copy(copy, Reason.CORRUPT, now_s)

    def _referring_to(self, extent: Extent) -> set[int]:
        """Pieces that refer to an extent which this one meets."""
        books, frames = self._books, self._books.space.frames
        heads = set(frames.referring_to([base for base in frames.bases if _meets(base, extent)]))
        if not heads:
            return set()
        live = np.flatnonzero(books.pieces.copy[: books.pieces.top] >= 0).tolist()
        return {row for row in live if books.place(row)[0][:2] in heads}


def _meets(place: Sequence[Extent], extent: Extent) -> bool:
    return any(
        other.segment == extent.segment
        and other.start < extent.start + extent.units
        and extent.start < other.start + other.units
        for other in place
    )
