"""The LMDB environment of the disk tier: records by (fingerprint, group, shard), durable at every commit. With disk_walk the one module that knows lmdb.

The map is bounded and allocated on the disk when it is made. Its last tenth is for deletes, which need pages too.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np

from kvstored.core.types import UNIT_BYTES, Fingerprints
from kvstored.errors import Busy, Corrupt, KvstoredError, NoSpace, StateMismatch, Unavailable
from kvstored.tiers.base import PieceRef, ref_of
from kvstored.tiers.disk_walk import fault_of
from kvstored.tiers.record import Record
from kvstored.tiers.slabs import translated
from kvstored.tiers.values import lies_at, pack_value, unpack_value

VERSION = 1
MAP_BYTES_MIN = 1 << 20
_SUPERBLOCK = struct.Struct("<4sII")
_MAGIC = b"KVD1"
_KEY = struct.Struct(">16sHH")
KEY_END = 1 << (8 * _KEY.size)
_PUT_SHARE = 0.9
_PAGES_PER_PUT = 0.25
"""A record fills about a twelfth of a page; halves after splits, and a margin."""
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadTxnError)
"""The last of a transaction that went on after one of the others."""
_READERS_MAX = 126
_ADVICE_BYTES = 128 << 10
"""Linux cuts a larger request to the device's read-ahead without a word."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RawBatch:
    """Keys and values in key order; `cursor` is where the next batch starts, KEY_END after the last."""

    keys: list[bytes]
    values: list[bytes]
    cursor: int


@dataclass(frozen=True, slots=True)
class Change:
    """`apply` makes the later value of the record of `key` from the present one, if it still has this packed place."""

    key: bytes
    place: bytes
    apply: Callable[[bytes], bytes]


