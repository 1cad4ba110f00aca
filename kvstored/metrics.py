"""Every metric, once. The core and the store return or count facts; here they get their names, units and labels.

Two kinds of source: objects bound here at construction (histograms and gauges, set by who measures), and facts, totals that the
store counts by (fact, label) and that are exported as counters by the table below. Label values are closed sets, so the number of series is bounded.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

TIERS: Final = ("hbm", "dram", "nvme", "remote")
"""By TierId."""
CLASSES: Final = ("p0", "p1", "p2", "p3")
"""By Heat."""
GUESSES: Final = ("selection", "session", "sibling")
"""Speculative signals of prefetch."""
LATENCY_BUCKETS_S: Final = (
    *(20e-6, 50e-6, 100e-6, 200e-6, 500e-6),
    *(1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 5.0),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """How a total counted by the store is exported; a fact's label holds its label values joined by `:`."""

    metric: str
    meaning: str
    labels: tuple[str, ...] = ()


FACTS: Final[Mapping[str, Fact]] = {
    "match_keys": Fact("match_keys", "Keys asked for by Match.", ("result",)),
    "match_tokens": Fact("match_tokens", "Tokens asked for by Match.", ("result",)),
    "hit_tokens": Fact("hit_tokens", "Tokens acquired, by the tier that had them.", ("tier",)),
    "miss_tokens": Fact("miss_tokens", "Tokens asked for and not there, by why.", ("reason",)),
    "read_keys_hit": Fact("read_hit_keys", "Keys acquired, by tier.", ("tier",)),
    "read_keys_miss": Fact("read_miss_keys", "Keys not there, by why.", ("reason",)),
    "read_keys_pending": Fact(
        "read_pending_keys", "Keys answered before their load ended.", ("tier",)
    ),
    "read_tokens": Fact("read_tokens", "Tokens of keys acquired or not.", ("result",)),
    "read_bytes": Fact("read_bytes", "Bytes leased for reading, or read optimistically."),
    "optimistic_keys": Fact("optimistic_read_keys", "Keys that clients read without a message."),
    "reserved_keys": Fact("reserved_keys", "Keys reserved, by answer.", ("status",)),
    "put_blocks": Fact("put_blocks", "Blocks committed by callers."),
    "put_bytes": Fact("put_bytes", "Bytes committed by callers."),
    "shared_bytes": Fact("shared_bytes", "Bytes that callers need not put, since they were there."),
    "flops_saved": Fact(
        "prefill_saved_flops",
        "Prefill FLOPs of the tokens acquired, by their namespaces' a + b x position.",
    ),
    "copies": Fact("copies", "Copies made between tiers.", ("direction",)),
    "copy_bytes": Fact("copy_bytes", "Bytes copied between tiers, as decoded.", ("direction",)),
    "copy_failures": Fact("copy_failures", "Copies that failed.", ("direction", "error")),
    "stored_bytes": Fact("stored_bytes", "Bytes written to NVMe, as encoded."),
    "write_back_refused": Fact(
        "write_back_refused_copies", "Copies not worth writing to NVMe, by why.", ("reason",)
    ),
    "gathered_blocks": Fact(
        "gathered_blocks", "Blocks written to NVMe again, to be read with fewer calls."
    ),
    "evicted_copies": Fact("watermark_evicted_copies", "Copies that the evictor took.", ("tier",)),
    "forgotten_copies": Fact("forgotten_copies", "Copies forgotten, by rule.", ("tier", "reason")),
    "corrupt_copies": Fact("corrupt_copies", "Copies dropped for a wrong checksum.", ("tier",)),
    "discard_failures": Fact("discard_failures", "Records on NVMe that could not be removed."),
    "relink_failures": Fact("relink_failures", "Parents learned late that NVMe records lack."),
    "fingerprint_collisions": Fact("fingerprint_collisions", "Reads whose full key differed."),
    "expired": Fact("expired", "Things whose time ran out.", ("kind",)),
    "recovered_copies": Fact("recovered_copies", "Copies found again at start.", ("tier",)),
    "bulk_bytes": Fact("bulk_bytes", "Bytes over the bulk channel.", ("direction",)),
    "wire_frame_bytes": Fact(
        "wire_frame_bytes",
        "Bytes that travelled as frames to and from remote clients, before and after.",
        ("direction", "form"),
    ),
    "bulk_connections": Fact(
        "bulk_accepted_connections", "Connections of the bulk channel, by answer.", ("answer",)
    ),
    "bulk_failures": Fact("bulk_failures", "Calls of the bulk channel that failed."),
    "prefetch_outcomes": Fact(
        "prefetch_outcome_blocks",
        "Blocks loaded ahead, by signal: used, wasted (not used in time), failed.",
        ("signal", "result"),
    ),
    "prefetch_wasted_bytes": Fact("prefetch_wasted_bytes", "Bytes loaded ahead and not used."),
    "feedback_blocks": Fact(
        "feedback_blocks", "Blocks in reports of attention, by what became of them.", ("result",)
    ),
    "resident_blocks": Fact(
        "resident_blocks", "Blocks of predicted working sets at their deadline.", ("result",)
    ),
    "resident_reads": Fact(
        "resident_reads", "Blocks that sessions with a predicted set read.", ("result",)
    ),
    "page_in_blocks": Fact(
        "page_in_blocks",
        "Blocks wanted in memory ahead, by signal and what became of them.",
        ("signal", "result"),
    ),
    "prefetched_blocks": Fact(
        "prefetched_blocks", "Blocks prefetched, by what became of them.", ("result",)
    ),
}


