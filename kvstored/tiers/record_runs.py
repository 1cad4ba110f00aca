"""Records of many pieces of one extent each as columns: moved to other places, and checked. No I/O here."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstored.core.columnar import Places
from kvstored.core.types import UNIT_BYTES
from kvstored.tiers import record as layout
from kvstored.tiers.record import EXTENT_BYTES, NO_SEGMENT, RECORD, RECORD_BYTES, Record, Records


def moved(records: Records, places: Places, values: Mapping[str, ArrayLike]) -> Records:
    """Copies of the records for other places, with these values in their fields."""
    made = records.copy()
    for name, value in values.items():
        made[name] = value
    made["extent_units"] = places.units
    made["next_segment"] = NO_SEGMENT
    made["next_start"] = 0
    made["extent_count"] = 1
    made["place_checksum"] = _place_checksums(places)
    raw = made.view(np.uint8).data
    begin, end = layout.HEADER_OFFSET, layout.HEADER_END
    made["header_checksum"] = layout.checksums(raw, begin, end, RECORD_BYTES)
    return made


def vouch(records: Records, places: Places) -> NDArray[np.bool_]:
    """Which records are sound, and of pieces that lie in these places."""
    fits = records["stored_length"].astype(np.int64) <= places.units * UNIT_BYTES
    fits &= (records["extent_count"] == 1) & (records["place_checksum"] == _place_checksums(places))
    mask: NDArray[np.bool_] = layout.checked(records) & fits
    return mask


def packed(record: Record) -> np.void:
    """One record as a row."""
    row: np.void = np.frombuffer(layout.pack(record), dtype=RECORD)[0]
    return row


def pack_places(places: Places) -> bytes:
    """As `pack_place` for each, one after the other."""
    return np.stack(places, axis=1).astype("<u4").tobytes()


def _place_checksums(places: Places) -> NDArray[np.uint64]:
    return layout.checksums(pack_places(places), 0, EXTENT_BYTES, EXTENT_BYTES)
