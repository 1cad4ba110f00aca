"""Prefetch jobs: loads that nobody waits for, with a deadline and a way to cancel, and what became of them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvstored.core.copying import Copying, copies_in
from kvstored.core.lifting import go_straight_up
from kvstored.core.naming import readable_keys
from kvstored.core.types import KeyBatch, NamespaceId, TierId, chosen_keys
from kvstored.core.usage import lacking
from kvstored.errors import NotFound
from kvstored.store.events import EventKind
from kvstored.store.lane import Urgency
from kvstored.store.mover import Mover
from kvstored.store.shell import Shell

JOBS_MAX = 4096


class JobState(IntEnum):
    """Numbers as on the wire."""

    RUNNING = 1
    DONE = 2
    CANCELLED = 3
    EXPIRED = 4
    FAILED = 5


@dataclass(slots=True)
class Job:
    """`blocks`: copies to load, but for those that others are loading already. What found no room counts as failed from the start."""

    id: int
    tenant: str
    deadline_s: float
    state: JobState = JobState.RUNNING
    blocks: int = 0
    done: int = 0
    failed: int = 0


class Jobs:
    """The last JOBS_MAX jobs; older ones are not found any more."""

    def __init__(self, shell: Shell, mover: Mover) -> None:
        self._shell = shell
        self._mover = mover
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._last = 0

    def prefetch(
        self,
        tenant: str,
        ns: NamespaceId,
        keys: KeyBatch,
        *,
        deadline_s: float,
        tier: TierId = TierId.DRAM,
    ) -> Job:
        """Begin to load what lies only below `tier`. Batches that have not begun at the deadline (wall seconds) are not loaded."""
        self._last += 1
        job = Job(self._last, tenant, deadline_s)
        self._jobs[job.id] = job
        if len(self._jobs) > JOBS_MAX:
            self._jobs.popitem(last=False)
        steps = [TierId.DRAM] if tier is TierId.DRAM else [TierId.DRAM, tier]
        self._step(job, ns, keys, steps)
        return job

    def _step(self, job: Job, ns: NamespaceId, keys: KeyBatch, steps: Sequence[TierId]) -> None:
        """Up to the first of these tiers, then to the next."""
        shell, (tier, *rest) = self._shell, steps
        wanted = self._over_dram(ns, keys, rest[0]) if rest else keys
        wanted = readable_keys(shell.catalog.books, ns, wanted)  # loads are numbered by these
        loads, _ = shell.catalog.prefetch(ns, wanted, tier, shell.now_s())
        shell.apply()
        without_room = lacking(shell.catalog.books, ns, wanted, tier)
        shell.counts["prefetched_blocks", "failed"] += without_room
        job.blocks += sum(map(copies_in, loads)) + without_room
        job.failed += without_room

        def following() -> None:
            if rest and job.state is JobState.RUNNING:
                self._step(job, ns, keys, rest)
            else:
                self._end(job)

        self._carry(job, loads, wanted, following)

    def _over_dram(self, ns: NamespaceId, keys: KeyBatch, tier: TierId) -> KeyBatch:
        """The keys that this tier has not, and that do not go straight there."""
        tiers, _ = self._shell.catalog.locate(ns, keys)
        is_straight = go_straight_up(self._shell.catalog.books, ns, keys)
        return chosen_keys(keys, np.flatnonzero((tiers & (1 << tier) == 0) & ~is_straight))

    def status(self, job: int, tenant: str) -> Job:
        found = self._jobs.get(job)
        if found is None or found.tenant != tenant:
            raise NotFound(f"no such job: job={job}")
        self._expire(found)
        return found

    def expire(self) -> None:
        """Jobs whose deadline passed: what has not begun will not be loaded."""
        for job in self._jobs.values():
            self._expire(job)

    def cancel(self, job: int, tenant: str) -> Job:
        """What has not begun will not be loaded; what is on its way arrives."""
        found = self.status(job, tenant)
        if found.state is JobState.RUNNING:
            found.state = JobState.CANCELLED
        return found

    def _carry(
        self, job: Job, loads: Sequence[Copying], keys: KeyBatch, following: Callable[[], None]
    ) -> None:
        if not loads:
            following()
            return

        def is_wanted() -> bool:
            """Asked in the lane: a late answer only loads too much."""
            return job.state is JobState.RUNNING and self._shell.now_s() <= job.deadline_s

        def ended(there: int, failed: int) -> None:
            job.done += there
            job.failed += failed
            self._shell.counts["prefetched_blocks", "done"] += there
            self._shell.counts["prefetched_blocks", "failed"] += failed
            if job.done + job.failed == job.blocks:
                following()

        self._mover.start(loads, Urgency.BACKGROUND, keys=keys, is_wanted=is_wanted, ended=ended)

    def _expire(self, job: Job) -> None:
        if job.state is JobState.RUNNING and self._shell.now_s() > job.deadline_s:
            job.state = JobState.EXPIRED

    def _end(self, job: Job) -> None:
        if job.failed:
            self._expire(job)
        if job.state is JobState.RUNNING:
            job.state = JobState.DONE if job.done or not job.blocks else JobState.FAILED
        self._shell.events.add(EventKind.JOB_DONE, job=job.id)
