"""A piece of a block spread over several arrays of the caller: the layers of an engine's paged KV cache, filled without a copy in between.

A piece is walked in order of its bytes: what belongs to an array is copied and hashed there, step by step while it is in the core's cache; what
lies outside the wanted ranges is only hashed, in place. So a part of a piece verifies as the whole: its private bytes have the checksum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.client.copying import STEP_BYTES, Bytes
from kvstored.errors import InvalidArgument

Array = NDArray[np.generic]
Buffer = Array | bytes | bytearray | memoryview
Buffers = Buffer | Sequence[Buffer]
"""Of one piece: its bytes in order, in one array or several, each of which may be strided."""
BufferRow = Buffers | Sequence[Buffers | None]
"""Of one block: the buffers of its piece where one group is selected, else one such list a selected group, None for nothing."""
Ranges = Sequence[tuple[int, int]]
"""(offset, length) in bytes of a piece, ascending, apart."""

_RUN_BYTES_MIN = 256
"""Strided arrays with shorter runs of memory are copied by numpy's strides instead of run by run."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Parts of one piece, in order: bytes in one run, or an array that stays strided."""

    parts: tuple[Array, ...]
    ends: tuple[int, ...]
    """Of the caller's buffers, in bytes: a range ends where a buffer does."""

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def joined(self) -> Bytes:
        """A copy in one run, for where there is no memory to share."""
        flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in self.parts]
        return np.concatenate(flat) if flat else np.empty(0, dtype=np.uint8)


class Walk(NamedTuple):
    """One piece: its extents, the parts for it, and the ranges of the piece that they are, all of it where None."""

    shared: tuple[Bytes, ...]
    gather: Gather
    ranges: tuple[tuple[int, int], ...] | None


def gathers_of(
    rows: Sequence[BufferRow], keys: int, groups: int, *, writable: bool
) -> list[Gather | None]:
    """The buffers of every piece, in the order of the protocol."""
    if len(rows) != keys:
        raise InvalidArgument(f"one row of buffers a key rows={len(rows)} keys={keys}")
    found: list[Gather | None] = []
    for row in rows:
        lists = (row,) if groups == 1 else row
        if isinstance(lists, np.ndarray | bytes | bytearray | memoryview) or len(lists) != groups:
            raise InvalidArgument(f"one list of buffers a selected group groups={groups}")
        found += [None if each is None else _gather(each, writable=writable) for each in lists]
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


def scatter(walk: Walk) -> list[int]:
    """Shared to private, and the checksum of the piece as the private side has it."""
    hasher = xxhash.xxh3_64()
    at = 0
    for part, start in _placed(walk):
        for skipped in _between(walk.shared, at, start):
            hasher.update(skipped.data)
        at = start + part.nbytes
        _part_out(part, walk.shared, start, hasher)
    for skipped in _between(walk.shared, at, sum(extent.size for extent in walk.shared)):
        hasher.update(skipped.data)
    return [hasher.intdigest()]


def scatter_unchecked(walk: Walk) -> list[int]:
    """Shared to private; reads nothing outside the ranges."""
    for part, start in _placed(walk):
        _part_out(part, walk.shared, start, None)
    return []


def gather(walk: Walk) -> list[int]:
    """Private to shared, and the checksum of the private side."""
    hasher = xxhash.xxh3_64()
    for part, start in _placed(walk):
        source, done = np.ascontiguousarray(part).reshape(-1).view(np.uint8), 0
        for shared in _between(walk.shared, start, start + part.nbytes):
            private = source[done : done + shared.size]
            np.copyto(shared, private)
            hasher.update(private.data)
            done += shared.size
    return [hasher.intdigest()]


def _part_out(
    part: Array, shared: tuple[Bytes, ...], start: int, hasher: "xxhash.xxh3_64 | None"
) -> None:
    if not part.flags.c_contiguous:
        runs = list(_between(shared, start, start + part.nbytes))
        source = runs[0] if len(runs) == 1 else np.concatenate(runs)
        np.copyto(part, source.view(part.dtype).reshape(part.shape))
        if hasher is not None:
            hasher.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        return
    private, done = part.view(np.uint8), 0
    for run in _between(shared, start, start + part.nbytes):
        target = private[done : done + run.size]
        np.copyto(target, run)
        if hasher is not None:
            hasher.update(target.data)
        done += run.size


def _placed(walk: Walk) -> list[tuple[Array, int]]:
    """Every part with its offset in the piece."""
    placed: list[tuple[Array, int]] = []
    ranges = list(walk.ranges or ((0, walk.gather.size),))
    at, end = ranges[0][0], sum(ranges[0])
    turn = 0
    for part in walk.gather.parts:
        if at == end:
            turn += 1
            at, end = ranges[turn][0], sum(ranges[turn])
        placed.append((part, at))
        at += part.nbytes
    return placed


def _between(shared: tuple[Bytes, ...], start: int, end: int) -> list[Bytes]:
    """Bytes start..end of the extents, in steps that fit a core's cache."""
    runs: list[Bytes] = []
    first = 0
    for extent in shared:
        a, b = max(start - first, 0), min(end - first, extent.size)
        runs += [extent[i : min(i + STEP_BYTES, b)] for i in range(a, b, STEP_BYTES)]
        first += extent.size
    return runs


def _gather(given: object, *, writable: bool) -> Gather:
    buffers = (given,) if isinstance(given, np.ndarray | bytes | bytearray | memoryview) else given
    if not isinstance(buffers, Sequence | np.ndarray):
        raise InvalidArgument(f"buffers of a piece are arrays, not {type(given).__name__}")
    parts: list[Array] = []
    ends: list[int] = []
    end = 0
    for each in buffers:
        array = _array(each, writable=writable)
        if not array.nbytes:
            continue
        parts += _parts(array)
        end += array.nbytes
        ends.append(end)
    return Gather(tuple(parts), tuple(ends))


def _array(given: object, *, writable: bool) -> Array:
    if isinstance(given, bytes | bytearray | memoryview):
        given = np.frombuffer(given, dtype=np.uint8)
    if not isinstance(given, np.ndarray) or given.dtype.hasobject:
        raise InvalidArgument(f"a buffer is an array of numbers, not {type(given).__name__}")
    if writable and not given.flags.writeable:
        raise InvalidArgument(f"a buffer to read into is writable shape={given.shape}")
    return given


def _parts(array: Array) -> list[Array]:
    """Runs of memory of an array, as bytes; the array itself where they are short."""
    if array.flags.c_contiguous:
        return [array.reshape(-1).view(np.uint8)]
    axis, run_bytes = array.ndim, array.itemsize
    while axis and array.strides[axis - 1] == run_bytes:
        axis -= 1
        run_bytes *= array.shape[axis]
    if run_bytes < _RUN_BYTES_MIN or axis == array.ndim:
        return [array]
    return [array[i].reshape(-1).view(np.uint8) for i in np.ndindex(array.shape[:axis])]
