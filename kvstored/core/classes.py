"""Temperature classes in the order of victims: which of the policy's next few leaves.

P3 first: what attention left alone for long (cold.py has those that lose nothing by leaving). Then P2 in the policy's order, what an engine tagged
a little later; P1, recent windows of running requests that could not be held, last. P0 is no candidate at all (sinks.py). Where no engine told
anything and every running request is held, the policy's own victim leaves, unlooked at: what it knows is not overruled by a class.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.columns import FIRST
from kvstored.core.feedback import Feedback
from kvstored.core.plan import OBJECTIVES, Objective
from kvstored.core.ties import leaves_first
from kvstored.core.types import Budget, TierId, as_rows

AMONG = 16
"""Next victims among which what engines told decides: it is never the only criterion."""
LATER_AMONG = 256
"""Next victims before which one of a recent window does not leave."""
_UNREACHED, _UNSELECTED, _ORDINARY, _TAGGED, _RECENT = range(5)


class _Seen(NamedTuple):
    """Of candidates in the policy's order: the rank of the class, least first; within how many places another may go before."""

    rank: NDArray[np.int64]
    reach: NDArray[np.float64]

    def best(self) -> NDArray[np.int64]:
        """Places of those of the first class that may leave now, in the policy's order."""
        near = self.rank[: int(np.ceil(self.reach[0]))]
        return np.flatnonzero(near == near.min())


class Classes:
    def __init__(self, books: Books, feedback: Feedback) -> None:
        self._books = books
        self._feedback = feedback
        self.objectives: Sequence[Objective] = OBJECTIVES

    def chosen(self, victim: int, tier: TierId, budget: Budget, now_s: float) -> int:
        """The policy's victim, which was taken out, or another one that leaves instead. All of them may be evicted."""
        is_told, recent = self._is_told(now_s), self._books.recent
        is_recent = recent.loose and int(self._books.copies.block[victim]) in recent
        if not (is_told or is_recent):
            return victim
        policy = self._books.policy
        most = LATER_AMONG if is_recent else AMONG
        among = [victim, *policy.peek(tier, budget, now_s, most - 1)]
        at = self._best(self._seen(among, now_s), among)
        if at:
            policy.offer(victim)
        return among[at]

    def ordered(self, victims: list[int], now_s: float) -> list[int]:
        """The policy's next victims, in the order in which they would be `chosen`."""
        if not (self._is_told(now_s) or self._books.recent.loose):
            return victims
        left, found = list(victims), list[int]()
        rank, reach = self._seen(left, now_s)
        while left:
            at = self._best(_Seen(rank, reach), left)
            found.append(left.pop(at))
            rank, reach = np.delete(rank, at), np.delete(reach, at)
        return found

    def _best(self, seen: _Seen, copies: list[int]) -> int:
        """The order within a class is the policy's; only of what attention left alone alike the objectives choose."""
        places = seen.best()
        if len(places) == 1 or seen.rank[places[0]] != _UNSELECTED:
            return int(places[0])
        rows = as_rows([copies[place] for place in places])
        return int(places[leaves_first(self._books, rows, self.objectives)])

    def _is_told(self, now_s: float) -> bool:
        return self._feedback.is_heard(now_s) or self._books.tags.is_heard(now_s)

    def _seen(self, copies: list[int], now_s: float) -> _Seen:
        books, rows = self._books, as_rows(copies)
        blocks = books.copies.block[rows]
        is_told = self._is_told(now_s)
        rank = np.full(len(rows), _ORDINARY)
        reach = np.full(len(rows), float(AMONG if is_told else 1))
        if is_told:
            warmth = books.tags.warmth(blocks, now_s)
            rank[warmth > 0] = _TAGGED
            reach[warmth > 0] = np.maximum(warmth[warmth > 0] * AMONG, 1)
            rank[self._feedback.is_sunk(rows, now_s)] = _UNSELECTED
        if books.recent.loose:
            is_recent = books.recent.among(blocks)
            rank[is_recent], reach[is_recent] = _RECENT, LATER_AMONG
        rank[books.copies.flags[rows] & FIRST != 0] = _UNREACHED
        return _Seen(rank, reach)
