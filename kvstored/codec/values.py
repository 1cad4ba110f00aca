"""Elements as numbers and back: exact one way, round to nearest even the other. Only lossy methods and reports need it."""

import numpy as np
from numpy.typing import NDArray

from kvstored.codec.elements import FORMS, Element, Words
from kvstored.errors import InvalidArgument

Floats = NDArray[np.float32]


def floats_of(words: Words, element: Element) -> Floats:
    """Every value of every element is a float32."""
    if element is Element.BF16:
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if element is Element.F16:
        return words.view(np.float16).astype(np.float32)
    if element is Element.F32:
        return words.view(np.float32)
    if element is Element.OPAQUE:
        raise InvalidArgument("opaque bytes are no numbers: name the dtype")
    return _EIGHT[element][words]


def words_of_floats(floats: Floats, element: Element) -> Words:
    """Finite values; what is too large becomes the largest finite value."""
    limited = np.clip(floats, -_LARGEST[element], _LARGEST[element])
    words: Words
    if element is Element.BF16:
        raw = limited.view(np.uint32)
        words = (
            (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        ).astype("<u2")
    elif element is Element.F16:
        words = limited.astype(np.float16).view("<u2")
    elif element is Element.F32:
        words = limited.view("<u4")
    else:
        words = _eight_bits(limited, element)
    return words


def _eight_bits(floats: Floats, element: Element) -> Words:
    """Ties go to the even code: the positive codes are in order of their values."""
    positive = _EIGHT[element][: _FINITE[element]]
    middles = (positive[1:] + positive[:-1]) / 2
    size = np.abs(floats)
    below, upto = np.searchsorted(middles, size), np.searchsorted(middles, size, side="right")
    code = np.where(below % 2 == 0, below, upto).astype(np.uint8)
    return code | (np.signbit(floats).astype(np.uint8) << np.uint8(7))


def _table(element: Element) -> Floats:
    form = FORMS[element]
    code = np.arange(256)
    bias = (1 << form.exponent_bits - 1) - 1
    exponent = code >> form.mantissa_bits & (1 << form.exponent_bits) - 1
    fraction = (code & (1 << form.mantissa_bits) - 1) / (1 << form.mantissa_bits)
    size = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    if element is Element.F8E5M2:
        size[exponent == 31] = np.where(fraction == 0, np.inf, np.nan)[exponent == 31]
    else:
        size[code & 0x7F == 0x7F] = np.nan
    return np.where(code >> 7, -size, size).astype(np.float32)


_EIGHT = {element: _table(element) for element in (Element.F8E4M3, Element.F8E5M2)}
_FINITE = {Element.F8E4M3: 127, Element.F8E5M2: 124}
"""Positive codes that are finite numbers."""
_LARGEST = {
    Element.BF16: np.float32(3.3895314e38),
    Element.F16: np.float32(65504),
    Element.F32: np.float32(3.4028235e38),
    Element.F8E4M3: np.float32(448),
    Element.F8E5M2: np.float32(57344),
}
