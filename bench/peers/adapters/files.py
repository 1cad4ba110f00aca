"""A file a block in a folder: on tmpfs (`tmpfs`), or on the disk's filesystem (`disk`; cold ones are read after their pages were dropped)."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.peers.adapters.base import Address, Bytes, Environment, Need, Store
from bench.peers.environment import Missing, own


class Folder:
    def __init__(self, path: Path) -> None:
        self.address: Address = {"folder": str(path)}
        self._path = path

    def chill(self) -> None:
        for each in self._path.iterdir():
            drop_pages(each)


def environment(way: str) -> Environment:
    if not os.access("/dev/shm", os.W_OK):
        raise Missing("/dev/shm is not writable")
    return own()


@contextmanager
def serve(environment: Environment, folder: Path, need: Need) -> Iterator[Folder]:
    """The tmpfs variant is chosen by the way, so both folders are there."""
    with tempfile.TemporaryDirectory(prefix="kvstored-bench-", dir="/dev/shm") as tmpfs:
        disk = folder / "files"
        disk.mkdir()
        made = Folder(disk)
        made.address["tmpfs"] = tmpfs
        yield made


def connect(way: str, address: Address, index: int) -> "Files":
    return Files(Path(address["tmpfs" if way == "tmpfs" else "folder"]))


class Files(Store):
    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        for key, buffer in zip(keys, buffers, strict=True):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(self._folder + key.hex(), flags, 0o600)
            try:
                if os.write(descriptor, buffer.data) != buffer.nbytes:
                    raise OSError("short write")
            finally:
                os.close(descriptor)

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        for key, buffer in zip(keys, buffers, strict=True):
            descriptor = os.open(self._folder + key.hex(), os.O_RDONLY)
            try:
                if os.readv(descriptor, [buffer.data]) != buffer.nbytes:
                    raise OSError("short read")
            finally:
                os.close(descriptor)

    def clear(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            os.unlink(self._folder + key.hex())  # noqa: PTH108 - as the calls above

    def close(self) -> None:
        """Nothing is open between two calls."""


def drop_pages(path: Path) -> None:
    """Out of the page cache; what is dirty is written first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
