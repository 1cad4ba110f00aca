"""Sections whose values come back near, not equal: opt-in, and only where `planner.check_lossy` allows it.

With references the values are differences from theirs (of two, from the mean). Decoding is a function of the frame alone: the same
float32 operations in the same order everywhere, so a frame's checksum holds. Sections with values that are not finite are left to a
lossless method.

Parameters. UNIFORM: a Grid, plus 16 where groups run along a channel and not along a token. ROTATED: bits a value, 2 to 4. BOUNDED: the step is the
values' standard deviation in the section over 2 to this power; no value is off by more than half a step and its rounding to the element.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstored.codec import planes
from kvstored.codec.channels import Tile
from kvstored.codec.elements import Element, Words
from kvstored.codec.plan import Method, Step
from kvstored.codec.streams import Reader, Writer
from kvstored.codec.values import Floats, floats_of, words_of_floats
from kvstored.errors import Corrupt, InvalidArgument

GROUP = 64
BY_CHANNEL = 16


class Grid(IntEnum):
    """Levels between the least and the largest value of a group (LEVELS_n are CacheGen's counts), or FP4's own (e2m1)."""

    INT8 = 0
    INT4 = 1
    FP4 = 2
    LEVELS_32 = 3
    LEVELS_16 = 4
    INT3 = 5
    INT2 = 6


_LEVELS = {
    Grid.INT8: 256, Grid.INT4: 16, Grid.LEVELS_32: 32, Grid.LEVELS_16: 16, Grid.INT3: 8, Grid.INT2: 4,
}  # fmt: skip
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_GAUSS = {
    2: np.array([0.4528, 1.510], dtype=np.float32),
    3: np.array([0.2451, 0.7560, 1.344, 2.152], dtype=np.float32),
    4: np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], dtype=np.float32),
}
"""Max's quantiser of a normal distribution of deviation 1, its positive half."""
_ESCAPE = 255


def encode(
    writer: Writer,
    words: Words,
    references: Sequence[Words],
    element: Element,
    tile: Tile,
    step: Step,
) -> bool:
    """False, and nothing written, where this section cannot be coded so."""
    with np.errstate(invalid="ignore"):  # looked at next
        true = floats_of(words, element)
        values = true - _predicted(references, element, len(words))
    if not len(words) or not np.isfinite(values).all():
        return False
    if step.method is Method.UNIFORM:
        return _encode_uniform(writer, values, tile, step.parameter)
    if step.method is Method.ROTATED:
        return _encode_rotated(writer, values, tile, step.parameter)
    assert step.method is Method.BOUNDED
    return _encode_bounded(writer, words, true, values, step.parameter)


def decode(
    reader: Reader,
    target: Words,
    references: Sequence[Words],
    element: Element,
    tile: Tile,
    step: Step,
) -> None:
    if element is Element.OPAQUE:
        raise Corrupt("lossy section of opaque bytes")
    count = len(target)
    predicted = _predicted(references, element, count)
    with np.errstate(all="ignore"):  # a damaged frame may hold any numbers
        if step.method is Method.BOUNDED:
            _decode_bounded(reader, target, predicted, element)
            return
        take = _decode_uniform if step.method is Method.UNIFORM else _decode_rotated
        values = take(reader, tile, step.parameter)
        np.copyto(target, words_of_floats(values.reshape(-1) + predicted, element))


def _predicted(references: Sequence[Words], element: Element, count: int) -> Floats:
    parts = [floats_of(words, element) for words in references]
    if not parts:
        return np.zeros(count, dtype=np.float32)
    return parts[0] if len(parts) == 1 else (parts[0] + parts[1]) * np.float32(0.5)


# A scale and a least value for each group


def _encode_uniform(writer: Writer, values: Floats, tile: Tile, parameter: int) -> bool:
    grouped = _grouped(values, tile, parameter)
    grid = _grid_of(parameter, InvalidArgument)
    if grid is Grid.FP4:
        low = np.zeros(grouped.shape[0], dtype=np.float16)
        scale = (np.abs(grouped).max(axis=1) / _FP4[-1]).astype(np.float16)
    else:
        low = grouped.min(axis=1).astype(np.float16)
        wide = grouped.max(axis=1) - low.astype(np.float32)
        scale = (wide / np.float32(_LEVELS[grid] - 1)).astype(np.float16)
    if not (np.isfinite(low).all() and np.isfinite(scale).all()):
        return False
    divisor = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)[:, None]
    relative = (grouped - low.astype(np.float32)[:, None]) / divisor
    if grid is Grid.FP4:
        nearest = np.searchsorted((_FP4[1:] + _FP4[:-1]) / 2, np.abs(relative)).astype(np.uint8)
        codes = nearest | (relative < 0).astype(np.uint8) << np.uint8(3)
    else:
        codes = np.clip(np.rint(relative), 0, _LEVELS[grid] - 1).astype(np.uint8)
    for side in (low, scale):
        planes.encode(writer, side.view("<u2"))
    writer.add(codes.reshape(-1))
    return True


