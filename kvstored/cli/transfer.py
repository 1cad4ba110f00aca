"""Blocks from and to files or pipes: their bytes back to back, in key then group order, a bounded part of them in memory at a time."""

import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvstored.client import Keys, Namespace, ReadStatus
from kvstored.client.rows import selection_of
from kvstored.core.groups import expected_bytes
from kvstored.core.types import BATCH_KEYS_MAX
from kvstored.errors import InvalidArgument, NotFound

PART_BYTES = 64 << 20
Advance = Callable[[int], None]


def parts_of(keys: Keys, bytes_per_block: int) -> Iterator[Keys]:
    """Runs of keys that fit one call and PART_BYTES."""
    step = min(max(PART_BYTES // max(bytes_per_block, 1), 1), BATCH_KEYS_MAX)
    for start in range(0, len(keys), step):
        yield keys[start : start + step]


class Shape:
    """The sizes of the pieces of each block in a call of these groups (none named: the required ones)."""

    def __init__(self, namespace: Namespace, groups: Sequence[str]) -> None:
        spec = namespace.spec
        self.names = list(groups) or None
        self._groups = [spec.groups[i] for i in selection_of(spec, self.names).groups]
        self._block_tokens = spec.block_tokens

    def pieces(self, valid_tokens: int) -> list[int]:
        """0 tokens: a full block."""
        valid_tokens = valid_tokens or self._block_tokens
        return [expected_bytes(group, valid_tokens, self._block_tokens) for group in self._groups]

    @property
    def block_bytes(self) -> int:
        return sum(self.pieces(0))

    def total_bytes(self, keys: Keys) -> int:
        last = sum(self.pieces(keys.last_valid_tokens))
        return self.block_bytes * (len(keys) - 1) + last if len(keys) else 0


def put_from(
    source: BinaryIO,
    namespace: Namespace,
    keys: Keys,
    shape: Shape,
    *,
    shard: int,
    advance: Advance,
) -> Counter[str]:
    """How many blocks ended how. Refuses input of another length than the keys', before storing anything where the length can be known."""
    wanted = shape.total_bytes(keys)
    status = os.fstat(source.fileno()) if _has_descriptor(source) else None
    if status is not None and stat.S_ISREG(status.st_mode):
        _check_length(status.st_size - source.tell(), wanted, namespace, keys)
    outcome: Counter[str] = Counter()
    done = 0
    for part in parts_of(keys, shape.block_bytes):
        content = source.read(shape.total_bytes(part))
        done += len(content)
        if done < wanted and len(content) < shape.total_bytes(part):
            _check_length(done, wanted, namespace, keys)
        if done == wanted and source.read(1):
            raise InvalidArgument(f"input is longer than the blocks: blocks_bytes={wanted}")
        result = namespace.put(part, _rows(content, part, shape), groups=shape.names, shard=shard)
        outcome.update(each.name.lower() for each in result.status)
        advance(len(content))
    return outcome


def get_into(
    sink: BinaryIO, namespace: Namespace, keys: Keys, shape: Shape, *, shard: int, advance: Advance
) -> int:
    """Bytes written; NotFound at the first block that is not there any more."""
    written = 0
    for part in parts_of(keys, shape.block_bytes):
        found = namespace.get(part, groups=shape.names, shard=shard)
        for key, block, status in zip(part, found.blocks, found.status, strict=True):
            if block is None or status is not ReadStatus.HIT:
                reason = found.miss_reason or ("corrupt" if found.corrupt else "unknown")
                raise NotFound(f"block is not there: key={key.hex()} reason={reason}")
            for piece in block:
                if piece is not None:
                    sink.write(piece.data)
                    written += piece.size
                    advance(piece.size)
    return written


@contextmanager
def source_of(file: Path | None) -> Iterator[BinaryIO]:
    """The file, or stdin."""
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
        return
    try:
        opened = file.open("rb")
    except OSError as error:
        raise InvalidArgument(f"input cannot be read: file={file} error={error}") from error
    with opened:
        yield opened


@contextmanager
def sink_of(file: Path | None) -> Iterator[BinaryIO]:
    """The file, which is made or replaced only when all went well, or stdout. A device or a pipe is written to, not replaced."""
    if file is None or str(file) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if file.is_dir():
        raise InvalidArgument(f"output is a directory: file={file}; name a file in it")
    if file.exists() and not file.is_file():
        with _writing(file), file.open("wb") as opened:
            yield opened
        return
    beside = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with _writing(file):
            with beside.open("xb") as opened:
                yield opened
            beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"output cannot be written: file={file} error={error}") from error


def _rows(content: bytes, part: Keys, shape: Shape) -> list[list[np.ndarray | None]]:
    view, at = np.frombuffer(content, dtype=np.uint8), 0
    rows: list[list[np.ndarray | None]] = []
    for i in range(len(part)):
        row: list[np.ndarray | None] = []
        for size in shape.pieces(part.last_valid_tokens if i == len(part) - 1 else 0):
            row.append(view[at : at + size] if size else None)
            at += size
        rows.append(row)
    return rows


def _check_length(got: int, wanted: int, namespace: Namespace, keys: Keys) -> None:
    if got != wanted:
        raise InvalidArgument(
            f"input has another length than the blocks: bytes={got} blocks_bytes={wanted} "
            f"blocks={len(keys)} last_valid_tokens={keys.last_valid_tokens} block_tokens={namespace.spec.block_tokens}"
        )


def _has_descriptor(source: BinaryIO) -> bool:
    try:
        source.fileno()
    except OSError:
        return False
    return True
