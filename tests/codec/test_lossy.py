"""Lossy frames: they say so, hold the error that they state, and leave what they cannot code exact."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.codec import blocks, report
from kvstored.codec.elements import FORMS, Element, words_of
from kvstored.codec.header import Header, parse
from kvstored.codec.lossy import BY_CHANNEL, Grid
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.values import floats_of, words_of_floats
from tests.codec import real

STEPS = (
    *(Step(Method.UNIFORM, grid) for grid in Grid),
    *(Step(Method.UNIFORM, grid | BY_CHANNEL) for grid in Grid),
    *(Step(Method.ROTATED, bits) for bits in (2, 3, 4)),
    *(Step(Method.BOUNDED, power) for power in (4, 5, 6)),
)
ELEMENTS = [element for element in Element if element is not Element.OPAQUE]


def coded(
    plain: NDArray[np.uint8], step: Step, element: Element = Element.BF16, against: str = ""
) -> tuple[Header, NDArray[np.uint8], int]:
    plan = Plan(element, (step,), rows=256, columns=64, section_bytes=32768)
    references = [blocks.known(b"a" * 32, real.plain(against))] if against else []
    stored = blocks.encode(plain, plan, references)
    target = np.empty_like(plain)
    return blocks.decode(stored, target, references), target, len(stored)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_frame_states_the_largest_error_that_it_has(step: Step, element: Element) -> None:
    values = floats_of(real.bits("a").reshape(-1), Element.BF16)
    plain = words_of_floats(values, element).view(np.uint8)
    header, target, size = coded(plain, step, element)
    assert header.is_lossy
    found = report.error_report(plain, target, element)
    assert 0 < found.largest <= header.error_max
    assert header.error_max == pytest.approx(found.largest, rel=1e-5)
    assert size < len(plain) or element in {Element.F8E4M3, Element.F8E5M2}
    assert found.cosine > (0.84 if step.parameter in {2, Grid.INT2, Grid.INT2 | 16} else 0.95)


def test_more_bits_are_nearer_and_longer() -> None:
    plain = real.plain("a")
    runs = [coded(plain, Step(Method.ROTATED, bits)) for bits in (2, 3, 4)]
    errors = [report.error_report(plain, target, Element.BF16).relative for _, target, _ in runs]
    sizes = [size for _, _, size in runs]
    assert errors == sorted(errors, reverse=True)
    assert sizes == sorted(sizes)


def test_a_bounded_frame_is_off_by_half_a_step_and_its_rounding_at_most() -> None:
    plain = real.plain("a")
    values = floats_of(words_of(plain, Element.BF16), Element.BF16)
    header, target, _ = coded(plain, Step(Method.BOUNDED, 5))
    step = max(np.std(values[:16384]), np.std(values[16384:])) / 32
    assert header.error_max <= step / 2 + np.abs(values).max() / 256
    assert not np.array_equal(target, plain)


def test_against_a_reference_the_same_bound_takes_far_fewer_bytes() -> None:
    plain = real.plain("b")
    _, _, alone = coded(plain, Step(Method.UNIFORM, Grid.INT4))
    p, target, against = coded(plain, Step(Method.UNIFORM, Grid.INT4), against="a")
    assert p.references
    near = report.error_report(plain, target, Element.BF16)
    far = report.error_report(plain, coded(plain, Step(Method.UNIFORM, Grid.INT4))[1], Element.BF16)
    assert near.relative < far.relative / 3
    assert against < alone * 1.1


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_sections_with_values_that_are_no_numbers_stay_exact(step: Step) -> None:
    words = real.bits("a").reshape(-1).copy()
    words[7], words[16384] = 0x7FC1, 0xFF80
    header, target, _ = coded(words.view(np.uint8), step)
    assert not header.is_lossy
    assert header.error_max == 0
    assert np.array_equal(target, words.view(np.uint8))


def test_rows_that_cannot_be_rotated_stay_exact() -> None:
    plan = Plan(Element.BF16, (Step(Method.ROTATED, 4),), rows=16, columns=48, section_bytes=1536)
    assert not parse(blocks.encode(real.plain("a")[:3072], plan)).is_lossy


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)
def test_every_finite_value_is_its_own_nearest(element: Element) -> None:
    codes = np.arange(1 << min(16, 8 * FORMS[element].width_bytes))
    shift = 16 if element is Element.F32 else 0
    words = (codes << shift).astype(f"<u{FORMS[element].width_bytes}")
    with np.errstate(invalid="ignore"):
        values = floats_of(words, element)
    finite = np.isfinite(values)
    assert np.array_equal(words_of_floats(values[finite], element), words[finite])
