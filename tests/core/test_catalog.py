"""What the catalog promises of groups, shards, window and state, puts and looks: one example a promise."""

import numpy as np
import pytest

from kvstored.core.calls import FillStatus, Limits, ReadStatus, Reason
from kvstored.core.types import Part, TierId
from kvstored.errors import Conflict, InvalidArgument
from tests.core.desk import (
    LINEAR,
    SHARDED,
    SHARDED_STATE,
    SPARSE,
    STATE,
    WINDOW,
    Desk,
    remove,
    spec_of,
)

DRAM, NVME = TierId.DRAM, TierId.NVME
GRANTED, PRESENT, IN_PROGRESS = FillStatus.GRANTED, FillStatus.PRESENT, FillStatus.IN_PROGRESS
NO_SPACE = FillStatus.NO_SPACE
TP = spec_of("tp", LINEAR, SHARDED, tp=2)
HYBRID = spec_of("hybrid", LINEAR, SPARSE, STATE)


# ---- shards


def test_a_replicated_group_is_stored_once_and_read_by_every_rank() -> None:
    desk = Desk(spec_of("mla", LINEAR, tp=2))
    assert desk.put("a", shard=0) == [GRANTED]
    assert desk.put("a", shard=1) == [PRESENT]
    places = {desk.read("a", shard=rank).blocks[0].pieces[0].place for rank in (0, 1)}  # type: ignore[union-attr]  # it is there
    assert len(places) == 1
    assert sum(use.used_units for use in desk.catalog.tier_use()) == 1


def test_a_sharded_block_hits_once_all_shards_are_there() -> None:
    desk = Desk(TP)
    assert desk.commit(desk.begin("a", shard=0)) == [False]
    assert desk.hits("a").hit_blocks == 0
    assert desk.hits("a").miss_reason == Reason.INCOMPLETE
    assert desk.commit(desk.begin("a", shard=1)) == [True]
    assert desk.hits("a").hit_blocks == 1
    pieces = desk.read("a", shard=1).blocks[0].pieces
    assert [(piece.group, piece.shard) for piece in pieces if piece] == [(0, 0), (1, 1)]


def test_a_block_whose_other_shard_never_comes_is_dropped() -> None:
    desk = Desk(TP, limits=Limits(incomplete_ttl_s=10))
    desk.put("a", shard=0)
    assert desk.wait(9).copies == 0
    assert desk.wait(2).copies == 1
    assert desk.gone() == [("a", Reason.INCOMPLETE)]
    assert desk.catalog.blocks == 0


def test_an_aborted_second_shard_does_not_keep_the_first_for_ever() -> None:
    # The timer of the first shard ended while the second one was being written, and nothing set another: the copy stayed.
    desk = Desk(TP, limits=Limits(incomplete_ttl_s=10))
    desk.put("a", shard=0)
    late = desk.begin("a", shard=1)
    assert desk.wait(11).copies == 0
    desk.catalog.abort(desk.session, [grant.fill for grant in late.grants if grant], desk.now_s)
    assert desk.wait(11).copies == 1
    assert desk.catalog.blocks == 0


def test_a_state_group_of_two_shards_counts_when_both_are_there() -> None:
    desk = Desk(spec_of("ssm", LINEAR, SHARDED_STATE, tp=2), checkpoint_share=0.5)
    desk.put("a", shard=0)
    assert desk.hits("a").checkpoint_tokens == 0
    desk.put("a", shard=1)
    assert desk.hits("a").checkpoint_tokens == 4


# ---- groups


def test_required_groups_are_put_together_or_not_at_all() -> None:
    desk = Desk(HYBRID)
    with pytest.raises(InvalidArgument, match="together or not at all"):
        desk.begin("a", groups=[0])
    assert desk.put("a", groups=[0, 1]) == [GRANTED]
    assert desk.there("a") == "a"


