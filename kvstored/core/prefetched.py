"""Blocks that were loaded ahead of need, until they are used or their time is over: a budget, how accurate it was, and when to stop guessing.

What came up is held until then, or the next page-in would push it out unused. A signal whose blocks mostly go unused is paused, twice as long each
time, and tried again: asked-for page-ins (of a request, a transfer, a working set) are never paused, an engine knows what it does.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.plan import SPECULATIVE, Signal
from kvstored.core.types import UNIT_BYTES, Rows, TierId

HOLD_S = 10.0
"""After the deadline, or after the load where there is none."""
JUDGED_BLOCKS = 32
"""Blocks of a signal between two judgements."""
AHEAD_MAX = 512
"""Loads whose blocks are held: a look at each takes some microseconds, several times a second."""
PAUSE_S, PAUSE_MAX_S = 10.0, 640.0


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """`share`: of DRAM that blocks loaded ahead and not used yet may hold. `waste_max`: share of a signal's blocks that may go unused. `signals`: speculative
    ones that are on."""

    share: float = 0.05
    waste_max: float = 0.5
    signals: frozenset[Signal] = SPECULATIVE


@dataclass(slots=True)
class Ahead:
    """Loaded together. `path`: held rows; `hits`: of `rows`, as they were."""

    signal: Signal
    rows: Rows
    path: Rows
    hits: NDArray[np.uint32]
    units: int
    until_s: float
    used: NDArray[np.bool_]


@dataclass(slots=True)
class Record:
    """Of one signal since its last judgement, and its pause."""

    used: int = 0
    wasted: int = 0
    pause_s: float = 0.0
    until_s: float = 0.0


class Prefetched:
    """`ended`: blocks by signal and what became of them (used, wasted, failed), `wasted_bytes`; both since the last look of the shell."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.limits = PrefetchLimits()
        self.ahead: list[Ahead] = []
        self.ended: Counter[tuple[Signal, str]] = Counter()
        self.wasted_bytes = 0
        self._records = {signal: Record() for signal in Signal}
        self._units = 0

    @property
    def held_bytes(self) -> int:
        return self._units * UNIT_BYTES

    def room_bytes(self) -> int:
        if not self.loads_left():
            return 0
        book = self._books.space.books[TierId.DRAM]
        return max(0, int(book.granted * self.limits.share) - self._units) * UNIT_BYTES

    def loads_left(self) -> int:
        """That may be held beside those that are."""
        return max(0, AHEAD_MAX - len(self.ahead))

    def may_guess(self, signal: Signal, now_s: float) -> bool:
        """Whether the signal is on and not paused."""
        if signal not in SPECULATIVE:
            return True
        return signal in self.limits.signals and now_s >= self._records[signal].until_s

    def pause_left_s(self, signal: Signal, now_s: float) -> float:
        return max(0.0, self._records[signal].until_s - now_s)

    def begin(self, signal: Signal, rows: Rows, deadline_s: float, now_s: float) -> None:
        """These blocks are about to be loaded."""
        books = self._books
        path = books.tree.paths_of(rows)
        books.hold(path)
        copies = books.blocks.first_copy[rows]
        units = int(books.copies.units[copies].sum())
        self._units += units
        hits = books.blocks.hits[rows].copy()
        until_s = max(deadline_s, now_s) + HOLD_S
        used = np.zeros(len(rows), dtype=np.bool_)
        self.ahead.append(Ahead(signal, rows, path, hits, units, until_s, used))

    def look(self, now_s: float) -> None:
        """Let go of what was used or is over."""
        blocks = self._books.blocks
        kept: list[Ahead] = []
        for each in self.ahead:
            each.used |= blocks.hits[each.rows] > each.hits
            if each.used.all() or now_s >= each.until_s:
                self._end(each, now_s)
            else:
                kept.append(each)
        self.ahead = kept

    # ---- inside

    def _end(self, each: Ahead, now_s: float) -> None:
        books = self._books
        came = books.blocks.fast[each.rows] <= int(TierId.DRAM)
        used = int(np.count_nonzero(each.used))
        wasted_rows = each.rows[came & ~each.used]
        wasted = len(wasted_rows)
        self.ended[each.signal, "used"] += used
        self.ended[each.signal, "wasted"] += wasted
        self.ended[each.signal, "failed"] += len(each.rows) - used - wasted
        copies = books.blocks.first_copy[wasted_rows]
        self.wasted_bytes += int(books.copies.units[copies].sum()) * UNIT_BYTES
        self._units -= each.units
        books.release_holds(each.path)
        self._judge(self._records[each.signal], used, wasted, now_s)

    def _judge(self, record: Record, used: int, wasted: int, now_s: float) -> None:
        record.used += used
        record.wasted += wasted
        total = record.used + record.wasted
        if total < JUDGED_BLOCKS:
            return
        if record.wasted > self.limits.waste_max * total:
            record.pause_s = min(PAUSE_MAX_S, 2 * record.pause_s or PAUSE_S)
            record.until_s = now_s + record.pause_s
        else:
            record.pause_s = 0.0
        record.used = record.wasted = 0
