"""Class P0: first blocks of paths stay while something below them is stored, within a share of the tier, and the coldest yields beyond it."""

from random import Random

import pytest

from kvstored.core.calls import Reason
from kvstored.core.columns import READY, SINK
from kvstored.core.plan import Bounds
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import TierId
from tests.core.desk import BLOCK_TOKENS, Desk, spec_of

DRAM, NVME = TierId.DRAM, TierId.NVME
SINKS = spec_of("m", sink_tokens=BLOCK_TOKENS)


def exempt(desk: Desk, tier: TierId = DRAM) -> set[str]:
    """Names of the blocks whose copy in the tier is exempt."""
    books = desk.catalog.books
    copies = books.copies
    return {
        desk.name_of(books.fingerprint(int(copies.block[copy])))
        for copy in range(copies.top)
        if copies.state[copy] == READY
        and copies.flags[copy] & SINK
        and int(copies.tier[copy]) == tier
    }


def test_beyond_the_share_the_coldest_sink_yields() -> None:
    desk = Desk(SINKS, dram=20, sink_share=0.1)
    for path in ("ab", "cd"):
        desk.put(path)
        desk.now_s += 1
    assert exempt(desk) == {"a", "c"}
    desk.release(desk.read("a"))
    desk.now_s += 1
    desk.put("ef")
    assert exempt(desk) == {"a", "e"}, "c is the one that nobody used since"
    desk.catalog.check()


def test_a_sink_that_is_no_warmer_displaces_none() -> None:
    desk = Desk(SINKS, dram=20, sink_share=0.1)
    for path in ("ab", "cd", "ef"):
        desk.put(path)
    assert exempt(desk) == {"a", "c"}


def test_a_sink_that_yielded_leaves_like_any_other_block() -> None:
    desk = Desk(SINKS, dram=4, nvme=8, sink_share=0.25)
    desk.put("ab")
    desk.write_back()
    desk.now_s += 1
    desk.put("cd")
    desk.gone()
    desk.put("wx")
    desk.put("yz")
    gone = [name for name, _ in desk.gone()]
    assert "a" in gone, "what is below it on NVMe does not keep it in memory any more"


def test_the_books_of_sinks_stay_small() -> None:
    desk = Desk(SINKS, dram=8, sink_share=0.5)
    for i in range(1000):
        desk.now_s += 1
        desk.put(chr(0x1000 + i))
    sinks = desk.catalog.books.sinks
    assert len(sinks._numbers) < 200
    assert sum(map(len, sinks._heaps.values())) < 200


@pytest.mark.parametrize("policy", POLICIES)
def test_below_the_cap_no_sink_leaves_while_something_below_it_is_stored(policy: str) -> None:
    for seed in range(10):
        random = Random(seed)
        desk = Desk(SINKS, dram=24, nvme=48, policy=policy, sink_share=0.25, high=0.9, low=0.5)
        books = desk.catalog.books
        for i in range(60):
            desk.now_s += random.random() * 5
            before, head = exempt(desk), chr(0x1000 + 8 * i)
            what = random.random()
            desk.gone()
            if what < 0.5:
                desk.put("".join(chr(ord(head) + j) for j in range(random.randrange(1, 5))))
            elif what < 0.7:
                desk.write_back()
            elif what < 0.85:
                desk.catalog.scheduler.run(Bounds({DRAM: None, NVME: None}), desk.now_s)
            else:
                there = desk.there("".join(chr(0x1000 + j) for j in range(8 * i)))
                desk.release(desk.read(there[: random.randrange(1, 6)] or "A"))
            for name, reason in desk.gone():
                if name in before and reason in (Reason.DEMAND, Reason.WATERMARK):
                    row = int(books.index.find(desk.keys(name).fingerprints)[0])
                    has_below = row >= 0 and bool(books.tree.children[row])
                    yielded = len(exempt(desk)) >= int(24 * 0.25)
                    assert not has_below or yielded, (seed, i, name)
            for tier, book in books.space.books.items():
                assert book.sinks <= int(book.granted * 0.25), (seed, i, tier)
            desk.catalog.check()
