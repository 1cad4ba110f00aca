"""Channels of a tile, the columns of its tokens' rows: which exponent is usual in each."""

import numpy as np

from kvstored.codec.elements import Bytes

Tile = tuple[int, int, int]
"""Tiles, rows (tokens) and columns (channels) of a section; (1, 1, n) where the layout is not known."""

_SAMPLED = 64
"""Rows that are looked at, at least; at most twice as many, whose sum 16 bits hold."""


def usual(exponents: Bytes) -> Bytes:
    """Of each column of each tile: the mean, where all that is more than one below the mean counts as one below, rounded up from 0.3.

    Values near zero reach far down, and would move a plain mean away from where most are. A median is no better and takes five times as long.
    """
    tiles, rows, columns = exponents.shape
    some = exponents[:, :: max(1, rows // _SAMPLED)].swapaxes(0, 1).copy()
    least = np.maximum(_mean(some, len(some) // 2), np.uint8(1)) - np.uint8(1)
    np.maximum(some, least, out=some)
    return _mean(some, len(some) * 7 // 10).reshape(tiles, 1, columns)


def _mean(some: Bytes, rounding: int) -> Bytes:
    total = np.add.reduce(some, axis=0, dtype=np.uint16)
    mean: Bytes = ((total + np.uint16(rounding)) // np.uint16(len(some))).astype(np.uint8)
    return mean