class TierGauges:
    """The state of one tier."""

    def __init__(self, gauges: Mapping[str, Gauge], tier: str) -> None:
        self.capacity_bytes = gauges["capacity_bytes"].labels(tier)
        self.granted_bytes = gauges["granted_bytes"].labels(tier)
        self.used_bytes = gauges["used_bytes"].labels(tier)
        self.leased_bytes = gauges["leased_bytes"].labels(tier)
        self.pinned_bytes = gauges["pinned_bytes"].labels(tier)
        self.quarantined_bytes = gauges["quarantined_bytes"].labels(tier)
        self.aside_bytes = gauges["aside_bytes"].labels(tier)
        self.copies = gauges["copies"].labels(tier)
        self.dirty_copies = gauges["dirty_copies"].labels(tier)
        self.fragmentation_ratio = gauges["fragmentation_ratio"].labels(tier)
        self.what_if_hit_blocks_per_second = gauges["what_if_hit_blocks_per_second"].labels(tier)
        self.what_if_nearer_blocks_per_second = gauges["what_if_nearer_blocks_per_second"].labels(
            tier
        )
        self.what_if_saved_flops_per_second = gauges["what_if_saved_flops_per_second"].labels(tier)


_TIER_MEANINGS = {
    "capacity_bytes": "Configured size.",
    "granted_bytes": "Size that is backed by memory or files now.",
    "used_bytes": "In use by copies and fills.",
    "leased_bytes": "Held by leases.",
    "pinned_bytes": "Held by pins.",
    "quarantined_bytes": "Kept aside from late writers.",
    "aside_bytes": "Held by sessions for puts to come.",
    "copies": "Copies.",
    "dirty_copies": "Copies without a slower one.",
    "what_if_hit_blocks_per_second": "Hits instead of misses with 10 GiB more, estimated.",
    "what_if_nearer_blocks_per_second": "Hits here instead of in a slower tier with 10 GiB more, estimated.",
    "what_if_saved_flops_per_second": "Prefill saved with 10 GiB more, estimated.",
    "fragmentation_ratio": "Share of the tier that is free but in pieces too small for a typical request.",
}


