"""Whole blocks to frames and back: I frames alone, P and B frames against one or two blocks of the same length.

Bytes in, bytes out; a call keeps nothing. Encoding and decoding run without the interpreter lock but for short calls a section.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
import zstandard

from kvstored.codec import header as layout
from kvstored.codec import report, sections
from kvstored.codec.elements import Bytes
from kvstored.codec.header import Header, Reference
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.sections import Layout
from kvstored.codec.streams import Writer
from kvstored.errors import Corrupt, InvalidArgument


@dataclass(frozen=True, slots=True)
class Known:
    """A block that a frame refers to, with its plain bytes."""

    reference: Reference
    plain: Bytes


def known(key: bytes, plain: Bytes) -> Known:
    """Hashes `plain`; pass the checksum to `Reference` yourself where it is known."""
    return Known(Reference(key, checksum_of(plain)), plain)


def checksum_of(plain: Bytes) -> int:
    """xxh3-64; `update` lets other threads run."""
    hasher = xxhash.xxh3_64()
    hasher.update(plain.data)
    return hasher.intdigest()


def encode(
    plain: Bytes, plan: Plan, references: Sequence[Known] = (), shape: tuple[int, ...] = ()
) -> Bytes:
    """One frame in memory of its own; as `encode_into`."""
    out = np.empty(stored_bytes_max(len(plain), plan, len(references), len(shape)), dtype=np.uint8)
    return out[: encode_into(out, plain, plan, references, shape)]


def stored_bytes_max(plain_bytes: int, plan: Plan, references: int = 0, dimensions: int = 0) -> int:
    """A frame is never longer: what cannot be shrunk is stored raw."""
    sections_count = -(-plain_bytes // plan.section_bytes)
    return plain_bytes + layout.size_of(dimensions, references, sections_count)


def encode_into(
    out: Bytes,
    plain: Bytes,
    plan: Plan,
    references: Sequence[Known] = (),
    shape: tuple[int, ...] = (),
) -> int:
    """One frame at the start of `out`, which has `stored_bytes_max`; its size.

    With references every section of a lossless plan is of differences, where that is smaller than raw; they must be as long as `plain`.
    A lossy frame's checksum and largest error are of what it decodes to. Raises InvalidArgument where references do not fit.
    """
    _check_references(len(plain), references)
    steps, section = plan.steps, plan.section_bytes_for(len(references))
    if references and not plan.is_lossy:
        steps = (plan.against,)
    form = Layout(plan.element, plan.rows, plan.columns)
    begins = range(0, len(plain), section)
    writer = Writer(out, layout.size_of(len(shape), len(references), len(begins)))
    rows: list[tuple[int, int, int, int]] = []
    for i, begin in enumerate(begins):
        part = plain[begin : begin + section]
        others = [other.plain[begin : begin + section] for other in references]
        step, size_bytes = sections.encode(writer, part, steps[i % len(steps)], form, others)
        rows.append((size_bytes, step.method, step.parameter, checksum_of(part)))
    header = Header(
        element=plan.element,
        plain_bytes=len(plain),
        stored_bytes=writer.size_bytes,
        checksum=checksum_of(plain),
        section_bytes=section,
        rows=plan.rows,
        columns=plan.columns,
        shape=shape,
        references=tuple(other.reference for other in references),
        sections=layout.table(rows),
        is_lossy=any(Method(method).is_lossy for _, method, _, _ in rows),
        error_max=0.0,
    )
    if header.is_lossy:
        header = _described(out[: header.stored_bytes], header, plain, references)
    np.copyto(out[: header.header_bytes], layout.pack(header))
    return header.stored_bytes


def decode(stored: Bytes, target: Bytes, references: Sequence[Known] = ()) -> Header:
    """Fill `target` with the whole block; Corrupt unless it is exactly as long, the references are the frame's own, and all checksums match."""
    header = parsed(stored, len(target))
    _decode_sections(stored, header, target, references, range(len(header.sections)))
    if checksum_of(target) != header.checksum:
        raise Corrupt("decoded bytes do not match the frame's checksum")
    return header


