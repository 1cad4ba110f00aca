"""Sections whose exponents are apart from all else: in pairs where almost all are near their channel's usual one, else a byte each."""

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.codec import blocks, channels, exponents, unpacked
from kvstored.codec.channels import Tile
from kvstored.codec.elements import FORMS, Element, Words
from kvstored.codec.exponents import PAIRED, SINGLE
from kvstored.codec.frame import Codec
from kvstored.codec.header import parse
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.streams import Reader, Writer
from kvstored.codec.values import words_of_floats
from kvstored.errors import Corrupt
from tests.codec import real
from tests.codec.test_header import resealed

WIDE = (Element.BF16, Element.F16, Element.F32)
TILE = (4, 256, 64)


def stored_section(words: Words, element: Element, tile: Tile) -> bytes:
    out = np.empty(4 * words.nbytes + 1000, dtype=np.uint8)
    writer = Writer(out, 0)
    writer.begin(len(out))
    exponents.encode(writer, words, element, tile)
    return bytes(out[: writer.end()])


def reader_of(stored: bytes) -> Reader:
    return Reader(np.frombuffer(stored, dtype=np.uint8), zstandard.ZstdDecompressor())


def decoded_section(stored: bytes, width: int, tile: Tile) -> Words:
    target = np.empty(int(np.prod(tile)), dtype=f"<u{width}")
    reader = reader_of(stored)
    exponents.decode(reader, target, tile)
    reader.end()
    return target


def scaled(rng: np.random.Generator, element: Element, tile: Tile, strewn: int) -> Words:
    """Channels of different scales, and `strewn` values of any bits."""
    count, bits = int(np.prod(tile)), 8 * FORMS[element].width_bytes
    scales = np.exp2(rng.integers(-6, 7, tile[2] if tile[1] > 1 else 1)).astype("<f4")
    words = words_of_floats((rng.standard_normal(tile) * scales).astype("<f4").reshape(-1), element)
    if count:
        places = rng.integers(0, count, strewn)
        words[places] = rng.integers(0, 1 << bits, strewn, dtype=np.uint64).astype(words.dtype)
    return words


TILES = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(1, 40).map(lambda n: 2 * n), st.integers(1, 70)),
    st.tuples(st.integers(1, 3), st.integers(1, 40).map(lambda n: 2 * n + 1), st.integers(1, 70)),
    st.tuples(st.just(1), st.just(1), st.integers(0, 5000)),
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(WIDE), TILES, st.integers(0, 12), st.integers(0, 2**32))
def test_values_of_any_bits_in_any_layout_come_back(
    element: Element, tile: Tile, strewn: int, seed: int
) -> None:
    words = scaled(np.random.default_rng(seed), element, tile, strewn)
    stored = stored_section(words, element, tile)
    back = decoded_section(stored, words.dtype.itemsize, tile)
    assert np.array_equal(back, words)


@pytest.mark.parametrize("tile", [TILE, (4, 255, 64), (1, 1, 65536), (1, 1, 65537)], ids=str)
def test_values_near_what_is_usual_are_paired_and_the_others_listed(tile: Tile) -> None:
    words = scaled(np.random.default_rng(3), Element.BF16, tile, 0)
    count = len(words)
    alone = [count - 1] if count % 2 else []
    strewn = sorted({0, count // 3, count // 2})
    words[strewn] = [0x0000, 0x7F80, 0xFFC1]
    stored = exponents.take(reader_of(stored_section(words, Element.BF16, tile)), tile)
    assert stored.form == PAIRED
    assert len(stored.packed) == count // 2
    assert set(strewn + alone) <= set(stored.where.tolist())
    assert len(stored.where) < count / 256


def test_where_too_many_are_far_from_what_is_usual_each_takes_a_byte() -> None:
    words = scaled(np.random.default_rng(3), Element.BF16, TILE, 0)
    words[::200] ^= np.uint16(0x4000)
    stored = stored_section(words, Element.BF16, TILE)
    assert exponents.take(reader_of(stored), TILE).form == SINGLE
    assert np.array_equal(decoded_section(stored, 2, TILE), words)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.6])
def test_many_zeros_make_no_section_longer_than_as_planes(share: float) -> None:
    rng = np.random.default_rng(4)
    words = scaled(rng, Element.BF16, TILE, 0)
    words[rng.random(len(words)) < share] = 0
    plain = words.view(np.uint8)
    plans = [Plan(Element.BF16, (Step(m),), 256, 64) for m in (Method.PLANES, Method.EXPONENTS)]
    planes, apart = (len(blocks.encode(plain, plan)) for plan in plans)
    assert apart < 1.03 * planes


