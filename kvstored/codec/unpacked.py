"""Frames with their entropy coding undone and nothing more: what crosses to a GPU, where the rest of the decoding is done.

A section crosses as byte planes, as exponents and the bytes beside them, as codes with their scales, or, where a GPU does not know its method, as plain
bytes. `expand` is what a GPU does with each; its kernels are held to it bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvstored.codec import blocks, exponents, frame, lossy, sections
from kvstored.codec.blocks import Known
from kvstored.codec.channels import Tile
from kvstored.codec.elements import FORMS, Bytes, Element, Words
from kvstored.codec.frame import Codec
from kvstored.codec.header import Header
from kvstored.codec.lossy import BY_CHANNEL
from kvstored.codec.plan import Method, Step, tile_of
from kvstored.codec.sections import Layout
from kvstored.codec.streams import Reader
from kvstored.codec.values import Floats, words_of_floats
from kvstored.errors import Corrupt

ROTATED_COLUMNS_MAX = 256
"""A thread turns a row in its own memory."""
ALIGNMENT = 16
"""Of each section's bytes, so that wide loads are possible."""
_Row = tuple[int, ...]
_NOTHING = np.zeros(0, dtype=np.uint8)


class Crossing(IntEnum):
    """How a section's bytes lie. PLANES: most significant byte first, each plane whole. UNIFORM: least value and scale of each group, both
    float16, then a code a value, group by group. ROTATED: a float16 each row, then a code a value. BOUNDED: the step as float32, numbers and words of
    the `groups` values that are kept exactly, 4 bytes each, then a code a value. EXPONENTS: numbers of the `length` exceptions, 4 bytes each, their first
    bytes, the `groups` bases, the pairs or first bytes (`grid` is their form), and the other bytes, the second ones first."""

    PLAIN = 0
    PLANES = 1
    UNIFORM = 2
    ROTATED = 3
    BOUNDED = 4
    EXPONENTS = 5


SECTION = np.dtype(
    [
        ("source", "<u8"), ("target", "<u8"),
        ("begin", "<u4"), ("end", "<u4"), ("count", "<u4"), ("crossing", "<u4"), ("width", "<u4"), ("element", "<u4"),
        ("rows", "<u4"), ("columns", "<u4"), ("length", "<u4"), ("by_channel", "<u4"), ("grid", "<u4"), ("groups", "<u4"),
    ]
)  # fmt: skip
"""As `struct Section` of the kernels. `source`: where its packed bytes begin; `target`: where element `begin` goes. Elements `begin` to `end` of its
`count` are wanted: a section over two extents is in the table twice."""
Sections = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """One piece. Targets of `sections` are offsets in the plain piece."""

    packed: Bytes
    sections: Sections
    plain_bytes: int


def unpack(
    codec: int, stored: Bytes, plain_bytes: int, references: Sequence[Known] = ()
) -> Unpacked:
    """Corrupt where the frame is not sound as far as that can be seen without its plain bytes, whose checksum is still to be compared."""
    if codec != Codec.FRAME or references:
        plain = np.empty(plain_bytes, dtype=np.uint8)
        frame.decode(codec, stored, [plain], references)
        return as_it_is(plain)
    return _unpacked(stored, blocks.parsed(stored, plain_bytes))


def as_it_is(plain: Bytes) -> Unpacked:
    return Unpacked(plain, _table([_plain_row(0, 0, len(plain))]), len(plain))


def plain_of(piece: Unpacked) -> Bytes:
    """All of it, as a GPU would make it."""
    whole = np.empty(piece.plain_bytes, dtype=np.uint8)
    for section in piece.sections:
        begin = int(section["target"])
        size = (int(section["end"]) - int(section["begin"])) * int(section["width"])
        expand(piece.packed, section, whole[begin : begin + size])
    return whole


def expand(packed: Bytes, section: np.void, target: Bytes) -> None:
    """Elements `begin` to `end` of one section into `target`, which has just their bytes."""
    source, count = int(section["source"]), int(section["count"])
    begin, end, width = (int(section[name]) for name in ("begin", "end", "width"))
    if section["crossing"] >= Crossing.UNIFORM:
        whole = _WHOLE[Crossing(int(section["crossing"]))](packed[source:], section)
        np.copyto(target, whole[begin:end].view(np.uint8))
        return
    runs = packed[source : source + count * width].reshape(width, count)
    if section["crossing"] == Crossing.PLANES:  # the first plane is the last byte of each element
        np.copyto(target.reshape(-1, width), runs[::-1, begin:end].T)
    else:
        np.copyto(target, runs.reshape(-1)[begin * width : end * width])


