"""Rows in the order of a number that grows with time: both ends at once, anything between in O(log n), 12 bytes an entry."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable

_CHUNK = 512
"""Entries after which a chunk is halved: what an insertion moves."""


class Ages:
    """Of one number the row that was added first comes first."""

    __slots__ = ("_lows", "_numbers", "_rows", "_size")

    def __init__(self) -> None:
        self._numbers: list[array[int]] = []
        self._rows: list[array[int]] = []
        self._lows: list[int] = []
        """The first number of each chunk."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def first(self) -> tuple[int, int]:
        return self._numbers[0][0], self._rows[0][0]

    def last(self) -> tuple[int, int]:
        return self._numbers[-1][-1], self._rows[-1][-1]

    def add(self, number: int, row: int) -> None:
        self._size += 1
        if not self._lows:
            self._numbers.append(array("q", (number,)))
            self._rows.append(array("i", (row,)))
            self._lows.append(number)
            return
        chunk = max(bisect_right(self._lows, number) - 1, 0)
        numbers, rows = self._numbers[chunk], self._rows[chunk]
        at = bisect_right(numbers, number)
        numbers.insert(at, number)
        rows.insert(at, row)
        if not at:
            self._lows[chunk] = number
        if len(numbers) > _CHUNK:
            self._halve(chunk)

    def remove(self, number: int, row: int) -> None:
        """Nothing where it is not there."""
        chunk = max(bisect_left(self._lows, number) - 1, 0)
        while chunk < len(self._lows) and self._lows[chunk] <= number:
            numbers, rows = self._numbers[chunk], self._rows[chunk]
            at = bisect_left(numbers, number)
            while at < len(numbers) and numbers[at] == number:
                if rows[at] == row:
                    self._delete(chunk, at)
                    return
                at += 1
            chunk += 1

    def pop_first(self) -> tuple[int, int]:
        found = self.first()
        self._delete(0, 0)
        return found

    def pop_last(self) -> tuple[int, int]:
        found = self.last()
        self._delete(len(self._lows) - 1, len(self._numbers[-1]) - 1)
        return found

    def keep(self, is_kept: Callable[[int, int], bool]) -> None:
        """Only those, each once."""
        kept = dict.fromkeys(
            (number, row)
            for numbers, rows in zip(self._numbers, self._rows, strict=True)
            for number, row in zip(numbers, rows, strict=True)
            if is_kept(number, row)
        )
        self._numbers, self._rows, self._lows, self._size = [], [], [], 0
        for number, row in kept:
            self.add(number, row)

    def _halve(self, chunk: int) -> None:
        numbers, rows = self._numbers[chunk], self._rows[chunk]
        half = len(numbers) // 2
        self._numbers[chunk : chunk + 1] = [numbers[:half], numbers[half:]]
        self._rows[chunk : chunk + 1] = [rows[:half], rows[half:]]
        self._lows.insert(chunk + 1, numbers[half])

    def _delete(self, chunk: int, at: int) -> None:
        self._size -= 1
        numbers = self._numbers[chunk]
        del numbers[at], self._rows[chunk][at]
        if not numbers:
            del self._numbers[chunk], self._rows[chunk], self._lows[chunk]
        elif not at:
            self._lows[chunk] = numbers[0]
