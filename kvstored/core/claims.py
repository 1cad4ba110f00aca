"""Claims on paths that outlive a single read: pins of a tenant, and requests that run.

A pin keeps its blocks and their ancestors stored until its time ends, though not in memory while a slower tier has them; a soft one
gives way when nothing else can be evicted. A request holds the path that it runs on where it is fastest, its last blocks are the recent
window, and at its end the blocks that only it put may be dropped. Both have a bounded share of each tier.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Pinned, Reason, Reserve, TouchEvent
from kvstored.core.eviction import Evictor
from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.planned import Single
from kvstored.core.readability import NOT_READABLE
from kvstored.core.rights import Fill, FillRun
from kvstored.core.shares import Share
from kvstored.core.types import UNIT_BYTES, KeyBatch, NamespaceId, Rows, as_rows
from kvstored.errors import Busy, InvalidArgument, NoSpace, NotFound

NOBODY = 0
"""The session of pins that hints asked for."""


@dataclass(frozen=True, slots=True)
class Pin:
    id: int
    session: int
    ns: int
    rows: Rows
    path: Rows
    units: int
    is_hard: bool
    begun_s: float
    expires_s: float


@dataclass(slots=True)
class Request:
    """`path`: held rows; `sealed`: blocks that were put on its behalf, in order; `recent`: its recent window. `is_whole`: all of its path is held."""

    number: int
    session: int
    id: bytes
    ns: int
    path: set[int]
    sealed: list[int]
    recent: list[int]
    begun_s: float
    hint: Hint
    is_whole: bool = True


class Claims:
    def __init__(self, books: Books, evictor: Evictor, first_id: int) -> None:
        self._books = books
        self._evictor = evictor
        self._pinned = Share(books)
        self._running = Share(books)
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
        rows = self._readable(keys, ns)
        return self._pin(session, ns, rows, is_hard=is_hard, ttl_s=ttl_s, now_s=now_s)

    def _pin(
        self, session: int, ns: int, rows: Rows, *, is_hard: bool, ttl_s: float, now_s: float
    ) -> Pinned:
        books = self._books
        if len(self.pins) >= books.limits.pins_max:
            raise Busy(f"too many pins: pins={len(self.pins)}")
        if not 0 < ttl_s <= books.limits.pin_ttl_max_s:
            raise InvalidArgument(
                f"a pin needs a time to live: ttl_s={ttl_s} max={books.limits.pin_ttl_max_s:.0f}"
            )
        path = books.tree.paths_of(rows)
        for tier, more in self._pinned.more(path).items():
            limits = books.space.books[tier].limits
            share, used = int(limits.capacity_units * limits.pin_share), self._pinned.used[tier]
            if used + more > share:
                raise NoSpace(
                    f"pins would exceed their share: tier={tier.name.lower()} pinned={used * UNIT_BYTES} "
                    f"more={more * UNIT_BYTES} share={share * UNIT_BYTES}"
                )
        self._next_id += 1
        units = self._units(rows)
        pin = Pin(self._next_id, session, ns, rows, path, units, is_hard, now_s, now_s + ttl_s)
        self.pins[pin.id] = pin
        self._pinned.add(path)
        books.pin_holds.update(path.tolist())
        books.hold(path)
        self._show_pinned()
        heappush(self._deadlines, (pin.expires_s, pin.id))
        if not is_hard:
            self._evictor.soft_pins[pin.id] = (path, partial(self.unpin, pin.id))
        return Pinned(pin.id, len(rows), units * UNIT_BYTES)

    def namespace_of(self, id_: int) -> NamespaceId | None:
        pin = self.pins.get(id_)
        return None if pin is None else NamespaceId(pin.ns)

    def unpin(self, id_: int) -> bool:
        pin = self.pins.pop(id_, None)
        if pin is None:
            return False
        self._evictor.soft_pins.pop(id_, None)
        self._pinned.remove(pin.path)
        self._show_pinned()
        self._books.pin_holds.subtract(pin.path.tolist())
        self._books.pin_holds += Counter()
        self._books.release_holds(pin.path)
        return True

    def removed(self, blocks: Sequence[int]) -> None:
        """These blocks were removed by name: pins hold nothing of them, and one that holds nothing at all ends."""
        gone = {block for block in blocks if block in self._pinned}
        if not gone:
            return
        for block in gone:
            self._pinned.forget(block)
        fast = self._books.blocks.fast
        for pin in [pin for pin in self.pins.values() if gone.intersection(pin.rows.tolist())]:
            if (fast[pin.rows] == NOT_READABLE).all():
                self.unpin(pin.id)
        self._show_pinned()

    def _show_pinned(self) -> None:
        for tier, book in self._books.space.books.items():
            book.pinned = self._pinned.used[tier]

    def _readable(self, keys: KeyBatch, ns: int) -> Rows:
        blocks = self._books.blocks
        rows = self._books.index.find(keys.fingerprints)
        rows = rows[rows >= 0]
        rows = rows[(blocks.fast[rows] != NOT_READABLE) & (blocks.ns[rows] == ns)]
        return np.unique(rows).astype(np.int32)

    def _units(self, rows: Rows) -> int:
        books = self._books
        copies = (
            books.fastest_copy(block, part)
            for block in rows.tolist()
            for part in books.needed_parts(block)
        )
        return sum(int(books.copies.units[copy]) for copy in copies if copy >= 0)

    # ---- requests

    def begin(
        self, session: int, id_: bytes, ns: int, keys: KeyBatch, hint: Hint, now_s: float
    ) -> None:
        mine = len(self._by_session.get(session, ()))
        if mine >= self._books.limits.requests_per_session_max:
            raise Busy(f"too many running requests: requests={mine}; complete some first")
        if (session, id_) in self.requests:
            raise InvalidArgument(f"request runs already: request_id={id_.hex()}")
        rows = self._run(keys, ns)
        self._next_id += 1
        request = Request(self._next_id, session, id_, ns, set(), [], [], now_s, hint)
        self.requests[session, id_] = request
        self._by_session.setdefault(session, {})[id_] = None
        self._join(request, rows)
        self._books.touch(rows, TouchEvent.HINT, now_s)
        if hint != NO_HINT:
            self._books.hint(rows, hint, now_s)

    def extend(self, session: int, id_: bytes, keys: KeyBatch) -> int:
        """Blocks that sealed since: they join the path, and the recent window moves on."""
        request = self.request(session, id_)
        return self._join(request, self._run(keys, request.ns))

    def stored(self, put: Fill | FillRun | Reserve | Single, blocks: Rows, now_s: float) -> None:
        """Blocks of it became readable. A request that is over is no error, and neither is one of another namespace: it has no such blocks."""
        if put.hint != NO_HINT:
            self._books.hint(blocks, put.hint, now_s)
        request = self.requests.get((put.session, put.request_id)) if put.request_id else None
        if request is None or request.ns != put.ns:
            return
        for block in blocks.tolist():
            if block not in request.sealed:
                request.sealed.append(block)
                self._join(request, as_rows([block]))

    def complete(
        self, session: int, id_: bytes, now_s: float, *, discard: bool, hint: Hint = NO_HINT
    ) -> int:
        """The request is over. `discard` drops the blocks that it added and nobody else uses. What is not said now was said at its begin."""
        request = self.request(session, id_)
        del self.requests[session, id_]
        del self._by_session[session][id_]
        if not self._by_session[session]:
            del self._by_session[session]
        self._slide(request, [])
        self._books.recent.loose -= not request.is_whole
        path = as_rows(sorted(request.path))
        self._running.remove(path)
        self.tell(request.ns, path, hint.after(request.hint), now_s)
        self._books.release_holds(path)
        return self._discard(request, now_s) if discard else 0

    def tell(self, ns: int, blocks: Rows, hint: Hint, now_s: float) -> None:
        """What an engine says of the request that used these blocks."""
        if hint == NO_HINT:
            return
        books = self._books
        path = blocks[np.argsort(books.tree.depth[blocks], kind="stable")]
        path = path[books.blocks.fast[path] != NOT_READABLE]
        books.hint(path, hint, now_s)
        if hint.retention_s and len(path):
            self._retain(ns, path, hint.retention_s, now_s)

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

    def _join(self, request: Request, rows: Rows) -> int:
        """Blocks join the path, with what is above them; those beyond the share of running requests are not held. Answers how many
        were new to it."""
        books = self._books
        fresh = [row for row in dict.fromkeys(rows.tolist()) if row not in request.path]
        for row in fresh:
            added = as_rows(
                [
                    at
                    for at in books.tree.paths_of(as_rows([row])).tolist()
                    if at not in request.path
                ]
            )
            if self._is_full(added):
                self._books.recent.loose += request.is_whole
                request.is_whole = False
                break
            self._running.add(added)
            books.hold(added)
            request.path.update(added.tolist())
        recent = self._books.recent.still(request.recent, request.number)
        self._slide(request, [row for row in recent if row not in fresh] + fresh)
        return len(fresh)

    def _is_full(self, rows: Rows) -> bool:
        books = self._books.space.books
        return any(
            self._running.used[tier] + more
            > int(books[tier].limits.capacity_units * books[tier].limits.lease_share)
            for tier, more in self._running.more(rows).items()
        )

    def _slide(self, request: Request, blocks: list[int]) -> None:
        spec = self._books.layouts[request.ns].spec
        keep = -(-spec.recent_tokens // spec.block_tokens) if spec.recent_tokens else 0
        recent = self._books.recent
        recent.leave(request.recent, request.number)
        request.recent = blocks[-keep:] if keep else []
        recent.enter(request.recent, request.number)

    def _retain(self, ns: int, path: Rows, ttl_s: float, now_s: float) -> None:
        """A soft pin as a hint asks for it, which ends with its time; none where pins would hold more than they may."""
        ttl_s = min(ttl_s, self._books.limits.pin_ttl_max_s)
        with suppress(Busy, NoSpace):
            self._pin(NOBODY, ns, path, is_hard=False, ttl_s=ttl_s, now_s=now_s)

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
