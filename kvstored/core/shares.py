"""How much of each tier one kind of claim holds: each block counted once, at its size and tier when it was first claimed."""

from collections import Counter

from kvstored.core.books import Books
from kvstored.core.types import Rows, TierId


class Share:
    """Blocks under one kind of claim. A claimed block is held, so its row cannot be another's."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._claims: Counter[int] = Counter()
        self._units: dict[int, Counter[TierId]] = {}
        self.used: Counter[TierId] = Counter()

    def __contains__(self, block: int) -> bool:
        return block in self._units

    def more(self, rows: Rows) -> Counter[TierId]:
        """Units by tier that claiming these blocks would add."""
        units: Counter[TierId] = Counter()
        for block in rows.tolist():
            if block not in self._units:
                units.update(self._units_of(block))
        return units

    def add(self, rows: Rows) -> None:
        for block in rows.tolist():
            if block not in self._units:
                self._units[block] = self._units_of(block)
                self.used.update(self._units[block])
        self._claims.update(rows.tolist())

    def remove(self, rows: Rows) -> None:
        self._claims.subtract(rows.tolist())
        for block in rows.tolist():
            if not self._claims[block]:
                del self._claims[block]
                self.used.subtract(self._units.pop(block))

    def forget(self, block: int) -> None:
        """The block's copies were removed: its claims hold nothing any more."""
        if block in self._units:
            self.used.subtract(self._units[block])
            self._units[block] = Counter()

    def _units_of(self, block: int) -> Counter[TierId]:
        books = self._books
        units: Counter[TierId] = Counter()
        for part in books.needed_parts(block):
            copy = books.fastest_copy(block, part)
            if copy >= 0:
                units[TierId(int(books.copies.tier[copy]))] += int(books.copies.units[copy])
        return units
