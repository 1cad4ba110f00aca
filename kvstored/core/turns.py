"""Who comes back: the last turn of each conversation, when its next one is likely, and what the requests of a batch have in common.

Names are the engines'. Bounded: the least recent are forgotten. Only guesses come of it, which page-ins treat as such.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from kvstored.core.calls import Fingerprint
from kvstored.core.types import NamespaceId

CONVERSATIONS_MAX = 65_536
BATCHES_MAX = 1024
SIBLINGS_MAX = 32
"""Paths of a batch that are remembered, the latest."""
EARLY = 0.8
"""A turn is expected after this share of the usual pause: a load takes its time."""
SOON_S = 0.02
"""Below it nothing is gained by guessing: the call itself comes first."""

Name = tuple[NamespaceId, str]


@dataclass(slots=True)
class Turn:
    """`pause_s`: from the end of a turn to the begin of the next, as it was lately; 0: not known."""

    leaf: Fingerprint
    ended_s: float
    pause_s: float = 0.0


class Turns:
    def __init__(self) -> None:
        self._turns: OrderedDict[Name, Turn] = OrderedDict()
        self._expected: list[tuple[float, Name, float]] = []
        self._batches: OrderedDict[tuple[NamespaceId, bytes], OrderedDict[Fingerprint, None]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def expects(self) -> bool:
        """Whether any next turn is expected."""
        return bool(self._expected)

    def ended(self, name: Name, leaf: Fingerprint, now_s: float) -> None:
        """A turn is over, at this block."""
        before = self._turns.pop(name, None)
        turn = Turn(leaf, now_s, before.pause_s if before is not None else 0.0)
        self._turns[name] = turn
        if len(self._turns) > CONVERSATIONS_MAX:
            self._turns.popitem(last=False)
        if EARLY * turn.pause_s > SOON_S and len(self._expected) < CONVERSATIONS_MAX:
            heappush(self._expected, (now_s + EARLY * turn.pause_s, name, now_s))

    def begun(self, name: Name, now_s: float) -> Fingerprint | None:
        """The conversation goes on; where its last turn ended."""
        turn = self._turns.get(name)
        if turn is None:
            return None
        pause_s = now_s - turn.ended_s
        turn.pause_s = pause_s if not turn.pause_s else (turn.pause_s + pause_s) / 2
        return turn.leaf

    def due(self, now_s: float) -> Iterator[tuple[NamespaceId, Fingerprint]]:
        """Last turns of conversations that are about to go on."""
        while self._expected and self._expected[0][0] <= now_s:
            _, name, ended_s = heappop(self._expected)
            turn = self._turns.get(name)
            if turn is not None and turn.ended_s == ended_s:
                yield name[0], turn.leaf

    def joined(self, ns: NamespaceId, batch: bytes, leaf: Fingerprint) -> list[Fingerprint]:
        """A request of a batch runs on this path; where its siblings' paths end."""
        siblings = self._batches.pop((ns, batch), OrderedDict())
        self._batches[ns, batch] = siblings
        if len(self._batches) > BATCHES_MAX:
            self._batches.popitem(last=False)
        others = [each for each in siblings if each != leaf]
        siblings.pop(leaf, None)
        siblings[leaf] = None
        if len(siblings) > SIBLINGS_MAX:
            siblings.popitem(last=False)
        return others
