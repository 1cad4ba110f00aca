"""The ceilings: copies within one process, without any store. Ways: `private` and `two threads` between private buffers, `shared` into
and out of a memfd mapping, `shared hashed` the same with xxh3-64 of each block, `shared echo` with one round trip of a message before it, of two
plain processes over a Unix socket.
"""

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.peers.adapters.base import Address, Bytes, Environment, Need, Store
from bench.peers.environment import own

if TYPE_CHECKING:
    from bench.loop import Echo

MESSAGE_BYTES = 128
"""About an Acquire of one key."""


class Nothing:
    def __init__(self, address: Address) -> None:
        self.address = address

    def chill(self) -> None:
        raise NotImplementedError("a copy has no disk")


def environment(way: str) -> Environment:
    return own()


@contextmanager
def serve(environment: Environment, folder: Path, need: Need) -> Iterator[Nothing]:
    slots = need.capacity_bytes // 2 // need.block_bytes  # one client may store all of it
    yield Nothing({"slots": str(slots), "block_bytes": str(need.block_bytes)})


def connect(way: str, address: Address, index: int) -> "Copies":
    return Copies(way, int(address["slots"]), int(address["block_bytes"]))


class Copies(Store):
    def __init__(self, way: str, slots: int, block_bytes: int) -> None:
        size = slots * block_bytes
        if way.startswith("shared"):
            descriptor = os.memfd_create("bench-copies")
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
            os.close(descriptor)
        else:
            memory = mmap.mmap(-1, size)
        self._slots: list[Bytes] = list(np.frombuffer(memory, np.uint8).reshape(slots, block_bytes))
        self._free = deque(range(slots))
        self._used: dict[bytes, int] = {}
        self._is_hashing = way == "shared hashed"
        self._pool = ThreadPoolExecutor(2) if way == "two threads" else None
        self._echo = _echo() if way == "shared echo" else None

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        slots = [self._free.popleft() for _ in keys]
        self._copy([self._slots[slot] for slot in slots], buffers, buffers)
        self._used.update(zip(keys, slots, strict=True))

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        self._copy(buffers, [self._slots[self._used[key]] for key in keys], buffers)

    def clear(self, keys: Sequence[bytes]) -> None:
        self._free += [self._used.pop(key) for key in keys]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if self._echo is not None:
            self._echo.close()

    def _copy(
        self, targets: Sequence[Bytes], sources: Sequence[Bytes], private: Sequence[Bytes]
    ) -> None:
        if self._echo is not None:
            self._echo.call()
        if self._pool is None:
            _copied(targets, sources)
        elif len(targets) == 1:
            middle = targets[0].size // 2
            other = self._pool.submit(np.copyto, targets[0][middle:], sources[0][middle:])
            np.copyto(targets[0][:middle], sources[0][:middle])
            other.result()
        else:
            middle = len(targets) // 2
            done = self._pool.submit(_copied, targets[middle:], sources[middle:])
            _copied(targets[:middle], sources[:middle])
            done.result()
        if self._is_hashing:
            import xxhash

            for block in private:
                xxhash.xxh3_64_intdigest(block.data)


def _echo() -> "Echo":
    from bench.loop import Echo

    return Echo(MESSAGE_BYTES)


def _copied(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
