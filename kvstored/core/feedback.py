"""What engines tell of attention: which blocks a step selected, or how much attention they had. Advice to eviction and prefetch, nothing more.

A block that was not selected for long leaves a little earlier than its policy says, one that is selected all the time counts as used and comes up
from NVMe. It never deletes anything by itself, never touches what is referenced, and is forgotten within a minute: selection depends on
the query. Columns by block row, made when the first report comes; some 30 bytes a row and part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import TouchEvent
from kvstored.core.cold import Cold
from kvstored.core.types import Part, Rows

Mask = NDArray[np.bool_]
HALF_LIFE_S = 30.0
"""Of heat, and twice that is how long anything that was told counts at all."""
STEP_FADE = 0.9
"""What heat keeps when the next step comes."""
HOT = 0.5
RAISE_S = 5.0
"""A block is raised at most so often."""
EVEN_SHARE = 0.25
"""Of an even share of the attention: a block that has less was not selected."""
BURST_S = 2.0
REPORT_BLOCKS = 96
"""What a report counts as beside its blocks: it takes some 100 us itself, so that reports stay within 1 % of a core at 10,000 blocks/s."""
STEPS_MAX = 256
"""In one report."""


@dataclass(frozen=True, slots=True)
class FeedbackLimits:
    """`blocks_per_s` 0: nothing is taken. `weights`: of reports, by group and layer (-1: any), as selection logs gave them; 1 where there is none."""

    blocks_per_s: float = 10_000.0
    sink_steps: int = 64
    stable_steps: int = 8
    weights: Mapping[tuple[str, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Access:
    """`selected`: (steps, keys), oldest first; or one step's `mass`; `tags`: what each block holds, with one of the two or alone. `layer` -1: not said."""

    group: int
    layer: int
    selected: NDArray[np.bool_] | None
    mass: NDArray[np.float64] | None
    tags: NDArray[np.uint8] | None = None

    @property
    def is_selection(self) -> bool:
        return self.selected is not None or self.mass is not None


@dataclass(frozen=True, slots=True)
class Reported:
    """`blocks` that were known; `raised`: those that count as used now, `wanted`: stable ones below memory. `is_taken` False: shed, over the rate."""

    is_taken: bool
    blocks: int
    raised: Rows
    wanted: Rows


NOTHING = np.empty(0, dtype=np.int32)
SHED = Reported(False, 0, NOTHING, NOTHING)


class _Track:
    """One part's columns. `low` names the block that a row was of when it was told of."""

    def __init__(self, capacity: int) -> None:
        self.low = np.zeros(capacity, dtype=np.uint64)
        self.at_s = np.full(capacity, -np.inf)
        self.raised_s = np.full(capacity, -np.inf)
        self.heat = np.zeros(capacity, dtype=np.float32)
        self.unselected = np.zeros(capacity, dtype=np.uint32)
        self.streak = np.zeros(capacity, dtype=np.uint32)

    def grown(self, capacity: int) -> "_Track":
        made = _Track(capacity)
        for name, column in vars(self).items():
            getattr(made, name)[: len(column)] = column
        return made