def test_required_groups_that_do_not_all_fit_are_not_granted_at_all() -> None:
    desk = Desk(HYBRID, dram=3, checkpoint_share=0.4)
    held = desk.begin("a", groups=[0, 1])
    assert desk.put("b", groups=[0, 1]) == [NO_SPACE]
    assert desk.commit(held) == [True]
    assert desk.explain("b").reason is Reason.NO_SPACE


def test_a_state_without_room_does_not_keep_its_block_out() -> None:
    # One full budget refused the whole block, so that a state larger than its budget meant no cache at all.
    desk = Desk(HYBRID, dram=8, checkpoint_share=0.2)
    reserved = desk.begin("a")
    assert reserved.status == [GRANTED]
    assert [piece.group for piece in reserved.grants[0].pieces] == [0, 1]  # type: ignore[union-attr]  # granted
    assert desk.commit(reserved) == [True]


def test_sparse_rows_may_lie_on_disk_while_dense_ones_stay_in_memory() -> None:
    desk = Desk(spec_of("csa", LINEAR, SPARSE), dram=8, nvme=8)
    desk.put("a")
    desk.write_back()
    (sparse,) = [copy for copy in desk.copies("a") if is_sparse_in_dram(desk, copy)]
    desk.catalog.drop_copy(sparse, Reason.WATERMARK, desk.now_s)
    assert desk.tiers_of("a", Part.DENSE) == {DRAM, NVME}
    assert desk.tiers_of("a", Part.SPARSE) == {NVME}
    found = desk.hits("a")
    assert (found.hit_blocks, found.tier_blocks) == (1, (0, 0, 1, 0))
    assert desk.read("a").blocks[0].status is ReadStatus.HIT


def is_sparse_in_dram(desk: Desk, copy: int) -> bool:
    table = desk.catalog.books.copies
    return bool(table.part[copy] == Part.SPARSE and table.tier[copy] == DRAM)


def test_a_short_last_block_needs_only_the_groups_that_have_rows_in_it() -> None:
    desk = Desk(spec_of("csa", LINEAR, SPARSE))
    desk.put("ap", last=1)  # one token: no row of a group that has one every two
    found = desk.hits("ap")
    assert (found.hit_blocks, found.hit_tokens) == (2, 5)


def test_a_block_too_short_for_any_required_row_is_never_there_and_leaves_nothing() -> None:
    desk = Desk(spec_of("csa", SPARSE))
    assert desk.put("p", last=1) == [PRESENT]  # nothing to write
    assert desk.there("p") == ""
    assert desk.catalog.blocks == 0


def test_a_longer_last_block_makes_a_shorter_one_the_first_victim() -> None:
    desk = Desk(dram=5)
    desk.put("ab")
    desk.put("x")
    desk.put("p", under="b", last=1)
    desk.put("q", under="b", last=3)
    assert desk.put("y") == [GRANTED]
    assert desk.gone() == [("p", Reason.DEMAND)]  # x is older
    desk.put("c", under="b")
    assert desk.gone() == [("x", Reason.DEMAND)]
    desk.catalog.touch(desk.ns, desk.keys("q"), desk.now_s)
    desk.put("z")
    assert desk.gone() == [("q", Reason.DEMAND)]  # a full block has come; y is older


# ---- window and state


def test_hit_checkpoint_and_replay_are_told_apart() -> None:
    desk = Desk(spec_of("state", LINEAR, STATE), dram=16, checkpoint_share=0.5)
    desk.put("ab", groups=[0, 1])
    desk.put("cd", under="b", groups=[0])
    found = desk.hits("abcd")
    assert (found.hit_tokens, found.checkpoint_tokens, found.replay_tokens) == (16, 8, 8)


def test_a_window_is_usable_where_the_blocks_before_have_it() -> None:
    desk = Desk(spec_of("swa", LINEAR, WINDOW), dram=16, checkpoint_share=0.5)
    desk.put("a", groups=[0])
    desk.put("bc", under="a")  # a window of 6: the last two blocks
    assert desk.hits("ab").checkpoint_tokens == 0
    assert desk.hits("abc").checkpoint_tokens == 12


