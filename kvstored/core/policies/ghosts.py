"""What is remembered of blocks that are gone: by run, found by the fingerprint of its first block, so many at most."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

RUNS_MAX, BLOCKS_MAX = 1 << 16, 1 << 20
"""A run takes some 450 bytes, and 8 a block. The oldest are forgotten first."""


class Ghost(NamedTuple):
    """Blocks that left together, top to bottom, by the low halves of their fingerprints (what two of them share is learning, not a
    block), and their history."""

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
        self._ghosts: dict[int, Ghost] = {}
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def __contains__(self, low: int) -> bool:
        return low in self._ghosts

    def are_none_of(self, lows: Iterable[int]) -> bool:
        """No ghost begins with any of these."""
        return self._ghosts.keys().isdisjoint(lows)

    def add(self, ghost: Ghost, *, below: int = -1) -> list[Ghost]:
        """Answers those that are forgotten for it. `below`: the first of the blocks that left from right below it (-1: none); of the same
        history, they are one ghost now."""
        other = self._ghosts.get(below)
        if other is not None and other[1:] == ghost[1:]:
            ghost = ghost._replace(lows=ghost.lows + other.lows)
            self.take(below)
        gone = [self.take(ghost.lows[0])]
        self._ghosts[ghost.lows[0]] = ghost
        self.blocks += len(ghost.lows)
        while len(self._ghosts) > self._runs_max or self.blocks > self._blocks_max:
            gone.append(self.take(next(iter(self._ghosts))))
        return [each for each in gone if each is not None]

    def take(self, low: int) -> Ghost | None:
        """Forget the one that begins with it, and answer what it was."""
        ghost = self._ghosts.pop(low, None)
        if ghost is not None:
            self.blocks -= len(ghost.lows)
        return ghost
