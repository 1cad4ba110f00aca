"""The header of a frame: what is in it, where its sections lie, and what they must decode to. The table of bytes is in DESIGN.md.

Parsing bounds everything by what the caller expects before anything is allocated; whatever is not understood is Corrupt.
"""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.codec.elements import FORMS, Bytes, Element
from kvstored.codec.plan import SECTION_BYTES_MAX, Method
from kvstored.errors import Corrupt

MAGIC = b"KVF1"
VERSION = 1
DIMENSIONS_MAX = 8
KEY_BYTES_MAX = 64
PLAIN_BYTES_MAX = 1 << 36

_FIXED = struct.Struct("<4sBBBBBBHIIIIQQQf8x")
_REFERENCE = struct.Struct("<B7x64sQ")
_CHECKSUM = struct.Struct("<Q")
_LOSSY = 1
SECTION = np.dtype(
    [
        ("stored_bytes", "<u4"),
        ("method", "u1"),
        ("parameter", "u1"),
        ("reserved", "<u2"),
        ("checksum", "<u8"),
    ]
)
Sections = NDArray[np.void]


class Kind(IntEnum):
    """How many other blocks a frame needs to be decoded."""

    I = 0  # noqa: E741 - the field's own names
    P = 1
    B = 2


@dataclass(frozen=True, slots=True)
class Reference:
    """Names a block that a P or B frame was coded against: its key, and the xxh3-64 of its plain bytes."""

    key: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Header:
    """`checksum`: xxh3-64 of the decoded bytes, which in a lossy frame are not the bytes that were put. `error_max`: of any decoded value, 0 if not lossy."""

    element: Element
    plain_bytes: int
    stored_bytes: int
    checksum: int
    section_bytes: int
    rows: int
    columns: int
    shape: tuple[int, ...]
    references: tuple[Reference, ...]
    sections: Sections
    is_lossy: bool
    error_max: float

    @property
    def kind(self) -> Kind:
        return Kind(len(self.references))

    @property
    def header_bytes(self) -> int:
        return size_of(len(self.shape), len(self.references), len(self.sections))

    def methods(self) -> set[Method]:
        return {Method(int(method)) for method in np.unique(self.sections["method"])}


def size_of(dimensions: int, references: int, sections: int) -> int:
    variable = 4 * dimensions + _REFERENCE.size * references + SECTION.itemsize * sections
    return _FIXED.size + variable + _CHECKSUM.size


def pack(header: Header) -> Bytes:
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.element,
        _LOSSY if header.is_lossy else 0,
        len(header.shape),
        len(header.references),
        0,
        len(header.sections),
        header.section_bytes,
        header.rows,
        header.columns,
        header.plain_bytes,
        header.stored_bytes,
        header.checksum,
        header.error_max,
    )
    shape = struct.pack(f"<{len(header.shape)}I", *header.shape)
    references = b"".join(_REFERENCE.pack(len(r.key), r.key, r.checksum) for r in header.references)
    body = fixed + shape + references + header.sections.tobytes()
    return np.frombuffer(body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)), dtype=np.uint8)


