"""A piece of a block spread over several arrays of the caller: the layers of an engine's paged KV cache, filled without a copy in memory between.

A piece is walked in order of its bytes. Large runs go straight; small and strided parts go by a buffer that stays in the core's cache, where
they are hashed at once. What lies outside the wanted ranges is only hashed, in place: so a part of a piece verifies as the whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored import native
from kvstored.client.copying import STEP_BYTES, Bytes, Copier, goes_past_cache
from kvstored.client.results import GetResult
from kvstored.errors import InvalidArgument

Array = NDArray[np.generic]
Buffer = Array | bytes | bytearray | memoryview
Ranges = Sequence[tuple[int, int]]
"""(offset, length) in bytes of a piece, ascending, apart."""

_BYTE = np.dtype(np.uint8)
_STRAIGHT_BYTES = 64 << 10
"""Runs of at least this are copied and hashed where they lie; the calls for smaller ones cost more than a second copy in the cache."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Where one piece lies in private memory. Made once for memory that stays, as an engine's pages do, it spares each call the looking.

    `parts`: bytes in one run, or an array that stays strided. `ends`: of the caller's arrays, in bytes; a range ends where one does.
    `spread`: the same for copies in C, None where there are none or runs too short for them.
    """

    parts: tuple[Array, ...]
    ends: tuple[int, ...]
    is_writable: bool
    spread: native.Spread | None = None

    @staticmethod
    def of(buffers: "Buffer | Sequence[Buffer]") -> "Gather":
        """The arrays in the order of the piece's bytes, each in the C order of its elements."""
        return _gather(buffers)

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def joined(self) -> Bytes:
        """A copy in one run, for where there is no memory to share."""
        memory = np.empty(self.size, dtype=np.uint8)
        _collect(self.parts, memory)
        return memory


Buffers = Gather | Buffer | Sequence[Buffer]
"""Of one piece: its bytes in order, in one array or several, each of which may be strided."""
BufferRow = Buffers | Sequence[Buffers | None] | None
"""Of one block: the buffers of its piece where one group is selected, else one such list a selected group, None for nothing."""
_BUFFERS = (np.ndarray, bytes, bytearray, memoryview)


class Walk(NamedTuple):
    """One piece: its extents, the parts for it, and the ranges of the piece that they are, all of it where None."""

    shared: tuple[Bytes, ...]
    gather: Gather
    ranges: tuple[tuple[int, int], ...] | None


class _Stretch(NamedTuple):
    """Parts that follow each other without a gap: one that goes straight, or some that go by the cache."""

    start: int
    size: int
    parts: tuple[Array, ...]

    @property
    def is_straight(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].flags.c_contiguous


def gathers_of(
    rows: Sequence[BufferRow], keys: int, groups: int, *, writable: bool
) -> list[Gather | None]:
    """The buffers of every piece, in the order of the protocol."""
    if len(rows) != keys:
        raise InvalidArgument(f"one row of buffers a key rows={len(rows)} keys={keys}")
    found: list[Gather | None] = []
    for row in rows:
        lists: object = (row,) if groups == 1 else row
        if not isinstance(lists, Sequence) or isinstance(lists, _BUFFERS) or len(lists) != groups:
            raise InvalidArgument(f"one list of buffers a selected group groups={groups}")
        for given in lists:
            made = given if given is None or isinstance(given, Gather) else _gather(given)
            if writable and made is not None and not made.is_writable:
                raise InvalidArgument(f"a buffer to read into is not writable key={len(found)}")
            found.append(made)
    return found


def ranges_of(given: Ranges | None) -> tuple[tuple[int, int], ...] | None:
    if given is None:
        return None
    end = 0
    for offset, length in given:
        if offset < end or length <= 0:
            raise InvalidArgument(
                f"ranges are ascending and apart: offset={offset} length={length} end_before={end}"
            )
        end = offset + length
    if not given:
        raise InvalidArgument("ranges without a range: leave them out for all of a piece")
    return tuple((int(offset), int(length)) for offset, length in given)