def take_uniform(
    reader: Reader, tile: Tile, parameter: int
) -> tuple[Words, Words, NDArray[np.uint8]]:
    """What the streams of a UNIFORM section hold: least value and scale of each group as the bits of float16, and a code a value, group by group."""
    _grid_of(parameter, Corrupt)
    groups, length = group_shape(tile, parameter)
    low, scale = np.empty(groups, dtype="<u2"), np.empty(groups, dtype="<u2")
    for side in (low, scale):
        planes.decode(reader, side)
    return low, scale, reader.take(groups * length)


def uniform_values(
    low: Words, scale: Words, codes: NDArray[np.uint8], tile: Tile, parameter: int
) -> Floats:
    """The values of the section, in its order."""
    base, size = (side.view(np.float16).astype(np.float32)[:, None] for side in (low, scale))
    coded = codes.reshape(group_shape(tile, parameter))
    if _grid_of(parameter, Corrupt) is Grid.FP4:
        four = _FP4[coded & np.uint8(7)]
        return _ungrouped(np.where(coded & np.uint8(8), -four, four) * size, tile, parameter)
    return _ungrouped(coded.astype(np.float32) * size + base, tile, parameter)


def _decode_uniform(reader: Reader, tile: Tile, parameter: int) -> Floats:
    return uniform_values(*take_uniform(reader, tile, parameter), tile, parameter)


def _take_halves(reader: Reader, count: int) -> Floats:
    raw = np.empty(count, dtype="<u2")
    planes.decode(reader, raw)
    return raw.view(np.float16).astype(np.float32)


def _grid_of(parameter: int, error: type[Corrupt] | type[InvalidArgument]) -> Grid:
    if parameter & ~BY_CHANNEL not in set(Grid):
        raise error(f"no such grid: {parameter=}")
    return Grid(parameter & ~BY_CHANNEL)


def group_shape(tile: Tile, parameter: int) -> tuple[int, int]:
    """Groups of up to 64 values of one token, or of one channel; where 64 does not divide, the whole line."""
    tiles, rows, columns = tile
    line = rows if parameter & BY_CHANNEL else columns
    length = GROUP if line % GROUP == 0 else line
    return tiles * rows * columns // length, length


def _grouped(values: Floats, tile: Tile, parameter: int) -> Floats:
    shaped = values.reshape(tile)
    if parameter & BY_CHANNEL:
        shaped = shaped.swapaxes(1, 2)
    return np.ascontiguousarray(shaped).reshape(group_shape(tile, parameter))


def _ungrouped(grouped: Floats, tile: Tile, parameter: int) -> Floats:
    tiles, rows, columns = tile
    if not parameter & BY_CHANNEL:
        return grouped.reshape(-1)
    return np.ascontiguousarray(grouped.reshape(tiles, columns, rows).swapaxes(1, 2)).reshape(-1)


# A fixed rotation of each row, then one quantiser for all


