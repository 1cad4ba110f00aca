"""Rounds of the scheduler, carried out: what it decided is begun here, and what is under way bounds the next round.

The janitor's tasks say when; `Schedule` may ask for one in between. What nobody waits for never holds up what an engine waits for: no page-in
is begun while one waits for a load, few are under way at once, and in the lane demand overtakes them.
"""

import asyncio
from collections.abc import Sequence

from kvstored.core.copying import Copying, bytes_in, copies_in
from kvstored.core.plan import Bounds, Round
from kvstored.core.types import TierId
from kvstored.store.lane import Urgency
from kvstored.store.mover import Mover
from kvstored.store.pace import STEP_MIN
from kvstored.store.shell import Shell
from kvstored.store.speeds import Speeds

WRITE_BACK_BYTES = 64 << 20
"""Of one group commit: more is not faster."""
WRITE_BACK_PAUSE_S = 1.0
"""After a failure: a disk that is full or broken is not asked twenty times a second."""
WRITE_BACKS_MAX = 2
"""Group commits under way: one writes while the next gathers."""
PAGE_IN_BYTES = 8 << 20
"""Under way at once: an engine that comes then waits some milliseconds at most."""


class Rounds:
    def __init__(self, shell: Shell, mover: Mover, speeds: Speeds) -> None:
        self._shell = shell
        self._mover = mover
        self._speeds = speeds
        self._write_backs = 0
        self._write_back_after_s = 0.0
        self._paging_bytes = 0

    def evict(self, tier: TierId, copies_max: int) -> int:
        """Above the tier's high watermark; copies that left."""
        evicted = self._run(Bounds({tier: copies_max})).evicted[tier]
        self._shell.counts["evicted_copies", tier.name.lower()] += evicted
        return evicted

    def write_back(self) -> None:
        if bounded := self._write_bytes():
            self._run(Bounds(write_bytes=bounded))

    def gather(self) -> None:
        """What is read with many small calls is laid together on NVMe, while nothing else is to be written."""
        if bounded := self._gather_bytes():
            done = self._run(Bounds(gather_bytes=bounded))
            self._shell.counts["gathered_blocks", ""] += sum(map(copies_in, done.writes))

    def page_in(self) -> None:
        page_ins = self._shell.behind.page_ins
        if not page_ins.is_idle:  # else no reason to make the books of puts now
            self._shell.catalog.page_ins.expect(self._shell.now_s())
            if bounded := self._load_bytes():
                self._run(Bounds(load_bytes=bounded))
        for (signal, how), count in page_ins.ended.items():
            self._shell.counts["page_in_blocks", f"{signal}:{how}"] += count
        page_ins.ended.clear()

    def settle(self) -> None:
        """What became of blocks that were loaded ahead."""
        ahead, counts = self._shell.catalog.carriage.ahead, self._shell.counts
        ahead.look(self._shell.now_s())
        self._shell.apply()
        for (signal, how), count in ahead.ended.items():
            counts["prefetch_outcomes", f"{signal}:{how}"] += count
        counts["prefetch_wasted_bytes", ""] += ahead.wasted_bytes
        ahead.ended.clear()
        ahead.wasted_bytes = 0

    def whole(self) -> Round:
        """One of everything, as far as there is room for it."""
        tiers = dict.fromkeys(self._shell.catalog.books.space.books, STEP_MIN)
        done = self._run(Bounds({**tiers}, self._write_bytes(), self._load_bytes()))
        for tier, evicted in done.evicted.items():
            self._shell.counts["evicted_copies", tier.name.lower()] += evicted
        return done

    # ---- inside

    def _run(self, bounds: Bounds) -> Round:
        shell, admission = self._shell, self._shell.catalog.admission
        if bounds.write_bytes:
            admission.know(self._speeds.load_line(), self._speeds.measured_prefill())
        done = shell.catalog.scheduler.run(bounds, shell.now_s())
        shell.apply()
        for refusal, count in admission.take_refused().items():
            shell.counts["write_back_refused", refusal.value] += count
        self._carry_writes(done.writes)
        self._carry_loads(done.loads)
        return done

    def _write_bytes(self) -> int:
        """That may be begun to NVMe now."""
        is_on = self._shell.tiers.disk is not None
        is_free = self._write_backs < WRITE_BACKS_MAX
        is_over = asyncio.get_running_loop().time() >= self._write_back_after_s
        return WRITE_BACK_BYTES if is_on and is_free and is_over else 0

    def _gather_bytes(self) -> int:
        """The same for what is there already: none while something else is written, or an old record is still to be removed."""
        is_quiet = not self._write_backs and not self._shell.discards_waiting
        return self._write_bytes() if is_quiet else 0

    def _load_bytes(self) -> int:
        """That may be begun from NVMe now."""
        shell = self._shell
        if not shell.catalog.page_ins.wants or shell.tiers.disk is None:
            return 0
        if self._speeds.loading_bytes or shell.catalog.recovering:
            return 0
        return max(0, PAGE_IN_BYTES - self._paging_bytes)

    def _carry_writes(self, copying: Sequence[Copying]) -> None:
        if not copying:
            return
        left = sum(map(copies_in, copying))
        self._write_backs += 1

        def ended(there: int, failed: int) -> None:
            nonlocal left
            left -= there + failed
            self._write_backs -= left == 0
            if failed:
                self._write_back_after_s = asyncio.get_running_loop().time() + WRITE_BACK_PAUSE_S

        self._mover.start(copying, Urgency.BACKGROUND, ended=ended)

    def _carry_loads(self, copying: Sequence[Copying]) -> None:
        """Together: what lies together on the disk is read with few calls, dense parts before sparse ones."""
        left, size_bytes = sum(map(copies_in, copying)), sum(map(bytes_in, copying))
        if not left:
            return
        self._paging_bytes += size_bytes

        def ended(there: int, failed: int) -> None:
            nonlocal left
            left -= there + failed
            self._paging_bytes -= size_bytes if left == 0 else 0
            self._shell.counts["prefetched_blocks", "done"] += there
            self._shell.counts["prefetched_blocks", "failed"] += failed

        self._mover.start(copying, Urgency.BACKGROUND, ended=ended)
