"""Byte streams of a section: each is stored as it is or as one zstd frame that is nearly Huffman only, whichever is smaller.

How long a stream is when decoded follows from the section's geometry, never from what was stored: nothing is allocated on a frame's word.
"""

import struct

import numpy as np
import zstandard

from kvstored.codec.elements import Bytes
from kvstored.errors import Corrupt

_HEAD = struct.Struct("<I")
_WORTH = 64
"""A stream is stored compressed if that saves more than 1/64 of it."""
_EMPTY = np.zeros(0, dtype=np.uint8)
_PROBE = 2048
"""Bytes of a stream that is expected to be noise which are tried first."""

NEAR_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(
    1,
    hash_log=6,
    window_log=17,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    target_length=0,
)
"""Exponents repeat by value, not by string: a tiny match table finds fewer bogus matches, which is faster and smaller than plain levels."""


class Writer:
    """Streams, one section after the other, into `out`. Not shared between threads.

    A section that would become longer than it may is marked and its streams are dropped; `end` then takes it back.
    """

    def __init__(self, out: Bytes, at: int) -> None:
        self._out = out
        self._begin = self._at = self._limit = at
        self._is_full = False
        self._near_huffman = zstandard.ZstdCompressor(compression_params=NEAR_HUFFMAN)

    @property
    def size_bytes(self) -> int:
        """Up to the end of the last section."""
        return self._begin

    def begin(self, limit_bytes: int) -> None:
        """A section, or the same section anew, of fewer than `limit_bytes`."""
        self._at, self._limit = self._begin, self._begin + limit_bytes
        self._is_full = False

    def end(self) -> int:
        """The section's size, or 0 where it did not become smaller than its limit."""
        size = self._at - self._begin
        if self._is_full or self._at >= self._limit:
            return 0
        self._begin = self._at
        return size

    def raw(self, plain: Bytes) -> None:
        """A whole section as it is."""
        np.copyto(self._out[self._begin : self._begin + len(plain)], plain)
        self._begin += len(plain)

    def add(self, plain: Bytes) -> None:
        """One stream of a contiguous array."""
        self._add_packed(plain, self._near_huffman)

    def add_noise(self, plain: Bytes) -> None:
        """One stream that hardly ever shrinks: a part of it is tried first."""
        probe = plain[:_PROBE]
        if (
            len(plain) <= 2 * _PROBE
            or len(self._near_huffman.compress(probe.data)) < _PROBE * 7 // 8
        ):
            self.add(plain)
        else:
            self._append(len(plain) << 1, plain)

    def add_leveled(self, plain: Bytes, level: int) -> None:
        """One stream by zstd as it is."""
        self._add_packed(plain, zstandard.ZstdCompressor(level=level))

    def add_number(self, number: int) -> None:
        self._append(number, _EMPTY)

    def _add_packed(self, plain: Bytes, compressor: zstandard.ZstdCompressor) -> None:
        if len(plain) > _WORTH and not self._is_full:
            packed = compressor.compress(plain.data)
            if len(packed) + len(plain) // _WORTH < len(plain):
                self._append(len(packed) << 1 | 1, np.frombuffer(packed, dtype=np.uint8))
                return
        self._append(len(plain) << 1, plain)

    def _append(self, head: int, body: Bytes) -> None:
        begin = self._at + _HEAD.size
        if self._is_full or begin + len(body) > self._limit:
            self._is_full = True
            return
        _HEAD.pack_into(self._out.data, self._at, head)
        self._at = begin + len(body)
        if len(body):
            np.copyto(self._out[begin : self._at], body)


class Reader:
    """Reads the streams of one section; every fault is Corrupt."""

    def __init__(self, stored: Bytes, decompressor: zstandard.ZstdDecompressor) -> None:
        self._stored = stored
        self._decompressor = decompressor
        self._at = 0

    def take(self, plain_bytes: int) -> Bytes:
        """The next stream, which decodes to exactly `plain_bytes`; read-only."""
        head = self.take_number()
        stored = self._next(head >> 1)
        if not head & 1:
            if len(stored) != plain_bytes:
                raise Corrupt(f"stream has another length: {plain_bytes=} stored={len(stored)}")
            return stored
        try:
            claimed = zstandard.get_frame_parameters(stored.data).content_size
            if claimed != plain_bytes:
                raise Corrupt(f"stream claims another length: {plain_bytes=} {claimed=}")
            plain = self._decompressor.decompress(stored.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Corrupt(f"stream is damaged: cause={error}") from error
        if len(plain) != plain_bytes:
            raise Corrupt(f"stream has another length: {plain_bytes=} got={len(plain)}")
        return np.frombuffer(plain, dtype=np.uint8)

    def take_number(self) -> int:
        (number,) = _HEAD.unpack_from(self._next(_HEAD.size).data)
        return int(number)

    def end(self) -> None:
        if self._at != len(self._stored):
            raise Corrupt(f"section is too long: extra={len(self._stored) - self._at}")

    def _next(self, count: int) -> Bytes:
        if count > len(self._stored) - self._at:
            raise Corrupt(f"section ends early: wanted={count} left={len(self._stored) - self._at}")
        begin, self._at = self._at, self._at + count
        return self._stored[begin : self._at]
