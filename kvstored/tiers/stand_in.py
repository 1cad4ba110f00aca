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

EVENTS = 512


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
        self._events = 0
        self._events_fd = os.memfd_create("kvstored-hbm-events", os.MFD_CLOEXEC)
        os.ftruncate(self._events_fd, EVENTS * 8)
        words = mmap.mmap(self._events_fd, EVENTS * 8, mmap.MAP_SHARED)
        self._happened = np.frombuffer(words, dtype=np.uint64)

    @property
    def size_bytes(self) -> int:
        return len(self._pool)

    @property
    def footprint_bytes(self) -> int:
        return 0

    @property
    def handle(self) -> Handle:
        return Handle(HandleKind.HOST_FILE, self._path(self._fd).encode(), b"host")

    def upload(self, moves: Moves) -> None:
        for own, host in self._pairs(moves):
            np.copyto(own, host)

    def download(self, moves: Moves) -> None:
        for own, host in self._pairs(moves):
            np.copyto(host, own)

    def copies(self) -> "HostCopies":
        return HostCopies(self)

    def event(self) -> tuple[bytes, int]:
        """A new one's handle and number: the path of a file of words, which word, and what it is at least when the event has happened."""
        self._events += 1
        number = self._events
        return f"{self._path(self._events_fd)} {number % EVENTS} {number}".encode(), number

    def happen(self, number: int) -> None:
        self._happened[number % EVENTS] = number

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
        os.close(self._events_fd)
        self._pool = np.empty(0, dtype=np.uint8)

    def _path(self, fd: int) -> str:
        return f"/proc/{os.getpid()}/fd/{fd}"

    def _pairs(self, moves: Moves) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        columns = (moves.offsets.tolist(), moves.addresses.tolist(), moves.sizes.tolist())
        for offset, address, size in zip(*columns, strict=True):
            yield self._at(offset, size), at_address(address, size)

    def _at(self, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        assert offset + size_bytes <= len(self._pool), "beyond the pool"
        return self._pool[offset : offset + size_bytes]


class HostCopies:
    """Copies when they are waited for: a submission returns before its bytes are there, as a GPU's does."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._submitted: list[tuple[Moves, int]] = []
        self._done = 0

    def submit(self, moves: Moves) -> bytes:
        handle, number = self._device.event()
        self._submitted.append((moves, number))
        return handle

    def wait(self, number: int) -> None:
        while self._done <= number:
            moves, event = self._submitted[self._done]
            self._device.upload(moves)
            self._device.happen(event)
            self._done += 1

    def close(self) -> None:
        self._submitted = []
