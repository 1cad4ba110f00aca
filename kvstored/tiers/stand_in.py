"""Host memory in place of a GPU's: the same calls and the same promises, so that the tier and all above it run where there is no GPU.

The handle names the pool's memfd below /proc, which processes of the same user may open, as a CUDA IPC handle names device memory.
"""

import mmap
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstored import machine
from kvstored.codec import unpacked
from kvstored.core.devices import HandleKind
from kvstored.errors import NoSpace
from kvstored.tiers.device import Handle, Moves
from kvstored.tiers.expansion import Expansion
from kvstored.tiers.views import at_address, hash_of


class HostDevice:
    def __init__(self, size_bytes: int) -> None:
        available_bytes = machine.memory_limit().available_bytes
        if size_bytes > available_bytes:
            raise NoSpace(f"no memory for the stand-in's pool: {size_bytes=} {available_bytes=}")
        self._fd = os.memfd_create("kvstored-hbm-stand-in", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._fd, 0, size_bytes)
            mapping = mmap.mmap(self._fd, size_bytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(self._fd)
            raise NoSpace(f"no memory for the stand-in's pool: {size_bytes=}") from error
        self._pool = np.frombuffer(mapping, dtype=np.uint8)

    @property
    def size_bytes(self) -> int:
        return len(self._pool)

    @property
    def footprint_bytes(self) -> int:
        return 0

    @property
    def handle(self) -> Handle:
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Handle(HandleKind.HOST_FILE, path.encode(), b"host")

    def upload(self, moves: Moves) -> None:
        for own, host in self._pairs(moves):
            np.copyto(own, host)

    def download(self, moves: Moves) -> None:
        for own, host in self._pairs(moves):
            np.copyto(host, own)

    def expand(self, expansion: Expansion) -> list[int]:
        for section in expansion.sections:
            size = (int(section["end"]) - int(section["begin"])) * int(section["width"])
            unpacked.expand(expansion.packed, section, self._at(int(section["target"]), size))
        return [
            hash_of([self._at(offset, size) for offset, size in extents])
            for extents in expansion.extents
        ]

    def register(self, chunk: NDArray[np.uint8]) -> None:
        """Nothing has to be pinned here."""

    def share(self, chunk: NDArray[np.uint8]) -> None:
        """As above."""

    def close(self) -> None:
        """Views that are still held keep the mapping."""
        os.close(self._fd)
        self._pool = np.empty(0, dtype=np.uint8)

    def _pairs(self, moves: Moves) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        columns = (moves.offsets.tolist(), moves.addresses.tolist(), moves.sizes.tolist())
        for offset, address, size in zip(*columns, strict=True):
            yield self._at(offset, size), at_address(address, size)

    def _at(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        assert offset + size_bytes <= len(self._pool), "beyond the pool"
        return self._pool[offset : offset + size_bytes]
