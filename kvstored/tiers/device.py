"""What the HBM tier needs of a GPU: one pool of memory, copies between it and the host, and a handle by which others map it.

A device moves bytes and knows nothing of blocks. Its calls block and belong to the tier's lane. Two implement it: `cuda` (CuPy) and
`stand_in` (host memory, for machines without a GPU).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored.core.devices import HandleKind, is_stand_in
from kvstored.errors import InvalidArgument
from kvstored.tiers.expansion import Expansion


@dataclass(frozen=True, slots=True)
class Moves:
    """Runs of bytes by columns: from or to these offsets of the pool, and their addresses on the host. Who passes them keeps that memory."""

    offsets: NDArray[np.uint64]
    addresses: NDArray[np.uint64]
    sizes: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.offsets)


def moves_of(runs: Sequence[tuple[int, NDArray[np.uint8]]]) -> Moves:
    """Of runs that are views, each with its offset in the pool."""
    rows = [(offset, view.__array_interface__["data"][0], view.size) for offset, view in runs]
    offsets, addresses, sizes = np.array(rows, dtype=np.uint64).reshape(-1, 3).T
    return Moves(offsets, addresses, sizes)


@dataclass(frozen=True, slots=True)
class Handle:
    """How another process of this host maps a pool. `device`: the GPU's PCI address, since ordinals differ between processes."""

    kind: HandleKind
    payload: bytes
    device: bytes


class Copies(Protocol):
    """Submissions to one device that follow each other, each with an event of its own. Unavailable as from the device. What is pinned is on its
    way when `submit` returns; the host's memory stays the caller's until `wait`."""

    def submit(self, moves: Moves) -> bytes:
        """Host to device; the handle by which other processes wait for it, empty where there is none."""
        ...

    def wait(self, number: int) -> None:
        """Until this submission, counted from 0, and all before it are there."""
        ...

    def close(self) -> None:
        """Everything was waited for, or has failed."""
        ...


class Device(Protocol):
    """NoSpace at construction: the pool does not fit. Unavailable from any call: the device is lost, nothing on it can be used any more."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def footprint_bytes(self) -> int:
        """Memory of the device that this process took beside the pool: context, kernels, staging."""
        ...

    @property
    def handle(self) -> Handle: ...

    def upload(self, moves: Moves) -> None:
        """Host to device, all in one submission; they are there when it returns."""
        ...

    def download(self, moves: Moves) -> None:
        """Device to host; the same."""
        ...

    def copies(self) -> Copies: ...

    def expand(self, expansion: Expansion) -> list[int]:
        """Sections that cross packed, into the pool; the xxh3-64 of what lies in each piece's extents then, as the device reads it."""
        ...

    def register(self, chunk: NDArray[np.uint8]) -> None:
        """Pin host memory, so that the device reads and writes it itself. What is not pinned is copied once more. Raises NoSpace."""
        ...

    def share(self, chunk: NDArray[np.uint8]) -> None:
        """Host memory that another device has pinned."""
        ...

    def close(self) -> None:
        """Unpin and free. Views that others mapped are void."""
        ...


Opener = Callable[[str, int], Device]


def open_device(name: str, size_bytes: int) -> Device:
    """The device with its pool. The first one of CUDA imports CuPy and makes a context: seconds."""
    if is_stand_in(name):
        from kvstored.tiers.stand_in import HostDevice  # noqa: PLC0415 - only where it is chosen

        return HostDevice(size_bytes)
    if not name.isdigit():
        raise InvalidArgument(f"no such device: name={name!r}; write 0, 1 or host:0")
    from kvstored.tiers.cuda import CudaDevice  # noqa: PLC0415 - it imports CuPy

    return CudaDevice(int(name), size_bytes)
