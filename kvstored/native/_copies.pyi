# implements kvstored.native.Copies, which says what each call does

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvstored.native import Array, Bytes, Ranges

KERNEL: str
LAYOUT: tuple[int, ...]

@final
class Spread: ...

def spread(parts: tuple[Array, ...], /) -> Spread | None: ...
def copy_runs(
    runs: Sequence[tuple[Bytes, tuple[Bytes, ...], tuple[int, ...]]],
    inward: bool,
    summed: bool,
    past_cache: bool,
    /,
) -> list[int]: ...
def copy_walks(
    walks: Sequence[tuple[tuple[Bytes, ...], object, Ranges]],
    inward: bool,
    summed: bool,
    past_cache: bool,
    /,
) -> list[int]: ...
def fill(
    sources: Sequence[Bytes], segments: Mapping[int, Bytes], extents: bytes, past_cache: bool, /
) -> bytes: ...
def may_have(
    memory: object,
    tags_at: int,
    entries_at: int,
    buckets: int,
    packed: bytes,
    key_bytes: int,
    seed: int,
    /,
) -> bool: ...
def find(
    memory: object,
    tags_at: int,
    entries_at: int,
    buckets: int,
    keys: tuple[bytes, ...],
    digest: bytes,
    seed: int,
    stride: int,
    found: NDArray[np.uint64],
    /,
) -> tuple[int, int, int, set[int]]: ...
def read(
    memory: object,
    tags_at: int,
    entries_at: int,
    buckets: int,
    found: NDArray[np.uint64],
    first: int,
    last: int,
    segments: Mapping[int, Bytes],
    into: Array | tuple[object, ...],
    ranges: Ranges,
    past_cache: bool,
    verdicts: bytearray,
    /,
) -> None: ...
