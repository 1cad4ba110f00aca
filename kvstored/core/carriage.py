"""Tasks that carry copies between tiers: begin, commit, abort.

A task reads its source like a lease does and reserves its target; nothing is readable before the commit. One task a target copy; those of
many plain blocks are one run until something happens to one of them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import CopyTask, PieceMove, Reason, StoredPiece
from kvstored.core.columnar import Places, no_places
from kvstored.core.columns import DOOMED, READY, TARGET
from kvstored.core.copying import Copying, CopyRun
from kvstored.core.devices import device_of
from kvstored.core.eviction import Evictor
from kvstored.core.lifting import find_liftable, packed_below
from kvstored.core.plain import PLAIN_MIN
from kvstored.core.plain_copies import are_untouched, begin_run, finish_run
from kvstored.core.plain_reads import READ_TIER, Found, can_load, copies_of_many
from kvstored.core.policies.base import budget_of
from kvstored.core.prefetched import Prefetched
from kvstored.core.referring import keep_references, not_written, note_lossy, referring
from kvstored.core.space import units_of
from kvstored.core.types import Budget, NamespaceId, Part, Place, Rows, TierId, as_rows
from kvstored.errors import InvalidArgument


class Carriage:
    def __init__(self, books: Books, evictor: Evictor) -> None:
        self._books = books
        self._evictor = evictor
        self.ahead = Prefetched(books)
        self.tasks: dict[int, CopyTask] = {}
        self.runs: dict[int, CopyRun] = {}
        """By the first of their ids."""
        self._next_id = 0

    def __len__(self) -> int:
        """Copies under way."""
        return len(self.tasks) + sum(map(len, self.runs.values()))

    def is_target(self, copy: int) -> bool:
        return copy >= 0 and bool(self._books.copies.flags[copy] & TARGET)

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
        near = self._near(block, rows) if target is TierId.HBM else ()
        places = self._evictor.room(target, budget_of(part), units, now_s, near)
        if places is None:
            copies.fills[copy] -= 1
            books.drop_copy(copy, Reason.NO_SPACE, now_s)
            books.unread(source)
            return None
        for row, place in zip(rows, places, strict=True):
            group, shard = int(books.pieces.group[row]), int(books.pieces.shard[row])
            piece = books.add_piece(copy, group, shard, int(books.pieces.length[row]), place)
            books.pieces.checksum[piece] = books.pieces.checksum[row]
        return self._register(source, copy, rows, places)

    def _near(self, block: int, rows: list[int]) -> list[int]:
        """The GPU of each piece: a rank's shards lie on its own, what all ranks share lies where the block above has it, so that a
        request's path is on one."""
        books = self._books
        devices = books.space.books[TierId.HBM].extents.segments()
        if len(devices) < 2:
            return []
        groups = books.layout_of(block).spec.groups
        is_shared = not all(groups[int(books.pieces.group[row])].sharded for row in rows)
        shared = self._home_of(block) if is_shared else -1
        return [
            devices[device_of(int(books.pieces.shard[row]), len(devices))]
            if groups[int(books.pieces.group[row])].sharded
            else shared
            for row in rows
        ]

    def _home_of(self, block: int) -> int:
        """The GPU for pieces that all ranks share: where the block above has such, else where there is most room."""
        books = self._books
        groups = books.layout_of(block).spec.groups
        above = int(books.tree.parent[block])
        for copy in books.copies_of(above) if above >= 0 else ():
            for row in books.pieces_of(copy) if int(books.copies.tier[copy]) == TierId.HBM else ():
                if not groups[int(books.pieces.group[row])].sharded:
                    return books.place(row)[0].segment
        return books.space.books[TierId.HBM].extents.emptiest(1)[0][0]

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
    ) -> tuple[list[Copying], list[int]]:
        """Copies that bring these readable blocks up to `target`, and the target copies to wait for (those under way included)."""
        books = self._books
        if target not in (TierId.HBM, READ_TIER) or target not in books.space.books:
            raise InvalidArgument(f"no such tier here: tier={target.name.lower()}")
        take_many = self._lift_many if target is TierId.HBM else self._prefetch_many
        many = take_many(as_rows(blocks), target, now_s)
        if many is not None:
            return many
        tasks: list[Copying] = []
        pending: dict[int, None] = {}
        for block in blocks:
            if books.blocks.ns[block] < 0:
                continue  # making room for the ones before evicted it
            for part in books.needed_parts(block):
                there = books.copy_in(block, target, part)
                source = self.source_for(block, target, part)
                if self.is_target(there):
                    pending[there] = None
                elif there < 0 and source >= 0:
                    task = self.begin(source, target, now_s)
                    if task is not None:
                        tasks.append(task)
                        pending[task.target_copy] = None
        return tasks, list(pending)

    def source_for(self, block: int, target: TierId, part: Part) -> int:
        """The ready copy that one in `target` is made from, or -1. HBM is filled from DRAM, where what lies on disk goes first, unless it lies there
        packed."""
        books = self._books
        if target is not TierId.HBM:
            return books.fastest_copy(block, part)
        copy = books.copy_in(block, READ_TIER, part)
        if copy < 0:
            return packed_below(books, block, part)
        return copy if books.copies.state[copy] == READY else -1

    def _prefetch_many(
        self, rows: Rows, target: TierId, now_s: float
    ) -> tuple[list[Copying], list[int]] | None:
        """None, with nothing changed but evictions, where the blocks have to go one by one."""
        books = self._books
        if len(rows) < PLAIN_MIN or target is not READ_TIER or books.recovering:
            return None
        ns = int(books.blocks.ns[rows[0]])
        found = copies_of_many(books, ns, rows) if books.layouts[ns].is_plain else None
        if found is None:
            return None
        cold, coming = found.cold, found.coming.tolist()
        if not len(cold):
            return [], coming
        if not can_load(books, ns, cold) or not self._evicts_none_of(rows, found):
            return None
        above = int(books.tree.parent[rows[0]])
        if above >= 0:  # the copies to come keep their parent's
            books.blocks.holds[above] += 1
        places = self.room_for(cold, target, now_s)
        loads = [] if places is None else self.load_run(cold, places, np.flatnonzero(found.is_cold))
        if above >= 0:
            books.release_hold(above)
        if places is None:
            return None
        return list(loads), [
            *coming,
            *(copy for run in loads for copy in run.target_copies.tolist()),
        ]

    def _lift_many(
        self, rows: Rows, target: TierId, now_s: float
    ) -> tuple[list[Copying], list[int]] | None:
        """The same up to the one GPU that there is: with several each block is placed for itself."""
        books = self._books
        extents = books.space.books[target].extents
        if len(rows) < PLAIN_MIN or books.recovering or len(extents.segments()) != 1:
            return None
        ns = int(books.blocks.ns[rows[0]])
        found = find_liftable(books, ns, rows) if books.layouts[ns].is_plain else None
        if found is None or target in books.lost:
            return None
        books.hold(rows)  # what of them is there already does not make room for the rest
        places = self.room_for(found.sources, target, now_s)
        books.release_holds(rows)
        if places is None:
            return None
        coming = found.coming.tolist()
        if not places.size:
            return [], coming
        count = places.size
        run = self.open_run(found.sources[:count], target, places, found.asked[:count])
        return [run], [*coming, *run.target_copies.tolist()]

    def _evicts_none_of(self, rows: Rows, found: Found) -> bool:
        """Whether making room for all of them at once evicts what it would for one after the other: nothing, or nothing of this path."""
        books, cold = self._books, found.cold
        book = books.space.books[READ_TIER]
        length = int(books.pieces.length[books.copies.first_piece[cold[0]]])
        need = units_of(length) * len(cold)
        over = books.space.over(READ_TIER, Budget.GLOBAL, need)
        if not over and book.extents.free_units >= need:
            return True
        is_path = bool((books.tree.parent[rows[1:]] == rows[:-1]).all())
        return is_path and bool((found.is_cold | found.is_coming).all())

    # ---- runs

    def room_for(self, sources: Rows, target: TierId, now_s: float) -> Places | None:
        """Room for these copies, which `can_load`, evicting as for one after the other; for the first ones (perhaps for none) where it does
        not suffice. None, with nothing changed but evictions, where their places are no single extents."""
        books = self._books
        units = units_of(int(books.pieces.length[books.copies.first_piece[sources[0]]]))
        count = self._evictor.plain_room(target, units, len(sources), now_s)
        if not count:
            return no_places()
        return books.space.take_equal(target, Budget.GLOBAL, units, count)

    def load_run(self, sources: Rows, places: Places, asked: NDArray[np.int64]) -> list[CopyRun]:
        """The first of these copies come up to memory, as many as there are places."""
        count = places.size
        return [self.open_run(sources[:count], READ_TIER, places, asked[:count])] if count else []

    def open_run(
        self, sources: Rows, target: TierId, places: Places, asked: NDArray[np.int64]
    ) -> CopyRun:
        """As `begin` for each of these, at places that were taken for them."""
        run = begin_run(self._books, sources, target, places, asked, self._next_id + 1)
        self._next_id += len(run)
        self.runs[run.first] = run
        return run

    def cut(self, run: CopyRun, ends: Sequence[int]) -> list[CopyRun]:
        """The run in parts that end before these, the last of which is its length. From now on each ends by itself."""
        del self.runs[run.first]
        begins = [0, *ends[:-1]]
        parts = [run.part_of(begin, end) for begin, end in zip(begins, ends, strict=True)]
        self.runs.update((part.first, part) for part in parts)
        return parts

    def take_apart(self, run: CopyRun) -> list[CopyTask]:
        """The run as tasks, each of which ends by itself."""
        del self.runs[run.first]
        tasks = list(run.each())
        self.tasks.update((task.id, task) for task in tasks)
        return tasks

    def commit_run(self, run: CopyRun, kept: Places, now_s: float) -> bool:
        """As `commit` for each, in order. False, with nothing done, where they have to go one by one."""
        if not are_untouched(self._books, run):
            return False
        del self.runs[run.first]
        finish_run(self._books, run, kept, now_s)
        return True

    # ---- single tasks

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
        task = referring(books, task)
        self.tasks[task.id] = task
        books.copies.flags[copy] |= TARGET
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
        keep_references(books, task, stored)
        note_lossy(books, task, stored)
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
        not_written(books, task)
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
        self._books.copies.flags[task.target_copy] &= ~TARGET & 0xFF
        return task
