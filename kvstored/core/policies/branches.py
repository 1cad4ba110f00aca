"""Branches that were left: where a path of few branches, or a session, goes on elsewhere than the last time, what it left is superseded.

A turn was regenerated, edited or compacted. It is a history of its own and nothing harder, since on some traffic branches take turns.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvstored.core.calls import Fingerprint
from kvstored.core.policies.base import Ledger
from kvstored.core.policies.spans import NONE, SUPERSEDED, Spans

SESSIONS_MAX = 65_536
FAN_OUT_MAX = 2
"""A block that ever had more branches forks by nature: leaving one of them says nothing."""
SUPERSEDED_MAX = 4096
"""Spans of a branch that are superseded at once: bounds the time of a touch."""


class Branches:
    """`superseded` is told of each span, once until it is used again."""

    def __init__(
        self, ledger: Ledger, spans: Spans, superseded: Callable[[int, float], None]
    ) -> None:
        self._ledger = ledger
        self._spans = spans
        self._superseded = superseded
        self._sessions: OrderedDict[str, Fingerprint] = OrderedDict()
        """The block where the last path of a session ended."""

    def leave(self, span: int, child: int, now_s: float) -> None:
        """A path goes on from the span by this child: the branch of last time is superseded where there are few."""
        spans = self._spans
        old, spans.child[span] = spans.child[span], child
        if old < 0 or old == child or spans.kids[span] > FAN_OUT_MAX:
            return
        if self._ledger.tree.parent.item(old) == spans.tail[span]:
            self._supersede(old, now_s)

    def turned(self, session: str, leaf: int, now_s: float) -> None:
        """A session went on elsewhere than where it was: the branch that it left is superseded, whatever the fan-out above."""
        tree, spans = self._ledger.tree, self._spans
        before = self._sessions.pop(session, None)
        self._sessions[session] = self._ledger.fingerprint(leaf)
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        top = spans.of(-1 if before is None else self._ledger.block_of(before))
        if top == NONE or tree.is_along(leaf, spans.head[top]):
            return
        while (above := tree.parent.item(spans.head[top])) >= 0:
            higher = spans.of(above)
            if tree.children.item(above) != 1 or higher == NONE or tree.is_along(leaf, above):
                break
            top = higher
        self._supersede(spans.head[top], now_s)

    def _supersede(self, top: int, now_s: float) -> None:
        tree, spans, pending = self._ledger.tree, self._spans, [top]
        for _ in range(SUPERSEDED_MAX):
            if not pending:
                return
            span = spans.of(pending.pop())
            if span == NONE or spans.marks[span] & SUPERSEDED or spans.last_s[span] == now_s:
                continue
            self._superseded(span, now_s)
            spans.marks[span] |= SUPERSEDED
            if tree.children.item(spans.tail[span]):
                pending.extend(tree.children_of(spans.tail[span]))
