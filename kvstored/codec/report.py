"""How far decoded values are from the true ones."""

import math
from dataclasses import dataclass

import numpy as np

from kvstored.codec.elements import FORMS, Bytes, Element, words_of
from kvstored.codec.values import Floats, floats_of


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """`relative`: root mean square error over root mean square value; `cosine` of the two as vectors."""

    mean_square: float
    largest: float
    relative: float
    cosine: float


def error_report(true: Bytes, decoded: Bytes, element: Element) -> ErrorReport:
    """Over the values that are finite; the others are exact in every method."""
    x, y = (_finite(part, element) for part in (true, decoded))
    return error_of(x[np.isfinite(x)], y[np.isfinite(x)])


def error_of(true: Floats, decoded: Floats) -> ErrorReport:
    x, y = true.astype(np.float64).ravel(), decoded.astype(np.float64).ravel()
    if not x.size:
        return ErrorReport(0.0, 0.0, 0.0, 1.0)
    difference = x - y
    mean_square = float(np.mean(difference * difference))
    power, other = float(np.mean(x * x)), float(np.mean(y * y))
    product = float(np.mean(x * y))
    return ErrorReport(
        mean_square,
        float(np.abs(difference).max()),
        math.sqrt(mean_square / power) if power else 0.0,
        product / math.sqrt(power * other) if power and other else 1.0,
    )


def error_max(true: Bytes, decoded: Bytes, element: Element) -> float:
    """Rounded up to what a float32 can hold."""
    largest = np.float32(error_report(true, decoded, element).largest)
    return float(np.nextafter(largest, np.float32(np.inf))) if largest else 0.0


def _finite(plain: Bytes, element: Element) -> Floats:
    width = FORMS[element].width_bytes
    return floats_of(words_of(plain[: len(plain) // width * width], element), element)
