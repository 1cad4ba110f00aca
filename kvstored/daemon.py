"""The daemon: what it is made of, its tasks, its start and its end. The one place that knows every part.

Threads: the lanes' (`arena-*`, `disk-*`, `hbm-*`) and the metrics server's. Everything else runs on one loop, whose tasks have names. Ready as
soon as it can serve; recovery and growth go on behind.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvstored import logs
from kvstored.clock import SystemClock
from kvstored.composition import Parts, compose
from kvstored.config import Config
from kvstored.core.plan import SPECULATIVE
from kvstored.core.types import UNIT_BYTES, TierId
from kvstored.core.what_if import Room, gains
from kvstored.cores import usable_cores
from kvstored.errors import KvstoredError, StateMismatch
from kvstored.metrics_server import MetricsServer
from kvstored.notify import Notifier, listen_fds
from kvstored.statedir import read_status
from kvstored.store import gpu
from kvstored.store.growth import Grower
from kvstored.store.janitor import Janitor
from kvstored.store.recovery import Found, Recovery
from kvstored.transport.inspection import Inspection, Surroundings, TierFacts
from kvstored.transport.local import LocalServer
from kvstored.transport.polling import BusyPoll
from kvstored.transport.service import StoreService
from kvstored.transport.sockets import refuse_served

log = logs.get("daemon")

WHAT_IF_UNITS = (10 << 30) // UNIT_BYTES
SWITCH_INTERVAL_S = 0.0005
"""A thread that wants the interpreter lock asks for it after so long: the default of 5 ms is fifty calls."""
_CALIBRATION_S = 10.0
"""After the tiers are there: the first reads after a restart want the cores."""


def run(config: Config) -> int:
    """Serve until SIGTERM (drain and end) or SIGHUP (end at once, DRAM stays warm). The exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    notifier = Notifier.from_environment()
    parts = compose(config, SystemClock(), dict(listen_fds()), os.getppid())
    daemon = Daemon(config, parts, notifier)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(daemon.serve())
    finally:
        parts.close()
    return 0


class _StopError(Exception):
    """Ends the task group."""


