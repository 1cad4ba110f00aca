"""First blocks of paths that are exempt from eviction while something below them is stored (class P0), up to a share of each tier.

Beyond the share the coldest yields: it is an ordinary block then, so that sinks of paths that nobody uses any more do not keep the exemption
from those of today. A lazy heap by last use, in which entries move when they come up.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from kvstored.core.columns import SINK
from kvstored.core.frame_classes import refers
from kvstored.core.rows import Tables
from kvstored.core.types import Heat, Part, TierId

_SLACK = 64
_CHECKPOINT = int(Part.CHECKPOINT)

Entry = tuple[float, int, int]
"""Last use as it was, number of the exemption, copy."""


class Sinks:
    """`freed`: told of a copy that is no exempt sink any more."""

    def __init__(self, tables: Tables, freed: Callable[[int], None]) -> None:
        self._tables = tables
        self._freed = freed
        self._heaps: dict[TierId, list[Entry]] = {}
        self._most: dict[TierId, int] = {}
        self._numbers: dict[int, int] = {}
        self._last = 0

    def count(self, copy: int, block: int, tier: TierId, *, may_yield: bool) -> None:
        """A copy that just became ready is exempt if it is a sink and there is room in the share, or colder ones make it."""
        tables = self._tables
        is_other = tables.copies.part.item(copy) == _CHECKPOINT
        if is_other or tables.heat(block) is not Heat.SINK:
            return
        if refers(tables, copy):
            return
        book, units = tables.space.books[tier], tables.copies.units.item(copy)
        over = book.sinks + units - int(book.granted * book.limits.sink_share)
        if over > 0 and not (may_yield and self._make_room(tier, over, block)):
            return
        self._last += 1
        tables.copies.flags[copy] = tables.copies.flags.item(copy) | SINK
        book.sinks += units
        self._numbers[copy] = self._last
        heap = self._heaps.setdefault(tier, [])
        heappush(heap, (tables.blocks.last_s.item(block), self._last, copy))
        if len(heap) > self._most.get(tier, _SLACK):
            self._sweep(tier)

    def _make_room(self, tier: TierId, units: int, block: int) -> bool:
        """Whether sinks that were used before this block had so many; they are ordinary then. Else nothing has changed."""
        tables = self._tables
        heap, last_s = self._heaps.get(tier, []), tables.blocks.last_s.item(block)
        yielding: list[Entry] = []
        while units > 0 and heap and heap[0][0] < last_s:
            entry = heappop(heap)
            used_s = self._used_s(entry)
            if used_s is None:
                continue
            if used_s > entry[0]:
                heappush(heap, (used_s, *entry[1:]))
                continue
            yielding.append(entry)
            units -= tables.copies.units.item(entry[2])
        if units > 0:
            for entry in yielding:
                heappush(heap, entry)
            return False
        flags = tables.copies.flags
        book = tables.space.books[tier]
        for _, _, copy in yielding:
            flags[copy] = flags.item(copy) & ~SINK
            book.sinks -= tables.copies.units.item(copy)
            del self._numbers[copy]
            self._freed(copy)
        return True

    def _used_s(self, entry: Entry) -> float | None:
        """Last use of its block; None where the copy is gone, or exempt by another entry."""
        _, number, copy = entry
        tables = self._tables
        if self._numbers.get(copy) != number:
            return None
        if not tables.copies.flags.item(copy) & SINK:
            del self._numbers[copy]
            return None
        return tables.blocks.last_s.item(tables.copies.block.item(copy))

    def _sweep(self, tier: TierId) -> None:
        """Entries of copies that are gone leave when they come up; those that never do are swept here."""
        heap = [entry for entry in self._heaps[tier] if self._used_s(entry) is not None]
        heapify(heap)
        self._heaps[tier] = heap
        self._most[tier] = 2 * len(heap) + _SLACK
