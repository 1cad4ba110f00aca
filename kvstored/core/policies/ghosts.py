"""What is remembered of blocks that are gone: by run, found by the fingerprint of its first block, so many at most.

They are kept as plain tuples of numbers and bytes, which the collector leaves alone: as objects of their own a full memory of them made each
full collection 40 ms longer.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

RUNS_MAX, BLOCKS_MAX = 1 << 16, 1 << 20
"""A run takes some 350 bytes, and 8 a block. The oldest are forgotten first."""
LOW_BYTES = 8

Gone = tuple[bytes, int, float, float, int, int]
"""Blocks that left together, top to bottom, by the low halves of their fingerprints (what two of them share is learning, not a block), and their
history: class, start of the spell, last use, uses, marks."""


class Ghost(NamedTuple):
    """The same, as it is looked at."""

    lows: "array[int]"
    class_: int
    start_s: float
    last_s: float
    uses: int
    marks: int


class Ghosts:
    def __init__(self, runs_max: int = RUNS_MAX, blocks_max: int = BLOCKS_MAX) -> None:
        self._runs_max = runs_max
        self._blocks_max = blocks_max
        self._ghosts: dict[int, Gone] = {}
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def __contains__(self, low: int) -> bool:
        return low in self._ghosts

    def are_none_of(self, lows: Iterable[int]) -> bool:
        """No ghost begins with any of these."""
        return self._ghosts.keys().isdisjoint(lows)

    def add(self, first: int, gone: Gone, *, below: int = -1) -> Sequence[tuple[int, float]]:
        """`first`: the first of its lows. Answers how many blocks are forgotten for it, by run, and their last use. `below`: the first of the blocks
        that left from right below it (-1: none); of the same history, they are one ghost now."""
        ghosts = self._ghosts
        other = ghosts.get(below)
        if other is not None and other[1:] == gone[1:]:
            self._take(below)
            gone = (gone[0] + other[0], *gone[1:])
        before = self._take(first)
        ghosts[first] = gone
        self.blocks += len(gone[0]) // LOW_BYTES
        if before is None and len(ghosts) <= self._runs_max and self.blocks <= self._blocks_max:
            return ()
        forgotten = [] if before is None else [before]
        while len(ghosts) > self._runs_max or self.blocks > self._blocks_max:
            oldest = self._take(next(iter(ghosts)))
            forgotten += [] if oldest is None else [oldest]
        return [(len(each[0]) // LOW_BYTES, each[3]) for each in forgotten]

    def take(self, low: int) -> Ghost | None:
        """Forget the one that begins with it, and answer what it was."""
        gone = self._take(low)
        return None if gone is None else Ghost(array("Q", gone[0]), *gone[1:])

    def give_back(self, ghost: Ghost, used: int) -> None:
        """All of one that was taken but so many of its first blocks."""
        left = ghost.lows[used:]
        self.add(left[0], (left.tobytes(), *ghost[1:]))

    def _take(self, low: int) -> Gone | None:
        gone = self._ghosts.pop(low, None)
        if gone is not None:
            self.blocks -= len(gone[0]) // LOW_BYTES
        return gone
