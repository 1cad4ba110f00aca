"""How the parts of a daemon are put together from its configuration. Blocks, and starts the lanes' threads; no loop is needed yet."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvstored import __version__, errors, logs, machine, sections
from kvstored.clock import Clock
from kvstored.codec import levels
from kvstored.codec.frame import Codec
from kvstored.codec.planner import Goal
from kvstored.config import Config
from kvstored.core import plan
from kvstored.core.bundles import Bundle, Signal, bundle_named
from kvstored.core.calls import Limits, TierLimits
from kvstored.core.catalog import Catalog
from kvstored.core.feedback import FeedbackLimits
from kvstored.core.namespace import Namespaces
from kvstored.core.prefetched import PrefetchLimits
from kvstored.core.types import UNIT_BYTES, TierId
from kvstored.errors import ConfigError, InvalidArgument, KvstoredError, StateMismatch
from kvstored.metrics import Build, Metrics, Sets
from kvstored.model.selection import load_weights
from kvstored.store import learned, registry, written
from kvstored.store.events import Events
from kvstored.store.lane import Lane
from kvstored.store.registry import Registry
from kvstored.store.shell import Shell, Tiers
from kvstored.store.store import Store, StoreLimits
from kvstored.tiers.arena import Arena
from kvstored.tiers.coding import Coding
from kvstored.tiers.device import open_device
from kvstored.tiers.disk import SLAB_BYTES, Disk, Options, erase, map_bytes_for
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.projection import Projection
from kvstored.transport.local import TENANT
from kvstored.transport.service import INTERNAL
from kvstored.wire.methods import METHODS

log = logs.get("daemon")

LANE_QUEUE_MAX = 4096
ARENA_THREADS = 2
DISK_THREADS = 4
DISK_BACKGROUND_MAX = 2
"""One group commit on the disk, the next one gathering behind it; the other threads are for loads."""
HBM_THREADS = 4
"""They hash what goes up: 10 GB/s each, so four keep up with a link of 50."""
HBM_BACKGROUND_MAX = 2
EPOCH_FILE = "epoch"
_CODECS = {"raw": Codec.RAW, "zstd": Codec.ZSTD, "fast": Codec.FRAME, "small": Codec.FRAME}


@dataclass(frozen=True, slots=True)
class Parts:
    """`refused`: descriptors of an earlier run that could not be used, with the reason."""

    store: Store
    arena: Arena
    disk: Disk | None
    slab_bytes: int
    refused: tuple[tuple[str, str], ...]
    keeper_pid: int

    @property
    def tiers(self) -> Tiers:
        return self.store.shell.tiers

    def close(self) -> None:
        """Waits for the threads: what they write is whole when this returns."""
        for lane in self.tiers.lanes():
            lane.close()
        if self.disk is not None:
            self.disk.close()
        if self.tiers.hbm is not None:
            self.tiers.hbm.close()
        self.tiers.projection.close()
        self.arena.close()


def compose(config: Config, clock: Clock, fds: Mapping[str, int], keeper_pid: int) -> Parts:
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    epoch = next_epoch(config.state_dir, clock)
    arena = Arena(
        config.dram.segment_effective_bytes,
        incarnation=epoch,
        available_bytes=_memory_left,
        pages=config.dram.huge_pages,
    )
    adopted = arena.adopt(fds)
    slab_bytes = min(SLAB_BYTES, config.disk.capacity_bytes // UNIT_BYTES * UNIT_BYTES)
    disk = _disk(config, clock, slab_bytes) if slab_bytes else None
    hbm = _hbm(config.hbm) if config.hbm.devices else None
    tiers = Tiers(
        arena=arena,
        arena_lane=Lane("arena", threads=ARENA_THREADS, queue_max=LANE_QUEUE_MAX),
        disk=disk,
        disk_lane=Lane(
            "disk",
            threads=DISK_THREADS,
            queue_max=LANE_QUEUE_MAX,
            background_max=DISK_BACKGROUND_MAX,
        ),
        flush_disk_counters=disk.flush_counters if disk is not None else lambda _: None,
        relink_disk=disk.relink if disk is not None else lambda _: None,
        disk_index_share=disk.index_used_share if disk is not None else lambda: 0.0,
        unpack_disk=disk.unpack if disk is not None else lambda _: [],
        coding=disk.coding if disk is not None else Coding(Codec.RAW),
        described=disk.described if disk is not None else lambda items: [None for _ in items],
        slabs=str(config.disk.path) if disk is not None else "",
        projection=Projection(config.dram.capacity_bytes, epoch=epoch, tenant=TENANT),
        hbm=hbm,
        hbm_lane=_hbm_lane() if config.hbm.devices else None,
    )
    catalog = Catalog(
        tiers=tier_limits(config, has_disk=disk is not None),
        policy=bundle_of(config).policy,
        limits=core_limits(config),
        epoch=epoch,
    )
    catalog.feedback.limits = feedback_limits(config)
    catalog.scheduler.follow(tuple(plan.Objective(name) for name in config.objectives))
    catalog.carriage.ahead.limits = prefetch_limits(config)
    shell = Shell(
        catalog,
        tiers,
        Events(epoch=epoch, now_s=clock.now_s),
        clock,
        _metrics(config, tiers),
        report,
    )
    namespaces = _restored(config, catalog, clock)
    known = Registry(shell, namespaces, config.state_dir)
    store = Store(shell, known, store_limits(config))
    if config.feedback.log is not None:
        store.accesses.record_to(config.feedback.log)
    return Parts(store, arena, disk, slab_bytes, adopted.refused, keeper_pid)


def _restored(config: Config, catalog: Catalog, clock: Clock) -> Namespaces:
    """What the state directory has of an earlier daemon; a part that cannot be used is a cold start of that part."""
    loaded = registry.load(config.state_dir)
    if loaded.fault:
        start = "from their copy" if loaded.is_copy else "without them"
        log.warning("namespaces cannot be read", start=start, fault=loaded.fault)
    if fault := learned.restore(config.state_dir, catalog.books.policy, clock.now_s()):
        log.warning("the eviction policy starts cold", policy=config.policy, fault=fault)
    if fault := written.restore(config.state_dir, catalog.admission.budget, clock.now_s()):
        log.warning("the day's written bytes are counted anew", fault=fault)
    return loaded.namespaces


def report(what: str, error: BaseException) -> None:
    """A fault at the border of a task: logged once, with its traceback."""
    log.error(what, exc_info=error)


def next_epoch(state_dir: Path, clock: Clock) -> int:
    """Grows with every boot, also within one second and when the clock steps back. 32 bits."""
    path = state_dir / EPOCH_FILE
    try:
        last = int(path.read_text())
    except (OSError, ValueError):
        last = 0
    epoch = max(int(clock.now_s()), last + 1) & 0xFFFF_FFFF
    try:
        path.write_text(f"{epoch}\n")
    except OSError as error:  # a full disk: the clock alone has to do
        log.warning("epoch was not saved", path=str(path), error=str(error))
    return epoch


def bundle_of(config: Config) -> Bundle:
    """The configured one, with its switches."""
    asked = {signal: getattr(config.signals, signal) for signal in Signal}
    switches = {signal: switch == "on" for signal, switch in asked.items() if switch != "auto"}
    return bundle_named(config.policy).switched(switches)


def tier_limits(config: Config, *, has_disk: bool) -> list[TierLimits]:
    found = [_tier_limits(config, TierId.DRAM, config.dram)]
    if has_disk:
        nvme, disk = _tier_limits(config, TierId.NVME, config.disk), config.disk
        found.append(
            replace(
                nvme,
                admit_hits=disk.admit_hits,
                write_budget_bytes=disk.write_budget_bytes,
                min_benefit_bytes=disk.min_benefit_bytes,
            )
        )
    if devices := len(config.hbm.devices):
        one = _tier_limits(config, TierId.HBM, config.hbm)
        found.append(replace(one, capacity_units=one.capacity_units * devices))
    return found


def _tier_limits(
    config: Config, tier: TierId, section: sections.Dram | sections.Disk | sections.Hbm
) -> TierLimits:
    shares = config.limits
    exempt = Signal.SINKS in bundle_of(config).signals
    return TierLimits(
        tier,
        section.capacity_bytes // UNIT_BYTES,
        high=section.high,
        low=section.low,
        checkpoint_share=shares.checkpoint_share,
        sink_share=shares.sink_share if exempt else 0.0,
        lease_share=shares.lease_share,
        pin_share=shares.pin_share,
    )


def feedback_limits(config: Config) -> FeedbackLimits:
    feedback = config.feedback
    try:
        weights = load_weights(feedback.weights) if feedback.weights is not None else {}
    except InvalidArgument as error:
        raise ConfigError(f"setting feedback.weights: {error}") from error
    is_heard = Signal.ATTENTION in bundle_of(config).signals
    blocks_per_s = float(feedback.blocks_per_s if is_heard else 0)
    return FeedbackLimits(blocks_per_s, feedback.sink_steps, feedback.stable_steps, weights)


def prefetch_limits(config: Config) -> PrefetchLimits:
    prefetch = config.prefetch
    is_guessed = Signal.GUESSES in bundle_of(config).signals
    signals = frozenset(plan.Signal(name) for name in prefetch.signals if is_guessed)
    return PrefetchLimits(prefetch.share, prefetch.waste_max, signals)


def core_limits(config: Config) -> Limits:
    limits, signals = config.limits, bundle_of(config).signals
    return Limits(
        sessions_max=limits.sessions,
        leases_per_session_max=limits.leases_per_session,
        lease_ttl_max_s=limits.lease_ttl_max_s,
        pin_ttl_max_s=limits.pin_ttl_max_s,
        quarantine_s=limits.quarantine_s,
        checkpoint_ttl_s=limits.checkpoint_ttl_s,
        incomplete_ttl_s=limits.fill_ttl_s,
        hears_hints=Signal.HINTS in signals,
        writes_back=Signal.DISK in signals,
    )


def store_limits(config: Config) -> StoreLimits:
    limits = config.limits
    return StoreLimits(
        fill_ttl_s=limits.fill_ttl_s,
        lease_ttl_s=limits.lease_ttl_s,
        resume_ttl_s=limits.resume_ttl_s,
        quarantine_s=limits.quarantine_s,
        load_deadline_s=limits.load_deadline_s,
        hbm_bytes_per_s=config.hbm.bandwidth_bytes * len(config.hbm.devices),
    )


def _disk(config: Config, clock: Clock, slab_bytes: int) -> Disk | None:
    """None, with a log line, where the disk cannot be used: the engines are served from DRAM then."""
    options = Options(
        map_bytes=map_bytes_for(config.disk.capacity_bytes),
        slab_bytes=slab_bytes,
        codec=_CODECS[config.disk.codec],
        codec_level=config.disk.codec_level,
        delta_min_context_tokens=config.disk.delta_min_context_tokens,
        references=config.disk.references,
        lossy=levels.parsed(config.disk.lossy),
        codec_goal=Goal.RATIO if config.disk.codec == "small" else Goal.SPEED,
        spare_bytes=_memory_left if machine.lies_in_memory(config.disk.path) else None,
    )
    try:
        try:
            return Disk(config.disk.path, options, clock=clock)
        except StateMismatch as error:
            log.warning("the disk tier starts cold", path=str(config.disk.path), reason=str(error))
            erase(config.disk.path)
            return Disk(config.disk.path, options, clock=clock)
    except KvstoredError as error:
        log.warning("the disk tier is off", path=str(config.disk.path), error=str(error))
        return None


def _hbm(section: sections.Hbm) -> Hbm:
    return Hbm(section.devices, section.capacity_bytes, open_device)


def _memory_left() -> int:
    return machine.memory_limit().available_bytes


def _hbm_lane() -> Lane:
    return Lane(
        "hbm", threads=HBM_THREADS, queue_max=LANE_QUEUE_MAX, background_max=HBM_BACKGROUND_MAX
    )


def _metrics(config: Config, tiers: Tiers) -> Metrics:
    kinds = [name for name in vars(errors) if _is_error(name)]
    queues = [queue for lane in tiers.lanes() for queue in lane.depths()]
    sets = Sets(
        methods=tuple(method.name for method in METHODS),
        errors=(*kinds, INTERNAL),
        queues=tuple(queues),
    )
    return Metrics(sets, Build(__version__, config.policy, config.disk.codec))


def _is_error(name: str) -> bool:
    kind = getattr(errors, name)
    return isinstance(kind, type) and issubclass(kind, KvstoredError)
