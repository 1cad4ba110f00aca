"""Blocks that prove themselves: what lies under a key follows from the key, and which keys there are follows from a seed."""

import functools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.client import GroupKind, GroupSpec, NamespaceSpec

Bytes = NDArray[np.uint8]
BLOCK_TOKENS = 16
SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
"""Bytes of a block, one namespace each."""
_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)


def spec_of(size_bytes: int) -> NamespaceSpec:
    return NamespaceSpec(
        model=f"blocks-of-{size_bytes}",
        revision="1",
        dtype="bf16",
        layout="nhd",
        layout_version=1,
        block_tokens=BLOCK_TOKENS,
        groups=(GroupSpec("kv", GroupKind.LINEAR, size_bytes),),
        sink_tokens=0,
    )


def content_of(key: bytes, size_bytes: int) -> Bytes:
    """Every word depends on the key and on its position, so bytes of another block or another offset are never right."""
    first = np.uint64(xxhash.xxh3_64_intdigest(key))
    return (_ramp(size_bytes // 8) + first).view(np.uint8)


def is_right(key: bytes, given: Bytes | None) -> bool:
    return given is not None and bool(np.array_equal(given, content_of(key, given.size)))


def tokens_of(path: Sequence[int]) -> list[int]:
    """Tokens of a path of numbered blocks."""
    return [number for number in path for _ in range(BLOCK_TOKENS)]


def conversations(seed: int) -> Iterator[list[int]]:
    """Paths that begin alike, branch and grow, without end; the same for the same seed."""
    rng = random.Random(seed)
    base = rng.randrange(1 << 16)
    paths = [[base]]
    while True:
        stem = rng.choice(paths[-16:])
        kept = stem[: rng.randint(1, len(stem))]
        path = kept + [rng.randrange(1 << 31) for _ in range(rng.randint(1, 6))]
        paths.append(path[:48])
        yield paths[-1]


@functools.lru_cache(maxsize=8)
def _ramp(words: int) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return np.arange(words, dtype=np.uint64) * _STEP
