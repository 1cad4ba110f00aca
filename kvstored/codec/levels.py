"""How far from exact blocks may be stored, by temperature class: what `disk.lossy` says, parsed.

`cold=int4` or `cold=rotated4,kv:shared=int8`: for all groups that allow it, or for those of one name. Sinks and the recent window are always exact.
"""

from collections.abc import Mapping

from kvstored.codec.lossy import BY_CHANNEL, Grid
from kvstored.codec.plan import Method, Step
from kvstored.core.types import GroupSpec, Heat
from kvstored.errors import InvalidArgument

MODES: Mapping[str, Step] = {
    "int8": Step(Method.UNIFORM, Grid.INT8),
    "int4": Step(Method.UNIFORM, Grid.INT4),
    "int4-channel": Step(Method.UNIFORM, Grid.INT4 | BY_CHANNEL),
    "fp4": Step(Method.UNIFORM, Grid.FP4),
    "rotated4": Step(Method.ROTATED, 4),
    "rotated3": Step(Method.ROTATED, 3),
    "rotated2": Step(Method.ROTATED, 2),
    "bounded64": Step(Method.BOUNDED, 6),
    "bounded32": Step(Method.BOUNDED, 5),
    "bounded16": Step(Method.BOUNDED, 4),
}
"""Scales by groups of 64 values of a token, or of a channel; rotated: Hadamard and a normal distribution's quantiser; bounded: no value off by more than
half of the deviation over the number."""
_CLASSES = {"shared": Heat.SHARED, "cold": Heat.COLD}

Levels = Mapping[tuple[str, Heat], Step]
"""By group, empty for any, and class."""


def parsed(text: str) -> Levels:
    """Raises InvalidArgument for whatever is no list of levels; `off` is none."""
    levels: dict[tuple[str, Heat], Step] = {}
    for part in () if text == "off" else text.split(","):
        where, _, mode = part.partition("=")
        group, _, heat = where.rpartition(":")
        if heat not in _CLASSES or mode not in MODES:
            raise InvalidArgument(
                f"no such level: level={part!r}; write [GROUP:]CLASS=MODE with one of classes={sorted(_CLASSES)} "
                f"modes={sorted(MODES)}"
            )
        levels[group, _CLASSES[heat]] = MODES[mode]
    return levels


def level_of(levels: Levels, group: GroupSpec, heat: int) -> Step | None:
    """None where blocks of this class are kept exactly."""
    if heat not in (Heat.SHARED, Heat.COLD):
        return None
    return levels.get((group.name, Heat(heat))) or levels.get(("", Heat(heat)))
