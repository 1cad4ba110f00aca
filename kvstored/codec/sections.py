"""One section of a frame: plain bytes to streams and back, by the method it is given. What a method cannot shrink is stored raw."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from kvstored.codec import exponents, lanes, lossy, planes, residual, symbols, tokens
from kvstored.codec.elements import FORMS, Bytes, Element, words_of
from kvstored.codec.plan import RAW, Method, Step, tile_of
from kvstored.codec.streams import Reader, Writer
from kvstored.errors import Corrupt


@dataclass(frozen=True, slots=True)
class Layout:
    """How the elements of every section of a frame lie."""

    element: Element
    rows: int
    columns: int


def encode(
    writer: Writer, plain: Bytes, step: Step, layout: Layout, references: Sequence[Bytes]
) -> tuple[Step, int]:
    """The step that was taken in the end, and the stored section's size."""
    if step.method is not Method.RAW:
        writer.begin(len(plain))
        taken = _encoded(writer, plain, step, layout, references)
        size_bytes = writer.end()
        if size_bytes:
            return taken, size_bytes
    writer.raw(plain)
    return RAW, len(plain)


def _encoded(
    writer: Writer, plain: Bytes, step: Step, layout: Layout, references: Sequence[Bytes]
) -> Step:
    if step.method is Method.ZSTD:
        writer.add_leveled(plain, step.parameter or 1)
        return step
    body, tail = cut(plain, layout.element)
    words = words_of(body, layout.element)
    tile = tile_of(len(words), layout.rows, layout.columns)
    parts = [words_of(cut(r, layout.element)[0], layout.element) for r in references]
    taken = step
    if step.method is Method.LANES:
        lanes.encode(writer, words, parts, layout.element, step.parameter)
    elif step.method is Method.TOKENS:
        tokens.encode(writer, words, tile, step.parameter)
    else:
        if step.method.is_lossy and not lossy.encode(
            writer, words, parts, layout.element, tile, step
        ):
            taken = Step(Method.SYMBOLS)
        if taken.method is Method.SYMBOLS and (
            layout.element is Element.OPAQUE
            or not symbols.encode(writer, words, layout.element, tile, taken.parameter)
        ):
            taken = Step(Method.PLANES)
        if taken.method is Method.EXPONENTS:
            if words.dtype.itemsize > 1:
                exponents.encode(writer, words, layout.element, tile)
            else:
                taken = Step(Method.PLANES)
        if taken.method is Method.PLANES:
            planes.encode(writer, words)
    writer.add(tail)
    return taken


def decode(
    stored: Bytes,
    target: Bytes,
    step: Step,
    layout: Layout,
    references: Sequence[Bytes],
    decompressor: zstandard.ZstdDecompressor,
) -> None:
    """Fill `target`, or raise Corrupt."""
    if step.method is Method.RAW:
        if len(stored) != len(target):
            raise Corrupt(f"raw section has another length: {len(stored)} of {len(target)}")
        np.copyto(target, stored)
        return
    reader = Reader(stored, decompressor)
    if step.method is Method.ZSTD:
        np.copyto(target, reader.take(len(target)))
        reader.end()
        return
    body, tail = cut(target, layout.element)
    words = words_of(body, layout.element)
    tile = tile_of(len(words), layout.rows, layout.columns)
    if step.method is Method.SYMBOLS:
        if layout.element is Element.OPAQUE:
            raise Corrupt("symbols of opaque bytes")
        symbols.decode(reader, words, layout.element, tile)
    elif step.method is Method.EXPONENTS:
        if words.dtype.itemsize == 1:
            raise Corrupt("exponents of elements of one byte")
        exponents.decode(reader, words, tile)
    elif step.method is Method.TOKENS:
        tokens.decode(reader, words, tile, step.parameter)
    elif step.method is Method.PLANES:
        planes.decode(reader, words)
    else:
        parts = [words_of(cut(r, layout.element)[0], layout.element) for r in references]
        if step.method in (Method.LANES, Method.RESIDUAL) and not parts:
            raise Corrupt("differences without a reference")
        if step.method is Method.LANES:
            lanes.decode(reader, words, parts, layout.element)
        elif step.method is Method.RESIDUAL:
            residual.decode(reader, words, parts, layout.element, step.parameter)
        else:
            lossy.decode(reader, words, parts, layout.element, tile, step)
    np.copyto(tail, reader.take(len(tail)))
    reader.end()


def cut(plain: Bytes, element: Element) -> tuple[Bytes, Bytes]:
    """Whole elements, and what is left of a last one."""
    whole = len(plain) // FORMS[element].width_bytes * FORMS[element].width_bytes
    return plain[:whole], plain[whole:]
