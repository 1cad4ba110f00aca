"""Pieces of blocks that are being filled: which are wanted, where they lie, and what becomes of copies that stay incomplete.

Whose right it is to write them is kept in fills.py.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Reason, Reserve
from kvstored.core.columns import DOOMED, FILLING, FREE, READY
from kvstored.core.eviction import Evictor
from kvstored.core.policies.base import budget_of
from kvstored.core.space import units_of
from kvstored.core.types import Budget, Part, Place, TierId

WRITE_TIER = TierId.DRAM


@dataclass(frozen=True, slots=True)
class Wanted:
    """A piece that a reservation has to write."""

    part: Part
    group: int
    shard: int
    length: int


class Placing:
    def __init__(self, books: Books, evictor: Evictor) -> None:
        self._books = books
        self._evictor = evictor
        self._incomplete: list[tuple[float, int]] = []
        self._due_s: dict[int, float] = {}

    # ---- what to write

    def wanted(self, call: Reserve, i: int, block: int) -> tuple[list[Wanted], bool]:
        """Pieces that are neither there nor being written, required ones first; and whether some are being written."""
        selected = self._selected(call, i)
        if block < 0:
            return selected, False
        states = [self._state(block, piece) for piece in selected]
        missing = [piece for piece, state in zip(selected, states, strict=True) if state == FREE]
        is_checkpoint = any(piece.part is Part.CHECKPOINT for piece in missing)
        if is_checkpoint and self._books.copy_in(block, WRITE_TIER, Part.CHECKPOINT) < 0:
            # the new copy will be read instead of the slower one: it must have all
            missing = [
                piece
                for piece, state in zip(selected, states, strict=True)
                if state == FREE or piece.part is Part.CHECKPOINT
            ]
        return missing, FILLING in states

    def _selected(self, call: Reserve, i: int) -> list[Wanted]:
        groups = self._books.layouts[call.ns].spec.groups
        selected = [g for g in range(len(groups)) if call.groups_mask >> g & 1]
        pieces = [
            Wanted(groups[g].part, g, call.shard if groups[g].sharded else 0, length)
            for g, length in zip(selected, call.sizes[i].tolist(), strict=True)
            if length
        ]
        return sorted(pieces, key=lambda piece: piece.part is Part.CHECKPOINT)

    def _state(self, block: int, wanted: Wanted) -> int:
        """The best state in any tier; of window and state groups in the fastest copy, since that one is read."""
        books = self._books
        is_required = wanted.part is not Part.CHECKPOINT
        copies = [copy for copy in books.copies_of(block) if books.copies.part[copy] == wanted.part]
        if not is_required:
            copies = sorted(copies, key=lambda copy: int(books.copies.tier[copy]))[:1]
        best = FREE
        for copy in copies:
            piece = books.piece_in(copy, wanted.group, wanted.shard)
            if piece >= 0:
                best = max(best, int(books.pieces.state[piece]))
            elif is_required and books.copies.state[copy] == READY:
                return READY  # a partial block may lack rows of a compressed group
        return best

    # ---- where

    def place(self, block: int, wanted: list[Wanted], now_s: float) -> list[int] | None:
        """Piece rows in namespace order, or None with nothing changed but evictions. The copies are opened first: they keep
        their parents' from being evicted for them."""
        books = self._books
        copies: dict[Part, int] = {}
        for part in sorted({piece.part for piece in wanted}):
            copy = books.copy_in(block, WRITE_TIER, part)
            copies[part] = copy if copy >= 0 else books.open_copy(block, WRITE_TIER, part)
            books.copies.fills[copies[part]] += 1
        places = self._places(wanted, now_s)
        if places is None:
            for copy in copies.values():
                self.close(copy, Reason.NO_SPACE, now_s)
            return None
        rows = [
            books.add_piece(copies[piece.part], piece.group, piece.shard, piece.length, place)
            for piece, place in zip(wanted, places, strict=False)
        ]
        if len(places) < len(wanted):
            self.close(copies[Part.CHECKPOINT], Reason.NO_SPACE, now_s)
        return sorted(rows, key=lambda row: int(books.pieces.group[row]))

    def has_room(self, block: int, wanted: list[Wanted], now_s: float) -> bool:
        """Makes room without using it; the block itself, if there is one, is held so that it does not leave for its successor."""
        books = self._books
        held = np.asarray([block] if block >= 0 else [], dtype=np.int32)
        books.blocks.holds[held] += 1
        places = self._places(wanted, now_s)
        for place in places or ():
            books.space.books[WRITE_TIER].extents.give(place)
        books.release_holds(held)
        return places is not None

    def _places(self, wanted: list[Wanted], now_s: float) -> list[Place] | None:
        """A place for each required piece, or None; window and state pieces come after them, and only if there is room."""
        places: list[Place] = []
        for budget in Budget:
            units = [units_of(piece.length) for piece in wanted if budget_of(piece.part) is budget]
            if not units:
                continue
            more = self._evictor.room(WRITE_TIER, budget, units, now_s)
            if more is None:
                return places or None
            places.extend(more)
        return places

    # ---- copies that nobody fills any more

    def close(self, copy: int, reason: Reason, now_s: float) -> None:
        """One fill less on a copy; an empty one goes."""
        books = self._books
        books.copies.fills[copy] -= 1
        if books.copies.state[copy] == DOOMED:
            books.free_if_unused(copy)
        elif books.copies.first_piece[copy] < 0:
            books.drop_copy(copy, reason, now_s)
        elif books.copies.state[copy] == READY:
            books.consider(copy)
        elif not books.copies.fills[copy]:  # it lacks shards: those must come soon
            self._due_s[copy] = now_s + books.limits.incomplete_ttl_s
            heappush(self._incomplete, (self._due_s[copy], copy))

    def expire(self, now_s: float) -> int:
        """Drops copies some of whose shards never came; answers how many."""
        dropped = 0
        while self._incomplete and self._incomplete[0][0] <= now_s:
            due_s, copy = heappop(self._incomplete)
            if self._due_s.get(copy) != due_s:
                continue  # closed again since; the row may have another copy by now
            del self._due_s[copy]
            if self._books.copies.state[copy] == FILLING and not self._books.copies.fills[copy]:
                self._books.drop_copy(copy, Reason.INCOMPLETE, now_s)
                dropped += 1
        return dropped

    def next_s(self) -> float:
        return self._incomplete[0][0] if self._incomplete else float("inf")
