"""The catalog: every decision of the store, behind synchronous calls that succeed whole or raise with nothing changed.

One thread owns it. Time comes in as `now_s` (wall clock seconds). After each call the shell carries out `drain()`. The parts are beside it:
books (rows and what follows from a change), fills, leases, claims (pins and requests), carriage (tasks), looking; and `recovery`, whose calls a start makes.
"""

from collections.abc import Container, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.asides import Asides, SetAside
from kvstored.core.books import Books
from kvstored.core.calls import (
    Acquire,
    Committed,
    Expired,
    Limits,
    Pinned,
    Reason,
    Reserve,
    TierLimits,
    TouchEvent,
)
from kvstored.core.carriage import Carriage
from kvstored.core.checkpoints import expire_checkpoints
from kvstored.core.checks import check
from kvstored.core.claims import Claims
from kvstored.core.columnar import AnyEffect, Grant, GrantedMany, Reserved
from kvstored.core.columns import FILLING, READY, UNVERIFIED
from kvstored.core.copying import Acquired, Copying
from kvstored.core.demotion import Demotion
from kvstored.core.eviction import Evictor
from kvstored.core.fills import Fills
from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.leases import Leases
from kvstored.core.looking import Looking
from kvstored.core.naming import check_replaceable, forget_blocks, readable_rows
from kvstored.core.plan import Bounds
from kvstored.core.planned import Single, SingleGrant
from kvstored.core.quarantine import Quarantine
from kvstored.core.recovery import Recovery
from kvstored.core.referring import tell_contents
from kvstored.core.rights import FillRun
from kvstored.core.schedule import Scheduler
from kvstored.core.types import (
    KeyBatch,
    Layout,
    Match,
    NamespaceId,
    Rows,
    SessionId,
    TierId,
    as_rows,
)
from kvstored.core.usage import blocks_in
from kvstored.core.views import TierUse
from kvstored.errors import Busy, NotFound


