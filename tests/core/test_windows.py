"""Class P1: the recent window of a running request leaves last where it could not be held, whatever the policy thinks of it."""

from random import Random

import pytest

from kvstored.core.calls import Reason
from kvstored.core.columns import FIRST
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import Heat, TierId
from kvstored.core.windows import Windows
from tests.core.desk import BLOCK_TOKENS, Desk, spec_of

DRAM = TierId.DRAM
EVICTED = (Reason.DEMAND, Reason.WATERMARK)


def run(desk: Desk, names: str, id_: bytes = b"r") -> None:
    desk.catalog.begin_request(desk.session, id_, desk.ns, desk.keys(names), desk.now_s)
    desk.catalog.check()


def left(desk: Desk) -> list[str]:
    return [name for name, reason in desk.gone() if reason in EVICTED]


def test_what_could_not_be_held_leaves_after_what_is_of_no_window() -> None:
    """The head of the long path was held, and its end, which decoding reads, was the next to go."""
    desk = Desk(spec_of("m", recent_tokens=2 * BLOCK_TOKENS), dram=8, lease_share=0.5)
    desk.put("abcdef")
    desk.now_s += 1
    run(desk, "abcdef")
    desk.now_s += 1
    desk.put("xy")
    desk.put("wv")
    assert left(desk) == ["y", "x"], "and not f, which was used before"
    desk.put("u")
    assert left(desk) == ["v"]


def test_windows_leave_where_nothing_else_may() -> None:
    desk = Desk(spec_of("m", recent_tokens=BLOCK_TOKENS), dram=4, lease_share=0.5)
    desk.put("abcd")
    run(desk, "abcd")
    desk.put("x")
    assert left(desk) == ["d"]
    desk.put("y")
    assert left(desk) == ["c"], "which is of no window: as the policy says"


def test_a_run_of_victims_ends_below_a_window() -> None:
    desk = Desk(spec_of("m", recent_tokens=BLOCK_TOKENS), dram=12, lease_share=0.1)
    desk.put("abcdefgh")
    run(desk, "abcd")
    desk.put("xyz")
    desk.put("123456")
    assert left(desk) == ["h", "g", "f", "e", "z"]


def test_the_window_slides_with_what_is_decoded() -> None:
    desk = Desk(spec_of("m", recent_tokens=BLOCK_TOKENS), dram=16, lease_share=1.0)
    desk.put("abc")
    run(desk, "ab")
    heat = desk.catalog.books.heat
    rows = {n: int(desk.catalog.books.index.find(desk.keys(n).fingerprints)[0]) for n in "abc"}
    assert [heat(rows[name]) for name in "abc"] == [Heat.COLD, Heat.RECENT, Heat.COLD]
    desk.catalog.extend_request(desk.session, b"r", desk.keys("abc"), desk.now_s)
    assert [heat(rows[name]) for name in "abc"] == [Heat.COLD, Heat.COLD, Heat.RECENT]
    desk.catalog.complete_request(desk.session, b"r", False, desk.now_s)
    assert [heat(rows[name]) for name in "abc"] == [Heat.COLD] * 3


def test_a_row_that_another_block_got_is_of_no_window() -> None:
    desk = Desk(spec_of("m", recent_tokens=BLOCK_TOKENS), dram=3, lease_share=0.1)
    desk.put("ab")
    run(desk, "ab")
    recent = desk.catalog.books.recent
    assert (len(recent), recent.loose) == (1, 1)
    desk.put("xyz")
    assert desk.there("ab") == ""
    assert not len(recent)
    run(desk, "xyz", b"s")
    desk.catalog.complete_request(desk.session, b"r", False, desk.now_s)
    assert (len(recent), recent.loose) == (1, 1), "the other's window is as it was"
    desk.catalog.complete_request(desk.session, b"s", False, desk.now_s)
    assert (len(recent), recent.loose) == (0, 0)


def test_a_window_that_slides_on_takes_no_row_along_that_another_block_got() -> None:
    desk = Desk(spec_of("m", recent_tokens=3 * BLOCK_TOKENS), dram=3, lease_share=0.1)
    desk.put("ab")
    run(desk, "ab")
    desk.put("xyz")
    desk.catalog.extend_request(desk.session, b"r", desk.keys("x"), desk.now_s)
    rows = desk.catalog.books.index.find(desk.keys("xyz").fingerprints)
    assert desk.catalog.books.recent.among(rows).tolist() == [True, False, False]


def test_a_block_is_of_a_window_until_the_last_of_its_requests_leaves_it() -> None:
    windows = Windows()
    windows.enter([1, 2], 7)
    windows.enter([2], 8)
    windows.leave([1, 2], 7)
    assert (1 in windows, 2 in windows) == (False, True)
    windows.leave([2, 3], 8)
    assert not len(windows)


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_follow_the_classes_under_every_policy(policy: str) -> None:
    """Whoever leaves: no first victim could have left before one of another class, and nothing else before one of a window."""
    for seed in range(3):
        random = Random(seed)
        spec = spec_of("m", recent_tokens=BLOCK_TOKENS)
        desk = Desk(spec, dram=16, nvme=40, policy=policy, lease_share=0.3)
        books = desk.catalog.books
        running: list[bytes] = []
        for i in range(24):
            desk.now_s += random.random()
            head = 0x1000 + 8 * i
            what = random.random()
            if what < 0.3:
                earlier = random.randrange(max(i, 1))
                path = "".join(chr(0x1000 + 8 * earlier + j) for j in range(4))
                if there := desk.there(path):
                    running.append(b"%d" % i)
                    run(desk, there, running[-1])
            elif what < 0.4 and running:
                id_ = running.pop(random.randrange(len(running)))
                desk.catalog.complete_request(desk.session, id_, False, desk.now_s)
            elif what < 0.5:
                desk.write_back()
            else:
                for j in range(random.randrange(1, 5)):
                    classes = {
                        desk.name_of(books.fingerprint(int(books.copies.block[row]))): (
                            not books.copies.flags[row] & FIRST
                        )
                        + bool(books.recent.loose and int(books.copies.block[row]) in books.recent)
                        for row in range(books.copies.top)
                        if books.copies.block[row] >= 0
                        and int(books.copies.tier[row]) == DRAM
                        and books.is_evictable(row)
                    }
                    desk.gone()
                    under = chr(head + j - 1) if j and desk.there(chr(head + j - 1)) else None
                    desk.put(chr(head + j), under=under)
                    for name in left(desk)[:1]:
                        others = [c for other, c in classes.items() if other != under]
                        assert classes[name] == min(others), (seed, i, name)
