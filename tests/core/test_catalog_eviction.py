"""Order of eviction, budgets, watermarks, write-back and admission of the catalog."""

import numpy as np

from kvstored.core.calls import Acquire, FillStatus, Reason, StoredPiece
from kvstored.core.types import TierId
from tests.core.desk import BLOCK_TOKENS, LINEAR, STATE, Desk, Namer, layouts_of, remove, spec_of

DRAM, NVME = TierId.DRAM, TierId.NVME
GRANTED, NO_SPACE = FillStatus.GRANTED, FillStatus.NO_SPACE


def drop(desk: Desk, name: str, tier: TierId = DRAM) -> None:
    for copy in desk.copies(name):
        if desk.catalog.books.copies.tier[copy] == tier:
            desk.catalog.drop_copy(copy, Reason.CORRUPT, desk.now_s)
    desk.catalog.check()


# ---- order


def test_children_leave_before_their_parents() -> None:
    desk = Desk(dram=3)
    desk.put("abc")
    desk.put("xyz")
    assert [name for name, _ in desk.gone()] == ["c", "b", "a"]


def test_what_was_used_last_leaves_last() -> None:
    desk = Desk(dram=3)
    for name in "abc":
        desk.put(name)
    desk.release(desk.read("a"))
    desk.put("xy")
    assert [name for name, _ in desk.gone()] == ["b", "c"]


def test_what_hangs_on_a_lost_block_leaves_first() -> None:
    desk = Desk(dram=5)
    desk.put("x")
    desk.put("abcd")
    drop(desk, "b")
    desk.gone()
    desk.put("y")
    desk.put("z")
    assert desk.gone() == [("d", Reason.DEMAND)]  # x is older
    assert desk.there("x") == "x"


def test_what_hangs_on_a_lost_block_is_ordinary_again_when_it_returns() -> None:
    # It stayed a first victim until somebody hit it.
    desk = Desk(dram=4)
    desk.put("x")
    desk.put("ab")
    drop(desk, "a")
    desk.put("a")
    desk.put("y")
    desk.gone()
    desk.put("z")
    assert desk.gone() == [("x", Reason.DEMAND)]


def test_a_hit_makes_a_first_victim_ordinary_though_another_namespace_is_retired() -> None:
    # While any namespace was retired, nothing that was hit stopped being a first victim.
    desk = Desk(spec_of("m"), spec_of("old"), dram=3)
    desk.put("o", ns=1)
    desk.catalog.retire(desk.namers[1].layout.id)
    desk.put("ab")
    drop(desk, "a")
    desk.release(desk.read("b"))
    desk.put("xy")
    desk.gone()
    assert desk.there("b") == "b"


def test_blocks_of_a_retired_namespace_leave_first_and_can_still_be_read() -> None:
    desk = Desk(spec_of("old"), spec_of("new"), dram=3)
    desk.put("xy", ns=1)
    desk.put("a", ns=0)
    desk.catalog.retire(desk.ns)
    assert desk.there("a") == "a"
    desk.put("z", ns=1)
    assert desk.gone() == [("a", Reason.RETIRED)]


def test_a_sink_stays_while_a_descendant_is_stored_up_to_its_share() -> None:
    desk = Desk(spec_of("m", sink_tokens=BLOCK_TOKENS), dram=4, nvme=8, sink_share=0.3)
    desk.put("ab")
    desk.write_back()
    drop(desk, "b")
    desk.put("x")  # its share has room for one sink: this one is an ordinary block
    desk.put("uv", under="x")
    desk.gone()
    desk.put("z")
    assert "a" not in [name for name, _ in desk.gone()]
    assert desk.tiers_of("a") == {DRAM, NVME}
    drop(desk, "b", NVME)
    desk.put("w")
    assert "a" in [name for name, _ in desk.gone()]


def test_the_articles_policy_keeps_sinks_then_shared_blocks_then_the_recent_ones() -> None:
    sinks, plain = spec_of("sinks", sink_tokens=BLOCK_TOKENS), spec_of("plain")
    desk = Desk(plain, sinks, dram=3, policy="article", sink_share=0.0)
    desk.put("s", ns=1)
    desk.now_s += 1
    desk.put("h")
    desk.release(desk.read("h"))
    desk.now_s += 1000
    desk.put("c")
    desk.put("x")
    assert [name for name, _ in desk.gone()] == ["c"]  # never hit: cold, though it is the youngest
    drop(desk, "x")
    desk.put("d")
    desk.put("e")
    assert [name for name, _ in desk.gone()] == ["x", "d"]
    desk.release(desk.read("e"))
    desk.put("f")
    assert [name for name, _ in desk.gone()] == [
        "h"
    ]  # of two shared ones the older; the sink stays


