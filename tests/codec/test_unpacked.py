"""Frames whose entropy coding alone was undone, and the rest of their decoding as a GPU does it: the same bytes as the codec's own."""

import numpy as np
import pytest

from kvstored.codec import blocks, header, unpacked
from kvstored.codec.blocks import known
from kvstored.codec.elements import FORMS, Bytes, Element
from kvstored.codec.frame import Codec, compressed
from kvstored.codec.lossy import BY_CHANNEL, Grid
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.unpacked import Crossing
from kvstored.codec.values import words_of_floats
from kvstored.errors import Corrupt

STEPS = {
    "planes": Step(Method.PLANES),
    "exponents": Step(Method.EXPONENTS),
    "symbols": Step(Method.SYMBOLS),
    "zstd": Step(Method.ZSTD, 1),
    **{f"uniform {grid.name}": Step(Method.UNIFORM, int(grid)) for grid in Grid},
    "by channel": Step(Method.UNIFORM, int(Grid.INT4) | BY_CHANNEL),
    "rotated": Step(Method.ROTATED, 4),
    "bounded": Step(Method.BOUNDED, 4),
}
CROSSINGS = {
    Method.PLANES: Crossing.PLANES,
    Method.EXPONENTS: Crossing.EXPONENTS,
    Method.UNIFORM: Crossing.UNIFORM,
    Method.ROTATED: Crossing.ROTATED,
    Method.BOUNDED: Crossing.BOUNDED,
}
NUMBERS = [Element.BF16, Element.F16, Element.F8E4M3, Element.F8E5M2, Element.F32]


def values_of(element: Element, count: int, seed: int = 1) -> Bytes:
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, 1, 128)).astype(np.float32)
    floats = (rng.normal(0, 1, (count // 128, 128)).astype(np.float32) * scale).reshape(-1)
    if element is Element.OPAQUE:
        opaque: Bytes = (np.abs(floats) * 4).astype(np.uint8)
        return opaque
    return words_of_floats(np.clip(floats, -400, 400), element).view(np.uint8)


CASES = [(element, name) for element in NUMBERS for name in STEPS]
CASES += [(Element.OPAQUE, name) for name in ("planes", "exponents", "symbols", "zstd")]


@pytest.mark.parametrize(("element", "name"), CASES)
@pytest.mark.parametrize("cut", [0, 1], ids=["whole", "with a tail"])
def test_the_rest_of_decoding_gives_the_codec_s_bytes(
    element: Element, name: str, cut: int
) -> None:
    step = STEPS[name]
    plain = values_of(element, 40_960)
    plain = plain[: len(plain) - cut]
    plan = Plan(element, (step, Step(Method.RAW)), rows=32, columns=128, section_bytes=32_768)
    frame = blocks.encode(plain, plan)
    expected = np.empty_like(plain)
    blocks.decode(frame, expected)
    piece = unpacked.unpack(Codec.FRAME, frame, len(plain))
    np.testing.assert_array_equal(unpacked.plain_of(piece), expected)
    coded = header.parse(frame, plain_bytes_max=len(plain)).sections
    methods = [Method(int(method)) for method in coded["method"]]
    is_opaque = element is Element.OPAQUE
    wanted = [Crossing.PLAIN if is_opaque else CROSSINGS.get(m, Crossing.PLAIN) for m in methods]
    crossings = {
        int(row["target"]) // 32_768: Crossing(int(row["crossing"]))
        for row in piece.sections[::-1]  # the tail of a section is the second row of it
    }
    assert [crossings[i] for i in range(len(methods))] == wanted


@pytest.mark.parametrize("element", [Element.BF16, Element.F32])
def test_codes_are_a_fraction_of_the_bytes_that_they_stand_for(element: Element) -> None:
    plain = values_of(element, 1 << 18)
    plan = Plan(element, (STEPS["uniform INT8"],), rows=64, columns=128)
    piece = unpacked.unpack(Codec.FRAME, blocks.encode(plain, plan), len(plain))
    assert len(plain) / len(piece.packed) > 0.93 * FORMS[element].width_bytes


def test_other_codecs_and_frames_that_refer_cross_as_they_are() -> None:
    plain = values_of(Element.BF16, 8192)
    near = plain.copy()
    near[:100:2] ^= 1
    plan = Plan(Element.BF16, (STEPS["planes"],))
    p_frame = blocks.encode(near, plan, [known(b"k" * 16, plain)])
    references = [known(b"k" * 16, plain)]
    for codec, stored, given, expected in (
        (Codec.RAW, plain, (), plain),
        (Codec.ZSTD, compressed([plain], 1), (), plain),
        (Codec.FRAME, p_frame, references, near),
    ):
        piece = unpacked.unpack(codec, stored, len(plain), given)
        np.testing.assert_array_equal(unpacked.plain_of(piece), expected)
    with pytest.raises(Corrupt):
        unpacked.unpack(Codec.FRAME, p_frame, len(plain))


@pytest.mark.parametrize(
    "name", ["planes", "exponents", "uniform INT4", "by channel", "symbols", "rotated", "bounded"]
)
def test_a_damaged_frame_is_corrupt_or_gives_as_many_bytes(name: str) -> None:
    plain = values_of(Element.BF16, 16_384)
    plan = Plan(Element.BF16, (STEPS[name],), rows=32, columns=128, section_bytes=16_384)
    frame = blocks.encode(plain, plan)
    rng = np.random.default_rng(5)
    seen = 0
    for _ in range(200):
        damaged = frame.copy()
        damaged[rng.integers(0, len(frame), 3)] ^= rng.integers(1, 256, 3, dtype=np.uint8)
        cut = damaged[: rng.integers(0, len(frame))] if rng.random() < 0.2 else damaged
        try:
            assert len(unpacked.plain_of(unpacked.unpack(Codec.FRAME, cut, len(plain)))) == len(
                plain
            )
        except Corrupt:
            seen += 1
    assert seen > 20
