"""What engines predict that they will read by a deadline, and how right and how timely that was.

One set a session, its latest. Timely: what of it was in memory at its deadline, and how long after it the whole was there. Recall: of
what the session then read, the share that it had predicted.
"""

from dataclasses import dataclass, field

import numpy as np

from kvstored.core.books import Books
from kvstored.core.readability import NOT_READABLE
from kvstored.core.types import Fingerprints, NamespaceId, TierId

SETS_MAX = 4096
LOOKS_MAX = 32
"""Sets that one look judges; the others have their turn at the next."""
KEPT_S = 10.0
"""After its deadline: reads count for its recall, and it may still become whole."""


@dataclass(slots=True)
class Resident:
    ns: NamespaceId
    fingerprints: Fingerprints
    deadline_s: float
    is_judged: bool = False
    is_whole: bool = False


@dataclass(slots=True)
class Timeliness:
    """Since the last look. `late_s`: of each set that became whole after its deadline."""

    in_time_blocks: int = 0
    late_blocks: int = 0
    predicted_reads: int = 0
    other_reads: int = 0
    late_s: list[float] = field(default_factory=list)


class Residents:
    def __init__(self, books: Books) -> None:
        self._books = books
        self._sets: dict[int, Resident] = {}
        self._seen = Timeliness()

    def __len__(self) -> int:
        return len(self._sets)

    def sets(self) -> list[tuple[NamespaceId, Fingerprints]]:
        return [(each.ns, each.fingerprints) for each in self._sets.values()]

    def report(
        self, session: int, ns: NamespaceId, fingerprints: Fingerprints, deadline_s: float
    ) -> bool:
        """In place of the session's earlier one. False where there are too many."""
        if session not in self._sets and len(self._sets) >= SETS_MAX:
            return False
        self._sets[session] = Resident(ns, fingerprints, deadline_s)
        return True

    def read(self, session: int, ns: NamespaceId, fingerprints: Fingerprints) -> None:
        """The session reads these."""
        predicted = self._sets.get(session)
        if predicted is None or predicted.ns != ns:
            return
        known = np.isin(fingerprints[:, 0], predicted.fingerprints[:, 0])
        self._seen.predicted_reads += int(np.count_nonzero(known))
        self._seen.other_reads += len(known) - int(np.count_nonzero(known))

    def look(self, now_s: float) -> Timeliness:
        """What came of the sets whose time has come; those that are over are forgotten."""
        looks_left = LOOKS_MAX
        for session, each in list(self._sets.items()):
            if now_s >= each.deadline_s and not each.is_whole and looks_left:
                looks_left -= 1
                self._judge(each, now_s)
                self._sets[session] = self._sets.pop(session)  # behind those that wait
            if now_s > each.deadline_s + KEPT_S:
                del self._sets[session]
        seen, self._seen = self._seen, Timeliness()
        return seen

    def _judge(self, each: Resident, now_s: float) -> None:
        """What is not stored at all is nobody's delay."""
        blocks = self._books.blocks
        rows = self._books.index.find(each.fingerprints)
        fast = blocks.fast[rows[(rows >= 0) & (blocks.ns[rows] == each.ns)]]
        missing = int(np.count_nonzero((fast > int(TierId.DRAM)) & (fast != NOT_READABLE)))
        if not each.is_judged:
            each.is_judged = True
            each.is_whole = not missing
            self._seen.late_blocks += missing
            self._seen.in_time_blocks += int(np.count_nonzero(fast <= int(TierId.DRAM)))
        elif not missing:
            each.is_whole = True
            self._seen.late_s.append(now_s - each.deadline_s)
