"""Spans: runs of blocks that were always used together, so that one history is kept for all of them.

A path that uses the upper part of a span only splits it there. A span loses blocks from its tail. Which span a block is of is a column;
all else is by span, so that a request costs its spans, not its blocks.
"""

from collections.abc import Sequence

import numpy as np

from kvstored.core.tree import PrefixTree
from kvstored.core.types import Rows

_NONE = -1
_FEW = 8
"""So few blocks are gone through one by one."""


class Span:
    """`size` blocks from `head` down to `tail`. A *spell* is the time since `start_s` in class `class_`, known by its number. `kids`: branches
    that ever began below the tail; `child`: the block by which a path last went on. `rows`: copies that are queued, or were.
    `ghost`: what left from right below the tail."""

    __slots__ = (
        "child",
        "class_",
        "ghost",
        "head",
        "kids",
        "last_s",
        "marks",
        "number",
        "rows",
        "size",
        "spell",
        "start_s",
        "tail",
        "uses",
    )

    def __init__(self, number: int, head: int, tail: int, size: int) -> None:
        self.number = number
        self.head = head
        self.tail = tail
        self.size = size
        self.class_ = 0
        self.spell = 0
        self.start_s = 0.0
        self.last_s = 0.0
        self.uses = 1
        self.marks = 0
        self.kids = 0
        self.child = _NONE
        self.ghost = _NONE
        self.rows: tuple[int, ...] = ()


class Spans:
    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._spans: list[Span | None] = []
        self._free: list[int] = []
        self._of: Rows = np.full(0, _NONE, dtype=np.int32)
        self._view = self._of.data

    def __len__(self) -> int:
        return len(self._spans) - len(self._free)

    def ensure(self, rows: int) -> None:
        if rows > len(self._of):
            grown: Rows = np.full(rows, _NONE, dtype=np.int32)
            grown[: len(self._of)] = self._of
            self._of, self._view = grown, grown.data

    def of(self, block: int) -> Span | None:
        number = self._view[block] if block < len(self._of) else _NONE
        return None if number == _NONE else self._spans[number]

    def unknown(self, blocks: Rows) -> list[int]:
        """Those of no span, each once, in their order."""
        return list(dict.fromkeys(blocks[self._of[blocks] == _NONE].tolist()))

    def along(self, blocks: Rows) -> list[tuple[Span, int]]:
        """Spans of paths, tail to head: each once, with the first of its blocks that comes up, which is the deepest."""
        numbers = self._of[blocks]
        if len(numbers) > _FEW:
            first = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
            at = [0, *first.tolist()]
            pairs = zip(numbers[at].tolist(), blocks[at].tolist(), strict=True)
        else:
            pairs = zip(numbers.tolist(), blocks.tolist(), strict=True)
        found: dict[int, tuple[Span, int]] = {}
        for number, block in pairs:
            if number != _NONE and number not in found:
                span = self._spans[number]
                assert span is not None, "blocks of a span that is gone"
                found[number] = (span, block)
        return list(found.values())

    def make(self, blocks: Sequence[int]) -> Span:
        """Of these blocks, each right below the one before."""
        number = self._free.pop() if self._free else len(self._spans)
        span = Span(number, blocks[0], blocks[-1], len(blocks))
        if number == len(self._spans):
            self._spans.append(span)
        else:
            self._spans[number] = span
        self._mark(blocks, number)
        return span

    def extend(self, span: Span, blocks: Sequence[int]) -> None:
        """More blocks right below its tail."""
        span.tail = blocks[-1]
        span.size += len(blocks)
        span.ghost = _NONE
        self._mark(blocks, span.number)

    def size_down_to(self, span: Span, block: int) -> int:
        """How many of its blocks there are from its head to this one."""
        depth = self._tree.depth
        return span.size - int(depth.item(span.tail) - depth.item(block))

    def split(self, span: Span, size: int) -> Span:
        """It keeps its upper `size` blocks; the rest becomes another span of the same history, which is answered."""
        lower = self._tree.path_above(span.tail, span.size - size)[::-1].tolist()
        below = self.make(lower)
        for name in (
            "class_",
            "spell",
            "start_s",
            "last_s",
            "uses",
            "marks",
            "kids",
            "child",
            "ghost",
        ):
            setattr(below, name, getattr(span, name))
        below.rows = span.rows
        span.tail = int(self._tree.parent[lower[0]])
        span.size = size
        span.kids = 1
        span.ghost = _NONE
        span.child = lower[0]
        return below

    def cut(self, blocks: Rows) -> list[tuple[Span, Rows]]:
        """These blocks go, leaf first, of which tree and index still know: the spans that they were of, each with those that it lost."""
        lost: list[tuple[Span, Rows]] = []
        start, total = 0, len(blocks)
        while start < total:
            span = self.of(int(blocks[start]))
            if span is None:
                start += 1
                continue
            count = min(self.size_down_to(span, int(blocks[start])), total - start)
            top = int(blocks[start + count - 1])
            lost.append((span, blocks[start : start + count]))
            span.size -= count
            span.tail = int(self._tree.parent[top])
            span.kids, span.child = 0, _NONE
            if not span.size:
                self._spans[span.number] = None
                self._free.append(span.number)
            start += count
        known = blocks[blocks < len(self._of)]
        self._of[known] = _NONE
        return lost

    def _mark(self, blocks: Sequence[int], number: int) -> None:
        if len(blocks) > _FEW:
            self._of[np.asarray(blocks)] = number
        else:
            for block in blocks:
                self._view[block] = number
