"""What is remembered of blocks that are gone: by run, found by the fingerprint of its first block, so many at most."""

from array import array
from collections.abc import Iterable, Sequence
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

    def add(self, ghost: Ghost, *, below: int = -1) -> Sequence[Ghost]:
        """Answers those that are forgotten for it. `below`: the first of the blocks that left from right below it (-1: none); of the same
        history, they are one ghost now."""
        ghosts = self._ghosts
        other = ghosts.get(below)
        if other is not None and other[1:] == ghost[1:]:
            self.take(below)
            ghost = Ghost(ghost.lows + other.lows, *ghost[1:])
        first = ghost.lows[0]
        before = self.take(first)
        ghosts[first] = ghost
        self.blocks += len(ghost.lows)
        if before is None and len(ghosts) <= self._runs_max and self.blocks <= self._blocks_max:
            return ()
        gone = [] if before is None else [before]
        while len(ghosts) > self._runs_max or self.blocks > self._blocks_max:
            gone.append(ghosts[next(iter(ghosts))])
            self.take(gone[-1].lows[0])
        return gone

    def take(self, low: int) -> Ghost | None:
        """Forget the one that begins with it, and answer what it was."""
        ghost = self._ghosts.pop(low, None)
        if ghost is not None:
            self.blocks -= len(ghost.lows)
        return ghost
