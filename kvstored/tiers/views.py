"""Bytes in memory as runs of uint8 views: size, hash and copy, all without holding the GIL for long."""

import ctypes

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.tiers.base import Views


def at_address(address: int, size_bytes: int) -> NDArray[np.uint8]:
    """Memory that belongs to somebody else, who keeps it for as long as the array is used."""
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, (size_bytes,))


def size_of(views: Views) -> int:
    return sum(len(view) for view in views)


def hash_of(views: Views) -> int:
    """xxh3-64 of the bytes in turn; `update` lets other threads run, the one-shot calls do not."""
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view.data)
    return hasher.intdigest()


def copy(source: Views, target: Views) -> None:
    """Copy all of `source` into `target`, which has the same size but may be cut elsewhere."""
    assert size_of(source) == size_of(target), "copy between different sizes"
    remaining = list(reversed(source))
    for view in target:
        filled = 0
        while filled < len(view):
            part = remaining.pop()
            count = min(len(part), len(view) - filled)
            np.copyto(view[filled : filled + count], part[:count])
            filled += count
            if count < len(part):
                remaining.append(part[count:])
