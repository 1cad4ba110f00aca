"""Records of many pieces of one extent each, written and read as columns: what `Arena` does one by one for all others.

A few microseconds a call and a segment, so these may be called on the store's loop.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.columnar import Places
from kvstored.core.types import KEY_BYTES_MAX, UNIT_BYTES
from kvstored.tiers import record as layout
from kvstored.tiers.filling import FillingColumns, ReadyOne, pack_many, pack_ready
from kvstored.tiers.record import Records, State
from kvstored.tiers.segment import Segment

Which = NDArray[np.intp] | slice
WORD_BYTES = 8
"""The first word of a record has its state, and is written at once."""


@dataclass(frozen=True, slots=True)
class Lineages:
    """Of n pieces: keys, 64 bytes each, padded; their lengths; the parents' fingerprints, 16 bytes each."""

    keys: bytes
    key_bytes: NDArray[np.uint8]
    parents: bytes


def slots(segments: Mapping[int, Segment], places: Places) -> list[NDArray[np.uint8]]:
    """All bytes of each place as one view."""
    begin, end = places.start * UNIT_BYTES, (places.start + places.units) * UNIT_BYTES
    rows = zip(places.segment.tolist(), begin.tolist(), end.tolist(), strict=True)
    return [segments[number].bytes[first:last] for number, first, last in rows]


def fill(
    segments: Mapping[int, Segment],
    filling: FillingColumns,
    checksums: NDArray[np.uint64] | None = None,
) -> None:
    """FILLING, or READY where the checksums are known."""
    put(segments, pack_many(filling, checksums), filling.places)


def make_one(segments: Mapping[int, Segment], ready: ReadyOne) -> None:
    """A record that is READY at once."""
    packed = pack_ready(ready)
    segment = segments[ready.extent.segment]
    begin = ready.extent.start * layout.RECORD_BYTES
    segment.table[begin + layout.STATE_OFFSET] = State.FREE
    segment.table[begin + WORD_BYTES : begin + layout.RECORD_BYTES] = packed[WORD_BYTES:]
    segment.table[begin : begin + WORD_BYTES] = packed[:WORD_BYTES]


def put(segments: Mapping[int, Segment], records: Records, places: Places) -> None:
    """Each record's tail before its first word with the state: nothing is seen before it is whole."""
    packed = records.view(np.uint64).reshape(-1, layout.RECORD_BYTES // 8)
    for segment, start, which in _by_segment(segments, places):
        segment.rows["state"][start] = State.FREE
        segment.words[start, 1:] = packed[which, 1:]
        segment.words[start, layout.STATE_AND_MORE] = packed[which, layout.STATE_AND_MORE]


def make_ready(
    segments: Mapping[int, Segment], places: Places, checksums: NDArray[np.uint64]
) -> None:
    """The checksums first, then the states."""
    for segment, start, which in _by_segment(segments, places):
        assert (segment.rows["state"][start] == State.FILLING).all(), "ready without filling"
        segment.rows["checksum"][start] = checksums[which]
        segment.rows["stored_checksum"][start] = checksums[which]
        segment.rows["state"][start] = State.READY


def make_free(segments: Mapping[int, Segment], places: Places) -> None:
    for segment, start, _ in _by_segment(segments, places):
        segment.rows["state"][start] = State.FREE


def lineages(segments: Mapping[int, Segment], places: Places) -> Lineages:
    """Unchecked, whatever the states."""
    count = places.size
    keys = np.empty((count, KEY_BYTES_MAX // 8), dtype=np.uint64)
    parents = np.empty((count, 2), dtype=np.uint64)
    key_bytes = np.empty(count, dtype=np.uint8)
    for segment, start, which in _by_segment(segments, places):
        keys[which] = segment.words[start, layout.KEY_WORDS]
        parents[which] = segment.words[start, layout.PARENT_WORDS]
        key_bytes[which] = segment.rows["key_bytes"][start]
    return Lineages(keys.tobytes(), key_bytes, parents.tobytes())


def heads(segments: Mapping[int, Segment], places: Places) -> NDArray[np.uint64]:
    """Private copies of the records, 32 words each; unchecked."""
    words = np.empty((places.size, layout.RECORD_BYTES // 8), dtype=np.uint64)
    for segment, start, which in _by_segment(segments, places):
        words[which] = segment.words[start]
    return words


def have_keys(
    segments: Mapping[int, Segment], places: Places, keys: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    """Which records have exactly the key in their row of `keys`, (n, bytes of a key)."""
    count, key_bytes = keys.shape
    asked = np.zeros((count, KEY_BYTES_MAX), dtype=np.uint8)
    asked[:, :key_bytes] = keys
    words = asked.view(np.uint64)
    same = np.empty(count, dtype=np.bool_)
    for segment, start, which in _by_segment(segments, places):
        is_equal = (segment.words[start, layout.KEY_WORDS] == words[which]).all(axis=1)
        same[which] = is_equal & (segment.rows["key_bytes"][start] == key_bytes)
    return same


def _by_segment(
    segments: Mapping[int, Segment], places: Places
) -> Iterator[tuple[Segment, NDArray[np.int64], Which]]:
    """Each segment, the first units in it, and which places those are."""
    numbers = set(places.segment.tolist())
    if len(numbers) == 1:
        yield segments[numbers.pop()], places.start, slice(None)
        return
    for number in sorted(numbers):
        which = np.flatnonzero(places.segment == number)
        yield segments[number], places.start[which], which
