"""Sections against references: lanes that exchange values by the reference's exponent, and back."""

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from kvstored.codec import blocks, lanes
from kvstored.codec.elements import FORMS, Element, words_of
from kvstored.codec.header import parse
from kvstored.codec.plan import AGAINST, AGAINST_SECTION_BYTES, Method, Plan, Step
from kvstored.codec.streams import Reader, Writer
from kvstored.errors import Corrupt
from tests.codec import real

COUNT = (1 << 16) + 7_937
"""More than whole lanes, and than whole stretches of equal offsets."""


def near(element: Element, reach: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Values with all exponents and all kinds of NaN, and others up to `reach` steps from them."""
    rng = np.random.default_rng(reach)
    width = FORMS[element].width_bytes
    reference = rng.integers(0, 256, COUNT * width, dtype=np.uint8)
    words = words_of(reference, element)
    plain = words + rng.integers(0, 2 * reach, COUNT).astype(words.dtype) - words.dtype.type(reach)
    return np.ascontiguousarray(plain).view(np.uint8), reference


def stored_section(plain: NDArray[np.uint8], reference: NDArray[np.uint8], stages: int) -> bytes:
    writer = Writer(np.empty(2 * len(plain), dtype=np.uint8), 0)
    writer.begin(2 * len(plain))
    lanes.encode(writer, plain.view("<u2"), [reference.view("<u2")], Element.BF16, stages)
    size = writer.end()
    return bytes(writer._out[:size])


def decoded_section(stored: bytes, reference: NDArray[np.uint8]) -> NDArray[np.uint8]:
    target = np.empty(len(reference) // 2, dtype="<u2")
    reader = Reader(np.frombuffer(stored, dtype=np.uint8), zstandard.ZstdDecompressor())
    lanes.decode(reader, target, [reference.view("<u2")], Element.BF16)
    reader.end()
    return target.view(np.uint8)


@pytest.mark.parametrize("element", Element, ids=lambda element: element.name)
@pytest.mark.parametrize("reach", [1, 30, 100])
@pytest.mark.parametrize("stages", [0, 1, 8, 12])
def test_long_sections_come_back_bit_by_bit(element: Element, reach: int, stages: int) -> None:
    plain, reference = near(element, reach)
    known = [blocks.known(b"near" * 8, reference)]
    plan = Plan(element, section_bytes=1 << 22, against=Step(Method.LANES, stages))
    stored = blocks.encode(plain, plan, known)
    target = np.zeros_like(plain)
    header = blocks.decode(stored, target, known)
    assert np.array_equal(target, plain)
    assert Method.LANES in header.methods() or len(stored) > len(plain)


def test_real_kv_takes_fewer_bytes_in_lanes() -> None:
    """A short section, where Huffman tables weigh; whole blocks gain a tenth."""
    a, b = real.plain("a"), real.plain("b")
    flat, parted = (len(stored_section(b, a, stages)) for stages in (0, 8))
    assert parted < 0.95 * flat


def test_what_is_equal_costs_next_to_nothing() -> None:
    a = real.plain("a")
    assert len(stored_section(a, a, 8)) < 64


def test_a_p_frame_has_several_sections_of_the_plan_in_one() -> None:
    a = np.tile(real.plain("a"), 30)
    plan = Plan(Element.BF16, section_bytes=96 << 10)
    header = parse(blocks.encode(a, plan, [blocks.known(b"a" * 32, a)]))
    assert header.section_bytes == AGAINST_SECTION_BYTES
    assert plan.section_bytes_for(0) == plan.section_bytes


@pytest.mark.parametrize("stages", [13, 16, 1 << 31])
def test_impossible_numbers_of_stages_are_corrupt(stages: int) -> None:
    a, b = real.plain("a"), real.plain("b")
    stored = stored_section(b, a, AGAINST.parameter)
    assert np.array_equal(decoded_section(stored, a), b)
    with pytest.raises(Corrupt, match="impossible lanes"):
        decoded_section(stages.to_bytes(4, "little") + stored[4:], a)
    with pytest.raises(Corrupt, match="impossible lanes"):
        decoded_section((12).to_bytes(4, "little") + stored[4:], a[: 2 * 4095])


def test_another_number_of_escapes_is_corrupt() -> None:
    a = real.plain("a")
    b = a.copy()
    b.view("<u2")[::100] ^= np.uint16(0x8000)
    stored = stored_section(b, a, 8)
    count = len(b.view("<u2")[::100])
    at = stored.rindex(count.to_bytes(4, "little"))
    wrong = stored[:at] + (count + 1).to_bytes(4, "little") + stored[at + 4 :]
    assert np.array_equal(decoded_section(stored, a), b)
    with pytest.raises(Corrupt, match="number of escapes"):
        decoded_section(wrong, a)
