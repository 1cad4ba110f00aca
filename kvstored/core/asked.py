"""What is asked for, block by block, for the curve of hits by capacity: hits, and what is stored because it was missed."""

from itertools import pairwise

import numpy as np

from kvstored.core.curve import Curve, Path, sampled
from kvstored.core.rows import FLOPS_A_TOKEN, Tables
from kvstored.core.space import units_of
from kvstored.core.types import Rows

USES_A_STEP = 64
"""Sampled uses that are taken in at once: 2 ms where the sample is full."""


class Asked:
    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._units: dict[int, int] = {}
        self.curve = Curve()

    def hit(self, blocks: Rows) -> None:
        """Blocks of one path, head to tail."""
        if len(blocks):
            self._add(blocks, [0, len(blocks)], [])

    def stored(self, blocks: Rows) -> None:
        """Blocks that became readable by a put, each right below the one before or of another path."""
        parents = self._tables.tree.parent.take(blocks)
        begins = [0]
        if len(blocks) > 1:
            begins += (np.flatnonzero(parents[1:] != blocks[:-1]) + 1).tolist()
        self._add(blocks, [*begins, len(blocks)], parents[begins].tolist())

    def digest(self, now_s: float) -> None:
        self.curve.digest(USES_A_STEP, now_s)

    def _add(self, blocks: Rows, cuts: list[int], parents: list[int]) -> None:
        """Paths between the cuts; `parents`: of the first of each, where what is above them counts too."""
        tables, curve = self._tables, self.curve
        at = blocks.astype(np.intp)
        ns = tables.blocks.ns.item(blocks.item(0))
        spec, units = tables.layouts[ns].spec, self._units_of(ns)
        tokens = tables.blocks.valid[at]
        depths = tables.tree.depth[at].astype(np.float64) * spec.block_tokens
        flops = tokens * (
            (spec.flops_base or FLOPS_A_TOKEN) + spec.flops_slope * (depths + tokens / 2)
        )
        wholes = np.add.reduceat(flops, cuts[:-1]).tolist()
        lows, ends = tables.index.fingerprints[at, 0], cuts
        if curve.threshold < 1 << 64:
            below = np.flatnonzero(lows < curve.threshold)
            lows, flops, ends = lows[below], flops[below], np.searchsorted(below, cuts).tolist()
        uses, threshold = sampled(lows.tolist(), units, flops.tolist(), curve), curve.threshold
        for i, (begin, end) in enumerate(pairwise(ends)):
            mine = uses[begin:end]
            if curve.threshold < threshold:  # it sank by what was added
                mine = tuple(use for use in mine if use.low < curve.threshold)
            above = self._above(parents[i]) if mine and parents else ()
            curve.add(Path(mine, above), cuts[i + 1] - cuts[i], wholes[i])

    def _above(self, parent: int) -> tuple[int, ...]:
        """What is sampled of the path down to this block, from its end upwards."""
        if parent < 0:
            return ()
        lows = self._tables.index.fingerprints[self._tables.tree.path(parent)[::-1], 0]
        if self.curve.threshold < 1 << 64:
            lows = lows[lows < self.curve.threshold]
        return tuple(lows.tolist())

    def _units_of(self, ns: int) -> int:
        """Of the required groups of a full block."""
        units = self._units.get(ns)
        if units is None:
            spec = self._tables.layouts[ns].spec
            units = self._units[ns] = sum(
                units_of(group.bytes_per_block) * (spec.shards if group.sharded else 1)
                for group in spec.groups
                if group.is_required
            )
        return units
