"""Coarse nodes on NVMe: what is shared and lies strewn is laid together, what is not stays, and the books are right whatever happens meanwhile."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kvstored.core.calls import Reason, StoredPiece
from kvstored.core.copying import CopyRun
from kvstored.core.grains import BLOCKS_MAX, COARSE_TOKENS
from kvstored.core.plan import Bounds
from kvstored.core.types import NamespaceSpec, TierId
from tests.core.desk import Desk, spec_of

DRAM, NVME = TierId.DRAM, TierId.NVME
GATHER = Bounds(gather_bytes=1 << 30)
TOKENS = 128
GRAIN = COARSE_TOKENS // TOKENS
"""Blocks: 8."""
SPEC: NamespaceSpec = replace(spec_of("m"), block_tokens=TOKENS)
A = "".join(chr(0x100 + i) for i in range(40))
B = "".join(chr(0x200 + i) for i in range(40))
C, D = ("".join(chr(first + i) for i in range(40)) for first in (0x300, 0x400))


def strewn(blocks: int = GRAIN, *, dram: int = 400, nvme: int = 600) -> Desk:
    """Four paths that grew side by side, block by block, two of which were read since."""
    return grown(Desk(SPEC, dram=dram, nvme=nvme), blocks)


def grown(desk: Desk, blocks: int = GRAIN) -> Desk:
    check = desk.catalog.check
    desk.catalog.check = lambda: None  # type: ignore[method-assign]  # it looks at all that there is, with each put
    for i in range(blocks):
        for path in (A, B, C, D):
            desk.put(path[i], under=path[i - 1] if i else None)
        desk.write_back()
    for path in (A, B):
        desk.release(desk.read(path[:blocks]))
    desk.now_s += 1
    desk.gone()
    desk.catalog.check = check  # type: ignore[method-assign]  # as it was
    check()
    return desk


def starts(desk: Desk, names: str) -> list[int]:
    """Where they lie on NVMe."""
    books = desk.catalog.books
    rows = books.index.find(desk.keys(names).fingerprints).tolist()
    copies = [books.copy_in(row, NVME, 0) for row in rows]
    return [books.place(int(books.copies.first_piece[copy]))[0].start for copy in copies]


def are_together(desk: Desk, names: str) -> bool:
    return bool((np.diff(starts(desk, names)) == 1).all())


def gather(desk: Desk, patience: int = 3) -> int:
    """Blocks that were written again until there was nothing to do so many times."""
    count = idle = 0
    while idle < patience:
        done = list(desk.catalog.scheduler.run(GATHER, desk.now_s).writes)
        idle = 0 if done else idle + 1
        count += sum(len(each) for each in done if isinstance(each, CopyRun))
        desk.carry(done)
        desk.gone()
    return count


def test_a_shared_path_that_lies_strewn_is_laid_together_once() -> None:
    desk = strewn()
    assert not are_together(desk, A[:GRAIN])
    assert gather(desk) == 2 * GRAIN
    assert are_together(desk, A[:GRAIN])
    assert are_together(desk, B[:GRAIN])
    assert gather(desk) == 0
    use = {each.tier: each for each in desk.catalog.tier_use()}
    assert use[NVME].used_units == use[NVME].copies == 4 * GRAIN, "the old space is free again"
    assert use[DRAM].dirty_copies == 0
    assert not are_together(desk, C[:GRAIN]), "nobody came back to it: it stays as it was written"


def test_what_is_to_be_laid_together_is_shown_and_looking_changes_nothing() -> None:
    desk = strewn()
    for _ in range(2):
        plan = desk.catalog.scheduler.look(desk.now_s, 0, 100)
        shown = sorted((desk.name_of(each.head), each.blocks, each.why) for each in plan.writes)
        assert shown == [(A[0], GRAIN, "to lie together"), (B[0], GRAIN, "to lie together")]
    assert gather(desk) == 2 * GRAIN
    assert not desk.catalog.scheduler.look(desk.now_s, 0, 100).writes


def test_tails_of_less_than_half_a_grain_are_fine() -> None:
    desk = strewn(GRAIN + GRAIN // 2 - 1)
    assert gather(desk) == 2 * GRAIN
    assert are_together(desk, A[:GRAIN])
    assert not are_together(desk, A[GRAIN : GRAIN + GRAIN // 2 - 1])
    half = strewn(GRAIN + GRAIN // 2)
    assert gather(half) == 2 * (GRAIN + GRAIN // 2)


def test_a_grain_ends_where_paths_part_and_goes_on_when_they_are_one_again() -> None:
    """Split and merge are bookkeeping: what is a grain follows from the tree as it is."""
    desk = strewn()
    fork = GRAIN // 2 - 2
    desk.put("x", under=A[fork])
    desk.write_back()
    assert gather(desk) == 2 * GRAIN - fork - 1, "above the fork are less than half of a grain"
    assert are_together(desk, A[fork + 1 : GRAIN])
    assert not are_together(desk, A[: fork + 1])
    for copy in desk.copies("x"):
        desk.catalog.drop_copy(copy, Reason.REMOVED, desk.now_s)
    desk.gone()
    assert gather(desk) == GRAIN
    assert are_together(desk, A[:GRAIN])


@pytest.mark.parametrize("free", [GRAIN // 2, GRAIN])
def test_nothing_is_written_again_without_such_a_stretch_below_the_high_watermark(
    free: int,
) -> None:
    desk = grown(Desk(SPEC, dram=400, nvme=4 * GRAIN + free, high=0.9))
    before = starts(desk, A[:GRAIN])
    assert gather(desk) == 0
    assert starts(desk, A[:GRAIN]) == before
    assert len(desk.there(A[:GRAIN] + B[:GRAIN])) == 2 * GRAIN


def test_it_is_charged_to_the_days_budget_and_stops_before_what_is_new_has_to() -> None:
    desk = grown(Desk(SPEC, dram=400, nvme=600, write_budget_bytes=8 * GRAIN * 4096))
    budget = desk.catalog.admission.budget
    assert budget.spent(desk.now_s) == 4 * GRAIN * 4096
    assert gather(desk) == 2 * GRAIN
    assert budget.spent(desk.now_s) == 6 * GRAIN * 4096
    desk.put("stuvwxyz")
    desk.write_back()
    desk.release(desk.read(C[:GRAIN]))
    assert gather(desk) == 0, "four fifths are used up"


@pytest.mark.parametrize("reason", [Reason.NO_SPACE, Reason.IO_ERROR])
def test_what_fails_is_written_back_as_ever(reason: Reason) -> None:
    desk = strewn()
    done = list(desk.catalog.scheduler.run(GATHER, desk.now_s).writes)
    tasks = desk.singly(done)
    for task in tasks:
        desk.catalog.carriage.abort(task.id, reason, desk.now_s)
    desk.catalog.check()
    desk.gone()
    assert all(desk.tiers_of(name) == {DRAM} for name in A[:GRAIN])
    desk.write_back()
    assert all(desk.tiers_of(name) == {DRAM, NVME} for name in A[:GRAIN] + B[:GRAIN])


def test_what_is_read_from_nvme_or_not_in_memory_is_left_alone() -> None:
    desk = strewn()
    books = desk.catalog.books
    (below,) = (c for c in desk.copies(B[5]) if int(books.copies.tier[c]) == NVME)
    books.read(below)
    first, *_ = [c for c in desk.copies(A[3]) if int(desk.catalog.books.copies.tier[c]) == DRAM]
    desk.catalog.drop_copy(first, Reason.DEMAND, desk.now_s)
    done = desk.catalog.scheduler.run(GATHER, desk.now_s).writes
    assert not done
    books.unread(below)
    assert gather(desk) == GRAIN
    assert are_together(desk, B[:GRAIN])
    assert not are_together(desk, A[:GRAIN])


def test_every_run_has_its_turn_however_few_blocks_one_call_looks_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstored.core.grains.ROWS_MAX", 1)
    desk = strewn()
    for path in (C, D):
        desk.release(desk.read(path[:GRAIN]))
    assert gather(desk, patience=8) == 4 * GRAIN


def test_the_next_call_goes_on_where_one_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """One grain a call, one run a look: four runs, two of which have five grains each."""
    monkeypatch.setattr("kvstored.core.grains.BLOCKS_MAX", GRAIN)
    monkeypatch.setattr("kvstored.core.grains.NODES_MAX", 1)
    desk = strewn(40)
    calls = 0
    while desk.catalog.admission.budget.spent(desk.now_s) < (4 + 2) * 40 * 4096:
        desk.carry(list(desk.catalog.scheduler.run(GATHER, desk.now_s).writes))
        desk.gone()
        calls += 1
        assert calls <= 2 * 5 + 4, "not one grain each time that the cursor comes round"


def test_a_call_writes_no_more_than_its_bounds() -> None:
    desk = strewn()
    assert not desk.catalog.scheduler.run(Bounds(gather_bytes=GRAIN * 4096 - 1), desk.now_s).writes
    done = list(desk.catalog.scheduler.run(Bounds(gather_bytes=GRAIN * 4096), desk.now_s).writes)
    assert sum(map(len, done)) <= min(GRAIN, BLOCKS_MAX)  # type: ignore[arg-type]  # runs
    desk.carry(done)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_meanwhile_nothing_is_lost_and_the_books_are_right(seed: int) -> None:
    """Reads, puts, evictions and failures between the begin of a rewriting and its end."""
    random = Random(seed)
    desk = strewn(GRAIN + 8, dram=160, nvme=600)
    known = "".join(path[: GRAIN + 8] for path in (A, B, C, D))
    for i in range(25):
        desk.now_s += 1
        begun = list(desk.catalog.scheduler.run(GATHER, desk.now_s).writes)
        what = random.random()
        if what < 0.3:
            desk.release(desk.read(random.choice((A, B))[: random.randrange(1, GRAIN + 8)]))
        elif what < 0.6:
            desk.put(chr(0x1000 + i), under=random.choice(known))
        elif what < 0.8:
            copies = [c for name in known[::7] for c in desk.copies(name)]
            table = desk.catalog.books.copies
            for copy in copies:
                if desk.catalog.books.is_evictable(copy) and int(table.tier[copy]) == DRAM:
                    desk.catalog.drop_copy(copy, Reason.DEMAND, desk.now_s)
                    break
        for task in desk.singly(begun):
            if random.random() < 0.1:
                desk.catalog.carriage.abort(task.id, Reason.IO_ERROR, desk.now_s)
            else:
                stored = [StoredPiece(move.target, 1) for move in task.moves]
                desk.catalog.carriage.commit(task.id, stored, desk.now_s)
        desk.catalog.check()
        desk.gone()
        desk.write_back()
        assert desk.there(known) == known, (seed, i)
