"""Sizes, rates and durations as people write them, exact in both directions.

A bare number is refused: 64 of what is the commonest mistake in a cache's configuration, and `64GB` is 7 % less than `64GiB`.
Zero alone needs no unit. Numbers are decimal and exact: what is no whole number of bytes is refused.
"""

import difflib
import re
from collections.abc import Mapping
from fractions import Fraction

from kvstored.errors import InvalidArgument

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = {**_DECIMAL, **_BINARY}

_SIZES: dict[str, Fraction] = {f"{prefix}B": Fraction(n) for prefix, n in _PREFIXES.items()}
_RATES: dict[str, Fraction] = {
    **{f"{prefix}B/s": Fraction(n) for prefix, n in _PREFIXES.items()},
    **{f"{prefix}bit/s": Fraction(n, 8) for prefix, n in _PREFIXES.items()},
}
_DURATIONS: dict[str, Fraction] = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_QUANTITY = re.compile(r"\s*(\d{1,30}(?:\.\d{1,18})?)\s*([A-Za-z/]*)\s*")


def parse_size(text: str) -> int:
    """Bytes of `64GiB`, `64GB`, `1.5MiB`, `0`."""
    size_bytes = _parsed(text, _SIZES, what="size", example="64GiB (or 64GB)")
    if size_bytes.denominator != 1:
        raise InvalidArgument(f"size is not a whole number of bytes: value={text!r}")
    return int(size_bytes)


def parse_rate(text: str) -> float:
    """Bytes a second of `10Gbit/s`, `1.2GB/s`, `800MiB/s`."""
    return float(_parsed(text, _RATES, what="rate", example="10Gbit/s (or 1.2GB/s)"))


def parse_duration(text: str) -> float:
    """Seconds of `500ms`, `30s`, `10min`, `2h`, `7d`."""
    return float(_parsed(text, _DURATIONS, what="duration", example="30s (or 500ms, 10min, 2h)"))


def format_size(size_bytes: int) -> str:
    """Exact, in the largest binary unit that divides it, else decimal: `parse_size` gives the same number back."""
    for units in (_BINARY, _DECIMAL):
        for prefix, n in sorted(units.items(), key=lambda pair: -pair[1]):
            if n > 1 and prefix != "K" and size_bytes and size_bytes % n == 0:
                return f"{size_bytes // n}{prefix}B"
    return f"{size_bytes}B"


def format_about(size_bytes: float) -> str:
    """Rounded for people, in binary units: `1.5 GiB`."""
    for prefix in reversed(_BINARY):
        if size_bytes >= _BINARY[prefix]:
            return f"{size_bytes / _BINARY[prefix]:.1f} {prefix}B"
    return f"{size_bytes:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """Rounded for people, in decimal units: `1.2 GB/s`."""
    for prefix in ("P", "T", "G", "M", "k"):
        if bytes_per_s >= _DECIMAL[prefix]:
            return f"{bytes_per_s / _DECIMAL[prefix]:.2f} {prefix}B/s"
    return f"{bytes_per_s:.0f} B/s"


def format_duration(duration_s: float) -> str:
    """In the largest unit that divides it, exact to a microsecond."""
    micros = round(duration_s * 10**6)
    for unit, n in reversed(_DURATIONS.items()):
        if micros and micros % int(n * 10**6) == 0:
            return f"{micros // int(n * 10**6)}{unit}"
    return "0s"


def _parsed(text: str, units: Mapping[str, Fraction], *, what: str, example: str) -> Fraction:
    matched = _QUANTITY.fullmatch(text)
    if matched is None:
        raise InvalidArgument(f"not a {what}: value={text!r}; write for example {example}")
    number, unit = Fraction(matched[1]), matched[2]
    if unit in units:
        return number * units[unit]
    if unit == "" and number == 0:
        return number
    if unit == "":
        raise InvalidArgument(f"{what} without a unit: value={text!r}; write for example {example}")
    near = _same_letters(unit, units) or difflib.get_close_matches(unit, units, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"write for example {example}"
    raise InvalidArgument(f"unknown unit of a {what}: value={text!r} unit={unit!r}; {hint}")


def _same_letters(unit: str, units: Mapping[str, Fraction]) -> list[str]:
    return [known for known in units if known.lower() == unit.lower()]
