"""Which copies in memory are written to NVMe, in the order in which they became dirty: plain ones as runs, others as tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstored.core.admission import Admission
from kvstored.core.books import Books
from kvstored.core.carriage import Carriage
from kvstored.core.columnar import Places
from kvstored.core.columns import CLEAN, READY, WAITING
from kvstored.core.copying import Copying, CopyRun
from kvstored.core.plain_reads import are_movable
from kvstored.core.plan import OBJECTIVES, Objective
from kvstored.core.policies.base import budget_of
from kvstored.core.referring import is_behind
from kvstored.core.space import units_of
from kvstored.core.ties import admitted_in_order
from kvstored.core.travel import parts_in_order
from kvstored.core.types import UNIT_BYTES, Budget, Rows, TierId, as_rows

REFUSALS_MAX = 16
"""Copies without room that one call passes over: others may be smaller, or of the other budget."""
LOOKS_MAX = 2048
"""Copies that one call looks at: a few milliseconds."""
RUN_MIN = 4
"""Fewer are begun faster one by one."""


@dataclass(slots=True)
class _Round:
    """One call. `bytes_left` to begin; `again`: copies without room that go to the end of the queue; `behind`: those of the same content as one
    that is being written; `singles`: so many in front are known to be no run."""

    bytes_left: int
    everything: bool
    refusals_max: int
    now_s: float
    begun: list[Copying]
    again: list[int]
    behind: list[int] = field(default_factory=list)
    looks_left: int = LOOKS_MAX
    singles: int = 0

    def is_over(self) -> bool:
        return self.bytes_left <= 0 or not self.looks_left or len(self.again) >= self.refusals_max


class WriteBack:
    def __init__(self, books: Books, carriage: Carriage, admission: Admission) -> None:
        self._books = books
        self._carriage = carriage
        self._admission = admission
        self.objectives: Sequence[Objective] = OBJECTIVES

    def flush(self, bytes_max: int, now_s: float) -> list[Copying]:
        """Like `begin`, admitting everything dirty: for the drain. Empty when nothing is left to begin."""
        copies = self._books.copies
        state, flags = copies.state[: copies.top], copies.flags[: copies.top]
        dirty = (
            (state == READY)
            & (flags & CLEAN == 0)
            & (copies.tier[: copies.top] == int(TierId.DRAM))
        )
        for copy in np.flatnonzero(dirty).tolist():
            self._books.wait(copy)
        return self.begin(bytes_max, now_s, everything=True)

    def begin(self, bytes_max: int, now_s: float, *, everything: bool = False) -> list[Copying]:
        """Copies to carry to NVMe, oldest first. While the disk has room every block is admitted that is worth it, later only
        those that were hit; `everything` admits all. Where the day's budget is used up they wait."""
        books = self._books
        has_disk = TierId.NVME in books.space.books and TierId.NVME not in books.recovering
        if not has_disk or not books.limits.writes_back:
            return []
        if not books.space.books[TierId.NVME].granted:
            return []  # its first slab is being made: what was refused now would wait for a hit
        if not everything:
            bytes_max = min(bytes_max, self._admission.budget.left(now_s))
        self._arrange(now_s)
        refusals_max = len(books.waiting) + 1 if everything else REFUSALS_MAX
        round_ = _Round(bytes_max, everything, refusals_max, now_s, [], [])
        while books.waiting and not round_.is_over():
            if round_.singles or not self._begin_run(round_):
                round_.singles = max(round_.singles - 1, 0)
                self._begin_one(round_)
        for copy in (*round_.behind, *round_.again):
            books.wait(copy)
        return round_.begun

    def look(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Copies in the order in which `begin` looks at them, and why each is not written, empty where it is. Changes nothing."""
        books, copies = self._books, self._books.copies
        if TierId.NVME not in books.space.books or TierId.NVME in books.recovering:
            return
        left, units = self._admission.budget.left(now_s), 0
        for copy in dict.fromkeys(self._front(now_s)[1].tolist()):
            is_waiting = copies.flags[copy] & WAITING and copies.state[copy] == READY
            if not is_waiting or copies.flags[copy] & CLEAN:
                continue
            refusal = self._admission.refusal(int(copies.block[copy]), now_s)
            own = int(copies.units[copy])
            if own * UNIT_BYTES > left:
                yield copy, "budget"
            elif refusal is not None:
                yield copy, refusal.value
            elif not self._is_hot_enough(copy, units):
                yield copy, "not hit"
            else:
                left, units = left - own * UNIT_BYTES, units + own
                yield copy, ""

    def _front(self, now_s: float) -> tuple[Rows, Rows]:
        """What one call looks at, and in which order it goes down: as it came, dense parts first; where not all of it can be written, before that what
        the objectives want most."""
        books = self._books
        front = as_rows(list(islice(books.waiting, LOOKS_MAX)))
        if not len(front):
            return front, front
        units = int(books.copies.units[front].sum())
        is_short = units > max(self._room(Budget.GLOBAL), 0)
        is_short |= units * UNIT_BYTES > self._admission.budget.left(now_s)
        ordered = admitted_in_order(books, front, self.objectives) if is_short else front
        return front, parts_in_order(books, ordered)

    def _arrange(self, now_s: float) -> None:
        front, ordered = self._front(now_s)
        if ordered is not front:
            for _ in range(len(front)):
                self._books.waiting.popleft()
            self._books.waiting.extendleft(ordered[::-1].tolist())

    # ---- one by one

    def _begin_one(self, round_: _Round) -> None:
        books, copies = self._books, self._books.copies
        copy = books.waiting.popleft()
        round_.looks_left -= 1
        if not copies.flags[copy] & WAITING:
            return
        copies.flags[copy] &= ~WAITING & 0xFF
        if copies.state[copy] != READY or copies.flags[copy] & CLEAN:
            return
        if not round_.everything and self._is_beyond_budget(copy, round_):
            copies.flags[copy] |= WAITING
            books.waiting.appendleft(copy)
            return
        if not (round_.everything or self._is_admitted(copy, round_)):
            return
        if is_behind(books, copy):
            round_.behind.append(copy)
            return
        task = self._carriage.begin(copy, TierId.NVME, round_.now_s)
        if task is not None:
            round_.begun.append(task)
            self._spend(round_, sum(move.length for move in task.moves))
        elif books.copy_in(int(copies.block[copy]), TierId.NVME, int(copies.part[copy])) < 0:
            round_.again.append(copy)

    def _spend(self, round_: _Round, size_bytes: int) -> None:
        round_.bytes_left -= size_bytes
        self._admission.budget.spend(size_bytes, round_.now_s)

    def _is_beyond_budget(self, copy: int, round_: _Round) -> bool:
        """Whether a copy is more than the day has left: nothing else is begun then, until some of it is free again."""
        budget = self._admission.budget
        if int(self._books.copies.units[copy]) * UNIT_BYTES <= budget.left(round_.now_s):
            return False
        budget.refuse()
        round_.bytes_left = 0
        return True

    def _is_admitted(self, copy: int, round_: _Round) -> bool:
        """One-hit wonders do not push others from a disk that is near its high watermark."""
        books = self._books
        block = int(books.copies.block[copy])
        if self._admission.refusal(block, round_.now_s) is not None:
            self._admission.count(as_rows([block]), round_.now_s)
            return False
        return self._is_hot_enough(copy)

    def _is_hot_enough(self, copy: int, units_before: int = 0) -> bool:
        """`units_before`: that others take first."""
        books, block = self._books, int(self._books.copies.block[copy])
        budget = budget_of(int(books.copies.part[copy]))
        if self._room(budget) - units_before >= int(books.copies.units[copy]):
            return True
        return int(books.blocks.hits[block]) >= books.space.books[TierId.NVME].limits.admit_hits

    def _room(self, budget: Budget) -> int:
        """Units below the high watermark."""
        book, space = self._books.space.books[TierId.NVME], self._books.space
        return int(space.limit(TierId.NVME, budget) * book.limits.high) - book.used[budget]

    # ---- as runs

    def _begin_run(self, round_: _Round) -> bool:
        """Take what waits in front as far as it is alike and there is room below the high watermark, so that nothing has to be
        admitted or evicted. False, with nothing done, where that is not worth it."""
        books, copies = self._books, self._books.copies
        first = books.waiting[0]
        if copies.state[first] != READY or not books.layout_of(int(copies.block[first])).is_plain:
            return False
        if books.blocks.content[copies.block[first]]:
            return False
        length = int(books.pieces.length[copies.first_piece[first]])
        count = min(self._room_for(length), round_.looks_left, -(-round_.bytes_left // length))
        if not round_.everything:
            count = min(count, self._admission.budget.left(round_.now_s) // length)
        row = as_rows(list(islice(books.waiting, max(count, 0))))
        count, run = self._alike(row, int(books.blocks.ns[copies.block[first]]), length)
        run, refused = self._worth(run, round_)
        places = self._places(length, len(run)) if len(run) >= RUN_MIN else None
        if places is None:
            round_.singles = count
            return False
        for _ in range(count):
            books.waiting.popleft()
        copies.flags[row[:count]] &= ~WAITING & 0xFF
        self._admission.count(refused, round_.now_s)
        begun = self._carriage.open_run(run, TierId.NVME, places, np.arange(len(run)))
        self._note(round_, begun, count)
        return True

    def _worth(self, run: Rows, round_: _Round) -> tuple[Rows, Rows]:
        """Those of the copies that are to be written, and the blocks of the others."""
        blocks = self._books.copies.block[run]
        refused = None if round_.everything else self._admission.refuses(blocks, round_.now_s)
        return (run, blocks[:0]) if refused is None else (run[~refused], blocks[refused])

    def _note(self, round_: _Round, run: CopyRun, looked: int) -> None:
        round_.begun.append(run)
        self._spend(round_, run.size_bytes)
        round_.looks_left -= looked

    def _room_for(self, length: int) -> int:
        free = self._books.space.books[TierId.NVME].extents.free_units
        return min(self._room(Budget.GLOBAL), free) // units_of(length)

    def _places(self, length: int, count: int) -> Places | None:
        units = units_of(length)
        return self._books.space.take_equal(TierId.NVME, Budget.GLOBAL, units, count)

    def _alike(self, row: Rows, ns: int, length: int) -> tuple[int, Rows]:
        """How many in front are passed over or plain, of this namespace and length, and the latter."""
        books, copies = self._books, self._books.copies
        if not len(row):
            return 0, row
        flags = copies.flags[row]
        is_passed = (flags & WAITING == 0) | (copies.state[row] != READY) | (flags & CLEAN != 0)
        is_passed |= self._are_on_disk(row) | _are_repeated(row)
        fine = ~is_passed & (copies.tier[row] == int(TierId.DRAM)) & are_movable(books, row, ns)
        fine &= books.pieces.length[copies.first_piece[row]] == length
        fine &= books.blocks.content[copies.block[row]] == 0
        good = is_passed | fine
        count = len(row) if good.all() else int(np.argmin(good))
        return count, row[:count][fine[:count]]

    def _are_on_disk(self, row: Rows) -> NDArray[np.bool_]:
        """Of plain blocks: whose other copy is on NVMe or on its way there."""
        copies = self._books.copies
        first = self._books.blocks.first_copy[copies.block[row]]
        other = np.where(first == row, copies.next[row], first)
        on_disk: NDArray[np.bool_] = (other >= 0) & (copies.tier[other] == int(TierId.NVME))
        return on_disk


def _are_repeated(row: Rows) -> NDArray[np.bool_]:
    """A row that was given back and taken again may wait twice: the first time counts."""
    _, first = np.unique(row, return_index=True)
    repeated = np.ones(len(row), dtype=np.bool_)
    repeated[first] = False
    return repeated