@dataclass(frozen=True, slots=True)
class Sets:
    """The closed sets of label values that other modules own."""

    methods: tuple[str, ...]
    errors: tuple[str, ...]
    """Class names of typed errors, and `internal` for any other."""
    queues: tuple[str, ...]
    """Lanes and their urgencies, such as `disk:demand`."""


@dataclass(frozen=True, slots=True)
class Build:
    version: str
    policy: str
    codec: str


class Metrics:
    """`registry` is this object's own: a process may have many (tests do)."""

    def __init__(self, sets: Sets, build: Build) -> None:
        self.registry = registry = CollectorRegistry()
        self._facts = _Facts()
        registry.register(self._facts)
        ProcessCollector(registry=registry)

        seconds = _histogram(registry, "request_seconds", "Time of a call.", ("method",))
        failures = _counter(registry, "request_errors", "Calls that raised, by error.", ("error",))
        self.request_seconds = {method: seconds.labels(method) for method in sets.methods}
        self.request_errors = {error: failures.labels(error) for error in sets.errors}
        depths = _gauge(registry, "queue_depth_jobs", "Work waiting for a lane.", ("queue",))
        self.queue_depth_jobs = {queue: depths.labels(queue) for queue in sets.queues}
        copies = _histogram(registry, "copy_seconds", "Time of a copy between tiers.", ("tier",))
        self.copy_seconds = tuple(copies.labels(tier) for tier in TIERS)
        """By the tier written to."""
        self._add_tiers(registry)
        self._add_state(registry)
        self._add_schedule(registry)
        info = Info("kvstored_build", "What runs.", registry=registry)
        info.info({"version": build.version, "policy": build.policy, "codec": build.codec})

    def _add_tiers(self, registry: CollectorRegistry) -> None:
        speeds = _gauge(
            registry, "load_bytes_per_second", "How fast bytes are loaded, as measured.", ("tier",)
        )
        waits = _gauge(registry, "load_queue_seconds", "Loads that engines wait for.", ("tier",))
        self.load_bytes_per_second = tuple(speeds.labels(tier) for tier in TIERS)
        self.load_queue_seconds = tuple(waits.labels(tier) for tier in TIERS)
        """By TierId, like the one before."""

        tier_gauges = {
            name: _gauge(registry, f"tier_{name}", meaning, ("tier",))
            for name, meaning in _TIER_MEANINGS.items()
        }
        self.tiers = tuple(TierGauges(tier_gauges, tier) for tier in TIERS)
        """By TierId."""

        shape = ("class", "tier")
        classes = _gauge(registry, "class_copies", "Copies by temperature class.", shape)
        sizes = _gauge(registry, "class_bytes", "Bytes by temperature class.", shape)
        self.class_copies, self.class_bytes = (
            tuple(tuple(gauge.labels(each, tier) for tier in TIERS) for each in CLASSES)
            for gauge in (classes, sizes)
        )
        """By Heat, then by TierId."""

    def _add_state(self, registry: CollectorRegistry) -> None:
        self.hbm_pinned_bytes = _gauge(registry, "hbm_pinned_bytes", "DRAM pinned for the GPUs.")
        self.hbm_footprint_bytes = _gauge(
            registry, "hbm_footprint_bytes", "GPU memory taken beside the pools: contexts, staging."
        )
        self.hbm_off = _gauge(
            registry, "hbm_off_state", "1 where GPUs are configured and not used."
        )
        self.sessions = _gauge(registry, "sessions", "Open sessions.")
        self.connections = _gauge(registry, "connections", "Connections of the local channel.")
        self.bulk_connections = _gauge(
            registry, "bulk_connections", "Connections of the bulk channel."
        )
        self.fills = _gauge(registry, "fills", "Rights to write that are held.")
        self.leases = _gauge(registry, "leases", "Rights to read that are held.")
        self.pins = _gauge(registry, "pins", "Pins that are held.")
        self.running_requests = _gauge(
            registry, "running_requests", "Requests begun, not completed."
        )
        self.blocks = _gauge(registry, "blocks", "Blocks in the catalog.")
        self.tree_nodes = _gauge(registry, "tree_nodes", "Runs of blocks in the prefix tree.")
        self.codec_ratio = _gauge(registry, "codec_ratio", "Decoded bytes per stored byte on NVMe.")
        self.codec_ratio.set(1)
        self.recovering_tiers = _gauge(
            registry, "recovering_tiers", "Tiers that are still scanned."
        )
        self.ready = _gauge(registry, "ready_state", "1 when it serves.")
        self.loop_lag_seconds = _histogram(
            registry, "loop_lag_seconds", "Event loop wake-ups: how late."
        )
        self.evictor_lag_seconds = _histogram(
            registry, "evictor_lag_seconds", "Evictor: how long a tier was above its watermark."
        )

    def _add_schedule(self, registry: CollectorRegistry) -> None:
        self.disk_write_budget_bytes = _gauge(
            registry, "disk_write_budget_bytes", "Bytes that may be written to NVMe in 24 hours."
        )
        self.disk_written_day_bytes = _gauge(
            registry, "disk_written_day_bytes", "Bytes written to NVMe in the last 24 hours."
        )
        self.disk_write_state = _gauge(
            registry,
            "disk_write_state",
            "Budget of writes: 0 open, 1 no one-hit wonders, 2 closed.",
        )
        self.resident_late_seconds = _histogram(
            registry, "resident_late_seconds", "Predicted working sets: how late they were whole."
        )
        self.prefetch_held_bytes = _gauge(
            registry, "prefetch_held_bytes", "Loaded ahead and not used yet."
        )
        pauses = _gauge(
            registry,
            "prefetch_pause_seconds",
            "Signals that wasted too much: paused for.",
            ("signal",),
        )
        self.prefetch_pause_seconds = {signal: pauses.labels(signal) for signal in GUESSES}

    def set_facts(self, totals: Mapping[tuple[str, str], float]) -> None:
        """The store's totals as of now; a fact without an entry in FACTS is not exported."""
        self._facts.totals = dict(totals)

    def exposition(self) -> bytes:
        """The text that Prometheus reads; milliseconds of work, for a thread."""
        return generate_latest(self.registry)