def walk_of(
    shared: tuple[Bytes, ...], gather: Gather, ranges: tuple[tuple[int, int], ...] | None
) -> Walk:
    """Refuses buffers that do not add up to what they are for; before the first byte is copied."""
    piece_bytes = sum(extent.size for extent in shared)
    wanted = piece_bytes if ranges is None else sum(length for _, length in ranges)
    if gather.size != wanted:
        raise InvalidArgument(
            f"buffers do not add up to their piece: buffers={gather.size} bytes={wanted}"
        )
    end = 0
    for offset, length in ranges or ():
        end += length
        if offset + length > piece_bytes:
            raise InvalidArgument(
                f"a range ends behind its piece: offset={offset} length={length} bytes={piece_bytes}"
            )
        if end not in gather.ends:
            raise InvalidArgument(
                f"a buffer crosses the end of a range: offset={offset} length={length}"
            )
    return Walk(shared, gather, ranges)


def scatter_all(walks: Sequence[Walk], copier: Copier, *, checked: bool) -> list[int]:
    """Shared to private; the checksum of each piece as the private side has it, none where they are not `checked`."""
    return _carried(walks, copier, scatter if checked else scatter_unchecked, False, checked)


def gather_all(walks: Sequence[Walk], copier: Copier) -> list[int]:
    """Private to shared; the checksum of each piece."""
    return _carried(walks, copier, gather, True, True)


def _carried(
    walks: Sequence[Walk],
    copier: Copier,
    carry: Callable[[Walk], list[int]],
    inward: bool,
    summed: bool,
) -> list[int]:
    sizes, copies = [walk.gather.size for walk in walks], copier.native
    spreads = [walk.gather.spread for walk in walks if walk.gather.spread is not None]
    if copies is None or len(spreads) < len(walks):
        return copier.spread_out(walks, carry, sizes)
    given = [
        (walk.shared, spread, walk.ranges) for walk, spread in zip(walks, spreads, strict=True)
    ]
    past_cache = goes_past_cache(sum(sizes), inward=inward)
    return copier.in_shares(
        sizes, lambda a, b: copies.copy_walks(given[a:b], inward, summed, past_cache)
    )


def scatter(walk: Walk) -> list[int]:
    """Shared to private, and the checksum of the piece as the private side has it."""
    hasher = xxhash.xxh3_64()
    at = 0
    for stretch in _stretches(walk):
        for skipped in _between(walk.shared, at, stretch.start):
            hasher.update(skipped.data)
        at = stretch.start + stretch.size
        runs = _between(walk.shared, stretch.start, at)
        if stretch.is_straight:
            for private, run in _beside(stretch.parts[0].view(np.uint8), runs):
                np.copyto(private, run)
                hasher.update(private.data)
        else:
            private = np.concatenate(runs)
            hasher.update(private.data)
            _distribute(private, stretch.parts)
    for skipped in _between(walk.shared, at, sum(extent.size for extent in walk.shared)):
        hasher.update(skipped.data)
    return [hasher.intdigest()]


def scatter_unchecked(walk: Walk) -> list[int]:
    """Shared to private; reads nothing outside the ranges."""
    whole = walk.shared[0] if len(walk.shared) == 1 else None
    for stretch in _stretches(walk):
        end = stretch.start + stretch.size
        if whole is not None:
            _distribute(whole[stretch.start : end], stretch.parts)
        else:
            _distribute(np.concatenate(_between(walk.shared, stretch.start, end)), stretch.parts)
    return []


def gather(walk: Walk) -> list[int]:
    """Private to shared, and the checksum of the private side."""
    hasher = xxhash.xxh3_64()
    for stretch in _stretches(walk):
        if stretch.is_straight:
            source = stretch.parts[0].view(np.uint8)
        else:
            source = np.empty(stretch.size, dtype=_BYTE)
            _collect(stretch.parts, source)
        runs = _between(walk.shared, stretch.start, stretch.start + stretch.size)
        for private, run in _beside(source, runs):
            np.copyto(run, private)
            hasher.update(private.data)
    return [hasher.intdigest()]


