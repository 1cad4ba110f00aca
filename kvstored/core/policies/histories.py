"""Histories of spans: each is in a spell of one class, which begins with a use and may turn out to be of another class until it ends.

What a request says of all that it used is often known only at its end: how much came new, and that what it goes on from had been
evicted. So `tell` renames the spells that it began.
"""

from bisect import bisect_right

from kvstored.core.policies.base import Ledger
from kvstored.core.policies.hazard import Hazard
from kvstored.core.policies.leaves import Leaves
from kvstored.core.policies.lessons import Lessons
from kvstored.core.policies.profiles import (
    LEFT,
    LEFT_AGAIN,
    SIZED_USES,
    USES_EDGES,
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

Use = tuple[int, float, float, int, int]
"""Of a span: the class and start of the spell that a use ended, the use before, its blocks, and the class that it is of since."""
Renamed = tuple[int, int, float, int]
"""A spell of one class turned out to be of another one: its start, its blocks."""
Turn = tuple[int, int]
"""Buckets of the time since the path was used that a request goes on from, and the same of the request before."""
NO_TURN: Turn = (0, 0)
_TOLD = _NEW = -1


class Histories:
    def __init__(
        self,
        ledger: Ledger,
        spans: Spans,
        hazard: Hazard,
        leaves: Leaves,
        rival: Rival,
        lessons: Lessons,
    ) -> None:
        self._ledger = ledger
        self._spans = spans
        self._hazard = hazard
        self._leaves = leaves
        self._rival = rival
        self._lessons = lessons
        self._spell = 0
        self._known: dict[tuple[int, int, int, int, int], int] = {}
        """The class that follows on a class with such a use, or once told so."""

    def profile(self, span: int) -> Profile:
        return self._hazard.profiles[self._spans.class_[span]]

    def class_of_new(self, size: int, turn: Turn) -> int:
        """Of what is stored for the first time, so much at once."""
        known = _NEW, size, 0, *turn
        class_ = self._known.get(known)
        if class_ is None:
            class_ = self._hazard.class_of(Profile(0, 0, size, *turn, size))
            self._keep(known, class_)
        return class_

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
        """Of a span that was just made; the caller notes it."""
        spans = self._spans
        self._spell += 1
        spans.spell[span] = self._spell
        spans.class_[span], spans.start_s[span] = class_, now_s

    def use(self, path: list[int], mark: int, now_s: float) -> None:
        """Spans, tail to head, were used by one request."""
        spans = self._spans
        class_, start_s, last_s, sizes = spans.class_, spans.start_s, spans.last_s, spans.size
        spells, all_uses, marks = spans.spell, spans.uses, spans.marks
        rows, others, number = spans.row, spans.other, self._spell
        turn = self.turn_after(class_[path[0]], now_s - last_s[path[0]])
        uses: list[Use] = []
        known = self._known
        for span in path:
            before, last = class_[span], last_s[span]
            number += 1
            spell, spells[span] = spells[span], number
            count = all_uses[span] = min(all_uses[span] + 1, COUNT_MAX)
            gap = gap_bucket(now_s - last)
            after = known.get((before, bisect_right(USES_EDGES, count), gap, *turn), NONE)
            if after == NONE:
                after = self.class_after(before, count, now_s - last, turn)
            uses.append((before, start_s[span], last, sizes[span], after))
            marks[span] = returned(marks[span]) | mark
            class_[span], start_s[span], last_s[span] = after, now_s, now_s
            if rows[span] >= 0 or others[span] >= 0:
                self._leaves.again(span, spans.queued(span), before, spell)
        self._spell = number
        self._lessons.note(self._count, uses, now_s, size=len(uses))

    def tell(self, block: int, turn: Turn, now_s: float) -> None:
        """A request stored all that is new down to this block."""
        fresh = size_bucket(self._fresh_tokens(block, now_s))
        spans, parent = self._spans, self._ledger.tree.parent
        class_, last_s, known, head = spans.class_, spans.last_s, self._known, spans.head
        start_s, sizes, of = spans.start_s, spans.size, spans.view
        told: list[Renamed] = []
        while block >= 0 and len(told) < PATH_MAX:
            span = of[block]
            if span == NONE or now_s - last_s[span] > SAME_REQUEST_S:
                break
            before = class_[span]
            after = known.get((before, _TOLD, fresh, *turn))
            if after is None:
                after = self._told(before, fresh, turn)
            if after != before:
                told.append((before, after, start_s[span], sizes[span]))
                self._renamed(span, before, after)
            elif not spans.marks[span] & FRESH:
                break  # all above was told the same before
            block = parent.item(head[span])
        if told:
            self._lessons.note(self._count_told, told, size=len(told))

    def hint(self, span: int, hint: int) -> None:
        self.rename(span, self._hazard.class_of(self.profile(span)._replace(hint=hint)))

    def leave(self, span: int, now_s: float) -> None:
        """Its branch was left: the spell goes on as another one."""
        spans = self._spans
        left = LEFT_AGAIN if spans.marks[span] & RETURNED else LEFT
        after = self._hazard.class_of(self.profile(span)._replace(left=left))
        before, started, size = spans.class_[span], spans.start_s[span], spans.size[span]
        self._lessons.note(self._hazard.spells.turn, before, after, started, now_s, size)
        self._renamed(span, before, after)

    def rename(self, span: int, class_: int) -> None:
        """Its spell turns out to be of another class."""
        spans = self._spans
        before = spans.class_[span]
        if class_ != before:
            told = [(before, class_, spans.start_s[span], spans.size[span])]
            self._lessons.note(self._count_told, told)
            self._renamed(span, before, class_)

    def _count_told(self, told: list[Renamed]) -> None:
        rename = self._hazard.spells.rename
        for before, after, started, size in told:
            rename(before, after, started, size)

    def _count(self, uses: list[Use], now_s: float) -> None:
        """Of one request, added up first: they share most of their past, and what goes on as one class is one spell."""
        ended: dict[tuple[int, float], int] = {}
        used: dict[float, int] = {}
        began: dict[int, int] = {}
        for before, started, last, size, after in uses:
            ended[before, started] = ended.get((before, started), 0) + size
            used[last] = used.get(last, 0) + size
            began[after] = began.get(after, 0) + size
        hazard = self._hazard
        for (before, started), size in ended.items():
            hazard.spells.used(before, started, now_s, size)
        for after, size in began.items():
            hazard.spells.begin(after, now_s, size)
        for last, size in used.items():
            self._rival.used(size, last, now_s, was_stored=True)
            hazard.blocks += size

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
        spans = self._spans
        spans.class_[span] = after
        if spans.row[span] >= 0 or spans.other[span] >= 0:
            self._leaves.again(span, spans.queued(span), before, spans.spell[span])

    def _fresh_tokens(self, block: int, now_s: float) -> int:
        """What one request stored down to here for the first time, in whatever parts it came."""
        spans, tokens, ledger = self._spans, 0, self._ledger
        of, looks = spans.view, 0
        while block >= 0 and looks < PATH_MAX:
            span = of[block]
            if span == NONE or not spans.marks[span] & FRESH:
                break
            if now_s - spans.start_s[span] > SAME_REQUEST_S:
                break
            head = spans.head[span]
            if spans.uses[span] == 1:
                tokens += spans.size[span] * ledger.blocks.valid.item(head)
            block = ledger.tree.parent.item(head)
            looks += 1
        return tokens


def returned(marks: int) -> int:
    """After a use: a branch that was superseded has returned once."""
    return RETURNED if marks & (SUPERSEDED | RETURNED) else 0
