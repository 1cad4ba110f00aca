"""Leases: the right to read blocks of a path until released, expired, or their session ends.

A lease counts as a reader of every copy it reads, so that the space stays, and holds the whole path, so that its blocks stay where they
are fastest. Copies that are still being loaded belong to the lease from the start and are settled by `grant`.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import (
    Acquire,
    CopyTask,
    Fingerprint,
    ReadBlock,
    ReadPiece,
    ReadStatus,
    Reason,
)
from kvstored.core.carriage import Carriage
from kvstored.core.columnar import Grant, ReadMany
from kvstored.core.columns import FILLING, READY, SUSPECT, UNVERIFIED
from kvstored.core.copying import Acquired, Copying, CopyRun
from kvstored.core.plain_reads import (
    READ_TIER,
    Found,
    begin_reading,
    end_reading,
    find_many,
    read_many,
)
from kvstored.core.quarantine import Quarantine
from kvstored.core.readability import NOT_READABLE
from kvstored.core.referring import is_lossy
from kvstored.core.types import Part, Rows, TierId
from kvstored.errors import Busy, InvalidArgument


@dataclass(slots=True)
class Lease:
    """`copies[i]`: copy rows that key i reads (negative status tells why not); `path`: held block rows."""

    id: int
    session: int
    ns: int
    shard: int
    groups: tuple[int, ...]
    begun_s: float
    expires_s: float
    blocks: list[int] = field(default_factory=list)
    copies: list[tuple[int, ...]] = field(default_factory=list)
    tiers: list[TierId] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    path: Rows = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    many: ReadMany | None = None
    """What it reads where all keys are plain; nothing is in the lists then."""

    def all_copies(self) -> list[int]:
        if self.many is not None:
            found: list[int] = self.many.copies[self.many.hits].tolist()
            return found
        return [copy for copies in self.copies for copy in copies]

    @property
    def block_count(self) -> int:
        if self.many is not None:
            return int(np.count_nonzero(self.many.hits))
        return sum(1 for own in self.copies if own)

    def take_apart(self, blocks: list[int]) -> None:
        """From now on key by key; `blocks`: the rows of the copies."""
        assert self.many is not None, "is apart"
        for i, (copy, block) in enumerate(zip(self.many.copies.tolist(), blocks, strict=True)):
            self.blocks.append(block if copy >= 0 else -1)
            self.copies.append((copy,) if copy >= 0 else ())
            self.tiers.append(TierId(int(self.many.tiers[i])))
            self.reasons.append(self.many.reasons.get(i, Reason.UNKNOWN))
        self.many = None


class Leases:
    def __init__(
        self, books: Books, carriage: Carriage, quarantine: Quarantine, first_id: int
    ) -> None:
        self._books = books
        self._carriage = carriage
        self._quarantine = quarantine
        self.open: dict[int, Lease] = {}
        self.by_session: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next_id = first_id

    # ---- acquire, grant

    def acquire(self, call: Acquire, now_s: float) -> Acquired:
        lease = self._begin(call, now_s)
        rows = self._books.index.find(call.keys.fingerprints)
        lease.path = self._hold(call, rows)
        found = find_many(self._books, call, rows) if call.tier is READ_TIER else None
        if found and (acquired := self._acquire_many(lease, call, rows, found, now_s)) is not None:
            return acquired
        loads: list[Copying] = []
        pending: list[int] = []
        parts = self._parts(call)
        for i, row in enumerate(rows.tolist()):
            copies, tier, reason = self._read_one(call, i, row, parts, loads, pending, now_s)
            lease.blocks.append(row if copies else -1)
            lease.copies.append(copies)
            lease.tiers.append(tier)
            lease.reasons.append(reason)
        hits = np.asarray([row for row in lease.blocks if row >= 0], dtype=np.int32)
        return Acquired(lease.id, loads, pending, hits)

    def _acquire_many(
        self, lease: Lease, call: Acquire, rows: Rows, found: Found, now_s: float
    ) -> Acquired | None:
        """None, with nothing changed but evictions, where what is cold cannot be brought up as a run."""
        books, runs = self._books, list[CopyRun]()
        begin_reading(books, found.in_memory, READ_TIER)  # a hold keeps none that a GPU has too
        if len(cold := found.cold):
            places = self._carriage.room_for(cold, READ_TIER, now_s)
            if places is None:
                end_reading(books, found.in_memory, READ_TIER)
                return None
            runs = self._carriage.load_run(cold, places, np.flatnonzero(found.is_cold))
        loading = [copy for run in runs for copy in run.target_copies.tolist()]
        many = read_many(books, call, rows, found, loading, self.miss_reason)
        begin_reading(books, many.copies[many.hits & found.is_cold], READ_TIER)
        lease.many = many
        pending = [*found.coming.tolist(), *loading]
        return Acquired(lease.id, list(runs), pending, rows[many.hits])

    def _hold(self, call: Acquire, rows: Rows) -> Rows:
        """Before anything is loaded: else a load evicts what the next key reads."""
        blocks = self._books.blocks
        there = (rows >= 0) & (blocks.ns[rows] == call.ns) & (blocks.first_copy[rows] >= 0)
        path = self._books.tree.paths_of(rows[there])
        self._books.hold(path)
        return path

    def _begin(self, call: Acquire, now_s: float) -> Lease:
        books = self._books
        layout = books.layouts[call.ns]
        known = len(layout.spec.groups)
        if not call.groups_mask or call.groups_mask >> known:
            raise InvalidArgument(f"no such groups: groups={call.groups_mask:#x} known={known}")
        if call.tier is TierId.HBM and Part.CHECKPOINT in self._parts(call):
            raise InvalidArgument("window and state groups are read from dram only")
        if not 0 <= call.shard < layout.spec.shards:
            raise InvalidArgument(f"no such shard: shard={call.shard} shards={layout.spec.shards}")
        opened = len(self.by_session.get(call.session, ()))
        if opened >= books.limits.leases_per_session_max:
            raise Busy(f"too many open leases: open={opened}; release some first")
        self._next_id += 1
        lease = Lease(
            id=self._next_id,
            session=call.session,
            ns=call.ns,
            shard=call.shard,
            groups=tuple(g for g in range(known) if call.groups_mask >> g & 1),
            begun_s=now_s,
            expires_s=now_s + min(call.ttl_s, books.limits.lease_ttl_max_s),
        )
        self.open[lease.id] = lease
        self.by_session.setdefault(lease.session, set()).add(lease.id)
        heappush(self._deadlines, (lease.expires_s, lease.id))
        return lease

    def _parts(self, call: Acquire) -> tuple[Part, ...]:
        groups = self._books.layouts[call.ns].spec.groups
        chosen = {group.part for g, group in enumerate(groups) if call.groups_mask >> g & 1}
        return tuple(part for part in Part if part in chosen)

    def _read_one(
        self,
        call: Acquire,
        i: int,
        row: int,
        parts: tuple[Part, ...],
        loads: list[Copying],
        pending: list[int],
        now_s: float,
    ) -> tuple[tuple[int, ...], TierId, Reason]:
        """Copies that the key reads, counted as read; none for a miss."""
        books = self._books
        if row < 0 or books.blocks.ns[row] != call.ns:
            low, high = call.keys.fingerprints[i].tolist()
            return (), READ_TIER, self.miss_reason(-1, (low, high))
        is_required = parts[0] is not Part.CHECKPOINT
        if is_required and books.blocks.fast[row] == NOT_READABLE:
            return (), READ_TIER, self.miss_reason(row, books.fingerprint(row))
        if call.exact and is_lossy(books, row):
            return (), READ_TIER, Reason.LOSSY
        chosen: list[int] = []
        tier = call.tier
        for part in parts:
            if part is not Part.CHECKPOINT and part not in books.needed_parts(row):
                continue
            copy, source, task = self._readable(row, part, call, now_s)
            if task is not None:
                loads.append(task)
            if copy < 0 and part is Part.CHECKPOINT:
                continue
            if copy < 0 or not self._read(copy):
                for taken in chosen:
                    books.unread(taken)
                is_early = READ_TIER in books.recovering
                return (), READ_TIER, Reason.RECOVERING if is_early else Reason.NO_SPACE
            tier = max(tier, source) if chosen else source
            chosen.append(copy)
            if books.copies.state[copy] == FILLING:
                pending.append(copy)
        reason = Reason.NEVER_STORED if not chosen else Reason.UNKNOWN
        return tuple(chosen), tier, reason

    def _readable(
        self, block: int, part: Part, call: Acquire, now_s: float
    ) -> tuple[int, TierId, CopyTask | None]:
        """The copy in the tier asked for (or the one under way there), and the task to start for it; -1 where there is none."""
        books = self._books
        copy = books.copy_in(block, call.tier, part)
        if copy >= 0 and books.copies.state[copy] == READY:
            return copy, call.tier, None
        source = self._carriage.source_for(block, call.tier, part)
        if source < 0:
            return -1, call.tier, None
        tier = TierId(int(books.copies.tier[source]))
        if copy >= 0:
            return (copy, tier, None) if self._carriage.is_target(copy) else (-1, tier, None)
        if not call.load:
            return -1, tier, None
        task = self._carriage.begin(source, call.tier, now_s)
        return (-1, tier, None) if task is None else (task.target_copy, tier, task)

    def _read(self, copy: int) -> bool:
        """Count a reader, unless leases would hold more than their share of the tier."""
        books = self._books
        if not books.copies.readers[copy]:
            book = books.space.books[TierId(int(books.copies.tier[copy]))]
            share = int(book.limits.capacity_units * book.limits.lease_share)
            if book.leased + int(books.copies.units[copy]) > share:
                return False
        books.read(copy)
        return True

    def grant(self, id_: int, now_s: float, early: Container[int] = ()) -> Grant:
        """What the lease can read now. Keys whose copies are not ready (still loading, or lost) leave the lease, but for copies `early`."""
        lease = self.open.get(id_)
        if lease is None:
            return Grant(0, [])
        if lease.many is not None and self._is_ready(lease, lease.many):
            return self._grant_many(lease, lease.many, now_s)
        blocks = [self._settle(lease, i, early) for i in range(len(lease.blocks))]
        if not any(lease.copies):
            self._end(lease, keep=False, now_s=now_s)
            return Grant(0, blocks)
        return Grant(lease.id, blocks)

    def _is_ready(self, lease: Lease, many: ReadMany) -> bool:
        """Whether nothing happened to what a lease on plain blocks reads; else it is taken apart."""
        copies = self._books.copies
        if (copies.state[many.copies[many.hits]] == READY).all():
            return True
        lease.take_apart(copies.block[many.copies].tolist())
        return False

    def _grant_many(self, lease: Lease, many: ReadMany, now_s: float) -> Grant:
        if many.hits.any():
            return Grant(lease.id, [], many)
        self._end(lease, keep=False, now_s=now_s)
        return Grant(0, [], many)

    def _settle(self, lease: Lease, i: int, early: Container[int]) -> ReadBlock:
        books, copies = self._books, lease.copies[i]
        states = [int(books.copies.state[copy]) for copy in copies]
        told = [s == FILLING and copy in early for s, copy in zip(states, copies, strict=True)]
        if copies and all(t or s == READY for t, s in zip(told, states, strict=True)):
            return self._read_block(lease, i)
        status, reason, absent = ReadStatus.MISS, lease.reasons[i], (None,) * len(lease.groups)
        if copies:
            is_loading = all(state in (READY, FILLING) for state in states)
            status = ReadStatus.PENDING if is_loading else ReadStatus.MISS
            reason = Reason.UNKNOWN if is_loading else Reason.IO_ERROR
            for copy in copies:
                books.unread(copy)
            lease.copies[i] = ()
        return ReadBlock(status, lease.tiers[i], 0, absent, False, False, reason)

    def _read_block(self, lease: Lease, i: int) -> ReadBlock:
        books = self._books
        groups = books.layouts[lease.ns].spec.groups
        found: dict[int, ReadPiece] = {}
        flags = 0
        for copy in lease.copies[i]:
            flags |= int(books.copies.flags[copy])
            have = int(books.copies.have[copy])
            for row in books.pieces_of(copy):
                g, shard = int(books.pieces.group[row]), int(books.pieces.shard[row])
                if shard != (lease.shard if groups[g].sharded else 0):
                    continue
                if not groups[g].is_required and not have >> g & 1:
                    continue
                found[g] = ReadPiece(
                    group=g,
                    shard=shard,
                    length=int(books.pieces.length[row]),
                    checksum=int(books.pieces.checksum[row]),
                    place=books.place(row),
                    copy=copy,
                )
        return ReadBlock(
            status=ReadStatus.HIT,
            tier=lease.tiers[i],
            generation=int(books.blocks.generation[lease.blocks[i]]),
            pieces=tuple(found.get(g) for g in lease.groups),
            unverified=bool(flags & (UNVERIFIED | SUSPECT)),
            must_verify=bool(flags & SUSPECT),
            reason=Reason.UNKNOWN,
            lossy=not books.space.frames.lossy.isdisjoint(lease.copies[i]),
        )

    # ---- end

    def release(self, session: int, ids: Sequence[int], now_s: float) -> list[bool]:
        lost: list[bool] = []
        for id_ in ids:
            lease = self.open.get(id_)
            is_lost = lease is None or lease.session != session
            if lease is not None and not is_lost:
                self._end(lease, keep=False, now_s=now_s)
            lost.append(is_lost)
        return lost

    def renew(self, session: int, ids: Sequence[int], ttl_s: float, now_s: float) -> list[bool]:
        lost: list[bool] = []
        for id_ in ids:
            lease = self.open.get(id_)
            is_lost = lease is None or lease.session != session
            if lease is not None and not is_lost:
                lease.expires_s = now_s + min(ttl_s, self._books.limits.lease_ttl_max_s)
                heappush(self._deadlines, (lease.expires_s, id_))
            lost.append(is_lost)
        return lost

    def close_session(self, session: int, now_s: float) -> None:
        for id_ in sorted(self.by_session.get(session, ())):
            self._end(self.open[id_], keep=True, now_s=now_s)

    def expire(self, now_s: float) -> int:
        ended = 0
        while self._deadlines and self._deadlines[0][0] <= now_s:
            lease = self.open.get(heappop(self._deadlines)[1])
            if lease is not None and lease.expires_s <= now_s:
                self._end(lease, keep=True, now_s=now_s)
                ended += 1
        return ended

    def next_s(self) -> float:
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def _end(self, lease: Lease, *, keep: bool, now_s: float) -> None:
        """`keep`: the reader may still look, its copies stay in quarantine."""
        del self.open[lease.id]
        mine = self.by_session[lease.session]
        mine.discard(lease.id)
        if not mine:
            del self.by_session[lease.session]
        copies = lease.all_copies() if keep or lease.many is None else []
        if keep and copies:
            self._quarantine.keep_copies(lease.session, tuple(copies), now_s)
        elif lease.many is not None:
            end_reading(self._books, lease.many.copies[lease.many.hits], READ_TIER)
        else:
            for copy in copies:
                self._books.unread(copy)
        self._books.release_holds(lease.path)
        if len(self._deadlines) > 4 * len(self.open) + 1024:
            self._deadlines = sorted((lease.expires_s, lease.id) for lease in self.open.values())

    # ---- why not

    def miss_reason(self, block: int, fingerprint: Fingerprint) -> Reason:
        """Why a key cannot be read; `block`: its row, or -1."""
        copies = self._books.copies
        if block >= 0 and any(copies.state[c] == FILLING for c in self._books.copies_of(block)):
            return Reason.INCOMPLETE
        gone = self._books.history.get(fingerprint)
        if gone is not None:
            return gone.reason
        if self._books.recovering:
            return Reason.RECOVERING
        return Reason.NEVER_STORED if self._books.history.is_whole else Reason.UNKNOWN