def _encode_rotated(writer: Writer, values: Floats, tile: Tile, bits: int) -> bool:
    columns = tile[2]
    if bits not in _GAUSS or columns & columns - 1 or columns > 4096:
        return False
    rows = values.reshape(-1, columns) * _signs(columns)
    turned = _hadamard(rows)  # longer by the root of `columns` than `rows`
    norm = np.sqrt(np.mean(turned * turned, axis=1)).astype(np.float16)
    if not np.isfinite(norm).all():
        return False
    divisor = np.where(norm > 0, norm, np.float16(1)).astype(np.float32)[:, None]
    levels = _GAUSS[bits]
    relative = turned / divisor
    nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(relative)).astype(np.uint8)
    planes.encode(writer, norm.view("<u2"))
    writer.add((nearest | (relative < 0).astype(np.uint8) << np.uint8(bits - 1)).reshape(-1))
    return True


def take_rotated(reader: Reader, tile: Tile, bits: int) -> tuple[Words, NDArray[np.uint8]]:
    """What the streams of a ROTATED section hold: each row's norm as the bits of float16, and a code a value."""
    columns = tile[2]
    if bits not in _GAUSS or columns & columns - 1 or columns > 4096:
        raise Corrupt(f"section cannot be rotated: {bits=} {columns=}")
    norm = np.empty(tile[0] * tile[1], dtype="<u2")
    planes.decode(reader, norm)
    return norm, reader.take(len(norm) * columns)


def rotated_values(norm: Words, codes: NDArray[np.uint8], columns: int, bits: int) -> Floats:
    levels, coded = _GAUSS[bits], codes.reshape(-1, columns)
    size = levels[coded & np.uint8(len(levels) - 1)]
    sign = coded >> np.uint8(bits - 1) & np.uint8(1)
    turned = np.where(sign, -size, size) * norm.view(np.float16).astype(np.float32)[:, None]
    return _hadamard(turned) * (_signs(columns) * np.float32(1 / columns))


def _decode_rotated(reader: Reader, tile: Tile, bits: int) -> Floats:
    return rotated_values(*take_rotated(reader, tile, bits), tile[2], bits)


def _hadamard(rows: Floats) -> Floats:
    """Walsh-Hadamard transform of each row, not normalised: twice is `columns` times the row."""
    columns = rows.shape[1]
    half = 1
    while half < columns:
        pairs = rows.reshape(len(rows), -1, 2, half)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack((left + right, left - right), axis=2).reshape(len(rows), columns)
        half *= 2
    return rows


def _signs(columns: int) -> Floats:
    """The same for everyone, for ever: part of the format."""
    mixed = np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return np.where(mixed >> np.uint64(63), np.float32(-1), np.float32(1))


# A step for the whole section, and what does not fit in a byte exactly


def _encode_bounded(writer: Writer, words: Words, true: Floats, values: Floats, power: int) -> bool:
    step = np.float32(np.std(true) / np.float32(1 << power)) if power < 24 else np.float32(0)
    if not np.isfinite(step) or step <= 0:
        return False
    steps = np.rint(values / step)
    outside = np.abs(steps) > 127
    codes = (np.where(outside, np.float32(128), steps).astype(np.int16) + 127).astype(np.uint8)
    writer.add(np.frombuffer(step.astype("<f4").tobytes(), dtype=np.uint8))
    writer.add(codes)
    planes.encode(writer, words[outside])
    return True


def take_bounded(
    reader: Reader, count: int, dtype: np.dtype[Any]
) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.uint32], Words]:
    """What the streams of a BOUNDED section hold: the step, a code a value, and where which words are kept exactly."""
    step = reader.take(4).view("<f4")
    codes = reader.take(count)
    where = np.flatnonzero(codes == _ESCAPE).astype(np.uint32)
    exact = np.empty(len(where), dtype=dtype)
    planes.decode(reader, exact)
    return step, codes, where, exact


def bounded_values(step: NDArray[np.float32], codes: NDArray[np.uint8]) -> Floats:
    """As far as they are not kept exactly."""
    values: Floats = (codes.astype(np.int16) - 127).astype(np.float32) * step[0]
    return values


def _decode_bounded(reader: Reader, target: Words, predicted: Floats, element: Element) -> None:
    step, codes, where, exact = take_bounded(reader, len(target), target.dtype)
    np.copyto(target, words_of_floats(bounded_values(step, codes) + predicted, element))
    target[where] = exact