def decode_range(
    stored: Bytes, begin: int, end: int, references: Sequence[Known] = (), *, plain_bytes: int
) -> Bytes:
    """Bytes `begin` to `end` of a block of `plain_bytes`, from the sections that hold them; the others are not looked at.

    Layers of a block that has them in order are equal parts of it: `layer_range` gives the bytes.
    """
    if not 0 <= begin <= end <= plain_bytes:
        raise InvalidArgument(f"range lies outside of the block: {begin=} {end=} {plain_bytes=}")
    header = parsed(stored, plain_bytes)
    if begin == end:
        return np.zeros(0, dtype=np.uint8)
    first, last = begin // header.section_bytes, (end - 1) // header.section_bytes
    offset = first * header.section_bytes
    part = np.empty(min((last + 1) * header.section_bytes, plain_bytes) - offset, dtype=np.uint8)
    _decode_sections(stored, header, part, references, range(first, last + 1), is_part=True)
    return part[begin - offset : end - offset]


def layer_range(plain_bytes: int, layers: int, begin: int, end: int) -> tuple[int, int]:
    """Where layers `begin` to `end` of `layers` lie in a block that holds them one after the other."""
    if layers < 1 or plain_bytes % layers or not 0 <= begin <= end <= layers:
        raise InvalidArgument(f"no such layers: {layers=} {begin=} {end=} {plain_bytes=}")
    size = plain_bytes // layers
    return begin * size, end * size


def parsed(stored: Bytes, plain_bytes: int) -> Header:
    """The header of a frame of just these lengths."""
    header = layout.parse(stored, plain_bytes_max=plain_bytes)
    if header.plain_bytes != plain_bytes or header.stored_bytes != len(stored):
        raise Corrupt(
            f"frame has another length: plain={header.plain_bytes} expected={plain_bytes} "
            f"stored={header.stored_bytes} bytes={len(stored)}"
        )
    return header


def _decode_sections(
    stored: Bytes,
    header: Header,
    target: Bytes,
    references: Sequence[Known],
    which: range,
    *,
    is_part: bool = False,
) -> None:
    """`target` begins where the first of these sections does."""
    if tuple(other.reference for other in references) != header.references:
        raise Corrupt(f"frame refers to other blocks: references={header.references}")
    if any(len(other.plain) != header.plain_bytes for other in references):
        raise Corrupt("a reference of the frame has another length")
    ends = np.cumsum(header.sections["stored_bytes"], dtype=np.int64) + header.header_bytes
    form = Layout(header.element, header.rows, header.columns)
    decompressor = zstandard.ZstdDecompressor()
    entries, size = header.sections[which.start : which.stop].tolist(), header.section_bytes
    for i, (stored_bytes, method, parameter, _, checksum) in zip(which, entries, strict=True):
        at, end = (i - which.start) * size, int(ends[i])
        part = target[at : at + size]
        sections.decode(
            stored[end - stored_bytes : end],
            part,
            Step(Method(method), parameter),
            form,
            [other.plain[i * size : (i + 1) * size] for other in references],
            decompressor,
        )
        if is_part and checksum_of(part) != checksum:
            raise Corrupt(f"section does not match its checksum: section={i}")


def _described(frame: Bytes, header: Header, plain: Bytes, references: Sequence[Known]) -> Header:
    """The header of a lossy frame: what it decodes to, and how far that is from `plain`."""
    decoded = np.empty(len(plain), dtype=np.uint8)
    which = range(len(header.sections))
    _decode_sections(frame, header, decoded, references, which)
    true = header.sections.copy()
    step = header.section_bytes
    true["checksum"] = [checksum_of(decoded[i * step : (i + 1) * step]) for i in which]
    return replace(
        header,
        sections=true,
        checksum=checksum_of(decoded),
        error_max=report.error_max(plain, decoded, header.element),
    )


def _check_references(plain_bytes: int, references: Sequence[Known]) -> None:
    if len(references) > 2 or any(len(other.plain) != plain_bytes for other in references):
        raise InvalidArgument(
            f"references do not fit: bytes={[len(r.plain) for r in references]} {plain_bytes=}"
        )
