"""Blocks that are wanted in memory before anybody waits for them: a bounded queue of paths, in the order of the objectives.

A path is taken head first and in parts, since a block without those above it is of no use. Nothing here loads: `take` says which blocks are next.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log2

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Fingerprint
from kvstored.core.groups import required_bytes
from kvstored.core.plan import OBJECTIVES, SPECULATIVE, Objective, Signal
from kvstored.core.prefetched import Prefetched
from kvstored.core.readability import NOT_READABLE
from kvstored.core.turns import Turns
from kvstored.core.types import Fingerprints, NamespaceId, Rows, TierId

WANTS_MAX = 1024
"""To put so many in order takes 2 ms."""
LOOKS_MAX = 32
"""Paths that one round looks at: a fraction of a millisecond."""
REORDER_S = 0.05
"""How long an order holds: deadlines come nearer."""
WANTED_BLOCKS_MAX = 262_144
GUESS_S = 5.0
"""A guess that was not loaded within it is dropped."""
NEVER = 64
"""Above every bucket of slack: 2^64 ms."""
_OF_SIGNAL = {
    Signal.TRANSFER: Objective.TRANSFER,
    Signal.REQUEST: Objective.DECODE,
    Signal.RESIDENT: Objective.DECODE,
}


@dataclass(slots=True)
class Want:
    """`worth`: FLOPs that its first block saves a byte, as a power of two in halves. `at`: how many of its blocks were taken. `deadline_s` 0: none."""

    number: int
    ns: NamespaceId
    fingerprints: Fingerprints
    signal: Signal
    deadline_s: float
    worth: int
    at: int = 0

    def __len__(self) -> int:
        return len(self.fingerprints) - self.at


@dataclass(slots=True)
class PageIns:
    """`ended`: blocks that left the queue, by signal and what became of them: taken, there (already in memory), late or shed (paused, or too many).
    `turns`: of whom a guess is made."""

    books: Books
    ahead: Prefetched
    objectives: Sequence[Objective] = OBJECTIVES
    turns: Turns = field(default_factory=Turns)
    wants: list[Want] = field(default_factory=list)
    ended: Counter[tuple[Signal, str]] = field(default_factory=Counter)
    _blocks: int = 0
    _last: int = 0
    _reorder_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Until somebody asks for something: nothing is wanted, and nothing expected."""
        return not (self.wants or self.turns.expects)

    def want(
        self,
        ns: NamespaceId,
        fingerprints: Fingerprints,
        signal: Signal,
        deadline_s: float,
        now_s: float,
    ) -> bool:
        """A path, head to tail. False, and counted as shed, where the queue is full or the signal is off or paused."""
        count = len(fingerprints)
        is_full = len(self.wants) >= WANTS_MAX or self._blocks + count > WANTED_BLOCKS_MAX
        if is_full or not self.ahead.may_guess(signal, now_s):
            self.ended[signal, "shed"] += count
            return False
        self._last += 1
        self._blocks += count
        worth = self._worth(fingerprints)
        self.wants.append(Want(self._last, ns, fingerprints, signal, deadline_s, worth))
        self._reorder_s = 0.0
        return True

    def guess(self, ns: NamespaceId, leaf: Fingerprint, signal: Signal, now_s: float) -> None:
        """The path to this block is likely to be read soon: what of it lies below memory is wanted, if it can all be held there."""
        books = self.books
        row = books.index.find_one(leaf)
        if row < 0 or books.blocks.ns[row] != ns:
            return
        path = books.tree.path(row)
        fast = books.blocks.fast[path]
        cold = path[(fast > int(TierId.DRAM)) & (fast != NOT_READABLE)]
        if len(cold):
            names = books.index.fingerprints[path]
            self.want(ns, names, signal, now_s + GUESS_S, now_s)

    def expect(self, now_s: float) -> None:
        """Conversations whose next turn is about to begin."""
        for ns, leaf in islice(self.turns.due(now_s), LOOKS_MAX):
            self.guess(ns, leaf, Signal.SESSION, now_s)

    def ordered(self, now_s: float) -> list[Want]:
        """What is still of use, best first; what is late leaves the queue."""
        late = [want for want in self.wants if 0 < want.deadline_s < now_s]
        for want in late:
            self._end(want, "late")
        if now_s >= self._reorder_s:
            self.wants.sort(key=lambda want: (*self._key(want, now_s), want.number))
            self._reorder_s = now_s + REORDER_S
        return list(self.wants)

    def hold(self, want: Want, rows: Rows, now_s: float) -> None:
        """These were taken and are going to be loaded: they stay until they are used, as far as there is room for that."""
        if self.ahead.room_bytes() > 0:
            self.ahead.begin(want.signal, rows, want.deadline_s, now_s)

    def take(self, bytes_max: int, now_s: float) -> list[tuple[Want, Rows]]:
        """The next blocks that lie below memory, path by path, of about so many bytes; at least one. Guesses only within their share of memory."""
        taken: list[tuple[Want, Rows]] = []
        room_bytes, looks_left = self.ahead.room_bytes(), LOOKS_MAX
        for want in self.ordered(now_s):
            if bytes_max <= 0 or not looks_left:
                break
            most, is_guess = bytes_max, want.signal in SPECULATIVE
            if is_guess:
                most = min(bytes_max, room_bytes)
                if most <= 0 or len(taken) >= self.ahead.loads_left():
                    continue
            looks_left -= 1
            rows, looked, size_bytes = self._next(want, most)
            bytes_max -= size_bytes
            room_bytes -= size_bytes
            want.at += looked
            self._blocks -= looked
            self.ended[want.signal, "taken"] += len(rows)
            self.ended[want.signal, "there"] += looked - len(rows)
            if not len(want):
                self.wants.remove(want)
            if len(rows):
                taken.append((want, rows))
        return taken

    def below(self, want: Want) -> Rows:
        """Block rows of what is left of it and has to be loaded."""
        return self._cold(want)[0]

    # ---- inside

    def _next(self, want: Want, bytes_max: int) -> tuple[Rows, int, int]:
        """Rows to load, how many of the path were looked at, and about how many bytes the rows are."""
        rows, places = self._cold(want)
        spec = self.books.layouts[want.ns].spec
        block_bytes = required_bytes(spec, spec.block_tokens)
        most = max(1, bytes_max // max(1, block_bytes))
        if len(rows) <= most:
            return rows, len(want), len(rows) * block_bytes
        return rows[:most], int(places[most]), most * block_bytes

    def _cold(self, want: Want) -> tuple[Rows, Rows]:
        """Rows of its blocks that are readable from below memory only, and their places in what is left. A path ends where a block is missing."""
        blocks = self.books.blocks
        found = self.books.index.find(want.fingerprints[want.at :])
        readable = (found >= 0) & (blocks.ns[found] == want.ns)
        readable &= blocks.fast[found] != NOT_READABLE
        found = found if readable.all() else found[: int(np.argmin(readable))]
        places = np.flatnonzero(blocks.fast[found] > int(TierId.DRAM))
        return found[places], places.astype(np.int32)

    def _key(self, want: Want, now_s: float) -> tuple[int, ...]:
        slack = NEVER
        if want.deadline_s:
            slack = max(0, int(log2(max(1.0, (want.deadline_s - now_s) * 1000))))
        purpose = _OF_SIGNAL.get(want.signal)
        values = {
            Objective.HIT_RATE: -want.worth,
            Objective.TRANSFER: slack if purpose is Objective.TRANSFER else NEVER,
            Objective.DECODE: slack if purpose is Objective.DECODE else NEVER,
            Objective.FOOTPRINT: len(want).bit_length(),
        }
        is_guess = int(want.signal in SPECULATIVE)
        return (is_guess, *(values[objective] for objective in self.objectives))

    def _worth(self, fingerprints: Fingerprints) -> int:
        if not len(fingerprints):
            return -NEVER
        low, high = fingerprints[0].tolist()
        row = self.books.index.find_one((low, high))
        copy = int(self.books.blocks.first_copy[row]) if row >= 0 else -1
        return self.books.weight(copy) if copy >= 0 else -NEVER

    def _end(self, want: Want, how: str) -> None:
        self.ended[want.signal, how] += len(want)
        self._blocks -= len(want)
        self.wants.remove(want)
