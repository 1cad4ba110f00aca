"""LMDB values as columns: a million records are checked in a few seconds because no object is made for any of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.errors import Corrupt
from kvstored.tiers import record as layout
from kvstored.tiers.record import EXTENT_BYTES, RECORD, RECORD_BYTES, Base, Records
from kvstored.tiers.values import BASED, base_bytes, base_of


@dataclass(frozen=True, slots=True)
class Columns:
    """`is_usable` is of every value given, the others are of the usable ones; their shapes are those of `ScanBatch`. `bases`: by index."""

    is_usable: NDArray[np.bool_]
    records: Records
    extent_counts: NDArray[np.uint8]
    extents: NDArray[np.uint32]
    bases: dict[int, Base]


def columns_of(values: Sequence[bytes], segments: Sequence[tuple[int, int]]) -> Columns:
    """Usable are whole records that vouch for their place, which lies within these (segment, units)."""
    heads = b"".join(value[:RECORD_BYTES].ljust(RECORD_BYTES, b"\0") for value in values)
    records = np.frombuffer(bytearray(heads), dtype=RECORD)
    tails = [value[RECORD_BYTES:] for value in values]
    bases = _bases(values, np.flatnonzero(records["flags"] & BASED).tolist(), segments)
    for i, base in bases.items():
        tails[i] = tails[i][: len(tails[i]) - base_bytes(base)]
    digest = xxhash.xxh3_64_intdigest
    sums = np.fromiter(map(digest, tails), np.uint64, len(tails))
    sizes = np.fromiter(map(len, tails), np.int64, len(tails))
    is_whole = (
        layout.checked(records)
        & (sizes > 0)
        & (sizes == records["extent_count"].astype(np.int64) * EXTENT_BYTES)
        & (sums == records["place_checksum"])
    )
    whole = np.flatnonzero(is_whole)
    packed = b"".join(tails[i] for i in whole.tolist())
    extents = np.frombuffer(packed, dtype="<u4").reshape(-1, 3).astype(np.uint32)
    counts = records["extent_count"][whole]
    owner = np.repeat(np.arange(len(whole)), counts)
    outside = owner[~_are_inside(extents, segments)]
    is_inside = np.ones(len(whole), dtype=np.bool_)
    is_inside[outside] = False
    is_usable = is_whole.copy()
    is_usable[whole[~is_inside]] = False
    at = np.cumsum(is_usable) - 1
    return Columns(
        is_usable,
        records[is_usable],
        counts[is_inside],
        extents[is_inside[owner]],
        {int(at[i]): base for i, base in bases.items() if is_usable[i]},
    )


def _bases(
    values: Sequence[bytes], based: Sequence[int], segments: Sequence[tuple[int, int]]
) -> dict[int, Base]:
    """What these records refer to, as far as that can be: the others are no whole records."""
    bases: dict[int, Base] = {}
    for i in based:
        try:
            base = base_of(values[i])
        except Corrupt:
            continue
        if base is not None and _are_inside(np.asarray(base.place, np.uint32), segments).all():
            bases[i] = base
    return bases


def _are_inside(
    extents: NDArray[np.uint32], segments: Sequence[tuple[int, int]]
) -> NDArray[np.bool_]:
    units_of = np.zeros(max((number for number, _ in segments), default=0) + 1, dtype=np.int64)
    for number, units in segments:
        units_of[number] = units
    segment, start, units = extents.astype(np.int64).T
    limit = np.where(segment < len(units_of), units_of[np.minimum(segment, len(units_of) - 1)], 0)
    inside: NDArray[np.bool_] = (units > 0) & (start + units <= limit)
    return inside