def parse(stored: Bytes, *, plain_bytes_max: int = PLAIN_BYTES_MAX) -> Header:
    """The header at the start of `stored`, which may be the frame's beginning only. Corrupt for anything that is not understood."""
    if len(stored) < size_of(0, 0, 0):
        raise Corrupt(f"frame is too short: bytes={len(stored)}")
    (
        magic, version, kind, element, flags, dimensions, reference_count, zero, section_count, section_bytes, rows,
        columns, plain_bytes, stored_bytes, checksum, error_max,
    ) = _FIXED.unpack_from(stored.data)  # fmt: skip
    if magic != MAGIC or version != VERSION:
        raise Corrupt(f"frame is not of this format: {magic=} {version=} expected={VERSION}")
    if plain_bytes > plain_bytes_max:
        raise Corrupt(f"frame claims too much: {plain_bytes=} max={plain_bytes_max}")
    _check_form(kind, element, flags, dimensions, reference_count, zero)
    _check_sections(Element(element), plain_bytes, section_bytes, section_count)
    size = size_of(dimensions, reference_count, section_count)
    if size > len(stored):
        raise Corrupt(f"frame's header is longer than the frame: {size=} bytes={len(stored)}")
    body = stored[: size - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(stored.data, len(body))[0] != xxhash.xxh3_64_intdigest(body.data):
        raise Corrupt("frame's header does not match its checksum")
    at = _FIXED.size + 4 * dimensions
    references = tuple(_reference(stored, at + i * _REFERENCE.size) for i in range(reference_count))
    at += _REFERENCE.size * reference_count
    header = Header(
        element=Element(element),
        plain_bytes=plain_bytes,
        stored_bytes=stored_bytes,
        checksum=checksum,
        section_bytes=section_bytes,
        rows=rows,
        columns=columns,
        shape=struct.unpack_from(f"<{dimensions}I", stored.data, _FIXED.size),
        references=references,
        sections=body[at:].view(SECTION),
        is_lossy=bool(flags & _LOSSY),
        error_max=error_max,
    )
    _check_whole(header)
    return header


def _check_form(
    kind: int, element: int, flags: int, dimensions: int, references: int, zero: int
) -> None:
    if kind > Kind.B or references != kind:
        raise Corrupt(f"frame is of an unknown kind: {kind=} {references=}")
    if element not in FORMS or flags & ~_LOSSY or zero:
        raise Corrupt(f"frame is not understood: {element=} {flags=} {zero=}")
    if dimensions > DIMENSIONS_MAX:
        raise Corrupt(f"frame has too many dimensions: {dimensions=} max={DIMENSIONS_MAX}")


def _check_sections(
    element: Element, plain_bytes: int, section_bytes: int, section_count: int
) -> None:
    width = FORMS[element].width_bytes
    if not 0 < section_bytes <= SECTION_BYTES_MAX or section_bytes % width:
        raise Corrupt(f"frame has impossible sections: {section_bytes=}")
    if section_count != -(-plain_bytes // section_bytes):
        raise Corrupt(f"frame has a wrong number of sections: {section_count=} {plain_bytes=}")


def _reference(stored: Bytes, at: int) -> Reference:
    key_bytes, key, checksum = _REFERENCE.unpack_from(stored.data, at)
    if not 0 < key_bytes <= KEY_BYTES_MAX:
        raise Corrupt(f"frame has an impossible reference: {key_bytes=}")
    return Reference(bytes(key[:key_bytes]), checksum)


def _check_whole(header: Header) -> None:
    known = [method.value for method in Method]
    if not np.isin(header.sections["method"], known).all() or header.sections["reserved"].any():
        raise Corrupt("frame has a section that is not understood")
    payload_bytes = int(header.sections["stored_bytes"].sum(dtype=np.uint64))
    if header.header_bytes + payload_bytes != header.stored_bytes:
        raise Corrupt(f"frame's sections do not add up: stored_bytes={header.stored_bytes}")
    is_lossy = any(method.is_lossy for method in header.methods())
    if is_lossy != header.is_lossy or not (0 <= header.error_max < math.inf):
        raise Corrupt(f"frame says wrongly whether it is lossy: is_lossy={header.is_lossy}")
    if header.shape:
        size = math.prod(header.shape) * FORMS[header.element].width_bytes
        if size != header.plain_bytes:
            raise Corrupt(f"frame's shape is not its length: shape={header.shape}")


def table(rows: list[tuple[int, int, int, int]]) -> Sections:
    """Sections out of (stored bytes, method, parameter, checksum)."""
    sections: NDArray[Any] = np.zeros(len(rows), dtype=SECTION)
    if rows:
        stored, method, parameter, checksum = zip(*rows, strict=True)
        sections["stored_bytes"], sections["method"] = stored, method
        sections["parameter"], sections["checksum"] = parameter, checksum
    return sections
