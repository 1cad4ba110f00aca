"""LMDB without sync and with a writable map, its fastest: values copied in by put and out of the map by get. One environment, all clients."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.peers.adapters.base import STORED, Address, Bytes, Environment, Need, Store
from bench.peers.adapters.files import drop_pages
from bench.peers.environment import own


class Folder:
    def __init__(self, path: Path, map_bytes: int) -> None:
        self.address: Address = {
            "folder": str(path),
            "map_bytes": str(map_bytes),
            STORED: str(path / "data.mdb"),
        }
        self._path = path

    def chill(self) -> None:
        drop_pages(self._path / "data.mdb")


def environment(way: str) -> Environment:
    return own()


@contextmanager
def serve(environment: Environment, folder: Path, need: Need) -> Iterator[Folder]:
    """Twice the capacity: a value takes whole pages and one more."""
    path = folder / "lmdb"
    path.mkdir()
    yield Folder(path, 3 * need.capacity_bytes)


def connect(way: str, address: Address, index: int) -> "Environments":
    return Environments(address["folder"], int(address["map_bytes"]))


class Environments(Store):
    def __init__(self, folder: str, map_bytes: int) -> None:
        # by name: this module is called as the package is
        self._environment = importlib.import_module("lmdb").open(
            folder,
            map_size=map_bytes,
            sync=False,
            metasync=False,
            writemap=True,
            map_async=True,
            readahead=True,
        )

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, buffer in zip(keys, buffers, strict=True):
                if not transaction.put(key, buffer.data, dupdata=False, overwrite=False):
                    raise KeyError(f"not stored: {key.hex()}")

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        with self._environment.begin(buffers=True) as transaction:
            for key, buffer in zip(keys, buffers, strict=True):
                np.copyto(buffer, np.frombuffer(transaction.get(key), np.uint8))

    def clear(self, keys: Sequence[bytes]) -> None:
        with self._environment.begin(write=True) as transaction:
            for key in keys:
                transaction.delete(key)

    def close(self) -> None:
        self._environment.sync(True)
        self._environment.close()
