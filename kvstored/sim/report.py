"""The result of a replay as a value, as JSON, as a table and as a picture. Prints nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from kvstored.core.types import TierId
from kvstored.errors import InvalidArgument
from kvstored.sim.measure import Bucket, Quantiles, Recorder, TierBlocks
from kvstored.sim.traces import Trace
from kvstored.units import format_about, format_rate

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Setup:
    """What was replayed, on what. `capacity_blocks` None: without bound (offline), or the daemon's own (live).

    `tiers`: those that there are. `blocks_before`: what the namespace held already, which hits of the replay then find.
    """

    trace: str
    mode: str
    policy: str
    block_tokens: int
    block_bytes: int
    clients: int
    capacity_blocks: dict[str, int] | None
    tiers: tuple[str, ...] = ("dram",)
    blocks_before: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What came out. `hits`: hit blocks by tier; `evicted_blocks`: copies dropped to make room, in all tiers."""

    setup: Setup
    requests: int
    blocks: int
    hit_blocks: int
    hits: TierBlocks
    put_blocks: int
    wrong_blocks: int
    lost_blocks: int
    evicted_blocks: int
    elapsed_s: float
    latencies: dict[str, Quantiles]
    buckets: tuple[Bucket, ...]
    written_blocks: int = 0
    """Copies made on NVMe, and below distinct blocks; 0 where bytes are real: nobody counts them there."""
    unique_blocks: int = 0

    @property
    def writes_per_unique_block(self) -> float:
        return self.written_blocks / self.unique_blocks if self.unique_blocks else 0.0

    @property
    def block_hit_ratio(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def read_bytes(self) -> int:
        return self.hit_blocks * self.setup.block_bytes

    @property
    def put_bytes(self) -> int:
        return self.put_blocks * self.setup.block_bytes


def offline_setup(
    trace: Trace, *, policy: str, capacity_blocks: Mapping[TierId, int] | None
) -> Setup:
    capacity: dict[str, int] | None = None
    if capacity_blocks is not None:
        capacity = {tier.name.lower(): blocks for tier, blocks in capacity_blocks.items()}
    tiers = tuple(capacity or ("dram",))
    return Setup(trace.name, "offline", policy, trace.block_tokens, 0, 1, capacity, tiers)


def result(setup: Setup, recorder: Recorder, *, evicted_blocks: int, elapsed_s: float) -> Result:
    return Result(
        setup=setup,
        requests=recorder.requests,
        blocks=recorder.blocks,
        hit_blocks=sum(recorder.hits),
        hits=recorder.hits,
        put_blocks=recorder.put_blocks,
        wrong_blocks=recorder.wrong_blocks,
        lost_blocks=recorder.lost_blocks,
        evicted_blocks=evicted_blocks,
        elapsed_s=elapsed_s,
        latencies=recorder.latencies(),
        buckets=recorder.buckets(),
    )


def as_json(done: Result) -> Json:
    """One flat object; keys are added, never renamed."""
    return asdict(done.setup) | {
        "requests": done.requests,
        "blocks": done.blocks,
        "hit_blocks": done.hit_blocks,
        "block_hit_ratio": round(done.block_hit_ratio, 6),
        "tier_hit_blocks": _by_tier(done.hits),
        "tier_hit_ratio": _ratios(done.hits, done.blocks),
        "put_blocks": done.put_blocks,
        "wrong_blocks": done.wrong_blocks,
        "lost_blocks": done.lost_blocks,
        "evicted_blocks": done.evicted_blocks,
        "written_blocks": done.written_blocks,
        "unique_blocks": done.unique_blocks,
        "writes_per_unique_block": round(done.writes_per_unique_block, 6),
        "read_bytes": done.read_bytes,
        "put_bytes": done.put_bytes,
        "elapsed_s": round(done.elapsed_s, 3),
        "latencies": {name: asdict(value) for name, value in done.latencies.items()},
        "buckets": [_bucket_json(bucket) for bucket in done.buckets if bucket.requests],
    }


def table(done: Result) -> Table:
    """Figures for people; the same facts as the JSON without the buckets."""
    view = Table(title=f"replay of {done.setup.trace} ({done.setup.mode})", show_header=False)
    view.add_column("what")
    view.add_column("figure", justify="right")
    seconds = max(done.elapsed_s, 1e-9)
    for name, text in (
        ("policy", done.setup.policy),
        ("capacity", _capacity(done.setup)),
        *([("blocks before", f"{done.setup.blocks_before:,}")] if done.setup.blocks_before else []),
        ("requests", f"{done.requests:,}  ({done.requests / seconds:,.0f}/s)"),
        ("blocks", f"{done.blocks:,}"),
        ("hit blocks", f"{done.hit_blocks:,}"),
        ("block hit ratio", f"{done.block_hit_ratio:.4f}"),
    ):
        view.add_row(name, text)
    for tier, blocks in _by_tier(done.hits).items():
        if tier not in done.setup.tiers:
            continue
        view.add_row(f"  from {tier}", f"{blocks:,}  ({blocks / max(done.blocks, 1):.4f})")
    view.add_row("put blocks", f"{done.put_blocks:,}")
    view.add_row("evicted blocks", f"{done.evicted_blocks:,}")
    if done.written_blocks:
        text = f"{done.written_blocks:,}  ({done.writes_per_unique_block:.2f} a unique block)"
        view.add_row("written to nvme", text)
    view.add_row("lost blocks", f"{done.lost_blocks:,}")
    style = "bold red" if done.wrong_blocks else None
    view.add_row("wrong blocks", f"{done.wrong_blocks:,}", style=style)
    if done.setup.block_bytes:
        view.add_row("read", _volume(done.read_bytes, seconds))
        view.add_row("put", _volume(done.put_bytes, seconds))
    for operation, latency in done.latencies.items():
        if latency.count:
            spread = f"{latency.p50_ms:,.3f} / {latency.p99_ms:,.3f} ms"
            view.add_row(f"{operation} p50 / p99", spread)
    view.add_row("elapsed", f"{done.elapsed_s:,.2f} s")
    return view


def plot(done: Result, path: Path) -> None:
    """Draw hit ratio by tier and request latency over trace time; the suffix of `path` says the format."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise InvalidArgument("a plot needs matplotlib: pip install 'kvstored[plot]'") from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    ratio, latency = figure.subplots(2, 1, sharex=True)
    busy = [bucket for bucket in done.buckets if bucket.blocks]
    minutes = [bucket.start_s / 60 for bucket in busy]
    tiers = [tier for tier in TierId if done.hits[tier]] or [TierId.DRAM]
    shares = [[bucket.hits[tier] / bucket.blocks for bucket in busy] for tier in tiers]
    ratio.stackplot(minutes, *shares, labels=[tier.name for tier in tiers], step="post")
    ratio.set(ylim=(0, 1), ylabel="block hit ratio", title=_caption(done))
    ratio.legend(loc="upper left")
    latency.step(minutes, [b.latency.p50_ms for b in busy], where="post", label="p50")
    latency.step(minutes, [b.latency.p99_ms for b in busy], where="post", label="p99")
    latency.set(xlabel="trace time, minutes", ylabel="request latency, ms")
    if busy:
        latency.set_yscale("log")
        # 0.5, not 5 x 10^-1; between the decades 2 and 5 alone
        latency.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        latency.yaxis.set_minor_formatter(
            lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""
        )
    latency.legend(loc="upper left")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot draw the plot path={path}: {error}") from error


def _caption(done: Result) -> str:
    return (
        f"{done.setup.trace}, {done.setup.mode}, {done.setup.policy}: hit ratio "
        f"{done.block_hit_ratio:.4f}, read {format_about(done.read_bytes)}, put {format_about(done.put_bytes)}\n"
        f"put {done.put_blocks:,} blocks, evicted {done.evicted_blocks:,}, wrong {done.wrong_blocks:,}"
    )


def _bucket_json(bucket: Bucket) -> Json:
    return {
        "start_s": bucket.start_s,
        "width_s": bucket.width_s,
        "requests": bucket.requests,
        "blocks": bucket.blocks,
        "tier_hit_ratio": _ratios(bucket.hits, bucket.blocks),
        "p50_ms": round(bucket.latency.p50_ms, 4),
        "p99_ms": round(bucket.latency.p99_ms, 4),
    }


def _by_tier(blocks: Sequence[int]) -> dict[str, int]:
    return {tier.name.lower(): blocks[tier] for tier in TierId}


def _ratios(hits: Sequence[int], blocks: int) -> dict[str, float]:
    return {name: round(hit / max(blocks, 1), 6) for name, hit in _by_tier(hits).items()}


def _capacity(setup: Setup) -> str:
    if setup.capacity_blocks is None:
        return "the daemon's" if setup.mode == "live" else "infinite"
    return ", ".join(f"{tier} {blocks:,} blocks" for tier, blocks in setup.capacity_blocks.items())


def _volume(size_bytes: int, seconds: float) -> str:
    return f"{format_about(size_bytes)}  ({format_rate(size_bytes / seconds)})"