class Feedback:
    def __init__(self, books: Books) -> None:
        self._books = books
        self.limits = FeedbackLimits()
        self._tracks: dict[Part, _Track] = {}
        self._cold = Cold(books)
        self._cold_s = -np.inf
        self._tokens = 0.0
        self._filled_s = -np.inf

    def is_heard(self, now_s: float) -> bool:
        """Whether an engine told lately of blocks that attention leaves alone: else nobody has to look for them."""
        return now_s - self._cold_s <= 2 * HALF_LIFE_S

    def settle(self, now_s: float) -> None:
        """What left first for what was told long ago, or was used since, is ordinary again."""
        if self._cold.is_due(now_s):
            rows = self._cold.rows(now_s)
            self._cold.clear(rows[~self.is_sunk(rows, now_s)])

    def selected(
        self, rows: Rows, part: Part, selected: Mask, weight: float, now_s: float
    ) -> Reported:
        """`selected`: (steps, blocks) of one namespace, oldest step first; rows of -1 are not known."""
        steps = len(selected)
        if not steps or not self._may_take(len(rows), now_s):
            return SHED
        known = rows >= 0
        rows, selected = rows[known], selected[:, known]
        counts = selected.sum(axis=0)
        trailing = np.where(counts == steps, steps, np.argmin(selected[::-1], axis=0))
        idle = np.where(counts == 0, steps, np.argmax(selected[::-1], axis=0))
        if len(rows) and self._is_read_whole(rows.item(0), part):
            idle[:] = 0
        return self._learn(rows, part, steps, counts / steps * weight, trailing, idle, now_s)

    def attended(
        self, rows: Rows, part: Part, mass: NDArray[np.float64], weight: float, now_s: float
    ) -> Reported:
        """One step, by attention mass: a block with much less than an even share was not selected."""
        total = float(mass.sum())
        even = total / max(1, len(mass))
        return self.selected(rows, part, (mass > EVEN_SHARE * even)[np.newaxis], weight, now_s)

    def tagged(self, rows: Rows, tags: NDArray[np.uint8], now_s: float) -> Reported:
        """What blocks hold, as an engine says; rows of -1 are not known."""
        if not self._may_take(len(rows), now_s):
            return SHED
        known = rows >= 0
        self._books.tags.tell(rows[known], tags[known], now_s)
        for part in self._tracks:
            self._cold.clear_blocks(rows[known & (tags != 0)], part)
        return Reported(True, int(np.count_nonzero(known)), NOTHING, NOTHING)

    def is_sunk(self, copies: Rows, now_s: float) -> Mask:
        """Which of these copies were not selected for long, and not used since: they may leave before others of about the same worth."""
        table = self._books.copies
        blocks, parts = table.block[copies], table.part[copies]
        sunk: Mask = np.zeros(len(copies), dtype=np.bool_)
        for part, track in self._tracks.items():
            mine = (parts == int(part)) & (blocks >= 0) & (blocks < len(track.low))
            at = blocks[mine]
            idle = track.unselected[at] >= self.limits.sink_steps
            idle &= self._books.blocks.last_s[at] <= track.at_s[at]
            idle &= self._books.tags.warmth(at, now_s) == 0
            sunk[mine] = idle & self._is_fresh(track, at, now_s)
        return sunk

    def heat(self, block: int, part: Part, now_s: float) -> float:
        """Between 0 and the weight of what was told; halves in HALF_LIFE_S."""
        track = self._tracks.get(part)
        at = np.asarray([block], dtype=np.int32)
        if track is None or block >= len(track.low) or not self._is_fresh(track, at, now_s)[0]:
            return 0.0
        age_s = now_s - track.at_s.item(block)
        return track.heat.item(block) * float(np.exp2(-age_s / HALF_LIFE_S))

    # ---- inside

    def _may_take(self, blocks: int, now_s: float) -> bool:
        """A bucket of some seconds: what is beyond the rate is shed, whole reports at a time."""
        rate = self.limits.blocks_per_s
        filled = self._tokens + (now_s - self._filled_s) * rate if self._filled_s > 0 else np.inf
        self._tokens, self._filled_s = min(float(filled), rate * BURST_S), now_s
        cost = blocks + REPORT_BLOCKS
        if cost > self._tokens:
            return False
        self._tokens -= cost
        return True

    def _learn(
        self,
        rows: Rows,
        part: Part,
        steps: int,
        share: NDArray[np.float64],
        trailing: NDArray[np.int64],
        idle: NDArray[np.int64],
        now_s: float,
    ) -> Reported:
        track = self._track(part)
        fresh = self._is_fresh(track, rows, now_s)
        lows = self._books.index.fingerprints[rows, 0]
        faded = np.where(fresh, track.heat[rows], 0.0)
        faded *= np.exp2(-np.where(fresh, now_s - track.at_s[rows], 0.0) / HALF_LIFE_S)
        kept = STEP_FADE**steps
        heat = faded * kept + share * (1 - kept)
        streak = np.where((trailing == steps) & fresh, track.streak[rows] + trailing, trailing)
        unused = self._books.blocks.last_s[rows] <= track.at_s[rows]
        goes_on = (idle == steps) & fresh & unused
        before = track.unselected[rows]
        unselected = np.where(goes_on, before + idle, idle)
        track.raised_s[rows] = np.where(fresh, track.raised_s[rows], -np.inf)
        track.low[rows], track.at_s[rows], track.heat[rows] = lows, now_s, heat
        track.streak[rows], track.unselected[rows] = streak, unselected
        stable = rows[(streak >= self.limits.stable_steps) & (heat >= HOT)]
        stable = stable[now_s - track.raised_s[stable] >= RAISE_S]
        track.raised_s[stable] = now_s
        self._cool(rows, part, np.where(goes_on, before, 0), unselected, now_s)
        self._cold.clear_blocks(rows[(before >= self.limits.sink_steps) & ~goes_on], part)
        return self._raise(len(rows), stable, now_s)

    def _cool(
        self,
        rows: Rows,
        part: Part,
        before: NDArray[np.int64],
        unselected: NDArray[np.int64],
        now_s: float,
    ) -> None:
        """Blocks that were not selected for so many steps are cold, as far as they lose nothing by that; each is looked at once in as many steps."""
        steps = self.limits.sink_steps
        if (unselected >= steps).any():
            self._cold_s = now_s
        cold = rows[unselected // steps > before // steps]
        if len(cold):
            cold = cold[self._books.tags.warmth(cold, now_s) == 0]
            self._cold.mark(cold, part)

    def _raise(self, known: int, stable: Rows, now_s: float) -> Reported:
        """They count as used, as where an engine touches them."""
        books = self._books
        stable = stable[np.argsort(books.tree.depth[stable], kind="stable")]
        if len(stable):
            books.touch(stable, TouchEvent.HINT, now_s)
        fast = books.blocks.fast[stable]
        return Reported(True, known, stable, stable[(fast > 1) & (fast < 4)])

    def _is_read_whole(self, block: int, part: Part) -> bool:
        """By every step, whatever is selected (HCA-like groups): such a part is never cold for it."""
        layout = self._books.layout_of(block)
        return any(layout.spec.groups[g].resident for g in layout.groups_of(part))

    def _is_fresh(self, track: _Track, rows: Rows, now_s: float) -> Mask:
        """Told of this very block, and not long ago."""
        same = track.low[rows] == self._books.index.fingerprints[rows, 0]
        fresh: Mask = same & (now_s - track.at_s[rows] <= 2 * HALF_LIFE_S)
        return fresh

    def _track(self, part: Part) -> _Track:
        capacity = self._books.blocks.capacity
        track = self._tracks.get(part) or _Track(capacity)
        if len(track.low) < capacity:
            track = track.grown(capacity)
        self._tracks[part] = track
        return track
