"""The way of a put: reserve space with a record that says FILLING, commit with checksums, or abort; or put into space set aside before.

Wire columns are the groups that a reservation selected; which those were is kept here for each open fill, because a commit does not
repeat it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.asides import SetAside
from kvstored.core.calls import (
    NO_FINGERPRINT,
    Committed,
    FillStatus,
    Granted,
    Reserve,
)
from kvstored.core.catalog import Catalog
from kvstored.core.columnar import GrantedMany, Reserved
from kvstored.core.planned import Single
from kvstored.core.rights import FillRun
from kvstored.core.types import Layout, SessionId
from kvstored.errors import Busy, InvalidArgument
from kvstored.store.sessions import Session
from kvstored.store.shell import Shell, fingerprint_bytes
from kvstored.tiers.filling import FillingColumns, ReadyOne
from kvstored.tiers.record import Record, State

Columns = tuple[int, ...]
"""Group of each column of the wire's arrays."""
NO_FILL = 0
"""No fill has this id."""
TOGETHER_WORK, TOGETHER_S = 256, 0.02
"""Of small puts whose books are made at once (64 of one block, 4 of 64), and how long they wait for more. Whatever else looks at the books makes them
sooner."""


@dataclass(frozen=True, slots=True)
class OpenFill:
    """`granted`: groups that its writer has to write. `session`: the core's, the only one that may commit or abort it."""

    session: SessionId
    columns: Columns
    granted: tuple[int, ...]
    expires_s: float


