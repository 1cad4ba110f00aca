"""What an engine may say of a request. All of it is optional, and none of it is a rule: hints become classes whose worth is learned.

Only `retention_s` asks for something: a soft pin of the request's path, within the share of each tier that pins may hold.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

OUTPUT_EDGES = (200, 1000)
"""Tokens: a tool call, an answer, a long text."""
NAME_CHARACTERS_MAX = 128
"""Of a session's or a category's name."""
PRIORITY_MAX = 3


class FollowUp(IntEnum):
    """Why the output ended, which tells what to expect: after a tool call the same path comes back within seconds."""

    UNKNOWN = 0
    TOOL_USE = 1
    END_TURN = 2


@dataclass(frozen=True, slots=True)
class Hint:
    """`output_tokens` None, an empty name and 0: not said. `session`: turns of one conversation share it; `category`: what kind of request
    it is (chat, agent, batch), in the caller's words."""

    follow_up: FollowUp = FollowUp.UNKNOWN
    output_tokens: int | None = None
    session: str = ""
    category: str = ""
    priority: int = 0
    retention_s: float = 0.0

    def after(self, earlier: "Hint") -> "Hint":
        """What was said earlier of the same request, as far as this one does not say it."""
        said = self.output_tokens
        return Hint(
            self.follow_up or earlier.follow_up,
            earlier.output_tokens if said is None else said,
            self.session or earlier.session,
            self.category or earlier.category,
            self.priority or earlier.priority,
            self.retention_s or earlier.retention_s,
        )


NO_HINT = Hint()

_LENGTHS = len(OUTPUT_EDGES) + 2
_PLAIN = len(FollowUp) * _LENGTHS
HINT_CLASSES_MAX = 32

Said = tuple[int, str, int]
"""Number of the plain class, category, priority."""


class HintClasses:
    """Numbers below `HINT_CLASSES_MAX` for what is said. Follow-up and length have fixed ones; with a category or a priority it gets its
    own as long as there are, in the order in which they come up, and else that of follow-up and length."""

    def __init__(self, said: Iterable[Said] = ()) -> None:
        self._numbers: dict[Said, int] = {}
        for each in said:
            self._number(each)

    def number(self, hint: Hint) -> int:
        """0 where nothing is said that makes a class."""
        length = 0
        if hint.output_tokens is not None:
            length = 1 + sum(hint.output_tokens >= edge for edge in OUTPUT_EDGES)
        return self._number((length * len(FollowUp) + hint.follow_up, hint.category, hint.priority))

    def said(self) -> tuple[Said, ...]:
        """In order of their numbers: makes equal classes anew."""
        return tuple(self._numbers)

    def _number(self, said: Said) -> int:
        plain, category, priority = said
        if not category and not priority:
            return plain
        number = self._numbers.get(said)
        if number is None and _PLAIN + len(self._numbers) < HINT_CLASSES_MAX:
            number = self._numbers[said] = _PLAIN + len(self._numbers)
        return plain if number is None else number