def test_state_never_evicts_kv_and_kv_never_evicts_state() -> None:
    desk = Desk(spec_of("state", LINEAR, STATE), dram=8, checkpoint_share=0.5)
    desk.put("abcd", groups=[0])
    desk.put("a", groups=[1])
    desk.put("b", groups=[1])
    desk.put("c", groups=[1])  # 3 x 2 units in a budget of 4
    assert desk.gone() == [("a", Reason.DEMAND)]
    assert desk.there("abcd") == "abcd"
    desk.put("efgh", groups=[0])
    assert {name for name, _ in desk.gone()} == set("abcd")
    assert desk.tiers_of("b", Part.CHECKPOINT) == {DRAM}


def test_a_checkpoint_lives_a_while_after_its_last_use() -> None:
    desk = Desk(
        spec_of("state", LINEAR, STATE), limits=Limits(checkpoint_ttl_s=100), checkpoint_share=0.5
    )
    desk.put("a")
    desk.wait(90)
    desk.release(desk.read("a"))
    assert desk.wait(90).copies == 0
    assert (
        desk.catalog.next_expiry_s() <= desk.now_s + 10
    )  # it was not told, and nothing woke the janitor
    assert desk.wait(11).copies == 1
    assert desk.gone() == [("a", Reason.EXPIRED)]
    found = desk.hits("a")
    assert (found.hit_tokens, found.checkpoint_tokens) == (4, 0)


def test_the_copy_that_is_read_tells_what_there_is_of_window_and_state() -> None:
    # Match counted the groups of all copies together, reading found those of the fastest one only.
    desk = Desk(spec_of("both", LINEAR, STATE, WINDOW), dram=16, nvme=16, checkpoint_share=0.5)
    desk.put("a", groups=[0, 1])
    desk.write_back()
    for copy in desk.copies("a"):
        if desk.catalog.books.copies.tier[copy] == DRAM:
            desk.catalog.drop_copy(copy, Reason.WATERMARK, desk.now_s)
    reserved = desk.begin("a", groups=[1, 2])  # the state is on disk, but the new copy will be read
    assert [piece.group for piece in reserved.grants[0].pieces] == [1, 2]  # type: ignore[union-attr]  # granted
    desk.commit(reserved)
    assert desk.hits("a").checkpoint_tokens == 4
    pieces = desk.read("a").blocks[0].pieces
    assert [piece.group for piece in pieces if piece] == [0, 1, 2]
    assert desk.write_back() == ["a"]  # the lesser copy on disk makes way


# ---- puts


def test_two_writers_of_one_block_do_not_write_twice() -> None:
    desk = Desk()
    first = desk.begin("a")
    assert desk.begin("a").status == [IN_PROGRESS]
    desk.commit(first)
    assert desk.begin("a").status == [PRESENT]


def test_nothing_is_readable_before_its_commit() -> None:
    desk = Desk()
    reserved = desk.begin("ab")
    assert desk.there("ab") == ""
    assert desk.read("a").blocks[0].reason is Reason.INCOMPLETE
    desk.commit(reserved)
    assert desk.there("ab") == "ab"


def test_an_aborted_fill_leaves_nothing() -> None:
    desk = Desk()
    reserved = desk.begin("abc")
    fills = [grant.fill for grant in reserved.grants if grant]
    desk.catalog.abort(desk.session, fills, desk.now_s)
    desk.catalog.check()
    assert desk.catalog.blocks == 0
    assert desk.catalog.tier_use()[0].used_units == 0


def test_a_block_that_is_removed_while_written_is_lost_at_its_commit() -> None:
    desk = Desk()
    reserved = desk.begin("a")
    remove(desk.catalog, desk.ns, desk.keys("a"), desk.now_s)
    desk.catalog.check()
    assert desk.commit(reserved) == [None]
    assert desk.catalog.tier_use()[0].used_units == 0