@pytest.mark.parametrize(("which", "share"), [(0, 0.97), (1, 0.995)], ids=["K", "V"])
def test_real_kv_takes_fewer_bytes_than_as_planes(which: int, share: float) -> None:
    """One head of one layer; whole blocks gain 1 to 5 %."""
    plain = np.ascontiguousarray(real.bits("a")[which]).reshape(-1).view(np.uint8)
    sizes = []
    for method in (Method.PLANES, Method.EXPONENTS):
        plan = Plan(Element.BF16, (Step(method),), 256, 64, section_bytes=32768)
        sizes.append(len(blocks.encode(plain, plan)))
    assert sizes[1] < share * sizes[0]


def test_what_is_usual_is_not_moved_by_values_near_zero() -> None:
    """Nor are the values looked at changed: of one tile with few rows they are the caller's own."""
    values = np.full((1, 64, 3), 120, dtype=np.uint8)
    values[:, :2, 1] = 0  # the plain mean is 116 then
    values[:, :, 2] = 0
    before = values.copy()
    assert channels.usual(values).reshape(-1).tolist() == [120, 120, 0]
    assert np.array_equal(values, before)


def numbered(stored: bytes, old: int, new: int) -> bytes:
    """With another number where `old` stands as the only such."""
    assert stored.count(old.to_bytes(4, "little")) == 1
    return stored.replace(old.to_bytes(4, "little"), new.to_bytes(4, "little"))


def test_impossible_forms_counts_and_places_are_corrupt() -> None:
    words = np.full(1 << 14, 0x3F80, dtype="<u2")
    tile = (1, 256, 64)
    words[[77, 5000]] = 0
    stored = stored_section(words, Element.BF16, tile)
    reader = reader_of(stored)
    base = reader.take(64)
    assert len(base) == 64
    form_at = reader._at
    assert stored[form_at] == PAIRED
    wrong = stored[:form_at] + (2).to_bytes(4, "little") + stored[form_at + 4 :]
    with pytest.raises(Corrupt, match="unknown form"):
        decoded_section(wrong, 2, tile)
    with pytest.raises(Corrupt, match="outside of its section"):
        decoded_section(numbered(stored, 5000, 1 << 14), 2, tile)
    reader.take_number()
    reader.take(1 << 13)
    at = reader._at
    assert stored[at] == 2
    wrong = stored[:at] + ((1 << 14) + 1).to_bytes(4, "little") + stored[at + 4 :]
    with pytest.raises(Corrupt, match="more exceptions than values"):
        decoded_section(wrong, 2, tile)


@pytest.mark.parametrize("element", [e for e in Element if e not in WIDE], ids=lambda e: e.name)
def test_elements_of_a_byte_are_planes_instead(element: Element) -> None:
    """And a frame that has their exponents all the same is Corrupt."""
    plain = np.arange(1 << 14, dtype=np.uint16).astype(np.uint8) >> np.uint8(3)
    plan = Plan(element, (Step(Method.EXPONENTS),))
    stored = blocks.encode(plain, plan).copy()
    assert parse(stored).methods() == {Method.PLANES}
    wide = blocks.encode(plain, Plan(Element.BF16, (Step(Method.EXPONENTS),)))
    assert parse(wide).methods() == {Method.EXPONENTS}
    header = parse(stored)
    header.sections["method"][:] = Method.EXPONENTS
    with pytest.raises(Corrupt, match="checksum"):
        parse(stored)
    with pytest.raises(Corrupt, match="elements of one byte"):
        blocks.decode(resealed(stored, header.header_bytes), np.empty_like(plain))


def test_what_crosses_to_a_gpu_is_pairs_and_the_bytes_beside_them() -> None:
    """A quarter of the plain bytes less, and the codec's bytes in the end, exceptions included."""
    words = scaled(np.random.default_rng(5), Element.BF16, TILE, 20)
    plain = words.view(np.uint8)
    plan = Plan(Element.BF16, (Step(Method.EXPONENTS),), 256, 64)
    piece = unpacked.unpack(Codec.FRAME, blocks.encode(plain, plan), len(plain))
    assert len(piece.packed) < 0.77 * len(plain)
    assert int(piece.sections["length"].sum()) >= 15
    assert np.array_equal(unpacked.plain_of(piece), plain)
