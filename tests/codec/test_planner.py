"""The planner: what it finds in real KV, what it leaves raw, and what may never be lossy."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.codec import blocks, planner
from kvstored.codec.elements import Element, element_of
from kvstored.codec.lossy import Grid
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.planner import Goal
from kvstored.codec.values import floats_of, words_of_floats
from kvstored.core.types import GroupKind, GroupSpec
from kvstored.errors import InvalidArgument
from tests.codec import real


def sample(element: Element) -> NDArray[np.uint8]:
    """Eight tiles: K and V of both variants, twice."""
    bits = np.concatenate([real.bits("a"), real.bits("b")] * 2).reshape(-1)
    if element is Element.BF16:
        return bits.view(np.uint8)
    return words_of_floats(floats_of(bits, Element.BF16), element).view(np.uint8)


def stored_share(plain: NDArray[np.uint8], plan: Plan) -> float:
    stored = blocks.encode(plain, plan)
    target = np.empty_like(plain)
    blocks.decode(stored, target)
    assert np.array_equal(target, plain)
    return len(stored) / len(plain)


@pytest.mark.parametrize("element", [e for e in Element if e], ids=lambda e: e.name)
@pytest.mark.parametrize("goal", Goal, ids=lambda goal: goal.name)
def test_the_ratio_that_a_plan_names_is_what_blocks_get(element: Element, goal: Goal) -> None:
    plain = sample(element)
    plan = planner.plan_for(plain, element, rows=256, goal=goal)
    assert plan.ratio > 1.15
    assert stored_share(plain, plan) == pytest.approx(1 / plan.ratio, rel=0.02)


def test_for_ratio_it_finds_the_channels_by_itself() -> None:
    plan = planner.plan_for(sample(Element.BF16), Element.BF16, rows=256, goal=Goal.RATIO)
    assert (plan.rows, plan.columns) == (256, 64)
    assert any(step.method is Method.SYMBOLS for step in plan.steps)
    assert "256x64" in str(plan)


@pytest.mark.parametrize("element", [Element.BF16, Element.F16, Element.F32], ids=lambda e: e.name)
def test_for_speed_exponents_lie_apart_and_save_more_than_planes(element: Element) -> None:
    plain = sample(element)
    plan = planner.plan_for(plain, element, rows=256)
    assert plan.steps == (Step(Method.EXPONENTS),)
    assert plan.columns == 64
    planes = replace(plan, steps=(Step(Method.PLANES),))
    assert stored_share(plain, plan) < 0.99 * stored_share(plain, planes)


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ([1000, 700, 698, 690], Method.PLANES),
        ([1000, 700, 696, 690], Method.EXPONENTS),
        ([1000, 700, 696, 660], Method.SYMBOLS),
        ([1000, 960, 956, 952], Method.RAW),
    ],
)
def test_a_method_as_fast_has_to_save_half_a_percent_and_a_slower_one_five(
    sizes: list[int], taken: Method
) -> None:
    steps = tuple(Step(m) for m in (Method.RAW, Method.PLANES, Method.EXPONENTS, Method.SYMBOLS))
    found = planner._cheapest(steps, np.array(sizes), Goal.SPEED)
    assert steps[found].method is taken
    smallest = planner._cheapest(steps, np.array(sizes), Goal.RATIO)
    assert steps[smallest].method is Method.SYMBOLS


def test_the_order_of_elements_costs_ratio_only() -> None:
    """As an engine stores tiles: no row holds one token's channels."""
    mixed = np.random.default_rng(7).permutation(sample(Element.BF16).view("<u2")).view(np.uint8)
    plan = planner.plan_for(mixed, Element.BF16, rows=256, goal=Goal.RATIO)
    assert plan.columns == 0
    assert stored_share(mixed, plan) < 0.72


def test_noise_and_nothing_stay_raw() -> None:
    noise = np.random.default_rng(1).integers(0, 256, 1 << 18, dtype=np.uint8)
    for element in Element:
        assert planner.plan_for(noise, element, rows=256).is_raw
        assert planner.plan_for(noise[:0], element, rows=256).is_raw


def test_along_token_delta_is_tried_only_for_long_contexts_and_taken_only_where_it_wins() -> None:
    steady = np.cumsum(
        np.random.default_rng(3).integers(-2, 3, (8, 256, 64)), axis=1, dtype=np.int64
    )
    drifting = (steady + np.arange(64) * 977 + 0x3C00).astype("<u2").reshape(-1).view(np.uint8)
    short = planner.plan_for(drifting, Element.BF16, rows=256, context_tokens=4096)
    long = planner.plan_for(drifting, Element.BF16, rows=256, context_tokens=131_072)
    assert Method.TOKENS not in {step.method for step in short.steps}
    assert {step.method for step in long.steps} == {Method.TOKENS}
    real_kv = planner.plan_for(sample(Element.BF16), Element.BF16, 256, context_tokens=1 << 20)
    assert Method.TOKENS not in {step.method for step in real_kv.steps}


def test_a_block_of_the_same_tokens_is_near_and_another_one_is_not() -> None:
    a, b = real.plain("a"), real.plain("b")
    plan = planner.plan_for(a, Element.BF16, rows=256)
    assert planner.is_near(b, a, plan)
    assert not planner.is_near(b, np.roll(a, 64 * 2 * 31), plan)
    assert not planner.is_near(b, a[:-2], plan)


KV = GroupSpec("kv", GroupKind.LINEAR, 65536, lossy_ok=True)


@pytest.mark.parametrize(
    "group",
    [
        replace(KV, lossy_ok=False),
        replace(KV, kind=GroupKind.WINDOW, window_tokens=128),
        replace(KV, kind=GroupKind.STATE),
        replace(KV, name="indexer_k"),
        replace(KV, name="kv-rope"),
        replace(KV, kind=GroupKind.COMPRESSED, ratio=128, resident=True),
        replace(KV, kind=GroupKind.COMPRESSED, ratio=128, name="hca"),
    ],
    ids=["not allowed", "window", "state", "indexer", "rope", "resident", "hca"],
)
def test_groups_that_must_be_exact_take_no_lossy_plan(group: GroupSpec) -> None:
    lossy = Plan(Element.BF16, (Step(Method.UNIFORM, Grid.INT4),))
    planner.check_lossy(group, Plan(Element.BF16, (Step(Method.PLANES),)))
    with pytest.raises(InvalidArgument, match="kept exactly"):
        planner.check_lossy(group, lossy)
    planner.check_lossy(KV, lossy)


def test_dtype_names_of_engines_are_known_and_others_are_opaque() -> None:
    assert element_of("torch.bfloat16") is Element.BF16
    assert element_of("fp8_e5m2") is Element.F8E5M2
    assert element_of("nvfp4") is Element.OPAQUE


def test_a_plan_for_fewer_tokens_has_shorter_tiles_and_as_many_of_them_in_a_section() -> None:
    plan = Plan(Element.BF16, (Step(Method.SYMBOLS),), 256, 64, section_bytes=3 * 32768)
    part = plan.for_share(200 * 1000, 256 * 1000)
    assert (part.rows, part.section_bytes) == (200, 3 * 200 * 128)
    assert plan.for_share(256 * 1000, 256 * 1000) is plan
    assert plan.for_share(200 * 1000 + 1, 256 * 1000) is plan
