"""kvstored over its local channel. A way of getting is one line of `WAYS`; puts are the same in all of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.peers.adapters.base import STORED, Address, Bytes, Environment, Need, Store
from bench.peers.environment import own

if TYPE_CHECKING:
    from kvstored.client import Keys, Namespace

Get = Callable[..., int]
"""(namespace, keys, buffers) to hits."""
WAYS: dict[str, Get] = {
    "default": lambda space, keys, out: space.get(keys, out=out).hits,
    "leased": lambda space, keys, out: space.get(keys, out=out, optimistic=False).hits,
    "unchecked": lambda space, keys, out: (
        space.get(keys, out=out, optimistic=False, verify=False).hits
    ),
    "views": lambda space, keys, _out: _viewed(space, keys),
}
SPARE = 3
"""Its evictor keeps room free, and removed blocks leave it when their leases end."""


class Daemon:
    def __init__(self, daemon: object, socket: str, folder: Path) -> None:
        self.address: Address = {
            "address": socket,
            STORED: str(folder / "disk" / "slab-00000.dat"),
        }
        self._daemon = daemon
        self._folder = folder

    def chill(self) -> None:
        from bench.machine import Daemon as Running
        from bench.peers.adapters.files import drop_pages

        assert isinstance(self._daemon, Running), "made by serve"
        self._daemon.restart()
        for path in self._folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                drop_pages(path)


def environment(way: str) -> Environment:
    return own()


@contextmanager
def serve(environment: Environment, folder: Path, need: Need) -> Iterator[Daemon]:
    from bench.machine import Daemon as Running

    dram = f"{SPARE * need.capacity_bytes >> 21}MiB"
    disk = f"{SPARE * need.capacity_bytes >> 20}MiB" if need.has_disk else "0B"
    with Running(dram=dram, disk=disk, state_parent=folder) as running:
        yield Daemon(running, running.address, running.folder / "state")


def connect(way: str, address: Address, index: int) -> "Ours":
    if way == "posted":
        return Posting(WAYS["default"], address["address"])
    return Ours(WAYS[way], address["address"])


class Ours(Store):
    def __init__(self, way: Get, address: str) -> None:
        from kvstored.client import Client, Namespace

        self._client = Client(address)
        self._spaces: dict[int, Namespace] = {}
        self._way = way
        self._whole: dict[int, Bytes] = {}

    def buffers(self, count: int, block_bytes: int) -> list[Bytes]:
        """Rows of one array, which is given as such."""
        whole = np.zeros((count, block_bytes), np.uint8)
        rows = list(whole)
        self._whole[id(rows)] = whole
        return rows

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        from kvstored.client import Keys

        put = self._space(buffers).put(Keys.opaque(keys), self._whole.get(id(buffers), buffers))
        if put.committed != len(keys):
            raise KeyError(f"not stored: {len(keys) - put.committed} blocks")

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        from kvstored.client import Keys

        out = self._whole.get(id(buffers), buffers)
        hits = self._way(self._space(buffers), Keys.opaque(keys), out)
        if hits != len(keys):
            raise KeyError(f"missed: {len(keys) - hits} blocks")

    def read_back(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        """In this way of getting; from views the check copies."""
        if self._way is not WAYS["views"]:
            self.get(keys, buffers)
            return
        from kvstored.client import Keys

        with self._space(buffers).get_view(Keys.opaque(keys)) as view:
            for block, buffer in zip(view.blocks, buffers, strict=True):
                if block is None or block[0] is None:
                    raise KeyError("missed")
                np.copyto(buffer, block[0])

    def clear(self, keys: Sequence[bytes]) -> None:
        from kvstored.client import Keys

        for space in self._spaces.values():
            space.remove(Keys.opaque(keys))

    def close(self) -> None:
        self._client.close()

    def _space(self, buffers: Sequence[Bytes]) -> "Namespace":
        from bench.throughput import bench_namespace

        size = buffers[0].nbytes
        if size not in self._spaces:
            self._spaces[size] = bench_namespace(self._client, size)
        return self._spaces[size]


class Posting(Ours):
    """Nobody waits for a put; all of them are waited for at the end."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        from kvstored.client import Keys

        self._space(buffers).post(Keys.opaque(keys), self._whole.get(id(buffers), buffers))

    def settle(self) -> bool:
        done = self._client.flush()
        if done.committed != done.blocks:
            raise KeyError(f"not stored: {done.blocks - done.committed} blocks")
        return True


def _viewed(space: "Namespace", keys: "Keys") -> int:
    with space.get_view(keys) as view:
        return view.hits