def scattered(
    found: GetResult, gathers: Sequence[Gather | None], ranges: tuple[tuple[int, int], ...] | None
) -> GetResult:
    """A get that came in arrays of its own, copied into the buffers. All are checked before the first byte is copied."""
    walks: list[Walk] = []
    indexes: list[int] = []
    groups = len(gathers) // max(len(found.status), 1)
    for i, block in enumerate(found.blocks):
        for group, array in enumerate(block or ()):
            buffers = gathers[i * groups + group]
            if array is not None and buffers is not None:
                walks.append(walk_of((array,), buffers, ranges))
                indexes.append(i * groups + group)
    for walk in walks:
        scatter_unchecked(walk)
    return found.into_buffers(indexes, groups)


def _stretches(walk: Walk) -> Iterator[_Stretch]:
    ranges = iter(walk.ranges or ((0, walk.gather.size),))
    end = 0
    start = size = at = 0
    parts: list[Array] = []
    for part in walk.gather.parts:
        part_bytes = part.nbytes
        is_straight = part_bytes >= _STRAIGHT_BYTES and part.ndim == 1 and part.flags.c_contiguous
        is_new = at == end
        if parts and (is_new or is_straight or size + part_bytes > STEP_BYTES):
            yield _Stretch(start, size, tuple(parts))
            parts, size = [], 0
        if is_new:
            at, length = next(ranges)
            end = at + length
        if is_straight:
            yield _Stretch(at, part_bytes, (part,))
        else:
            if not parts:
                start = at
            parts.append(part)
            size += part_bytes
        at += part_bytes
    if parts:
        yield _Stretch(start, size, tuple(parts))


def _between(shared: tuple[Bytes, ...], start: int, end: int) -> list[Bytes]:
    """Bytes start..end of the extents, in steps that fit a core's cache."""
    runs: list[Bytes] = []
    first = 0
    for extent in shared:
        a, b = max(start - first, 0), min(end - first, extent.size)
        runs += [extent[i : min(i + STEP_BYTES, b)] for i in range(a, b, STEP_BYTES)]
        first += extent.size
    return runs


def _beside(private: Bytes, runs: Sequence[Bytes]) -> Iterator[tuple[Bytes, Bytes]]:
    """The private bytes of every run, in order."""
    done = 0
    for run in runs:
        yield private[done : done + run.size], run
        done += run.size


def _distribute(memory: Bytes, parts: Sequence[Array]) -> None:
    done = 0
    for part in parts:
        end = done + part.nbytes
        np.copyto(part, _shaped(memory[done:end], part))
        done = end


def _collect(parts: Sequence[Array], memory: Bytes) -> None:
    done = 0
    for part in parts:
        end = done + part.nbytes
        np.copyto(_shaped(memory[done:end], part), part)
        done = end


def _shaped(memory: Bytes, part: Array) -> Array:
    if part.dtype != _BYTE:
        return memory.view(part.dtype).reshape(part.shape)
    return memory if part.ndim == 1 else memory.reshape(part.shape)


def _gather(given: object) -> Gather:
    buffers = (given,) if isinstance(given, _BUFFERS) else given
    if not isinstance(buffers, Sequence):
        raise InvalidArgument(f"buffers of a piece are arrays, not {type(given).__name__}")
    arrays = [array for array in map(_array, buffers) if array.nbytes]
    ends = tuple(accumulate(array.nbytes for array in arrays))
    is_writable = all(array.flags.writeable for array in arrays)
    parts = tuple([_as_bytes(array) for array in arrays])
    spread = None if native.copies is None else native.copies.spread(parts)
    return Gather(parts, ends, is_writable, spread)


def _array(given: object) -> Array:
    if isinstance(given, bytes | bytearray | memoryview):
        try:
            return np.frombuffer(given, dtype=np.uint8)
        except (ValueError, BufferError) as error:
            raise InvalidArgument(f"a buffer is not contiguous: {error}") from error
    if not isinstance(given, np.ndarray) or given.dtype.hasobject:
        raise InvalidArgument(f"a buffer is an array of numbers, not {type(given).__name__}")
    return given


def _as_bytes(array: Array) -> Array:
    """Bytes where the memory allows: copied by runs, whatever the type of the elements."""
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8)
    return array.view(np.uint8) if array.strides[-1] == array.itemsize else array
