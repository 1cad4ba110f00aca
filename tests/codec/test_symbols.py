"""Symbol sections with counts, positions and orders that no encoder writes: Corrupt, whatever else they say."""

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from kvstored.codec import symbols
from kvstored.codec.elements import Element
from kvstored.codec.streams import Reader, Writer
from kvstored.errors import Corrupt

TILE = (1, 4, 8)
VALUES = 32


def section(order: NDArray[np.uint16] | None, where: list[int], count: int) -> NDArray[np.uint8]:
    """A BF16 section of 32 zeros but for what is given."""
    out = np.zeros(4096, dtype=np.uint8)
    writer = Writer(out, 0)
    writer.begin(len(out))
    writer.add(np.full(8, 47, dtype=np.uint8))
    writer.add(np.zeros(1, dtype=np.uint8))
    if order is None:
        writer.add_number(0)
        writer.add(np.zeros(VALUES, dtype=np.uint8))
    else:
        writer.add_number(2)
        writer.add(order.view(np.uint8))
        for _ in range(2):
            writer.add(np.zeros(VALUES // 2, dtype=np.uint8))
    writer.add_number(count)
    writer.add(np.asarray(where, dtype="<u4").view(np.uint8))
    writer.add(np.full(len(where), 0x7FC1, dtype="<u2").view(np.uint8))
    writer.add(np.zeros(VALUES * 3 // 4, dtype=np.uint8))
    return out[: writer.end()]


def decoded(stored: NDArray[np.uint8]) -> NDArray[np.uint16]:
    target = np.ones(VALUES, dtype="<u2")
    reader = Reader(stored, zstandard.ZstdDecompressor())
    symbols.decode(reader, target, Element.BF16, TILE)
    reader.end()
    return target


def test_exceptions_are_put_where_they_belong() -> None:
    for order in (None, np.arange(8, dtype=np.uint16)[::-1].copy()):
        expected = np.zeros(VALUES, dtype=np.uint16)
        expected[[3, 31]] = 0x7FC1
        assert np.array_equal(decoded(section(order, [3, 31], 2)), expected)


def test_an_exception_outside_of_the_section_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="outside"):
        decoded(section(None, [VALUES], 1))


def test_more_exceptions_than_values_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="more exceptions"):
        decoded(section(None, [0], 1 << 31))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 6], [0, 1, 2, 3, 4, 5, 6, 9]])
def test_an_order_of_columns_that_is_no_permutation_is_corrupt(order: list[int]) -> None:
    with pytest.raises(Corrupt, match="permutation"):
        decoded(section(np.asarray(order, dtype=np.uint16), [], 0))
