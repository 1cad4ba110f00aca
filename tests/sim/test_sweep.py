"""Orders are drawn between LRU and the optimum, whoever replays the cells."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from kvstored.sim.sweep import LRU, Cell, Order, Replayed, markdown, replayed, sweep

from .test_core import random_kvt1

ORDERS = [Order("composite"), Order("composite", ("outlen",)), Order("lfu")]


def test_cells_may_be_replayed_elsewhere_and_come_back_in_their_order(tmp_path: Path) -> None:
    trace = random_kvt1(tmp_path / "trace", 2, requests=120)
    held, seen = list(trace), list[Cell]()

    def elsewhere(cells: Iterable[Cell]) -> list[Replayed]:
        seen.extend(cells)
        backwards = map(partial(replayed, held, trace.block_tokens), reversed(seen))
        return list(backwards)[::-1]

    here = sweep(trace, ORDERS, capacities_blocks=[5, 20])
    there = sweep(trace, ORDERS, capacities_blocks=[5, 20], replay=elsewhere)
    assert seen == [(order, capacity) for order in (LRU, *ORDERS) for capacity in (5, 20)]
    assert [line.order for line in there.lines] == [LRU, *ORDERS]
    assert [line.hit_ratios for line in there.lines] == [line.hit_ratios for line in here.lines]
    assert there.lru == there.lines[0].hit_ratios
    assert all(
        ratio <= best
        for line in there.lines
        for ratio, best in zip(line.hit_ratios, there.optimum, strict=True)
    )


def test_the_table_has_every_order_with_its_hints_and_the_optimum(tmp_path: Path) -> None:
    trace = random_kvt1(tmp_path / "trace", 2, requests=60)
    rows = markdown([sweep(trace, ORDERS, capacities_blocks=[5])]).splitlines()
    names = [row.split(" | ")[1] for row in rows[2:]]
    assert names == ["lru", "composite", "composite +outlen", "lfu", "optimum"]
    assert len({row.count("|") for row in rows}) == 1
