"""Space whose writer or reader may still be at work although its right has ended.

It is kept aside until the session's process is dead, or a timer ends; after the timer the space is used again as suspect: whatever
lies there is hashed at every read. Timed entries leave in the order of their deadlines.
"""

from collections import deque
from dataclasses import dataclass

from kvstored.core.books import Books
from kvstored.core.calls import Fingerprint, Freed, PieceRow, Reason
from kvstored.core.space import units_in
from kvstored.core.types import NamespaceId, TierId


@dataclass(frozen=True, slots=True)
class KeptSpace:
    """Pieces of an ended fill."""

    session: int
    until_s: float
    tier: TierId
    ns: NamespaceId
    fingerprint: Fingerprint
    rows: tuple[PieceRow, ...]


@dataclass(frozen=True, slots=True)
class KeptCopies:
    """Copies whose lease ended while its reader may still look at them."""

    session: int
    until_s: float
    copies: tuple[int, ...]


class Quarantine:
    def __init__(self, books: Books) -> None:
        self._books = books
        self._kept: deque[KeptSpace | KeptCopies] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def keep_space(
        self,
        session: int,
        tier: TierId,
        ns: NamespaceId,
        fingerprint: Fingerprint,
        rows: tuple[PieceRow, ...],
        now_s: float,
    ) -> None:
        until_s = now_s + self._books.limits.quarantine_s
        self._kept.append(KeptSpace(session, until_s, tier, ns, fingerprint, rows))
        self._books.space.books[tier].quarantined += sum(units_in(row.place) for row in rows)

    def keep_copies(self, session: int, copies: tuple[int, ...], now_s: float) -> None:
        """The copies' reader counts pass to the quarantine."""
        self._kept.append(KeptCopies(session, now_s + self._books.limits.quarantine_s, copies))

    def writer_dead(self, session: int) -> None:
        """Nobody of this session can touch memory any more: its space is clean."""
        mine = [kept for kept in self._kept if kept.session == session]
        if mine:
            self._kept = deque(kept for kept in self._kept if kept.session != session)
        for kept in mine:
            self._end(kept, suspect=False)

    def expire(self, now_s: float) -> None:
        while self._kept and self._kept[0].until_s <= now_s:
            self._end(self._kept.popleft(), suspect=True)

    def next_s(self) -> float:
        return self._kept[0].until_s if self._kept else float("inf")

    def has(self, session: int) -> bool:
        return any(kept.session == session for kept in self._kept)

    def _end(self, kept: KeptSpace | KeptCopies, *, suspect: bool) -> None:
        books = self._books
        if isinstance(kept, KeptCopies):
            for copy in kept.copies:
                books.unread(copy)
            return
        units = sum(units_in(row.place) for row in kept.rows)
        books.space.books[kept.tier].quarantined -= units
        places = tuple(row.place for row in kept.rows)
        if suspect:
            for place in places:
                books.space.suspect(place)
        token = books.space.give(kept.tier, places)
        books.effects.append(
            Freed(kept.tier, kept.ns, kept.fingerprint, kept.rows, Reason.FILL_LOST, token, units)
        )
