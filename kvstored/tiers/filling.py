"""Records of plain pieces that are put: written FILLING, or READY where their bytes are there already. No I/O here."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.core.columnar import Places
from kvstored.core.types import KEY_BYTES_MAX, Extent
from kvstored.tiers import record as layout

_READY = int(layout.State.READY)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillingColumns:
    """Records of many pieces that are about to be written: group 0 of shard 0, one extent each, key lengths and sizes equal."""

    digest: bytes
    keys: bytes
    fingerprints: NDArray[np.uint64]
    parents: NDArray[np.uint64]
    places: Places
    generations: NDArray[np.uint64]
    depths: NDArray[np.int64]
    heats: NDArray[np.uint8]
    length: int
    valid_tokens: int
    last_s: float
    owner_pid: int


def pack_many(filling: FillingColumns, sums: NDArray[np.uint64] | None = None) -> layout.Records:
    """As `pack` for each, state FILLING, or READY with the checksums of the bytes."""
    places, count = filling.places, filling.places.size
    records = np.zeros(count, dtype=layout.RECORD)
    keys = np.frombuffer(filling.keys, dtype=np.uint8).reshape(count, -1)
    padded = np.zeros((count, KEY_BYTES_MAX), dtype=np.uint8)
    padded[:, : keys.shape[1]] = keys
    values = {
        "magic": layout.MAGIC, "version": layout.VERSION, "heat": filling.heats,
        "state": layout.State.FILLING if sums is None else layout.State.READY,
        "owner_pid": filling.owner_pid, "last_s": filling.last_s, "generation": filling.generations,
        "digest": np.void(filling.digest), "fingerprint": filling.fingerprints,
        "parent": filling.parents, "key": padded.view(f"V{KEY_BYTES_MAX}")[:, 0],
        "length": filling.length, "stored_length": filling.length,
        "valid_tokens": filling.valid_tokens, "depth": filling.depths,
        "extent_units": places.units, "next_segment": layout.NO_SEGMENT,
        "key_bytes": keys.shape[1], "extent_count": 1,
    }  # fmt: skip
    for name, value in values.items():
        records[name] = value
    extents = np.stack(places, axis=1).astype("<u4").tobytes()
    if sums is not None:
        records["checksum"] = records["stored_checksum"] = sums
    records["place_checksum"] = layout.checksums(
        extents, 0, layout.EXTENT_BYTES, layout.EXTENT_BYTES
    )
    raw = records.view(np.uint8).data
    records["header_checksum"] = layout.checksums(
        raw, layout.HEADER_OFFSET, layout.HEADER_END, layout.RECORD_BYTES
    )
    return records


class ReadyOne(NamedTuple):
    """The record of one such piece, whose bytes are there. Fingerprints: 16 bytes."""

    digest: bytes
    key: bytes
    fingerprint: bytes
    parent: bytes
    extent: Extent
    generation: int
    depth: int
    heat: int
    length: int
    valid_tokens: int
    last_s: float
    owner_pid: int
    checksum: int


def pack_ready(ready: ReadyOne) -> bytes:
    """As `pack_many` for it alone: arrays cost more than they save."""
    extent, key, length, checksum = ready.extent, ready.key, ready.length, ready.checksum
    header = layout.HEADER.pack(
        ready.generation, ready.digest, ready.fingerprint, ready.parent, key,
        length, length, layout.place_checksum((extent,)), 0, 0, ready.valid_tokens,
        ready.depth, extent.units, layout.NO_SEGMENT, 0, 0, len(key), 1, 0, 0,
    )  # fmt: skip
    mutable = layout.MUTABLE.pack(
        layout.MAGIC, layout.VERSION, _READY, 0, ready.heat, 0, ready.owner_pid, ready.last_s, checksum, checksum,
    )  # fmt: skip
    return mutable + header + layout.HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))
