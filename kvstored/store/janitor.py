"""What has to be done without being asked: expiry, making room before it is needed, writing back, flushing counters, watching the loop.

Each is a coroutine that the daemon runs as a named task. A fault in one round is reported and the next round tries again: a janitor
that dies leaves a store that fills up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from kvstored.core.census import count_slice, nobody
from kvstored.core.copying import targets_of
from kvstored.core.raising import Raising
from kvstored.core.types import UNIT_BYTES, Heat, TierId
from kvstored.core.usage import Used, is_above_high, used_since
from kvstored.errors import KvstoredError
from kvstored.store import learned, written
from kvstored.store.lane import Urgency
from kvstored.store.pace import STEP_MIN, Pace
from kvstored.store.rounds import WRITE_BACK_BYTES
from kvstored.store.shell import fingerprint_bytes
from kvstored.store.store import Store
from kvstored.tiers.base import Counters, PieceRef

EXPIRY_S = 1.0
EVICT_S = 0.05
DEMOTE_S = 0.05
DEMOTE_BYTES = 256 << 20
"""Of one round: 5 ms of PCIe."""
RAISE_S = 0.02
RAISE_BYTES = 32 << 20
"""Under way at once: below a millisecond of PCIe."""
LOST_COPIES = 128
SHED_COPIES = 256
"""Copies that leave NVMe in one round since its index runs full."""
INDEX_S = 0.5
INDEX_SHARE_MAX = 0.85
"""Of the map's pages, from which on copies on NVMe leave: above 0.9 the index refuses writes."""
WRITE_BACK_S = 0.025
GATHER_BYTES, GATHER_S = 16 << 20, 0.2
"""A commit begins once about so much is dirty, or so long after the last one began: a record costs a fifth where hundreds share one."""
GRAINS_S = 0.25
PAGE_IN_S = 0.005
RESIDENT_S = 0.01
SETTLE_S = 0.25
LOG_S = 1.0
COUNTERS_S = 30.0
COUNTER_BLOCKS = 256
WRITTEN_S = 30.0
LEARN_S, DIGEST_STEPS = 1.0, 8
SAVE_S = 300.0
CENSUS_S = 30.0
LAG_S = 0.1
IDLE_S = 0.5
"""Slept at most by rounds that have nothing to do: what changes without a message, an expired lease, is seen then."""


