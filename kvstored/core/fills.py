"""Fills: the right to write one shard of one block. Reserve, commit, abort, expire.

A fill's pieces lie in FILLING copies of the fastest host tier; they become readable with the last piece of their part, or with the last
shard of their window or state group. Required groups are granted together or not at all.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import (
    Committed,
    FillStatus,
    Fingerprint,
    Granted,
    GrantedPiece,
    Linked,
    PieceRow,
    Reason,
    Reserve,
)
from kvstored.core.columnar import GrantedMany, Reserved
from kvstored.core.columns import DOOMED, READY
from kvstored.core.eviction import Evictor
from kvstored.core.placing import WRITE_TIER, Placing, Wanted
from kvstored.core.plain import granted_run, lay, make_ready, plain_from, ready_together
from kvstored.core.quarantine import Quarantine
from kvstored.core.readability import NOT_READABLE
from kvstored.core.referring import is_lossy
from kvstored.core.rights import Fill, FillRun, Rights
from kvstored.core.space import units_in
from kvstored.core.types import NamespaceId, SessionId, TierId
from kvstored.errors import Busy, InvalidArgument


class Fills:
    def __init__(
        self, books: Books, evictor: Evictor, quarantine: Quarantine, first_id: int
    ) -> None:
        self._books = books
        self._evictor = evictor
        self._placing = Placing(books, evictor)
        self._quarantine = quarantine
        self.open = Rights(first_id)

    # ---- reserve

    def reserve(self, call: Reserve, now_s: float) -> Reserved:
        self.check(call)
        outcomes: list[Granted | FillStatus] = []
        first = plain_from(self._books, call)
        for i in range(len(call.keys)):
            if i == first:
                many = self._reserve_plain(call, first, outcomes, now_s)
                if many is not None:
                    return Reserved(outcomes, many, len(call.keys) - first - len(many))
            outcomes.append(self._reserve_next(call, i, outcomes, now_s))
        return Reserved(outcomes)

    def _reserve_next(
        self, call: Reserve, i: int, before: Sequence[Granted | FillStatus], now_s: float
    ) -> Granted | FillStatus:
        block = self._books.index.find_one(_fingerprint(call, i))
        wanted, is_underway = self._placing.wanted(call, i, block)
        if not wanted:
            self._link(call, i, block)
            if is_underway:
                return FillStatus.IN_PROGRESS
            return self._made_exact(call, i, block, now_s)
        if FillStatus.NO_SPACE in before:  # what hangs below cannot be had either
            return FillStatus.NO_SPACE
        return self._reserve_one(call, i, wanted, now_s)

    def _reserve_plain(
        self, call: Reserve, first: int, before: Sequence[Granted | FillStatus], now_s: float
    ) -> GrantedMany | None:
        """The keys from `first` on, as far as there is room; None where they have to go one by one."""
        if FillStatus.NO_SPACE in before:
            return None
        if before and (self._books.index.find(call.keys.fingerprints[first:]) >= 0).any():
            return None  # the keys before made a row for one of them
        laid = lay(self._books, self._evictor, call, first, now_s)
        if laid is None:
            return None
        run = FillRun(
            first=self.open.next_ids(len(laid.blocks)),
            session=call.session,
            ns=call.ns,
            blocks=laid.blocks,
            fingerprints=laid.fingerprints,
            pieces=laid.pieces,
            places=laid.places,
            generations=laid.generations,
            length=laid.length,
            begun_s=now_s,
            expires_s=now_s + min(call.ttl_s, self._books.limits.fill_ttl_max_s),
            request_id=call.request_id,
            hint=call.hint,
        )
        if len(run):
            self.open.add_run(run)
        return granted_run(self._books, run, laid, first)

    def replace(self, call: Reserve, now_s: float) -> Reserved:
        """Like `reserve`, over what is there. A key that finds no room keeps its block."""
        self.check(call)
        return Reserved([self._replace_one(call, i, now_s) for i in range(len(call.keys))])

    def _replace_one(self, call: Reserve, i: int, now_s: float) -> Granted | FillStatus:
        books = self._books
        wanted, _ = self._placing.wanted(call, i, -1)
        block = books.index.find_one(_fingerprint(call, i))
        if not wanted or not self._placing.has_room(block, wanted, now_s):
            return FillStatus.NO_SPACE
        if block >= 0:  # the row stays, and with it the place in the tree
            books.blocks.holds[block] += 1
            for copy in list(books.copies_of(block)):
                books.drop_copy(copy, Reason.REPLACED, now_s)
        outcome = self._reserve_one(call, i, wanted, now_s)
        if block >= 0:
            books.release_hold(block)
        return outcome

    def _made_exact(self, call: Reserve, i: int, block: int, now_s: float) -> Granted | FillStatus:
        """A block that is there but not as it was put makes way for one that is, where there is room for it."""
        required = sum(1 << g for g in self._books.layouts[call.ns].required)
        if not call.groups_mask & required or not is_lossy(self._books, block):
            return FillStatus.PRESENT
        outcome = self._replace_one(call, i, now_s)
        return FillStatus.PRESENT if outcome is FillStatus.NO_SPACE else outcome

    def check(self, call: Reserve) -> None:
        """Raise for a call that can never be granted."""
        layout = self._books.layouts[call.ns]
        groups = layout.spec.groups
        required = sum(1 << i for i in layout.required)
        chosen = call.groups_mask & required
        if chosen and chosen != required:
            raise InvalidArgument(
                "required groups are put together or not at all: "
                f"groups={call.groups_mask:#x} required={required:#x}"
            )
        if call.groups_mask >> len(groups) or not call.groups_mask:
            raise InvalidArgument(
                f"no such groups: groups={call.groups_mask:#x} known={len(groups)}"
            )
        if _has_own_parent(call):
            raise InvalidArgument("a key is its own parent: a block's parent is the one before it")
        if not 0 <= call.shard < layout.spec.shards:
            raise InvalidArgument(f"no such shard: shard={call.shard} shards={layout.spec.shards}")
        self.check_open(call.session, len(call.keys))

    def check_open(self, session: SessionId, more: int) -> None:
        """Raise where a session would have too many."""
        opened = self.open.opened(session)
        if opened + more > self._books.limits.fills_per_session_max:
            raise Busy(f"too many open fills: open={opened}; commit or abort some first")

    def _reserve_one(
        self, call: Reserve, i: int, wanted: list[Wanted], now_s: float
    ) -> Granted | FillStatus:
        books = self._books
        valid = books.layouts[call.ns].spec.block_tokens
        if call.last_valid_tokens and i == len(call.keys) - 1:
            valid = call.last_valid_tokens
        block = books.ensure_block(call.ns, _fingerprint(call, i), valid)
        if not books.resize(block, valid):
            return FillStatus.IN_PROGRESS
        self._link(call, i, block)
        if books.blocks.first_copy[block] < 0:
            books.blocks.generation[block] = books.next_generation()
        rows = self._placing.place(block, wanted, now_s)
        if rows is None:
            books.drop_idle(block)
            return FillStatus.NO_SPACE
        return self._grant(call, i, block, rows, now_s)

    def _link(self, call: Reserve, i: int, block: int) -> None:
        """A block that was put without its parent, or before it, learns of it here."""
        books = self._books
        if block < 0 or not call.parents.known[i] or books.tree.parent[block] >= 0:
            return
        low, high = call.parents.fingerprints[i]
        tokens = books.layouts[call.ns].spec.block_tokens
        parent = books.ensure_block(call.ns, (int(low), int(high)), tokens)
        if books.link(block, parent):
            books.effects.extend(linked(books, block))
        books.drop_idle(parent)

    def _grant(self, call: Reserve, i: int, block: int, rows: list[int], now_s: float) -> Granted:
        books = self._books
        granted = self._granted_pieces(block, rows)
        books.blocks.holds[block] += 1
        fill = self._open(call, block, books.fingerprint(block), rows, granted, now_s)
        return Granted(
            fill=fill.id,
            fingerprint=fill.fingerprint,
            parent=books.parent_fingerprint(block),
            depth=int(books.tree.depth[block]),
            valid_tokens=int(books.blocks.valid[block]),
            heat=books.heat(block),
            key_index=i,
            pieces=granted,
        )

    def _open(
        self,
        call: Reserve,
        block: int,
        fingerprint: Fingerprint,
        rows: list[int],
        granted: tuple[GrantedPiece, ...],
        now_s: float,
    ) -> Fill:
        """The right itself; it counts as one hold of the block, which the caller has taken."""
        fill = Fill(
            id=self.open.next_ids(1),
            session=call.session,
            ns=call.ns,
            block=block,
            fingerprint=fingerprint,
            pieces=rows,
            granted=granted,
            begun_s=now_s,
            expires_s=now_s + min(call.ttl_s, self._books.limits.fill_ttl_max_s),
            request_id=call.request_id,
            hint=call.hint,
        )
        self.open.add(fill)
        return fill

    def _granted_pieces(self, block: int, rows: list[int]) -> tuple[GrantedPiece, ...]:
        pieces = self._books.pieces
        generation = int(self._books.blocks.generation[block])
        return tuple(
            GrantedPiece(
                group=int(pieces.group[row]),
                shard=int(pieces.shard[row]),
                length=int(pieces.length[row]),
                place=self._books.place(row),
                generation=generation,
            )
            for row in rows
        )

    # ---- commit and abort

    def commit(
        self,
        session: int,
        fills: Sequence[int],
        checksums: Sequence[Mapping[int, int]],
        now_s: float,
    ) -> list[Committed | None]:
        """None for a fill that is lost: expired, aborted, of another session, or its block was removed meanwhile."""
        outcomes: list[Committed | None] = []
        for id_, sums in zip(fills, checksums, strict=True):
            fill = self.open.get(id_)
            if fill is None or fill.session != session:
                outcomes.append(None)
                continue
            outcomes.append(self._commit_one(fill, sums, now_s))
        return outcomes

    def whole_run(self, session: int, fills: Sequence[int]) -> FillRun | None:
        """The run of fills that these are, where it can be committed together."""
        run = self.open.run(session, fills)
        return run if run is not None and ready_together(self._books, run) else None

    def commit_run(self, run: FillRun, checksums: NDArray[np.uint64], now_s: float) -> None:
        self.open.remove(run)
        make_ready(self._books, NamespaceId(run.ns), run, checksums, (len(run),), now_s)

    def _commit_one(
        self, fill: Fill, checksums: Mapping[int, int], now_s: float
    ) -> Committed | None:
        books = self._books
        copies = {int(books.pieces.copy[row]) for row in fill.pieces}
        if any(books.copies.state[copy] == DOOMED for copy in copies):
            self._end(fill, Reason.FILL_LOST, now_s, keep=False)
            return None
        for row in fill.pieces:
            books.piece_ready(row, checksums.get(int(books.pieces.group[row]), 0), now_s)
        self._forget(fill)
        for copy in copies:
            self._placing.close(copy, Reason.INCOMPLETE, now_s)
        return Committed(fill.id, fill.granted, bool(books.blocks.fast[fill.block] != NOT_READABLE))

    def abort(self, session: int, fills: Sequence[int], now_s: float) -> None:
        """The caller promises not to write any more: the space is free at once."""
        for id_ in fills:
            fill = self.open.get(id_)
            if fill is not None and fill.session == session:
                self._end(fill, Reason.FILL_LOST, now_s, keep=False)

    def close_session(self, session: int, now_s: float) -> int:
        mine = self.open.of_session(session)
        for fill in mine:
            self._end(fill, Reason.FILL_LOST, now_s, keep=True)
        return len(mine)

    def expire(self, now_s: float) -> tuple[int, int]:
        """Ended fills, and copies dropped since some of their shards never came."""
        fills = 0
        while (fill := self.open.due(now_s)) is not None:
            self._end(fill, Reason.FILL_LOST, now_s, keep=True)
            fills += 1
        return fills, self._placing.expire(now_s)

    def next_s(self) -> float:
        return min(self.open.next_s(), self._placing.next_s())

    def _end(self, fill: Fill, reason: Reason, now_s: float, *, keep: bool) -> None:
        """Undo a fill: its pieces leave their copies; `keep` puts their space into quarantine."""
        books = self._books
        copies = {int(books.pieces.copy[row]) for row in fill.pieces}
        rows: list[PieceRow] = []
        for row in fill.pieces:
            group, shard = int(books.pieces.group[row]), int(books.pieces.shard[row])
            rows.append(PieceRow(group, shard, books.remove_piece(row)))
        self._forget(fill)
        for copy in copies:
            self._placing.close(copy, reason, now_s)
        ns = NamespaceId(fill.ns)
        if keep:
            self._quarantine.keep_space(
                fill.session, WRITE_TIER, ns, fill.fingerprint, tuple(rows), now_s
            )
        else:
            books.free_rows(WRITE_TIER, ns, fill.fingerprint, tuple(rows), reason)

    def _forget(self, fill: Fill) -> None:
        self.open.remove(fill)
        self._books.release_hold(fill.block)


def _fingerprint(call: Reserve, i: int) -> Fingerprint:
    low, high = call.keys.fingerprints[i].tolist()
    return low, high


def linked(books: Books, block: int) -> list[Linked]:
    """For every ready copy of a block whose parent became known."""
    return [
        Linked(
            TierId(int(books.copies.tier[copy])),
            books.fingerprint(block),
            books.parent_fingerprint(block),
            int(books.tree.depth[block]),
            books.piece_rows(copy),
        )
        for copy in books.copies_of(block)
        if books.copies.state[copy] == READY
    ]


def held_units(books: Books, fill: Fill) -> int:
    return sum(units_in(books.place(row)) for row in fill.pieces)


def _has_own_parent(call: Reserve) -> bool:
    keys, parents = call.keys.fingerprints, call.parents
    if len(call.keys) == 1:
        return bool(parents.known[0]) and keys.tolist() == parents.fingerprints.tolist()
    return bool(((keys == parents.fingerprints).all(axis=1) & parents.known).any())