def test_a_copy_whose_stamp_falls_can_still_be_evicted() -> None:
    # Its entry in the order was taken for an old one and thrown away: it was never evicted again.
    desk = Desk(dram=2, policy="article")
    desk.put("ab")
    desk.put("c", under="a")  # a has two children: shared
    desk.gone()
    remove(desk.catalog, desk.ns, desk.keys("c"), desk.now_s)
    desk.catalog.touch(desk.ns, desk.keys("a"), desk.now_s)
    desk.gone()
    assert desk.put("xy") == [GRANTED, GRANTED]


def test_a_put_alone_does_not_make_a_block_shared() -> None:
    # The fill itself counted as a hold when the stamp was made: every block that was ever put was 'shared'.
    desk = Desk(dram=2, policy="article")
    desk.put("a")
    desk.release(desk.read("a"))
    desk.now_s += 1e6
    desk.put("b")
    desk.put("c")
    assert desk.gone() == [("b", Reason.DEMAND)]


def test_a_block_that_many_hang_on_is_lost_in_a_bounded_time() -> None:
    desk = Desk(dram=300)
    chain = [f"n{i}" for i in range(250)]
    call = desk.namers[0].reserve(desk.session, chain, [None, *chain[:-1]])
    fills = [grant.fill for grant in desk.catalog.reserve(call, desk.now_s).grants if grant]
    desk.catalog.commit(desk.session, fills, [{}] * len(fills), desk.now_s)
    desk.put("x")
    drop(desk, "n0")
    desk.gone()
    for i in range(60):
        call = desk.namers[0].reserve(desk.session, [f"m{i}"], [None])
        desk.catalog.reserve(call, desk.now_s)
    gone = [name for name, _ in desk.gone()]
    assert gone == [f"n{i}" for i in range(249, 249 - len(gone), -1)]
    assert len(gone) == 10


# ---- room


def test_a_put_is_refused_only_when_nothing_can_leave() -> None:
    desk = Desk(dram=2)
    desk.put("ab")
    held = desk.read("ab")
    assert desk.put("x") == [NO_SPACE]
    assert desk.gone() == []
    desk.release(held)
    assert desk.put("x") == [GRANTED]


def test_a_block_larger_than_the_tier_evicts_nothing() -> None:
    desk = Desk(spec_of("state", LINEAR, STATE), dram=4, checkpoint_share=0.25)
    desk.put("abc", groups=[0])
    assert desk.put("a", groups=[1]) == [NO_SPACE]
    assert desk.gone() == []


def test_room_is_made_from_the_high_watermark_down_to_the_low_one() -> None:
    desk = Desk(dram=10, high=0.8, low=0.5)
    desk.put("abcdefgh")
    assert desk.catalog.make_room(DRAM, desk.now_s) == 0
    desk.put("i", under="h")
    assert desk.catalog.make_room(DRAM, desk.now_s) == 4
    assert [reason for _, reason in desk.gone()] == [Reason.WATERMARK] * 4
    assert desk.catalog.make_room(DRAM, desk.now_s) == 0


def test_a_budget_that_has_outgrown_its_share_gives_way_to_the_other() -> None:
    plain, hybrid = spec_of("plain"), spec_of("state", LINEAR, STATE)
    desk = Desk(plain, dram=8, checkpoint_share=0.5)
    desk.put("abcdefgh")
    late = Namer(layouts_of(plain, hybrid)[1])
    desk.catalog.add_namespace(late.layout)  # from now on half of the tier is for states
    desk.namers.append(late)
    assert desk.put("s", ns=1, groups=[1]) == [GRANTED]
    assert [name for name, _ in desk.gone()] == ["h", "g"]


# ---- between tiers


def test_a_dirty_block_is_written_back_and_then_clean() -> None:
    desk = Desk(dram=4, nvme=4)
    desk.put("ab")
    assert desk.catalog.tier_use()[0].dirty_copies == 2
    assert desk.write_back() == ["a", "b"]
    assert desk.catalog.tier_use()[0].dirty_copies == 0
    assert desk.write_back() == []


def test_a_full_disk_takes_only_what_was_hit() -> None:
    desk = Desk(dram=8, nvme=4, high=0.5, low=0.5, admit_hits=1)
    desk.put("abcd")
    assert desk.write_back() == ["a", "b"]
    desk.release(desk.read("abcd"))
    assert desk.write_back() == ["c", "d"]


