"""Rows of arrays as callers give them, checked and flattened to the pieces of a call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstored.client.copying import Bytes
from kvstored.client.keys import Keys, checked
from kvstored.client.results import Block
from kvstored.client.runs import Packed, Privates
from kvstored.client.segments import Fetch, Segments, extent_of
from kvstored.core.groups import consumable
from kvstored.core.types import NamespaceSpec
from kvstored.errors import InvalidArgument
from kvstored.wire.packing import U8S, U64S, Pieces, mask_of

Array = NDArray[np.generic]
Row = Array | bytes | bytearray | memoryview | Sequence[Array | None]
"""One block: an array (or buffer) where one group is selected, else one array a selected group, None where nothing is put."""
Rows = Sequence[Row] | Array


class Sized(Protocol):
    """The bytes of a piece, an array or a list of buffers."""

    @property
    def size(self) -> int: ...


Source = TypeVar("Source", bound=Sized)

_BYTE = np.dtype(np.uint8)
_PART_BYTES_MAX = 64 << 20
"""Bytes of one Reserve: a larger put goes in parts, each copied while the one before is committed and the one after reserved. Smaller
parts cost more round trips than they hide: 16 MiB took 12 ms for 64 blocks of 1 MiB where 64 MiB took 8."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups that a call is about, in namespace order; whether every block has all of them."""

    groups: tuple[int, ...]
    mask: int
    are_required: bool


def selection_of(spec: NamespaceSpec, names: Sequence[str] | None) -> Selection:
    """`names`: None selects the required groups."""
    if names is None:
        required = tuple(i for i, group in enumerate(spec.groups) if group.is_required)
        return Selection(required, 0, are_required=True)
    known = {group.name: i for i, group in enumerate(spec.groups)}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise InvalidArgument(f"no such group names={unknown} known={sorted(known)}")
    groups = tuple(sorted({known[name] for name in names}))
    are_required = all(spec.groups[group].is_required for group in groups)
    return Selection(groups, mask_of(groups), are_required)


def sources_of(rows: Rows, keys: Keys, selection: Selection) -> list[Bytes | None]:
    """The bytes of every piece, in the order of the protocol; a copy is made only of arrays that are not contiguous."""
    if len(rows) != len(checked(keys)):
        raise InvalidArgument(f"one row of arrays a key rows={len(rows)} keys={len(keys)}")
    one_group = len(selection.groups) == 1
    if isinstance(rows, np.ndarray) and one_group and _is_plain(rows):
        is_flat = rows.ndim == 2 and rows.dtype == _BYTE
        return list(rows if is_flat else rows.reshape(len(rows), -1).view(np.uint8))
    sources: list[Bytes | None] = []
    for row in rows:
        if type(row) is np.ndarray and row.dtype == _BYTE and row.ndim == 1 and one_group:
            sources.append(np.ascontiguousarray(row, dtype=_BYTE))
            continue
        if isinstance(row, (np.ndarray, bytes, bytearray, memoryview)):
            row = (row,)  # noqa: PLW2901 - one group: the row is its array
        _check_is_row(row)
        if len(row) != len(selection.groups):
            raise InvalidArgument(
                f"one array a selected group arrays={len(row)} groups={len(selection.groups)}"
            )
        sources += [_bytes_of(array) for array in row]
    return sources


def worth_storing(
    sources: Sequence[Source | None],
    spec: NamespaceSpec,
    selection: Selection,
    keys: Keys,
    *,
    ends_path: bool,
) -> list[Source | None]:
    """None for the window and state pieces that no future hit can consume under the namespace's checkpoint policy."""
    if keys.unchained or selection.are_required:
        return list(sources)
    kept = consumable(
        spec, keys.first_block, len(keys), keys.last_valid_tokens, ends_path=ends_path
    )
    flat = kept[:, list(selection.groups)].reshape(-1).tolist()
    return [source if is_kept else None for source, is_kept in zip(sources, flat, strict=True)]


def sizes_of(sources: Sequence[Sized | None]) -> list[int]:
    return [0 if source is None else source.size for source in sources]


def parts_of(sizes: Sequence[int], groups: int) -> Iterator[tuple[int, int]]:
    """Runs of keys of at most _PART_BYTES_MAX each, or of one key. `sizes`: of their pieces."""
    start, run_bytes = 0, 0
    count = len(sizes) // max(groups, 1)
    for i in range(count):
        key_bytes = sizes[i] if groups == 1 else sum(sizes[i * groups : (i + 1) * groups])
        if i > start and run_bytes + key_bytes > _PART_BYTES_MAX:
            yield start, i
            start, run_bytes = i, 0
        run_bytes += key_bytes
    if start < count:
        yield start, count


def shared_runs(pieces: Pieces, i: int, segments: dict[int, Bytes]) -> tuple[Bytes, ...]:
    """Piece i where it lies in the mapped segments."""
    first, last = int(pieces.first[i]), int(pieces.first[i + 1])
    extents = pieces.extents[first:last].tolist()
    return tuple(extent_of(segments, *extent) for extent in extents)


def segments_of(pieces: Pieces) -> list[int]:
    """Numbers of the segments that the pieces lie in."""
    return sorted(set(pieces.extents[:, 0].tolist()))


