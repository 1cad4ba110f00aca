"""Which copies in HBM are carried down to DRAM before they would have to leave, and how the tier is given up when its device is lost.

HBM is filled from DRAM, so a copy there mostly has a slower one and is forgotten when it leaves. What DRAM evicted meanwhile and no disk
has stays until it was carried down, which is done while HBM is above its low watermark, in the order in which the policy would take it.
"""

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Reason
from kvstored.core.carriage import Carriage
from kvstored.core.columns import CLEAN, FILLING, FIRST, READY
from kvstored.core.copying import Copying
from kvstored.core.types import Budget, Rows, TierId, as_rows

LOOKS_MAX = 1024
"""Copies that one call begins or is refused for: each costs a tenth of a millisecond."""
REFUSALS_MAX = 16


class Demotion:
    def __init__(self, books: Books, carriage: Carriage) -> None:
        self._books = books
        self._carriage = carriage

    def begin(self, bytes_max: int, now_s: float) -> list[Copying]:
        """Copies to carry down, coldest first; none while the tier is below its low watermark."""
        book = self._books.space.books.get(TierId.HBM)
        if book is None:
            return []
        limit = self._books.space.limit(TierId.HBM, Budget.GLOBAL)
        if book.used[Budget.GLOBAL] <= int(limit * book.limits.low):
            return []
        return self.flush(bytes_max, now_s)

    def flush(self, bytes_max: int, now_s: float) -> list[Copying]:
        """The same whatever the watermark: for the drain."""
        if TierId.HBM not in self._books.space.books:
            return []
        begun: list[Copying] = []
        refusals = 0
        for copy in self._dirty()[:LOOKS_MAX].tolist():
            # making room in DRAM for the one before may have dropped this one
            is_dirty = not self._books.copies.flags[copy] & CLEAN
            if self._books.copies.state[copy] != READY or not is_dirty:
                continue
            task = self._carriage.begin(copy, TierId.DRAM, now_s)
            if task is not None:
                begun.append(task)
                bytes_max -= sum(move.length for move in task.moves)
            refusals += task is None
            if bytes_max <= 0 or refusals == REFUSALS_MAX:
                break
        return begun

    def lose(self, now_s: float, copies_max: int) -> int:
        """The devices are lost: forget so many copies there, deepest first; nothing comes there any more. How many went: call again until it is none."""
        books, copies = self._books, self._books.copies
        books.lost.add(TierId.HBM)
        state, tier = copies.state[: copies.top], copies.tier[: copies.top]
        rows = np.flatnonzero((tier == int(TierId.HBM)) & ((state == READY) | (state == FILLING)))
        rows = rows[np.argsort(-books.tree.depth[copies.block[rows]], kind="stable")][:copies_max]
        for copy in rows.tolist():
            books.drop_copy(copy, Reason.IO_ERROR, now_s)
        return len(rows)

    def _dirty(self) -> Rows:
        """Those that nothing is carrying yet; first victims, then the others, each in the policy's order."""
        copies = self._books.copies
        top = copies.top
        mine = (copies.tier[:top] == int(TierId.HBM)) & (copies.state[:top] == READY)
        rows = np.flatnonzero(mine & (copies.flags[:top] & CLEAN == 0))
        rows = rows[np.lexsort((copies.rank[rows], copies.flags[rows] & FIRST == 0))]
        return as_rows(
            [
                row
                for row in rows.tolist()
                if self._books.copy_in(int(copies.block[row]), TierId.DRAM, int(copies.part[row]))
                < 0
            ]
        )