# ---- unpacking


def _unpacked(stored: Bytes, header: Header) -> Unpacked:
    if header.references:
        raise Corrupt(f"frame refers to other blocks: references={header.references}")
    form = Layout(header.element, header.rows, header.columns)
    decompressor = zstandard.ZstdDecompressor()
    parts: list[Bytes] = []
    rows: list[_Row] = []
    at, level = header.header_bytes, 0
    for i, (stored_bytes, method, parameter, _, _) in enumerate(header.sections.tolist()):
        begin = i * header.section_bytes
        size = min(header.section_bytes, header.plain_bytes - begin)
        step, mine = Step(Method(method), parameter), stored[at : at + stored_bytes]
        at += stored_bytes
        for row, streams in _crossing(mine, size, step, form, decompressor):
            rows.append((level, begin + row[1], *row[2:]))
            parts += streams
            held = sum(map(len, streams))
            padding = -held % ALIGNMENT
            parts.append(np.zeros(padding, dtype=np.uint8))
            level += held + padding
    return Unpacked(np.concatenate(parts or [_NOTHING]), _table(rows), header.plain_bytes)


def _crossing(
    stored: Bytes,
    plain_bytes: int,
    step: Step,
    form: Layout,
    decompressor: zstandard.ZstdDecompressor,
) -> list[tuple[_Row, list[Bytes]]]:
    """Rows of the section, whose targets begin at 0, each with the bytes that cross for it."""
    crossing = _CROSSINGS.get(step.method)
    tile = tile_of(plain_bytes // FORMS[form.element].width_bytes, form.rows, form.columns)
    is_wide = crossing is Crossing.ROTATED and tile[2] > ROTATED_COLUMNS_MAX
    if crossing is None or form.element is Element.OPAQUE or is_wide:
        plain = np.empty(plain_bytes, dtype=np.uint8)
        sections.decode(stored, plain, step, form, (), decompressor)
        return [(_plain_row(0, 0, plain_bytes), [plain])]
    reader = Reader(stored, decompressor)
    width = FORMS[form.element].width_bytes
    count, tail_bytes = divmod(plain_bytes, width)
    if crossing is Crossing.PLANES:
        row, streams = _planes(reader, count, form.element)
    elif crossing is Crossing.EXPONENTS:
        row, streams = _exponents(reader, count, tile, form.element)
    elif crossing is Crossing.UNIFORM:
        row, streams = _uniform(reader, count, tile, step.parameter, form.element)
    elif crossing is Crossing.ROTATED:
        row, streams = _rotated(reader, count, tile, step.parameter, form.element)
    else:
        row, streams = _bounded(reader, count, form.element)
    made: list[tuple[_Row, list[Bytes]]] = [(row, streams)]
    tail = reader.take(tail_bytes)
    reader.end()
    if tail_bytes:
        made.append((_plain_row(0, count * width, tail_bytes), [tail]))
    return made


def _planes(reader: Reader, count: int, element: Element) -> tuple[_Row, list[Bytes]]:
    streams = [reader.take(count) for _ in range(FORMS[element].width_bytes)]
    return _row(Crossing.PLANES, count, element), streams


def _exponents(
    reader: Reader, count: int, tile: Tile, element: Element
) -> tuple[_Row, list[Bytes]]:
    first = exponents.take(reader, tile)
    others = [reader.take(count) for _ in range(FORMS[element].width_bytes - 1)]
    rest = (*tile[1:], len(first.where), 0, first.form, len(first.base))
    row = _row(Crossing.EXPONENTS, count, element, rest)
    return row, [first.where.view(np.uint8), first.which, first.base, first.packed, *others]


def _uniform(
    reader: Reader, count: int, tile: Tile, parameter: int, element: Element
) -> tuple[_Row, list[Bytes]]:
    low, scale, codes = lossy.take_uniform(reader, tile, parameter)
    groups, length = lossy.group_shape(tile, parameter)
    by_channel, grid = divmod(parameter, BY_CHANNEL)
    row = _row(Crossing.UNIFORM, count, element, (*tile[1:], length, by_channel, grid, groups))
    return row, [low.view(np.uint8), scale.view(np.uint8), codes]


def _rotated(
    reader: Reader, count: int, tile: Tile, parameter: int, element: Element
) -> tuple[_Row, list[Bytes]]:
    norm, codes = lossy.take_rotated(reader, tile, parameter)
    row = _row(Crossing.ROTATED, count, element, (*tile[1:], 0, 0, parameter, len(norm)))
    return row, [norm.view(np.uint8), codes]


def _bounded(reader: Reader, count: int, element: Element) -> tuple[_Row, list[Bytes]]:
    dtype = np.dtype(f"<u{FORMS[element].width_bytes}")
    step, codes, where, exact = lossy.take_bounded(reader, count, dtype)
    row = _row(Crossing.BOUNDED, count, element, (0, 0, 0, 0, 0, len(where)))
    words = exact.astype(np.uint32)
    return row, [*(part.view(np.uint8) for part in (step, where, words)), codes]


def _row(
    crossing: Crossing, count: int, element: Element, rest: Sequence[int] = (0, 0, 0, 0, 0, 0)
) -> _Row:
    """Of a whole section whose source and target are not known yet."""
    return (0, 0, 0, count, count, crossing, FORMS[element].width_bytes, element, *rest)


def _plain_row(source: int, target: int, size_bytes: int) -> _Row:
    return (source, target, 0, size_bytes, size_bytes, Crossing.PLAIN, 1, 0, 0, 0, 0, 0, 0, 0)


def _table(rows: Sequence[_Row]) -> Sections:
    return np.array(list(rows), dtype=SECTION)


def _exponents_words(packed: Bytes, section: np.void) -> Words:
    count, exceptions, bases = (int(section[name]) for name in ("count", "length", "groups"))
    tile = _tile_of(section)
    form, width = int(section["grid"]), int(section["width"])
    sizes = [4 * exceptions, exceptions, bases, count // 2 if form == exponents.PAIRED else count]
    where, which, base, first, rest = np.split(packed, np.cumsum(sizes))
    others = rest[: (width - 1) * count].reshape(width - 1, count)
    stored = exponents.First(form, base, first, where.view("<u4"), which)
    words = np.empty(count, dtype=f"<u{width}")
    exponents.merge(words, exponents.first_bytes(stored, tile), list(others))
    return words


def _uniform_words(packed: Bytes, section: np.void) -> Words:
    groups, count = int(section["groups"]), int(section["count"])
    halves = packed[: 4 * groups].view("<u2")
    codes = packed[4 * groups : 4 * groups + count]
    parameter = int(section["grid"]) + BY_CHANNEL * int(section["by_channel"])
    tile = _tile_of(section)
    with np.errstate(all="ignore"):  # a damaged frame may hold any numbers
        return _words(
            lossy.uniform_values(halves[:groups], halves[groups:], codes, tile, parameter), section
        )


def _rotated_words(packed: Bytes, section: np.void) -> Words:
    rows, count = int(section["groups"]), int(section["count"])
    codes = packed[2 * rows : 2 * rows + count]
    columns, bits = int(section["columns"]), int(section["grid"])
    with np.errstate(all="ignore"):  # as above
        values = lossy.rotated_values(packed[: 2 * rows].view("<u2"), codes, columns, bits)
        return _words(values, section)


def _bounded_words(packed: Bytes, section: np.void) -> Words:
    kept, count = int(section["groups"]), int(section["count"])
    table = packed[: 4 + 8 * kept]
    codes = packed[4 + 8 * kept : 4 + 8 * kept + count]
    with np.errstate(all="ignore"):  # as above
        words = _words(lossy.bounded_values(table[:4].view("<f4"), codes), section)
    where, exact = table[4:].view("<u4").reshape(2, kept)
    words[where] = exact.astype(words.dtype)
    return words


def _tile_of(section: np.void) -> Tile:
    count, rows, columns = (int(section[name]) for name in ("count", "rows", "columns"))
    return (count // (rows * columns), rows, columns) if count else (1, 1, 0)


def _words(values: Floats, section: np.void) -> Words:
    """A difference from nothing, as in the codec: -0 becomes 0."""
    return words_of_floats(values.reshape(-1) + np.float32(0), Element(int(section["element"])))


_CROSSINGS = {
    Method.PLANES: Crossing.PLANES,
    Method.EXPONENTS: Crossing.EXPONENTS,
    Method.UNIFORM: Crossing.UNIFORM,
    Method.ROTATED: Crossing.ROTATED,
    Method.BOUNDED: Crossing.BOUNDED,
}
_WHOLE = {
    Crossing.EXPONENTS: _exponents_words,
    Crossing.UNIFORM: _uniform_words,
    Crossing.ROTATED: _rotated_words,
    Crossing.BOUNDED: _bounded_words,
}
