"""Readers of request traces: the Mooncake JSONL format and kvt1, plain or gzipped.

Both give a stream of `Request` with the ids of the blocks of its prompt. Ids are chained: an equal id means an equal prefix. A file
is read as a stream and may be iterated again; only kvt1 keeps something per row (five integers), because later rows refer to earlier ones.
Anything malformed is an `InvalidArgument` that names the file and the line; this module guesses and repairs nothing.
"""

import gzip
import json
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstored.errors import InvalidArgument

BlockIds = NDArray[np.int64]
"""Ids of the blocks of one path, root first."""

MOONCAKE_BLOCK_TOKENS = 512
LINE_BYTES_MAX = 16 << 20
REQUEST_BLOCKS_MAX = 1 << 20
TOKENS_MAX = 1 << 31
KVT1_COLUMNS = "ts_ms,in_tokens,out_tokens,ref,keep,new,tag"
KVT1_FIELDS = KVT1_COLUMNS.count(",") + 1


class Format(StrEnum):
    MOONCAKE = "mooncake"
    KVT1 = "kvt1"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace, `ts_s` seconds after the trace's zero; `tag` is a free label (kvt1: the session)."""

    ts_s: float
    input_tokens: int
    output_tokens: int
    block_ids: BlockIds
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A readable trace file; every iteration reads it from its start."""

    path: Path
    format: Format
    name: str
    block_tokens: int

    def __iter__(self) -> Iterator[Request]:
        rows = _mooncake if self.format is Format.MOONCAKE else _kvt1
        last_s = 0.0
        for line, request in rows(self.path):
            if request.ts_s < last_s:
                raise _malformed(
                    self.path, line, f"time goes back ts_s={request.ts_s} before={last_s}"
                )
            last_s = request.ts_s
            yield request


def open_trace(path: Path) -> Trace:
    """Look at the first line and tell what trace this is; the rest is read by iterating."""
    line, first = next(_lines(path), (1, b""))
    if first.startswith(b"#kvt1"):
        return _kvt1_trace(path, first)
    if first.startswith(b"{"):
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        return Trace(path, Format.MOONCAKE, name, MOONCAKE_BLOCK_TOKENS)
    what = "not a trace: neither Mooncake JSONL ('{') nor kvt1 ('#kvt1 {')"
    raise _malformed(path, line, what)


def _kvt1_trace(path: Path, first: bytes) -> Trace:
    try:
        meta = json.loads(first.removeprefix(b"#kvt1"))
    except ValueError as error:
        raise _malformed(path, 1, f"kvt1 head is not JSON: {error}") from error
    name = meta.get("name") if isinstance(meta, dict) else None
    if not isinstance(name, str) or not name:
        raise _malformed(path, 1, "kvt1 head has no name")
    block_tokens = _integer(path, 1, "block_tokens", meta.get("block_tokens"), 1, TOKENS_MAX)
    return Trace(path, Format.KVT1, name, block_tokens)


def _mooncake(path: Path) -> Iterator[tuple[int, Request]]:
    for line, text in _lines(path):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _malformed(path, line, f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise _malformed(path, line, "not a JSON object")
        ts_ms = row.get("timestamp")
        if isinstance(ts_ms, bool) or not isinstance(ts_ms, int | float) or not 0 <= ts_ms < 1e15:
            raise _malformed(path, line, f"timestamp is no time in ms timestamp={ts_ms!r}")
        yield (
            line,
            Request(
                ts_ms / 1000,
                _integer(path, line, "input_length", row.get("input_length"), 0, TOKENS_MAX),
                _integer(path, line, "output_length", row.get("output_length"), 0, TOKENS_MAX),
                _hash_ids(path, line, row.get("hash_ids")),
            ),
        )


def _hash_ids(path: Path, line: int, ids: object) -> BlockIds:
    if not isinstance(ids, list) or len(ids) > REQUEST_BLOCKS_MAX:
        raise _malformed(path, line, f"hash_ids is no list of at most {REQUEST_BLOCKS_MAX} ids")
    if not set(map(type, ids)) <= {int}:
        raise _malformed(path, line, "hash_ids holds something that is no integer")
    if len(set(ids)) != len(ids):
        raise _malformed(path, line, "hash_ids names a block twice: ids must be chained hashes")
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 63:
        raise _malformed(path, line, f"hash_ids out of range 0..2**63-1 min={min(ids)}")
    return np.array(ids, dtype=np.int64)


def _kvt1(path: Path) -> Iterator[tuple[int, Request]]:
    paths = _Paths()
    for line, text in _lines(path):
        if line == 1:
            continue
        try:
            fields = text.decode().rstrip("\r\n").split(",", KVT1_FIELDS - 1)
        except UnicodeDecodeError as error:
            raise _malformed(path, line, f"not UTF-8: {error.reason}") from error
        if len(fields) != KVT1_FIELDS:
            raise _malformed(path, line, f"not a row of {KVT1_COLUMNS} columns={len(fields)}")
        ts_ms, in_tokens, out_tokens, ref, keep, new = (
            _decimal(path, line, name, field)
            for name, field in zip(KVT1_COLUMNS.split(","), fields[:-1], strict=False)
        )
        if min(ts_ms, in_tokens, out_tokens, keep, new) < 0:
            raise _malformed(path, line, "a count or time is negative")
        if not -1 <= ref < len(paths):
            raise _malformed(path, line, f"ref is no earlier row ref={ref} rows={len(paths)}")
        if keep > (paths.length(ref) if ref >= 0 else 0):
            raise _malformed(
                path, line, f"keep is longer than the row of ref keep={keep} ref={ref}"
            )
        if keep + new > REQUEST_BLOCKS_MAX or max(in_tokens, out_tokens) > TOKENS_MAX:
            raise _malformed(path, line, f"too long blocks={keep + new} in_tokens={in_tokens}")
        block_ids = paths.add(ref, keep, new)
        yield line, Request(ts_ms / 1000, in_tokens, out_tokens, block_ids, fields[-1])


class _Paths:
    """The paths of all kvt1 rows so far, each as (row it shares with, blocks shared, first id of its own, blocks of its own)."""

    def __init__(self) -> None:
        self._ref = array("q")
        self._keep = array("q")
        self._first = array("q")
        self._new = array("q")
        self._ids = 0

    def __len__(self) -> int:
        return len(self._ref)

    def length(self, row: int) -> int:
        return self._keep[row] + self._new[row]

    def add(self, ref: int, keep: int, new: int) -> BlockIds:
        """Append a row and return the ids of its blocks; its own get ids that no block had before."""
        row, first = len(self), self._ids
        for column, value in (
            (self._ref, ref),
            (self._keep, keep),
            (self._first, first),
            (self._new, new),
        ):
            column.append(value)
        self._ids += new
        return self._path(row)

    def _path(self, row: int) -> BlockIds:
        need = self.length(row)
        ids = np.empty(need, dtype=np.int64)
        while need:
            keep = self._keep[row]
            if need > keep:
                first = self._first[row]
                ids[keep:need] = np.arange(first, first + need - keep)
                need = keep
            row = self._ref[row]
        return ids


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without blank ones, of a plain or gzipped file."""
    line = 0
    try:
        with _open(path) as file:
            while text := file.readline(LINE_BYTES_MAX + 1):
                line += 1
                if len(text) > LINE_BYTES_MAX:
                    raise _malformed(path, line, f"line is longer than {LINE_BYTES_MAX} bytes")
                if not text.isspace():
                    yield line, text
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise _malformed(path, line + 1, f"damaged gzip file: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"cannot read the trace path={path}: {error.strerror}") from error


def _open(path: Path) -> BufferedIOBase:
    with path.open("rb") as file:
        is_gzipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzipped else path.open("rb")


def _integer(path: Path, line: int, name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _malformed(path, line, f"{name} is no integer in {low}..{high} {name}={value!r}")
    return value


def _decimal(path: Path, line: int, name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise _malformed(path, line, f"{name} is no integer {name}={text[:40]!r}") from error
    if abs(value) >= 1 << 62:
        raise _malformed(path, line, f"{name} is out of range {name}={text[:40]!r}")
    return value


def _malformed(path: Path, line: int, what: str) -> InvalidArgument:
    return InvalidArgument(f"malformed trace: {what} path={path} line={line}")
