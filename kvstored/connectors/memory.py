"""An engine's memory by address, as the arrays that the client takes. Whoever asks vouches that the address stays valid meanwhile."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def bytes_at(address: int, size_bytes: int) -> Bytes:
    """Writable, without a copy. Not by ctypes: it keeps a type for every size it has seen."""
    return np.asarray(_Memory(address, size_bytes))


@dataclass(frozen=True, slots=True)
class _Memory:
    address: int
    size_bytes: int

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "data": (self.address, False),
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
