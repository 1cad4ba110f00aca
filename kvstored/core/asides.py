"""Space that a session holds for puts to come: its client writes there first and names the blocks when their bytes are in place.

So a put of plain blocks is one message. It lasts as long as its session, in a bounded share of the tier.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import NO_FINGERPRINT, PieceRow, Reason, Reserve
from kvstored.core.columnar import FreedMany, GrantedMany, Places, no_places
from kvstored.core.eviction import Evictor
from kvstored.core.placing import WRITE_TIER
from kvstored.core.plain import granted_aside, lay_at, make_ready, plain_from, ready_at_once
from kvstored.core.quarantine import Quarantine
from kvstored.core.rights import FillRun, Rights
from kvstored.core.space import units_of
from kvstored.core.types import Budget, Extent, NamespaceId

NAMELESS = NamespaceId(-1)
"""What lies in a place that is set aside is of no namespace yet."""


class Held(NamedTuple):
    """A place that is set aside: `length` bytes for a block of the namespace."""

    session: int
    ns: int
    length: int
    segment: int
    start: int


@dataclass(frozen=True, slots=True)
class SetAside:
    """Places with the ids `first`, `first` + 1, ..."""

    first: int
    places: Places
    generations: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Planned:
    """A put into places set aside, checked. `many`: what it will have been, as of a reservation."""

    call: Reserve
    ids: Sequence[int]
    many: GrantedMany


class Asides:
    """`rights`: whose ids these share, so that one is never taken for a fill."""

    def __init__(
        self, books: Books, evictor: Evictor, quarantine: Quarantine, rights: Rights
    ) -> None:
        self._books = books
        self._evictor = evictor
        self._quarantine = quarantine
        self._rights = rights
        self._held: dict[int, Held] = {}
        self._units: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def set_aside(
        self, session: int, ns: NamespaceId, length: int, count: int, now_s: float
    ) -> SetAside:
        """As many of `count` places as the shares allow, evicting as a reservation does; none where they are not to be had in one extent each."""
        books, units = self._books, units_of(length)
        left = min(self._left(session), books.space.limit(WRITE_TIER, Budget.GLOBAL))
        count = min(count, left // units) if books.layouts[ns].is_plain else 0
        places: Places | None = None
        if count > 0:
            count = self._evictor.plain_room(WRITE_TIER, units, count, now_s)
        if count > 0:
            places = books.space.take_equal(WRITE_TIER, Budget.GLOBAL, units, count)
        if places is None:
            return SetAside(0, no_places(), np.empty(0, dtype=np.uint64))
        first = self._rights.next_ids(count)
        where = zip(places.segment.tolist(), places.start.tolist(), strict=True)
        for i, (segment, start) in enumerate(where):
            self._held[first + i] = Held(session, ns, length, segment, start)
        self._count(session, units * count)
        return SetAside(first, places, books.next_generations(count))

    def plan(self, call: Reserve, ids: Sequence[int]) -> Planned | None:
        """What putting these blocks where their bytes already lie, one place a key, comes to; None where it cannot be: a key is known,
        the blocks are not plain, a place is not this session's. Nothing is done; `put` does it, before anything else changes."""
        books, held = self._books, self._mine(call, ids)
        if held is None or plain_from(books, call, least=1) or not ready_at_once(books, call):
            return None
        return Planned(call, ids, granted_aside(books, call, ids[0], _places(held)))

    def put(self, planned: Planned, checksums: NDArray[np.uint64], now_s: float) -> FillRun:
        """The blocks become readable."""
        books, call, many = self._books, planned.call, planned.many
        for id_ in planned.ids:
            del self._held[id_]
        self._count(call.session, -int(many.places.units.sum()))
        laid = lay_at(books, call, many.places, many.generations)
        run = FillRun(
            first=many.first_fill,
            session=call.session,
            ns=call.ns,
            blocks=laid.blocks,
            fingerprints=laid.fingerprints,
            pieces=laid.pieces,
            places=laid.places,
            generations=laid.generations,
            length=laid.length,
            begun_s=now_s,
            expires_s=now_s,
            request_id=call.request_id,
            hint=call.hint,
        )
        make_ready(books, run, checksums, now_s)
        return run

    def give_back(self, session: int, ids: Sequence[int]) -> None:
        """The caller promises not to write there any more: the space is free at once. Others' ids are left alone."""
        known = self._held
        mine = [id_ for id_ in ids if id_ in known and known[id_].session == session]
        held = [self._held.pop(id_) for id_ in dict.fromkeys(mine)]
        if not held:
            return
        places = _places(held)
        self._count(session, -int(places.units.sum()))
        self._books.space.give_memory(WRITE_TIER, places)
        names = np.zeros((len(held), 2), dtype=np.uint64)
        freed = FreedMany(WRITE_TIER, NAMELESS, names, places, Reason.FILL_LOST)
        self._books.effects.append(freed)

    def close_session(self, session: int, now_s: float) -> None:
        """Its client may still write: the space stays in quarantine."""
        mine = [id_ for id_, held in self._held.items() if held.session == session]
        held = [self._held.pop(id_) for id_ in mine]
        self._count(session, -sum(units_of(each.length) for each in held))
        for each in held:
            row = PieceRow(0, 0, (Extent(each.segment, each.start, units_of(each.length)),))
            self._quarantine.keep_space(
                session, WRITE_TIER, NAMELESS, NO_FINGERPRINT, (row,), now_s
            )

    def check(self) -> None:
        units: Counter[int] = Counter()
        for held in self._held.values():
            units[held.session] += units_of(held.length)
        assert units == self._units, f"kept={self._units} now={units}"
        assert self._books.space.books[WRITE_TIER].aside == units.total()

    def _left(self, session: int) -> int:
        """Units that the session may still hold: a half of the share is for each, all of it for all."""
        book = self._books.space.books[WRITE_TIER]
        share = book.limits.capacity_units * book.limits.aside_share
        return max(0, min(int(share) - book.aside, int(share / 2) - self._units[session]))

    def _mine(self, call: Reserve, ids: Sequence[int]) -> list[Held] | None:
        if not ids or len(ids) != len(call.keys) or len(set(ids)) != len(ids):
            return None
        held = [self._held.get(id_) for id_ in ids]
        wanted = (call.session, call.ns, int(call.sizes[0, 0]))
        mine = [each for each in held if each is not None and each[:3] == wanted]
        return mine if len(mine) == len(ids) else None

    def _count(self, session: int, units: int) -> None:
        self._books.space.books[WRITE_TIER].aside += units
        self._units[session] += units
        if not self._units[session]:
            del self._units[session]


def _places(held: Sequence[Held]) -> Places:
    units = np.array([units_of(each.length) for each in held], dtype=np.int64)
    segment = np.array([each.segment for each in held], dtype=np.int64)
    return Places(segment, np.array([each.start for each in held], dtype=np.int64), units)
