"""In which order copies travel between tiers: dense parts first and whole, since nothing of a path is of use without them, then sparse ones by heat."""

from collections.abc import Sequence

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import CopyTask
from kvstored.core.copying import Copying
from kvstored.core.feedback import Feedback
from kvstored.core.types import Part, Rows, TierId, as_rows

OF_TAG = 0.5
"""Heat of a fresh tag: what is selected in every second step."""


def loads_in_order(
    books: Books, feedback: Feedback, loads: Sequence[Copying], now_s: float
) -> list[Copying]:
    """Up to memory: of sparse ones those first that attention selects or an engine tagged, then by temperature class. What has one part keeps its order."""
    block = books.copies.block

    def order(copying: Copying) -> tuple[int, float, int]:
        if copying.part is not Part.SPARSE or not isinstance(copying, CopyTask):
            return int(copying.part is Part.SPARSE), 0.0, 0
        row = block.item(copying.source_copy)
        warmth = books.tags.warmth(as_rows([row]), now_s).item(0)
        heat = max(feedback.heat(row, copying.part, now_s), OF_TAG * warmth)
        return 1, -round(heat, 3), int(copying.heat)

    if not any(each.part is Part.SPARSE and each.target is TierId.DRAM for each in loads):
        return list(loads)
    return sorted(loads, key=order)


def parts_in_order(books: Books, copies: Rows) -> Rows:
    """Down from memory: dense ones, sparse ones, window and state, each as they were. Room below is taken in this order too, so that a path's dense
    parts lie together."""
    parts = books.copies.part[copies]
    if not (np.diff(parts.astype(np.int8)) < 0).any():
        return copies
    ordered: Rows = copies[np.argsort(parts, kind="stable")]
    return ordered
