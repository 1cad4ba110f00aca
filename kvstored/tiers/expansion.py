"""What a GPU is told to do with pieces that cross packed: the table of their sections, and of what is hashed afterwards. Pure but for addresses.

As the kernels' `struct Section`, `Stretch` and `Piece`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.codec.unpacked import ALIGNMENT, SECTION, Sections, Unpacked

BLOCK_BYTES = 1024
"""Of xxh3's long form: sums of blocks are made at once."""
SUM_BYTES = 64
"""Of each block."""
LENGTH_MIN = 241
"""Shorter ones are hashed otherwise, which no kernel knows."""
STRETCH = np.dtype([("offset", "<u8"), ("first", "<u8")])
PIECE = np.dtype(
    [(name, "<u8") for name in ("first", "blocks", "length", "rest", "last", "next", "split", "unused")]
)  # fmt: skip
_LAST_BYTES = 64

Extents = Sequence[tuple[int, int]]
"""Offset in the pool and bytes, of one piece in turn; all but the last are whole units."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Pieces for one pool. Targets of `sections` are offsets in it; `extents`: of each piece."""

    packed: NDArray[np.uint8]
    sections: Sections
    extents: tuple[Extents, ...]

    def windows(self, bytes_max: int, sections_max: int) -> Iterator["Expansion"]:
        """The same in parts of at most so much packed memory; a section that is larger goes alone."""
        sources = self.sections["source"].astype(np.int64)
        begins = np.unique(sources)
        following = np.append(begins[1:], len(self.packed))
        ends = following[np.searchsorted(begins, sources)]
        at = 0
        while at < len(sources):
            base = int(sources[at])
            upto = int(np.searchsorted(ends, base + bytes_max, side="right"))
            upto = min(max(upto, at + 1), at + sections_max)
            part = self.sections[at:upto].copy()
            part["source"] -= np.uint64(base)
            yield Expansion(self.packed[base : int(ends[upto - 1])], part, ())
            at = upto


@dataclass(frozen=True, slots=True)
class HashTables:
    """`blocks`: how many sums there are."""

    stretches: NDArray[np.void]
    pieces: NDArray[np.void]
    blocks: int


def expansion_of(items: Sequence[tuple[Unpacked, Extents]]) -> Expansion:
    """One of many pieces: their packed bytes one after the other."""
    parts: list[NDArray[np.uint8]] = []
    tables: list[Sections] = []
    level = 0
    for unpacked, extents in items:
        mine = _placed(unpacked.sections, extents)
        mine["source"] += np.uint64(level)
        tables.append(mine)
        padding = -len(unpacked.packed) % ALIGNMENT
        parts += [unpacked.packed, np.zeros(padding, dtype=np.uint8)]
        level += len(unpacked.packed) + padding
    return Expansion(
        np.concatenate(parts), np.concatenate(tables), tuple(extents for _, extents in items)
    )


def hash_tables(pieces: Sequence[Extents]) -> HashTables:
    """Of pieces of at least LENGTH_MIN bytes."""
    stretches: list[tuple[int, int]] = []
    rows: list[tuple[int, ...]] = []
    level = 0
    for extents in pieces:
        length = sum(size for _, size in extents)
        assert length >= LENGTH_MIN, "too short for this hash"
        blocks, first = (length - 1) // BLOCK_BYTES, level
        for offset, size in extents:
            if level < first + blocks:
                stretches.append((offset, level))
            level = min(first + blocks, level + size // BLOCK_BYTES)
        rest = _pool_offset(extents, blocks * BLOCK_BYTES)
        rows.append((first, blocks, length, rest, *_last(extents, length), 0))
        level = first + blocks
    return HashTables(np.array(stretches, dtype=STRETCH), np.array(rows, dtype=PIECE), level)


def _last(extents: Extents, length: int) -> tuple[int, int, int]:
    """Where the last 64 bytes are; they may begin in the extent before the last one."""
    last_size = extents[-1][1]
    if last_size >= _LAST_BYTES:
        return extents[-1][0] + last_size - _LAST_BYTES, 0, _LAST_BYTES
    split = _LAST_BYTES - last_size
    return _pool_offset(extents, length - _LAST_BYTES), extents[-1][0], split


def _pool_offset(extents: Extents, at: int) -> int:
    """Of byte `at` of the piece."""
    for offset, size in extents:
        if at < size:
            return offset + at
        at -= size
    raise AssertionError("beyond the piece")


def _placed(sections: Sections, extents: Extents) -> Sections:
    """With targets in the pool; sections that lie over several extents are there once for each."""
    if len(extents) == 1:
        mine = sections.copy()
        mine["target"] += np.uint64(extents[0][0])
        return mine
    rows: list[np.void] = []
    for section in sections:
        rows += _over(section, extents)
    return np.array(rows, dtype=SECTION)


def _over(section: np.void, extents: Extents) -> Iterator[np.void]:
    width, begin = int(section["width"]), int(section["target"])
    end, at = begin + (int(section["end"]) - int(section["begin"])) * width, 0
    for offset, size in extents:
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            row = section.copy()
            row["begin"] = int(section["begin"]) + (low - begin) // width
            row["end"] = int(section["begin"]) + (high - begin) // width
            row["target"] = offset + low - at
            yield row
        at += size
