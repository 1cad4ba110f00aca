"""Chooses a plan from a sample of real bytes: which layout the elements seem to have, how long sections are, which method each takes.

A choice costs some tens of milliseconds of a core, once for a group of a namespace. It can only cost ratio: every plan decodes every block exactly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvstored.codec import sections
from kvstored.codec.elements import FORMS, Bytes, Element
from kvstored.codec.plan import (
    AGAINST_SMALL,
    RAW,
    SECTION_BYTES,
    Method,
    Plan,
    Step,
)
from kvstored.codec.sections import Layout
from kvstored.codec.streams import Writer
from kvstored.core.types import GroupKind, GroupSpec
from kvstored.errors import InvalidArgument

DELTA_MIN_CONTEXT_TOKENS = 131_072
"""Below this, differences along tokens are not tried: they lose on every model measured, and cost decoding speed."""
GAIN_MIN = 0.03
"""A plan that saves less is not worth its decoding: raw."""
NEAR_GAIN_MIN = 0.25
"""Of a P frame against an I frame. The same tokens save 0.5 and more, others nothing."""
_COLUMNS = (64, 128, 256, 512, 80, 96, 192, 320, 384, 576, 640, 768, 1024)
_SECTIONS_KIB = (64, 96, 128, 192, 256, 384)
_SAMPLED = 8
"""Pairs of neighbouring sections that a choice looks at: K and V often take turns."""
_KEYED_ROWS = 16
_RATIO_GAIN = 0.002
"""A layout or a second step that gains less than this is noise."""
_FAST = (Method.PLANES, Method.EXPONENTS)
_FAST_GAIN = 0.005
"""Of one of these against the other, or of a shorter section where speed counts: a tenth of the speed, at most."""


class Goal(Enum):
    """SPEED takes a slower method only where it saves 5 % more, RATIO wherever it saves more than noise, and tries slower ones too."""

    SPEED = 0.05
    RATIO = 0.002

    @property
    def fast_gain(self) -> float:
        """What one of two methods of about the same speed has to save."""
        return min(self.value, _FAST_GAIN)


def plan_for(
    sample: Bytes,
    element: Element,
    rows: int,
    *,
    goal: Goal = Goal.SPEED,
    context_tokens: int = 0,
    delta_min_context_tokens: int = DELTA_MIN_CONTEXT_TOKENS,
) -> Plan:
    """The plan for blocks like `sample`, a full block with `rows` rows (tokens, or one for every m). Raw where nothing gains 3 %."""
    plan = Plan(element)
    if not len(sample):
        return plan
    if goal is Goal.RATIO:
        plan = replace(plan, against=AGAINST_SMALL)
    if element is not Element.OPAQUE:
        usual = Step(Method.SYMBOLS if goal is Goal.RATIO else _fast_method(element))
        plan = _with_sections(_with_layout(plan, sample, rows), sample, usual, goal)
    with_delta = bool(plan.columns) and context_tokens >= delta_min_context_tokens
    steps, ratio = _steps(plan, sample, _candidates(element, goal, with_delta=with_delta), goal)
    if ratio < 1 + GAIN_MIN:
        return replace(plan, steps=(RAW,), ratio=1.0)
    return replace(plan, steps=steps, ratio=ratio)


def is_near(plain: Bytes, reference: Bytes, plan: Plan) -> bool:
    """Whether a P frame of `plain` against `reference` is likely to save a quarter of an I frame: one section in the middle says it.

    Less is not worth it, since whoever reads a P frame reads its reference too.
    """
    if len(plain) != len(reference) or not len(plain):
        return False
    middle = len(plain) // 2 // plan.section_bytes
    span = slice(middle * plan.section_bytes, (middle + 1) * plan.section_bytes)
    form = Layout(plan.element, plan.rows, plan.columns)
    alone = _size(plain[span], plan.steps[middle % len(plan.steps)], form)
    against = _size(plain[span], plan.against, form, (reference[span],))
    return against < alone * (1 - NEAR_GAIN_MIN)


def check_lossy(group: GroupSpec, plan: Plan) -> None:
    """Raises InvalidArgument where a lossy plan is not allowed: groups must have been opened with `lossy_ok`, and hold rows of KV.

    Window and state groups and resident ones (HCA-like) never are; nor is a group whose name says that it is an indexer's or holds RoPE parts.
    """
    if not plan.is_lossy:
        return
    parts = group.name.lower().replace("-", "_").split("_")
    forbidden = [word for word in ("indexer", "index", "idx", "rope", "hca") if word in parts]
    kinds = (GroupKind.LINEAR, GroupKind.COMPRESSED)
    if not group.lossy_ok or group.kind not in kinds or group.resident or forbidden:
        raise InvalidArgument(
            f"group must be kept exactly, take a lossless plan: group={group.name!r} kind={group.kind.name} "
            f"lossy_ok={group.lossy_ok} resident={group.resident}"
        )


def _candidates(element: Element, goal: Goal, *, with_delta: bool) -> tuple[Step, ...]:
    """Fast ones first."""
    if element is Element.OPAQUE:
        return (RAW, Step(Method.PLANES), Step(Method.ZSTD, 1))
    known: tuple[Step, ...] = (RAW, Step(Method.PLANES))
    if _fast_method(element) is Method.EXPONENTS:
        known += (Step(Method.EXPONENTS),)
    known += (Step(Method.SYMBOLS),)
    if goal is Goal.RATIO:
        known += (Step(Method.SYMBOLS, 4),)
    if FORMS[element].width_bytes == 1:
        known += (Step(Method.ZSTD, 1),)
    if with_delta:
        known += (Step(Method.TOKENS), Step(Method.TOKENS, _KEYED_ROWS))
    return known


def _fast_method(element: Element) -> Method:
    return Method.EXPONENTS if FORMS[element].width_bytes > 1 else Method.PLANES


def _with_layout(plan: Plan, sample: Bytes, rows: int) -> Plan:
    """With the number of channels whose models save most, if any do."""
    count = len(sample) // FORMS[plan.element].width_bytes
    fitting = [c for c in _COLUMNS if rows > 1 and count % (rows * c) == 0]
    flat = _total(plan, sample, Step(Method.SYMBOLS))
    best, size = plan, flat * (1 - _RATIO_GAIN)
    for columns in fitting:
        tiled = replace(plan, rows=rows, columns=columns)
        tile_bytes = rows * columns * FORMS[plan.element].width_bytes
        tiled = replace(tiled, section_bytes=max(SECTION_BYTES // tile_bytes, 1) * tile_bytes)
        total = _total(tiled, sample, Step(Method.SYMBOLS))
        if total < size:
            best, size = tiled, total
    return best


def _with_sections(plan: Plan, sample: Bytes, usual: Step, goal: Goal) -> Plan:
    """Sections of whole tiles, and as many as divide the block where one such length is as good: K and V then stay apart."""
    width = FORMS[plan.element].width_bytes
    unit = plan.rows * plan.columns * width if plan.columns else 4096
    sizes = {max(kib * 1024 // unit, 1) * unit for kib in _SECTIONS_KIB}
    sizes |= {
        s
        for s in range(unit, 384 * 1024 + 1, unit)
        if s >= 64 * 1024 and len(sample) % (2 * s) == 0
    }
    best, size = plan, float("inf")
    for section_bytes in sorted(sizes, reverse=True)[:16]:
        total = _total(replace(plan, section_bytes=section_bytes), sample, usual)
        if total < size * (1 - goal.fast_gain):
            best, size = replace(plan, section_bytes=section_bytes), total
    return best


def _steps(
    plan: Plan, sample: Bytes, candidates: Sequence[Step], goal: Goal
) -> tuple[tuple[Step, ...], float]:
    """The best step for all sections, or one each for even and odd ones where that is better; and the ratio."""
    form = Layout(plan.element, plan.rows, plan.columns)
    spans = _spans(len(sample), plan.section_bytes)
    sizes = np.array(
        [[_size(sample[span], step, form) for step in candidates] for _, span in spans]
    )
    is_odd = np.array([number % 2 == 1 for number, _ in spans])
    plain = sum(len(sample[span]) for _, span in spans)
    one = _cheapest(candidates, sizes.sum(axis=0), goal)
    together = float(sizes[:, one].sum())
    if is_odd.any() and not is_odd.all():
        even, odd = (
            _cheapest(candidates, sizes[which].sum(axis=0), goal) for which in (~is_odd, is_odd)
        )
        apart = float(sizes[~is_odd, even].sum() + sizes[is_odd, odd].sum())
        if apart < together * (1 - _RATIO_GAIN):
            return (candidates[even], candidates[odd]), plain / apart
    return (candidates[one],), plain / together


def _cheapest(candidates: Sequence[Step], sizes: NDArray[np.int64], goal: Goal) -> int:
    """A later, slower candidate must save more than `goal` beyond what the best before it needs; one as fast as that hardly anything."""
    best = 0
    for i in range(1, len(sizes)):
        is_as_fast = candidates[i].method in _FAST and candidates[best].method in _FAST
        gain = goal.fast_gain if is_as_fast else goal.value
        if sizes[i] < sizes[best] * (1 - gain):
            best = i
    return best


def _total(plan: Plan, sample: Bytes, step: Step) -> int:
    """Bytes for the same bytes of the sample, whatever the section length."""
    form = Layout(plan.element, plan.rows, plan.columns)
    spans = _spans(len(sample), plan.section_bytes)
    plain = sum(len(sample[span]) for _, span in spans)
    stored = sum(_size(sample[span], step, form) for _, span in spans)
    return round(stored / plain * len(sample))


def _spans(size: int, section_bytes: int) -> list[tuple[int, slice]]:
    """Number and place of some pairs of sections all over the sample."""
    count = -(-size // section_bytes)
    pairs = -(-count // 2)
    chosen: Iterable[int] = range(pairs)
    if pairs > _SAMPLED:
        chosen = (pairs * (2 * i + 1) // (2 * _SAMPLED) for i in range(_SAMPLED))
    numbers = [n for pair in chosen for n in (2 * pair, 2 * pair + 1) if n < count]
    return [(n, slice(n * section_bytes, min((n + 1) * section_bytes, size))) for n in numbers]


def _size(plain: Bytes, step: Step, form: Layout, references: Sequence[Bytes] = ()) -> int:
    writer = Writer(np.empty(len(plain), dtype=np.uint8), 0)
    return sections.encode(writer, plain, step, form, references)[1]
