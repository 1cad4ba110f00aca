"""Sections of elements of two or four bytes, with the exponents apart from all else, as their distance from what is usual in their channels.

Of bfloat16 and float32 almost all distances are one of sixteen: two of them, of neighbouring tokens in one channel, make a byte that goes through a Huffman
code. That is half as many bytes to code as with byte planes, hardly two runs of them are alike by chance, which is what zstd loses its time with, and what
the two tell of each other is used. Where too many distances lie outside, and of float16, whose exponent is shorter, the eight bits behind the sign are a
byte of their own instead. The second byte of an element holds the sign and the seven bits behind those eight; others stand as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.codec.channels import Tile, usual
from kvstored.codec.elements import FORMS, Bytes, Element, Words
from kvstored.codec.streams import Reader, Writer
from kvstored.errors import Corrupt

SINGLE, PAIRED = 0, 1
"""How the first bytes of a section lie."""
_BELOW = np.uint8(12)
"""Distances from 12 below the base to 3 above it are paired: small values reach far down, large ones hardly up."""
_LOW = np.uint8(0x0F)
_HIGH = np.uint8(16)
"""numpy has no vector loop for bytes that are shifted left."""
_SIGN = np.uint8(0x80)
_REST = np.uint8(0x7F)
_EXCEPTIONS_SHARE = 1 / 256
"""More values than that outside of the sixteen distances, five bytes each, cost what pairs gain."""
_ZEROS_SHARE = 1 / 16
"""With more zeros than that a byte each is shorter without bases, which make as many different bytes of them as there are bases."""
_SAMPLED_EACH = 61
"""Values of which one is looked at before all are."""
_ROWS_TOGETHER = 8
"""Rows that one inner loop goes along: by single rows of 64 channels a base costs twice as much."""

_NOTHING = np.zeros(0, dtype=np.uint8)
_NOWHERE = np.zeros(0, dtype="<u4")


def encode(writer: Writer, words: Words, element: Element, tile: Tile) -> None:
    bits = 8 * words.dtype.itemsize
    first = (words >> (bits - 9)).astype(np.uint8)
    base = _base_of(first, tile, FORMS[element].exponent_bits)
    lines, bases = _lined(first, base, tile)
    distances = np.subtract(lines, bases).reshape(-1)
    where = _exceptions(distances) if FORMS[element].exponent_bits == 8 else None
    if where is None and _share(first[::_SAMPLED_EACH] == 0) > _ZEROS_SHARE:
        base, distances = np.zeros_like(base), first
    writer.add(base.reshape(-1))
    if where is None:
        writer.add_number(SINGLE)
        writer.add(distances)
    else:
        writer.add_number(PAIRED)
        _add_pairs(writer, distances, tile)
        writer.add_number(len(where))
        writer.add(where.astype("<u4").view(np.uint8))
        writer.add(first[where])
    second = (words >> (bits - 16)).astype(np.uint8) if bits > 16 else words.astype(np.uint8)
    second &= _REST
    negative = words.view(f"<i{words.dtype.itemsize}") < 0
    second |= negative.view(np.uint8) * _SIGN
    writer.add_noise(second)
    for shift in range(bits - 24, -1, -8):
        writer.add_noise((words >> shift).astype(np.uint8))


def decode(reader: Reader, target: Words, tile: Tile) -> None:
    first = first_bytes(take(reader, tile), tile)
    others = [reader.take(len(target)) for _ in range(target.dtype.itemsize - 1)]
    merge(target, first, others)


@dataclass(frozen=True, slots=True)
class First:
    """The first bytes of a section as they are stored: `packed` are pairs, or a byte each. `base`: of each column of each tile, or one of all.
    `where`, `which`: exceptions from the pairs."""

    form: int
    base: Bytes
    packed: Bytes
    where: NDArray[np.uint32]
    which: Bytes


def take(reader: Reader, tile: Tile) -> First:
    tiles, rows, columns = tile
    count = tiles * rows * columns
    base = reader.take(tiles * (columns if rows > 1 else 1))
    form = reader.take_number()
    if form == SINGLE:
        return First(form, base, reader.take(count), _NOWHERE, _NOTHING)
    if form != PAIRED:
        raise Corrupt(f"section has exponents of an unknown form: {form=}")
    pairs = reader.take(count // 2)
    exceptions = reader.take_number()
    if exceptions > count:
        raise Corrupt(f"section has more exceptions than values: {exceptions=} values={count}")
    where = reader.take(4 * exceptions).view("<u4")
    which = reader.take(exceptions)
    if exceptions and where.max() >= count:
        raise Corrupt(f"exception lies outside of its section: at={where.max()}")
    return First(form, base, pairs, where, which)


def first_bytes(stored: First, tile: Tile) -> Bytes:
    """The eight bits behind the sign of all elements."""
    if stored.form == SINGLE:
        lines, bases = _lined(stored.packed, stored.base, tile)
        return np.add(lines, bases).reshape(-1)
    first = np.empty(math.prod(tile), dtype=np.uint8)
    first[-1:] = 0  # of an odd number the last one is an exception
    halves = _in_pairs(first, tile)
    pairs = stored.packed.reshape(halves[:, 0].shape)
    np.bitwise_and(pairs, _LOW, out=halves[:, 0])
    np.right_shift(pairs, np.uint8(4), out=halves[:, 1])
    lines, bases = _lined(first, stored.base, tile)
    np.add(lines, bases, out=lines)
    first[stored.where] = stored.which
    return first


def merge(target: Words, first: Bytes, others: Sequence[Bytes]) -> None:
    """Elements out of their first bytes, the second ones and so on."""
    word, bits = target.dtype.type, 8 * target.dtype.itemsize
    np.copyto(target, first)
    np.multiply(target, word(1 << (bits - 9)), out=target)
    second = others[0].astype(target.dtype)
    second *= word((1 << (bits - 8)) + (1 << (bits - 16)))  # once for the sign, once for the rest
    second &= word(0x807F << (bits - 16))
    np.bitwise_or(target, second, out=target)
    for shift, each in zip(range(bits - 24, -1, -8), others[1:], strict=True):
        rest = each.astype(target.dtype)
        np.bitwise_or(target, np.left_shift(rest, shift, out=rest), out=target)


def _base_of(first: Bytes, tile: Tile, exponent_bits: int) -> Bytes:
    """Of each column of each tile, or one of all where the layout is not known. What is left of a first byte less it is a distance."""
    tiles, rows, columns = tile
    shape = tile if rows > 1 else (1, columns, 1)
    if not len(first):
        return np.zeros(tiles * (columns if rows > 1 else 1), dtype=np.uint8)
    if exponent_bits == 8:
        return usual(first.reshape(shape)) - _BELOW
    below = np.uint8(8 - exponent_bits)  # bits of the mantissa in a first byte
    return usual(first.reshape(shape) >> below) * np.uint8(1 << below)


def _exceptions(distances: Bytes) -> NDArray[np.intp] | None:
    """Which lie outside of the sixteen distances, and the last one of an odd number; None where they are too many."""
    if _share(distances[::_SAMPLED_EACH] > _LOW) > _EXCEPTIONS_SHARE:
        return None
    outside = distances > _LOW
    if len(outside) & 1:
        outside[-1] = True
    where = _where(outside)
    return where if len(where) <= 1 + _EXCEPTIONS_SHARE * len(outside) else None


def _share(some: NDArray[np.bool_]) -> float:
    return float(np.count_nonzero(some)) / max(some.size, 1)


def _where(outside: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Of few: eights that have any are looked for first, which takes half the time."""
    if len(outside) % 8:
        return np.flatnonzero(outside)
    eights = np.flatnonzero(outside.view(np.uint64) != 0)
    which, inside = np.nonzero(outside.reshape(-1, 8)[eights])
    found: NDArray[np.intp] = eights[which] * 8 + inside
    return found


def _add_pairs(writer: Writer, distances: Bytes, tile: Tile) -> None:
    """Takes `distances`' memory."""
    distances &= _LOW
    lines = _in_pairs(distances, tile)
    pairs = np.multiply(lines[:, 1], _HIGH)
    pairs |= lines[:, 0]
    writer.add(pairs.reshape(-1))


def _in_pairs(distances: Bytes, tile: Tile) -> Bytes:
    """Lines of which the first and the second of two are paired: two tokens that follow each other, else the halves of what is there."""
    _, rows, columns = tile
    line = columns if rows % 2 == 0 else max(len(distances) // 2, 1)
    return distances[: len(distances) & ~1].reshape(-1, 2, line)


def _lined(values: Bytes, base: Bytes, tile: Tile) -> tuple[Bytes, Bytes]:
    """Both so that they can be added: some rows are one line."""
    tiles, rows, columns = tile
    if rows == 1:
        return values.reshape(1, -1), base.reshape(1, 1)
    together = math.gcd(rows, _ROWS_TOGETHER)
    lines = values.reshape(tiles, rows // together, together * columns)
    return lines, np.tile(base.reshape(tiles, 1, columns), (1, 1, together))
