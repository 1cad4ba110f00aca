"""Which copies may leave, and which of them is the next: the leaves of spans by class and age, first victims before all.

A span knows its copies that are queued. When its class or spell changes they are queued anew; what went without a word is found out when it
comes up.
"""

from functools import partial
from heapq import heappop, heappush

from kvstored.core.columns import FIRST, QUEUED
from kvstored.core.policies.base import Ledger
from kvstored.core.policies.candidates import Candidates
from kvstored.core.policies.spans import NONE, Spans
from kvstored.core.policies.spells import Floats
from kvstored.core.types import Part, Rows

Key = tuple[int, int]
"""Tier and budget."""
_CHECKPOINT, _SPARSE = int(Part.CHECKPOINT), int(Part.SPARSE)


class Leaves:
    def __init__(self, ledger: Ledger, spans: Spans) -> None:
        self._ledger = ledger
        self._spans = spans
        self._leaves: dict[Key, Candidates] = {}
        self._firsts: dict[Key, list[tuple[int, bool, int, int]]] = {}
        """By rank; of one touch sparse ones, and of these the deepest."""
        self.had_first = False
        """Some copy was a first victim, ever."""

    def offer(self, span: int, row: int) -> None:
        copies, spans = self._ledger.copies, self._spans
        flags = copies.flags.item(row)
        if flags & QUEUED:
            return
        before = spans.row[span]
        if spans.other[span] < 0:
            if before >= 0 and before != row and self._is_queued(span, before):
                spans.other[span] = before
            spans.row[span] = row
        elif row not in (others := spans.queued(span)):
            spans.queue(span, [row, *(each for each in others if self._is_queued(span, each))])
        copies.flags[row] = flags | QUEUED
        self._push(span, row)
        if flags & FIRST:
            self._push_first(row)

    def first(self, rows: Rows) -> None:
        self.had_first = True
        flags = self._ledger.copies.flags
        fresh = rows[flags[rows] & FIRST == 0]
        flags[fresh] |= FIRST
        for row in fresh[flags[fresh] & QUEUED != 0].tolist():
            self._push_first(row)

    def again(self, span: int, queued: tuple[int, ...], class_: int, spell: int) -> None:
        """After a change from this class or spell. What may not leave now is offered again when it may."""
        flags, ledger, still = self._ledger.copies.flags, self._ledger, []
        for row in queued:
            if not self._is_queued(span, row):
                continue
            self._leaves[self._key(row)].remove(
                class_, ledger.weight(row), self._number(spell, row), row
            )
            if ledger.is_evictable(row):
                still.append(row)
                self._push(span, row)
            else:
                flags[row] = flags.item(row) & ~QUEUED
        self._spans.queue(span, still)

    def doubt(self, span: int) -> None:
        """What is queued of it may be no leaf any more: one that may not leave would hide those behind it."""
        for row in self._spans.queued(span):
            if self._is_queued(span, row):
                class_, weight = self._spans.class_[span], self._ledger.weight(row)
                self._leaves[self._key(row)].doubt(class_, weight)

    def pop(self, key: Key, rates: Floats | None, now_s: float) -> int | None:
        """The next to leave, taken out: of least worth by these rates, or the least recently used."""
        row = self._pop_first(key) if self.had_first else None
        if row is None and (leaves := self._leaves.get(key)) is not None:
            row = leaves.pop_oldest() if rates is None else leaves.pop_worst(rates, now_s)
        if row is not None:
            flags = self._ledger.copies.flags
            flags[row] = flags.item(row) & ~QUEUED
        return row

    def _pop_first(self, key: Key) -> int | None:
        firsts = self._firsts.get(key)
        while firsts:
            row = heappop(firsts)[3]
            flags = self._ledger.copies.flags.item(row)
            if flags & QUEUED and flags & FIRST and self._key(row) == key:
                if self._ledger.is_evictable(row):
                    return row
                self._ledger.copies.flags[row] &= ~QUEUED & 0xFF
        return None

    def _is_queued(self, span: int, row: int) -> bool:
        copies = self._ledger.copies
        return bool(
            copies.flags.item(row) & QUEUED and self._spans.of(copies.block.item(row)) == span
        )

    def _push(self, span: int, row: int) -> None:
        copies, spans = self._ledger.copies, self._spans
        part = copies.part.item(row)
        key = copies.tier.item(row), int(part == _CHECKPOINT)
        leaves = self._leaves.get(key)
        if leaves is None:
            leaves = self._leaves[key] = Candidates(partial(self._times, *key))
        leaves.push(
            spans.class_[span],
            self._ledger.weight(row),
            2 * spans.spell[span] + (part != _SPARSE),
            row,
            spans.start_s[span],
            spans.last_s[span],
        )

    def _number(self, spell: int, row: int) -> int:
        """In the order of spells; of one spell sparse copies leave first."""
        return 2 * spell + (self._ledger.copies.part.item(row) != _SPARSE)

    def _push_first(self, row: int) -> None:
        copies, depth = self._ledger.copies, self._ledger.tree.depth
        firsts = self._firsts.setdefault(self._key(row), [])
        is_dense = copies.part.item(row) != _SPARSE
        at = -depth.item(copies.block.item(row))
        heappush(firsts, (copies.rank.item(row), is_dense, at, row))

    def _times(self, tier: int, budget: int, number: int, row: int) -> tuple[float, float] | None:
        copies, spans = self._ledger.copies, self._spans
        flags = copies.flags.item(row)
        if not flags & QUEUED:
            return None
        span = spans.view[copies.block.item(row)]
        if span == NONE or spans.spell[span] != number >> 1 or copies.tier.item(row) != tier:
            return None
        if (copies.part.item(row) == _CHECKPOINT) != budget:
            return None
        if self._ledger.is_evictable(row):
            return spans.start_s[span], spans.last_s[span]
        copies.flags[row] = flags & ~QUEUED  # it is offered again when it may go
        return None

    def _key(self, row: int) -> Key:
        copies = self._ledger.copies
        return copies.tier.item(row), int(copies.part.item(row) == _CHECKPOINT)
