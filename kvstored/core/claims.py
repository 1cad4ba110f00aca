"""Claims on paths that outlive a single read: pins of a tenant, and requests that run.

A pin holds its blocks and their ancestors until its time ends; a soft one gives way when nothing else can be evicted. A request holds
the path that it runs on, its last blocks are the recent window, and at its end the part that only it needed may be dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Pinned, Reason, TouchEvent
from kvstored.core.eviction import Evictor
from kvstored.core.readability import NOT_READABLE
from kvstored.core.types import UNIT_BYTES, KeyBatch, Rows, TierId, as_rows
from kvstored.errors import Busy, InvalidArgument, NoSpace, NotFound


@dataclass(frozen=True, slots=True)
class Pin:
    id: int
    session: int
    path: Rows
    blocks: int
    units: dict[TierId, int]
    is_hard: bool
    begun_s: float
    expires_s: float


@dataclass(slots=True)
class Request:
    """`path`: held rows; `sealed`: blocks that it added itself, in order; `recent`: its recent window."""

    session: int
    id: bytes
    ns: int
    path: set[int]
    sealed: list[int]
    recent: list[int]
    begun_s: float


class Claims:
    def __init__(self, books: Books, evictor: Evictor, first_id: int) -> None:
        self._books = books
        self._evictor = evictor
        self.pins: dict[int, Pin] = {}
        self.requests: dict[tuple[int, bytes], Request] = {}
        self._by_session: dict[int, dict[bytes, None]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next_id = first_id

    # ---- pins

    def pin(
        self, session: int, keys: KeyBatch, ns: int, *, is_hard: bool, ttl_s: float, now_s: float
    ) -> Pinned:
        """Pins the readable ones among the keys. NoSpace when pins would hold more than their share of a tier."""
        books = self._books
        if len(self.pins) >= books.limits.pins_max:
            raise Busy(f"too many pins: pins={len(self.pins)}")
        if not 0 < ttl_s <= books.limits.pin_ttl_max_s:
            raise InvalidArgument(
                f"pin ttl out of bounds: ttl_s={ttl_s} max={books.limits.pin_ttl_max_s}"
            )
        rows = self._readable(keys, ns)
        units = self._units(rows)
        for tier, more in units.items():
            book = books.space.books[tier]
            share = int(book.limits.capacity_units * book.limits.pin_share)
            if book.pinned + more > share:
                raise NoSpace(
                    f"pins would exceed their share: tier={tier.name.lower()} pinned={book.pinned * UNIT_BYTES} "
                    f"more={more * UNIT_BYTES} share={share * UNIT_BYTES}"
                )
        for tier, more in units.items():
            books.space.books[tier].pinned += more
        self._next_id += 1
        path = books.hold_paths(rows)
        pin = Pin(self._next_id, session, path, len(rows), units, is_hard, now_s, now_s + ttl_s)
        self.pins[pin.id] = pin
        heappush(self._deadlines, (pin.expires_s, pin.id))
        if not is_hard:
            self._evictor.soft_pins[pin.id] = path, partial(self.unpin, pin.id)
        return Pinned(pin.id, len(rows), sum(units.values()) * UNIT_BYTES)

    def unpin(self, id_: int) -> bool:
        pin = self.pins.pop(id_, None)
        if pin is None:
            return False
        self._evictor.soft_pins.pop(id_, None)
        for tier, units in pin.units.items():
            self._books.space.books[tier].pinned -= units
        self._books.release_holds(pin.path)
        return True

    def _readable(self, keys: KeyBatch, ns: int) -> Rows:
        blocks = self._books.blocks
        rows = self._books.index.find(keys.fingerprints)
        rows = rows[rows >= 0]
        rows = rows[(blocks.fast[rows] != NOT_READABLE) & (blocks.ns[rows] == ns)]
        return np.unique(rows).astype(np.int32)

    def _units(self, rows: Rows) -> dict[TierId, int]:
        books = self._books
        units: dict[TierId, int] = {}
        for block in rows.tolist():
            for part in books.needed_parts(block):
                copy = books.fastest_copy(block, part)
                tier = TierId(int(books.copies.tier[copy]))
                units[tier] = units.get(tier, 0) + int(books.copies.units[copy])
        return units

    # ---- requests

    def begin(self, session: int, id_: bytes, ns: int, keys: KeyBatch, now_s: float) -> None:
        mine = len(self._by_session.get(session, ()))
        if mine >= self._books.limits.requests_per_session_max:
            raise Busy(f"too many running requests: requests={mine}; complete some first")
        if (session, id_) in self.requests:
            raise InvalidArgument(f"request runs already: request_id={id_.hex()}")
        rows = self._run(keys, ns)
        path = self._books.hold_paths(rows)
        request = Request(session, id_, ns, set(path.tolist()), [], [], now_s)
        self.requests[session, id_] = request
        self._by_session.setdefault(session, {})[id_] = None
        self._slide(request, rows.tolist())
        self._books.touch(rows, TouchEvent.HINT, now_s)

    def extend(self, session: int, id_: bytes, keys: KeyBatch) -> int:
        """Blocks that sealed since: they join the path, and the recent window moves on."""
        request = self.request(session, id_)
        return self._extend_rows(request, self._run(keys, request.ns))

    def sealed(self, session: int, id_: bytes, block: int) -> None:
        """A block put on behalf of a request became readable. A request that is over is no error."""
        request = self.requests.get((session, id_))
        if request is not None:
            self._extend_rows(request, np.asarray([block], dtype=np.int32))

    def complete(self, session: int, id_: bytes, now_s: float, *, discard: bool) -> int:
        """The request is over. `discard` drops the blocks that it added and nobody else uses."""
        request = self.request(session, id_)
        del self.requests[session, id_]
        del self._by_session[session][id_]
        if not self._by_session[session]:
            del self._by_session[session]
        self._slide(request, [])
        self._books.release_holds(as_rows(sorted(request.path)))
        return self._discard(request, now_s) if discard else 0

    def close_session(self, session: int, now_s: float) -> None:
        for id_ in list(self._by_session.get(session, ())):
            self.complete(session, id_, now_s, discard=False)

    def request(self, session: int, id_: bytes) -> Request:
        request = self.requests.get((session, id_))
        if request is None:
            raise NotFound(f"no such request: request_id={id_.hex()}")
        return request

    def _run(self, keys: KeyBatch, ns: int) -> Rows:
        """Rows of the keys up to the first that is not there."""
        rows = self._books.index.find(keys.fingerprints)
        absent = np.flatnonzero((rows < 0) | (self._books.blocks.ns[rows] != ns))
        return rows[: absent[0]] if len(absent) else rows

    def _extend_rows(self, request: Request, rows: Rows) -> int:
        books = self._books
        fresh = [row for row in dict.fromkeys(rows.tolist()) if row not in request.path]
        if not fresh:
            return 0
        request.path.update(fresh)
        added = as_rows(fresh + self._above(fresh, request.path))
        request.path.update(added.tolist())
        books.blocks.holds[added] += 1
        request.sealed.extend(fresh)
        self._slide(request, request.recent + fresh)
        return len(fresh)

    def _above(self, rows: Sequence[int], known: set[int]) -> list[int]:
        above: dict[int, None] = {}
        for row in rows:
            parent = int(self._books.tree.parent[row])
            while parent >= 0 and parent not in known and parent not in above:
                above[parent] = None
                parent = int(self._books.tree.parent[parent])
        return list(above)

    def _slide(self, request: Request, blocks: list[int]) -> None:
        spec = self._books.layouts[request.ns].spec
        keep = -(-spec.recent_tokens // spec.block_tokens) if spec.recent_tokens else 0
        recent = self._books.recent
        gone = dict.fromkeys(request.recent)
        recent.subtract(request.recent)
        request.recent = blocks[-keep:] if keep else []
        recent.update(request.recent)
        for block in gone:
            if not recent[block]:
                del recent[block]

    def _discard(self, request: Request, now_s: float) -> int:
        books = self._books
        dropped = 0
        for block in reversed(request.sealed):
            is_alone = not books.tree.children[block] and not books.blocks.holds[block]
            if books.blocks.ns[block] != request.ns or not is_alone or books.blocks.hits[block]:
                continue
            copies = list(books.copies_of(block))
            for copy in copies:
                books.drop_copy(copy, Reason.DISCARDED, now_s)
            dropped += bool(copies)
        return dropped

    # ---- time

    def expire(self, now_s: float) -> int:
        ended = 0
        while self._deadlines and self._deadlines[0][0] <= now_s:
            ended += self.unpin(heappop(self._deadlines)[1])
        return ended

    def next_s(self) -> float:
        return self._deadlines[0][0] if self._deadlines else float("inf")
