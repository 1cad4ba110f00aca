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
        self._add(blocks, ())

    def stored(self, blocks: Rows) -> None:
        """Blocks that became readable by a put, each right below the one before or of another path."""
        tree = self._tables.tree
        cuts = [0, len(blocks)]
        if len(blocks) > 1:
            is_cut = tree.parent[blocks[1:]] != blocks[:-1]
            cuts[1:1] = (np.flatnonzero(is_cut) + 1).tolist()
        for begin, end in pairwise(cuts):
            run = blocks[begin:end]
            parent = tree.parent.item(run.item(0))
            above: tuple[int, ...] = ()
            if parent >= 0:
                path = tree.path(parent)[::-1]
                above = tuple(self._lows(path))
            self._add(run, above)

    def digest(self, now_s: float) -> None:
        self.curve.digest(USES_A_STEP, now_s)

    def _add(self, blocks: Rows, above: tuple[int, ...]) -> None:
        tables = self._tables
        if not len(blocks):
            return
        ns = tables.blocks.ns.item(blocks.item(0))
        spec = tables.layouts[ns].spec
        tokens = tables.blocks.valid[blocks]
        depths = tables.tree.depth[blocks].astype(np.float64) * spec.block_tokens
        flops = tokens * (
            (spec.flops_base or FLOPS_A_TOKEN) + spec.flops_slope * (depths + tokens / 2)
        )
        lows = tables.index.fingerprints[blocks, 0]
        below = lows < self.curve.threshold if self.curve.threshold < 1 << 64 else slice(None)
        uses = sampled(lows[below].tolist(), self._units_of(ns), flops[below].tolist(), self.curve)
        self.curve.add(Path(uses, above if uses else ()), len(blocks), float(flops.sum()))

    def _lows(self, blocks: Rows) -> list[int]:
        lows = self._tables.index.fingerprints[blocks, 0]
        if self.curve.threshold < 1 << 64:
            lows = lows[lows < self.curve.threshold]
        found: list[int] = lows.tolist()
        return found

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