def test_a_block_without_room_on_disk_does_not_hold_up_the_others() -> None:
    # The first copy without room ended a flush: a drain left the others unwritten.
    desk = Desk(spec_of("state", LINEAR, STATE), dram=16, nvme=4, checkpoint_share=0.25)
    desk.put("a")
    tasks = desk.catalog.flush(1 << 30, desk.now_s)
    assert [int(task.part) for task in tasks] == [0]
    desk.carry(tasks)


def test_space_on_disk_is_granted_again_only_after_its_discard() -> None:
    desk = Desk(dram=4, nvme=1)
    desk.put("a")
    desk.write_back()
    desk.put("b")
    assert desk.write_back() == []
    assert desk.gone() == [("a", Reason.DEMAND)]  # the discard is carried out
    assert desk.write_back() == ["b"]


def test_an_eviction_from_memory_leaves_what_is_on_disk() -> None:
    desk = Desk(dram=2, nvme=4)
    desk.put("ab")
    desk.write_back()
    desk.put("x")
    assert desk.gone() == [("b", Reason.DEMAND)]
    assert desk.tiers_of("b") == {NVME}
    block = desk.read("ab").blocks[1]
    assert block.tier is NVME
    assert desk.tiers_of("b") == {DRAM, NVME}


def test_a_load_that_fails_is_a_miss_and_a_corrupt_source_goes() -> None:
    desk = Desk(dram=1, nvme=4)
    desk.put("a")
    desk.write_back()
    drop(desk, "a")
    for reason, left in ((Reason.IO_ERROR, "a"), (Reason.CORRUPT, "")):
        acquired = desk.catalog.acquire(acquire(desk, "a"), desk.now_s)
        (task,) = acquired.loads
        desk.catalog.carriage.abort(task.id, reason, desk.now_s)
        assert desk.catalog.grant(acquired.lease, desk.now_s).lease == 0
        assert desk.there("a") == left
        desk.catalog.check()


def test_a_second_reader_waits_for_the_load_under_way() -> None:
    desk = Desk(dram=2, nvme=4)
    desk.put("a")
    desk.write_back()
    drop(desk, "a")
    first = desk.catalog.acquire(acquire(desk, "a"), desk.now_s)
    second = desk.catalog.acquire(acquire(desk, "a"), desk.now_s)
    assert (len(first.loads), len(second.loads)) == (1, 0)
    assert first.pending == second.pending
    desk.carry(first.loads)
    assert len(desk.catalog.grant(second.lease, desk.now_s).blocks[0].pieces) == 1


def test_a_prefetch_begins_each_load_once() -> None:
    # A key named twice was pending twice, and half a block was loaded though the rest of it was nowhere.
    desk = Desk(dram=2, nvme=4)
    desk.put("a")
    desk.write_back()
    drop(desk, "a")
    tasks, pending = desk.catalog.prefetch(desk.ns, desk.keys("aa"), DRAM, desk.now_s)
    assert len(tasks) == len(pending) == 1
    again = desk.catalog.prefetch(desk.ns, desk.keys("a"), DRAM, desk.now_s)
    assert again == ([], pending)
    desk.carry(tasks)


def test_a_disk_that_keeps_less_gives_the_rest_back() -> None:
    desk = Desk(spec_of("state", LINEAR, STATE), dram=8, nvme=8, checkpoint_share=0.5)
    desk.put("a")
    tasks = desk.catalog.write_back(1 << 30, desk.now_s)
    for task in tasks:
        kept = [(move.target[0]._replace(units=1),) for move in task.moves]
        stored = [StoredPiece(place, 1) for place in kept]
        desk.catalog.carriage.commit(task.id, stored, desk.now_s)
    desk.catalog.check()
    assert desk.catalog.tier_use()[1].used_units == 2


def acquire(desk: Desk, names: str) -> Acquire:
    return desk.namers[0].acquire(desk.session, list(names))


def test_waiting_copies_are_bounded_while_nobody_writes_back() -> None:
    # Rows that were taken again were queued again: with the disk off the queue grew with every put.
    desk = Desk(dram=2, nvme=4)
    books = desk.catalog.books
    for i in range(6000):
        row = np.asarray([i % 3], dtype=np.int32)
        books.copies.flags[row] = 0
        books.wait(int(row[0]))
    assert len(books.waiting) < 5000
