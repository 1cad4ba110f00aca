"""Blocks that are stored as what they differ by from another one: who refers to whom, and what of it stays."""

from kvstored.core.calls import Base, CopyTask, Freed, Reason, StoredPiece
from kvstored.core.catalog import Catalog
from kvstored.core.types import Budget, Extent, GroupKind, GroupSpec, Place, TierId
from tests.core.desk import UNIT, Desk, freed_in, remove, spec_of

NVME = TierId.NVME
UNITS = 16
"""Of a block: the smallest that is coded."""
KV = GroupSpec("kv", GroupKind.LINEAR, UNITS * UNIT)
STATE = GroupSpec("state", GroupKind.STATE, UNITS * UNIT)
I_UNITS, P_UNITS = 11, 5
CONTENT = 77


def desk_of(*groups: GroupSpec, dram: int = 8, nvme: int = 8) -> Desk:
    return Desk(spec_of("m", *(groups or (KV,))), dram=dram * UNITS, nvme=nvme * UNITS)


def begun(desk: Desk) -> list[CopyTask]:
    tasks = desk.singly(desk.catalog.write_back(1 << 30, desk.now_s))
    desk.catalog.check()
    return tasks


def write(desk: Desk, task: CopyTask, *, refers: bool = True) -> None:
    """As the tier does: a piece that refers to its base is smaller."""
    stored = [
        StoredPiece(
            head_of(move.target, P_UNITS if refers and move.base else I_UNITS),
            1,
            refers and move.base is not None,
        )
        for move in task.moves
    ]
    desk.catalog.carriage.commit(task.id, stored, desk.now_s)
    desk.catalog.check()


def head_of(place: Place, units: int) -> Place:
    (extent,) = place
    return (Extent(extent.segment, extent.start, units),)


def pair(desk: Desk) -> tuple[CopyTask, CopyTask]:
    """Blocks a and b of one content, of which the second refers to the first on disk."""
    desk.put("a", contents=[CONTENT])
    desk.put("b", contents=[CONTENT])
    (one,) = begun(desk)
    write(desk, one)
    (other,) = begun(desk)
    write(desk, other)
    return one, other


def name(task: CopyTask, desk: Desk) -> str:
    return desk.name_of(task.fingerprint)


def forget(desk: Desk, names: str) -> list[Freed]:
    """Their discards on disk are not carried out yet."""
    desk.catalog.drain()
    remove(desk.catalog, desk.ns, desk.keys(names), desk.now_s)
    desk.catalog.check()
    return [freed for freed in freed_in(desk.catalog.drain()) if freed.tier is NVME]


def discard(desk: Desk, freed: list[Freed]) -> None:
    for effect in freed:
        desk.catalog.discarded(effect.token)
    desk.catalog.check()


def used(desk: Desk) -> int:
    return next(use.used_units for use in desk.catalog.tier_use() if use.tier is NVME)


def free_units(catalog: Catalog) -> int:
    return catalog.books.space.books[NVME].extents.free_units


def test_the_second_block_of_a_content_waits_for_the_first_and_refers_to_it() -> None:
    desk = desk_of()
    desk.put("a", contents=[CONTENT])
    desk.put("b", contents=[CONTENT])
    (one,) = begun(desk)
    assert (name(one, desk), one.moves[0].base, one.content) == ("a", None, CONTENT)
    assert not begun(desk)
    write(desk, one)
    (other,) = begun(desk)
    assert other.moves[0].base == Base(one.fingerprint, head_of(one.moves[0].target, I_UNITS))
    write(desk, other)
    assert used(desk) == I_UNITS + P_UNITS


def test_one_that_refers_is_never_referred_to() -> None:
    desk = desk_of()
    one, _ = pair(desk)
    desk.put("c", contents=[CONTENT])
    (third,) = begun(desk)
    base = third.moves[0].base
    assert base is not None
    assert base.fingerprint == one.fingerprint


def test_a_write_that_fails_hands_its_turn_to_the_next() -> None:
    desk = desk_of()
    desk.put("a", contents=[CONTENT])
    desk.put("b", contents=[CONTENT])
    (one,) = begun(desk)
    desk.catalog.carriage.abort(one.id, Reason.IO_ERROR, desk.now_s)
    (other,) = begun(desk)
    assert (name(other, desk), other.moves[0].base) == ("b", None)


def test_where_the_sample_says_no_the_base_is_let_go() -> None:
    desk = desk_of()
    desk.put("a", contents=[CONTENT])
    desk.put("b", contents=[CONTENT])
    write(desk, *begun(desk))
    write(desk, *begun(desk), refers=False)
    assert not len(desk.catalog.books.space.frames)
    discard(desk, forget(desk, "a"))
    assert used(desk) == I_UNITS


