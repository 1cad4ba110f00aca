"""Rows in the order of a number that grows with time: both ends at once, anything between in O(log n), 12 bytes an entry."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable

FIRST, LAST = 1, 2
"""Ends."""
_CHUNK = 512
"""Entries after which a chunk is halved: what an insertion moves."""


class Ages:
    """Of one number the row that was added first comes first."""

    __slots__ = ("_lows", "_numbers", "_rows", "size")

    def __init__(self) -> None:
        self._numbers: list[array[int]] = []
        self._rows: list[array[int]] = []
        self._lows: list[int] = []
        """The first number of each chunk."""
        self.size = 0

    def first(self) -> tuple[int, int]:
        return self._numbers[0][0], self._rows[0][0]

    def last(self) -> tuple[int, int]:
        return self._numbers[-1][-1], self._rows[-1][-1]

    def add(self, number: int, row: int) -> int:
        """Answers of which ends it is now: `FIRST`, `LAST`, both or neither."""
        self.size += 1
        lows = self._lows
        if not lows:
            self._numbers.append(array("q", (number,)))
            self._rows.append(array("i", (row,)))
            lows.append(number)
            return FIRST | LAST
        chunk = len(lows) - 1
        numbers = self._numbers[chunk]
        if number >= numbers[-1]:  # most often: it grows with time
            numbers.append(number)
            self._rows[chunk].append(row)
            end = LAST
        else:
            chunk = max(bisect_right(lows, number) - 1, 0)
            numbers = self._numbers[chunk]
            at = bisect_right(numbers, number)
            numbers.insert(at, number)
            self._rows[chunk].insert(at, row)
            end = 0
            if not at:
                lows[chunk] = number
                end = 0 if chunk else FIRST
        if len(numbers) > _CHUNK:
            self._halve(chunk)
        return end

    def remove(self, number: int, row: int) -> int:
        """Answers of which ends it was; 0 where it is not there, too."""
        lows = self._lows
        chunk = max(bisect_left(lows, number) - 1, 0)
        while chunk < len(lows) and lows[chunk] <= number:
            numbers, rows = self._numbers[chunk], self._rows[chunk]
            at = bisect_left(numbers, number)
            while at < len(numbers) and numbers[at] == number:
                if rows[at] == row:
                    is_last = at == len(numbers) - 1 and chunk == len(lows) - 1
                    self._delete(chunk, at)
                    return (0 if at or chunk else FIRST) | (LAST if is_last else 0)
                at += 1
            chunk += 1
        return 0

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
        self._numbers, self._rows, self._lows, self.size = [], [], [], len(kept)
        entries, size = list(kept), _CHUNK // 2
        for begin in range(0, len(entries), size):
            numbers, rows = zip(*entries[begin : begin + size], strict=True)
            self._numbers.append(array("q", numbers))
            self._rows.append(array("i", rows))
            self._lows.append(numbers[0])

    def _halve(self, chunk: int) -> None:
        numbers, rows = self._numbers[chunk], self._rows[chunk]
        half = len(numbers) // 2
        self._numbers[chunk : chunk + 1] = [numbers[:half], numbers[half:]]
        self._rows[chunk : chunk + 1] = [rows[:half], rows[half:]]
        self._lows.insert(chunk + 1, numbers[half])

    def _delete(self, chunk: int, at: int) -> None:
        self.size -= 1
        numbers = self._numbers[chunk]
        del numbers[at], self._rows[chunk][at]
        if not numbers:
            del self._numbers[chunk], self._rows[chunk], self._lows[chunk]
        elif not at:
            self._lows[chunk] = numbers[0]
