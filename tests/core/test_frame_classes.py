"""Which class blocks have that are stored against others, and what eviction makes of it."""

from dataclasses import replace

from kvstored.core.columns import SINK
from kvstored.core.frame_classes import heat_of
from kvstored.core.types import Heat, TierId
from tests.core.desk import Desk, spec_of
from tests.core.test_frames import (
    CONTENT,
    KV,
    NVME,
    UNITS,
    begun,
    desk_of,
    discard,
    forget,
    pair,
    write,
)


def on_disk(desk: Desk, letter: str) -> int:
    (found,) = [c for c in desk.copies(letter) if desk.catalog.books.copies.tier[c] == NVME]
    return found


def heat(desk: Desk, letter: str) -> Heat:
    return heat_of(desk.catalog.books, on_disk(desk, letter))


def use(desk: Desk, letters: str) -> None:
    desk.now_s += 1
    desk.release(desk.read(letters))


def test_a_base_is_as_warm_as_what_refers_to_it_and_no_longer() -> None:
    desk = desk_of()
    pair(desk)
    assert heat(desk, "a") is Heat.COLD
    use(desk, "b")
    assert heat(desk, "a") is Heat.SHARED, "b was hit, and who reads it reads a"
    discard(desk, forget(desk, "b"))
    assert heat(desk, "a") is Heat.COLD


def test_one_that_is_stored_against_a_warm_block_of_its_own_is_no_warmer() -> None:
    desk = desk_of()
    pair(desk)
    use(desk, "a")
    assert (heat(desk, "a"), heat(desk, "b")) == (Heat.SHARED, Heat.COLD)


def test_what_refers_is_cold_unless_a_request_runs_on_it() -> None:
    desk = desk_of()
    pair(desk)
    use(desk, "b")
    (in_memory,) = [c for c in desk.copies("b") if desk.catalog.books.copies.tier[c] == TierId.DRAM]
    assert heat_of(desk.catalog.books, in_memory) is Heat.SHARED
    assert heat(desk, "b") is Heat.COLD
    held = desk.read("b")
    assert heat(desk, "b") is Heat.SHARED
    desk.release(held)
    assert heat(desk, "b") is Heat.COLD


def test_uses_of_what_refers_to_it_count_for_a_base() -> None:
    desk = desk_of()
    pair(desk)
    desk.now_s += 1
    desk.put("c")
    write(desk, *begun(desk))
    use(desk, "b")
    discard(desk, forget(desk, "b"))
    desk.catalog.drain()
    assert desk.catalog.shed(NVME, desk.now_s, 1) == 1
    assert NVME not in desk.tiers_of("c")
    assert NVME in desk.tiers_of("a"), "put before c, and used after it by way of b"


def test_without_such_uses_it_is_as_old_as_it_is() -> None:
    desk = desk_of()
    pair(desk)
    desk.now_s += 1
    desk.put("c")
    write(desk, *begun(desk))
    discard(desk, forget(desk, "b"))
    desk.catalog.drain()
    assert desk.catalog.shed(NVME, desk.now_s, 1) == 1
    assert NVME in desk.tiers_of("c")


def test_where_only_bases_can_leave_the_coldest_does() -> None:
    # b refers to a and is a's parent, d to c: none of them can leave in its turn.
    desk = desk_of(dram=16, nvme=16)
    for upper, lower, content in (("b", "a", CONTENT), ("d", "c", CONTENT + 1)):
        desk.put(lower, under=upper, contents=[content])
        write(desk, *begun(desk))
        desk.put(upper, contents=[content])
        write(desk, *begun(desk))
    use(desk, "a")
    desk.catalog.drain()
    assert desk.catalog.shed(NVME, desk.now_s, 1) == 1
    assert NVME not in desk.tiers_of("c")
    assert NVME in desk.tiers_of("a")


def test_a_sink_that_refers_has_no_exemption_on_disk_and_its_base_has() -> None:
    desk = Desk(
        replace(spec_of("m", KV), sink_tokens=1), dram=8 * UNITS, nvme=8 * UNITS, sink_share=1.0
    )
    books = desk.catalog.books
    pair(desk)
    assert books.copies.flags[on_disk(desk, "a")] & SINK
    assert not books.copies.flags[on_disk(desk, "b")] & SINK
