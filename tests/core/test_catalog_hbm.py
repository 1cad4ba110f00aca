"""Three tiers under random calls: after each of them every derived figure is as recomputed, and what callers hold stays.

The state machine beside this compares eviction with an oracle in two tiers; here the fastest tier comes and goes above them.
"""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from kvstored.core.calls import CopyTask, FillStatus, PieceMove, ReadStatus, Reason, StoredPiece
from kvstored.core.columnar import Grant
from kvstored.core.columns import READY
from kvstored.core.copying import Copying, CopyRun
from kvstored.core.lifting import go_straight_up
from kvstored.core.types import GroupSpec, NamespaceSpec, Place, TierId
from kvstored.errors import InvalidArgument, KvstoredError
from tests.core.desk import LINEAR, SHARDED, SPARSE, STATE, Desk, freed_in, remove, spec_of

PATHS = ("abcdefgh", "abcdijkl", "mnop", "qrstuv")
STEPS = 300


def twice(group: GroupSpec) -> GroupSpec:
    return replace(group, bytes_per_block=2 * group.bytes_per_block)


class Storm:
    """Callers who put, read, pin and vanish, with tasks that end late, well or badly."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.desk = Desk(
            spec_of("plain", mutable=True),
            spec_of("hybrid", replace(twice(LINEAR), resident=True), twice(SPARSE), STATE),
            dram=12,
            nvme=16,
            hbm=8,
            policy=policy,
            high=0.9,
            low=0.6,
        )
        self.tasks: list[Copying] = []
        self.leases: list[int] = []
        self.pins: list[int] = []
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        desk = self.desk
        actions = [self.put, self.put, self.read, self.read_in_hbm, self.read_in_hbm]
        actions += [self.prefetch, self.end_task, self.end_task, self.write_down, self.demote]
        actions += [
            self.release,
            self.forget,
            self.pin,
            self.tidy,
            self.read_across,
            self.read_straight,
            self.raise_,
        ]
        action = self.rng.choice(actions)
        action()
        for effect in freed_in(desk.catalog.drain()):
            if effect.token:
                desk.catalog.discarded(effect.token)
        desk.catalog.check()

    def names(self) -> tuple[int, str, str | None]:
        path = self.rng.choice(PATHS)
        begin = self.rng.randrange(len(path))
        end = self.rng.randint(begin + 1, len(path))
        return self.rng.randrange(2), path[begin:end], path[begin - 1] if begin else None

    def put(self) -> None:
        ns, names, under = self.names()
        status = self.desk.put(names, ns=ns, under=under)
        self.seen["put"] += FillStatus.GRANTED in status

    def read(self) -> None:
        self._read(TierId.DRAM, *self.names()[:2])

    def read_in_hbm(self) -> None:
        self._read(TierId.HBM, *self.names()[:2])

    def _read(self, tier: TierId, ns: int, names: str) -> None:
        namer, catalog = self.desk.namers[ns], self.desk.catalog
        groups = [0, 1] if ns else [0]
        call = namer.acquire(self.desk.session, names, groups=groups, tier=tier)
        acquired = catalog.acquire(call, self.desk.now_s)
        self.tasks += acquired.loads
        self.seen[f"from {tier.name}"] += bool(acquired.loads)
        catalog.check()
        if self.rng.random() < 0.7:
            while self.tasks:
                self.end_task()
        grant = catalog.grant(acquired.lease, self.desk.now_s)
        self.seen[f"read in {tier.name}"] += self._hits(grant)
        if grant.lease:
            self.leases.append(grant.lease)

    def _hits(self, grant: Grant) -> bool:
        return any(block.status is ReadStatus.HIT for block in grant.blocks)

    def prefetch(self) -> None:
        ns, names, _ = self.names()
        tier = self.rng.choice([TierId.HBM, TierId.DRAM])
        keys = self.desk.keys(names, ns=ns)
        layout = self.desk.namers[ns].layout
        loads, _ = self.desk.catalog.prefetch(layout.id, keys, tier, self.desk.now_s)
        self.tasks += loads

    def raise_(self) -> None:
        """What is predicted, and with a running request what is resident."""
        ns, names, _ = self.names()
        catalog, keys = self.desk.catalog, self.desk.keys(names, ns=ns)
        layout, session = self.desk.namers[ns].layout, self.desk.session
        with suppress(KvstoredError):  # it runs already, or would hold too much
            catalog.begin_request(session, b"r", layout.id, keys, self.desk.now_s)
        begun = self.desk.raising.begin([(layout.id, keys.fingerprints)], 1 << 30, self.desk.now_s)
        self.seen["raised"] += len(begun)
        self.tasks += begun
        if self.rng.random() < 0.5:
            with suppress(KvstoredError):
                catalog.complete_request(session, b"r", False, self.desk.now_s)

    def read_across(self) -> None:
        """A path of which a GPU has the head and only NVMe the tail, while memory is full of others."""
        desk, path = self.desk, self.rng.choice(PATHS[2:])
        while self.leases:
            self.release()
        desk.put(path)
        self.write_down()
        self.tasks += desk.catalog.prefetch(desk.ns, desk.keys(path[:2]), TierId.HBM, desk.now_s)[0]
        while self.tasks:
            self.end_task()
        for name in reversed(path[2:]):
            if {TierId.DRAM, TierId.NVME} <= desk.tiers_of(name):
                drop_from_memory(desk, name)
        for name in "wxyz":
            desk.put(name)
        self._read(TierId.DRAM, 0, path)

    def read_straight(self) -> None:
        """Blocks of which only NVMe has anything, packed or not, on the GPU."""
        desk, path = self.desk, self.rng.choice(PATHS)
        desk.put(path[:2], ns=1)
        self.write_down()
        while self.tasks:
            self.end_task()
        for copy in np.flatnonzero(desk.catalog.books.copies.state == READY).tolist():
            table = desk.catalog.books.copies
            is_above = int(table.tier[copy]) != TierId.NVME and int(table.block[copy]) >= 0
            if is_above and not table.readers[copy] + table.fills[copy]:
                desk.catalog.drop_copy(copy, Reason.CORRUPT, desk.now_s)
        self._read(TierId.HBM, 1, path[:2])

    def end_task(self) -> None:
        if not self.tasks:
            return
        copying = self.tasks.pop(self.rng.randrange(len(self.tasks)))
        carriage = self.desk.catalog.carriage
        if isinstance(copying, CopyRun):
            self.seen["lifted as runs"] += copying.target is TierId.HBM
            if self.rng.random() < 0.7 and carriage.commit_run(
                copying, copying.targets, self.desk.now_s
            ):
                self.seen[f"{copying.source.name}-{copying.target.name}"] += 1
                return
            self.tasks += carriage.take_apart(copying)
            return
        self._end(copying)

    def _end(self, task: CopyTask) -> None:
        catalog, now_s = self.desk.catalog, self.desk.now_s
        way = f"{task.source.name}-{task.target.name}"
        if self.rng.random() < 0.8:
            is_packed = task.target is TierId.NVME and self.rng.random() < 0.7
            stored = [StoredPiece(self._kept(move, is_packed), 1) for move in task.moves]
            catalog.carriage.commit(task.id, stored, now_s)
            self.seen[way] += 1
        else:
            catalog.carriage.abort(
                task.id, self.rng.choice([Reason.CORRUPT, Reason.IO_ERROR]), now_s
            )

    def _kept(self, move: PieceMove, is_packed: bool) -> Place:
        """Of what is packed on a disk one unit of two."""
        return (move.target[0]._replace(units=1),) if is_packed else move.target

    def write_down(self) -> None:
        self.tasks += self.desk.catalog.write_back(1 << 30, self.desk.now_s)

    def demote(self) -> None:
        begun = self.desk.catalog.demotion.begin(1 << 30, self.desk.now_s)
        self.seen["demoted"] += len(begun)
        self.tasks += begun

    def release(self) -> None:
        while self.leases and self.rng.random() < 0.8:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.desk.catalog.release(self.desk.session, [lease], self.desk.now_s)

    def forget(self) -> None:
        if self.rng.random() < 0.5:
            ns, names, _ = self.names()
            layout = self.desk.namers[ns].layout
            keys = self.desk.keys(names, ns=ns)
            self.seen["removed"] += bool(remove(self.desk.catalog, layout.id, keys, 0.0))

    def pin(self) -> None:
        ns, names, _ = self.names()
        layout, catalog = self.desk.namers[ns].layout, self.desk.catalog
        if self.pins and self.rng.random() < 0.6:
            catalog.unpin(self.pins.pop(), self.desk.now_s)
            return
        try:
            pinned = catalog.pin(
                self.desk.session,
                layout.id,
                self.desk.keys(names, ns=ns),
                hard=self.rng.random() < 0.5,
                ttl_s=30.0,
                now_s=self.desk.now_s,
            )
        except KvstoredError:
            return
        self.pins.append(pinned.pin)

    def tidy(self) -> None:
        self.desk.wait(self.rng.random() * 5)
        for tier in (TierId.HBM, TierId.DRAM, TierId.NVME):
            self.desk.catalog.make_room(tier, self.desk.now_s)


@pytest.mark.parametrize("plain_min", [1, 99], ids=["runs", "tasks"])
@pytest.mark.parametrize("policy", ["lru", "composite", "s3fifo", "arc", "wa"])
def test_books_of_three_tiers_stay_right_whatever_comes(
    policy: str, plain_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("carriage", "plain", "plain_reads"):
        monkeypatch.setattr(f"kvstored.core.{module}.PLAIN_MIN", plain_min)
    monkeypatch.setattr("kvstored.core.write_back.RUN_MIN", plain_min)
    monkeypatch.setattr("kvstored.core.leaving.MANY", plain_min)
    seen: Counter[str] = Counter()
    for seed in range(3):
        storm = Storm(seed, policy)
        for _ in range(STEPS):
            storm.step()
        seen += storm.seen
        while storm.tasks:
            storm.end_task()
        desk = storm.desk
        desk.catalog.close_session(desk.session, desk.now_s, writer_dead=True)
        desk.wait(3600.0)
        assert all(use.leased_units == 0 for use in desk.catalog.tier_use())
    wanted = (
        "read in HBM",
        "read in DRAM",
        "DRAM-HBM",
        "HBM-DRAM",
        "DRAM-NVME",
        "NVME-DRAM",
        "NVME-HBM",
        "raised",
    )
    assert all(seen[each] for each in wanted), seen
    assert bool(seen["lifted as runs"]) == (plain_min == 1)


def desk_with_gpu(*, nvme: int = 0, **limits: float) -> Desk:
    return Desk(dram=8, nvme=nvme, hbm=4, **limits)  # type: ignore[arg-type]  # shares


def up(desk: Desk, names: str) -> None:
    desk.carry(desk.catalog.prefetch(desk.ns, desk.keys(names), TierId.HBM, desk.now_s)[0])


def drop_from_memory(desk: Desk, names: str) -> None:
    """As if its bytes there had gone bad."""
    for name in names:
        table = desk.catalog.books.copies
        (copy,) = [copy for copy in desk.copies(name) if int(table.tier[copy]) == TierId.DRAM]
        desk.catalog.drop_copy(copy, Reason.CORRUPT, desk.now_s)


def test_the_gpu_is_filled_from_dram_only() -> None:
    desk = desk_with_gpu(nvme=8)
    desk.put("abc")
    desk.write_back()
    drop_from_memory(desk, "c")
    loads, pending = desk.catalog.prefetch(desk.ns, desk.keys("abc"), TierId.HBM, desk.now_s)
    assert [load.source for load in loads] == [TierId.DRAM] * 2
    assert len(pending) == 2
    desk.carry(loads)
    assert desk.tiers_of("c") == {TierId.NVME}


def test_a_held_block_stays_on_the_gpu_and_may_leave_dram() -> None:
    desk = desk_with_gpu()
    desk.put("abcd")
    up(desk, "abcd")
    desk.catalog.begin_request(desk.session, b"r", desk.ns, desk.keys("abcd"), desk.now_s)
    desk.put("ijklmnop")
    assert all(desk.tiers_of(name) == {TierId.HBM} for name in "abcd")
    loads, _ = desk.catalog.prefetch(desk.ns, desk.keys("ij"), TierId.HBM, desk.now_s)
    assert loads == [], "nothing on the gpu may make room"


def test_a_lost_tier_gives_up_all_its_copies_and_takes_no_more() -> None:
    desk = desk_with_gpu()
    desk.put("abc")
    call = desk.namers[0].acquire(desk.session, ["a", "b"], tier=TierId.HBM)
    acquired = desk.catalog.acquire(call, desk.now_s)
    desk.carry(acquired.loads)
    grant = desk.catalog.grant(acquired.lease, desk.now_s)
    up(desk, "c")
    assert [desk.catalog.demotion.lose(desk.now_s, 2) for _ in range(3)] == [2, 1, 0]
    desk.catalog.check()
    assert desk.catalog.prefetch(desk.ns, desk.keys("c"), TierId.HBM, desk.now_s) == ([], [])
    assert desk.release(grant)
    use = {use.tier: use for use in desk.catalog.tier_use()}[TierId.HBM]
    assert use.copies == use.used_units == use.leased_units == 0
    assert desk.there("abc") == "abc"


def test_demotion_begins_with_the_coldest_and_only_above_the_low_watermark() -> None:
    desk = desk_with_gpu(low=0.75)
    desk.put("a")
    desk.put("b")
    desk.put("c")
    desk.put("d")
    for name in "abc":
        up(desk, name)
    drop_from_memory(desk, "abc")
    assert desk.catalog.demotion.begin(1 << 30, desk.now_s) == [], (
        "below the watermark there is time"
    )
    up(desk, "d")
    begun = desk.catalog.demotion.begin(1, desk.now_s)
    assert [desk.name_of(task.fingerprint) for task in desk.singly(begun)] == ["a"]
    assert desk.catalog.demotion.begin(1, desk.now_s) != begun, (
        "one that is on its way is not begun again"
    )
    desk.carry(begun)
    assert desk.tiers_of("a") == {TierId.HBM, TierId.DRAM}


def test_the_drain_carries_down_what_only_the_gpu_has() -> None:
    desk = desk_with_gpu(nvme=8)
    desk.put("a")
    up(desk, "a")
    drop_from_memory(desk, "a")
    while begun := desk.catalog.flush(1 << 30, desk.now_s):
        desk.carry(begun)
    assert desk.tiers_of("a") == {TierId.HBM, TierId.DRAM, TierId.NVME}


def test_window_and_state_are_not_read_on_the_gpu() -> None:
    desk = Desk(spec_of("h", LINEAR, STATE), dram=8, hbm=4)
    desk.put("a")
    with pytest.raises(InvalidArgument):
        desk.catalog.acquire(
            desk.namers[0].acquire(desk.session, ["a"], tier=TierId.HBM), desk.now_s
        )


# ---- several GPUs


def desk_with_gpus(devices: int, *specs: NamespaceSpec, units: int = 8) -> Desk:
    return Desk(*specs, dram=64, hbm=units * devices, gpus=devices)


def devices_of(desk: Desk, name: str) -> dict[tuple[int, int], int]:
    """The GPU of each (group, shard)."""
    books = desk.catalog.books
    return {
        (int(books.pieces.group[row]), int(books.pieces.shard[row])): books.place(row)[0].segment
        for copy in desk.copies(name)
        if int(books.copies.tier[copy]) == TierId.HBM
        for row in books.pieces_of(copy)
    }


def put_all_ranks(desk: Desk, names: str, tp: int) -> None:
    for shard in range(tp):
        desk.put(names, shard=shard)


def test_shards_lie_on_the_gpu_of_their_rank() -> None:
    desk = desk_with_gpus(4, spec_of("m", SHARDED, tp=4))
    put_all_ranks(desk, "ab", 4)
    up(desk, "ab")
    for name in "ab":
        assert devices_of(desk, name) == {(0, rank): rank for rank in range(4)}


def test_ranks_beyond_the_host_s_gpus_begin_again() -> None:
    desk = desk_with_gpus(2, spec_of("m", SHARDED, tp=4))
    put_all_ranks(desk, "a", 4)
    up(desk, "a")
    assert devices_of(desk, "a") == {(0, 0): 0, (0, 1): 1, (0, 2): 0, (0, 3): 1}


def test_a_path_stays_on_one_gpu_and_others_go_where_there_is_room() -> None:
    """Of groups that every rank has alike: they are stored once, and other ranks read them over the link between GPUs."""
    desk = desk_with_gpus(2)
    desk.put("abc")
    desk.put("xyz")
    up(desk, "abc")
    first = {devices_of(desk, name)[0, 0] for name in "abc"}
    up(desk, "xyz")
    second = {devices_of(desk, name)[0, 0] for name in "xyz"}
    assert len(first) == len(second) == 1
    assert first != second


def test_a_full_gpu_does_not_keep_blocks_from_another() -> None:
    desk = desk_with_gpus(2, units=4)
    desk.put("abcdef")
    up(desk, "abcdef")
    placed = [devices_of(desk, name)[0, 0] for name in "abcdef"]
    assert placed[:4] == [placed[0]] * 4
    assert placed[4:] == [1 - placed[0]] * 2


def test_a_block_is_on_the_gpus_when_every_rank_s_shard_is() -> None:
    desk = desk_with_gpus(2, spec_of("m", SHARDED, tp=2))
    put_all_ranks(desk, "a", 2)
    desk.put("b", under="a", shard=0)  # the other rank's is still missing
    up(desk, "ab")
    assert desk.hits("ab").tier_blocks == (1, 0, 0, 0)
    call = desk.namers[0].acquire(desk.session, ["a", "b"], shard=1, tier=TierId.HBM)
    acquired = desk.catalog.acquire(call, desk.now_s)
    grant = desk.catalog.grant(acquired.lease, desk.now_s)
    assert [block.status for block in grant.blocks] == [ReadStatus.HIT, ReadStatus.MISS]
    piece = grant.blocks[0].pieces[0]
    assert piece is not None
    assert piece.place[0].segment == 1


# ---- runs


def test_many_blocks_go_up_as_one_run_with_and_without_a_copy_on_disk() -> None:
    desk = Desk(dram=16, nvme=16, hbm=16)
    desk.put("abcd")
    desk.write_back()
    desk.put("efgh", under="d")
    loads, pending = desk.catalog.prefetch(desk.ns, desk.keys("abcdefgh"), TierId.HBM, desk.now_s)
    (run,) = loads
    assert isinstance(run, CopyRun)
    assert len(run) == len(pending) == 8
    desk.carry(loads)
    assert all(desk.tiers_of(name) == {TierId.HBM, TierId.DRAM, TierId.NVME} for name in "abcd")
    assert all(desk.tiers_of(name) == {TierId.HBM, TierId.DRAM} for name in "efgh")
    assert desk.hits("abcdefgh").tier_blocks == (8, 0, 0, 0)
    assert desk.catalog.prefetch(desk.ns, desk.keys("abcd"), TierId.HBM, desk.now_s) == ([], [])


def test_a_run_on_its_way_up_is_taken_apart_when_one_of_its_blocks_changes() -> None:
    desk = Desk(dram=16, nvme=16, hbm=16)
    desk.put("abcdef")
    (run,), _ = desk.catalog.prefetch(desk.ns, desk.keys("abcdef"), TierId.HBM, desk.now_s)
    assert isinstance(run, CopyRun)
    remove(desk.catalog, desk.ns, desk.keys("f"), desk.now_s)
    assert not desk.catalog.carriage.commit_run(run, run.targets, desk.now_s)
    desk.carry(desk.singly([run]))
    assert desk.there("abcdef") == "abcde"
    assert desk.tiers_of("e") == {TierId.HBM, TierId.DRAM}


def test_a_disk_copy_that_comes_meanwhile_does_not_take_a_run_apart() -> None:
    desk = Desk(dram=16, nvme=16, hbm=16)
    desk.put("abcdef")
    (run,), _ = desk.catalog.prefetch(desk.ns, desk.keys("abcdef"), TierId.HBM, desk.now_s)
    down = desk.singly(desk.catalog.write_back(1 << 30, desk.now_s))
    desk.carry(down)
    desk.carry([run])
    assert all(desk.tiers_of(name) == {TierId.HBM, TierId.DRAM, TierId.NVME} for name in "abcdef")


def test_as_many_go_up_as_there_is_room_for() -> None:
    desk = Desk(dram=16, hbm=4)
    desk.put("abcdefgh")
    loads, _ = desk.catalog.prefetch(desk.ns, desk.keys("abcdefgh"), TierId.HBM, desk.now_s)
    desk.carry(loads)
    assert "".join(n for n in "abcdefgh" if TierId.HBM in desk.tiers_of(n)) == "abcd"


def test_what_only_the_gpu_has_never_leaves_to_make_room() -> None:
    desk = desk_with_gpu(low=0.5, high=0.9)
    for name in "abcd":
        desk.put(name)
    up(desk, "abcd")
    drop_from_memory(desk, "abc")
    desk.put("x")
    up(desk, "x")
    assert [TierId.HBM in desk.tiers_of(name) for name in "abcdx"] == [True] * 3 + [False, True]
    desk.put("y")
    loads, _ = desk.catalog.prefetch(desk.ns, desk.keys("xy"), TierId.HBM, desk.now_s)
    desk.carry(loads)
    desk.put("z")
    desk.catalog.make_room(TierId.HBM, desk.now_s)
    assert desk.there("abc") == "abc"
    desk.carry(desk.catalog.demotion.begin(1 << 30, desk.now_s))
    up(desk, "xyz")
    assert all(TierId.HBM in desk.tiers_of(name) for name in "xyz"), "they may leave now"
    assert desk.there("abc") == "abc"


# ---- what NVMe has packed


def packed_desk() -> Desk:
    """Of `a` and `b` NVMe has copies in half of their units, and nothing else has any; `c` lies there raw."""
    desk = Desk(spec_of("m", twice(LINEAR)), dram=16, nvme=16, hbm=8)
    for name, units in (("a", 1), ("b", 1), ("c", 2)):
        desk.put(name, under=None)
        for task in desk.singly(desk.catalog.write_back(1 << 30, desk.now_s)):
            (extent,) = task.moves[0].target
            stored = [StoredPiece((extent._replace(units=units),), 1)]
            desk.catalog.carriage.commit(task.id, stored, desk.now_s)
        drop_from_memory(desk, name)
    return desk


def test_packed_copies_go_straight_up_and_raw_ones_over_dram() -> None:
    desk = packed_desk()
    found = go_straight_up(desk.catalog.books, desk.ns, desk.keys("abcx"))
    assert found.tolist() == [True, True, False, False]
    loads, _ = desk.catalog.prefetch(desk.ns, desk.keys("abc"), TierId.HBM, desk.now_s)
    tasks = desk.singly(loads)
    assert [(task.source, task.target) for task in tasks] == [(TierId.NVME, TierId.HBM)] * 2
    desk.carry(loads)
    assert desk.tiers_of("a") == {TierId.HBM, TierId.NVME}
    assert desk.tiers_of("c") == {TierId.NVME}


def test_what_is_on_its_way_to_dram_already_goes_on_from_there() -> None:
    desk = packed_desk()
    loads, _ = desk.catalog.prefetch(desk.ns, desk.keys("a"), TierId.DRAM, desk.now_s)
    assert go_straight_up(desk.catalog.books, desk.ns, desk.keys("ab")).tolist() == [False, True]
    assert desk.catalog.prefetch(desk.ns, desk.keys("a"), TierId.HBM, desk.now_s)[0] == []
    desk.carry(loads)
    up(desk, "a")
    assert desk.tiers_of("a") == {TierId.HBM, TierId.DRAM, TierId.NVME}
