"""The default policy: what a block is worth by its class and age, learned from what came back (hazard.py).

A class is a profile (profiles.py) of a span of blocks: how often it was used, how long ago the use before the last one was, how much came new at
once, the rhythm of the requests along its path, what the engine says of the last one (hints). When a path leaves a block of few branches by another
one than the last time, the branch that was left is *superseded* (branches.py): a trait of its profile, nothing
harder. A victim is the leaf of least expected hits, in FLOPs saved, a byte and second; with it the tail of its run that has the same
history leaves. Until the first tables are made this is leaf-first LRU.
"""

import json
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from kvstored.core.calls import TouchEvent
from kvstored.core.columns import FIRST
from kvstored.core.hints import NO_HINT, Hint, HintClasses
from kvstored.core.policies.base import Ledger, Peeking
from kvstored.core.policies.branches import Branches
from kvstored.core.policies.ghosts import Ghost, Ghosts
from kvstored.core.policies.hazard import Hazard
from kvstored.core.policies.histories import NO_TURN, SAME_REQUEST_S, Histories, Turn, returned
from kvstored.core.policies.leaves import Leaves
from kvstored.core.policies.lessons import Lessons
from kvstored.core.policies.profiles import size_bucket
from kvstored.core.policies.rival import Rival
from kvstored.core.policies.spans import BY_HINT, COUNT_MAX, FRESH, NONE, Spans
from kvstored.core.policies.spells import EDGES, HORIZON_S
from kvstored.core.types import Budget, Rows, TierId, as_rows
from kvstored.errors import InvalidArgument

_HEAD = struct.Struct("<I")


