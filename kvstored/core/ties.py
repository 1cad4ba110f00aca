"""What the objectives decide where nothing else does: which of the blocks that attention left alone leaves first, and what is written when not all can be.

Among page-ins they are the order itself (page_ins.py). Values are taken in powers of two, as there: small differences leave it to the next objective.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.columns import CLEAN
from kvstored.core.plan import Objective
from kvstored.core.rows import Tables
from kvstored.core.types import Rows

Values = NDArray[np.int64]


def leaves_first(tables: Tables, copies: Rows, objectives: Sequence[Objective]) -> int:
    """Place of the one, by the first objective in which they differ; else the first of them.

    For the hit rate it is what saves fewest FLOPs a byte; for what transfers and decoding wait for, what a slower tier has: it is loaded again and not
    computed; for the footprint the larger one.
    """
    table = tables.copies
    is_only = (table.flags[copies] & CLEAN == 0).astype(np.int64)
    values = {
        Objective.HIT_RATE: np.asarray([tables.weight(copy) for copy in copies.tolist()]),
        Objective.TRANSFER: is_only,
        Objective.DECODE: is_only,
        Objective.FOOTPRINT: -_magnitude(table.units[copies]),
    }
    return int(_order([values[objective] for objective in objectives])[0])


def admitted_in_order(tables: Tables, copies: Rows, objectives: Sequence[Objective]) -> Rows:
    """Copies that wait for NVMe: what was hit more often, what running requests or pins hold, the smaller ones. Where paths are read from
    their root a parent is hit and held as often as its children at least, and stays before them."""
    table, blocks = tables.copies, tables.blocks
    at = table.block[copies]
    is_free = (blocks.holds[at] == 0).astype(np.int64)
    values = {
        Objective.HIT_RATE: -_magnitude(blocks.hits[at]),
        Objective.TRANSFER: is_free,
        Objective.DECODE: is_free,
        Objective.FOOTPRINT: _magnitude(table.units[copies]),
    }
    ordered: Rows = copies[_order([values[objective] for objective in objectives])]
    return ordered


def _order(values: Sequence[Values]) -> Values:
    """Least first by the first that differs; equal ones as they come."""
    order: Values = np.lexsort(values[::-1])
    return order


def _magnitude(values: NDArray[np.uint32]) -> Values:
    """Bits of each."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)
