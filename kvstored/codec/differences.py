"""What all sections of differences share, however their bytes are laid out: the prediction, and how values are put together again."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.codec import planes, zigzag
from kvstored.codec.elements import Bytes, Words
from kvstored.codec.streams import Reader
from kvstored.errors import Corrupt

# These numbers are part of the format: a decoder does the same.
ESCAPE = 255
BIAS = 127
"""Differences of -127 to 127 are one byte; others are escaped."""
WIDE = 1
"""Both bytes of every difference are coded."""


def predicted(references: Sequence[Words]) -> Words:
    """The reference, or the mean of two, rounded down, without a carry out of the width."""
    if len(references) == 1:
        return references[0]
    one, other = references
    mean: Words = (one & other) + np.right_shift(one ^ other, 1)
    return mean


def take_words(reader: Reader, target: Words, reference: Words) -> None:
    """Of four bytes, whose differences lie as planes."""
    folded = np.empty_like(target)
    planes.decode(reader, folded)
    np.add(zigzag.unfolded(folded), reference, out=target)


def put_wide(target: Words, reference: Words, high: Bytes, low: Bytes) -> None:
    folded = np.left_shift(high.astype("<u2"), 8) | low
    np.add(zigzag.unfolded(folded), reference, out=target)


def put_near(
    reader: Reader, target: Words, reference: Words, symbols: Bytes, count: int
) -> tuple[NDArray[np.intp], Words]:
    """All but the escapes; answers where these are and what follows for them, which should be `count`."""
    where = np.flatnonzero(symbols == ESCAPE)
    if len(where) != count:
        raise Corrupt(f"section has another number of escapes: {count=} found={len(where)}")
    escaped = np.empty(count, dtype="<u2")
    planes.decode(reader, escaped)
    np.subtract(reference, np.uint16(BIAS), out=target)
    np.add(target, symbols, out=target)
    return where, escaped