class Puts:
    """`is_draining` refuses new fills; those that are open may still commit."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._fills: dict[int, OpenFill] = {}
        self._setting_aside: set[int] = set()
        """Connections."""
        self._timer: asyncio.TimerHandle | None = None
        self.is_draining = False

    def reserve(
        self, session: Session, layout: Layout, call: Reserve, columns: Columns
    ) -> Reserved:
        return self._reserved(
            session, layout, call, columns, lambda now_s: self._catalog.reserve(call, now_s)
        )

    def replace_if(
        self,
        session: Session,
        layout: Layout,
        call: Reserve,
        columns: Columns,
        generations: Sequence[int],
    ) -> Reserved:
        """All keys have these generations (0: absent) or Conflict; only in mutable namespaces."""
        if not layout.spec.mutable:
            raise InvalidArgument("namespace is not declared mutable: use Reserve")
        return self._reserved(
            session,
            layout,
            call,
            columns,
            lambda now_s: self._catalog.replace_if(call, generations, now_s),
        )

    @property
    def open_fills(self) -> int:
        return len(self._fills)

    def columns_of(self, session: Session, fill: int) -> Columns:
        """Groups of the columns of this fill's checksums; none for a fill that is lost or another session's."""
        found = self._mine(session, fill)
        return found.columns if found else ()

    def commit(
        self, session: Session, fills: Sequence[int], sums: Sequence[Mapping[int, int]]
    ) -> list[FillStatus]:
        """COMMITTED or LOST for each; all shards of a block's required groups make it visible."""
        shell = self._shell
        known: list[int] = []
        given: list[Mapping[int, int]] = []
        for fill, mine in zip(fills, sums, strict=True):
            found = self._mine(session, fill)
            known.append(fill if found else NO_FILL)
            given.append({group: mine[group] for group in found.granted} if found else {})
            if found:
                del self._fills[fill]
        outcomes = self._catalog.commit(session.core, known, given, shell.now_s())
        # the records first: an event of what became visible reads them
        for outcome, mine in zip(outcomes, given, strict=True):
            if outcome is not None:
                self._mark_ready(outcome, mine)
        shell.apply()
        return [FillStatus.LOST if done is None else FillStatus.COMMITTED for done in outcomes]

    def commit_many(
        self, session: Session, fills: Sequence[int], checksums: NDArray[np.uint64]
    ) -> bool:
        """All of them at once, one checksum each, if they are what one reservation of plain blocks granted; False, with nothing done,
        where `commit` has to look at each. Their records are written; the books follow in `settle`."""
        shell = self._shell
        if not fills or len(fills) != len(checksums) or self._mine(session, fills[0]) is None:
            return False
        run = shell.catalog.whole_run(session.core, fills)
        if run is None:
            return False
        shell.tiers.arena.ready_many(run.places, checksums)
        shell.unsettled.append(lambda: self._committed(run, checksums))
        return True

    def _committed(self, run: FillRun, checksums: NDArray[np.uint64]) -> None:
        for fill in run.ids:
            del self._fills[fill]
        self._shell.behind.commit_run(run, checksums, self._shell.now_s())
        self._count_put(run.length, len(run))

    def settle_soon(self) -> None:
        """The books of what was answered: of a few blocks with those of the puts that follow, which costs less than apart; else now."""
        shell = self._shell
        if not shell.unsettled:
            return
        if not 0 < shell.behind.asides.planned_work < TOGETHER_WORK:
            shell.settle()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TOGETHER_S, self._settle_late)

    def _settle_late(self) -> None:
        self._timer = None
        self._shell.settle()

    def set_aside(self, session: Session, layout: Layout, count: int, connection: int) -> SetAside:
        """Places for blocks that are not named yet, until `connection` ends. Their records say FILLING: nobody else is granted them after a crash while
        this process lives."""
        if self.is_draining:
            raise Busy("the daemon drains and takes no new fills")
        shell = self._shell
        now_s, length = shell.now_s(), layout.spec.groups[0].bytes_per_block
        if not shell.behind.asides.has_room(layout.id, count):
            shell.settle()  # what leaves is found in the books
        aside = shell.behind.set_aside(session.core, layout.id, length, count, now_s, connection)
        self._setting_aside.add(connection)
        shell.apply()
        if aside.places.size:
            shell.tiers.arena.fill_many(_nameless(session, layout, aside, length, now_s))
        return aside

    def disconnected(self, connection: int, *, has_hung_up: bool) -> None:
        """A client that closed it says so that it writes no more to what was set aside for it: that is free at once. Else it goes to quarantine."""
        if connection not in self._setting_aside:
            return
        self._setting_aside.discard(connection)
        if has_hung_up:
            self._catalog.asides.hung_up(connection)
        else:
            self._catalog.asides.peer_left(connection, self._shell.now_s())
        self._shell.apply()

    def put_aside(
        self,
        session: Session,
        layout: Layout,
        call: Reserve,
        ids: Sequence[int],
        checksums: NDArray[np.uint64],
    ) -> bool:
        """Whether the blocks, whose bytes lie in places set aside, are stored now: all, or with nothing done none. Their records are
        written; the books follow in `settle`."""
        self._settle_commit()
        shell, now_s = self._shell, self._shell.now_s()
        many = shell.behind.put_aside(call, ids, checksums)
        if many is None:
            return False
        shell.tiers.arena.fill_many(_columns(session, layout, call, many, now_s), checksums)
        self._planned(many.length, len(many))
        if call.contents is not None:
            shell.unsettled.append(lambda: self._tell_contents(call))
        return True

    def put_one_aside(
        self, session: Session, layout: Layout, put: Single, key: bytes, id_: int, checksum: int
    ) -> bool:
        """The same of one block."""
        self._settle_commit()
        shell, now_s = self._shell, self._shell.now_s()
        grant = shell.behind.put_one_aside(put, id_, checksum)
        if grant is None:
            return False
        ready = ReadyOne(
            digest=layout.digest,
            key=key,
            fingerprint=fingerprint_bytes(put.fingerprint),
            parent=fingerprint_bytes(grant.parent or NO_FINGERPRINT),
            extent=grant.place,
            generation=grant.generation,
            depth=grant.depth,
            heat=int(grant.heat),
            length=put.length,
            valid_tokens=layout.spec.block_tokens,
            last_s=now_s,
            owner_pid=session.pid,
            checksum=checksum,
        )
        shell.tiers.arena.fill_one(ready)
        self._planned(put.length, 1)
        return True

    def _settle_commit(self) -> None:
        """What is left undone is of puts into places set aside alone."""
        if self._shell.unsettled and not self._shell.behind.asides.planned_work:
            self._shell.settle()

    def _planned(self, length: int, blocks: int) -> None:
        if not self._shell.unsettled:
            self._shell.unsettled.append(self._put_together)
        self._count_put(length, blocks)

    def _put_together(self) -> None:
        self._shell.behind.settle(self._shell.now_s())

    def abort(self, session: Session, fills: Sequence[int]) -> None:
        for fill in fills:
            if self._mine(session, fill):
                del self._fills[fill]
        self._catalog.abort(session.core, fills, self._shell.now_s())
        self._shell.apply()

    def forget_expired(self) -> None:
        """Drop what is kept of fills that expired or went with their session."""
        now_s = self._shell.now_s()
        for fill in [fill for fill, kept in self._fills.items() if kept.expires_s <= now_s]:
            del self._fills[fill]

    @property
    def _catalog(self) -> Catalog:
        return self._shell.catalog

    def _reserved(
        self,
        session: Session,
        layout: Layout,
        call: Reserve,
        columns: Columns,
        reserve: Callable[[float], Reserved],
    ) -> Reserved:
        if self.is_draining:
            raise Busy("the daemon drains and takes no new fills")
        shell = self._shell
        now_s = shell.now_s()
        reserved = reserve(now_s)
        self._tell_contents(call)
        shell.apply()  # records of what was evicted for this are free before they are written anew
        records: list[Record] = []
        ttl_s = min(call.ttl_s, self._catalog.books.limits.fill_ttl_max_s)
        for grant in reserved.first:
            if not isinstance(grant, Granted):
                continue
            records.extend(_records(session, layout, call.keys.key(grant.key_index), grant, now_s))
            granted = tuple(piece.group for piece in grant.pieces)
            self._fills[grant.fill] = OpenFill(session.core, columns, granted, now_s + ttl_s)
        shell.tiers.arena.mark_filling(records)
        if reserved.many is not None and len(reserved.many):
            many = reserved.many
            shell.tiers.arena.fill_many(_columns(session, layout, call, many, now_s))
            open_fill = OpenFill(session.core, columns, (0,), now_s + ttl_s)
            ids = range(many.first_fill, many.first_fill + len(many))
            self._fills.update(dict.fromkeys(ids, open_fill))
        self._count(reserved, call)
        return reserved

    def _count_put(self, length: int, blocks: int) -> None:
        self._shell.counts["put_bytes", ""] += length * blocks
        self._shell.counts["put_blocks", ""] += blocks

    def _tell_contents(self, call: Reserve) -> None:
        if self._shell.tiers.coding.may_refer:
            self._shell.behind.tell_contents(call)

    def _count(self, reserved: Reserved, call: Reserve) -> None:
        counts = self._shell.counts
        for i, outcome in enumerate(reserved.first):
            status = FillStatus.GRANTED if isinstance(outcome, Granted) else outcome
            counts["reserved_keys", status.name.lower()] += 1
            if status is FillStatus.PRESENT:
                counts["shared_bytes", ""] += int(call.sizes[i].sum())
        if reserved.many is not None:
            counts["reserved_keys", FillStatus.GRANTED.name.lower()] += len(reserved.many)
        if reserved.no_space:
            counts["reserved_keys", FillStatus.NO_SPACE.name.lower()] += reserved.no_space

    def _mine(self, session: Session, fill: int) -> OpenFill | None:
        found = self._fills.get(fill)
        return found if found is not None and found.session == session.core else None

    def _mark_ready(self, done: Committed, sums: Mapping[int, int]) -> None:
        self._shell.tiers.arena.mark_ready(
            [(piece.place, sums[piece.group]) for piece in done.pieces]
        )
        self._shell.counts["put_bytes", ""] += sum(piece.length for piece in done.pieces)
        self._shell.counts["put_blocks", ""] += 1


