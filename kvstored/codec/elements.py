"""What the codec knows of numbers: which bits of an element are sign, exponent and mantissa. Bytes are little-endian."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger[Any]]
"""Elements as unsigned integers of their own width; the width differs by element, so it is not in the type."""


class Element(IntEnum):
    """Stored in frames: numbers are never reused."""

    OPAQUE = 0
    BF16 = 1
    F16 = 2
    F8E4M3 = 3
    F8E5M2 = 4
    F32 = 5


@dataclass(frozen=True, slots=True)
class Form:
    """Widths of one kind of element; OPAQUE has no exponent."""

    width_bytes: int
    exponent_bits: int
    mantissa_bits: int


FORMS = {
    Element.OPAQUE: Form(1, 0, 8),
    Element.BF16: Form(2, 8, 7),
    Element.F16: Form(2, 5, 10),
    Element.F8E4M3: Form(1, 4, 3),
    Element.F8E5M2: Form(1, 5, 2),
    Element.F32: Form(4, 8, 23),
}

_NAMES = {
    "bfloat16": Element.BF16, "bf16": Element.BF16,
    "float16": Element.F16, "half": Element.F16, "fp16": Element.F16, "f16": Element.F16,
    "float8_e4m3": Element.F8E4M3, "float8_e4m3fn": Element.F8E4M3, "fp8": Element.F8E4M3,
    "fp8_e4m3": Element.F8E4M3, "e4m3": Element.F8E4M3,
    "float8_e5m2": Element.F8E5M2, "fp8_e5m2": Element.F8E5M2, "e5m2": Element.F8E5M2,
    "float32": Element.F32, "fp32": Element.F32, "float": Element.F32, "f32": Element.F32,
}  # fmt: skip


def element_of(dtype: str) -> Element:
    """The element that a namespace's dtype names; OPAQUE for names that are not known, which costs ratio only."""
    name = dtype.lower().removeprefix("torch.")
    return _NAMES.get(name, Element.OPAQUE)


def words_of(plain: Bytes, element: Element) -> Words:
    """The elements in `plain`, whose length is a multiple of their width, without a copy."""
    width = FORMS[element].width_bytes
    words: Words = plain.view(np.dtype(f"<u{width}"))
    return words


def exponents_of(words: Words, element: Element) -> Bytes:
    """The exponent field of each element; of OPAQUE its upper half."""
    form = FORMS[element]
    if element is Element.OPAQUE:
        return (words >> 4).astype(np.uint8)
    shifted = (words >> form.mantissa_bits).astype(np.uint8)
    if form.exponent_bits == 8:
        return shifted  # the cast has cut the sign off
    return shifted & np.uint8((1 << form.exponent_bits) - 1)
