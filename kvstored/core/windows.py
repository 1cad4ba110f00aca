"""Recent windows of running requests: class P1, by block row.

A request holds its window with its path, as far as the share of running requests goes. What is beyond it can be evicted, and its row be given to
another block: so who leaves is told here.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import Rows


class Windows:
    """`loose`: running requests whose path is not held whole: only of these is a block of a window ever a candidate to leave."""

    def __init__(self) -> None:
        self._owners: dict[int, set[int]] = {}
        self.loose = 0

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, block: int) -> bool:
        return block in self._owners

    def enter(self, blocks: Iterable[int], owner: int) -> None:
        for block in blocks:
            self._owners.setdefault(block, set()).add(owner)

    def leave(self, blocks: Iterable[int], owner: int) -> None:
        """Blocks that were forgotten meanwhile, or whose row is another's now, are passed over."""
        for block in blocks:
            owners = self._owners.get(block)
            if owners is not None:
                owners.discard(owner)
                if not owners:
                    del self._owners[block]

    def forget(self, blocks: Rows) -> None:
        """Rows that are given back."""
        if self.loose:
            for block in blocks.tolist():
                self._owners.pop(block, None)

    def still(self, blocks: Sequence[int], owner: int) -> list[int]:
        """Those that entered and were not forgotten."""
        return [block for block in blocks if owner in self._owners.get(block, ())]

    def among(self, blocks: Rows) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.zeros(len(blocks), dtype=np.bool_)
        if self._owners:
            found[:] = [block in self._owners for block in blocks.tolist()]
        return found