class Daemon:
    def __init__(self, config: Config, parts: Parts, notifier: Notifier) -> None:
        self._config = config
        self._parts = parts
        self._notifier = notifier
        self._store = parts.store
        self._shell = parts.store.shell
        self._janitor = Janitor(self._store)
        self._recovery = Recovery(self._shell, self._store.registry.by_digest)
        self._kept = set(parts.arena.fds())
        self._state = "starting"
        self._stop: asyncio.Future[bool] | None = None
        self._begun_s = 0.0
        around = Surroundings(
            keeper_pid=parts.keeper_pid,
            front_pid=lambda: _front_pid(config.state_dir),
            policy=config.policy,
            state=lambda: self._state,
            uptime_s=lambda: asyncio.get_running_loop().time() - self._begun_s,
            tier_facts=self._tier_facts,
            broken=self._broken(),
        )
        # with one core who waits would keep it from who works
        polling = BusyPoll(config.limits.busy_poll_s if usable_cores() > 1 else 0, SystemClock())
        service = StoreService(
            self._store, Inspection(self._store, around), busy_poll_s=polling.window_s
        )
        self._server = LocalServer(service, config.socket, mode=config.socket_mode, polling=polling)
        self._metrics_server = MetricsServer(
            self._shell.metrics, refresh=self._refresh, unready=self._unready
        )

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._begun_s = loop.time()
        self._stop = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._ask_to_stop, number != signal.SIGHUP)
        refusal: KvstoredError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._start(tasks)
                is_drain = await self._stop
                await self._end(is_drain)
                raise _StopError
        except* _StopError:
            pass
        except* KvstoredError as errors:
            refusal = _first(errors)
        await self._metrics_server.close()
        if refusal is not None:
            raise refusal

    # ---- start

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        growers = self._growers()
        recovering = self._begin_recovery()
        if TierId.DRAM not in recovering:
            await self._first_segment(growers[TierId.DRAM])
        self._config.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server.start(tasks)
        if self._config.metrics_listen is not None:
            if self._config.metrics_listen.path:
                refuse_served(Path(self._config.metrics_listen.path), "metrics_listen")
            await self._metrics_server.start(self._config.metrics_listen)
        tasks.create_task(self._restore(recovering, growers), name="recovery and growth")
        if self._parts.tiers.hbm is not None:
            tasks.create_task(self._open_gpus(), name="gpus")
        for name, work in self._janitor.tasks().items():
            tasks.create_task(work, name=name)
        self._state = "ready"
        gc.collect()
        gc.freeze()  # what the start made stays: no later collection looks at it again
        self._notifier.ready(f"serving at {self._config.socket}")
        log.info("ready", socket=str(self._config.socket), epoch=self._shell.events.epoch)

    def _growers(self) -> dict[TierId, Grower]:
        parts, config = self._parts, self._config
        growers = {
            TierId.DRAM: Grower(
                self._shell,
                TierId.DRAM,
                # what comes from a disk into pages that were never touched takes a third longer
                parts.arena.grow if parts.disk is None else parts.arena.grow_mapped,
                parts.tiers.arena_lane,
                capacity_bytes=config.dram.capacity_bytes,
                segment_bytes=config.dram.segment_effective_bytes,
                grew=self._keep_segments,
                refused=_log_refusal,
            )
        }
        if parts.disk is not None:
            growers[TierId.NVME] = Grower(
                self._shell,
                TierId.NVME,
                parts.disk.grow,
                parts.tiers.disk_lane,
                capacity_bytes=config.disk.capacity_bytes,
                segment_bytes=parts.slab_bytes,
                grew=lambda _: None,
                refused=_log_refusal,
            )
        return growers

    def _begin_recovery(self) -> list[TierId]:
        """Tell the catalog of the segments that are there already; tiers whose records must be read before anything is granted."""
        catalog, parts = self._shell.catalog, self._parts
        found = {TierId.DRAM: parts.arena.segments()}
        if parts.disk is not None:
            found[TierId.NVME] = parts.disk.segments()
        for name, reason in parts.refused:
            self._notifier.remove(name)
            log.warning("a segment of an earlier run cannot be used", name=name, reason=reason)
        for tier, segments in found.items():
            if segments:
                catalog.recovery.begin(tier)
            for segment, units in segments:
                catalog.grow(tier, segment, units)
        self._shell.apply()
        return [tier for tier, segments in found.items() if segments]

    async def _first_segment(self, grower: Grower) -> None:
        """So that the first put finds room. Without memory the daemon serves all the same, from NVMe if it has blocks there."""
        try:
            await grower.grow_once()
        except KvstoredError as error:
            _log_refusal(TierId.DRAM, error)

    async def _open_gpus(self) -> None:
        """Pools first, which have room for blocks at once; then pinning, which makes copies faster."""
        hbm = self._parts.tiers.hbm_records
        await gpu.open_pools(self._shell)
        if hbm.fault is not None:
            log.warning("the hbm tier is off", error=str(hbm.fault))
            return
        log.info("gpu pools are open", devices=hbm.names, footprint_bytes=hbm.footprint_bytes)
        await gpu.pin_arena(
            self._shell,
            self._config.dram.capacity_bytes,
            lambda error: log.warning("the rest of dram is not pinned", error=str(error)),
        )
        log.info("dram is pinned", bytes=hbm.pinned_bytes)

    def _keep_segments(self, _: int) -> None:
        """The keeper gets a segment's descriptors before anything is granted in it."""
        for name, fd in self._parts.arena.fds().items():
            if name not in self._kept:
                self._kept.add(name)
                self._notifier.store(name, fd)

    async def _restore(self, recovering: list[TierId], growers: Mapping[TierId, Grower]) -> None:
        """DRAM first: it is the larger loss. A tier grows once it is scanned, whatever becomes of the others."""
        async with asyncio.TaskGroup() as tasks:
            for tier, grower in growers.items():
                if tier in recovering and not await self._recover(tier):
                    continue
                tasks.create_task(grower.run(), name=f"growth of {tier.name.lower()}")
            await asyncio.sleep(_CALIBRATION_S)
            self._store.speeds.calibrate(self._parts.tiers.arena_lane)

    async def _recover(self, tier: TierId) -> bool:
        """False where the tier cannot be read: this daemon makes way for one that opens it cold."""
        begun_s = asyncio.get_running_loop().time()
        try:
            found = await self._recovery.run(tier)
        except StateMismatch as error:
            log.error("starting again, for a tier that has to start cold", error=str(error))  # noqa: TRY400 - it says all
            self._ask_to_stop(False)
            return False
        _log_recovery(tier, found, asyncio.get_running_loop().time() - begun_s)
        if tier is TierId.DRAM and not found.leased:
            self._store.clients.adopt(found.writers)
        return True

    # ---- end

    def _ask_to_stop(self, is_drain: bool) -> None:
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(is_drain)

    async def _end(self, is_drain: bool) -> None:
        """After SIGTERM flush what is dirty while clients may still read; after SIGHUP leave DRAM to the next daemon."""
        self._notifier.stopping()
        self._state = "draining"
        self._store.puts.is_draining = True
        if is_drain:
            is_clean = await self._janitor.drain(self._config.limits.drain_s)
            log.info("drained", is_clean=is_clean)
        await self._janitor.flush_counters_once()
        await self._save_policy()
        await self._server.stop()
        self._store.clients.stop_watching()

    async def _save_policy(self) -> None:
        try:
            await self._janitor.save_policy_once()
            await self._janitor.save_written_once()
        except (OSError, KvstoredError) as error:
            log.warning("the policy's state was not saved", error=str(error))

    # ---- what others ask

    def _unready(self) -> str | None:
        return None if self._state == "ready" else self._state

    def _broken(self) -> dict[TierId, int]:
        """Composing said why, once."""
        is_broken = self._parts.slab_bytes > 0 and self._parts.disk is None
        return {TierId.NVME: self._config.disk.capacity_bytes} if is_broken else {}

    def _tier_facts(self, tier: TierId) -> TierFacts:
        hbm = self._parts.tiers.hbm
        if tier is TierId.HBM and hbm is not None:
            return TierFacts("on" if hbm.fault is None else "off", reason=str(hbm.fault or ""))
        found = self._recovery.found.get(tier, Found())
        disk = self._parts.disk
        if tier is not TierId.NVME or disk is None:
            return TierFacts("on", recovered=found.kept)
        state = "read-only" if disk.is_read_only() else "on"
        return TierFacts(state, codec=self._config.disk.codec, recovered=found.kept)

    def _refresh(self) -> None:
        """Gauges and facts, just before a scrape."""
        metrics, catalog = self._shell.metrics, self._shell.catalog
        counts = catalog.counts
        metrics.sessions.set(len(self._store.clients.sessions))
        metrics.connections.set(self._server.connection_count)
        metrics.fills.set(counts["fills"])
        metrics.leases.set(counts["leases"])
        metrics.pins.set(counts["pins"])
        metrics.running_requests.set(counts["requests"])
        metrics.blocks.set(catalog.blocks)
        metrics.tree_nodes.set(counts["tree_nodes"])
        metrics.recovering_tiers.set(len(catalog.recovering))
        metrics.ready.set(self._state == "ready")
        self._refresh_tiers()
        self._refresh_lanes()
        budget, now_s = catalog.admission.budget, self._shell.now_s()
        metrics.disk_write_budget_bytes.set(budget.day_bytes)
        metrics.disk_written_day_bytes.set(budget.spent(now_s))
        metrics.disk_write_state.set(budget.state(now_s))
        ahead = catalog.carriage.ahead
        metrics.prefetch_held_bytes.set(ahead.held_bytes)
        for guess in SPECULATIVE:
            pause = metrics.prefetch_pause_seconds[guess.value]
            pause.set(ahead.pause_left_s(guess, now_s))
        for tier, speed in self._store.speeds.tiers().items():
            metrics.load_bytes_per_second[tier].set(1 / speed.line.size_s)
            metrics.load_queue_seconds[tier].set(speed.queue_s)
        metrics.set_facts(self._shell.counts)
        self._refresh_what_if()

    def _refresh_what_if(self) -> None:
        curve, catalog = self._shell.catalog.books.asked.curve, self._shell.catalog
        stored = self._shell.counts["stored_bytes", ""]
        ratio = self._shell.counts["copy_bytes", "dram:nvme"] / stored if stored else 1.0
        rooms = [
            Room(use.tier, use.capacity_units * (ratio if use.tier is TierId.NVME else 1.0))
            for use in catalog.tier_use()
        ]
        span_s = max(curve.span_s, 1.0)
        for gain in gains(curve.hits, rooms, WHAT_IF_UNITS):
            gauges = self._shell.metrics.tiers[gain.tier]
            gauges.what_if_hit_blocks_per_second.set(gain.blocks / span_s)
            gauges.what_if_nearer_blocks_per_second.set(gain.nearer_blocks / span_s)
            gauges.what_if_saved_flops_per_second.set(gain.flops / span_s)

    def _refresh_tiers(self) -> None:
        metrics = self._shell.metrics
        for use in self._shell.catalog.tier_use():
            gauges = metrics.tiers[use.tier]
            gauges.capacity_bytes.set(use.capacity_units * UNIT_BYTES)
            gauges.granted_bytes.set(use.granted_units * UNIT_BYTES)
            gauges.used_bytes.set(use.used_units * UNIT_BYTES)
            gauges.leased_bytes.set(use.leased_units * UNIT_BYTES)
            gauges.pinned_bytes.set(use.pinned_units * UNIT_BYTES)
            gauges.quarantined_bytes.set(use.quarantined_units * UNIT_BYTES)
            gauges.aside_bytes.set(use.aside_units * UNIT_BYTES)
            gauges.copies.set(use.copies)
            gauges.dirty_copies.set(use.dirty_copies)
            gauges.fragmentation_ratio.set(use.fragmentation)
        if (hbm := self._parts.tiers.hbm) is not None:
            metrics.hbm_pinned_bytes.set(hbm.pinned_bytes)
            metrics.hbm_footprint_bytes.set(hbm.footprint_bytes)
            metrics.hbm_off.set(hbm.fault is not None)
        stored = self._shell.counts["stored_bytes", ""]
        if stored:
            metrics.codec_ratio.set(self._shell.counts["copy_bytes", "dram:nvme"] / stored)

    def _refresh_lanes(self) -> None:
        for lane in self._parts.tiers.lanes():
            for queue, depth in lane.depths().items():
                self._shell.metrics.queue_depth_jobs[queue].set(depth)


def _front_pid(state_dir: Path) -> int:
    """The keeper tells: the front itself is known here only once it served someone."""
    status = read_status(str(state_dir))
    front = status.children.get("front") if status is not None else None
    return front.pid if front is not None else 0


def _first(errors: BaseExceptionGroup[KvstoredError]) -> KvstoredError:
    """What ended the task group, such as an address that cannot be bound: the caller knows its exit code."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _log_refusal(tier: TierId, error: KvstoredError) -> None:
    log.warning("a tier cannot grow now", tier=tier.name.lower(), error=str(error))


def _log_recovery(tier: TierId, found: Found, took_s: float) -> None:
    log.info(
        "recovered",
        tier=tier.name.lower(),
        kept=found.kept,
        dropped=found.dropped,
        unusable=found.unusable,
        writing=found.writing,
        seconds=round(took_s, 3),
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415 - a faster loop where it is installed
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
