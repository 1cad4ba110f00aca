"""The state machine of the catalog: copies between tiers, and whole puts and reads."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvstored.core.calls import CopyTask, PieceMove, Reason, StoredPiece
from kvstored.core.copying import CopyRun
from kvstored.core.types import Extent, NamespaceId, Part, Place, TierId
from kvstored.errors import InvalidArgument
from tests.core.catalog_compare import PATHS
from tests.core.catalog_machine import CatalogMachine, small
from tests.core.desk import UNIT
from tests.core.oracle_rows import DRAM, NVME, Block, Copy


class MovingMachine(CatalogMachine):
    """Copies between tiers. `put`, `put_more`, `read` and `write_down` do what a life mostly consists of."""

    @precondition(lambda self: self.is_begun)
    @rule(ns=small, path=small, length=small, mask=small)
    def put(self, ns: int, path: int, length: int, mask: int) -> None:
        """Whole blocks of all shards, or some window and state groups of them, committed."""
        namer, session = self.pick(self.namers, ns), self.sessions[0]
        groups = list(range(len(namer.layout.spec.groups)))
        if mask % 3 == 0:
            groups = self.groups_of(namer, mask >> 2, keep_required=True)
        for shard in range(namer.layout.spec.shards):
            before = set(self.oracle.fills)
            keys = self.path(path, length)
            self.reserve_keys(namer, session, keys, shard, groups, ttl_s=20, told=True)
            for id_ in sorted(set(self.oracle.fills) - before):
                self.commit_fills(session, [id_])

    @precondition(lambda self: self.is_begun)
    @rule(ns=small, path=small, length=small)
    def put_more(self, ns: int, path: int, length: int) -> None:
        self.put(ns, path, length, 1)
        self.put(ns + 1, path + 1, length, 1)

    @precondition(lambda self: self.is_begun and self.oracle.blocks)
    @rule(block=small, ttl=small, shard=small)
    def read(self, block: int, ttl: int, shard: int) -> None:
        """What is there, loaded if need be, under a lease that stays open."""
        known = self.pick(list(self.oracle.blocks.values()), block)
        namer = self.namer_of(known.ns)
        path = next(path for path in PATHS if known.key in path)
        keys = path[: path.index(known.key) + 1]
        groups = list(range(len(namer.layout.spec.groups)))
        lease = self.acquire_keys(
            namer, self.sessions[1], keys, shard, groups, 1 + ttl % 20, load=True
        )
        self._end_tasks()
        self.grant_lease(lease)

    @precondition(lambda self: self.is_begun)
    @rule(ns=small, path=small, length=small, how=small)
    def load_path(self, ns: int, path: int, length: int, how: int) -> None:
        """What lies in both tiers leaves memory and is asked for again; the loads end later."""
        namer, keys = self.pick(self.namers, ns), self.path(path, length)
        self.put(ns, path, length, 1)
        self.write_down()
        for key in reversed(keys):
            block = self.oracle.blocks.get((namer.layout.id, key))
            for part in Part if block is not None else ():
                self._leave_memory(block, part)
        self.compare()
        if how % 3 == 0:
            self.prefetch(ns, path, length, 1)
        else:
            groups = list(range(len(namer.layout.spec.groups)))
            lease = self.acquire_keys(namer, self.sessions[0], keys, how, groups, 20, load=True)
            if how % 3 == 1:
                self.grant_lease(lease)

    def _leave_memory(self, block: Block, part: Part) -> None:
        """As if its bytes had gone bad, where NVMe has it too."""
        copies = self.oracle.ready(block, part)
        if [copy.tier for copy in copies] == [DRAM, NVME]:
            self._lose(copies[0])

    def _lose(self, copy: Copy) -> None:
        block = copy.block
        fingerprint = self.fingerprint_of(block.ns, block.key)
        rows = self.catalog.looking.copies_of(NamespaceId(block.ns), fingerprint)
        self.catalog.drop_copy(rows[block.copies.index(copy)], Reason.CORRUPT, self.now_s)
        self.oracle.drop(copy, Reason.CORRUPT)

    @precondition(lambda self: self.is_begun and self.tasks)
    @rule(pick=small, shard=small, load=st.booleans())
    def lose_source(self, pick: int, shard: int, load: bool) -> None:
        """What a copy under way is made from goes bad, and its path is asked for."""
        source = self.oracle.tasks[self.pick(sorted(self.tasks), pick)].source
        if source.is_doomed:
            return
        self._lose(source)
        self.compare()
        namer, key = self.namer_of(source.block.ns), source.block.key
        path = next(path for path in PATHS if key in path)
        groups = list(range(len(namer.layout.spec.groups)))
        self.acquire_keys(
            namer,
            self.sessions[0],
            path[: path.index(key) + 1],
            shard,
            groups,
            20,
            load=load,
        )

    @precondition(lambda self: self.is_begun)
    @rule()
    def write_down(self) -> None:
        self.write_back(3, flush=False)
        self._end_tasks()

    def _end_tasks(self) -> None:
        while self.tasks:
            self._end_some(min(self.tasks), 4, trim=False)

    # ---- copies between tiers

    @precondition(lambda self: self.is_begun and self.tasks)
    @rule(pick=small, outcome=small, trim=st.booleans())
    def end_task(self, pick: int, outcome: int, trim: bool) -> None:
        self._end_some(self.pick(sorted(self.tasks), pick), outcome, trim=trim)

    @precondition(lambda self: self.is_begun and self.runs())
    @rule(pick=small, at=small)
    def cut_run(self, pick: int, at: int) -> None:
        run = self.pick(self.runs(), pick)
        at = at % len(run)
        parts = self.catalog.carriage.cut(run, [at, len(run)] if at else [len(run)])
        assert sum(map(len, parts)) == len(run)
        self.begun(parts)
        self.compare()

    def runs(self) -> list[CopyRun]:
        return list({id(t): t for t in self.tasks.values() if isinstance(t, CopyRun)}.values())

    def _end_some(self, id_: int, outcome: int, *, trim: bool) -> None:
        """A task, or the whole run that the id is of, or one copy of it."""
        copying = self.tasks[id_]
        if isinstance(copying, CopyRun):
            if outcome % 5 > 2 and self._commit_run(copying, trim=trim):
                return
            for task in self.catalog.carriage.take_apart(copying):
                self.tasks[task.id] = task
        task = self.tasks.pop(id_)
        assert isinstance(task, CopyTask)
        self._end_task(task, outcome, trim=trim)

    def _commit_run(self, run: CopyRun, *, trim: bool) -> bool:
        kept = run.targets
        if trim and run.target is NVME:
            kept = kept._replace(units=np.maximum(kept.units - 1, 1))
        if not self.catalog.carriage.commit_run(run, kept, self.now_s):
            return False
        for i, id_ in enumerate(run.ids):
            del self.tasks[id_]
            self.oracle.commit_copy(id_, {(0, 0): int(kept.units[i])}, self.now_s)
        self.compare()
        return True

    def _end_task(self, task: CopyTask, outcome: int, *, trim: bool) -> None:
        if outcome % 5 > 1:
            stored = [StoredPiece(kept_of(task, move, trim=trim), 1) for move in task.moves]
            self.catalog.carriage.commit(task.id, stored, self.now_s)
            units = {
                (move.group, move.shard): sum(extent.units for extent in each.place)
                for move, each in zip(task.moves, stored, strict=True)
            }
            self.oracle.commit_copy(task.id, units, self.now_s)
        else:
            reason = Reason.CORRUPT if outcome % 5 else Reason.IO_ERROR
            self.catalog.carriage.abort(task.id, reason, self.now_s)
            self.oracle.abort_copy(task.id, reason)
        self.compare()

    @precondition(lambda self: self.is_begun)
    @rule(count=st.integers(1, 3), flush=st.booleans())
    def write_back(self, count: int, flush: bool) -> None:
        call = self.catalog.flush if flush else self.catalog.write_back
        self.attempts = []
        self.begun(call(count * UNIT, self.now_s))
        for ns, fingerprint, part, task in self.attempts:
            key = self.name_of(ns, fingerprint)
            self.oracle.try_write_back(ns, key, part, task, everything=flush)
        is_idle = not any(task is not None for *_, task in self.attempts)
        self.compare()
        if flush and is_idle and not self.discards:
            assert not self.oracle.left_behind(), "flush has nothing to do, but there is"

    @precondition(lambda self: self.is_begun)
    @rule(ns=small, path=small, length=small, nvme=st.integers(0, 9))
    def prefetch(self, ns: int, path: int, length: int, nvme: int) -> None:
        namer, keys = self.pick(self.namers, ns), self.path(path, length)
        if nvme == 0:
            with pytest.raises(InvalidArgument):
                self.catalog.prefetch(namer.layout.id, namer.batch(keys), TierId.HBM, self.now_s)
        tasks, pending = self.catalog.prefetch(namer.layout.id, namer.batch(keys), DRAM, self.now_s)
        assert len(set(pending)) == len(pending) >= len(tasks)
        loads = self.begun(tasks)
        self.oracle.prefetch(namer.layout.id, keys, loads)
        assert not loads
        self.compare()

    @precondition(lambda self: self.is_begun)
    @rule(nvme=st.booleans())
    def make_room(self, nvme: bool) -> None:
        tier = NVME if nvme else DRAM
        assert self.catalog.make_room(tier, self.now_s) == self.oracle.make_room(tier)
        self.compare()

    @precondition(lambda self: self.is_begun and self.discards)
    @rule(pick=small)
    def discarded(self, pick: int) -> None:
        token, units = self.discards.pop(pick % len(self.discards))
        self.catalog.discarded(token)
        self.oracle.discarding -= units
        self.compare()


def kept_of(task: CopyTask, move: PieceMove, *, trim: bool) -> Place:
    """A disk may store less than was reserved."""
    if not trim or task.target is not NVME:
        return move.target
    units = sum(extent.units for extent in move.target)
    left, kept = max(1, units - 1), []
    for extent in move.target:
        if left > 0:
            kept.append(Extent(extent.segment, extent.start, min(left, extent.units)))
            left -= extent.units
    return tuple(kept)
