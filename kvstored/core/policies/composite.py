"""The default policy: what a block is worth by its class and age, learned from what came back (hazard.py).

A class is how often a span of blocks was used (six buckets), how long ago the use before the last one was (five) and what the engine says
of the request (hints). When a path leaves a block of few branches by another one than the last time, the branch that was left is
*superseded* (a turn was regenerated, edited, compacted): it gets classes of its own and a new clock, nothing harder, since on some
traffic branches take turns. A victim is the leaf of least expected hits, in FLOPs saved, a byte and second; with it the tail of its run
that has the same history leaves. Until the first tables are made this is leaf-first LRU.
"""

import json
import struct
from array import array
from bisect import bisect_right
from collections import OrderedDict
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from kvstored.core.calls import Fingerprint, TouchEvent
from kvstored.core.columns import FIRST, QUEUED
from kvstored.core.hints import HINT_CLASSES_MAX, NO_HINT, Hint, HintClasses
from kvstored.core.policies.base import Ledger, Peeking
from kvstored.core.policies.candidates import Candidates
from kvstored.core.policies.ghosts import Ghost, Ghosts
from kvstored.core.policies.hazard import HORIZON_S, Hazard
from kvstored.core.policies.rival import Rival
from kvstored.core.policies.spans import Span, Spans
from kvstored.core.types import Budget, Part, Rows, TierId
from kvstored.errors import InvalidArgument

COUNT_EDGES = (2, 3, 5, 9, 33)
GAP_EDGES_S = (5.0, 30.0, 120.0)
COUNTS, GAPS, SUPERSEDED_CLASSES = 6, 5, 4
OF_COUNT = GAPS * HINT_CLASSES_MAX
ORDINARY = COUNTS * OF_COUNT
SESSIONS_MAX = 65_536
FAN_OUT_MAX = 2
"""A block that ever had more branches forks by nature: leaving one of them says nothing."""
SUPERSEDED_MAX = 4096
"""Spans of a branch that are superseded at once: bounds the time of a touch."""
SAME_REQUEST_S = 5.0
"""A hint (begin of a request, touch) so soon after a use belongs to it."""
SUPERSEDED, RETURNED, BY_HINT = 1, 2, 4
_COUNT_MAX = 60_000
_HEAD = struct.Struct("<I")

Key = tuple[int, int]
"""Tier and budget."""