class Janitor:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._shell = store.shell
        self._gather_until_s = 0.0
        catalog = store.shell.catalog
        self._raising = Raising(catalog.books, catalog.carriage, catalog.looking.running)
        self._going_up = 0
        self._counters_s = store.shell.now_s()
        self._written = self._shell.catalog.admission.budget.dump()
        self._above_since_s: dict[TierId, float] = {}

    def tasks(self) -> dict[str, Coroutine[None, None, None]]:
        """By name; none of them ends."""
        return {
            "expiry": self._every(EXPIRY_S, self.expire_once),
            "evictor": self._every(EVICT_S, self.make_room_once, self._is_still),
            "index evictor": self._every(INDEX_S, self.shed_index_once),
            "write-back": self._every(WRITE_BACK_S, self.gather_once, self._is_clean),
            "grains": self._every(GRAINS_S, self.lay_together_once),
            "page-in": self._every(PAGE_IN_S, self.page_in_once, self._wants_nothing),
            "prefetched": self._every(SETTLE_S, self.settle_once),
            "residents": self._every(RESIDENT_S, self.judge_once, self._judges_nothing),
            "selection log": self._every(LOG_S, self._store.accesses.write_log_once),
            "counters": self._every(COUNTERS_S, self.flush_counters_once),
            "written bytes": self._every(WRITTEN_S, self.save_written_once),
            "learning": self._every(LEARN_S, self.learn_once),
            "policy state": self._every(SAVE_S, self.save_policy_once),
            "census": self._every(CENSUS_S, self.count_classes_once),
            "loop watch": self._watch_loop(),
        } | (
            {}
            if self._shell.tiers.hbm is None
            else {
                "demotion": self._every(DEMOTE_S, self.demote_once),
                "raising": self._every(RAISE_S, self.raise_once),
            }
        )

    async def expire_once(self) -> None:
        shell = self._shell
        now_s = shell.now_s()
        if shell.catalog.next_expiry_s() <= now_s:
            expired = shell.catalog.expire(now_s)
            shell.apply()
            shell.counts["expired", "fill"] += expired.fills
            shell.counts["expired", "lease"] += expired.leases
            shell.counts["expired", "pin"] += expired.pins
            shell.counts["expired", "copy"] += expired.copies
        shell.counts["expired", "session"] += self._store.clients.expire()
        self._store.puts.forget_expired()
        self._store.jobs.expire()
        shell.discard()  # those that failed before
        await self._store.registry.save()

    async def make_room_once(self) -> None:
        shell = self._shell
        for use in shell.catalog.tier_use():
            pace, is_above = Pace(), True
            while is_above:
                begun_s, step = shell.elapsed_s(), pace.step
                evicted = self._store.rounds.evict(use.tier, step)
                pace.took(shell.elapsed_s() - begun_s)
                is_above = evicted == step
                await asyncio.sleep(0)
            self._note_evictor_lag(use.tier)

    async def demote_once(self) -> None:
        """Carry down what HBM alone has before it would have to leave; where its device is lost, forget what it had."""
        shell, hbm = self._shell, self._shell.tiers.hbm_records
        if hbm.fault is not None:
            await self._lose_hbm(hbm.fault)
            return
        copying = shell.catalog.demotion.begin(DEMOTE_BYTES, shell.now_s())
        shell.apply()
        self._store.mover.start(copying, Urgency.BACKGROUND)

    async def raise_once(self) -> None:
        """Bring up what running requests and predicted sets want on a GPU; one round at a time, so that what is asked for overtakes."""
        shell = self._shell
        if self._going_up or shell.tiers.hbm_records.fault is not None:
            return
        sets = self._store.accesses.residents.sets()
        copying = self._raising.begin(sets, RAISE_BYTES, shell.now_s())
        shell.apply()
        self._going_up = len(copying)

        def ended(there: int, failed: int) -> None:
            self._going_up -= there + failed

        self._store.mover.start(copying, Urgency.BACKGROUND, ended=ended)

    async def _lose_hbm(self, fault: KvstoredError) -> None:
        shell, lost = self._shell, 0
        while gone := shell.catalog.demotion.lose(shell.now_s(), LOST_COPIES):
            shell.apply()
            lost += gone
            await asyncio.sleep(0)
        if lost:
            shell.report(f"the gpus are lost, and what they held: copies={lost}", fault)

    async def shed_index_once(self) -> None:
        """Small pieces fill the NVMe tier's index before its space. A slice a round: the share falls when the records are off the disk."""
        shell = self._shell
        if shell.tiers.disk is None or shell.discards_waiting:
            return
        share = await shell.tiers.disk_lane.submit(shell.tiers.disk_index_share)
        for _ in range(SHED_COPIES // STEP_MIN if share > INDEX_SHARE_MAX else 0):
            evicted = shell.catalog.shed(TierId.NVME, shell.now_s(), STEP_MIN)
            shell.apply()
            shell.counts["evicted_copies", "nvme"] += evicted
            await asyncio.sleep(0)

    async def gather_once(self) -> None:
        """Write back when enough is dirty or has waited long enough: what a commit costs is shared by what it holds."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._gather_until_s or self._dirty_bytes() >= GATHER_BYTES:
            self._gather_until_s = now_s + GATHER_S
            await self.write_back_once()

    async def write_back_once(self) -> None:
        self._store.rounds.write_back()

    async def lay_together_once(self) -> None:
        self._store.rounds.gather()

    async def page_in_once(self) -> None:
        self._store.rounds.page_in()

    async def settle_once(self) -> None:
        self._store.rounds.settle()

    async def judge_once(self) -> None:
        self._store.accesses.judge_once()

    def _dirty_bytes(self) -> int:
        """About: as if dirty copies were as large as others, and without those whose books are not made."""
        use = next(u for u in self._shell.behind.tier_use() if u.tier is TierId.DRAM)
        return use.used_units * UNIT_BYTES * use.dirty_copies // max(use.copies, 1)

    async def flush_counters_once(self) -> None:
        """Heat, hits and last use into the records, in bulk: after a crash they lag by a round, no more."""
        shell = self._shell
        since_s, self._counters_s = self._counters_s, shell.now_s()
        row = 0
        while row >= 0:
            batch = used_since(shell.catalog.books, since_s, row, COUNTER_BLOCKS)
            arena = [_counters(used) for used in batch.pieces if used.tier is TierId.DRAM]
            disk = [_counters(used) for used in batch.pieces if used.tier is TierId.NVME]
            shell.tiers.arena.flush_counters(arena)
            if disk:
                flush = shell.tiers.flush_disk_counters
                await shell.tiers.disk_lane.submit(lambda: flush(disk), Urgency.BACKGROUND)  # noqa: B023 - awaited in the same turn
            await asyncio.sleep(0)
            row = batch.following

    async def count_classes_once(self) -> None:
        """What there is of each temperature class in each tier."""
        books, metrics, row = self._shell.catalog.books, self._shell.metrics, 0
        counted = nobody()
        while row >= 0:
            row = count_slice(books, row, counted)
            await asyncio.sleep(0)
        for heat in Heat:
            for tier in TierId:
                metrics.class_copies[heat][tier].set(counted.copies[heat, tier])
                metrics.class_bytes[heat][tier].set(counted.size_bytes[heat, tier])

    async def learn_once(self) -> None:
        """Tables of the policy are made here, never while somebody waits for an answer."""
        books, now_s = self._shell.catalog.books, self._shell.now_s()
        books.policy.maintain(now_s)
        for _ in range(DIGEST_STEPS):
            books.asked.digest(now_s)
            await asyncio.sleep(0)

    async def save_policy_once(self) -> None:
        """What it learned, where that is anything."""
        shell, policy = self._shell, self._shell.catalog.books.policy
        dumped, state_dir = policy.dump(shell.now_s()), self._store.registry.state_dir
        if dumped:
            await shell.tiers.arena_lane.submit(
                lambda: learned.save(state_dir, policy.name, dumped), Urgency.BACKGROUND
            )

    async def save_written_once(self) -> None:
        """What a crash loses of the day's count is what was written in one round."""
        shell, state_dir = self._shell, self._store.registry.state_dir
        dumped = shell.catalog.admission.budget.dump()
        if shell.tiers.disk is None or dumped == self._written:
            return
        self._written = dumped
        await shell.tiers.arena_lane.submit(
            lambda: written.save(state_dir, dumped), Urgency.BACKGROUND
        )

    async def drain(self, drain_s: float) -> bool:
        """Refuse new fills and write every dirty copy to NVMe within `drain_s`; whether all were."""
        self._store.puts.is_draining = True
        loop = asyncio.get_running_loop()
        end_s = loop.time() + drain_s
        if self._shell.tiers.disk is None:
            return True
        while (left_s := end_s - loop.time()) > 0:
            copying = self._shell.catalog.flush(WRITE_BACK_BYTES, self._shell.now_s())
            self._shell.apply()
            self._store.mover.start(copying, Urgency.DEMAND)
            if not copying and not self._store.mover.tasks_now:
                return True
            copies = [copy for each in copying for copy in targets_of(each)]
            await self._store.flights.wait(copies, left_s)
            await asyncio.sleep(0.005)
        return False

    def _note_evictor_lag(self, tier: TierId) -> None:
        """How long a tier has been above its high watermark at the end of a round; 0 where it is below."""
        now_s = self._shell.now_s()
        if not is_above_high(self._shell.catalog.books, tier):
            self._above_since_s[tier] = now_s
        since_s = self._above_since_s.setdefault(tier, now_s)
        self._shell.metrics.evictor_lag_seconds.observe(now_s - since_s)

    async def _watch_loop(self) -> None:
        """How late a timer comes is how long something held the loop."""
        shell = self._shell
        while True:
            due_s = shell.elapsed_s() + LAG_S
            await asyncio.sleep(LAG_S)
            shell.metrics.loop_lag_seconds.observe(max(0.0, shell.elapsed_s() - due_s))

    # ---- what is left to do once nobody asks for anything: the rounds that come most often sleep until somebody does

    def _is_still(self) -> bool:
        return not self._store.mover.tasks_now

    def _is_clean(self) -> bool:
        return self._is_still() and not self._shell.unsettled and not self._dirty_bytes()

    def _wants_nothing(self) -> bool:
        return self._is_still() and self._shell.behind.page_ins.is_idle

    def _judges_nothing(self) -> bool:
        return not len(self._store.accesses.residents)

    async def _every(
        self,
        pause_s: float,
        round_: Callable[[], Awaitable[None]],
        is_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        while True:
            try:
                await round_()
                await asyncio.sleep(pause_s)
                if is_idle():
                    await self._store.quiet.until_broken(IDLE_S)
            except Exception as error:  # noqa: BLE001 - border of a task: the next round tries again
                self._shell.report(f"a round of the janitor failed: {round_.__name__}", error)
                await asyncio.sleep(pause_s)


def _counters(used: Used) -> Counters:
    ref = PieceRef(fingerprint_bytes(used.fingerprint), used.group, used.shard)
    return Counters(ref, used.place, used.hits, used.last_s, int(used.heat))
