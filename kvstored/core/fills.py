"""Fills: the right to write one shard of one block. Reserve, commit, abort, expire.

A fill's pieces lie in FILLING copies of the fastest host tier; they become readable with the last piece of their part, or with the last
shard of their window or state group. Required groups are granted together or not at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvstored.core.books import NOT_READABLE, Books
from kvstored.core.calls import (
    Committed,
    FillStatus,
    Granted,
    GrantedPiece,
    PieceRow,
    Reason,
    Reserve,
    Reserved,
)
from kvstored.core.columns import DOOMED, FILLING, READY
from kvstored.core.eviction import Evictor
from kvstored.core.policies.base import budget_of
from kvstored.core.quarantine import Quarantine
from kvstored.core.space import units_in, units_of
from kvstored.core.types import NamespaceId, Part, TierId
from kvstored.errors import Busy, InvalidArgument

WRITE_TIER = TierId.DRAM


@dataclass(slots=True)
class Fill:
    """An open fill. `pieces` are piece rows, in namespace order of their groups."""

    id: int
    session: int
    ns: int
    block: int
    fingerprint: tuple[int, int]
    pieces: list[int]
    begun_s: float
    expires_s: float
    request_id: bytes


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A piece that a reservation has to write."""

    part: Part
    group: int
    shard: int
    length: int


