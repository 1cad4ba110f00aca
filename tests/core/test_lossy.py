"""Copies that are near what was put and not equal: told, and misses for those who want exact ones."""

from dataclasses import replace

from kvstored.core.calls import FillStatus, ReadStatus, Reason, StoredPiece
from kvstored.core.types import Extent, TierId
from tests.core.desk import Desk
from tests.core.test_catalog_recovery import found
from tests.core.test_frames import KV, begun, desk_of, head_of

NVME, DRAM = TierId.NVME, TierId.DRAM
LOSSY_KV = replace(KV, lossy_ok=True)


def on_disk(desk: Desk, names: str) -> None:
    """Stored there as something near, and not in memory any more."""
    desk.put(names)
    for task in begun(desk):
        stored = [StoredPiece(head_of(move.target, 5), 99, lossy=True) for move in task.moves]
        desk.catalog.carriage.commit(task.id, stored, desk.now_s)
    while desk.catalog.shed(DRAM, desk.now_s, 1):
        desk.catalog.check()


def matched(desk: Desk, names: str, *, exact: bool = False) -> tuple[int, int, str]:
    match = desk.catalog.match(desk.ns, desk.keys(names), 0, desk.now_s, exact=exact)
    return match.hit_blocks, match.lossy_blocks, match.miss_reason


def test_as_long_as_the_exact_copy_is_there_it_is_read() -> None:
    desk = desk_of(LOSSY_KV)
    desk.put("a")
    (task,) = begun(desk)
    stored = [StoredPiece(task.moves[0].target, 99, lossy=True)]
    desk.catalog.carriage.commit(task.id, stored, desk.now_s)
    assert matched(desk, "a", exact=True) == (1, 0, "")


def test_what_is_near_is_told_and_is_no_exact_hit() -> None:
    desk = desk_of(LOSSY_KV)
    on_disk(desk, "a")
    assert matched(desk, "a") == (1, 1, "")
    assert matched(desk, "a", exact=True) == (0, 0, "lossy")


def test_it_is_loaded_under_the_checksum_of_what_it_is() -> None:
    desk = desk_of(LOSSY_KV)
    on_disk(desk, "a")
    acquired = desk.catalog.acquire(desk.namers[0].acquire(desk.session, ["a"]), desk.now_s)
    (task,) = desk.singly(acquired.loads)
    assert task.moves[0].checksum == 99


def test_it_stays_so_in_memory_and_on_its_way_back() -> None:
    desk = desk_of(LOSSY_KV)
    on_disk(desk, "a")
    grant = desk.read("a")
    (block,) = grant.blocks
    assert block.lossy
    desk.release(grant)
    desk.catalog.shed(NVME, desk.now_s, 1)
    desk.gone()
    assert matched(desk, "a") == (1, 1, "")
    desk.release(desk.read("a"))
    (task,) = begun(desk)
    desk.catalog.carriage.commit(task.id, [StoredPiece(task.moves[0].target, 99)], desk.now_s)
    desk.catalog.shed(DRAM, desk.now_s, 1)
    assert matched(desk, "a") == (1, 1, "")


def test_who_wants_exact_ones_gets_a_miss() -> None:
    desk = desk_of(LOSSY_KV)
    on_disk(desk, "a")
    namer = desk.namers[0]
    call = namer.acquire(desk.session, ["a"], exact=True)
    acquired = desk.catalog.acquire(call, desk.now_s)
    (block,) = desk.catalog.grant(acquired.lease, desk.now_s).blocks
    assert (block.status, block.reason) == (ReadStatus.MISS, Reason.LOSSY)
    assert not acquired.loads


def test_nothing_is_remembered_of_copies_that_are_gone() -> None:
    desk = desk_of(LOSSY_KV)
    on_disk(desk, "abcd")
    desk.release(desk.read("abcd"))
    lossy = desk.catalog.books.space.frames.lossy
    assert len(lossy) == 8
    desk.catalog.shed(NVME, desk.now_s, 8)
    assert len(lossy) == 4
    desk.catalog.shed(DRAM, desk.now_s, 8)
    assert not lossy


def test_a_restart_does_not_make_it_exact() -> None:
    desk = desk_of(LOSSY_KV)
    desk.catalog.recovery.begin(NVME)
    piece = found(desk, "a", (Extent(0, 0, 5),), lossy=True)
    assert desk.catalog.recovery.recover(NVME, desk.ns, [piece], desk.now_s) == [True]
    desk.catalog.recovery.done(NVME, desk.now_s)
    assert matched(desk, "a") == (1, 1, "")


def test_a_put_of_a_block_that_is_not_exact_makes_it_so() -> None:
    desk = desk_of(LOSSY_KV)
    on_disk(desk, "a")
    assert desk.put("a") == [FillStatus.GRANTED]
    assert matched(desk, "a", exact=True) == (1, 0, "")
    assert not desk.catalog.books.space.frames.lossy
    assert desk.put("a") == [FillStatus.PRESENT]


def test_where_there_is_no_room_for_it_the_block_stays_as_it_is() -> None:
    desk = desk_of(LOSSY_KV, dram=1)
    on_disk(desk, "a")
    held = desk.begin("b")
    assert desk.begin("a").status == [FillStatus.PRESENT]
    assert matched(desk, "a") == (1, 1, "")
    desk.commit(held)


def test_who_writes_it_meanwhile_is_not_disturbed() -> None:
    desk = desk_of(LOSSY_KV)
    on_disk(desk, "a")
    first = desk.begin("a")
    assert desk.begin("a").status == [FillStatus.IN_PROGRESS]
    assert desk.commit(first) == [True]
