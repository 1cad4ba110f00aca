"""Histories of spans: each is in a spell of one class, which begins with a use and may turn out to be of another class until it ends.

What a request says of all that it used is often known only at its end: how much came new, and that what it goes on from had been
evicted. So `tell` renames the spells that it began.
"""

from kvstored.core.policies.base import Ledger
from kvstored.core.policies.hazard import Hazard
from kvstored.core.policies.leaves import Leaves
from kvstored.core.policies.profiles import (
    LEFT,
    LEFT_AGAIN,
    SIZED_USES,
    Profile,
    gap_bucket,
    size_bucket,
    turn_bucket,
    uses_bucket,
)
from kvstored.core.policies.rival import Rival
from kvstored.core.policies.spans import COUNT_MAX, FRESH, NONE, RETURNED, SUPERSEDED, Spans

SAME_REQUEST_S = 5.0
"""What is said of a path, or comes below it, so soon after a use belongs to it."""
PATH_MAX = 4096
"""Spans of a path that are told at once: bounds the time of a touch."""

KNOWN_MAX = 1 << 14
"""What follows on a class is kept so often, some 100 bytes each."""

Turn = tuple[int, int]
"""Buckets of the time since the path was used that a request goes on from, and the same of the request before."""
NO_TURN: Turn = (0, 0)
_TOLD = -1


