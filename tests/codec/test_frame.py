"""Frames: what was encoded comes back whole, and any other input is Corrupt."""

import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstored.codec import frame
from kvstored.codec.frame import Codec
from kvstored.errors import Corrupt


def view(raw: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(raw, dtype=np.uint8)


def decoded(codec: int, stored: bytes, cuts: list[int]) -> bytes:
    """Decode into views of the given sizes."""
    target = [np.zeros(size, dtype=np.uint8) for size in cuts]
    frame.decode(codec, view(stored), target)
    return b"".join(part.tobytes() for part in target)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=5000), min_size=1, max_size=5), st.integers(1, 6), st.data())
def test_zstd_gives_back_what_it_got_however_it_is_cut(
    parts: list[bytes], level: int, data: st.DataObject
) -> None:
    raw = b"".join(parts)
    stored = frame.compressed([view(part) for part in parts], level).tobytes()
    cut = data.draw(st.integers(0, len(raw)))
    assert decoded(Codec.ZSTD, stored, [cut, len(raw) - cut]) == raw
    assert zstandard.ZstdDecompressor().decompress(stored) == raw


@settings(deadline=None)
@given(st.binary(max_size=5000))
def test_raw_is_the_bytes_themselves(raw: bytes) -> None:
    assert decoded(Codec.RAW, raw, [len(raw)]) == raw
    with pytest.raises(Corrupt):
        decoded(Codec.RAW, raw, [len(raw) + 1])


@settings(deadline=None)
@given(st.integers(0, 255), st.binary(max_size=300), st.integers(0, 5000))
def test_any_input_fills_the_target_or_is_corrupt(codec: int, stored: bytes, size: int) -> None:
    for prefix in (b"", b"\x28\xb5\x2f\xfd"):
        try:
            assert len(decoded(codec, prefix + stored, [size])) == size
        except Corrupt:
            continue


@settings(deadline=None)
@given(st.data())
def test_a_changed_frame_fills_the_target_or_is_corrupt(data: st.DataObject) -> None:
    raw = zlib.compress(b"seed" * 99) * 20 + bytes(3000)
    stored = bytearray(frame.compressed([view(raw)], 1).tobytes())
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(stored)))
    for candidate in (stored, stored[:cut]):
        try:
            assert len(decoded(Codec.ZSTD, bytes(candidate), [len(raw)])) == len(raw)
        except Corrupt:
            continue


@pytest.mark.parametrize("wrong", [-1, 1, 100_000])
def test_a_frame_of_another_length_is_corrupt(wrong: int) -> None:
    stored = frame.compressed([view(bytes(100_000))], 1).tobytes()
    with pytest.raises(Corrupt):
        decoded(Codec.ZSTD, stored, [100_000 + wrong])


def test_a_frame_that_claims_a_huge_window_is_corrupt() -> None:
    raw = np.random.default_rng(1).bytes(1000)
    stored = bytearray(zstandard.ZstdCompressor(write_content_size=False).compress(raw))
    assert stored[4] & 0x20 == 0  # no single segment: a window descriptor follows
    stored[5] = 0xFF
    with pytest.raises(Corrupt, match="damaged"):
        decoded(Codec.ZSTD, bytes(stored), [1000])


def test_an_unknown_codec_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="codec=9"):
        decoded(9, b"", [0])
