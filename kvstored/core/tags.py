"""What engines say that a block holds: names, numbers, field labels, signatures. Such blocks may turn hot with a query that nobody can foresee.

Advice that fades: a tagged block is passed over by the next few victims only, ever fewer as its tag grows older, is not called cold for attention that
leaves it alone, and comes up before others of its kind. It keeps nothing and deletes nothing. 17 bytes a block row, made by the first tag.
"""

from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from kvstored.core.index import FingerprintIndex
from kvstored.core.types import Rows

HALF_LIFE_S = 600.0
LIFE_S = 4 * HALF_LIFE_S
"""Then it is forgotten."""


class Tag(IntFlag):
    """Kinds of content, as one byte a block; several at once where a block has several."""

    ENTITY = 1
    NUMBER = 2
    FIELD_LABEL = 4
    SIGNATURE = 8


KNOWN = int(Tag.ENTITY | Tag.NUMBER | Tag.FIELD_LABEL | Tag.SIGNATURE)


class Tags:
    """`_low` names the block that a row was of when it was tagged."""

    def __init__(self, index: FingerprintIndex) -> None:
        self._index = index
        self._kinds: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._low: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self._at_s: NDArray[np.float64] = np.zeros(0)
        self._told_s = -np.inf

    def tell(self, blocks: Rows, kinds: NDArray[np.uint8], now_s: float) -> None:
        """In place of what was told of them before; 0 takes a tag away."""
        if not len(blocks):
            return
        self._room(int(blocks.max()) + 1)
        self._kinds[blocks], self._at_s[blocks] = kinds, now_s
        self._low[blocks] = self._index.fingerprints[blocks, 0]
        self._told_s = now_s

    def is_heard(self, now_s: float) -> bool:
        """Whether any tag may still count."""
        return now_s - self._told_s < LIFE_S

    def ever(self, blocks: Rows) -> NDArray[np.bool_]:
        """Which have a tag that was not taken away, however old."""
        tagged: NDArray[np.bool_] = np.zeros(len(blocks), dtype=np.bool_)
        if len(self._kinds):
            known = np.minimum(blocks, len(self._kinds) - 1)
            same = self._low[known] == self._index.fingerprints[known, 0]
            tagged = (self._kinds[known] != 0) & same & (known == blocks)
        return tagged

    def warmth(self, blocks: Rows, now_s: float) -> NDArray[np.float64]:
        """1 when told, half of it every HALF_LIFE_S; 0 without a tag."""
        warmth = np.zeros(len(blocks))
        if self.is_heard(now_s):
            known = np.flatnonzero((blocks >= 0) & (blocks < len(self._kinds)))
            at = blocks[known]
            age_s = np.maximum(now_s - self._at_s[at], 0.0)
            fine = (self._kinds[at] != 0) & (age_s < LIFE_S)
            fine &= self._low[at] == self._index.fingerprints[at, 0]
            warmth[known[fine]] = np.exp2(-age_s[fine] / HALF_LIFE_S)
        return warmth

    def of(self, block: int, now_s: float) -> Tag:
        """What still counts of it."""
        at = np.asarray([block], dtype=np.int32)
        return Tag(int(self._kinds[block])) if self.warmth(at, now_s)[0] else Tag(0)

    def _room(self, rows: int) -> None:
        more = max(rows, len(self._index.fingerprints)) - len(self._kinds)
        if more > 0:
            self._kinds = np.concatenate((self._kinds, np.zeros(more, dtype=np.uint8)))
            self._low = np.concatenate((self._low, np.zeros(more, dtype=np.uint64)))
            self._at_s = np.concatenate((self._at_s, np.zeros(more)))
