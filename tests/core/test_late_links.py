"""Blocks that learn of their parent late, writers that meet a replacement, and what leaves memory first within a block."""

from collections.abc import Sequence

import pytest

from kvstored.core.calls import FillStatus, Linked, Reason
from kvstored.core.types import Part, TierId
from kvstored.errors import Conflict
from tests.core.desk import LINEAR, SPARSE, Desk, spec_of


def test_a_block_put_without_its_parent_is_linked_when_it_is_put_again_with_it() -> None:
    """The second put answered PRESENT and left two roots."""
    desk = Desk()
    desk.put("a")
    desk.put("b")
    desk.catalog.drain()
    assert desk.put("ab") == [FillStatus.PRESENT] * 2
    (node,), _ = desk.catalog.looking.tree_nodes([desk.namers[0].layout.id], 10)
    assert (node.blocks, node.depth) == (2, 0)
    (linked,) = [effect for effect in desk.catalog.drain() if isinstance(effect, Linked)]
    assert (linked.tier, linked.depth) == (TierId.DRAM, 1)
    low, high = desk.namers[0].batch(["a"]).fingerprints[0].tolist()
    assert linked.parent == (low, high)


def test_a_replacement_of_what_is_absent_does_not_take_it_from_who_is_writing_it() -> None:
    """The first writer's commit was lost."""
    desk = Desk(spec_of("m", mutable=True))
    begun = desk.begin("a")
    again = desk.namers[0].reserve(desk.session, ["a"], [None])
    with pytest.raises(Conflict):
        desk.catalog.replace_if(again, [0], desk.now_s)
    assert desk.commit(begun) == [True]


@pytest.mark.parametrize("policy", ["lru", "composite"])
def test_sparse_rows_leave_memory_before_the_dense_rows_of_the_same_touch(policy: str) -> None:
    """The learned order once took them in the order in which they were offered."""
    desk = Desk(spec_of("m", LINEAR, SPARSE), dram=4, nvme=16, policy=policy)
    desk.put("ab")
    desk.carry(desk.catalog.flush(1 << 30, desk.now_s))
    desk.release(desk.read("ab"))
    desk.put("c")
    books = desk.catalog.books
    parts = [
        Part(int(books.copies.part[copy]))
        for name in "ab"
        for copy in desk.catalog.looking.copies_of(
            desk.namers[0].layout.id,
            tuple(desk.namers[0].batch([name]).fingerprints[0].tolist()),
        )
        if books.copies.tier[copy] == int(TierId.DRAM)
    ]
    assert parts == [Part.DENSE, Part.DENSE]


@pytest.mark.parametrize("names", [["a"], []], ids=["some are left", "nothing is left"])
def test_what_is_gone_since_an_earlier_run_is_unknown_and_not_never_stored(
    names: Sequence[str],
) -> None:
    desk = Desk()
    absent = desk.namers[0].batch(["z"])
    fingerprint = tuple(absent.fingerprints[0].tolist())
    ns = desk.namers[0].layout.id
    assert desk.catalog.looking.explain(ns, fingerprint, desk.now_s).reason is Reason.NEVER_STORED
    for name in names:
        desk.put(name)
    desk.catalog.recovery.begin(TierId.DRAM)
    assert desk.catalog.looking.explain(ns, fingerprint, desk.now_s).reason is Reason.RECOVERING
    desk.catalog.recovery.done(TierId.DRAM, desk.now_s)
    assert desk.catalog.looking.explain(ns, fingerprint, desk.now_s).reason is Reason.UNKNOWN