class _Facts(Collector):
    def __init__(self) -> None:
        self.totals: Mapping[tuple[str, str], float] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        families = {name: self._family(fact) for name, fact in FACTS.items()}
        for name, fact in FACTS.items():
            if not fact.labels:
                families[name].add_metric([], self.totals.get((name, ""), 0))
        for (name, label), total in sorted(self.totals.items()):
            if name in FACTS and FACTS[name].labels:
                values = label.split(":", len(FACTS[name].labels) - 1)
                missing = [""] * (len(FACTS[name].labels) - len(values))
                families[name].add_metric([*values, *missing], total)
        yield from families.values()

    def describe(self) -> Iterable[CounterMetricFamily]:
        return [self._family(fact) for fact in FACTS.values()]

    @staticmethod
    def _family(fact: Fact) -> CounterMetricFamily:
        return CounterMetricFamily(f"kvstored_{fact.metric}", fact.meaning, labels=fact.labels)


def _histogram(
    registry: CollectorRegistry, name: str, meaning: str, labels: tuple[str, ...] = ()
) -> Histogram:
    return Histogram(
        f"kvstored_{name}", meaning, labels, buckets=LATENCY_BUCKETS_S, registry=registry
    )


def _gauge(
    registry: CollectorRegistry, name: str, meaning: str, labels: tuple[str, ...] = ()
) -> Gauge:
    return Gauge(f"kvstored_{name}", meaning, labels, registry=registry)


def _counter(
    registry: CollectorRegistry, name: str, meaning: str, labels: tuple[str, ...]
) -> Counter:
    return Counter(f"kvstored_{name}", meaning, labels, registry=registry)
