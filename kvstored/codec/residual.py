"""P and B sections of frames made before `lanes`: what was written then is read, and no more is written.

Differences as there, put into bins by the reference's exponent, each with a Huffman code of its own; values that differ by more than a byte
follow as their differences.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvstored.codec.differences import WIDE, predicted, put_near, put_wide, take_words
from kvstored.codec.elements import FORMS, Bytes, Element, Words, exponents_of
from kvstored.codec.streams import Reader

_SAMPLE = 1024
_STRETCH = 1 << 15
Bins = list[NDArray[np.bool_]]
"""A mask over the values for each bin; none means one bin."""


def decode(
    reader: Reader, target: Words, references: Sequence[Words], element: Element, bins: int
) -> None:
    reference = predicted(references)
    if FORMS[element].width_bytes == 4:
        take_words(reader, target, reference)
        return
    in_bins = _binned(reference, element, bins)
    if FORMS[element].width_bytes == 1:
        np.add(_take_binned(reader, in_bins, len(target)), reference, out=target)
        return
    if reader.take_number() == WIDE:
        high = _take_binned(reader, in_bins, len(target))
        put_wide(target, reference, high, _take_binned(reader, in_bins, len(target)))
        return
    count = reader.take_number()
    symbols = _take_binned(reader, in_bins, len(target))
    where, escaped = put_near(reader, target, reference, symbols, count)
    target[where] = reference[where] + escaped


def _binned(reference: Words, element: Element, bins: int) -> Bins:
    """Which values are in which bin, of about equal counts. A function of the reference alone: both sides make the same."""
    if bins < 2 or not len(reference):
        return []
    exponents = exponents_of(reference, element)
    sample = np.sort(exponents[:: max(1, len(exponents) // _SAMPLE)])
    cuts = np.unique(sample[[len(sample) * i // bins for i in range(1, bins)]])
    below = [exponents < cut for cut in cuts]
    middle = [lower ^ upper for lower, upper in pairwise(below)]
    return [below[0], *middle, exponents >= cuts[-1]]


def _take_binned(reader: Reader, bins: Bins, count: int) -> Bytes:
    if not bins:
        return reader.take(count)
    values = np.empty(count, dtype=np.uint8)
    for mask in bins:
        part = reader.take(int(np.count_nonzero(mask)))
        for span, where, filled in _runs(mask):
            values[span][where] = part[filled]
    return values


def _runs(mask: NDArray[np.bool_]) -> Iterator[tuple[slice, NDArray[np.intp], slice]]:
    """A stretch of the values, where in it the bin's are, and which of the bin's these are.

    Positions are eight times as long as what they select: by stretches they stay in the cache, and their memory with the allocator.
    """
    filled = 0
    for begin in range(0, len(mask), _STRETCH):
        span = slice(begin, begin + _STRETCH)
        where = np.flatnonzero(mask[span])
        yield span, where, slice(filled, filled + len(where))
        filled += len(where)
