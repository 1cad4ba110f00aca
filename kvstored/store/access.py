"""What engines tell of attention and of their working sets: to the core, to the log, and as page-ins."""

from pathlib import Path

import numpy as np

from kvstored.core.feedback import Access, Reported
from kvstored.core.plan import Signal
from kvstored.core.readability import NOT_READABLE
from kvstored.core.residents import Residents
from kvstored.core.types import KeyBatch, Layout, NamespaceId, Rows
from kvstored.store.lane import Urgency
from kvstored.store.selection_log import SelectionLog
from kvstored.store.sessions import Session
from kvstored.store.shell import Shell


class Accesses:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.residents = Residents(shell.catalog.books)
        self._log: SelectionLog | None = None

    def record_to(self, path: Path) -> None:
        self._log = SelectionLog(path)

    def report(self, layout: Layout, keys: KeyBatch, access: Access) -> Reported:
        shell, now_s = self._shell, self._shell.now_s()
        told = self._tell(layout, self._readable(layout.id, keys), access, now_s)
        shell.apply()
        self._count(told, len(keys))
        if told.is_taken and len(told.wanted):
            names = shell.catalog.books.index.fingerprints[told.wanted]
            shell.catalog.page_ins.want(layout.id, names, Signal.SELECTION, 0.0, now_s)
        if told.is_taken and access.is_selection and self._log is not None:
            self._log.add(layout, keys, access, now_s)
        return told

    def _tell(self, layout: Layout, rows: Rows, access: Access, now_s: float) -> Reported:
        feedback, group = self._shell.catalog.feedback, layout.spec.groups[access.group]
        weights = feedback.limits.weights
        weight = weights.get((group.name, access.layer), weights.get((group.name, -1), 1.0))
        if access.tags is not None:
            told = feedback.tagged(rows, access.tags, now_s)
            if not (told.is_taken and access.is_selection):
                return told
        if access.selected is not None:
            return feedback.selected(rows, group.part, access.selected, weight, now_s)
        assert access.mass is not None, "a report has one of the three"
        return feedback.attended(rows, group.part, access.mass, weight, now_s)

    def reside(self, session: Session, layout: Layout, keys: KeyBatch, wait_s: float) -> int:
        """The session's predicted working set; how many of its blocks are to be loaded for it."""
        now_s = self._shell.now_s()
        deadline_s = now_s + wait_s
        self.residents.report(session.core, layout.id, keys.fingerprints, deadline_s)
        blocks = self._shell.catalog.books.blocks
        rows = self._readable(layout.id, keys)
        cold = (rows >= 0) & (blocks.fast[rows] > 1)
        if cold.any():
            names = keys.fingerprints[cold]
            page_ins = self._shell.catalog.page_ins
            page_ins.want(layout.id, names, Signal.RESIDENT, deadline_s, now_s)
        return int(np.count_nonzero(cold))

    def judge_once(self) -> None:
        """Facts of sets whose deadline has come."""
        if not len(self.residents):
            return
        seen, counts = self.residents.look(self._shell.now_s()), self._shell.counts
        counts["resident_blocks", "in-time"] += seen.in_time_blocks
        counts["resident_blocks", "late"] += seen.late_blocks
        counts["resident_reads", "predicted"] += seen.predicted_reads
        counts["resident_reads", "other"] += seen.other_reads
        for late_s in seen.late_s:
            self._shell.metrics.resident_late_seconds.observe(late_s)

    async def write_log_once(self) -> None:
        log = self._log
        lines = log.take() if log is not None else []
        if log is not None and lines:
            lane = self._shell.tiers.arena_lane
            await lane.submit(lambda: log.write(lines), Urgency.BACKGROUND)

    # ---- inside

    def _readable(self, ns: NamespaceId, keys: KeyBatch) -> Rows:
        """Rows of the keys, -1 where one is not readable."""
        books = self._shell.catalog.books
        rows = books.index.find(keys.fingerprints)
        there = (rows >= 0) & (books.blocks.ns[rows] == ns)
        there &= books.blocks.fast[rows] != NOT_READABLE
        return np.where(there, rows, np.int32(-1))

    def _count(self, told: Reported, keys: int) -> None:
        counts = self._shell.counts
        if not told.is_taken:
            counts["feedback_blocks", "shed"] += keys
            return
        counts["feedback_blocks", "known"] += told.blocks
        counts["feedback_blocks", "unknown"] += keys - told.blocks
        counts["feedback_blocks", "raised"] += len(told.raised)
