"""The client's copies with checksums, and its reads without a message, in C where that could be built.

Optional: `copies` is None without it, and whoever uses it does the same with numpy and xxhash. KVSTORED_NATIVE=off is for comparing the two.
Nothing here decides, allocates memory for blocks, or talks to the daemon: that is Python's.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import UNIT_BYTES
from kvstored.tiers import entries

Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]
Ranges = tuple[tuple[int, int], ...] | None

FOUND_COLUMNS = 8
SLOT, SEQUENCE, CHECKSUM, GENERATION, SEGMENT, OFFSET, LENGTH, START = range(FOUND_COLUMNS)
"""Of a row of what `find` found, u64 each; LENGTH 0 where that is nothing. START: of the private copy, where all go into one array."""
MISS, HIT, CHANGED, MISMATCHED = range(4)
"""Verdicts of `read`."""


class Spread(Protocol):
    """Memory of the caller in runs, looked at once and held."""


class Copies(Protocol):
    """What the extension does. Releases the GIL around the whole call where that has much to copy."""

    KERNEL: str
    """Which instructions it takes."""
    LAYOUT: tuple[int, ...]

    def spread(self, parts: tuple[Array, ...], /) -> Spread | None:
        """None where their runs are too short to gain anything."""

    def copy_runs(
        self,
        runs: Sequence[tuple[Bytes, tuple[Bytes, ...], tuple[int, ...]]],
        inward: bool,
        summed: bool,
        past_cache: bool,
        /,
    ) -> list[int]:
        """(private, shared, sizes of the pieces) each, from private to shared if `inward`: the checksums of the pieces if `summed`, of what was
        stored. `past_cache`: with stores that leave the caches to others."""
        ...

    def copy_walks(
        self,
        walks: Sequence[tuple[tuple[Bytes, ...], Spread, Ranges]],
        inward: bool,
        summed: bool,
        past_cache: bool,
        /,
    ) -> list[int]:
        """(shared, private, ranges) each: what lies outside the ranges is only summed."""
        ...

    def fill(
        self,
        sources: Sequence[Bytes],
        segments: Mapping[int, Bytes],
        extents: bytes,
        past_cache: bool,
        /,
    ) -> bytes:
        """To one extent (3 x u64: segment, offset, bytes) each; their checksums, u64 each. Before the first byte is copied: LookupError where an extent
        is outside its segment, that is not mapped, or the source has another size."""
        ...

    def may_have(
        self,
        memory: object,
        tags_at: int,
        entries_at: int,
        buckets: int,
        packed: bytes,
        key_bytes: int,
        seed: int,
        /,
    ) -> bool:
        """Whether any of the keys, back to back, has a tag."""
        ...

    def find(
        self,
        memory: object,
        tags_at: int,
        entries_at: int,
        buckets: int,
        keys: tuple[bytes, ...],
        digest: bytes,
        seed: int,
        stride: int,
        found: NDArray[np.uint64],
        /,
    ) -> tuple[int, int, int, set[int]]:
        """Fills one row a key. START is every `stride` bytes, or where the block before ends if that is 0. Answers rows without a block, those of them that
        were being written or are torn, bytes of all blocks, their segments."""
        ...

    def read(
        self,
        memory: object,
        tags_at: int,
        entries_at: int,
        buckets: int,
        found: NDArray[np.uint64],
        first: int,
        last: int,
        segments: Mapping[int, Bytes],
        into: Array | tuple[object, ...],
        ranges: Ranges,
        past_cache: bool,
        verdicts: bytearray,
        /,
    ) -> None:
        """Copies these rows and looks at their entries again. `into`: one array, by START, or arrays (each of its block's size) and spreads, one a row.
        Before the first byte is copied: LookupError where a place is outside its segment, BufferError or ValueError where a target does not fit.
        """
        ...


_CALLS = 2
"""One more whenever a call is new or takes something else."""
_LAYOUT = (
    _CALLS,
    entries.WAYS,
    entries.TAG_BYTES,
    entries.ENTRY_WORDS,
    UNIT_BYTES,
    entries.SEQUENCE,
    entries.CHECKSUM,
    entries.GENERATION,
    entries.DIGEST_WORDS.start,
    entries.KEY_WORDS.start,
    entries.PLACE,
    entries.SIZES,
    entries.SUM,
    entries.DIGEST_BYTES,
    entries.SEGMENT_SHIFT,
    entries.LENGTH_SHIFT,
)


def _loaded(told: str) -> tuple[Copies | None, str]:
    """What there is, and how things stand in words."""
    if told.lower() in {"off", "no", "false", "0"}:
        return None, f"off: KVSTORED_NATIVE={told}"
    try:
        import kvstored.native._copies as _copies  # noqa: PLC0415, PLR0402 - it may not be there
    except ImportError as error:
        return None, f"not built: {error}"
    if _copies.LAYOUT != _LAYOUT:
        return None, "built from other sources: build it again"
    return _copies, f"in use, {_copies.KERNEL}"


# clients do not load the settings and their dependencies
copies, state = _loaded(os.environ.get("KVSTORED_NATIVE", ""))  # noqa: TID251
