"""Space that a session holds for puts to come: its client writes there first and names the blocks when their bytes are in place.

So a put of plain blocks is one message. It lasts as long as the connection that it was asked for on, and its session, in a bounded share of the tier.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import NO_FINGERPRINT, Fingerprint, PieceRow, Reason, Reserve
from kvstored.core.columnar import FreedMany, GrantedMany, Places, named, no_places
from kvstored.core.eviction import Evictor
from kvstored.core.placing import WRITE_TIER
from kvstored.core.plain import (
    Paths,
    can_follow,
    lay_paths,
    make_ready,
    parent_of,
    paths_from,
    ready_at_once,
)
from kvstored.core.quarantine import Quarantine
from kvstored.core.rights import Rights
from kvstored.core.space import units_of
from kvstored.core.types import Budget, Extent, Heat, NamespaceId, Rows

NAMELESS = NamespaceId(-1)
"""What lies in a place that is set aside is of no namespace yet."""
PATH_WORK = 7


class Held(NamedTuple):
    """A place that is set aside: `length` bytes for a block of the namespace."""

    session: int
    ns: int
    length: int
    segment: int
    start: int
    peer: int
    """The connection that it was asked for on."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Places with the ids `first`, `first` + 1, ..."""

    first: int
    places: Places
    generations: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Planned:
    """A put into places set aside: its blocks are stored, the books of it are not made yet. `many`: as a reservation would tell it."""

    call: Reserve
    many: GrantedMany
    paths: Paths
    checksums: NDArray[np.uint64]


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
        self._planned: list[Planned] = []
        self._planned_paths = 0
        self._depths: dict[Fingerprint, int] = {}
        """Of the blocks that are planned, and of those above them that will stand in because nobody knows them."""

    def __len__(self) -> int:
        return len(self._held)

    def set_aside(
        self, session: int, ns: NamespaceId, length: int, count: int, now_s: float, peer: int
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
            self._held[first + i] = Held(session, ns, length, segment, start, peer)
        self._count(session, units * count)
        return SetAside(first, places, books.next_generations(count))

    @property
    def planned_work(self) -> int:
        """Of `settle`, in what one block more of a path takes: a path takes several."""
        return len(self._depths) + PATH_WORK * self._planned_paths

    def plan(
        self, call: Reserve, ids: Sequence[int], checksums: NDArray[np.uint64]
    ) -> Planned | None:
        """Takes blocks whose bytes already lie there, one place a key; None, with nothing done, where that cannot be: a key is known,
        the blocks are not plain, a place is not this session's. Any number may be planned, one below the other too, until `settle`, which
        comes before anything else looks at the books."""
        books, held = self._books, self._mine(call, ids)
        begins = [] if held is None else self._begins(call)
        if held is None or not begins or not ready_at_once(books, call, begins):
            return None
        ends = [*begins[1:], len(ids)]
        paths = Paths(
            call.keys.fingerprints,
            _places(held),
            books.next_generations(len(ids)),
            lengths=[end - begin for begin, end in zip(begins, ends, strict=True)],
            parents=[self._above(call, begin) for begin in begins],
        )
        planned = Planned(call, self._told(call, ids[0], paths), paths, checksums)
        for id_ in ids:
            del self._held[id_]
        self._count(call.session, -int(paths.places.units.sum()))
        self._planned.append(planned)
        self._planned_paths += len(begins)
        return planned

    def settle(self, now_s: float) -> list[tuple[Reserve, Rows]]:
        """The books of all that was planned, in its order: each call with its blocks."""
        planned, self._planned = self._planned, []
        self._planned_paths = 0
        self._depths.clear()
        done: list[tuple[Reserve, Rows]] = []
        for _, together in groupby(planned, key=lambda each: each.call.ns):
            done += self._put(list(together), now_s)
        return done

    def _put(self, planned: Sequence[Planned], now_s: float) -> Iterator[tuple[Reserve, Rows]]:
        ns, length = planned[0].call.ns, planned[0].many.length
        laid = lay_paths(self._books, ns, [each.paths for each in planned], length)
        checksums = np.concatenate([each.checksums for each in planned])
        lengths = [count for each in planned for count in each.paths.lengths]
        make_ready(self._books, ns, laid, checksums, lengths, now_s)
        begin = 0
        for each in planned:
            end = begin + len(each.many)
            yield each.call, laid.blocks[begin:end]
            begin = end

    def _begins(self, call: Reserve) -> list[int]:
        """Where its paths begin, if these are plain blocks that nobody knows; else nothing."""
        books = self._books
        if len(call.keys) > 1:
            begins = paths_from(books, call)
            names = named(call.keys.fingerprints) if begins and self._depths else []
            return begins if self._depths.keys().isdisjoint(names) else []
        if call.last_valid_tokens or not books.layouts[call.ns].is_plain:
            return []
        low, high = call.keys.fingerprints[0].tolist()
        is_known = (low, high) in self._depths or books.index.find_one((low, high)) >= 0
        return [] if is_known or WRITE_TIER in books.recovering else [0]

    def _above(self, call: Reserve, i: int) -> Fingerprint | None:
        """What key i is below; None where that is no block to follow."""
        if not call.parents.known[i]:
            return None
        books, parent = self._books, parent_of(call, i)
        above = books.index.find_one(parent)
        can = above < 0 or can_follow(books, books.layouts[call.ns], above)
        return parent if can else None

    def _told(self, call: Reserve, first: int, paths: Paths) -> GrantedMany:
        """Also notes how deep they are, for paths that go on below."""
        books, known = self._books, self._depths
        parents = np.zeros((len(paths), 2), dtype=np.uint64)
        parents[1:] = paths.fingerprints[:-1]
        names, depths = named(paths.fingerprints), list[int]()
        for parent, count in zip(paths.parents, paths.lengths, strict=True):
            depth, begin = 0, len(depths)
            if parent is not None:
                known[parent] = self._depth(parent)
                depth = 1 + known[parent]
            parents[begin] = parent or (0, 0)
            depths += range(depth, depth + count)
            known.update(zip(names[begin : begin + count], depths[begin:], strict=True))
        deep = np.array(depths, dtype=np.int64)
        heats = np.where(deep < books.sink_blocks(call.ns), int(Heat.SINK), int(Heat.COLD))
        return GrantedMany(
            first_fill=first,
            first_key=0,
            fingerprints=paths.fingerprints,
            parents=parents,
            depths=deep,
            heats=heats.astype(np.uint8),
            generations=paths.generations,
            places=paths.places,
            valid_tokens=books.layouts[call.ns].spec.block_tokens,
            length=int(call.sizes[0, 0]),
        )

    def _depth(self, block: Fingerprint) -> int:
        """0 for one that is not known: it will stand in as a root."""
        row = self._books.index.find_one(block)
        return int(self._books.tree.depth[row]) if row >= 0 else self._depths.get(block, 0)

    def give_back(self, session: int, ids: Sequence[int]) -> None:
        """The caller promises not to write there any more: the space is free at once. Others' ids are left alone."""
        known = self._held
        mine = [id_ for id_ in ids if id_ in known and known[id_].session == session]
        self._free([self._held.pop(id_) for id_ in dict.fromkeys(mine)])

    def hung_up(self, peer: int) -> None:
        """As the same of all that it holds: its session may live on, but nobody has these ids any more."""
        self._free([self._held.pop(id_) for id_ in self._of_peer(peer)])

    def _free(self, held: Sequence[Held]) -> None:
        if not held:
            return
        places = _places(held)
        for each in held:
            self._count(each.session, -units_of(each.length))
        self._books.space.give_memory(WRITE_TIER, places)
        names = np.zeros((len(held), 2), dtype=np.uint64)
        freed = FreedMany(WRITE_TIER, NAMELESS, names, places, Reason.FILL_LOST)
        self._books.effects.append(freed)

    def close_session(self, session: int, now_s: float) -> None:
        self._end([id_ for id_, held in self._held.items() if held.session == session], now_s)

    def peer_left(self, peer: int, now_s: float) -> None:
        """It was not the one who ended its connection."""
        self._end(self._of_peer(peer), now_s)

    def _of_peer(self, peer: int) -> list[int]:
        return [id_ for id_, held in self._held.items() if held.peer == peer]

    def _end(self, ids: Sequence[int], now_s: float) -> None:
        """Their client may still write: the space stays in quarantine."""
        for id_ in ids:
            held = self._held.pop(id_)
            units = units_of(held.length)
            self._count(held.session, -units)
            row = PieceRow(0, 0, (Extent(held.segment, held.start, units),))
            self._quarantine.keep_space(
                held.session, WRITE_TIER, NAMELESS, NO_FINGERPRINT, (row,), now_s
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
