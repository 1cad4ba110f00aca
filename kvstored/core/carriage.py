"""Tasks that carry copies between tiers: begin, commit, abort; and which copies are written back.

A task reads its source like a lease does and reserves its target; nothing is readable before the commit. One task a target copy.
"""

from collections.abc import Sequence

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import CopyTask, PieceMove, Reason, StoredPiece
from kvstored.core.columns import CLEAN, DOOMED, READY, WAITING
from kvstored.core.eviction import Evictor
from kvstored.core.policies.base import budget_of
from kvstored.core.space import units_of
from kvstored.core.types import NamespaceId, Part, Place, TierId
from kvstored.errors import InvalidArgument

REFUSALS_MAX = 16
"""Copies without room that one write-back call passes over: others may be smaller, or of the other budget."""
WAITING_LOOKS_MAX = 4096
"""Copies that one write-back call looks at."""


class Carriage:
    def __init__(self, books: Books, evictor: Evictor) -> None:
        self._books = books
        self._evictor = evictor
        self.tasks: dict[int, CopyTask] = {}
        self._targets: dict[int, int] = {}
        self._next_id = 0

    def is_target(self, copy: int) -> bool:
        return copy in self._targets

    def begin(self, source: int, target: TierId, now_s: float) -> CopyTask | None:
        """None when the target tier has the copy already, or has no room now."""
        books = self._books
        copies = books.copies
        block, part = int(copies.block[source]), Part(int(copies.part[source]))
        if copies.state[source] != READY or not self._is_vacant(source, target, now_s):
            return None
        rows = [row for row in books.pieces_of(source) if books.pieces.state[row] == READY]
        rows.sort(key=lambda row: (int(books.pieces.group[row]), int(books.pieces.shard[row])))
        books.read(source)
        copy = books.open_copy(block, target, part)
        copies.fills[copy] += 1
        units = [units_of(int(books.pieces.length[row])) for row in rows]
        places = self._evictor.room(target, budget_of(part), units, now_s)
        if places is None:
            copies.fills[copy] -= 1
            books.drop_copy(copy, Reason.NO_SPACE, now_s)
            books.unread(source)
            return None
        for row, place in zip(rows, places, strict=True):
            group, shard = int(books.pieces.group[row]), int(books.pieces.shard[row])
            books.add_piece(copy, group, shard, int(books.pieces.length[row]), place)
        return self._register(source, copy, rows, places)

    def _is_vacant(self, source: int, target: TierId, now_s: float) -> bool:
        """Whether the target lacks the copy. An idle window/state copy there that has only some of the source's groups makes way."""
        copies = self._books.copies
        there = self._books.copy_in(int(copies.block[source]), target, int(copies.part[source]))
        if there < 0:
            return True
        is_idle = copies.state[there] == READY and not copies.readers[there] + copies.fills[there]
        have, more = int(copies.have[there]), int(copies.have[source])
        if not is_idle or have == more or have & ~more:
            return False
        self._books.drop_copy(there, Reason.SUPERSEDED, now_s)
        return True

    def prefetch(
        self, blocks: Sequence[int], target: TierId, now_s: float
    ) -> tuple[list[CopyTask], list[int]]:
        """Tasks that bring these readable blocks up to `target`, and the target copies to wait for (those under way included)."""
        books = self._books
        if target not in books.space.books:
            raise InvalidArgument(f"no such tier here: tier={target.name.lower()}")
        tasks: list[CopyTask] = []
        pending: dict[int, None] = {}
        for block in blocks:
            if books.blocks.ns[block] < 0:
                continue  # making room for the ones before evicted it
            for part in books.needed_parts(block):
                there = books.copy_in(block, target, part)
                source = books.fastest_copy(block, part)
                if self.is_target(there):
                    pending[there] = None
                elif there < 0 and source >= 0 and int(books.copies.tier[source]) > target:
                    task = self.begin(source, target, now_s)
                    if task is not None:
                        tasks.append(task)
                        pending[task.target_copy] = None
        return tasks, list(pending)

    def _register(self, source: int, copy: int, rows: list[int], places: list[Place]) -> CopyTask:
        books = self._books
        block = int(books.copies.block[copy])
        self._next_id += 1
        task = CopyTask(
            id=self._next_id,
            ns=NamespaceId(int(books.blocks.ns[block])),
            fingerprint=books.fingerprint(block),
            parent=books.parent_fingerprint(block),
            part=Part(int(books.copies.part[copy])),
            source=TierId(int(books.copies.tier[source])),
            target=TierId(int(books.copies.tier[copy])),
            source_copy=source,
            target_copy=copy,
            moves=tuple(
                PieceMove(
                    group=int(books.pieces.group[row]),
                    shard=int(books.pieces.shard[row]),
                    length=int(books.pieces.length[row]),
                    checksum=int(books.pieces.checksum[row]),
                    source=books.place(row),
                    target=place,
                )
                for row, place in zip(rows, places, strict=True)
            ),
            depth=int(books.tree.depth[block]),
            valid_tokens=int(books.blocks.valid[block]),
            hits=int(books.blocks.hits[block]),
            heat=books.heat(block),
            generation=int(books.blocks.generation[block]),
        )
        self.tasks[task.id] = task
        self._targets[copy] = task.id
        return task

    def commit(self, id_: int, stored: Sequence[StoredPiece], now_s: float) -> None:
        """The bytes are in the target. If the block was removed meanwhile, the target is given back instead."""
        books = self._books
        task = self._finish(id_)
        copy = task.target_copy
        books.copies.fills[copy] -= 1
        rows = [books.piece_in(copy, move.group, move.shard) for move in task.moves]
        for row, kept in zip(rows, stored, strict=True):
            # also of one that is given back: its record names this place
            books.trim_piece(row, kept.place)
        if books.copies.state[copy] == DOOMED:
            books.free_if_unused(copy)
        else:
            for row, kept in zip(rows, stored, strict=True):
                books.piece_ready(row, kept.checksum, now_s)
            books.consider(copy)
        books.unread(task.source_copy)

    def abort(self, id_: int, reason: Reason, now_s: float) -> None:
        """Nothing readable came of it. CORRUPT says that the source's bytes are bad: it is dropped too."""
        books = self._books
        task = self._finish(id_)
        copy = task.target_copy
        books.copies.fills[copy] -= 1
        if books.copies.state[copy] == DOOMED:
            books.free_if_unused(copy)
        else:
            books.drop_copy(copy, reason, now_s)
        if reason is Reason.CORRUPT and books.copies.state[task.source_copy] == READY:
            books.drop_copy(task.source_copy, reason, now_s)
        elif task.target is TierId.NVME and books.copies.state[task.source_copy] == READY:
            books.wait(task.source_copy)  # still dirty: write-back tries again
        books.unread(task.source_copy)

    def _finish(self, id_: int) -> CopyTask:
        task = self.tasks.pop(id_)
        del self._targets[task.target_copy]
        return task

    # ---- write-back

    def flush(self, bytes_max: int, now_s: float) -> list[CopyTask]:
        """Like write_back, admitting everything dirty: for the drain. Empty when nothing is left to begin."""
        copies = self._books.copies
        state, flags = copies.state[: copies.top], copies.flags[: copies.top]
        dirty = (
            (state == READY)
            & (flags & CLEAN == 0)
            & (copies.tier[: copies.top] == int(TierId.DRAM))
        )
        for copy in np.flatnonzero(dirty).tolist():
            self._books.wait(copy)
        return self.write_back(bytes_max, now_s, everything=True)

    def write_back(
        self, bytes_max: int, now_s: float, *, everything: bool = False
    ) -> list[CopyTask]:
        """Tasks that copy dirty blocks to NVMe, oldest first. While the disk has room every block is admitted, later only
        those that were hit; `everything` admits all."""
        books = self._books
        if TierId.NVME not in books.space.books or TierId.NVME in books.recovering:
            return []
        tasks: list[CopyTask] = []
        looked = begun = 0
        again: list[int] = []
        refusals_max = len(books.waiting) if everything else REFUSALS_MAX
        while books.waiting and begun < bytes_max and looked < WAITING_LOOKS_MAX:
            copy = books.waiting.popleft()
            looked += 1
            if not books.copies.flags[copy] & WAITING:
                continue
            books.copies.flags[copy] &= ~WAITING & 0xFF
            if books.copies.state[copy] != READY or books.copies.flags[copy] & CLEAN:
                continue
            if not (everything or self._is_admitted(copy)):
                continue
            task = self.begin(copy, TierId.NVME, now_s)
            if task is None:
                block, part = int(books.copies.block[copy]), int(books.copies.part[copy])
                if books.copy_in(block, TierId.NVME, part) < 0:
                    again.append(copy)
                    if len(again) >= refusals_max:
                        break
                continue
            tasks.append(task)
            begun += sum(move.length for move in task.moves)
        for copy in again:
            books.wait(copy)
        return tasks

    def _is_admitted(self, copy: int) -> bool:
        """One-hit wonders do not push others from a disk that is near its high watermark."""
        books = self._books
        book = books.space.books[TierId.NVME]
        budget = budget_of(int(books.copies.part[copy]))
        room = int(books.space.limit(TierId.NVME, budget) * book.limits.high)
        if book.used[budget] + int(books.copies.units[copy]) <= room:
            return True
        block = int(books.copies.block[copy])
        return int(books.blocks.hits[block]) >= book.limits.admit_hits
