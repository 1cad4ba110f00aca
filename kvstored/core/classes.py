"""Temperature classes in the order of victims: which of the policy's next few leaves.

P3 first: what attention left alone for long (cold.py has those that lose nothing by leaving). Then P2 in the policy's order, what an engine tagged
as important a little later; P1, recent windows of running requests that could not be held, last. P0 is no candidate at all (sinks.py). Where no engine
reported and every running request is held, the policy's own victim leaves, unlooked at: what it knows is not overruled by a class.
"""

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.columns import FIRST
from kvstored.core.feedback import Feedback
from kvstored.core.types import Budget, TierId, as_rows

AMONG = 16
"""Next victims among which what engines told decides: it is never the only criterion."""
LATER_AMONG = 256
"""Next victims before which one of a recent window does not leave."""
_UNREACHED, _UNSELECTED, _ORDINARY, _RECENT = range(4)


class Classes:
    def __init__(self, books: Books, feedback: Feedback) -> None:
        self._books = books
        self._feedback = feedback

    def chosen(self, victim: int, tier: TierId, budget: Budget, now_s: float) -> int:
        """The policy's victim, which was taken out, or another one that leaves instead. All of them may be evicted."""
        if not self._is_asked(now_s):
            return victim
        policy = self._books.policy
        told = self._feedback.is_heard(now_s)
        among = [victim, *(policy.peek(tier, budget, now_s, AMONG - 1) if told else ())]
        ranks = self._ranks(among, now_s)
        if ranks.min() == _RECENT:
            among = [victim, *policy.peek(tier, budget, now_s, LATER_AMONG - 1)]
            ranks = self._ranks(among, now_s)
        at = int(np.argmin(ranks))
        if at:
            policy.offer(victim)
        return int(among[at])

    def ordered(self, victims: list[int], now_s: float) -> list[int]:
        """The policy's next victims, in the order in which they would be `chosen`."""
        if not self._is_asked(now_s):
            return victims
        left, found = list(victims), list[int]()
        ranks = self._ranks(left, now_s).tolist()
        while left:
            width = AMONG if self._feedback.is_heard(now_s) else 1
            at = int(np.argmin(ranks[:width]))
            if ranks[at] == _RECENT:
                at = int(np.argmin(ranks[:LATER_AMONG]))
            found.append(left.pop(at))
            ranks.pop(at)
        return found

    def _is_asked(self, now_s: float) -> bool:
        return bool(self._books.recent.loose) or self._feedback.is_heard(now_s)

    def _ranks(self, copies: list[int], now_s: float) -> NDArray[np.int64]:
        books, rows = self._books, as_rows(copies)
        ranks = np.full(len(rows), _ORDINARY)
        if books.recent.loose:
            ranks[books.recent.among(books.copies.block[rows])] = _RECENT
        if self._feedback.is_heard(now_s):
            ranks[self._feedback.is_sunk(rows, now_s)] = _UNSELECTED
        ranks[books.copies.flags[rows] & FIRST != 0] = _UNREACHED
        return ranks
