"""The way of an acquire: lease what is in DRAM, bring up what is below, wait, then hand out only what proved to be what was asked for.

Two proofs stand between the books and a HIT: the full key in the arena's record equals the asked one (a fingerprint is only 128 bits),
and content that was recovered after a restart, or lies where a late writer may still write, hashes to its checksum.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvstored.core.calls import (
    Acquire,
    CopyTask,
    ReadBlock,
    ReadPiece,
    ReadStatus,
    Reason,
    TouchEvent,
)
from kvstored.core.columnar import Grant, ReadMany
from kvstored.core.copying import Copying, CopyRun
from kvstored.core.lifting import go_straight_up
from kvstored.core.naming import readable_keys
from kvstored.core.types import KeyBatch, NamespaceId, Place, SessionId, TierId, chosen_keys
from kvstored.core.usage import needs_no_look
from kvstored.errors import LeaseLost
from kvstored.store.arrivals import Arrival, Arrivals
from kvstored.store.flights import Flights
from kvstored.store.lane import Urgency
from kvstored.store.mover import Mover
from kvstored.store.shell import Shell
from kvstored.tiers.layered import Layers


class Reads:
    def __init__(self, shell: Shell, mover: Mover, flights: Flights) -> None:
        self._shell = shell
        self._mover = mover
        self._flights = flights
        self.arrivals = Arrivals(shell.catalog.looking.holds_lease)

    async def acquire(
        self, call: Acquire, *, wait_s: float, early: frozenset[int] = frozenset()
    ) -> Grant:
        """Lease the readable among the keys. Loads that take longer than `wait_s` go on and are PENDING in the answer. Copies `early`, whose keys are
        the right ones, are not waited for.

        Cancelled, it gives its lease back; the loads go on, they are worth having.
        """
        shell, now_s = self._shell, self._shell.now_s()
        acquired = shell.catalog.acquire(call, now_s, touch=False)
        shell.apply()
        if len(acquired.hits):
            touch = shell.behind.books.touch
            shell.unsettled.append(partial(touch, acquired.hits, TouchEvent.HIT, now_s))
        if acquired.loads:  # their order is looked up in whole books
            self._mover.start(acquired.loads, Urgency.DEMAND, keys=call.keys)
        try:
            # what is there already is answered before its use is written down
            catalog = shell.behind
            pending = [copy for copy in acquired.pending if copy not in early]
            if pending:
                await self._flights.wait(pending, wait_s)
                catalog = shell.catalog
            grant = catalog.grant(acquired.lease, shell.now_s(), early)
            shell.apply()
            if grant.many is None and len(grant.single) != len(call.keys):
                raise LeaseLost("the lease ran out while its blocks were being loaded")
            if grant.many is not None and self._has_right_keys(call, grant.many):
                return grant
            blocks = await self._proven(call, grant.blocks, early)
        except BaseException:
            # the lease is this caller's claim, not memory that a thread uses: it may go at once
            self.release(call.session, [acquired.lease])
            raise
        if not any(block.status is ReadStatus.HIT for block in blocks):
            self.release(call.session, [acquired.lease])
            return Grant(0, blocks)
        return Grant(grant.lease, blocks)

    async def acquire_in_hbm(
        self, call: Acquire, *, wait_s: float, layers: Layers | None = None
    ) -> Grant:
        """The same on a GPU. What is not there yet is leased in DRAM until it is: else loads of the last keys evict the first. What goes straight up
        from NVMe is leased where it goes, from the start. With `layers` the answer comes when what goes up from DRAM is on its way, layer by layer
        (`arrivals`)."""
        shell = self._shell
        tiers, _ = shell.catalog.locate(call.ns, call.keys)
        is_straight = go_straight_up(shell.catalog.books, call.ns, call.keys)
        lacking = np.flatnonzero((tiers & (1 << TierId.HBM) == 0) & ~is_straight)
        if not len(lacking):
            return await self.acquire(call, wait_s=wait_s)
        begun_s = shell.elapsed_s()
        below = replace(call, keys=chosen_keys(call.keys, lacking), tier=TierId.DRAM)
        grant = await self.acquire(below, wait_s=wait_s)

        def left_s() -> float:
            return max(0.0, wait_s - (shell.elapsed_s() - begun_s))

        try:
            keys = readable_keys(shell.catalog.books, call.ns, below.keys)
            loads, coming = shell.catalog.prefetch(call.ns, keys, TierId.HBM, shell.now_s())
            shell.apply()
            if layers is not None:
                return await self._acquire_early(call, keys, loads, layers, left_s())
            self._mover.start(loads, Urgency.DEMAND, keys=keys)
            await self._flights.wait(coming, left_s())
            return await self.acquire(call, wait_s=left_s())
        finally:
            if grant.lease:
                self.release(call.session, [grant.lease])

    async def _acquire_early(
        self,
        call: Acquire,
        keys: KeyBatch,
        loads: Sequence[Copying],
        layers: Layers,
        wait_s: float,
    ) -> Grant:
        shell = self._shell
        tasks = [
            task
            for each in loads
            for task in (
                shell.catalog.carriage.take_apart(each) if isinstance(each, CopyRun) else [each]
            )
        ]
        if not tasks:
            return await self.acquire(call, wait_s=wait_s)
        arrival = Arrival(layers, self._with_right_keys(tasks, keys))
        self._mover.start(tasks, Urgency.DEMAND, keys=keys, ended=arrival.end, arrival=arrival)
        grant = await self.acquire(call, wait_s=wait_s, early=arrival.copies)
        if grant.lease:
            self.arrivals.add(call.session, grant.lease, arrival)
        return grant

    def _with_right_keys(self, tasks: Sequence[CopyTask], keys: KeyBatch) -> frozenset[int]:
        """Targets of those whose record in DRAM has the key that was asked for."""
        names = {
            (low, high): keys.key(i) for i, (low, high) in enumerate(keys.fingerprints.tolist())
        }
        key_at = self._shell.tiers.arena.key_at
        return frozenset(
            task.target_copy
            for task in tasks
            if key_at(task.moves[0].source) == names.get(task.fingerprint)
        )

    def release(self, session: SessionId, leases: Sequence[int]) -> list[bool]:
        """Whether each lease had ended before."""
        lost = self._shell.catalog.release(session, leases, self._shell.now_s())
        self._shell.apply()
        return lost

    async def _proven(
        self, call: Acquire, blocks: Sequence[ReadBlock], early: frozenset[int]
    ) -> list[ReadBlock]:
        key_at = (
            self._shell.tiers.arena.key_at
            if call.tier is TierId.DRAM
            else self._shell.tiers.hbm_records.key_at
        )
        proven = [
            block
            if any(piece.copy in early for piece in _pieces(block))
            else self._with_right_key(call.keys.key(i), block, key_at)
            for i, block in enumerate(blocks)
        ]
        suspects = [i for i, block in enumerate(proven) if _is_suspect(block)]
        if not suspects:
            return proven
        pieces = [piece for i in suspects for piece in _pieces(proven[i])]
        bad = await self._bad_copies(call.ns, pieces)
        for i in suspects:
            if any(piece.copy in bad for piece in _pieces(proven[i])):
                proven[i] = missed(proven[i], Reason.CORRUPT)
        return proven

    async def _bad_copies(self, ns: NamespaceId, pieces: Sequence[ReadPiece]) -> set[int]:
        """Hash the pieces in the lane; copies that prove good are told to the catalog, bad ones are dropped."""
        shell = self._shell
        items = [(piece.place, piece.length, piece.checksum) for piece in pieces]
        arena = shell.tiers.arena
        good = await shell.tiers.arena_lane.submit(lambda: arena.verify(items))
        bad = {piece.copy for piece, is_good in zip(pieces, good, strict=True) if not is_good}
        for copy in sorted({piece.copy for piece in pieces}):
            if copy in bad:
                shell.catalog.drop_copy(copy, Reason.CORRUPT, shell.now_s())
                shell.counts["corrupt_copies", "dram"] += 1
            else:
                shell.catalog.verified(copy)
        if shell.showing.is_shown(ns):
            # of each a lease is held: what is there is this copy, unless it was forgotten meanwhile
            books = shell.catalog.books
            proven = [piece.place for piece in pieces if needs_no_look(books, piece.copy)]
            shell.showing.show_pieces(proven)
        shell.apply()
        return bad

    def _has_right_keys(self, call: Acquire, many: ReadMany) -> bool:
        """Of all hits; the proof of single keys tells which is not."""
        hits = many.hits
        asked = np.frombuffer(call.keys.packed, dtype=np.uint8).reshape(len(hits), -1)
        return bool(self._shell.tiers.arena.have_keys(many.hit_places, asked[hits]).all())

    def _with_right_key(
        self, key: bytes, block: ReadBlock, key_at: Callable[[Place], bytes]
    ) -> ReadBlock:
        first = next(_pieces(block), None)
        if first is None or key_at(first.place) == key:
            return block
        self._shell.counts["fingerprint_collisions", ""] += 1
        return missed(block, Reason.NEVER_STORED)


def _pieces(block: ReadBlock) -> Iterator[ReadPiece]:
    return (piece for piece in block.pieces if piece is not None)


def _is_suspect(block: ReadBlock) -> bool:
    return block.status is ReadStatus.HIT and (block.unverified or block.must_verify)


def missed(block: ReadBlock, reason: Reason) -> ReadBlock:
    return replace(
        block, status=ReadStatus.MISS, pieces=tuple(None for _ in block.pieces), reason=reason
    )
