"""Decoders: any bytes decode to what their header claims or are Corrupt; nothing is allocated because a frame says so."""

import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstored.codec import blocks
from kvstored.codec import header as layout
from kvstored.codec.elements import Element
from kvstored.codec.plan import Method, Plan, Step
from kvstored.errors import Corrupt
from tests.codec import real
from tests.codec.golden_frames import GOLDEN, Golden

FIELDS = {
    "magic": 0, "version": 4, "kind": 5, "element": 6, "flags": 7, "dimensions": 8, "references": 9, "zero": 10,
    "section_count": 12, "section_bytes": 16, "plain_bytes": 28, "stored_bytes": 36,
}  # fmt: skip


def resealed(stored: NDArray[np.uint8], header_bytes: int) -> NDArray[np.uint8]:
    """With the header's checksum made right again, as someone would who wants to be believed."""
    body = stored[: header_bytes - 8]
    digest = xxhash.xxh3_64_intdigest(body.tobytes())
    stored[header_bytes - 8 : header_bytes] = np.frombuffer(digest.to_bytes(8, "little"), np.uint8)
    return stored


def frame_of(golden: Golden) -> NDArray[np.uint8]:
    return np.frombuffer(golden.path.read_bytes(), dtype=np.uint8).copy()


@pytest.mark.parametrize("field", FIELDS)
def test_a_header_with_any_wrong_field_is_corrupt(field: str) -> None:
    golden = GOLDEN[2]
    stored = frame_of(golden)
    size = layout.parse(stored).header_bytes
    stored[FIELDS[field]] ^= 0x41
    with pytest.raises(Corrupt):
        blocks.decode(resealed(stored, size), np.empty_like(golden.plain()))


def test_a_frame_that_claims_a_terabyte_is_refused_before_anything_is_allocated() -> None:
    stored = frame_of(GOLDEN[0])
    size = layout.parse(stored).header_bytes
    stored[28:36] = np.frombuffer((1 << 40).to_bytes(8, "little"), np.uint8)
    target = np.empty(4096, dtype=np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="claims too much"):
            blocks.decode(resealed(stored, size), target)
        with pytest.raises(Corrupt, match="claims too much"):
            layout.parse(stored)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_stream_that_claims_a_gigabyte_is_refused_before_it_is_decoded() -> None:
    """The zstd frame inside claims it, in a section of 2 KiB whose headers are right."""
    import zstandard

    stored = frame_of(GOLDEN[2])
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 20))
    header = layout.parse(stored)
    at = header.header_bytes
    stored[at : at + 4] = np.frombuffer((len(bomb) << 1 | 1).to_bytes(4, "little"), np.uint8)
    stored[at + 4 : at + 4 + len(bomb)] = np.frombuffer(bomb, dtype=np.uint8)
    with pytest.raises(Corrupt, match="claims another length"):
        blocks.decode(stored, np.empty_like(GOLDEN[2].plain()))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_changed_frame_is_corrupt_or_unchanged_in_what_it_gives(data: st.DataObject) -> None:
    golden = data.draw(st.sampled_from(GOLDEN))
    stored, true = frame_of(golden), np.empty_like(golden.plain())
    blocks.decode(stored, true, golden.known())
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    target = np.empty_like(true)
    for candidate in (stored, stored[: data.draw(st.integers(0, len(stored)))]):
        try:
            blocks.decode(candidate, target, golden.known())
        except Corrupt:
            continue
        assert np.array_equal(target, true)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_changed_section_under_a_right_header_is_corrupt(data: st.DataObject) -> None:
    """Whatever the streams, counts, orders and methods say: the decoders return or raise Corrupt, and the checksum finds the rest."""
    golden = data.draw(st.sampled_from(GOLDEN))
    stored = frame_of(golden)
    header = layout.parse(stored)
    table = header.header_bytes - 8 - 16 * len(header.sections)
    if data.draw(st.booleans()):
        entry = table + 16 * data.draw(st.integers(0, len(header.sections) - 1))
        stored[entry + 4] = data.draw(st.sampled_from(Method))
        stored[entry + 5] = data.draw(st.integers(0, 255))
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(header.header_bytes, len(stored) - 1))
        stored[at] = data.draw(st.integers(0, 255))
    resealed(stored, header.header_bytes)
    target, true = np.empty_like(golden.plain()), np.empty_like(golden.plain())
    blocks.decode(frame_of(golden), true, golden.known())
    try:
        blocks.decode(stored, target, golden.known())
    except Corrupt:
        return
    assert np.array_equal(target, true)


@pytest.mark.parametrize("number", [max(m for m in Method if not m.is_lossy) + 1, 15, 255])
def test_a_method_that_is_not_known_is_corrupt(number: int) -> None:
    """So is one that a later version of this has, to whoever reads its frames."""
    stored = frame_of(GOLDEN[2])
    header = layout.parse(stored)
    header.sections["method"][0] = number
    with pytest.raises(Corrupt, match="not understood"):
        layout.parse(resealed(stored, header.header_bytes))


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_corrupt(raw: bytes) -> None:
    for prefix in (b"", b"KVF1\x01"):
        with pytest.raises(Corrupt):
            layout.parse(np.frombuffer(prefix + raw, dtype=np.uint8))


def test_the_start_of_a_frame_is_enough_to_know_what_it_needs() -> None:
    a, b = real.plain("a"), real.plain("b")
    stored = blocks.encode(b, Plan(Element.BF16), [blocks.known(b"a" * 32, a)])
    header = layout.parse(stored[: layout.parse(stored).header_bytes])
    assert header.references[0].key == b"a" * 32
    assert header.plain_bytes == len(b)
    assert header.stored_bytes == len(stored)


def test_a_lossless_method_in_a_frame_that_says_lossy_is_corrupt() -> None:
    stored = blocks.encode(real.plain("a")[:4096], Plan(Element.BF16, (Step(Method.PLANES),)))
    stored = stored.copy()
    size = layout.parse(stored).header_bytes
    stored[7] = 1
    with pytest.raises(Corrupt, match="lossy"):
        layout.parse(resealed(stored, size))
