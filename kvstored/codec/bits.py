"""Packs the low six bits of bytes, four bytes to three. Segments of the whole array are laid over each other, so that every step is one
vector operation; neighbouring values do not share a byte. Bytes are multiplied where they would be shifted left: numpy has no vector loop for that.
"""

import numpy as np

from kvstored.codec.elements import Bytes

_LOW = np.uint8(0x3F)


def packed_bytes(count: int) -> int:
    return 3 * -(-count // 4)


def pack_six(values: Bytes) -> Bytes:
    """`values` are below 64; 3/4 of their bytes, rounded up to whole threes."""
    quarter = -(-len(values) // 4)
    if len(values) < 4 * quarter:
        values = np.concatenate([values, np.zeros(4 * quarter - len(values), dtype=np.uint8)])
    parts, last = values[: 3 * quarter].reshape(3, quarter), values[3 * quarter :]
    packed = np.empty(3 * quarter, dtype=np.uint8)
    rows = packed.reshape(3, quarter)
    for i in range(3):
        np.multiply(last >> np.uint8(2 * i), np.uint8(64), out=rows[i])
    np.bitwise_or(rows, parts, out=rows)
    return packed


def unpack_six(packed: Bytes, count: int) -> Bytes:
    """`count` values out of `packed_bytes(count)` bytes."""
    quarter = len(packed) // 3
    rows = packed.reshape(3, quarter)
    values = np.empty(4 * quarter, dtype=np.uint8)
    np.bitwise_and(packed, _LOW, out=values[: 3 * quarter])
    last = values[3 * quarter :]
    np.right_shift(rows[0], np.uint8(6), out=last)
    for i in (1, 2):
        np.bitwise_or(last, (rows[i] >> np.uint8(6)) * np.uint8(4**i), out=last)
    return values[:count]
