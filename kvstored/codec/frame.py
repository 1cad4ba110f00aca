"""The bytes of a piece as they lie in a slower tier: raw, one zstd frame, or a frame of `blocks`. Which one, and its sizes, are in the record.

Decoding parses bytes from a disk, so any input either fills the target exactly or is Corrupt. Never used on memory that a client can write.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvstored.codec import blocks
from kvstored.codec.blocks import Known
from kvstored.errors import Corrupt

Views = Sequence[NDArray[np.uint8]]
LEVEL_DEFAULT = 1


class Codec(IntEnum):
    """Stored in records: numbers are never reused."""

    RAW = 0
    ZSTD = 1
    FRAME = 2


def compressed(source: Views, level: int) -> NDArray[np.uint8]:
    """One zstd frame of all bytes in turn, with their count and without zstd's own checksum: the record has one."""
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    stream = compressor.compressobj(size=sum(len(view) for view in source))
    parts = [stream.compress(view.data) for view in source]
    parts.append(stream.flush())
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def decode(
    codec: int, stored: NDArray[np.uint8], target: Views, references: Sequence[Known] = ()
) -> None:
    """Fill `target` with the decoded bytes of `stored`; raises Corrupt unless they are exactly as many. `references`: of a P or B frame."""
    if codec == Codec.RAW:
        _unwrap_raw(stored, target)
    elif codec == Codec.ZSTD:
        _unwrap_zstd(stored, target)
    elif codec == Codec.FRAME:
        _unwrap_frame(stored, target, references)
    else:
        raise Corrupt(f"frame of an unknown codec: {codec=}")


def _unwrap_raw(stored: NDArray[np.uint8], target: Views) -> None:
    length = sum(len(view) for view in target)
    if len(stored) != length:
        raise Corrupt(f"raw frame has another length: bytes={len(stored)} expected={length}")
    start = 0
    for view in target:
        np.copyto(view, stored[start : start + len(view)])
        start += len(view)


def _unwrap_frame(stored: NDArray[np.uint8], target: Views, references: Sequence[Known]) -> None:
    if len(target) == 1:
        blocks.decode(stored, target[0], references)
        return
    whole = np.empty(sum(len(view) for view in target), dtype=np.uint8)
    blocks.decode(stored, whole, references)
    _unwrap_raw(whole, target)


def _unwrap_zstd(stored: NDArray[np.uint8], target: Views) -> None:
    """Streams into the target: never more memory than it and zstd's window, whatever the frame claims."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        with decompressor.stream_reader(stored.data, read_across_frames=False) as reader:
            for view in target:
                _fill(reader, view)
            if reader.read(1):
                raise Corrupt("zstd frame is longer than its piece")
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd frame is damaged: cause={error}") from error


def _fill(reader: zstandard.ZstdDecompressionReader, view: NDArray[np.uint8]) -> None:
    filled = 0
    while filled < len(view):
        count = reader.readinto(view[filled:].data)
        if not count:
            raise Corrupt(f"zstd frame is shorter than its piece: missing={len(view) - filled}")
        filled += count
