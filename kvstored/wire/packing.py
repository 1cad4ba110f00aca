"""Packed fields of messages <-> numpy arrays and places. Everything that comes from outside is
checked here: InvalidArgument.

The order of pieces is that of the protocol: key by key, within a key group by group of the selected
groups in namespace order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.columnar import Places
from kvstored.core.types import (
    BATCH_KEYS_MAX,
    EXTENTS_MAX,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    UNIT_BYTES,
    NamespaceSpec,
    Place,
)
from kvstored.errors import InvalidArgument

U64S = NDArray[np.uint64]
U8S = NDArray[np.uint8]
EXTENT_BYTES = 3 * 8
"""Segment, offset, bytes."""


@dataclass(frozen=True, slots=True)
class PackedPieces:
    """Places of n x G pieces as the messages carry them."""

    extent_counts: bytes
    extents: bytes
    sizes: bytes


@dataclass(frozen=True, slots=True)
class Pieces:
    """Unpacked places: piece i owns rows `first[i] .. first[i+1]` of `extents` (segment, offset,
    bytes).
    """

    extents: U64S
    first: NDArray[np.int64]
    sizes: U64S
    """Shape (n, G)."""

    def __len__(self) -> int:
        return self.sizes.size


def pack_keys(keys: Sequence[bytes]) -> tuple[bytes, int]:
    """The keys back to back, and the length of each."""
    if not keys:
        return b"", KEY_BYTES_MIN
    key_bytes = len(keys[0])
    if len(keys) > 1 and set(map(len, keys)) != {key_bytes}:
        raise InvalidArgument(f"keys of one call have one length first={key_bytes}")
    check_keys(len(keys) * key_bytes, key_bytes)
    return b"".join(keys), key_bytes


def check_is_streamed(tier: str) -> None:
    """Places of another tier than DRAM are no places in shared memory: read there, they would be bytes of other blocks."""
    if tier not in ("", "dram"):
        raise InvalidArgument(f"blocks are streamed from dram only: tier={tier!r}")


def check_keys(packed_bytes: int, key_bytes: int) -> int:
    """The count of keys; refuses odd lengths and more than BATCH_KEYS_MAX."""
    if not KEY_BYTES_MIN <= key_bytes <= KEY_BYTES_MAX:
        raise InvalidArgument(
            f"a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes key_bytes={key_bytes}"
        )
    count, rest = divmod(packed_bytes, key_bytes)
    if rest:
        raise InvalidArgument(
            f"packed keys are cut short bytes={packed_bytes} key_bytes={key_bytes}"
        )
    if count > BATCH_KEYS_MAX:
        raise InvalidArgument(f"too many keys in one call keys={count} max={BATCH_KEYS_MAX}")
    return count


def pack_u64(values: Sequence[int] | U64S) -> bytes:
    return np.asarray(values, dtype="<u8").tobytes()


def unpack_u64(packed: bytes, name: str, count: int | None = None) -> U64S:
    """A read-only view; `count` values exactly, where given."""
    if len(packed) % 8 or (count is not None and len(packed) != 8 * count):
        raise InvalidArgument(
            f"a packed field has a wrong length field={name} bytes={len(packed)} "
            f"expected={'a multiple of 8' if count is None else 8 * count}"
        )
    return np.frombuffer(packed, dtype="<u8")


def word_of(packed: bytes, name: str) -> int:
    """The one value of a packed field."""
    if len(packed) != 8:
        unpack_u64(packed, name, 1)  # raises
    return int.from_bytes(packed, "little")


def unpack_extents(packed: bytes) -> list[list[int]]:
    """(segment, offset, bytes) each."""
    found: list[list[int]] = unpack_u64(packed, "extents").reshape(-1, 3).tolist()
    return found


def pack_u8(values: Sequence[int] | U8S) -> bytes:
    return np.asarray(values, dtype=np.uint8).tobytes()


def unpack_u8(packed: bytes, name: str, count: int) -> U8S:
    if len(packed) != count:
        raise InvalidArgument(
            f"a packed field has a wrong length field={name} bytes={len(packed)} expected={count}"
        )
    return np.frombuffer(packed, dtype=np.uint8)


def unpack_table(packed: bytes, name: str, rows: int, columns: int) -> U64S:
    """Shape (rows, columns)."""
    return unpack_u64(packed, name, rows * columns).reshape(rows, columns)


def selected_groups(mask: int, spec: NamespaceSpec) -> tuple[int, ...]:
    """Indexes of the groups that the mask selects, in namespace order; 0 selects the required
    ones.
    """
    if mask >> len(spec.groups):
        raise InvalidArgument(
            f"the mask names unknown groups mask={mask:#x} groups={len(spec.groups)}"
        )
    if mask == 0:
        return tuple(i for i, group in enumerate(spec.groups) if group.is_required)
    return tuple(i for i in range(len(spec.groups)) if mask >> i & 1)


def mask_of(groups: Sequence[int]) -> int:
    return sum(1 << i for i in set(groups))


def pack_pieces(pieces: Sequence[tuple[Place, int] | None]) -> PackedPieces:
    """`pieces`: place and length in bytes of each, None where there is nothing. The last extent is
    cut to the length.
    """
    counts = bytearray(len(pieces))
    sizes = [0] * len(pieces)
    flat: list[int] = []
    for i, piece in enumerate(pieces):
        if piece is None:
            continue
        place, length = piece
        counts[i] = len(place)
        sizes[i] = length
        left = length
        for extent in place:
            taken = min(left, extent.units * UNIT_BYTES)
            flat += (extent.segment, extent.start * UNIT_BYTES, taken)
            left -= taken
        assert left == 0, f"a place is shorter than its piece {piece}"
    return PackedPieces(bytes(counts), pack_u64(flat), pack_u64(sizes))


def pack_runs(places: Places, lengths: U64S) -> bytes:
    """The extents of pieces that lie in one each."""
    extents = np.empty((places.size, 3), dtype="<u8")
    extents[:, 0] = places.segment
    extents[:, 1] = places.start * UNIT_BYTES
    extents[:, 2] = lengths
    return extents.tobytes()


def unpack_pieces(packed: PackedPieces, keys: int, groups: int) -> Pieces:
    """Checks that every piece's extents add up to its size; segments are checked by who maps
    them.
    """
    count = keys * groups
    counts = unpack_u8(packed.extent_counts, "extent_counts", count).astype(np.int64)
    first = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(counts, out=first[1:])
    extents = unpack_u64(packed.extents, "extents", 3 * int(first[-1])).reshape(-1, 3)
    sizes = unpack_table(packed.sizes, "sizes", keys, groups)
    if count and counts.max(initial=0) > EXTENTS_MAX:
        raise InvalidArgument(f"a piece has too many extents max={EXTENTS_MAX}")
    sums = np.zeros(int(first[-1]) + 1, dtype=np.uint64)
    np.cumsum(extents[:, 2], out=sums[1:])
    totals = sums[first[1:]] - sums[first[:-1]]
    # A piece that was not granted has a size and no extents.
    if np.any((totals != sizes.reshape(-1)) & (counts > 0)):
        raise InvalidArgument("the extents of a piece do not add up to its size")
    return Pieces(extents, first, sizes)