def _columns(
    session: Session, layout: Layout, call: Reserve, many: GrantedMany, now_s: float
) -> FillingColumns:
    begin, end = many.first_key, many.first_key + len(many)
    width = call.keys.key_bytes
    return FillingColumns(
        digest=layout.digest,
        keys=call.keys.packed[begin * width : end * width],
        fingerprints=many.fingerprints,
        parents=many.parents,
        places=many.places,
        generations=many.generations,
        depths=many.depths,
        heats=many.heats,
        length=many.length,
        valid_tokens=many.valid_tokens,
        last_s=now_s,
        owner_pid=session.pid,
    )


def _nameless(
    session: Session, layout: Layout, aside: SetAside, length: int, now_s: float
) -> FillingColumns:
    count = aside.places.size
    return FillingColumns(
        digest=layout.digest,
        keys=np.arange(aside.first, aside.first + count, dtype=np.uint64).tobytes(),
        fingerprints=np.zeros((count, 2), dtype=np.uint64),
        parents=np.zeros((count, 2), dtype=np.uint64),
        places=aside.places,
        generations=aside.generations,
        depths=np.zeros(count, dtype=np.int64),
        heats=np.zeros(count, dtype=np.uint8),
        length=length,
        valid_tokens=layout.spec.block_tokens,
        last_s=now_s,
        owner_pid=session.pid,
    )


def _records(
    session: Session, layout: Layout, key: bytes, grant: Granted, now_s: float
) -> list[Record]:
    return [
        Record(
            digest=layout.digest,
            key=key,
            fingerprint=fingerprint_bytes(grant.fingerprint),
            group=piece.group,
            shard=piece.shard,
            place=piece.place,
            length=piece.length,
            checksum=0,
            stored_length=piece.length,
            stored_checksum=0,
            generation=piece.generation,
            parent=fingerprint_bytes(grant.parent),
            valid_tokens=grant.valid_tokens,
            depth=grant.depth,
            last_s=now_s,
            heat=int(grant.heat),
            owner_pid=session.pid,
            state=State.FILLING,
        )
        for piece in grant.pieces
    ]
