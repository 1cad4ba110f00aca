"""Coarse nodes on NVMe: stretches of a shared run whose blocks lie apart there are written again, together, while memory has them.

A path that grows block by block, beside others that do, is strewn over the disk: each of its tiny blocks takes a call when it is read. A *grain* is 512 to
1,024 tokens of one run of the prefix tree, cut at multiples of 1,024 from the root, all of whose blocks were hit (class P2). Tails that nobody came back to
stay as they were written, block by block. Split and merge are bookkeeping: a grain is what its run and depths say, never a format. Rewriting forgets
the copy below and makes it anew from the one in memory, in one call of the core: a crash in between finds the old record, the new one or none.
"""

from collections.abc import Iterator

import numpy as np

from kvstored.core.admission import Admission
from kvstored.core.books import Books
from kvstored.core.calls import Reason
from kvstored.core.carriage import Carriage
from kvstored.core.columns import READY
from kvstored.core.copying import CopyRun
from kvstored.core.space import units_of
from kvstored.core.types import UNIT_BYTES, Budget, Rows, TierId
from kvstored.core.write_budget import WriteState

COARSE_TOKENS = 1024
CALL_BYTES = 256 << 10
"""A call that brings less is worth saving: it takes as long for itself as for so many bytes."""
NEAR_BYTES = 64 << 10
"""What is nearer than that is read with one call anyway."""
NODES_MAX = 64
ROWS_MAX = 4096
"""Nodes of the tree, and blocks in them, that one call looks at: a millisecond."""
BLOCKS_MAX = 64
"""That one call writes again, and of one grain: three milliseconds."""


class Grains:
    """A cursor goes round the nodes of the tree."""

    def __init__(self, books: Books, carriage: Carriage, admission: Admission) -> None:
        self._books = books
        self._carriage = carriage
        self._admission = admission
        self._cursor = 0

    def begin(self, bytes_max: int, now_s: float) -> list[CopyRun]:
        """Grains that are written again from now on. None where write-back has something to do, or the day's budget is not wide open."""
        if not self._may_write(now_s):
            return []
        begun: list[CopyRun] = []
        blocks_left = BLOCKS_MAX
        for node, grain in self._next():
            size_bytes = len(grain) * self._block_units(grain) * UNIT_BYTES
            if len(grain) > blocks_left or size_bytes > bytes_max:
                self._cursor = node  # the next call goes on here
                break
            run = self._together(grain, now_s)
            if run is not None:
                begun.append(run)
                blocks_left -= len(grain)
                bytes_max -= size_bytes
                self._admission.budget.spend(run.size_bytes, now_s)
        return begun

    def look(self, now_s: float) -> list[Rows]:
        """Copies in memory of the grains that the next call would write, as far as its bounds go. Changes nothing."""
        if not self._may_write(now_s):
            return []
        cursor = self._cursor
        found = [self._above(grain) for _, grain in self._next()]
        self._cursor = cursor
        return found

    # ---- which

    def _may_write(self, now_s: float) -> bool:
        books = self._books
        has_disk = TierId.NVME in books.space.books and not books.recovering
        is_idle = has_disk and books.limits.writes_back and not books.waiting
        return is_idle and self._admission.budget.state(now_s) is WriteState.OPEN

    def _next(self) -> Iterator[tuple[int, Rows]]:
        """Of the next runs those grains that are worth it, each with its node."""
        tree, rows_left = self._books.tree, ROWS_MAX
        tails, self._cursor = tree.tails_from(self._cursor, NODES_MAX)
        for node, tail in tails:
            if rows_left <= 0:
                self._cursor = node
                return
            layout = self._books.layout_of(tail)
            most = min(COARSE_TOKENS // layout.spec.block_tokens, BLOCKS_MAX)
            if most < 2 or not layout.is_plain:
                continue
            run = tree.run_of(tail)
            rows_left -= len(run)
            for grain in self._grains_of(run, most):
                yield node, grain

    def _grains_of(self, run: Rows, most: int) -> Iterator[Rows]:
        depth = self._books.tree.depth[run]
        for grain in np.split(run, np.flatnonzero(np.diff(depth // most)) + 1):
            if len(grain) >= max(2, most // 2) and self._is_strewn(grain):
                yield grain

    def _is_strewn(self, grain: Rows) -> bool:
        """Hit, in memory and on NVMe and nowhere else, unread there, and read from there with many small calls."""
        books = self._books
        blocks, table, pieces = books.blocks, books.copies, books.pieces
        if not (blocks.hits[grain] > 0).all() or blocks.content[grain].any():
            return False
        first = blocks.first_copy[grain]
        second = np.where(first >= 0, table.next[first], -1)
        if (second < 0).any() or (table.next[second] >= 0).any():
            return False
        below = np.where(table.tier[first] == int(TierId.NVME), first, second)
        above = np.where(below == first, second, first)
        fine = (table.tier[below] == int(TierId.NVME)) & (table.tier[above] == int(TierId.DRAM))
        for copies in (below, above):
            fine &= (table.state[copies] == READY) & (table.fills[copies] == 0)
            piece = table.first_piece[copies]
            fine &= (pieces.next[piece] < 0) & (pieces.units[piece] > 0)
        fine &= table.readers[below] == 0
        length = pieces.length[table.first_piece[above]]
        fine &= (length == length[0]) & (blocks.valid[grain] == blocks.valid[grain[0]])
        if not fine.all() or any(books.space.frames.is_referred_to(c) for c in below.tolist()):
            return False
        calls = self._calls(below)
        return calls > 1 and int(table.units[below].sum()) * UNIT_BYTES < calls * CALL_BYTES

    def _calls(self, copies: Rows) -> int:
        """About how many calls it takes to read these."""
        places = self._books.places(self._books.copies.first_piece[copies])
        order = np.lexsort((places.start, places.segment))
        segment, start, units = (column[order] for column in places)
        gap = start[1:] - start[:-1] - units[:-1]
        is_next = (segment[1:] == segment[:-1]) & (gap >= 0)
        is_next &= gap <= np.minimum(units[:-1], NEAR_BYTES // UNIT_BYTES)
        return 1 + int(np.count_nonzero(~is_next))

    def _block_units(self, grain: Rows) -> int:
        books = self._books
        above = self._above(grain[:1])
        return units_of(int(books.pieces.length[books.copies.first_piece[above[0]]]))

    def _above(self, grain: Rows) -> Rows:
        """Their copies in memory."""
        books = self._books
        first = books.blocks.first_copy[grain]
        is_first = books.copies.tier[first] == int(TierId.DRAM)
        above: Rows = np.where(is_first, first, books.copies.next[first])
        return above

    # ---- writing

    def _together(self, grain: Rows, now_s: float) -> CopyRun | None:
        """None, with nothing changed, where there is no room that is one stretch, below the high watermark."""
        books, space = self._books, self._books.space
        units = self._block_units(grain)
        book = space.books[TierId.NVME]
        limit = int(space.limit(TierId.NVME, Budget.GLOBAL) * book.limits.high)
        if book.used[Budget.GLOBAL] + units * len(grain) > limit:
            return None
        if book.extents.largest_units < units * len(grain):
            return None
        places = space.take_equal(TierId.NVME, Budget.GLOBAL, units, len(grain))
        assert places is not None, "there is a run of so many units"
        above = self._above(grain)
        for block in grain[::-1].tolist():
            copy = books.copy_in(block, TierId.NVME, int(books.copies.part[above[0]]))
            books.drop_copy(copy, Reason.SUPERSEDED, now_s)
        return self._carriage.open_run(above, TierId.NVME, places, np.arange(len(grain)))
