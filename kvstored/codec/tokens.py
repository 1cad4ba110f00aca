"""Sections as differences along tokens: to the previous row, or to the first of every k rows.

On the models measured so far this loses against `symbols` (docs/codec.md); the planner takes it only where a sample shows that it wins. Needs the layout.
"""

import numpy as np
from numpy.typing import NDArray

from kvstored.codec import planes, zigzag
from kvstored.codec.channels import Tile
from kvstored.codec.elements import Words
from kvstored.codec.streams import Reader, Writer


def encode(writer: Writer, words: Words, tile: Tile, every: int) -> None:
    """`every` 0: the previous row; k: the last row whose number is a multiple of k. The first row, or each k-th, stays as it is."""
    rows = words.reshape(tile)
    difference = rows.copy()
    if every == 0:
        difference[:, 1:] -= rows[:, :-1]
    else:
        key, is_other = _keyed(tile[1], every)
        difference[:, is_other] -= rows[:, key[is_other]]
    planes.encode(writer, zigzag.folded(difference.reshape(-1)))


def decode(reader: Reader, target: Words, tile: Tile, every: int) -> None:
    folded = np.empty_like(target)
    planes.decode(reader, folded)
    difference = zigzag.unfolded(folded).reshape(tile)
    rows = target.reshape(tile)
    if every == 0:
        np.add.accumulate(difference, axis=1, out=rows)
        return
    np.copyto(rows, difference)
    key, is_other = _keyed(tile[1], every)
    rows[:, is_other] += difference[:, key[is_other]]


def _keyed(rows: int, every: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """The key row of each row, and which rows are none."""
    number = np.arange(rows)
    key = number // every * every
    return key, key != number
