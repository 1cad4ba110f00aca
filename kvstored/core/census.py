"""How many copies and bytes there are of each temperature class in each tier, counted in slices so that no turn of the loop takes long."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.columns import FIRST, READY
from kvstored.core.types import UNIT_BYTES, Heat, Rows, TierId

SLICE = 16_384
_CLASSES, _TIERS = len(Heat), len(TierId)


@dataclass(frozen=True, slots=True)
class Census:
    """By class and tier."""

    copies: NDArray[np.int64]
    size_bytes: NDArray[np.int64]


def classes_of(books: Books, copies: Rows) -> NDArray[np.uint8]:
    """The class by which each leaves: what is to leave first is cold whatever else it is, unless an exempt sink."""
    heats = heats_of(books, books.copies.block[copies])
    is_first = books.copies.flags[copies] & FIRST != 0
    return np.where(is_first & (heats != Heat.SINK), np.uint8(Heat.COLD), heats)


def heats_of(books: Books, blocks: Rows) -> NDArray[np.uint8]:
    """As `Tables.heat` for each."""
    is_shared = (books.blocks.hits[blocks] > 0) | (books.tree.children[blocks] > 1)
    heats = np.where(is_shared, int(Heat.SHARED), int(Heat.COLD))
    heats = np.where(books.recent.among(blocks), int(Heat.RECENT), heats)
    return np.where(books.are_sinks(blocks), int(Heat.SINK), heats).astype(np.uint8)


def nobody() -> Census:
    shape = _CLASSES, _TIERS
    return Census(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))


def count_slice(books: Books, first: int, into: Census) -> int:
    """Copies by row from `first` on; the row to go on from, -1 after the last. Copies may come and go between calls."""
    table = books.copies
    end = min(first + SLICE, table.top)
    rows = (np.flatnonzero(table.state[first:end] == READY) + first).astype(np.int32)
    if len(rows):
        at = classes_of(books, rows).astype(np.int64) * _TIERS + table.tier[rows]
        units, cells = table.units[rows].astype(np.float64), _CLASSES * _TIERS
        into.copies.ravel()[:] += np.bincount(at, minlength=cells)
        sizes = np.bincount(at, weights=units, minlength=cells).astype(np.int64)
        into.size_bytes.ravel()[:] += sizes * UNIT_BYTES
    return end if end < table.top else -1
