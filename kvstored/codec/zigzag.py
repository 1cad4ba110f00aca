"""Differences modulo their width as small numbers: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4."""

import numpy as np

from kvstored.codec.elements import Words


def folded(difference: Words) -> Words:
    width = difference.dtype.itemsize
    one = difference.dtype.type(1)
    sign = difference.view(np.dtype(f"<i{width}")) >> (8 * width - 1)
    result: Words = np.bitwise_xor(np.left_shift(difference, one), sign.view(difference.dtype))
    return result


def unfolded(words: Words) -> Words:
    one = words.dtype.type(1)
    result: Words = np.right_shift(words, 1) ^ (~(words & one) + one)
    return result
