"""Plain sections: byte planes of the elements, one stream each, or all bytes in one stream. Assumes nothing of their order."""

import numpy as np

from kvstored.codec.elements import Bytes, Words
from kvstored.codec.streams import Reader, Writer


def encode(writer: Writer, words: Words) -> None:
    """Most significant byte first."""
    shifts = _shifts(words)
    for shift in shifts[:-1]:
        writer.add(_byte(words, shift))
    writer.add_noise(_byte(words, 0))


def decode(reader: Reader, target: Words) -> None:
    shifts = _shifts(target)
    np.copyto(target, reader.take(len(target)))
    for _ in shifts[1:]:
        np.left_shift(target, 8, out=target)
        np.bitwise_or(target, reader.take(len(target)), out=target)


def _byte(words: Words, shift: int) -> Bytes:
    if words.dtype.itemsize == 1:
        return words.astype(np.uint8, copy=False)
    return (words >> shift if shift else words).astype(np.uint8)


def _shifts(words: Words) -> range:
    return range(8 * (words.dtype.itemsize - 1), -1, -8)
