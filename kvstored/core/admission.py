"""What is worth being written to NVMe: a path that is large enough, that loads faster than it is computed, within the day's budget.

The path of a block ends where its run of the prefix tree does: blocks of one run are written or left together, so that no hole is in it.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvstored.core.advice import Prefill
from kvstored.core.groups import required_bytes
from kvstored.core.rows import Tables
from kvstored.core.speed import Line
from kvstored.core.types import NamespaceId, Rows, TierId, as_rows
from kvstored.core.write_budget import WriteBudget, WriteState

Mask = NDArray[np.bool_]
STICKY = 1.25
"""A speed that decisions are made by follows the measured one once it is off by so much: what is at the edge does not flap."""


class Refusal(StrEnum):
    ONE_HIT = "one-hit"
    SMALL = "small"
    RECOMPUTE = "recompute"


class Admission:
    """`refused`: copies that write-back passed over, by why, since the last look."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        book = tables.space.books.get(TierId.NVME)
        self._min_bytes = book.limits.min_benefit_bytes if book else 0
        self.budget = WriteBudget(book.limits.write_budget_bytes if book else 0)
        self._load: Line | None = None
        self._prefill: dict[NamespaceId, Prefill] = {}
        self.refused: Counter[Refusal] = Counter()

    def know(self, load: Line, prefill: Mapping[NamespaceId, Prefill]) -> None:
        """How fast bytes come back out of NVMe, and how fast engines compute, as measured. Namespaces that are not told of are always worth it."""
        if self._load is None or not _is_near(load.size_s, self._load.size_s):
            self._load = load
        for ns, speed in prefill.items():
            known = self._prefill.get(ns)
            if known is None or not _is_near(speed.work_per_s, known.work_per_s):
                self._prefill[ns] = speed

    def take_refused(self) -> Counter[Refusal]:
        refused, self.refused = self.refused, Counter()
        return refused

    def refuses(self, blocks: Rows, now_s: float) -> Mask | None:
        """Which of these blocks of one namespace are not worth it; None for none of them. Nothing is counted."""
        weighed = [each for each in self._weighed(blocks, now_s).values() if each is not None]
        return np.logical_or.reduce(weighed) if weighed else None

    def refusal(self, block: int, now_s: float) -> Refusal | None:
        """Why this one is not worth it."""
        weighed = self._weighed(as_rows([block]), now_s).items()
        return next((why for why, mask in weighed if mask is not None and mask[0]), None)

    def count(self, blocks: Rows, now_s: float) -> None:
        """These were refused, each for the first reason that there is."""
        left = np.ones(len(blocks), dtype=np.bool_)
        for refusal, mask in self._weighed(blocks, now_s).items():
            if mask is not None:
                self.refused[refusal] += int(np.count_nonzero(left & mask))
                left &= ~mask

    def _weighed(self, blocks: Rows, now_s: float) -> dict[Refusal, Mask | None]:
        if not len(blocks):
            return {}
        return {
            Refusal.ONE_HIT: self._one_hits(blocks, now_s),
            Refusal.SMALL: self._small(blocks),
            Refusal.RECOMPUTE: self._better_computed(blocks),
        }

    def _one_hits(self, blocks: Rows, now_s: float) -> Mask | None:
        if self.budget.state(now_s) is WriteState.OPEN:
            return None
        tables = self._tables
        once: Mask = (tables.blocks.hits[blocks] == 0) & (tables.tree.children[blocks] < 2)
        return once

    def _small(self, blocks: Rows) -> Mask | None:
        """Ends of paths only: what is shared by several is read with each of them."""
        if not self._min_bytes:
            return None
        tails, ends = self._tables.tree.run_ends(blocks)
        block_bytes = self._block_bytes(blocks)
        is_end = self._tables.tree.children[tails] == 0
        small: Mask = is_end & ((ends + 1) * block_bytes < self._min_bytes)
        return small

    def _better_computed(self, blocks: Rows) -> Mask | None:
        ns = NamespaceId(int(self._tables.blocks.ns[blocks[0]]))
        prefill, load = self._prefill.get(ns), self._load
        if prefill is None or load is None or prefill.work_per_s <= 0:
            return None
        _, ends = self._tables.tree.run_ends(blocks)
        count = (ends + 1).astype(np.float64)
        computed = prefill.seconds(count * self._tables.layouts[ns].spec.block_tokens)
        loaded = load.fixed_s + load.size_s * count * self._block_bytes(blocks)
        slower: Mask = loaded >= computed
        return slower

    def _block_bytes(self, blocks: Rows) -> int:
        spec = self._tables.layout_of(int(blocks[0])).spec
        return required_bytes(spec, spec.block_tokens)


def _is_near(value: float, known: float) -> bool:
    return known / STICKY <= value <= known * STICKY
