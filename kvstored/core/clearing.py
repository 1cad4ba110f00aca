"""Clearing a run of space when enough is free and none of it lies together.

Evicting in the policy's order would go through half a tier of small blocks until by chance enough neighbours are gone. Here the run is
chosen by address: the one whose most valuable copy is worth least leaves, whole, with what hangs below its copies in the tree.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import Reason
from kvstored.core.columns import CLEAN, READY, SINK
from kvstored.core.policies.base import budget_of
from kvstored.core.types import Budget, Part, Rows, TierId

SEGMENTS_MAX = 4
"""Segments that one search looks at, those with most free units: a few milliseconds a segment of 1 GiB."""
RUNS_MAX = 8
"""Runs that one search tries: a copy in it may turn out to be in use below."""
_FREE = np.int64(-1)
_BLOCKED = np.int64(np.iinfo(np.int64).max)
_NOBODY = np.int32(-1)


@dataclass(frozen=True, slots=True)
class _Ground:
    """Units of one segment: what the occupant of each is worth to the policy, and its copy row."""

    worth: NDArray[np.int64]
    copy: Rows


def clear_run(books: Books, tier: TierId, budget: Budget, units: int, now_s: float) -> bool:
    """Forget the copies of one run of so many units; False where every run has something that stays."""
    extents = books.space.books[tier].extents
    grounds = [
        _ground(books, tier, budget, segment, size)
        for segment, size in extents.emptiest(SEGMENTS_MAX)
        if size >= units
    ]
    for _ in range(RUNS_MAX):
        found = _cheapest(grounds, units)
        if found is None:
            return False
        ground, start = found
        copies = np.unique(ground.copy[start : start + units])
        victims = _with_all_below(books, tier, budget, copies[copies >= 0].tolist())
        if victims is None:
            ground.worth[start : start + units] = _BLOCKED
            continue
        for copy in victims:
            books.drop_copy(copy, Reason.DEMAND, now_s)
        return True
    return False


def _ground(books: Books, tier: TierId, budget: Budget, segment: int, size: int) -> _Ground:
    """Taken space without a copy (in quarantine, being discarded) is blocked like that of copies in use."""
    pieces = books.pieces
    worth = np.full(size, _BLOCKED, dtype=np.int64)
    copy = np.full(size, _NOBODY, dtype=np.int32)
    for run in books.space.books[tier].extents.free_runs(segment):
        worth[run.start : run.start + run.units] = _FREE
    rows = np.flatnonzero(
        (pieces.copy[: pieces.top] >= 0) & (pieces.segment[: pieces.top] == segment)
    )
    rows = rows[books.copies.tier[pieces.copy[rows]] == int(tier)]
    owners, lengths = pieces.copy[rows], pieces.units[rows].astype(np.int64)
    first = np.cumsum(lengths) - lengths
    at = np.repeat(pieces.start[rows].astype(np.int64) - first, lengths) + np.arange(lengths.sum())
    worth[at] = np.repeat(_worth(books, budget, owners), lengths)
    copy[at] = np.repeat(owners, lengths)
    for row, place in books.long_places.items():
        owner = int(pieces.copy[row])
        if books.copies.tier[owner] == int(tier):
            for extent in place:
                if extent.segment == segment:
                    span = slice(extent.start, extent.start + extent.units)
                    worth[span] = _worth(books, budget, np.asarray([owner], dtype=np.int32))[0]
                    copy[span] = owner
    return _Ground(worth, copy)


def _worth(books: Books, budget: Budget, owners: Rows) -> NDArray[np.int64]:
    """Ranks; blocked where the copy itself cannot go. Copies of the other budget stay."""
    copies, blocks = books.copies, books.blocks
    at = copies.block[owners]
    free = (copies.state[owners] == READY) & (copies.readers[owners] == 0)
    free &= (copies.fills[owners] == 0) & (blocks.holds[at] == 0)
    free &= (copies.flags[owners] & SINK == 0) | (books.tree.children[at] == 0)
    free &= (copies.flags[owners] & CLEAN != 0) | (copies.tier[owners] != int(TierId.HBM))
    if referred_to := books.space.frames.referred_to:  # its extent would stay
        free &= ~np.isin(owners, referred_to)
    is_checkpoint = copies.part[owners] == int(Part.CHECKPOINT)
    free &= is_checkpoint == (budget is Budget.CHECKPOINT)
    return np.where(free, copies.rank[owners], _BLOCKED)


def _cheapest(grounds: list[_Ground], units: int) -> tuple[_Ground, int] | None:
    """Runs that begin at a multiple of their size come first: runs of one size then leave no gaps between them."""
    for step in (units, 1):
        best: tuple[int, _Ground, int] | None = None
        for ground in grounds:
            highest = window_max(ground.worth, units)[::step]
            at = int(np.argmin(highest))
            worth = int(highest[at])
            if worth != _BLOCKED and (best is None or worth < best[0]):
                best = worth, ground, at * step
        if best is not None:
            return best[1:]
    return None


def window_max(values: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """The maximum of every `width` neighbours, by doubling: log2(width) passes."""
    span, highest = 1, values
    while span * 2 <= width:
        highest = np.maximum(highest[:-span], highest[span:])
        span *= 2
    count = len(values) - width + 1
    return np.maximum(highest[:count], highest[width - span : width - span + count])


def _with_all_below(
    books: Books, tier: TierId, budget: Budget, copies: list[int]
) -> list[int] | None:
    """The copies and all below them in this tier and part, deepest first; None where one of those is in use."""
    found = dict.fromkeys(copies)
    waiting = list(found)
    while waiting:
        copy = waiting.pop()
        part = int(books.copies.part[copy])
        if not books.copies.kids[copy] or budget_of(part) is Budget.CHECKPOINT:
            continue
        for child in books.tree.children_of(int(books.copies.block[copy])):
            kid = books.copy_in(child, tier, part)
            if kid < 0 or kid in found:
                continue
            if _worth(books, budget, np.asarray([kid], dtype=np.int32))[0] == _BLOCKED:
                return None
            found[kid] = None
            waiting.append(kid)
    depth = books.tree.depth
    return sorted(found, key=lambda copy: -int(depth[books.copies.block[copy]]))
