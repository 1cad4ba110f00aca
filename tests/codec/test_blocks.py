"""Frames of blocks: exact for every method, element and shape, in parts too, and against references."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstored.codec import blocks
from kvstored.codec.blocks import Known
from kvstored.codec.elements import FORMS, Element
from kvstored.codec.header import Kind, Reference, parse
from kvstored.codec.plan import Method, Plan, Step
from kvstored.errors import Corrupt, InvalidArgument
from tests.codec import real
from tests.codec.golden_frames import GOLDEN, OLD_ZSTD, Golden

LOSSLESS = (
    Step(Method.RAW), Step(Method.ZSTD, 3), Step(Method.PLANES), Step(Method.SYMBOLS), Step(Method.SYMBOLS, 4),
    Step(Method.TOKENS), Step(Method.TOKENS, 3), Step(Method.EXPONENTS),
)  # fmt: skip
SPECIAL = {
    Element.BF16: (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x807F),
    Element.F16: (0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E01, 0xFFFF, 0x0001, 0x83FF),
    Element.F8E4M3: (0x00, 0x80, 0x7F, 0xFF, 0x01, 0x87),
    Element.F8E5M2: (0x00, 0x80, 0x7C, 0xFC, 0x7F, 0xFF, 0x01),
    Element.F32: (0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1, 0x807FFFFF),
    Element.OPAQUE: (0, 255),
}
"""Zeros, infinities, NaN payloads, denormals."""


def decoded(stored: NDArray[np.uint8], size: int, references: tuple[Known, ...] = ()) -> bytes:
    target = np.full(size, 0xA5, dtype=np.uint8)
    blocks.decode(stored, target, references)
    return target.tobytes()


@st.composite
def plains(draw: st.DrawFn, element: Element) -> NDArray[np.uint8]:
    """Bytes of one kind: normal values, any bits, one value all over, with special values strewn in and an odd tail."""
    width = FORMS[element].width_bytes
    count = draw(st.sampled_from([0, 1, 2, 63, 64, 65, 1000, 4096, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    how = draw(st.sampled_from(["normal", "bits", "constant"]))
    words = rng.integers(0, 256, count * width, dtype=np.uint8).view(f"<u{width}")
    if how == "constant":
        words[:] = words[:1]
    elif how == "normal" and element is Element.BF16:
        words = (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2")
    elif how == "normal" and element is Element.F16:
        words = rng.standard_normal(count).astype("<f2").view("<u2")
    elif how == "normal" and element is Element.F32:
        words = rng.standard_normal(count).astype("<f4").view("<u4")
    strewn = draw(st.integers(0, 8))
    if count:
        special = np.array(SPECIAL[element], dtype=f"<u{width}")
        words = words.copy()
        words[rng.integers(0, count, strewn)] = special[rng.integers(0, len(special), strewn)]
    tail = rng.integers(0, 256, draw(st.integers(0, width - 1)), dtype=np.uint8)
    return np.concatenate([words.view(np.uint8), tail])


@st.composite
def plans(draw: st.DrawFn, element: Element) -> Plan:
    width = FORMS[element].width_bytes
    return Plan(
        element,
        tuple(draw(st.lists(st.sampled_from(LOSSLESS), min_size=1, max_size=3))),
        rows=draw(st.sampled_from([0, 1, 7, 16])),
        columns=draw(st.sampled_from([0, 1, 8, 64])),
        section_bytes=draw(st.sampled_from([width, 60 * width, 1024 * width, 1 << 20])),
        against=Step(Method.LANES, draw(st.integers(0, 12))),
    )


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_block_comes_back_bit_by_bit(data: st.DataObject) -> None:
    element = data.draw(st.sampled_from(Element))
    plain, plan = data.draw(plains(element)), data.draw(plans(element))
    if len(plain) // plan.section_bytes > 300:
        plain = plain[: 300 * plan.section_bytes]
    stored = blocks.encode(plain, plan)
    assert decoded(stored, len(plain)) == plain.tobytes()
    assert len(stored) <= blocks.stored_bytes_max(len(plain), plan)
    begin = data.draw(st.integers(0, len(plain)))
    end = data.draw(st.integers(begin, len(plain)))
    part = blocks.decode_range(stored, begin, end, plain_bytes=len(plain))
    assert part.tobytes() == plain[begin:end].tobytes()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_p_and_b_frames_come_back_bit_by_bit(data: st.DataObject) -> None:
    element = data.draw(st.sampled_from(Element))
    plain, plan = data.draw(plains(element)), data.draw(plans(element))
    plain = plain[: 300 * plan.section_bytes]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(1, 2))
    reach = data.draw(st.sampled_from([1, 8, 256]))
    references = tuple(
        blocks.known(bytes([i]) * 20, plain ^ rng.integers(0, reach, len(plain), dtype=np.uint8))
        for i in range(count)
    )
    stored = blocks.encode(plain, plan, references)
    assert parse(stored).kind is (Kind.P if count == 1 else Kind.B)
    assert decoded(stored, len(plain), references) == plain.tobytes()


@pytest.mark.parametrize("step", LOSSLESS, ids=str)
def test_memory_that_is_not_aligned_is_coded_as_well(step: Step) -> None:
    whole = np.concatenate([np.zeros(1, dtype=np.uint8), real.plain("a")[:8191]])
    plan = Plan(Element.BF16, (step,), rows=16, columns=64, section_bytes=2048)
    stored = blocks.encode(whole[1:], plan)
    target = np.zeros(8192, dtype=np.uint8)
    blocks.decode(stored, target[1:])
    assert np.array_equal(target[1:], whole[1:])


def test_real_kv_reaches_the_ratios_that_the_docs_name() -> None:
    """One head of one layer; whole blocks do better, since their sections are longer."""
    a, b = real.plain("a"), real.plain("b")
    layout = {"rows": 256, "columns": 64, "section_bytes": 32768}
    planes = blocks.encode(a, Plan(Element.BF16, (Step(Method.PLANES),), **layout))
    symbols = blocks.encode(a, Plan(Element.BF16, (Step(Method.SYMBOLS),), **layout))
    p = blocks.encode(b, Plan(Element.BF16, **layout), [blocks.known(b"a" * 32, a)])
    assert len(a) / len(planes) > 1.44
    assert len(a) / len(symbols) > 1.48
    assert len(b) / len(p) > 3.05


def test_a_layer_is_decoded_without_looking_at_the_others() -> None:
    plain = np.concatenate([real.plain("a"), real.plain("b")])
    plan = Plan(Element.BF16, (Step(Method.SYMBOLS),), 256, 64, section_bytes=32768)
    stored = blocks.encode(plain, plan, shape=(4, 256, 64)).copy()
    header = parse(stored)
    assert header.shape == (4, 256, 64)
    begin = header.header_bytes + int(header.sections["stored_bytes"][:2].sum())
    stored[header.header_bytes : begin] ^= 0xFF
    span = blocks.layer_range(len(plain), layers=4, begin=2, end=3)
    layer = blocks.decode_range(stored, *span, plain_bytes=len(plain))
    assert np.array_equal(layer, plain[slice(*span)])
    with pytest.raises(Corrupt):
        blocks.decode_range(stored, 0, 1, plain_bytes=len(plain))


def test_a_p_frame_is_decoded_only_against_its_own_reference() -> None:
    a, b = real.plain("a"), real.plain("b")
    stored = blocks.encode(b, Plan(Element.BF16), [blocks.known(b"a" * 32, a)])
    assert parse(stored).references == (Reference(b"a" * 32, blocks.checksum_of(a)),)
    for wrong in ((), (blocks.known(b"x" * 32, a),), (blocks.known(b"a" * 32, b),)):
        with pytest.raises(Corrupt, match="other blocks"):
            decoded(stored, len(b), wrong)


def test_references_of_another_length_are_refused() -> None:
    a = real.plain("a")
    with pytest.raises(InvalidArgument):
        blocks.encode(a, Plan(Element.BF16), [blocks.known(b"a" * 32, a[:-2])])


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_golden_frames_decode_for_ever(golden: Golden) -> None:
    stored = np.frombuffer(golden.path.read_bytes(), dtype=np.uint8)
    plain = golden.plain()
    target = np.empty_like(plain)
    header = blocks.decode(stored, target, golden.known())
    assert header.is_lossy == golden.plan.is_lossy
    if not header.is_lossy:
        assert np.array_equal(target, plain)
        assert golden.plan.steps[0].method in header.methods() or golden.references
    if golden.references and not header.is_lossy:
        assert header.methods() == {Method.RESIDUAL if golden.is_old else Method.LANES}


def test_the_frames_before_this_format_decode() -> None:
    from kvstored.codec import frame

    stored = np.frombuffer(OLD_ZSTD.read_bytes(), dtype=np.uint8)
    target = np.empty_like(GOLDEN[0].plain())
    frame.decode(frame.Codec.ZSTD, stored, [target])
    assert np.array_equal(target, GOLDEN[0].plain())
