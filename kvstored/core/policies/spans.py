"""Spans: runs of blocks that were always used together, so that one history is kept for all of them.

A path that uses the upper part of a span only splits it there. A span loses blocks from its tail. Which span a block is of is a column;
all else is by span, in columns of narrow types, so that a request costs its spans, not its blocks, and no block costs an object.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.tree import PrefixTree
from kvstored.core.types import Rows

NONE = -1
NO_GHOST = (1 << 64) - 1
_GROWTH = 256
_FEW = 64
"""So few blocks are gone through one by one."""
COUNT_MAX = 60_000
SUPERSEDED, RETURNED, BY_HINT, FRESH = 1, 2, 4, 8
"""Marks: its branch was left by its path; it was used after that; its last use was said by a hint; it was not used since it was stored."""


class Spans:
    """By the number of a span: `size` blocks from `head` down to `tail`; a *spell* of disuse in class `class_` since `start_s`, known by its number; `last_s`,
    `uses`, `marks`: its history; `kids`: branches that ever began below the tail, `child`: the block by which a path last went on; `row`,
    `other`: copies that are queued, or were (`more`: where there are yet others); `ghost`: what left from right below the tail.
    `view`: as `of`, of rows that there are; another one after each `ensure`."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.head = array("i")
        self.tail = array("i")
        self.size = array("i")
        self.class_ = array("H")
        self.spell = array("q")
        self.start_s = array("d")
        self.last_s = array("d")
        self.uses = array("H")
        self.marks = array("B")
        self.kids = array("H")
        self.child = array("i")
        self.row = array("i")
        self.other = array("i")
        self.ghost = array("Q")
        self.more: dict[int, tuple[int, ...]] = {}
        self._free: list[int] = []
        self._of: Rows = np.full(0, NONE, dtype=np.int32)
        self.view = self._of.data

    def __len__(self) -> int:
        return len(self.head) - len(self._free)

    def ensure(self, rows: int) -> None:
        if rows > len(self._of):
            grown: Rows = np.full(rows, NONE, dtype=np.int32)
            grown[: len(self._of)] = self._of
            self._of, self.view = grown, grown.data

    def of(self, block: int) -> int:
        """-1 where it is of none."""
        return self.view[block] if 0 <= block < len(self._of) else NONE

    def are_unknown(self, blocks: Rows) -> NDArray[np.bool_]:
        """Which of them are of no span."""
        are: NDArray[np.bool_] = self._of.take(blocks) == NONE
        return are

    def unknown_run(self, block: int) -> Rows:
        """The blocks of no span around this one in its run of the tree, from the top."""
        run = self._tree.run_of(block)
        known = np.flatnonzero(self._of[run] != NONE)
        if not len(known):
            return run
        where = int(np.searchsorted(known, int(np.flatnonzero(run == block)[0])))
        begin = int(known[where - 1]) + 1 if where else 0
        return run[begin : int(known[where]) if where < len(known) else len(run)]

    def along(self, blocks: Rows) -> list[tuple[int, int]]:
        """Spans of blocks, tail to head: each once, with the first of its blocks that comes up, which is the deepest."""
        if not len(blocks):
            return []
        depth, last = self._tree.depth, blocks.item(-1)
        if depth.item(blocks.item(0)) - depth.item(last) + 1 == len(blocks):
            return self._upwards(blocks.item(0), depth.item(last))
        numbers = self._of[blocks]
        first = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        at = [0, *first.tolist()]
        found: dict[int, int] = {}
        for number, block in zip(numbers[at].tolist(), blocks[at].tolist(), strict=True):
            if number != NONE and number not in found:
                found[number] = block
        return list(found.items())

    def make(self, blocks: Sequence[int]) -> int:
        """Of these blocks, each right below the one before."""
        if not self._free:
            self._grow()
        number = self._free.pop()
        self.head[number], self.tail[number] = blocks[0], blocks[-1]
        self.size[number] = len(blocks)
        self.class_[number] = self.marks[number] = self.kids[number] = 0
        self.start_s[number] = self.last_s[number] = 0.0
        self.uses[number] = 1
        self.child[number] = self.row[number] = self.other[number] = NONE
        self.ghost[number] = NO_GHOST
        self._mark(blocks, number)
        return number

    def extend(self, span: int, blocks: Sequence[int]) -> None:
        """More blocks right below its tail."""
        self.tail[span] = blocks[-1]
        self.size[span] += len(blocks)
        self.ghost[span] = NO_GHOST
        self._mark(blocks, span)

    def size_down_to(self, span: int, block: int) -> int:
        """How many of its blocks there are from its head to this one."""
        if block == self.tail[span]:
            return self.size[span]
        depth = self._tree.depth
        return self.size[span] - (depth.item(self.tail[span]) - depth.item(block))

    def split(self, span: int, size: int) -> int:
        """It keeps its upper `size` blocks; the rest becomes another span of the same history, which is answered."""
        lower = self._tree.path_above(self.tail[span], self.size[span] - size)[::-1].tolist()
        below = self.make(lower)
        for column in (self.class_, self.uses, self.marks, self.kids):
            column[below] = column[span]
        for column in (self.child, self.row, self.other):
            column[below] = column[span]
        self.spell[below] = self.spell[span]
        self.start_s[below], self.last_s[below] = self.start_s[span], self.last_s[span]
        self.ghost[below] = self.ghost[span]
        if span in self.more:
            self.more[below] = self.more[span]
        self.tail[span] = self._tree.parent.item(lower[0])
        self.size[span] = size
        self.kids[span] = 1
        self.ghost[span] = NO_GHOST
        self.child[span] = lower[0]
        return below

    def cut(self, blocks: Rows) -> list[tuple[int, Rows]]:
        """These blocks go, leaf first, of which tree and index still know: the spans that they were of, each with those that it lost. A
        span of no blocks keeps its history until another one is made."""
        lost: list[tuple[int, Rows]] = []
        start, total, known = 0, len(blocks), 0
        while start < total:
            first = blocks.item(start)
            span = self.of(first)
            if span == NONE:
                start += 1
                continue
            count = min(self.size_down_to(span, first), total - start)
            lost.append((span, blocks if count == total else blocks[start : start + count]))
            known += count
            size = self.size[span] = self.size[span] - count
            self.tail[span] = self._tree.parent.item(blocks.item(start + count - 1))
            self.kids[span], self.child[span] = 0, NONE
            if not size:
                self._free.append(span)
                if self.more:
                    self.more.pop(span, None)
            start += count
        self._mark((blocks if known == total else blocks[blocks < len(self._of)]).tolist(), NONE)
        return lost

    def queued(self, span: int) -> tuple[int, ...]:
        """Rows that were `queue`d for it."""
        row, other = self.row[span], self.other[span]
        if row < 0 and other < 0:
            return ()
        more = self.more.get(span, ()) if self.more else ()
        return tuple(each for each in (row, other, *more) if each >= 0)

    def queue(self, span: int, rows: Sequence[int]) -> None:
        """These take the place of those before."""
        self.row[span] = rows[0] if rows else NONE
        self.other[span] = rows[1] if len(rows) > 1 else NONE
        if len(rows) > 2:
            self.more[span] = tuple(rows[2:])
        elif self.more:
            self.more.pop(span, None)

    def _upwards(self, block: int, depth_min: int) -> list[tuple[int, int]]:
        """From a block up to this depth."""
        parent, depth, of, head = self._tree.parent, self._tree.depth, self.view, self.head
        found = []
        while block >= 0 and depth.item(block) >= depth_min:
            span = of[block]
            if span == NONE:
                block = parent.item(block)
                continue
            found.append((span, block))
            block = parent.item(head[span])
        return found

    def _grow(self) -> None:
        """Numbers are taken in their order."""
        count, more = len(self.head), _GROWTH
        for column in (self.head, self.tail, self.size, self.child, self.row, self.other):
            column.extend(array("i", (NONE,)) * more)
        for column in (self.class_, self.uses, self.marks, self.kids):
            column.extend(array(column.typecode, (0,)) * more)
        self.spell.extend(array("q", (0,)) * more)
        self.start_s.extend(array("d", (0.0,)) * more)
        self.last_s.extend(array("d", (0.0,)) * more)
        self.ghost.extend(array("Q", (NO_GHOST,)) * more)
        self._free.extend(range(count + more - 1, count - 1, -1))

    def _mark(self, blocks: Sequence[int], number: int) -> None:
        if len(blocks) > _FEW:
            self._of[np.asarray(blocks)] = number
        else:
            for block in blocks:
                self.view[block] = number