class Histories:
    def __init__(
        self, ledger: Ledger, spans: Spans, hazard: Hazard, leaves: Leaves, rival: Rival
    ) -> None:
        self._ledger = ledger
        self._spans = spans
        self._hazard = hazard
        self._leaves = leaves
        self._rival = rival
        self._spell = 0
        self._known: dict[tuple[int, int, int, int, int], int] = {}
        """The class that follows on a class with such a use, or once told so."""

    def profile(self, span: int) -> Profile:
        return self._hazard.profiles[self._spans.class_[span]]

    def class_of_new(self, size: int, turn: Turn) -> int:
        """Of what is stored for the first time, so much at once."""
        return self._hazard.class_of(Profile(0, 0, size, *turn, size))

    def class_after(self, class_: int, uses: int, gap_s: float, turn: Turn) -> int:
        """Of what was of this class and is used again, so often now."""
        bucket, gap = uses_bucket(uses), gap_bucket(gap_s)
        known = class_, bucket, gap, *turn
        after = self._known.get(known)
        if after is None:
            kept = self._hazard.profiles[class_].size if uses <= SIZED_USES else 0
            after = self._hazard.class_of(Profile(bucket, gap, kept, *turn))
            self._keep(known, after)
        return after

    def turn_at(self, span: int, now_s: float) -> Turn:
        """Of the request that goes on below this span."""
        if span == NONE:
            return NO_TURN
        profile, idle_s = self.profile(span), now_s - self._spans.last_s[span]
        if idle_s <= SAME_REQUEST_S:  # it used the span
            return profile.turn, profile.earlier
        return turn_bucket(idle_s), profile.turn

    def turn_after(self, class_: int, idle_s: float) -> Turn:
        """Of a request that goes on from what was of this class."""
        return turn_bucket(idle_s), self._hazard.profiles[class_].turn

    def begin(self, span: int, class_: int, now_s: float) -> None:
        """Of a span that was just made."""
        spans = self._spans
        self._spell += 1
        spans.spell[span] = self._spell
        spans.class_[span], spans.start_s[span] = class_, now_s
        self._hazard.spells.begin(class_, now_s, spans.size[span])

    def use(self, path: list[int], mark: int, now_s: float) -> None:
        """Spans, tail to head, were used by one request. What is learned is added up first: they share most of their past."""
        spans, hazard = self._spans, self._hazard
        class_, start_s, last_s, sizes = spans.class_, spans.start_s, spans.last_s, spans.size
        turn = self.turn_after(class_[path[0]], now_s - last_s[path[0]])
        ended: dict[tuple[int, float], int] = {}
        used: dict[float, int] = {}
        began: dict[int, int] = {}
        for span in path:
            size, before, started, last = sizes[span], class_[span], start_s[span], last_s[span]
            self._spell += 1
            spell, spans.spell[span] = spans.spell[span], self._spell
            ended[before, started] = ended.get((before, started), 0) + size
            used[last] = used.get(last, 0) + size
            uses = spans.uses[span] = min(spans.uses[span] + 1, COUNT_MAX)
            after = self.class_after(before, uses, now_s - last, turn)
            began[after] = began.get(after, 0) + size
            spans.marks[span] = returned(spans.marks[span]) | mark
            queued = spans.queued(span)
            class_[span], start_s[span], last_s[span] = after, now_s, now_s
            if queued:
                self._leaves.again(span, queued, before, spell)
        for (before, started), size in ended.items():
            hazard.spells.used(before, started, now_s, size)
        for after, size in began.items():
            hazard.spells.begin(after, now_s, size)
        for last, size in used.items():
            self._rival.used(size, last, now_s, was_stored=True)
            hazard.blocks += size

    def tell(self, block: int, turn: Turn, now_s: float) -> None:
        """A request stored all that is new down to this block."""
        fresh = size_bucket(self._fresh_tokens(block, now_s))
        spans, parent = self._spans, self._ledger.tree.parent
        class_, last_s, known = spans.class_, spans.last_s, self._known
        for _ in range(PATH_MAX):
            span = spans.of(block)
            if span == NONE or now_s - last_s[span] > SAME_REQUEST_S:
                return
            before = class_[span]
            after = known.get((before, _TOLD, fresh, *turn))
            if after is None:
                after = self._told(before, fresh, turn)
            if after != before:
                self.rename(span, after)
            elif not spans.marks[span] & FRESH:
                return  # all above was told the same before
            block = parent.item(spans.head[span])

    def hint(self, span: int, hint: int) -> None:
        self.rename(span, self._hazard.class_of(self.profile(span)._replace(hint=hint)))

    def leave(self, span: int, now_s: float) -> None:
        """Its branch was left: the spell goes on as another one."""
        spans = self._spans
        left = LEFT_AGAIN if spans.marks[span] & RETURNED else LEFT
        after = self._hazard.class_of(self.profile(span)._replace(left=left))
        before, started, size = spans.class_[span], spans.start_s[span], spans.size[span]
        self._hazard.spells.turn(before, after, started, now_s, size)
        self._renamed(span, before, after)

    def rename(self, span: int, class_: int) -> None:
        """Its spell turns out to be of another class."""
        spans = self._spans
        before = spans.class_[span]
        if class_ != before:
            self._hazard.spells.rename(before, class_, spans.start_s[span], spans.size[span])
            self._renamed(span, before, class_)

    def _told(self, class_: int, fresh: int, turn: Turn) -> int:
        profile = self._hazard.profiles[class_]
        size = profile.size if profile.uses else fresh
        told = Profile(profile.uses, profile.gap, size, *turn, fresh, profile.left, profile.hint)
        after = self._hazard.class_of(told)
        self._keep((class_, _TOLD, fresh, *turn), after)
        return after

    def _keep(self, known: tuple[int, int, int, int, int], after: int) -> None:
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[known] = after

    def _renamed(self, span: int, before: int, after: int) -> None:
        self._spans.class_[span] = after
        if queued := self._spans.queued(span):
            self._leaves.again(span, queued, before, self._spans.spell[span])

    def _fresh_tokens(self, block: int, now_s: float) -> int:
        """What one request stored down to here for the first time, in whatever parts it came."""
        spans, tokens, ledger = self._spans, 0, self._ledger
        for _ in range(PATH_MAX):
            span = spans.of(block)
            if span == NONE or not spans.marks[span] & FRESH:
                break
            if now_s - spans.start_s[span] > SAME_REQUEST_S:
                break
            if spans.uses[span] == 1:
                tokens += spans.size[span] * ledger.blocks.valid.item(spans.head[span])
            block = ledger.tree.parent.item(spans.head[span])
        return tokens


def returned(marks: int) -> int:
    """After a use: a branch that was superseded has returned once."""
    return RETURNED if marks & (SUPERSEDED | RETURNED) else 0