class Catalog:
    """`epoch`: this boot of the daemon; ids of fills, leases and pins carry it, so that those of another boot are lost."""

    def __init__(
        self, *, tiers: Sequence[TierLimits], policy: str, limits: Limits, epoch: int
    ) -> None:
        first_id = epoch << 32
        self.books = Books(tiers=tiers, policy=policy, limits=limits, epoch=epoch)
        self._evictor = Evictor(self.books)
        self.feedback = self._evictor.feedback
        self.quarantine = Quarantine(self.books)
        self.carriage = Carriage(self.books, self._evictor)
        self.demotion = Demotion(self.books, self.carriage)
        self.scheduler = Scheduler(self.books, self._evictor, self.carriage)
        self.admission, self.page_ins = self.scheduler.admission, self.scheduler.page_ins
        self._fills = Fills(self.books, self._evictor, self.quarantine, first_id)
        self.asides = Asides(self.books, self._evictor, self.quarantine, self._fills.open)
        self._leases = Leases(self.books, self.carriage, self.quarantine, first_id)
        self._claims = Claims(self.books, self._evictor, first_id)
        self.recovery = Recovery(self.books, self.quarantine)
        self.looking = Looking(self.books, self._fills, self._leases, self._claims, self.carriage)
        self._sessions: set[int] = set()
        self._last_session = 0

    def drain(self) -> list[AnyEffect]:
        """What the shell has to do for the calls since the last drain, in order."""
        effects, self.books.effects = self.books.effects, []
        return effects

    # ---- capacity, namespaces, sessions

    def grow(self, tier: TierId, segment: int, units: int) -> None:
        self.books.space.books[tier].extents.add_segment(segment, units)

    def add_namespace(self, layout: Layout) -> None:
        """Known ones are left as they are; one that was retired lives again."""
        if layout.id in self.books.layouts:
            self.books.retired.discard(layout.id)
            return
        self.books.add_layout(layout)

    def retire(self, ns: NamespaceId) -> None:
        """Its blocks are first victims from now on; it can still be read and put to."""
        self.books.retired.add(ns)
        self.books.policy.first(self.books.copies_of_many(blocks_in(self.books, ns)))

    def remove_namespace(self, ns: NamespaceId, now_s: float) -> int:
        """Forget all its blocks; what is leased is freed when its readers are done. Answers how many were readable.

        The layout stays known to the catalog, since open fills and leases still name it.
        """
        self.books.retired.add(ns)
        return self._forget_blocks(blocks_in(self.books, ns).tolist(), Reason.REMOVED, now_s)

    def open_session(self, now_s: float) -> SessionId:
        if len(self._sessions) >= self.books.limits.sessions_max:
            raise Busy(f"too many sessions: sessions={len(self._sessions)}")
        self._last_session += 1
        self._sessions.add(self._last_session)
        return SessionId(self._last_session)

    def close_session(self, session: SessionId, now_s: float, *, writer_dead: bool) -> None:
        """Its fills, leases and requests end. While its process may live, their space stays in quarantine."""
        self._claims.close_session(session, now_s)
        self._fills.close_session(session, now_s)
        self.asides.close_session(session, now_s)
        self._leases.close_session(session, now_s)
        self._sessions.discard(session)
        if writer_dead:
            self.quarantine.writer_dead(session)

    # ---- reading

    def match(
        self,
        ns: NamespaceId,
        keys: KeyBatch,
        last_valid_tokens: int,
        now_s: float,
        *,
        exact: bool = False,
    ) -> Match:
        return self.looking.match(ns, keys, exact=exact)

    def locate(
        self, ns: NamespaceId, keys: KeyBatch
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """Per key: bit t where tier t holds all required parts, bit 7 where it is readable at all; and its generation."""
        return self.looking.locate(ns, keys)

    def acquire(self, call: Acquire, now_s: float, *, touch: bool = True) -> Acquired:
        """A lease over the readable keys; what must be loaded first is told. Follow with `grant`, and without `touch` with a touch of the hits."""
        self._know(call.session)
        acquired = self._leases.acquire(call, now_s)
        if touch and len(acquired.hits):
            self.books.touch(acquired.hits, TouchEvent.HIT, now_s)
        return acquired

    def grant(self, lease: int, now_s: float, early: Container[int] = ()) -> Grant:
        """What a fresh lease can read now, of copies `early` also before their bytes are there; the rest leaves it. One that reads nothing ends (id 0)."""
        return self._leases.grant(lease, now_s, early)

    def release(self, session: SessionId, leases: Sequence[int], now_s: float) -> list[bool]:
        """True for each lease that had ended before: what was read under it is void."""
        return self._leases.release(session, leases, now_s)

    def renew(
        self, session: SessionId, leases: Sequence[int], ttl_s: float, now_s: float
    ) -> list[bool]:
        return self._leases.renew(session, leases, ttl_s, now_s)

    def verified(self, copy: int) -> None:
        """The content of a recovered copy matched its checksums."""
        self.books.copies.flags[copy] &= ~UNVERIFIED & 0xFF

    def drop_copy(self, copy: int, reason: Reason, now_s: float) -> None:
        """Forget one copy, for example since its bytes are bad. One that is forgotten already is left alone."""
        if self.books.copies.state[copy] in (FILLING, READY):
            self.books.drop_copy(copy, reason, now_s)

    def touch(self, ns: NamespaceId, keys: KeyBatch, now_s: float, hint: Hint = NO_HINT) -> int:
        rows = as_rows(readable_rows(self.books, ns, keys))
        self.books.touch(rows, TouchEvent.HINT, now_s)
        self._claims.tell(ns, rows, hint, now_s)
        return len(rows)

    # ---- writing

    def reserve(self, call: Reserve, now_s: float) -> Reserved:
        self._know(call.session)
        return self._fills.reserve(call, now_s)

    def tell_contents(self, call: Reserve) -> None:
        """What the blocks of a put contain, as far as they are known by now."""
        tell_contents(self.books, call)

    def replace_if(self, call: Reserve, generations: Sequence[int], now_s: float) -> Reserved:
        """Reserve over what is there, if every key has the given generation (0: absent, and nobody is writing it).

        Readers of the old keep it; new ones miss until the commit, also when the writer never comes to it.
        """
        self._know(call.session)
        _, current = self.locate(call.ns, call.keys)
        check_replaceable(self.books, call, current.tolist(), generations, self.carriage.is_target)
        return self._fills.replace(call, now_s)

    def commit(
        self,
        session: SessionId,
        fills: Sequence[int],
        checksums: Sequence[Mapping[int, int]],
        now_s: float,
    ) -> list[Committed | None]:
        """`checksums`: xxh3-64 by group, for each fill. None for a lost one."""
        requests = [self._fills.open.get(id_) for id_ in fills]
        outcomes = self._fills.commit(session, fills, checksums, now_s)
        for fill, outcome in zip(requests, outcomes, strict=True):
            if fill is not None and outcome is not None and outcome.visible:
                self._claims.stored(fill, as_rows([fill.block]), now_s)
        return outcomes

    def whole_run(self, session: SessionId, fills: Sequence[int]) -> FillRun | None:
        """The fills of one `GrantedMany` in order, if they are that and `commit_run` can take them together."""
        return self._fills.whole_run(session, fills)

    def commit_run(self, run: FillRun, checksums: NDArray[np.uint64], now_s: float) -> None:
        """As `commit` for all its fills: all are visible then. No other call may have come since `whole_run`."""
        self._fills.commit_run(run, checksums, now_s)
        self._claims.stored(run, run.blocks, now_s)

    def abort(self, session: SessionId, fills: Sequence[int], now_s: float) -> None:
        """Fills and places set aside that nobody will write to any more."""
        self._fills.abort(session, fills, now_s)
        self.asides.give_back(session, fills)

    def set_aside(
        self, session: SessionId, ns: NamespaceId, length: int, count: int, now_s: float, peer: int
    ) -> SetAside:
        """Places for puts to come, which `put_aside` or `abort` ends, else the session or `asides.peer_left`. Before `settle` where `asides.has_room`."""
        self._know(session)
        return self.asides.set_aside(session, ns, length, count, now_s, peer)

    def put_aside(
        self, call: Reserve, ids: Sequence[int], checksums: NDArray[np.uint64]
    ) -> GrantedMany | None:
        """A put of blocks whose bytes lie in places set aside, one a key; None where they have to be reserved. `settle` comes before all other calls."""
        self._know(call.session)
        self._fills.check(call)
        return self.asides.plan(call, ids, checksums)

    def put_one_aside(self, put: Single, id_: int, checksum: int) -> SingleGrant | None:
        """The same of one block."""
        self._fills.check_open(put.session, 1)
        return self.asides.plan_one(put, id_, checksum)

    def settle(self, now_s: float) -> None:
        """All blocks of `put_aside` are visible then."""
        for put, blocks in self.asides.settle(now_s):
            self._claims.stored(put, blocks, now_s)

    def clear_rows(self, ns: NamespaceId, rows: Rows, now_s: float) -> int:
        """Forget these rows as far as they still are blocks of the namespace."""
        mine = rows[self.books.blocks.ns[rows] == ns]
        return self._forget_blocks(mine.tolist(), Reason.REMOVED, now_s)

    # ---- claims

    def pin(
        self,
        session: SessionId,
        ns: NamespaceId,
        keys: KeyBatch,
        *,
        hard: bool,
        ttl_s: float,
        now_s: float,
    ) -> Pinned:
        return self._claims.pin(session, keys, ns, is_hard=hard, ttl_s=ttl_s, now_s=now_s)

    def pin_namespace(self, pin: int) -> NamespaceId | None:
        return self._claims.namespace_of(pin)

    def unpin(self, pin: int, now_s: float) -> bool:
        return self._claims.unpin(pin)

    def begin_request(
        self,
        session: SessionId,
        request_id: bytes,
        ns: NamespaceId,
        keys: KeyBatch,
        now_s: float,
        hint: Hint = NO_HINT,
    ) -> None:
        self._know(session)
        self._claims.begin(session, request_id, ns, keys, hint, now_s)

    def extend_request(
        self, session: SessionId, request_id: bytes, keys: KeyBatch, now_s: float
    ) -> int:
        return self._claims.extend(session, request_id, keys)

    def complete_request(
        self,
        session: SessionId,
        request_id: bytes,
        discard: bool,
        now_s: float,
        hint: Hint = NO_HINT,
    ) -> int:
        return self._claims.complete(session, request_id, now_s, discard=discard, hint=hint)

    def request_namespace(self, session: SessionId, request_id: bytes) -> NamespaceId:
        return NamespaceId(self._claims.request(session, request_id).ns)

    # ---- copies between tiers: `carriage` ends them

    def write_back(self, bytes_max: int, now_s: float) -> Sequence[Copying]:
        return self.scheduler.run(Bounds(write_bytes=bytes_max), now_s).writes

    def flush(self, bytes_max: int, now_s: float) -> list[Copying]:
        """Like write_back, admitting everything dirty: for the drain. Empty when nothing is left to begin."""
        return self.demotion.flush(bytes_max, now_s) + self.scheduler.write_back.flush(
            bytes_max, now_s
        )

    def make_room(self, tier: TierId, now_s: float, copies_max: int | None = None) -> int:
        """Above the high watermark evict down to the low one; after `copies_max` the next call goes on. Copies that left."""
        return self.scheduler.run(Bounds({tier: copies_max}), now_s).evicted[tier]

    def shed(self, tier: TierId, now_s: float, copies_max: int) -> int:
        """Evict about so many copies whatever the watermarks: the tier's index runs full, not its space. Copies that left."""
        return self._evictor.shed(tier, now_s, copies_max)

    def discarded(self, token: int) -> None:
        """The records of a Freed on NVMe are off the disk: its space may be granted again."""
        self.books.space.discarded(token)

    def prefetch(
        self, ns: NamespaceId, keys: KeyBatch, target: TierId, now_s: float
    ) -> tuple[list[Copying], list[int]]:
        """Copies that bring the readable keys up to `target`, and the target copies to wait for (those under way included)."""
        return self.carriage.prefetch(readable_rows(self.books, ns, keys), target, now_s)

    # ---- time

    def expire(self, now_s: float) -> Expired:
        fills, incomplete = self._fills.expire(now_s)
        leases = self._leases.expire(now_s)
        pins = self._claims.expire(now_s)
        self.quarantine.expire(now_s)
        return Expired(fills, leases, pins, incomplete + expire_checkpoints(self.books, now_s))

    def next_expiry_s(self) -> float:
        parts = self._fills, self._leases, self._claims, self.quarantine, self.books.lifetimes
        return min(part.next_s() for part in parts)

    @property
    def recovering(self) -> frozenset[TierId]:
        return frozenset(self.books.recovering)

    # ---- looking inside

    @property
    def blocks(self) -> int:
        """Rows of blocks, those that only stand in as parents included."""
        return self.books.blocks.live

    @property
    def counts(self) -> dict[str, int]:
        return {
            "sessions": len(self._sessions),
            "fills": len(self._fills.open),
            "asides": len(self.asides),
            "leases": len(self._leases.open),
            "pins": len(self._claims.pins),
            "requests": len(self._claims.requests),
            "tasks": len(self.carriage),
            "quarantined": len(self.quarantine),
            "tree_nodes": self.books.tree.node_count,
        }

    def tier_use(self) -> list[TierUse]:
        return self.books.space.use()

    def check(self) -> None:
        """Recompute every derived figure and compare: for tests."""
        check(self.books, self._fills, self.asides, self._leases, self._claims, self.carriage)

    # ---- inside

    def _know(self, session: int) -> None:
        if session not in self._sessions:
            raise NotFound(f"no such session: session={session}; open a new one")

    def _forget_blocks(self, rows: Sequence[int], reason: Reason, now_s: float) -> int:
        forgotten = forget_blocks(self.books, rows, reason, now_s)
        self._claims.removed(rows)
        return forgotten
