"""Any course of puts, write-backs, evictions, removals and crashes: what a record on the disk names is never overwritten, and nothing leaks.

The disk is a model: its records as they are durable, and for each unit who wrote it last. Discards are carried out in their order, late.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstored.core.calls import Base, CopyTask, Fingerprint, Freed, Reason, Recovered, StoredPiece
from kvstored.core.types import Extent, GroupKind, GroupSpec, Heat, Place, TierId
from tests.core.desk import BLOCK_TOKENS, UNIT, Desk, freed_in, remove, spec_of
from tests.core.test_catalog_recovery import columns

NVME = TierId.NVME
UNITS = 16
KV = GroupSpec("kv", GroupKind.LINEAR, UNITS * UNIT)
I_UNITS, P_UNITS = 11, 5
DRAM_BLOCKS, NVME_UNITS = 6, 6 * UNITS
PATHS = ("abcd", "efgh", "ijkl", "a")
names = st.sampled_from("abcdefghijkl")


@dataclass(frozen=True)
class Stored:
    """A durable record. `stamp`: what its units hold as long as nobody else writes there; `base_stamp`: the same of what it refers to."""

    place: Place
    stamp: int
    content: int
    parent: Fingerprint
    base: Base | None
    base_stamp: int


class FramesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.desk = self._desk()
        self.tasks: list[CopyTask] = []
        self.discards: list[Freed] = []
        self.records: dict[Fingerprint, Stored] = {}
        self.units: dict[tuple[int, int], int] = {}
        self.stamps = 0

    def _desk(self) -> Desk:
        return Desk(spec_of("m", KV), dram=DRAM_BLOCKS * UNITS, nvme=NVME_UNITS)

    @initialize()
    def start(self) -> None:
        self.take_effects()

    # ---- steps

    @rule(path=st.sampled_from(PATHS), count=st.integers(1, 4), mix=st.integers(0, 1))
    def put(self, path: str, count: int, mix: int) -> None:
        """Blocks at one depth have one content; `mix` gives some of them another position."""
        contents = [100 + (i + mix) % 4 for i in range(len(path[:count]))]
        self.desk.put(path[:count], contents=contents)
        self.take_effects()

    @rule()
    def write_back(self) -> None:
        self.tasks += self.desk.singly(
            self.desk.catalog.write_back(3 * UNITS * UNIT, self.desk.now_s)
        )
        self.take_effects()

    @rule(data=st.data(), refers=st.booleans(), fails=st.integers(0, 5))
    def finish(self, data: st.DataObject, refers: bool, fails: int) -> None:
        if not self.tasks:
            return
        task = self.tasks.pop(data.draw(st.integers(0, len(self.tasks) - 1)))
        if task.target is TierId.DRAM or fails:
            self.write(task, refers=refers)
        else:
            self.desk.catalog.carriage.abort(task.id, Reason.IO_ERROR, self.desk.now_s)
        self.take_effects()

    def write(self, task: CopyTask, *, refers: bool) -> None:
        (move,) = task.moves
        place, base, base_stamp = move.target, None, 0
        if task.target is NVME:
            base_record = self.records.get(move.base.fingerprint) if move.base else None
            if refers and move.base and base_record and base_record.place == move.base.place:
                base, base_stamp = move.base, base_record.stamp
            place = cut(move.target, P_UNITS if base else I_UNITS)
            self.stamps += 1
            self.units.update(dict.fromkeys(units_of(place), self.stamps))
            self.records[task.fingerprint] = Stored(
                place, self.stamps, task.content, task.parent, base, base_stamp
            )
        stored = StoredPiece(place, 1, base is not None)
        self.desk.catalog.carriage.commit(task.id, [stored], self.desk.now_s)

    @rule(path=st.sampled_from(PATHS), other=st.sampled_from(PATHS))
    def store(self, path: str, other: str) -> None:
        """Two paths of the same contents, one after the other, until nothing is left to write."""
        for each in (path, other):
            self.put(each, 2, 0)
            for _ in range(3):
                self.write_back()
                while self.tasks:
                    self.write(self.tasks.pop(), refers=True)
        self.take_effects()

    @rule(name=names)
    def forget(self, name: str) -> None:
        remove(self.desk.catalog, self.desk.ns, self.desk.keys(name), self.desk.now_s)
        self.take_effects()

    @rule(name=names)
    def read(self, name: str) -> None:
        call = self.desk.namers[0].acquire(self.desk.session, [name])
        acquired = self.desk.catalog.acquire(call, self.desk.now_s)
        for task in self.desk.singly(acquired.loads):
            self.write(task, refers=False)
        grant = self.desk.catalog.grant(acquired.lease, self.desk.now_s)
        if grant.lease:
            self.desk.catalog.release(self.desk.session, [grant.lease], self.desk.now_s)
        self.desk.now_s += 1
        self.take_effects()

    @rule(tier=st.sampled_from([TierId.DRAM, NVME]), count=st.integers(1, 3))
    def evict(self, tier: TierId, count: int) -> None:
        self.desk.catalog.shed(tier, self.desk.now_s, count)
        self.take_effects()

    @rule(count=st.integers(1, 3))
    def discard(self, count: int) -> None:
        """In the order in which they came, as the shell does."""
        taken, self.discards = self.discards[:count], self.discards[count:]
        for freed in taken:
            for piece in freed.pieces:
                record = self.records.get(freed.fingerprint)
                if record is not None and record.place == piece.place:
                    del self.records[freed.fingerprint]
            self.desk.catalog.discarded(freed.token)

    @rule(seed=st.integers(0, 1000), is_bulk=st.booleans())
    def crash(self, seed: int, is_bulk: bool) -> None:
        """Everything but the durable records is lost; they are found in any order."""
        self.desk, self.tasks, self.discards = self._desk(), [], []
        for letter in "abcdefghijkl":
            self.desk.keys(letter)  # so that they have names again
        self.desk.catalog.recovery.begin(NVME)
        found = [recovered(*each) for each in self.records.items()]
        random.Random(seed).shuffle(found)
        kept = self.recover(found, is_bulk=is_bulk)
        assert all(kept), "a sound record was dropped"
        assert self.desk.catalog.recovery.done(NVME, self.desk.now_s) == 0
        frames = self.desk.catalog.books.space.frames
        assert len(frames) == sum(record.base is not None for record in self.records.values())
        self.take_effects()

    def recover(self, found: Sequence[Recovered], *, is_bulk: bool) -> list[bool]:
        """Those that refer, or lie in several extents, go one by one."""
        recovery, desk = self.desk.catalog.recovery, self.desk
        kept: list[bool] = []
        for piece in found:
            if is_bulk and piece.base is None and len(piece.place) == 1:
                kept += recovery.recover_many(NVME, desk.ns, columns([piece]), desk.now_s).tolist()
            else:
                kept += recovery.recover(NVME, desk.ns, [piece], desk.now_s)
            desk.catalog.check()
        return kept

    def take_effects(self) -> None:
        self.discards += [freed for freed in freed_in(self.desk.catalog.drain()) if freed.token]

    # ---- what holds

    @invariant()
    def books_are_right(self) -> None:
        self.desk.catalog.check()

    @invariant()
    def what_records_name_is_as_it_was_written(self) -> None:
        for record in self.records.values():
            assert {self.units[unit] for unit in units_of(record.place)} == {record.stamp}
            if record.base is not None:
                assert {self.units[u] for u in units_of(record.base.place)} == {record.base_stamp}

    @invariant()
    def what_records_name_is_not_free(self) -> None:
        extents = self.desk.catalog.books.space.books[NVME].extents
        free = {
            (0, unit)
            for run in extents.free_runs(0)
            for unit in range(run.start, run.start + run.units)
        }
        for record in self.records.values():
            assert not free.intersection(units_of(record.place))
            if record.base is not None:
                assert not free.intersection(units_of(record.base.place))

    def teardown(self) -> None:
        """Nothing is left of what was kept when all is gone."""
        for task in self.tasks:
            self.desk.catalog.carriage.abort(task.id, Reason.IO_ERROR, self.desk.now_s)
        for letter in "abcdefghijkl":
            remove(self.desk.catalog, self.desk.ns, self.desk.keys(letter), self.desk.now_s)
        self.take_effects()
        self.discard(len(self.discards))
        self.desk.catalog.check()
        assert not self.records
        assert self.desk.catalog.books.space.books[NVME].extents.free_units == NVME_UNITS


def units_of(place: Place) -> list[tuple[int, int]]:
    return [(e.segment, unit) for e in place for unit in range(e.start, e.start + e.units)]


def cut(place: Place, units: int) -> Place:
    kept: list[Extent] = []
    for extent in place:
        if units > 0:
            kept.append(Extent(extent.segment, extent.start, min(extent.units, units)))
            units -= kept[-1].units
    return tuple(kept)


def recovered(fingerprint: Fingerprint, record: Stored) -> Recovered:
    return Recovered(
        fingerprint=fingerprint,
        parent=record.parent,
        group=0,
        shard=0,
        length=UNITS * UNIT,
        checksum=1,
        place=record.place,
        generation=1,
        depth=0,
        valid_tokens=BLOCK_TOKENS,
        hits=0,
        heat=Heat.COLD,
        last_s=500.0,
        leased=False,
        content=record.content,
        base=record.base,
    )


TestFrames = FramesMachine.TestCase
TestFrames.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
