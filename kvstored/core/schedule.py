"""The scheduler: what comes up, what leaves and what is written next, decided in one place.

`run` is a round of the daemon's background loop; `look` tells what the next rounds would do and changes nothing. Both ask the same policy, the same
admission and the same queue. Decisions that cannot wait (room for a put, a load that an engine waits for) are made where they arise, by the same parts.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import TypeVar

import numpy as np

from kvstored.core.admission import Admission
from kvstored.core.books import Books
from kvstored.core.calls import CopyTask
from kvstored.core.carriage import Carriage
from kvstored.core.columns import CLEAN
from kvstored.core.copying import Copying
from kvstored.core.eviction import Evictor
from kvstored.core.grains import Grains
from kvstored.core.page_ins import PageIns, Want
from kvstored.core.plan import (
    Bounds,
    Decision,
    NodeMove,
    Objective,
    PageIn,
    Plan,
    Round,
    TierRoom,
)
from kvstored.core.types import UNIT_BYTES, Fingerprints, NamespaceId, Rows, TierId, as_rows
from kvstored.core.write_back import WriteBack

T = TypeVar("T")


class Scheduler:
    def __init__(self, books: Books, evictor: Evictor, carriage: Carriage) -> None:
        self._books = books
        self._evictor = evictor
        self._carriage = carriage
        self.admission = Admission(books)
        self.write_back = WriteBack(books, carriage, self.admission)
        self.grains = Grains(books, carriage, self.admission)
        self.page_ins = PageIns(books, carriage.ahead)

    def follow(self, objectives: Sequence[Objective]) -> None:
        """The operator's order of them, for page-ins and for ties of victims and of what is written."""
        self.page_ins.objectives = self.write_back.objectives = objectives
        self._evictor.classes.objectives = objectives

    def run(self, bounds: Bounds, now_s: float) -> Round:
        """Room first, since page-ins need it; then what is to come up; then what is to be kept below."""
        evicted = {
            tier: self._evictor.trim(tier, now_s, copies_max)
            for tier, copies_max in bounds.evict_copies.items()
        }
        loads: list[Copying] = []
        for want, rows in self.page_ins.take(bounds.load_bytes, now_s):
            self.page_ins.hold(want, rows, now_s)
            begun, _ = self._carriage.prefetch(rows.tolist(), TierId.DRAM, now_s)
            loads += begun
        writes: list[Copying] = []
        if bounds.write_bytes:
            writes = self.write_back.begin(bounds.write_bytes, now_s)
        if bounds.gather_bytes:
            writes += self.grains.begin(bounds.gather_bytes, now_s)
        return Round(evicted, writes, loads)

    def look(self, now_s: float, running: int, rows_max: int) -> Plan:
        """At most so many rows a list. Evictions are exact until a path would leave in two parts with others between them."""
        page_ins = [*islice(self._looked_page_ins(now_s), rows_max + 1)]
        evictions: list[NodeMove] = []
        for tier in sorted(self._books.space.books):
            for run in self._evictor.look(tier, now_s, rows_max + 1):
                evictions += self._leaving(tier, run)
        writes = [*islice(self._looked_writes(now_s), rows_max + 1)]
        lists = page_ins, evictions, writes
        return Plan(
            tiers=tuple(self._rooms()),
            running=running,
            page_ins=tuple(page_ins[:rows_max]),
            evictions=tuple(evictions[:rows_max]),
            writes=tuple(writes[:rows_max]),
            is_cut=any(len(each) > rows_max for each in lists),
        )

    # ---- inside

    def _rooms(self) -> Iterator[TierRoom]:
        for tier, book in sorted(self._books.space.books.items()):
            limits, granted = book.limits, book.granted
            yield TierRoom(
                tier=tier,
                granted_units=granted,
                used_units=sum(book.used),
                free_units=book.extents.free_units,
                high_units=int(granted * limits.high),
                low_units=int(granted * limits.low),
            )

    def _looked_page_ins(self, now_s: float) -> Iterator[PageIn]:
        """What is on its way, then the queue."""
        loads = [task for task in self._carriage.tasks.values() if task.source > TierId.DRAM]
        for ns, tasks in groupby(loads, key=lambda task: task.ns):
            yield _loading(ns, list(tasks))
        for run in self._carriage.runs.values():
            if run.source > TierId.DRAM:
                yield PageIn(
                    *(run.ns, _name(run.fingerprints), len(run), run.size_bytes, run.source),
                    *("", 0.0),
                    is_loading=True,
                )
        for want in self.page_ins.ordered(now_s):
            rows = self.page_ins.below(want)
            if len(rows):
                yield self._wanted(want, rows)

    def _wanted(self, want: Want, rows: Rows) -> PageIn:
        books = self._books
        copies = books.blocks.first_copy[rows]
        source = TierId(int(books.blocks.fast[rows].max()))
        return PageIn(
            ns=want.ns,
            head=books.fingerprint(int(rows[0])),
            blocks=len(rows),
            size_bytes=int(books.copies.units[copies].sum()) * UNIT_BYTES,
            source=source,
            signal=want.signal.value,
            deadline_s=want.deadline_s,
            is_loading=False,
        )

    def _leaving(self, tier: TierId, copies: Rows) -> Iterator[NodeMove]:
        """A run of victims, leaf first, cut where its fate or its node changes."""
        books = self._books
        blocks = books.copies.block[copies]
        is_kept = books.copies.flags[copies] & CLEAN != 0
        nodes = books.tree.node[blocks]
        keys = zip(nodes.tolist(), is_kept.tolist(), strict=True)
        for (_, kept), part in _stretches(list(keys)):
            fate = Decision.DEMOTE if kept else Decision.DROP
            why = "a slower tier has it" if kept else "nowhere else"
            yield self._move(tier, copies[part][::-1], fate, why)

    def _looked_writes(self, now_s: float) -> Iterator[NodeMove]:
        books = self._books
        found = list(self.write_back.look(now_s))
        blocks = books.copies.block[as_rows([copy for copy, _ in found])]
        nodes = books.tree.node[blocks].tolist()
        keys = [(node, why) for node, (_, why) in zip(nodes, found, strict=True)]
        for (_, why), part in _stretches(keys):
            decision = Decision.REFUSE if why else Decision.ADMIT
            rows = as_rows([copy for copy, _ in found[part]])
            yield self._move(TierId.NVME, rows, decision, why or "worth it")
        for rows in self.grains.look(now_s):
            yield self._move(TierId.NVME, rows, Decision.ADMIT, "to lie together")

    def _move(self, tier: TierId, copies: Rows, decision: Decision, why: str) -> NodeMove:
        """`copies`: head first."""
        books = self._books
        head = int(books.copies.block[copies[0]])
        return NodeMove(
            ns=NamespaceId(int(books.blocks.ns[head])),
            head=books.fingerprint(head),
            depth=int(books.tree.depth[head]),
            blocks=len(np.unique(books.copies.block[copies])),
            size_bytes=int(books.copies.units[copies].sum()) * UNIT_BYTES,
            tier=tier,
            decision=decision,
            why=why,
        )


def _loading(ns: NamespaceId, tasks: Sequence[CopyTask]) -> PageIn:
    size_bytes = sum(move.length for task in tasks for move in task.moves)
    first = tasks[0]
    return PageIn(
        ns, first.fingerprint, len(tasks), size_bytes, first.source, "", 0.0, is_loading=True
    )


def _name(fingerprints: Fingerprints) -> tuple[int, int]:
    low, high = fingerprints[0].tolist()
    return low, high


def _stretches(keys: Sequence[tuple[int, T]]) -> Iterator[tuple[tuple[int, T], slice]]:
    """Of equal ones, one after the other."""
    begin = 0
    for i in range(1, len(keys) + 1):
        if i == len(keys) or keys[i] != keys[begin]:
            yield keys[begin], slice(begin, i)
            begin = i
