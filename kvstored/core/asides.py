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
from kvstored.core.calls import (
    NO_FINGERPRINT,
    Fingerprint,
    PieceRow,
    Reason,
    Reserve,
)
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
from kvstored.core.planned import Planned, PlannedOne, Single, SingleGrant, together
from kvstored.core.quarantine import Quarantine
from kvstored.core.rights import Rights
from kvstored.core.space import units_of
from kvstored.core.types import Budget, Extent, Heat, NamespaceId, Rows

NAMELESS = NamespaceId(-1)
"""What lies in a place that is set aside is of no namespace yet."""
PATH_WORK = 3
"""What a path of its own takes of `settle`, in blocks more of a path."""


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
        self._planned: list[Planned | PlannedOne] = []
        self._planned_paths = self._planned_units = 0
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

    def has_room(self, ns: NamespaceId, count: int) -> bool:
        """So many may be set aside at once, without a look at what could leave: before the books of what is planned are made, too."""
        length = self._books.layouts[ns].spec.groups[0].bytes_per_block
        book, need = self._books.space.books[WRITE_TIER], units_of(length) * count
        used = book.used[Budget.GLOBAL] + self._planned_units
        limit = self._books.space.limit(WRITE_TIER, Budget.GLOBAL)
        return used + need <= limit and need <= book.extents.free_units

    @property
    def planned_work(self) -> int:
        """Of `settle`, in blocks."""
        return len(self._depths) + PATH_WORK * self._planned_paths

    def plan(
        self, call: Reserve, ids: Sequence[int], checksums: NDArray[np.uint64]
    ) -> GrantedMany | None:
        """Takes blocks whose bytes already lie there, one place a key, and tells of them as of a reservation; None, with nothing done, where that
        cannot be: a key is known, the blocks are not plain, a place is not this session's. Any number may be planned, one below the other too, until
        `settle`, which comes before anything else looks at the books."""
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
        told = self._told(call, ids[0], paths)
        for id_ in ids:
            del self._held[id_]
        units = int(paths.places.units.sum())
        self._count(call.session, -units)
        self._planned_units += units
        self._planned.append(Planned([call], paths, checksums))
        self._planned_paths += len(begins)
        return told

    def plan_one(self, put: Single, id_: int, checksum: int) -> SingleGrant | None:
        """`plan` for one block: arrays cost more than they save."""
        held = self._held.get(id_)
        if held is None or held[:3] != put[:3] or not self._is_new(put):
            return None
        books, known, parent = self._books, self._depths, put.parent
        if parent is not None and not self._may_follow(put.ns, parent):
            parent = None
        depth = 0
        if parent is not None:
            known[parent] = self._depth(parent)
            depth = 1 + known[parent]
        known[put.fingerprint] = depth
        units = units_of(put.length)
        del self._held[id_]
        self._count(put.session, -units)
        self._planned_units += units
        heat = Heat.SINK if depth < books.sink_blocks(put.ns) else Heat.COLD
        place = Extent(held.segment, held.start, units)
        grant = SingleGrant(place, books.next_generation(), parent, depth, heat)
        self._planned.append(PlannedOne(put, grant, checksum))
        self._planned_paths += 1
        return grant

    def settle(self, now_s: float) -> list[tuple[Reserve | Single, Rows]]:
        """The books of all that was planned, in its order: each put with its blocks."""
        planned, self._planned = self._planned, []
        self._planned_paths = self._planned_units = 0
        self._depths.clear()
        done: list[tuple[Reserve | Single, Rows]] = []
        for _, some in groupby(together(planned), key=lambda each: each.puts[0].ns):
            done += self._put(list(some), now_s)
        return done

    def _put(
        self, planned: Sequence[Planned], now_s: float
    ) -> Iterator[tuple[Reserve | Single, Rows]]:
        ns = planned[0].puts[0].ns
        length = self._books.layouts[ns].spec.groups[0].bytes_per_block
        laid = lay_paths(self._books, ns, [each.paths for each in planned], length)
        checksums = np.concatenate([each.checksums for each in planned])
        lengths = [count for each in planned for count in each.paths.lengths]
        make_ready(self._books, ns, laid, checksums, lengths, now_s)
        begin = 0
        for each in planned:
            blocks = len(each.paths) // len(each.puts)
            for put in each.puts:
                yield put, laid.blocks[begin : begin + blocks]
                begin += blocks

    def _is_new(self, put: Single) -> bool:
        """A plain block that nobody knows, and that becomes readable as `make_ready` does it."""
        books = self._books
        if put.ns in books.retired or WRITE_TIER in books.recovering:
            return False
        if put.fingerprint in self._depths or books.index.find_one(put.fingerprint) >= 0:
            return False
        if put.parent is None or not books.partials:
            return True
        return books.index.find_one(put.parent) not in books.partials

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
        parent = parent_of(call, i)
        return parent if self._may_follow(call.ns, parent) else None

    def _may_follow(self, ns: NamespaceId, parent: Fingerprint) -> bool:
        """Whether a block may be below this one, where that is known."""
        books = self._books
        above = books.index.find_one(parent)
        return above < 0 or can_follow(books, books.layouts[ns], above)

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
