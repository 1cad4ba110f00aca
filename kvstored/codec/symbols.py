"""Sections of floating-point elements: one byte a value that is worth modelling, and the rest of its bits as they are.

The symbol is the sign, the exponent as its distance from a base, and the first mantissa bits: they go through one Huffman code together,
so that what they tell of each other is used. With a known layout every channel (column of a tile) has its own base and its own usual sign; else the
section has one base. Channels may be sorted into classes of like spread, each with a code of its own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.codec import bits
from kvstored.codec.channels import Tile, usual
from kvstored.codec.elements import FORMS, Bytes, Element, Form, Words
from kvstored.codec.streams import Reader, Writer
from kvstored.errors import Corrupt

_CENTRE = np.uint8(47)
"""Where the base lies in the 64 distances of a wide exponent: small values spread far down, large ones hardly up."""
_SIGN = np.uint8(0x80)
_EXCEPTIONS_SHARE = 64
"""A wide section with more than 1/64 of exceptions is not worth its symbols."""
_LINES_MAX = 1 << 16
"""Columns of a section that can be sorted."""


@dataclass(frozen=True, slots=True)
class _Model:
    """A base and a usual sign (0 or 0x80) of each column of each tile, shaped to be broadcast over the section."""

    base: Bytes
    sign: Bytes


def encode(writer: Writer, words: Words, element: Element, tile: Tile, classes: int) -> bool:
    """False, and nothing written, where the section has too many exceptions."""
    form = FORMS[element]
    top, low = _halves(words, form)
    if _is_wide(form):
        if not _add_wide(writer, top, tile, classes):
            return False
    else:
        high = (top >> 8).astype(np.uint8) if form.width_bytes > 1 else top.astype(np.uint8)
        _narrow_symbols(writer, high.reshape(tile), form, classes)
        if form.width_bytes > 1:
            writer.add_noise(top.astype(np.uint8))
    if low is not None:
        writer.add_noise(low.astype(np.uint8))
        writer.add_noise((low >> 8).astype(np.uint8))
    return True


def decode(reader: Reader, target: Words, element: Element, tile: Tile) -> None:
    form = FORMS[element]
    count = len(target)
    if _is_wide(form):
        top: Words = target if form.width_bytes == 2 else np.empty(count, dtype="<u2")
        _wide_values(reader, top, tile)
    elif form.width_bytes == 1:
        _narrow_values(reader, tile, form, target.view(np.uint8).reshape(tile))
        return
    else:
        high = np.empty(count, dtype=np.uint8)
        _narrow_values(reader, tile, form, high.reshape(tile))
        _merge(target, high, reader.take(count))
        return
    if form.width_bytes == 4:
        low, middle = reader.take(count), reader.take(count)
        np.copyto(target, top)
        np.left_shift(target, 16, out=target)
        np.bitwise_or(target, low, out=target)
        np.bitwise_or(target, np.left_shift(middle, 8, dtype="<u4"), out=target)


def _is_wide(form: Form) -> bool:
    """Whether sign and exponent alone fill more than a byte."""
    return form.exponent_bits == 8


def _halves(words: Words, form: Form) -> tuple[Words, Words | None]:
    """The 16 bits with sign and exponent, and the 16 below them where there are."""
    if form.width_bytes < 4:
        return words, None
    return (words >> 16).astype("<u2"), words.astype("<u2")


def _merge(target: Words, high: Bytes, low: Bytes) -> None:
    np.copyto(target, high)
    np.left_shift(target, 8, out=target)
    np.bitwise_or(target, low, out=target)


# Sign and up to 7 bits below it in one byte: FP8, and the upper byte of FP16


def _narrow_symbols(writer: Writer, high: Bytes, form: Form, classes: int) -> None:
    kept = 7 - form.exponent_bits
    exponents = (high >> np.uint8(kept)) & np.uint8((1 << form.exponent_bits) - 1)
    model = _modelled(exponents, high & _SIGN)
    _add_model(writer, model)
    symbols = (high - (model.base * np.uint8(1 << kept))) & np.uint8(0x7F)
    symbols |= (high & _SIGN) ^ model.sign
    _add_symbols(writer, symbols, exponents, model.base, classes)


def _narrow_values(reader: Reader, tile: Tile, form: Form, target: Bytes) -> None:
    kept = 7 - form.exponent_bits
    model = _take_model(reader, tile)
    symbols = _take_symbols(reader, tile)
    np.add(symbols, model.base * np.uint8(1 << kept), out=target)
    np.bitwise_and(target, np.uint8(0x7F), out=target)
    np.bitwise_or(target, (symbols & _SIGN) ^ model.sign, out=target)


# Sign and 8 bits of exponent: BF16, and the upper half of FP32


def _add_wide(writer: Writer, words: Words, tile: Tile, classes: int) -> bool:
    exponents = (words >> 7).astype(np.uint8).reshape(tile)
    high, low = (words >> 8).astype(np.uint8).reshape(tile), words.astype(np.uint8)
    high &= _SIGN
    model = _modelled(exponents, high)
    exponents -= model.base - _CENTRE
    where = _exceptions(exponents)
    if where is None:
        return False
    _add_model(writer, model)
    symbols = exponents + exponents  # of exceptions it is anything: they are put right at the end
    symbols |= high ^ model.sign
    symbols |= ((low >> np.uint8(6)) & np.uint8(1)).reshape(tile)
    _add_symbols(writer, symbols, exponents, _CENTRE, classes)
    writer.add_number(len(where))
    writer.add(where.astype("<u4").view(np.uint8))
    writer.add(words[where].view(np.uint8))
    writer.add_noise(bits.pack_six(low & np.uint8(0x3F)))
    return True


def _exceptions(distances: Bytes) -> NDArray[np.intp] | None:
    """Which values lie outside of the 64 distances; None where they are too many."""
    if distances.max(initial=0) < 64:
        return np.zeros(0, dtype=np.intp)
    outside = distances.reshape(-1) > 63
    if np.count_nonzero(outside) * _EXCEPTIONS_SHARE > outside.size:
        return None
    return np.flatnonzero(outside)


def _wide_values(reader: Reader, target: Words, tile: Tile) -> None:
    model = _take_model(reader, tile)
    symbols = _take_symbols(reader, tile)
    count = reader.take_number()
    if count > len(target):
        raise Corrupt(f"section has more exceptions than values: {count=} values={len(target)}")
    where = reader.take(4 * count).view("<u4")
    which = reader.take(2 * count).view("<u2")
    if count and where.max() >= len(target):
        raise Corrupt(f"exception lies outside of its section: at={where.max()}")
    low = bits.unpack_six(reader.take(bits.packed_bytes(len(target))), len(target))
    exponents = (symbols >> np.uint8(1)) & np.uint8(0x3F)
    exponents += model.base - _CENTRE
    high = (symbols & _SIGN) ^ model.sign
    high |= exponents >> np.uint8(1)
    low |= (exponents * np.uint8(128)).reshape(-1)
    low |= ((symbols & np.uint8(1)) * np.uint8(64)).reshape(-1)
    _merge(target, high.reshape(-1), low)
    target[where] = which


# The model of columns, and symbols by class of columns


def _modelled(exponents: Bytes, signs: Bytes) -> _Model:
    """Means over some of the rows: enough to be near, and a quarter of the work."""
    tiles, rows, _ = exponents.shape
    if rows == 1:
        some = exponents.reshape(-1)[::16]
        base = np.full((tiles, 1, 1), round(float(some.mean())) if some.size else 0, dtype=np.uint8)
        return _Model(base, np.zeros_like(base))
    step = max(1, rows // 64)
    count = -(-rows // step)
    base = usual(exponents)
    negative = np.add.reduce(
        signs[:, ::step] >> np.uint8(7), axis=1, dtype=np.uint32, keepdims=True
    )
    return _Model(base, (negative * 2 > count).astype(np.uint8) * np.uint8(128))


def _add_model(writer: Writer, model: _Model) -> None:
    writer.add(model.base.reshape(-1))
    writer.add(np.packbits(model.sign.reshape(-1)))


def _take_model(reader: Reader, tile: Tile) -> _Model:
    tiles, rows, columns = tile
    shape = (tiles, 1, columns if rows > 1 else 1)
    count = shape[0] * shape[2]
    base = reader.take(count).reshape(shape)
    signs = np.unpackbits(reader.take(-(-count // 8)), count=count).reshape(shape)
    return _Model(base, signs * np.uint8(128))


def _add_symbols(
    writer: Writer, symbols: Bytes, exponents: Bytes, base: Bytes | np.uint8, classes: int
) -> None:
    """One stream, or, by columns, one for each class of columns, which spread alike around their base, and their order before."""
    tiles, rows, columns = symbols.shape
    if classes < 2 or rows == 1 or tiles * columns > _LINES_MAX:
        writer.add_number(0)
        writer.add(symbols.reshape(-1))
        return
    by_column = np.ascontiguousarray(symbols.swapaxes(1, 2)).reshape(tiles * columns, rows)
    spread = np.abs((exponents - base).view(np.int8))
    wide = np.add.reduce(spread, axis=1, dtype=np.uint32).reshape(-1)
    turned = np.add.reduce(symbols >> np.uint8(7), axis=1, dtype=np.uint32).reshape(-1)
    order = np.argsort(wide.astype(np.int64) + turned, kind="stable")
    writer.add_number(classes)
    writer.add(order.astype("<u2").view(np.uint8))
    for part in np.array_split(order, classes):
        writer.add(np.take(by_column, part, axis=0).reshape(-1))


def _take_symbols(reader: Reader, tile: Tile) -> Bytes:
    tiles, rows, columns = tile
    classes = reader.take_number()
    if classes == 0:
        return reader.take(tiles * rows * columns).reshape(tile)
    lines = tiles * columns
    if classes > lines or lines > _LINES_MAX:
        raise Corrupt(f"section has more classes than columns: {classes=} columns={lines}")
    order = reader.take(2 * lines).view("<u2")
    if not np.array_equal(np.sort(order), np.arange(lines, dtype=np.uint16)):
        raise Corrupt("order of columns is no permutation")
    by_column = np.empty((lines, rows), dtype=np.uint8)
    for part in np.array_split(order, classes):
        by_column[part] = reader.take(len(part) * rows).reshape(-1, rows)
    return np.ascontiguousarray(by_column.reshape(tiles, columns, rows).swapaxes(1, 2))