def test_a_replacement_needs_the_generation_and_gives_a_new_one() -> None:
    desk = Desk(spec_of("mutable", LINEAR, mutable=True))
    desk.put("a")
    _, (generation,) = desk.catalog.locate(desk.ns, desk.keys("a"))
    reader = desk.read("a")
    call = desk.namers[0].reserve(desk.session, ["a"], [None])
    with pytest.raises(Conflict):
        desk.catalog.replace_if(call, [int(generation) + 1], desk.now_s)
    assert desk.there("a") == "a"
    reserved = desk.catalog.replace_if(call, [int(generation)], desk.now_s)
    assert desk.gone() == []  # its reader keeps the old bytes
    assert desk.commit(reserved) == [True]
    _, (later,) = desk.catalog.locate(desk.ns, desk.keys("a"))
    assert later > generation
    assert desk.release(reader)
    assert desk.gone() == [("a", Reason.REPLACED)]


def test_a_replacement_without_room_keeps_the_old_block() -> None:
    # The old copies were dropped first: a refused replacement lost the block.
    desk = Desk(spec_of("mutable", LINEAR, mutable=True), dram=1)
    desk.put("a")
    _, generations = desk.catalog.locate(desk.ns, desk.keys("a"))
    call = desk.namers[0].reserve(desk.session, ["a"], [None])
    reserved = desk.catalog.replace_if(call, generations.tolist(), desk.now_s)
    assert reserved.status == [NO_SPACE]
    assert desk.there("a") == "a"


def test_blocks_of_an_immutable_namespace_are_not_replaced() -> None:
    desk = Desk()
    call = desk.namers[0].reserve(desk.session, ["a"], [None])
    with pytest.raises(Conflict, match="immutable"):
        desk.catalog.replace_if(call, [0], desk.now_s)


# ---- looks


def test_a_match_of_no_keys_is_empty() -> None:
    # There is no first key whose absence could be explained.
    found = Desk().hits("")
    assert (found.hit_blocks, found.miss_reason) == (0, "")


def test_explain_says_where_a_block_is_or_which_rule_took_it() -> None:
    desk = Desk(dram=2, limits=Limits(history_max=3))
    assert desk.explain("a").reason is Reason.NEVER_STORED
    desk.put("ab")
    verdict = desk.explain("a")
    assert (verdict.reason, verdict.tiers) == (None, (DRAM,))
    desk.put("x")
    assert desk.explain("b").reason is Reason.DEMAND
    remove(desk.catalog, desk.ns, desk.keys("x"), desk.now_s)
    assert desk.explain("x").reason is Reason.REMOVED
    (copy,) = desk.copies("a")
    desk.catalog.drop_copy(copy, Reason.CORRUPT, desk.now_s)
    assert desk.explain("a").reason is Reason.CORRUPT
    desk.put("c")
    remove(desk.catalog, desk.ns, desk.keys("c"), desk.now_s)
    verdict = desk.explain("b")
    assert verdict.reason is Reason.UNKNOWN
    assert "older than" in verdict.text


def test_a_later_loss_of_an_unreadable_rest_does_not_rewrite_history() -> None:
    # The eviction of the dense rest of a block whose sparse rows were corrupt hid the corruption.
    desk = Desk(spec_of("csa", LINEAR, SPARSE))
    desk.put("a")
    for copy in desk.copies("a"):
        reason = Reason.CORRUPT if is_sparse_in_dram(desk, copy) else Reason.DEMAND
        desk.catalog.drop_copy(copy, reason, desk.now_s)
    assert desk.explain("a").reason is Reason.CORRUPT


def test_locate_tells_every_tier_that_holds_a_block_whole() -> None:
    desk = Desk(dram=4, nvme=4)
    desk.put("ab")
    desk.write_back()
    tiers, generations = desk.catalog.locate(desk.ns, desk.keys("abz"))
    assert tiers.tolist() == [0x86, 0x86, 0]
    assert np.count_nonzero(generations) == 2


def test_touch_counts_what_is_readable() -> None:
    # Rows that only stand in as parents were counted too.
    desk = Desk()
    desk.put("b", under="a")
    assert desk.catalog.touch(desk.ns, desk.keys("ab"), desk.now_s) == 1
