"""In which order parts travel between tiers, and how many there are of each class."""

import numpy as np

from kvstored.core.calls import CopyTask, Reason
from kvstored.core.census import SLICE, Census, classes_of, count_slice, nobody
from kvstored.core.columns import READY
from kvstored.core.feedback import FeedbackLimits
from kvstored.core.plan import Bounds, Signal
from kvstored.core.travel import loads_in_order
from kvstored.core.types import UNIT_BYTES, Heat, Part, TierId, as_rows
from tests.core.desk import BLOCK_TOKENS, LINEAR, SPARSE, Desk, spec_of

DRAM, NVME = TierId.DRAM, TierId.NVME
TWO_PARTS = spec_of("m", LINEAR, SPARSE)


def tasks(desk: Desk, copying: object) -> list[tuple[str, Part]]:
    assert isinstance(copying, list)
    assert all(isinstance(each, CopyTask) for each in copying)
    return [(desk.name_of(each.fingerprint), each.part) for each in copying]


def test_dense_parts_go_down_first_and_lie_together() -> None:
    desk = Desk(TWO_PARTS, dram=16, nvme=32)
    desk.put("abcd")
    shown = list(desk.catalog.scheduler.write_back.look(desk.now_s))
    begun = desk.catalog.write_back(1 << 30, desk.now_s)
    assert tasks(desk, begun) == [(n, Part.DENSE) for n in "abcd"] + [
        (n, Part.SPARSE) for n in "abcd"
    ]
    table = desk.catalog.books.copies
    assert [int(table.part[copy]) for copy, _ in shown] == [int(Part.DENSE)] * 4 + [
        int(Part.SPARSE)
    ] * 4
    starts = [move.target[0].start for each in begun for move in each.moves]  # type: ignore[union-attr]  # tasks, as above
    assert starts == list(range(starts[0], starts[0] + 8)), "each part is one stretch of the disk"
    desk.carry(begun)


def test_dense_parts_come_up_first_and_whole_then_sparse_ones_by_heat() -> None:
    desk = Desk(TWO_PARTS, dram=16, nvme=32)
    desk.put("abcd")
    desk.write_back()
    catalog, table = desk.catalog, desk.catalog.books.copies
    for name in "dcba":
        for copy in desk.copies(name):
            if int(table.tier[copy]) == DRAM:
                catalog.drop_copy(copy, Reason.DEMAND, desk.now_s)
    rows = catalog.books.index.find(desk.keys("abcd").fingerprints)
    catalog.feedback.limits = FeedbackLimits(stable_steps=1000)
    selected = np.tile([False, False, True, False], (8, 1))
    catalog.feedback.selected(rows, Part.SPARSE, selected, 1.0, desk.now_s)
    names = desk.keys("abcd").fingerprints
    catalog.page_ins.want(desk.ns, names, Signal.REQUEST, 0.0, desk.now_s)
    loads = catalog.scheduler.run(Bounds(load_bytes=1 << 30), desk.now_s).loads
    ordered = tasks(desk, loads_in_order(catalog.books, catalog.feedback, loads, desk.now_s))
    assert ordered[:4] == [(name, Part.DENSE) for name in "abcd"]
    assert ordered[4:] == [(name, Part.SPARSE) for name in "cabd"]
    desk.carry(list(loads))


def counted(desk: Desk) -> Census:
    row, census = 0, nobody()
    while row >= 0:
        row = count_slice(desk.catalog.books, row, census)
    return census


def test_the_census_counts_each_copy_once_by_its_class_and_tier() -> None:
    spec = spec_of("m", sink_tokens=BLOCK_TOKENS, recent_tokens=BLOCK_TOKENS)
    desk = Desk(spec, dram=16, nvme=16)
    desk.put("abcd")
    desk.release(desk.read("ab"))
    desk.catalog.begin_request(desk.session, b"r", desk.ns, desk.keys("abcd"), desk.now_s)
    desk.write_back()
    desk.put("xy")
    census = counted(desk)
    in_dram = {Heat(heat): int(n) for heat, n in enumerate(census.copies[:, DRAM]) if n}
    assert in_dram == {Heat.SINK: 2, Heat.RECENT: 1, Heat.SHARED: 1, Heat.COLD: 2}
    assert census.copies[:, NVME].sum() == 4
    assert (census.size_bytes == census.copies * UNIT_BYTES).all()


def test_what_is_to_leave_first_counts_as_cold() -> None:
    desk = Desk(dram=16)
    desk.put("abc")
    desk.release(desk.read("abc"))
    desk.catalog.retire(desk.ns)
    assert counted(desk).copies[Heat.COLD, DRAM] == 3


def test_classes_of_many_are_those_of_each() -> None:
    spec = spec_of("m", sink_tokens=BLOCK_TOKENS, recent_tokens=BLOCK_TOKENS)
    desk = Desk(spec, dram=64)
    for head in range(0x100, 0x140, 4):
        desk.put("".join(map(chr, range(head, head + 4))))
    desk.release(desk.read("".join(map(chr, range(0x100, 0x103)))))
    books = desk.catalog.books
    rows = as_rows([row for row in range(books.copies.top) if books.copies.state[row] == READY])
    each = [int(books.heat(int(block))) for block in books.copies.block[rows].tolist()]
    assert classes_of(books, rows).tolist() == each
    assert len(rows) < SLICE
