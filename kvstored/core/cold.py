"""Class P3 by what engines told: copies that attention left alone for long, and that a slower tier has, leave first while that is fresh.

First victims as the policy knows them, so the order among them is the policy's. Where a copy is the only one its leaving would lose a hit: those stay
where the policy has them (classes.py looks at the next few). Whatever uses such a block makes it an ordinary one at once.
"""

import numpy as np

from kvstored.core.books import Books
from kvstored.core.columns import CLEAN, FIRST, READY
from kvstored.core.readability import NOT_READABLE
from kvstored.core.types import Part, Rows, TierId, as_rows

SETTLE_S = 1.0
"""How long what is no longer told may count."""


class Cold:
    """`marked`: copies that are first victims for this, with half the fingerprint of their block: rows are given to others."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.marked: dict[int, int] = {}
        self._settled_s = 0.0

    def mark(self, blocks: Rows, part: Part) -> None:
        """Copies of these blocks that lose nothing by leaving."""
        books, table = self._books, self._books.copies
        rows = self._copies(blocks, part)
        fine = table.state[rows] == READY
        fine &= (table.flags[rows] & (CLEAN | FIRST) == CLEAN) & (table.tier[rows] <= TierId.DRAM)
        rows = rows[fine]
        if len(rows):
            lows = books.index.fingerprints[table.block[rows], 0]
            self.marked.update(zip(rows.tolist(), lows.tolist(), strict=True))
            books.policy.first(rows)

    def is_due(self, now_s: float) -> bool:
        return bool(self.marked) and now_s >= self._settled_s + SETTLE_S

    def rows(self, now_s: float) -> Rows:
        """Copies that are still those that were marked; the others are forgotten."""
        self._settled_s = now_s
        books, table = self._books, self._books.copies
        rows, lows = as_rows(list(self.marked)), np.fromiter(self.marked.values(), np.uint64)
        at = table.block[rows]
        same = (at >= 0) & (books.index.fingerprints[at, 0] == lows)
        same &= table.flags[rows] & FIRST != 0
        for row in rows[~same].tolist():
            del self.marked[row]
        still: Rows = rows[same]
        return still

    def clear(self, rows: Rows) -> None:
        """These marked ones are ordinary again, unless they would leave first whatever was told."""
        books, table = self._books, self._books.copies
        for row in rows.tolist():
            if self.marked.pop(row, None) is None or self._is_first_anyway(row):
                continue
            table.flags[row] &= ~FIRST & 0xFF
            books.consider(row)

    def clear_blocks(self, blocks: Rows, part: Part) -> None:
        """Attention came back to these."""
        if self.marked and len(blocks):
            self.clear(self._copies(blocks, part))

    def _copies(self, blocks: Rows, part: Part) -> Rows:
        """In no order."""
        table = self._books.copies
        at = self._books.blocks.first_copy[blocks]
        found: list[Rows] = []
        while len(at := at[at >= 0]):
            found.append(at[table.part[at] == int(part)])
            at = table.next[at]
        return np.concatenate(found) if found else at

    def _is_first_anyway(self, row: int) -> bool:
        books = self._books
        block = int(books.copies.block[row])
        parent = int(books.tree.parent[block])
        is_cut_off = parent >= 0 and books.blocks.fast[parent] == NOT_READABLE
        is_partial = int(books.blocks.valid[block]) < books.layout_of(block).spec.block_tokens
        return int(books.blocks.ns[block]) in books.retired or is_cut_off or is_partial