class Composite(Peeking):
    name = "composite"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._spans = Spans(ledger.tree)
        self._ghosts = Ghosts()
        self._hazard = Hazard()
        self._rival = Rival()
        self._hints = HintClasses()
        self._leaves = Leaves(ledger, self._spans)
        self._lessons = Lessons()
        self._histories = Histories(
            ledger, self._spans, self._hazard, self._leaves, self._rival, self._lessons
        )
        self._touches = 1
        self._now_s = 0.0
        self._held = 0
        """Blocks that are stored."""
        self._found_spell = -(1 << 62)
        """What was here before a start was used before all else."""
        self._branches = Branches(ledger, self._spans, self._histories.leave)

    def touch(self, rows: Rows, event: TouchEvent, now_s: float) -> None:
        if event is TouchEvent.STORED:
            self.stored(rows, (len(rows),), now_s)
            return
        if event is TouchEvent.HINT and self._was_just_used(rows, now_s):
            return
        blocks, spans = self._ranked(rows, (len(rows),), now_s), self._spans
        if event is TouchEvent.FOUND:
            self._found(blocks[spans.are_unknown(blocks)], now_s)
        else:
            self._used(spans.along(blocks), event, now_s)

    def stored(self, rows: Rows, lengths: Sequence[int], now_s: float) -> None:
        blocks = self._ranked(rows, lengths, now_s)
        is_new = self._spans.are_unknown(blocks)
        if np.count_nonzero(is_new) < len(blocks):
            before = np.concatenate(((0,), np.cumsum(is_new)))
            ends = before[np.cumsum(lengths)]
            left = np.diff(ends, prepend=0)
            blocks, lengths = blocks[is_new], left[left > 0].tolist()
        if len(blocks):
            self._stored(blocks, lengths, now_s)

    def offer(self, row: int) -> None:
        block = self._ledger.copies.block.item(row)
        span = self._spans.of(block)
        if span == NONE:  # read before the scan at start came to its end
            self._spans.ensure(self._ledger.blocks.capacity)
            self._found(as_rows([block]), self._now_s)
            span = self._spans.of(block)
        self._leaves.offer(span, row)

    def first(self, rows: Rows) -> None:
        self._leaves.first(rows)

    def victim(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        is_learned = self._hazard.is_learned and not self._rival.is_ahead
        rates = self._hazard.rates if is_learned else None
        return self._leaves.pop((int(tier), int(budget)), rates, now_s)

    def follow(self, rows: Rows) -> int:
        """The part of the run that was always used together: of one class and age."""
        copies = self._ledger.copies
        block = copies.block.item(rows.item(0))
        span = self._spans.of(block)
        assert span != NONE, "a victim has a history"
        count = min(len(rows), self._spans.size_down_to(span, block))
        if not self._leaves.had_first:
            return count
        flags = copies.flags[rows[:count]] & FIRST
        same = flags == flags[0]
        return count if same.all() else int(np.argmin(same))

    def forget(self, blocks: Rows) -> None:
        spans = self._spans
        for span, lost in spans.cut(blocks):
            prints = self._ledger.fingerprints_of(lost)
            first = prints.item(-2)
            gone = (
                prints[::-1, 0].tobytes(),
                spans.class_[span],
                spans.start_s[span],
                spans.last_s[span],
                spans.uses[span],
                spans.marks[span],
            )
            for count, last_s in self._ghosts.add(first, gone, below=spans.ghost[span]):
                self._lessons.note(self._rival.forgotten, count, last_s)
            spans.ghost[span] = first
            self._held -= len(lost)

    def hint(self, rows: Rows, hint: Hint, now_s: float) -> None:
        if hint == NO_HINT or not len(rows):
            return
        path = self._spans.along(self._ledger.copies.block[rows])
        if hint.session and path:
            self._branches.turned(hint.session, path[0][1], now_s)
        kind = self._hints.number(hint)
        for span, block in path if kind else ():
            profile = self._histories.profile(span)
            if not profile.left and profile.hint != kind:
                self._split(span, block)
                self._histories.hint(span, kind)

    def dump(self, now_s: float) -> bytes:
        self._lessons.count()
        said = json.dumps(self._hints.said()).encode()
        return _HEAD.pack(len(said)) + said + self._hazard.dump(now_s)

    def load(self, dumped: bytes, now_s: float) -> None:
        try:
            (size,) = _HEAD.unpack_from(dumped)
            said = json.loads(dumped[_HEAD.size : _HEAD.size + size])
            hints = HintClasses((int(plain), str(name), int(level)) for plain, name, level in said)
        except (struct.error, ValueError, TypeError) as error:
            raise InvalidArgument(f"no state of this policy: bytes={len(dumped)}") from error
        self._lessons.count()
        self._hazard.load(dumped[_HEAD.size + size :], now_s)
        self._hints = hints

    def maintain(self, now_s: float) -> None:
        self._lessons.count()
        self._rival.judge(self._held, self._hazard.requests)
        self._hazard.maintain(now_s)

    # ---- uses

    def _was_just_used(self, rows: Rows, now_s: float) -> bool:
        """By the request that a hint tells of: its tail was, and so was all above."""
        span = self._spans.of(self._ledger.copies.block.item(rows.item(0))) if len(rows) else NONE
        return span != NONE and now_s - self._spans.last_s[span] <= SAME_REQUEST_S

    def _ranked(self, rows: Rows, lengths: Sequence[int], now_s: float) -> Rows:
        """The blocks of copies that are used now, so many by each touch."""
        copies, count = self._ledger.copies, len(lengths)
        at = rows.astype(np.intp)  # else each column converts them, for a microsecond
        first, self._touches = self._touches, self._touches + count
        copies.rank[at] = first if count == 1 else np.arange(first, first + count).repeat(lengths)
        self._spans.ensure(self._ledger.blocks.capacity)
        self._now_s = max(self._now_s, now_s)
        return copies.block[at]

    def _stored(self, at: Rows, lengths: Sequence[int], now_s: float) -> None:
        """Blocks that are new here, though perhaps they come back: paths, none empty, each from its head, or many in any order as one."""
        tree, ends = self._ledger.tree, list(accumulate(lengths))
        above_of = tree.parent.take(at)
        are_paths = _are_paths(at, above_of, ends)
        if not are_paths and len(lengths) > 1:
            for begin, end in pairwise((0, *ends)):
                self._stored(at[begin:end], (end - begin,), now_s)
            return
        if not are_paths:
            at = as_rows(list(dict.fromkeys(at.tolist())))
            # runs of the tree, each from its head
            at = at[np.lexsort((tree.depth[at], tree.node[at]))]
            above_of, ends = tree.parent[at], [len(at)]
            are_paths = _are_paths(at, above_of, ends)
        blocks, above = at.tolist(), above_of.tolist()
        lows = self._ledger.fingerprints_of(at)[:, 0].tolist()
        self._hazard.blocks += len(blocks)
        self._held += len(blocks)
        are_new, begin = self._ghosts.are_none_of(lows), 0
        for end in ends:
            mine = slice(begin, end)
            is_known = not are_new and not self._ghosts.are_none_of(lows[mine])
            self._begun(blocks[mine], above[mine], lows[mine], are_paths, is_known, now_s)
            begin = end

    def _begun(
        self,
        blocks: list[int],
        above: list[int],
        lows: list[int],
        is_path: bool,
        is_known: bool,
        now_s: float,
    ) -> None:
        """The same of one path. `is_known`: some ghost begins with one of its blocks."""
        begin, turn = 0, NO_TURN
        # of a path in one part; else it is told below
        size = size_bucket(len(blocks) * self._ledger.blocks.valid.item(blocks[0]))
        while begin < len(blocks):
            if not begin or above[begin] != blocks[begin - 1]:
                turn = self._asked(above[begin], now_s)
            ghost = self._ghosts.take(lows[begin]) if is_known else None
            end = len(blocks) if is_path and not is_known else begin + 1
            while end < len(blocks) and above[end] == blocks[end - 1]:
                if ghost is None:
                    if lows[end] in self._ghosts:
                        break
                elif end - begin == len(ghost.lows) or lows[end] != ghost.lows[end - begin]:
                    break
                end += 1
            if ghost is not None and end - begin < len(ghost.lows):
                self._ghosts.give_back(ghost, end - begin)
            if ghost is not None:
                turn = self._histories.turn_after(ghost.class_, now_s - ghost.last_s)
            self._grow(blocks[begin:end], above[begin], ghost, turn, size, now_s)
            # a root in one part was told when it began
            is_told = ghost is None and above[begin] < 0 and end - begin == len(blocks)
            if not is_told and (end == len(blocks) or above[end] != blocks[end - 1]):
                self._histories.tell(blocks[end - 1], turn, now_s)
            begin = end

    def _asked(self, above: int, now_s: float) -> Turn:
        """New blocks below this one are part of a request that was counted, if it was used just now."""
        span = self._spans.of(above)
        was_used = span != NONE and now_s - self._spans.last_s[span] <= SAME_REQUEST_S
        self._hazard.requests += not was_used
        return self._histories.turn_at(span, now_s)

    def _grow(
        self,
        blocks: list[int],
        parent: int,
        ghost: Ghost | None,
        turn: Turn,
        size: int,
        now_s: float,
    ) -> None:
        """Blocks of one history, new here, hang below a parent (-1: none)."""
        spans = self._spans
        uses, marks = 1, 0
        if ghost is None:
            class_ = self._histories.class_of_new(size, turn)
        else:
            uses, marks = min(ghost.uses + 1, COUNT_MAX), returned(ghost.marks)
            gap_s = now_s - ghost.last_s
            class_ = self._histories.class_after(ghost.class_, uses, gap_s, turn)
        above = spans.of(parent)
        if above != NONE and spans.row[above] >= 0:
            self._leaves.doubt(above)
        if above != NONE and self._goes_on(above, parent, class_, uses, marks | FRESH, now_s):
            spell = spans.class_[above], spans.start_s[above], spans.size[above]
            self._lessons.note(self._count_stored, ghost, len(blocks), now_s)
            self._lessons.note(self._hazard.spells.extend, *spell, len(blocks))
            spans.extend(above, blocks)
            return
        span = spans.make(blocks)
        spans.uses[span], spans.marks[span], spans.last_s[span] = uses, marks | FRESH, now_s
        self._histories.begin(span, class_, now_s)
        if ghost is None:
            self._lessons.note_often(self._count_new, class_, len(blocks), now_s)
        else:
            self._lessons.note(self._count_stored, ghost, len(blocks), now_s)
            self._lessons.note(self._hazard.spells.begin, class_, now_s, len(blocks))
        if above == NONE:
            return
        if spans.tail[above] != parent:
            self._split(above, parent)
        if ghost is None or not spans.kids[above]:
            spans.kids[above] = min(spans.kids[above] + 1, COUNT_MAX)
        self._branches.leave(above, blocks[0], now_s)

    def _count_new(self, times: int, class_: int, blocks: int, now_s: float) -> None:
        """So many spans began, each of so many blocks without a history."""
        self._rival.began(times * blocks, now_s)
        self._hazard.spells.begin(class_, now_s, blocks, times)

    def _count_stored(self, ghost: Ghost | None, blocks: int, now_s: float) -> None:
        """So many blocks were asked for: of a ghost, or new."""
        if ghost is None:
            self._rival.began(blocks, now_s)
            return
        self._rival.used(blocks, ghost.last_s, now_s, was_stored=False)
        if now_s - ghost.start_s <= HORIZON_S:
            self._hazard.spells.used(ghost.class_, ghost.start_s, now_s, blocks)

    def _goes_on(
        self, span: int, parent: int, class_: int, uses: int, marks: int, now_s: float
    ) -> bool:
        """A span that was stored by the same request with the same history and ends here: one path comes in parts."""
        spans = self._spans
        if spans.tail[span] != parent or spans.kids[span] or spans.marks[span] != marks:
            return False
        if spans.uses[span] != uses or now_s - spans.start_s[span] > SAME_REQUEST_S:
            return False
        return self._histories.profile(span).gap == self._hazard.profiles[class_].gap

    def _found(self, blocks: Rows, now_s: float) -> None:
        """Blocks that were here before a restart: whole runs of the tree, cut only where their ages differ, as far as ages are told
        apart. Nothing was asked for."""
        tree, spans, last_s = self._ledger.tree, self._spans, self._ledger.blocks.last_s
        for block in blocks.tolist():
            if spans.of(block) != NONE:
                continue
            run = spans.unknown_run(block)
            ages = EDGES.searchsorted(now_s - last_s[run], side="right")
            cuts = [0, *(np.flatnonzero(np.diff(ages)) + 1).tolist(), len(run)]
            for begin, end in pairwise(cuts):
                span = spans.make(run[begin:end].tolist())
                used_s = min(last_s.item(run.item(end - 1)), now_s)
                spans.last_s[span] = used_s
                self._lessons.note(self._hazard.spells.begin, 0, used_s, end - begin)
                self._found_spell += 1
                spans.spell[span], spans.start_s[span] = self._found_spell, used_s
                self._lessons.note(self._rival.found, end - begin, used_s)
                children = tree.children.item(run.item(end - 1))
                spans.kids[span] = min(children, COUNT_MAX)
            self._held += len(run)

    def _used(self, path: list[tuple[int, int]], event: TouchEvent, now_s: float) -> None:
        """Spans, tail to head, each with the deepest of its blocks that was used."""
        spans, is_hint = self._spans, event is TouchEvent.HINT
        last_s, marks = spans.last_s, spans.marks
        fresh: list[int] = []
        for span, block in path:
            if is_hint:
                if now_s - last_s[span] <= SAME_REQUEST_S:
                    continue
            elif marks[span] & BY_HINT:
                marks[span] &= ~BY_HINT
                if now_s - last_s[span] <= SAME_REQUEST_S:
                    continue
            if block != spans.tail[span]:
                self._split(span, block)
            fresh.append(span)
        if not fresh:
            return
        self._hazard.requests += 1
        self._histories.use(fresh, BY_HINT if is_hint else 0, now_s)
        parent = self._ledger.tree.parent
        for (below, _), (span, _) in pairwise(path):
            head = spans.head[below]
            if spans.child[span] != head and parent.item(head) == spans.tail[span]:
                self._branches.leave(span, head, now_s)

    def _split(self, span: int, block: int) -> None:
        """What is below this block of it becomes a span of its own."""
        size = self._spans.size_down_to(span, block)
        if size < self._spans.size[span]:
            self._spans.split(span, size)


def _are_paths(blocks: Rows, above: Rows, ends: Sequence[int]) -> bool:
    """Whether each block but the first before each end is right below the one before."""
    if len(blocks) == len(ends):
        return True
    breaks = above[1:] != blocks[:-1]
    if len(ends) == 1:
        return not np.count_nonzero(breaks)
    return {*(np.flatnonzero(breaks) + 1).tolist()}.issubset(ends)