class Composite(Peeking):
    name = "composite"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._spans = Spans(ledger.tree)
        self._ghosts = Ghosts()
        self._hazard = Hazard(ORDINARY + SUPERSEDED_CLASSES, OF_COUNT + 1, _group_of)
        self._rival = Rival()
        self._hints = HintClasses()
        self._leaves: dict[Key, Candidates] = {}
        self._firsts: dict[Key, list[tuple[int, int]]] = {}
        self._touches = 1
        self._held = 0
        """Blocks that are stored."""
        self._last_spell = 0
        self._sessions: OrderedDict[str, Fingerprint] = OrderedDict()
        """The block where the last path of a session ended."""

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        copies = self._ledger.copies
        copies.rank[rows] = np.arange(self._touches, self._touches + len(rows))
        self._touches += len(rows)
        self._spans.ensure(self._ledger.blocks.capacity)
        if event is TouchEvent.STORED:
            self._stored(self._spans.unknown(copies.block[rows]), now_s)
        else:
            self._used(self._spans.along(copies.block[rows]), event, now_s)

    def offer(self, row: int) -> None:
        copies = self._ledger.copies
        if not copies.flags.item(row) & QUEUED:
            copies.flags[row] |= QUEUED
            span = self._spans.of(copies.block.item(row))
            assert span is not None, "a copy that was never stored is offered"
            if row not in span.rows:
                span.rows += (row,)
            self._push(span, row)
            if copies.flags.item(row) & FIRST:
                self._push_first(row)

    def first(self, rows: Rows) -> None:
        flags = self._ledger.copies.flags
        fresh = rows[flags[rows] & FIRST == 0]
        flags[fresh] |= FIRST
        for row in fresh[flags[fresh] & QUEUED != 0].tolist():
            self._push_first(row)

    def victim(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        copies, key = self._ledger.copies, (int(tier), int(budget))
        while True:
            row = self._worst(key, now_s)
            if row is None:
                return None
            copies.flags[row] &= ~QUEUED & 0xFF
            span = self._spans.of(copies.block.item(row))
            assert span is not None, "a queued copy has a history"
            self._leaves[key].changed(span.class_)
            if self._ledger.is_evictable(row):
                return row

    def follow(self, rows: Rows) -> int:
        """The part of the run that was always used together: of one class and age."""
        copies = self._ledger.copies
        block = copies.block.item(rows[0])
        span = self._spans.of(block)
        assert span is not None, "a victim has a history"
        flags = copies.flags[rows[: self._spans.size_down_to(span, block)]] & FIRST
        same = flags == flags[0]
        return len(same) if same.all() else int(np.argmin(same))

    def forget(self, blocks: Rows) -> None:
        for span, lost in self._spans.cut(blocks):
            lows = array("Q", self._ledger.fingerprints_of(lost)[::-1, 0].tolist())
            ghost = Ghost(lows, span.class_, span.start_s, span.last_s, span.uses, span.marks)
            for gone in self._ghosts.add(ghost, below=span.ghost):
                self._rival.forgotten(len(gone.lows), gone.last_s)
            span.ghost = lows[0]
            self._held -= len(lost)
            for leaves in self._leaves.values():
                leaves.changed(span.class_)

    def hint(self, rows: Rows, hint: Hint, now_s: float) -> None:
        if hint == NO_HINT or not len(rows):
            return
        path = self._spans.along(self._ledger.copies.block[rows])
        if hint.session and path:
            self._turned(hint.session, path[0][1], now_s)
        kind = self._hints.number(hint)
        for span, block in path if kind else ():
            if span.class_ < ORDINARY and span.class_ % HINT_CLASSES_MAX != kind:
                self._split(span, block)
                before = span.class_
                span.class_ += kind - before % HINT_CLASSES_MAX
                self._hazard.rename(before, span.class_, span.start_s, span.size)
                self._moved(span, before)

    def dump(self, now_s: float) -> bytes:
        said = json.dumps(self._hints.said()).encode()
        return _HEAD.pack(len(said)) + said + self._hazard.dump(now_s)

    def load(self, dumped: bytes, now_s: float) -> None:
        try:
            (size,) = _HEAD.unpack_from(dumped)
            said = json.loads(dumped[_HEAD.size : _HEAD.size + size])
            hints = HintClasses((int(plain), str(name), int(level)) for plain, name, level in said)
        except (struct.error, ValueError, TypeError) as error:
            raise InvalidArgument(f"no state of this policy: bytes={len(dumped)}") from error
        self._hazard.load(dumped[_HEAD.size + size :], now_s)
        self._hints = hints

    def maintain(self, now_s: float) -> None:
        self._rival.judge(self._held, self._hazard.requests)
        if self._hazard.is_due:
            self._hazard.rebuild(now_s)

    # ---- uses

    def _stored(self, blocks: list[int], now_s: float) -> None:
        """Blocks that are new here, though perhaps they come back: a path from its head, or many in any order, as after a restart."""
        if not blocks:
            return
        tree = self._ledger.tree
        at = np.asarray(blocks, dtype=np.int32)
        if len(at) > 1 and (tree.parent[at[1:]] != at[:-1]).any():
            at = at[
                np.lexsort((tree.depth[at], tree.node[at]))
            ]  # runs of the tree, each from its head
            blocks = at.tolist()
        above = tree.parent[at].tolist()
        lows = self._ledger.fingerprints_of(at)[:, 0].tolist()
        self._hazard.blocks += len(blocks)
        begin = 0
        while begin < len(blocks):
            if not begin or above[begin] != blocks[begin - 1]:
                parent = self._spans.of(above[begin]) if above[begin] >= 0 else None
                self._hazard.requests += parent is None or parent.last_s != now_s
            ghost = self._ghosts.take(lows[begin])
            end = begin + 1
            while end < len(blocks) and above[end] == blocks[end - 1]:
                if ghost is None:
                    if lows[end] in self._ghosts:
                        break
                elif end - begin == len(ghost.lows) or lows[end] != ghost.lows[end - begin]:
                    break
                end += 1
            if ghost is not None and end - begin < len(ghost.lows):
                self._ghosts.add(ghost._replace(lows=ghost.lows[end - begin :]))
            self._grow(blocks[begin:end], above[begin], ghost, now_s)
            begin = end
        self._held += len(blocks)

    def _grow(self, blocks: list[int], parent: int, ghost: Ghost | None, now_s: float) -> None:
        """New blocks, all of one history, hang below a parent (-1: none)."""
        uses, gap_s, marks = 1, -1.0, 0
        if ghost is not None:
            uses, gap_s = min(ghost.uses + 1, _COUNT_MAX), now_s - ghost.last_s
            marks = _returned(ghost.marks)
            self._rival.used(len(blocks), ghost.last_s, now_s, was_stored=False)
            if now_s - ghost.start_s <= HORIZON_S:
                self._hazard.used(ghost.class_, ghost.start_s, now_s, len(blocks))
        else:
            self._rival.began(len(blocks), now_s)
        class_ = _class(uses, gap_s)
        above = self._spans.of(parent) if parent >= 0 else None
        is_end = above is not None and above.tail == parent and not above.kids
        if above is not None and is_end and _goes_on(above, class_, uses, marks, now_s):
            self._spans.extend(above, blocks)
            self._hazard.begin(class_, now_s, len(blocks))
            return
        span = self._spans.make(blocks)
        span.uses, span.marks, span.last_s = uses, marks, now_s
        self._begin(span, class_, now_s)
        if above is None:
            return
        if above.tail != parent:
            self._split(above, parent)
        if ghost is None or not above.kids:
            above.kids += 1
        self._leave(above, blocks[0], now_s)

    def _used(self, path: list[tuple[Span, int]], event: TouchEvent, now_s: float) -> None:
        """Spans, tail to head, each with the deepest of its blocks that was used."""
        is_fresh = False
        for span, block in path:
            is_same = now_s - span.last_s <= SAME_REQUEST_S
            if event is TouchEvent.HINT:
                if is_same:
                    continue
            elif span.marks & BY_HINT:
                span.marks &= ~BY_HINT
                if is_same:
                    continue
            is_fresh = True
            self._split(span, block)
            self._use(span, event, now_s)
        if is_fresh:
            self._hazard.requests += 1
            for (below, _), (span, _) in pairwise(path):
                if self._ledger.tree.parent.item(below.head) == span.tail:
                    self._leave(span, below.head, now_s)

    def _use(self, span: Span, event: TouchEvent, now_s: float) -> None:
        self._hazard.blocks += span.size
        gap_s = now_s - span.last_s
        self._hazard.used(span.class_, span.start_s, now_s, span.size)
        self._rival.used(span.size, span.last_s, now_s, was_stored=True)
        span.uses = min(span.uses + 1, _COUNT_MAX)
        span.last_s = now_s
        span.marks = _returned(span.marks) | (BY_HINT if event is TouchEvent.HINT else 0)
        self._begin(span, _class(span.uses, gap_s), now_s)

    def _begin(self, span: Span, class_: int, now_s: float) -> None:
        before, span.class_, span.start_s = span.class_, class_, now_s
        self._hazard.begin(class_, now_s, span.size)
        self._moved(span, before)

    def _moved(self, span: Span, before: int) -> None:
        """Into another spell or class: entries of its copies are out of date."""
        copies = self._ledger.copies
        self._last_spell += 1
        span.spell = self._last_spell
        queued, span.rows = span.rows, ()
        for row in queued:
            if copies.flags.item(row) & QUEUED and self._spans.of(copies.block.item(row)) is span:
                span.rows += (row,)
                self._leaves[self._key(row)].changed(before)
                self._push(span, row)

    def _split(self, span: Span, block: int) -> None:
        """What is below this block of it becomes a span of its own."""
        size = self._spans.size_down_to(span, block)
        if size < span.size:
            self._spans.split(span, size)

    # ---- branches

    def _leave(self, span: Span, child: int, now_s: float) -> None:
        """A path goes on from the span by this child: the branch of last time is superseded where there are few."""
        old, span.child = span.child, child
        if old < 0 or old == child or span.kids > FAN_OUT_MAX:
            return
        if self._ledger.tree.parent.item(old) == span.tail:
            self._supersede(old, now_s)

    def _turned(self, session: str, leaf: int, now_s: float) -> None:
        """A session went on elsewhere than where it was: the branch that it left is superseded, whatever the fan-out above."""
        tree = self._ledger.tree
        before = self._sessions.pop(session, None)
        self._sessions[session] = self._ledger.fingerprint(leaf)
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        at = -1 if before is None else self._ledger.block_of(before)
        span = self._spans.of(at) if at >= 0 else None
        if span is None or tree.is_along(leaf, span.head):
            return
        top = span
        while (above := tree.parent.item(top.head)) >= 0 and tree.children.item(above) == 1:
            higher = self._spans.of(above)
            if higher is None or tree.is_along(leaf, above):
                break
            top = higher
        self._supersede(top.head, now_s)

    def _supersede(self, top: int, now_s: float) -> None:
        tree, pending = self._ledger.tree, [top]
        for _ in range(SUPERSEDED_MAX):
            if not pending:
                return
            span = self._spans.of(pending.pop())
            if span is None or span.marks & SUPERSEDED or span.last_s == now_s:
                continue
            self._hazard.cut(span.class_, span.start_s, now_s, span.size)
            span.marks |= SUPERSEDED
            kind = 3 if span.marks & RETURNED else (span.uses > 1) + (span.uses > 3)
            self._begin(span, ORDINARY + kind, now_s)
            if tree.children.item(span.tail):
                pending.extend(tree.children_of(span.tail))

    # ---- the order

    def _worst(self, key: Key, now_s: float) -> int | None:
        firsts = self._firsts.get(key)
        while firsts:
            row = heappop(firsts)[1]
            want = QUEUED | FIRST
            if self._ledger.copies.flags.item(row) & want == want and self._key(row) == key:
                return row
        leaves = self._leaves.get(key)
        if leaves is None:
            return None
        if self._rival.is_ahead or not self._hazard.is_learned:
            return leaves.oldest(self._last_use)
        return leaves.worst(self._hazard.rates, now_s)

    def _last_use(self, row: int) -> float:
        span = self._spans.of(self._ledger.copies.block.item(row))
        assert span is not None, "a candidate has a history"
        return span.last_s

    def _push(self, span: Span, row: int) -> None:
        key = self._key(row)
        leaves = self._leaves.get(key)
        if leaves is None:
            leaves = self._leaves[key] = Candidates(partial(self._is_true, key))
        entry = span.start_s, span.spell, self._ledger.copies.rank.item(row), row
        leaves.push(span.class_, self._ledger.weight(row), entry)

    def _push_first(self, row: int) -> None:
        firsts = self._firsts.setdefault(self._key(row), [])
        heappush(firsts, (self._ledger.copies.rank.item(row), row))

    def _is_true(self, key: Key, spell: int, row: int) -> bool:
        copies = self._ledger.copies
        if not copies.flags.item(row) & QUEUED or self._key(row) != key:
            return False
        span = self._spans.of(copies.block.item(row))
        if span is None or span.spell != spell:
            return False
        if self._ledger.is_evictable(row):
            return True
        copies.flags[row] &= ~QUEUED & 0xFF  # it is offered again when it may go
        return False

    def _key(self, row: int) -> Key:
        copies = self._ledger.copies
        return copies.tier.item(row), int(copies.part.item(row) == Part.CHECKPOINT)


def _group_of(class_: int) -> int:
    return class_ % OF_COUNT if class_ < ORDINARY else OF_COUNT


def _class(uses: int, gap_s: float) -> int:
    """Without a hint. `gap_s` below 0: never used before."""
    gap = 0 if gap_s < 0 else 1 + bisect_right(GAP_EDGES_S, gap_s)
    return bisect_right(COUNT_EDGES, uses) * OF_COUNT + gap * HINT_CLASSES_MAX


def _goes_on(span: Span, class_: int, uses: int, marks: int, now_s: float) -> bool:
    """A span that was stored just now with the same history: one path comes in parts."""
    same = span.class_ == class_ and span.uses == uses and span.marks == marks
    return same and span.start_s == now_s


def _returned(marks: int) -> int:
    """After a use: a branch that was superseded has returned once."""
    return RETURNED if marks & (SUPERSEDED | RETURNED) else 0