class Fills:
    def __init__(
        self, books: Books, evictor: Evictor, quarantine: Quarantine, first_id: int
    ) -> None:
        self._books = books
        self._evictor = evictor
        self._quarantine = quarantine
        self.open: dict[int, Fill] = {}
        self.by_session: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._incomplete: list[tuple[float, int, int]] = []
        self._next_id = first_id

    # ---- reserve

    def reserve(self, call: Reserve, now_s: float) -> Reserved:
        self.check(call)
        status: list[FillStatus] = []
        grants: list[Granted | None] = []
        is_full = False
        rows = self._books.index.find(call.keys.fingerprints)
        for i in range(len(call.keys)):
            outcome = self._reserve_one(call, i, int(rows[i]), is_full, now_s)
            if isinstance(outcome, Granted):
                status.append(FillStatus.GRANTED)
                grants.append(outcome)
                continue
            is_full = is_full or outcome is FillStatus.NO_SPACE
            status.append(outcome)
            grants.append(None)
        return Reserved(status, grants)

    def check(self, call: Reserve) -> None:
        """Raise for a call that can never be granted."""
        layout = self._books.layouts[call.ns]
        groups = layout.spec.groups
        required = sum(1 << i for i, group in enumerate(groups) if group.is_required)
        chosen = call.groups_mask & required
        if chosen and chosen != required:
            raise InvalidArgument(
                "required groups are put together or not at all: "
                f"groups={call.groups_mask:#x} required={required:#x}"
            )
        if call.groups_mask >> len(groups) or not call.groups_mask:
            raise InvalidArgument(
                f"no such groups: groups={call.groups_mask:#x} known={len(groups)}"
            )
        if not 0 <= call.shard < layout.spec.shards:
            raise InvalidArgument(f"no such shard: shard={call.shard} shards={layout.spec.shards}")
        opened = len(self.by_session.get(call.session, ()))
        if opened + len(call.keys) > self._books.limits.fills_per_session_max:
            raise Busy(f"too many open fills: open={opened}; commit or abort some first")

    def _reserve_one(
        self, call: Reserve, i: int, block: int, is_full: bool, now_s: float
    ) -> Granted | FillStatus:
        books = self._books
        low, high = call.keys.fingerprints[i]
        name = (int(low), int(high))
        if block < 0 or books.fingerprint(block) != name:
            # earlier keys of this call may have made it, or evicted it and taken its row
            block = books.index.find_one(name)
        wanted, is_underway = self._wanted(call, i, block)
        if not wanted:
            return FillStatus.IN_PROGRESS if is_underway else FillStatus.PRESENT
        if is_full:
            return FillStatus.NO_SPACE
        layout = books.layouts[call.ns]
        is_last = i == len(call.keys) - 1
        valid = (
            call.last_valid_tokens
            if is_last and call.last_valid_tokens
            else layout.spec.block_tokens
        )
        block = books.ensure_block(call.ns, name, valid)
        if books.blocks.valid[block] != valid and not self._resize(block, valid):
            return FillStatus.IN_PROGRESS
        self._link(call, i, block)
        if books.blocks.first_copy[block] < 0:
            books.blocks.generation[block] = books.next_generation()
        pieces = self._place(block, wanted, now_s)
        if pieces is None:
            books.drop_idle(block)
            return FillStatus.NO_SPACE
        return self._grant(call, i, block, pieces, now_s)

    def _wanted(self, call: Reserve, i: int, block: int) -> tuple[list[_Wanted], bool]:
        """Pieces that are neither there nor being written, and whether some are being written."""
        books = self._books
        groups = books.layouts[call.ns].spec.groups
        selected = [g for g in range(len(groups)) if call.groups_mask >> g & 1]
        wanted: list[_Wanted] = []
        is_underway = False
        for column, g in enumerate(selected):
            group = groups[g]
            length = int(call.sizes[i, column])
            if not length:
                continue
            shard = call.shard if group.sharded else 0
            state = self._piece_state(block, group.part, g, shard) if block >= 0 else 0
            if state == FILLING:
                is_underway = True
            elif state != READY:
                wanted.append(_Wanted(group.part, g, shard, length))
        return wanted, is_underway

    def _piece_state(self, block: int, part: Part, group: int, shard: int) -> int:
        books = self._books
        best = 0
        for copy in books.copies_of(block):
            if books.copies.part[copy] != part:
                continue
            piece = books.piece_in(copy, group, shard)
            if piece >= 0:
                best = max(best, int(books.pieces.state[piece]))
            elif part is not Part.CHECKPOINT and books.copies.state[copy] == READY:
                return READY  # a partial block may lack rows of a compressed group
        return best

    def _resize(self, block: int, valid: int) -> bool:
        """A block that is only known as a parent or by a hold takes the size of its first put; a stored one keeps its own."""
        books = self._books
        if books.blocks.first_copy[block] >= 0 or books.tree.children[block]:
            return False
        books.blocks.valid[block] = valid
        return True

    def _link(self, call: Reserve, i: int, block: int) -> None:
        if not call.parents.known[i] or self._books.tree.parent[block] >= 0:
            return
        low, high = call.parents.fingerprints[i]
        tokens = self._books.layouts[call.ns].spec.block_tokens
        parent = self._books.ensure_block(call.ns, (int(low), int(high)), tokens)
        self._books.link(block, parent)
        self._books.drop_idle(parent)

    def _place(self, block: int, wanted: list[_Wanted], now_s: float) -> list[int] | None:
        """Piece rows for all, or None with nothing changed but evictions."""
        books = self._books
        placed: list[int] = []
        for part in Part:
            mine = [piece for piece in wanted if piece.part is part]
            if not mine:
                continue
            copy = books.copy_in(block, WRITE_TIER, part)
            if copy < 0:
                copy = books.open_copy(block, WRITE_TIER, part)
            books.copies.fills[copy] += 1
            units = [units_of(piece.length) for piece in mine]
            places = self._evictor.room(WRITE_TIER, budget_of(part), units, now_s)
            if places is None:
                self._unplace(block, part, placed, now_s)
                return None
            placed.extend(
                books.add_piece(copy, piece.group, piece.shard, piece.length, place)
                for piece, place in zip(mine, places, strict=True)
            )
        return placed

    def _unplace(self, block: int, part: Part, placed: list[int], now_s: float) -> None:
        books = self._books
        copies = {int(books.pieces.copy[piece]) for piece in placed}
        copies.add(books.copy_in(block, WRITE_TIER, part))
        for piece in placed:
            place = books.remove_piece(piece)
            books.space.give(WRITE_TIER, (place,))
        for copy in copies:
            self._close(copy, Reason.NO_SPACE, now_s)

    def _grant(self, call: Reserve, i: int, block: int, rows: list[int], now_s: float) -> Granted:
        books = self._books
        self._next_id += 1
        ttl_s = min(call.ttl_s, books.limits.fill_ttl_max_s)
        fill = Fill(
            id=self._next_id,
            session=call.session,
            ns=call.ns,
            block=block,
            fingerprint=books.fingerprint(block),
            pieces=rows,
            begun_s=now_s,
            expires_s=now_s + ttl_s,
            request_id=call.request_id,
        )
        self.open[fill.id] = fill
        self.by_session.setdefault(fill.session, set()).add(fill.id)
        books.blocks.holds[block] += 1
        heappush(self._deadlines, (fill.expires_s, fill.id))
        return Granted(
            fill=fill.id,
            fingerprint=fill.fingerprint,
            parent=books.parent_fingerprint(block),
            depth=int(books.tree.depth[block]),
            valid_tokens=int(books.blocks.valid[block]),
            heat=books.heat(block),
            key_index=i,
            pieces=self._granted_pieces(fill),
        )

    def _granted_pieces(self, fill: Fill) -> tuple[GrantedPiece, ...]:
        pieces = self._books.pieces
        generation = int(self._books.blocks.generation[fill.block])
        return tuple(
            GrantedPiece(
                group=int(pieces.group[row]),
                shard=int(pieces.shard[row]),
                length=int(pieces.length[row]),
                place=self._books.place(row),
                generation=generation,
            )
            for row in fill.pieces
        )

    # ---- commit and abort

    def commit(
        self,
        session: int,
        fills: Sequence[int],
        checksums: Sequence[Mapping[int, int]],
        now_s: float,
    ) -> list[Committed | None]:
        """None for a fill that is lost: expired, aborted, of another session, or its block was removed meanwhile."""
        outcomes: list[Committed | None] = []
        for id_, sums in zip(fills, checksums, strict=True):
            fill = self.open.get(id_)
            if fill is None or fill.session != session:
                outcomes.append(None)
                continue
            outcomes.append(self._commit_one(fill, sums, now_s))
        return outcomes

    def _commit_one(
        self, fill: Fill, checksums: Mapping[int, int], now_s: float
    ) -> Committed | None:
        books = self._books
        copies = {int(books.pieces.copy[row]) for row in fill.pieces}
        if any(books.copies.state[copy] == DOOMED for copy in copies):
            self._end(fill, Reason.FILL_LOST, now_s, keep=False)
            return None
        granted = self._granted_pieces(fill)
        for row in fill.pieces:
            books.piece_ready(row, checksums.get(int(books.pieces.group[row]), 0), now_s)
        self._forget(fill)
        for copy in copies:
            books.copies.fills[copy] -= 1
            if books.copies.state[copy] == FILLING:
                due_s = now_s + books.limits.incomplete_ttl_s
                generation = int(books.blocks.generation[fill.block])
                heappush(self._incomplete, (due_s, copy, generation))
            books.consider(copy)
        return Committed(fill.id, granted, bool(books.blocks.fast[fill.block] != NOT_READABLE))

    def abort(self, session: int, fills: Sequence[int], now_s: float) -> None:
        """The caller promises not to write any more: the space is free at once."""
        for id_ in fills:
            fill = self.open.get(id_)
            if fill is not None and fill.session == session:
                self._end(fill, Reason.FILL_LOST, now_s, keep=False)

    def close_session(self, session: int, now_s: float) -> int:
        mine = [self.open[id_] for id_ in sorted(self.by_session.get(session, ()))]
        for fill in mine:
            self._end(fill, Reason.FILL_LOST, now_s, keep=True)
        return len(mine)

    def expire(self, now_s: float) -> tuple[int, int]:
        """Ended fills, and copies dropped since some of their shards never came."""
        fills = copies = 0
        while self._deadlines and self._deadlines[0][0] <= now_s:
            fill = self.open.get(heappop(self._deadlines)[1])
            if fill is not None:
                self._end(fill, Reason.FILL_LOST, now_s, keep=True)
                fills += 1
        while self._incomplete and self._incomplete[0][0] <= now_s:
            _, copy, generation = heappop(self._incomplete)
            copies += self._drop_incomplete(copy, generation, now_s)
        return fills, copies

    def _drop_incomplete(self, copy: int, generation: int, now_s: float) -> int:
        books = self._books
        block = int(books.copies.block[copy])
        if block < 0 or books.copies.state[copy] != FILLING or books.copies.fills[copy]:
            return 0
        if int(books.blocks.generation[block]) != generation:
            return 0
        books.drop_copy(copy, Reason.INCOMPLETE, now_s)
        return 1

    def next_s(self) -> float:
        first = [heap[0][0] for heap in (self._deadlines, self._incomplete) if heap]
        return min(first, default=float("inf"))

    def _end(self, fill: Fill, reason: Reason, now_s: float, *, keep: bool) -> None:
        """Undo a fill: its pieces leave their copies; `keep` puts their space into quarantine."""
        books = self._books
        copies = {int(books.pieces.copy[row]) for row in fill.pieces}
        rows: list[PieceRow] = []
        for row in fill.pieces:
            group, shard = int(books.pieces.group[row]), int(books.pieces.shard[row])
            rows.append(PieceRow(group, shard, books.remove_piece(row)))
        self._forget(fill)
        for copy in copies:
            self._close(copy, reason, now_s)
        ns = NamespaceId(fill.ns)
        if keep:
            self._quarantine.keep_space(
                fill.session, WRITE_TIER, ns, fill.fingerprint, tuple(rows), now_s
            )
        else:
            books.free_rows(WRITE_TIER, ns, fill.fingerprint, tuple(rows), reason)

    def _close(self, copy: int, reason: Reason, now_s: float) -> None:
        """One fill less on a copy; an empty one goes."""
        books = self._books
        books.copies.fills[copy] -= 1
        if books.copies.state[copy] == DOOMED:
            books.free_if_unused(copy)
        elif books.copies.first_piece[copy] < 0:
            books.drop_copy(copy, reason, now_s)
        else:
            books.consider(copy)

    def _forget(self, fill: Fill) -> None:
        del self.open[fill.id]
        mine = self.by_session[fill.session]
        mine.discard(fill.id)
        if not mine:
            del self.by_session[fill.session]
        self._books.release_holds(np.asarray([fill.block], dtype=np.int32))
        if len(self._deadlines) > 2 * len(self.open) + 1024:
            self._deadlines = sorted((f.expires_s, f.id) for f in self.open.values())


def held_units(books: Books, fill: Fill) -> int:
    return sum(units_in(books.place(row)) for row in fill.pieces)