def test_the_extent_outlives_its_key_until_the_last_that_refers_to_it_is_gone() -> None:
    desk = desk_of()
    pair(desk)
    desk.put("c", contents=[CONTENT])
    write(desk, *begun(desk))
    discard(desk, forget(desk, "a"))
    assert desk.there("abc") == "bc"
    assert used(desk) == I_UNITS + 2 * P_UNITS
    discard(desk, forget(desk, "b"))
    assert used(desk) == I_UNITS + P_UNITS
    last = forget(desk, "c")
    assert free_units(desk.catalog) == 8 * UNITS - I_UNITS - P_UNITS, "granted before the discard"
    discard(desk, last)
    assert free_units(desk.catalog) == 8 * UNITS


def test_an_extent_without_key_is_no_base_for_more() -> None:
    desk = desk_of()
    pair(desk)
    discard(desk, forget(desk, "a"))
    desk.put("c", contents=[CONTENT])
    (third,) = begun(desk)
    assert third.moves[0].base is None


def test_a_base_that_goes_while_something_is_written_against_it_stays_until_that_is_over() -> None:
    desk = desk_of()
    desk.put("a", contents=[CONTENT])
    desk.put("b", contents=[CONTENT])
    write(desk, *begun(desk))
    (other,) = begun(desk)
    gone = forget(desk, "a")
    discard(desk, gone)
    assert free_units(desk.catalog) == 8 * UNITS - I_UNITS - UNITS
    write(desk, other, refers=False)  # the tier found no record of it
    discard(desk, freed_in(desk.catalog.drain()))
    assert used(desk) == I_UNITS
    assert free_units(desk.catalog) == 8 * UNITS - I_UNITS


def test_what_others_refer_to_is_evicted_after_them() -> None:
    desk = desk_of()
    pair(desk)
    desk.now_s += 1
    desk.release(desk.read("b"))  # more recent than a
    desk.catalog.drain()
    assert desk.catalog.shed(NVME, desk.now_s, 1) == 1
    assert NVME not in desk.tiers_of("b")
    assert desk.catalog.shed(NVME, desk.now_s, 1) == 1
    assert NVME not in desk.tiers_of("a")


def test_one_below_what_refers_to_it_does_not_keep_it_for_ever() -> None:
    # b refers to a, and is a's parent: neither could leave first.
    desk = desk_of()
    desk.put("a", under="b", contents=[CONTENT])
    write(desk, *begun(desk))
    desk.put("b", contents=[CONTENT])
    write(desk, *begun(desk))
    books = desk.catalog.books
    on_disk = [
        copy for letter in "ab" for copy in desk.copies(letter) if books.copies.tier[copy] == NVME
    ]
    assert not any(books.is_evictable(copy) for copy in on_disk)
    discard(desk, [freed for freed in freed_in(desk.catalog.drain()) if freed.token])
    while desk.catalog.shed(NVME, desk.now_s, 1):
        discard(desk, [freed for freed in freed_in(desk.catalog.drain()) if freed.token])
    assert used(desk) == 0


def test_window_and_state_copies_never_refer() -> None:
    desk = desk_of(KV, STATE)
    desk.put("a", contents=[CONTENT])
    desk.put("b", contents=[CONTENT])
    for task in [*begun(desk), *begun(desk)]:
        write(desk, task)
    for task in begun(desk):
        assert all(move.base is None or move.group == 0 for move in task.moves)
        write(desk, task)
    assert len(desk.catalog.books.space.frames) == 1


def test_content_keys_of_small_blocks_are_not_kept() -> None:
    desk = Desk(nvme=64)
    desk.put("abcd", contents=[1, 2, 3, 4])
    assert not desk.catalog.books.blocks.content.any()


def test_a_removed_block_leaves_no_turn_behind() -> None:
    desk = desk_of()
    desk.put("a", contents=[CONTENT])
    (one,) = begun(desk)
    remove(desk.catalog, desk.ns, desk.keys("a"), desk.now_s)
    desk.put("b", contents=[CONTENT])
    write(desk, one)
    (other,) = begun(desk)
    assert (name(other, desk), other.moves[0].base) == ("b", None)


def test_budgets_count_what_is_kept_for_others() -> None:
    desk = desk_of(nvme=2)
    pair(desk)
    discard(desk, forget(desk, "a"))
    space = desk.catalog.books.space
    assert space.limit(NVME, Budget.GLOBAL) == 2 * UNITS - I_UNITS