def outputs_of(sizes: U64S, hits: Sequence[bool], out: Rows | None) -> list[list[Bytes | None]]:
    """A private array for every piece of every hit: slices of one new allocation, or the caller's `out`."""
    wanted: list[list[int]] = [
        row if hit else [0] * len(row) for row, hit in zip(sizes.tolist(), hits, strict=True)
    ]
    if out is not None:
        return _given_outputs(wanted, hits, out)
    memory = np.empty(sum(map(sum, wanted)), dtype=np.uint8)
    outputs: list[list[Bytes | None]] = []
    offset = 0
    for row in wanted:
        outputs.append([])
        for size in row:
            outputs[-1].append(memory[offset : offset + size] if size else None)
            offset += size
    return outputs


def private_of(size: int, out: Rows | None) -> Bytes:
    """The private side of the one piece of a get of one key."""
    if out is None:
        return np.empty(size, dtype=np.uint8)
    ((private,),) = _given_outputs([[size]], [True], out)
    assert private is not None, "a piece has bytes"
    return private


def privates_of(sizes: U64S, hits: U8S, out: Rows | None) -> Privates:
    """A private side for every piece of every hit: one new allocation, or the caller's `out`."""
    wanted: NDArray[np.int64] = np.where(hits[:, np.newaxis], sizes, 0).astype(np.int64).reshape(-1)
    starts = np.zeros(len(wanted) + 1, dtype=np.int64)
    np.cumsum(wanted, out=starts[1:])
    if out is None:
        return Packed(np.empty(int(starts[-1]), dtype=np.uint8), starts[:-1], wanted)
    memory = plain_rows(out, len(wanted)) if sizes.shape[1] == 1 else None
    row_bytes = 0 if memory is None else memory.size // len(wanted)
    if memory is not None and wanted.max(initial=0) <= row_bytes:
        return Packed(memory, np.arange(len(wanted), dtype=np.int64) * row_bytes, wanted)
    rows: list[list[int]] = [row.tolist() for row in wanted.reshape(sizes.shape)]
    return [each for row in _given_outputs(rows, hits.tolist(), out) for each in row]


def plain_rows(out: Rows, count: int) -> Bytes | None:
    """The bytes of a writable array of so many rows that lie one behind the other; None where `out` is something else."""
    if not isinstance(out, np.ndarray) or not _is_plain(out) or len(out) != count:
        return None
    return out.reshape(-1).view(np.uint8) if out.flags.writeable else None


def blocks_of(outputs: list[list[Bytes | None]], good: Sequence[bool]) -> tuple[Block | None, ...]:
    return tuple(tuple(row) if ok else None for row, ok in zip(outputs, good, strict=True))


def _given_outputs(
    wanted: list[list[int]], hits: Sequence[bool], out: Rows
) -> list[list[Bytes | None]]:
    if len(out) != len(wanted):
        raise InvalidArgument(f"one row of `out` a key rows={len(out)} keys={len(wanted)}")
    outputs: list[list[Bytes | None]] = []
    for row, sizes, hit in zip(out, wanted, hits, strict=True):
        if type(row) is np.ndarray and row.dtype == _BYTE and row.ndim == 1 and len(sizes) == 1:
            outputs.append([_fitting(row, sizes[0]) if hit and sizes[0] else None])
            continue
        arrays = (row,) if isinstance(row, (np.ndarray, bytearray, memoryview)) else row
        if len(arrays) != len(sizes):
            raise InvalidArgument(f"one array a selected group in `out` arrays={len(arrays)}")
        outputs.append(
            [
                _output(array, size) if hit and size else None
                for array, size in zip(arrays, sizes, strict=True)
            ]
        )
    return outputs


def _output(array: object, size: int) -> Bytes:
    given = (
        np.frombuffer(array, dtype=np.uint8)
        if isinstance(array, (bytearray, memoryview))
        else array
    )
    if (
        not isinstance(given, np.ndarray)
        or not given.flags.c_contiguous
        or not given.flags.writeable
        or given.nbytes < size
    ):
        raise InvalidArgument(f"`out` needs writable contiguous arrays of at least bytes={size}")
    return given.reshape(-1).view(np.uint8)[:size]


def _fitting(array: Bytes, size: int) -> Bytes:
    """`_output` for an array of bytes, which is what a hot loop gives."""
    if array.size == size and array.flags.writeable and array.flags.c_contiguous:
        return array
    return _output(array, size)


def _is_plain(rows: Array) -> bool:
    """Rows that lie one behind the other in memory."""
    return rows.ndim > 1 and rows.flags.c_contiguous and rows.size > 0 and not rows.dtype.hasobject


def _check_is_row(row: object) -> None:
    if not isinstance(row, Sequence):
        raise InvalidArgument(
            f"a row is an array, or a list with one array a group, not {type(row).__name__}"
        )


def _bytes_of(array: object) -> Bytes | None:
    if array is None:
        return None
    if isinstance(array, (bytes, bytearray, memoryview)):
        return np.frombuffer(array, dtype=np.uint8)
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"a piece is an array or a buffer, not {type(array).__name__}")
    if array.dtype.hasobject:
        raise InvalidArgument(
            f"an array of objects has no bytes to store: dtype={array.dtype} shape={array.shape}; "
            "make it one of numbers, np.asarray(..., dtype=np.uint8)"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def mapped_segments(
    segments: Segments, pieces: Pieces, epoch: int, fetch: Fetch
) -> dict[int, Bytes]:
    return {n: segments.mapped(n, epoch, fetch) for n in segments_of(pieces)}