class RecordEnv:
    """Opens or makes the environment; raises StateMismatch when it is another version's or damaged, NoSpace when it does not fit."""

    def __init__(self, directory: Path, map_bytes: int) -> None:
        assert map_bytes >= MAP_BYTES_MIN
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = directory / "data.mdb"
        self._unfinished = directory / "scanning"
        if self._unfinished.exists() and (fault := fault_of(directory)):
            raise StateMismatch(f"disk index is damaged: path={directory} {fault}")
        try:
            self._env = lmdb.open(
                str(directory),
                map_size=map_bytes,
                max_dbs=2,
                max_readers=_READERS_MAX,
                readahead=False,
                mode=0o600,
            )
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
            raise StateMismatch(
                f"disk index is damaged or not ours: path={directory} cause={error}"
            ) from error
        except lmdb.Error as error:
            raise _translated(error) from error
        try:
            self._prepare(directory, map_bytes)
        except BaseException:
            self._env.close()
            raise

    def get(self, refs: Sequence[PieceRef]) -> list[Record | Corrupt | None]:
        """The record of each piece, from one snapshot; None where there is none."""
        with _translating(), self._env.begin(db=self._records) as txn:
            values = [txn.get(key_of(ref)) for ref in refs]
        return [_parsed(ref, value) for ref, value in zip(refs, values, strict=True)]

    def values(self, keys: Sequence[bytes]) -> list[bytes]:
        """The raw values of distinct keys, from one snapshot; empty where there is none."""
        with _translating(), self._env.begin(db=self._records) as txn, txn.cursor() as cursor:
            found = cursor.getmulti(keys)
        if len(found) == len(keys):
            return [value for _, value in found]
        there = dict(found)
        return [there.get(key, b"") for key in keys]

    def put(self, records: Sequence[Record]) -> None:
        self.put_rows([(key_of(ref_of(record)), pack_value(record)) for record in records])

    def put_rows(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Packed keys and values: all or none, in one commit. Raises NoSpace when that would leave too little of the map for deletes."""
        with _translating():
            if self.used_share(len(rows)) > _PUT_SHARE:
                raise NoSpace(f"disk index is full: records={self.count()}")
            with self._env.begin(write=True, db=self._records) as txn, txn.cursor() as cursor:
                cursor.putmulti(sorted(rows))

    def remove(self, items: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        """Delete each (key, packed place) that still has this place; the values that were there.

        One commit, or several small ones when the map is nearly full.
        """
        if not items:
            return []
        with _translating():
            return self._in_parts(items, self._removed)

    def rewrite(self, changes: Sequence[Change]) -> None:
        """Change the records that are still at these places."""
        if changes:
            with _translating():
                self._in_parts(sorted(changes, key=lambda change: change.key), self._rewritten)

    def batch(self, cursor: int, limit: int) -> RawBatch:
        if cursor >= KEY_END:
            return RawBatch([], [], KEY_END)
        if cursor == 0:
            self._warm()
            # whoever dies of a damaged page in this scan would do so again and again: the next to open walks through it first
            with suppress(OSError):
                self._unfinished.touch()
        with _translating(), self._env.begin(db=self._records) as txn:
            rows = txn.cursor()
            found: list[tuple[bytes, bytes]] = []
            if rows.set_range(cursor.to_bytes(_KEY.size, "big")):
                found = list(islice(rows.iternext(), limit))
        following = int.from_bytes(found[-1][0], "big") + 1 if len(found) == limit else KEY_END
        if following == KEY_END:
            with suppress(OSError):
                self._unfinished.unlink(missing_ok=True)
        return RawBatch([key for key, _ in found], [value for _, value in found], following)

    def used_share(self, puts: int = 0) -> float:
        """Pages in use of all pages of the map, after so many more records."""
        with _translating(), self._env.begin() as txn:
            stats = [txn.stat(self._records), txn.stat(self._meta)]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        info = self._env.info()
        return (pages + puts * _PAGES_PER_PUT) * stats[0]["psize"] / info["map_size"]

    def count(self) -> int:
        with _translating(), self._env.begin() as txn:
            entries: int = txn.stat(self._records)["entries"]
            return entries

    def close(self) -> None:
        self._env.close()

    def _prepare(self, directory: Path, map_bytes: int) -> None:
        """Take the space of the whole map now, so that a full disk cannot stop a delete, and check or write the superblock."""
        try:
            fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, 0, map_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise translated(error, f"no space for the disk index: bytes={map_bytes}") from error
        with _translating():
            self._meta = self._env.open_db(b"meta")
            self._records = self._env.open_db(b"records")
            with self._env.begin(write=True, db=self._meta) as txn:
                raw = txn.get(b"superblock")
                if raw is None:
                    txn.put(b"superblock", _SUPERBLOCK.pack(_MAGIC, VERSION, UNIT_BYTES))
        if raw is not None:
            _check_superblock(directory, raw)

    def _in_parts(
        self, items: Sequence[T], act: Callable[[Sequence[T]], list[bytes | None]]
    ) -> list[bytes | None]:
        """One transaction, or halves of it again and again while the map has too few free pages for the whole."""
        try:
            return act(items)
        except lmdb.MapFullError:
            if len(items) <= 1:
                raise
        middle = len(items) // 2
        return self._in_parts(items[:middle], act) + self._in_parts(items[middle:], act)

    def _removed(self, items: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        found: list[bytes | None] = []
        with self._env.begin(write=True, db=self._records) as txn:
            for key, place in items:
                value = txn.get(key)
                is_there = value is not None and lies_at(value, place)
                if is_there:
                    txn.delete(key)
                found.append(value if is_there else None)
        return found

    def _rewritten(self, changes: Sequence[Change]) -> list[bytes | None]:
        with self._env.begin(write=True, db=self._records) as txn:
            for change in changes:
                value = txn.get(change.key)
                if value is not None and lies_at(value, change.place):
                    txn.put(change.key, change.apply(value))
        return []

    def _warm(self) -> None:
        """Ask for the used part of the map in one sequential read: records in key order are random on the disk."""
        info = self._env.info()
        fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            used_bytes = (info["last_pgno"] + 1) * self._env.stat()["psize"]
            for offset in range(0, used_bytes, _ADVICE_BYTES):
                os.posix_fadvise(fd, offset, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def key_of(ref: PieceRef) -> bytes:
    return _KEY.pack(ref.fingerprint, ref.group, ref.shard)


def keys_of(fingerprints: Fingerprints) -> list[bytes]:
    """As `key_of` for group 0 of shard 0 of each."""
    keys = np.zeros((len(fingerprints), _KEY.size), dtype=np.uint8)
    keys[:, :16] = np.ascontiguousarray(fingerprints).view(np.uint8)
    raw = keys.tobytes()
    return [raw[at : at + _KEY.size] for at in range(0, len(raw), _KEY.size)]


def _parsed(ref: PieceRef, value: bytes | None) -> Record | Corrupt | None:
    if value is None:
        return None
    try:
        record = unpack_value(value)
    except Corrupt as error:
        return error
    return record if ref_of(record) == ref else Corrupt("record lies under another key")


def _check_superblock(directory: Path, raw: bytes) -> None:
    try:
        magic, version, unit_bytes = _SUPERBLOCK.unpack(raw)
    except struct.error as error:
        raise StateMismatch(f"disk index has a damaged superblock: path={directory}") from error
    if (magic, version, unit_bytes) != (_MAGIC, VERSION, UNIT_BYTES):
        raise StateMismatch(
            f"disk index is of another version: path={directory} {version=} expected={VERSION} {unit_bytes=}; "
            "start cold with an emptied directory, or run the version that wrote it"
        )


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _translated(error) from error


def _translated(error: lmdb.Error) -> KvstoredError:
    if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)):
        return NoSpace(f"disk index is full: cause={error}")
    if isinstance(error, (lmdb.ReadersFullError, lmdb.TxnFullError)):
        return Busy(f"disk index has too many calls in flight: cause={error}")
    if isinstance(error, _DAMAGE):
        return StateMismatch(f"disk index is damaged: cause={error}")
    return Unavailable(f"disk index failed: cause={error}")
