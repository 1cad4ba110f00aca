"""What tells one history from another: the profile of a spell of disuse, in small buckets.

Profiles are numbered as they come up; a number is a class. Levels of ever finer classes lean on each other (hazard.py); the other traits count
by themselves, so that one that says nothing costs nothing.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from kvstored.core.hints import HINT_CLASSES_MAX

USES_EDGES = (2, 3, 5, 9, 33)
GAP_EDGES_S = (5.0, 30.0, 120.0)
TURN_EDGES_S = (2.0, 5.0, 15.0, 30.0, 120.0, 500.0)
"""Those of gaps are among them."""
SIZE_EDGES_TOKENS = (512, 2048, 8192, 32_768)
SIZED_USES = 2
"""Up to so many uses it tells something how much came new at once."""
LEFT, LEFT_AGAIN = 1, 2

_SIZES, _GAPS, _TURNS = len(SIZE_EDGES_TOKENS) + 1, len(GAP_EDGES_S) + 2, len(TURN_EDGES_S) + 2
_SIZED = SIZED_USES * _SIZES
_HISTORIES = _SIZED + len(USES_EDGES) + 1 - SIZED_USES


class Profile(NamedTuple):
    """`uses`, and the `gap` between the last two; `size`: how much came new at once when it was stored, up to the second use; of the last request:
    `turn`, the time since the path was used that it goes on from, `earlier`, the same of the request before, and `fresh`, what came new;
    `left`: its branch was left since; `hint`: what the engine said. 0: none, or the least."""

    uses: int = 0
    gap: int = 0
    size: int = 0
    turn: int = 0
    earlier: int = 0
    fresh: int = 0
    left: int = 0
    hint: int = 0


BOUNDS = Profile(
    len(USES_EDGES) + 1, _GAPS, _SIZES, _TURNS, _TURNS, _SIZES, LEFT_AGAIN + 1, HINT_CLASSES_MAX
)
LEVELS = (_GAPS, _GAPS * _HISTORIES, _GAPS * _HISTORIES * _GAPS)
"""How many classes there are of each, coarse to fine."""
TRAITS = (_TURNS * HINT_CLASSES_MAX, _TURNS, _SIZES, LEFT_AGAIN + 1)
"""How many values there are of each."""
CLASSES_MAX = 16_384
"""When they are used up, what is new is of its finest level alone. With 4,096 that cost agents with hints a point of area."""
_RESERVED = LEVELS[-1]
_GAP_OF_TURN = (0, *(1 + bisect_right(GAP_EDGES_S, edge) for edge in (0.0, *TURN_EDGES_S)))
_TURN_OF_GAP = tuple(_GAP_OF_TURN.index(gap) for gap in range(_GAPS))


def uses_bucket(uses: int) -> int:
    return bisect_right(USES_EDGES, uses)


def gap_bucket(gap_s: float) -> int:
    """Below 0: never used before."""
    return 0 if gap_s < 0 else 1 + bisect_right(GAP_EDGES_S, gap_s)


def turn_bucket(gap_s: float) -> int:
    return 1 + bisect_right(TURN_EDGES_S, gap_s)


def size_bucket(tokens: int) -> int:
    return bisect_left(SIZE_EDGES_TOKENS, tokens)


class Profiles:
    """`profiles`, `nodes` (of the finest level) and `traits` (one after the other) by class. Class 0: nothing is known."""

    def __init__(self) -> None:
        self.profiles: list[Profile] = []
        self.nodes = array("i")
        self.traits = array("i")
        self._numbers: dict[Profile, int] = {}
        self.number(Profile())

    def __len__(self) -> int:
        return len(self.profiles)

    def number(self, profile: Profile) -> int:
        number = self._numbers.get(profile)
        if number is None:
            if len(self.profiles) >= CLASSES_MAX - _RESERVED:
                profile = _plain(profile)
            number = self._numbers.get(profile)
        if number is None:
            number = self._numbers[profile] = len(self.profiles)
            self.profiles.append(profile)
            self.nodes.append(_node(profile))
            self.traits.extend(_traits(profile))
        return number


def pack(profile: Profile) -> int:
    packed = 0
    for value, bound in zip(profile, BOUNDS, strict=True):
        packed = packed * bound + value
    return packed


def unpack(packed: int) -> Profile | None:
    """None where there is no such profile."""
    values = []
    for bound in reversed(BOUNDS):
        packed, value = divmod(packed, bound)
        values.append(value)
    return None if packed else Profile(*reversed(values))


def above(nodes: Iterable[int], level: int) -> list[int]:
    """The nodes of this level that those of the next one are part of."""
    return [node // (_GAPS if level else _HISTORIES) for node in nodes]


def _node(profile: Profile) -> int:
    is_sized = profile.uses < SIZED_USES
    sized = profile.uses * _SIZES + profile.size
    history = sized if is_sized else _SIZED + profile.uses - SIZED_USES
    return (profile.gap * _HISTORIES + history) * _GAPS + _GAP_OF_TURN[profile.turn]


def _traits(profile: Profile) -> tuple[int, ...]:
    spoken = profile.turn * HINT_CLASSES_MAX + profile.hint
    return spoken, profile.earlier, profile.fresh, profile.left


def _plain(profile: Profile) -> Profile:
    """Another one of the same node, one for each node."""
    size = profile.size if profile.uses < SIZED_USES else 0
    turn = _TURN_OF_GAP[_GAP_OF_TURN[profile.turn]]
    return Profile(profile.uses, profile.gap, size, turn)
