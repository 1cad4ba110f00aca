"""`kvstored replay`: a real request trace against the running daemon, or offline on the pure core."""

from pathlib import Path

import click

from kvstored.cli.output import FAILED, json_option, progress, show
from kvstored.cli.params import SIZE
from kvstored.cli.reach import Target, daemon_options
from kvstored.core.bundles import DEFAULT, NAMES
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import TierId
from kvstored.sim.core import CoreModel
from kvstored.sim.daemon import replay_live
from kvstored.sim.hinting import HINTS
from kvstored.sim.live import LiveOptions
from kvstored.sim.offline import replay_offline
from kvstored.sim.report import Result, as_json, offline_setup, plot, table
from kvstored.sim.sweep import Order, sweep
from kvstored.sim.sweep import plot as plot_sweeps
from kvstored.sim.sweep import table as sweep_table
from kvstored.sim.traces import Trace, open_trace

TIER_NAMES = {"dram": TierId.DRAM, "nvme": TierId.NVME}
_FILLED = (
    "kvstored: blocks of an earlier replay were there already and count as hits; "
    "kvstored namespaces names the namespace, kvstored clear empties it"
)
LIVE_ONLY = {"address": "--address", "block_bytes": "--block-bytes", "clients": "--clients"}
LIVE_ONLY |= {"speed": "--speed"}
OFFLINE_ONLY = {"policy": "--policy", "capacity_blocks": "--capacity-blocks", "tiers": "--tiers"}
OFFLINE_ONLY |= {"hints": "--hints", "is_sweep": "--sweep"}


def _speed(_: click.Context, __: click.Parameter, value: str) -> float | None:
    if value == "max":
        return None
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e9:
        raise click.BadParameter(f"{value!r} is no speed; write for example 1, 10 or max")
    return factor


def _tiers(_: click.Context, __: click.Parameter, value: str | None) -> dict[TierId, int] | None:
    """`dram=1000,nvme=9000` in blocks."""
    if value is None:
        return None
    tiers: dict[TierId, int] = {}
    for part in value.split(","):
        name, _sign, blocks = part.partition("=")
        if name not in TIER_NAMES or not blocks.isdecimal() or not int(blocks):
            what = "tiers are given in blocks, for example dram=1000,nvme=9000"
            raise click.BadParameter(f"{part!r} is no tier; {what}")
        tiers[TIER_NAMES[name]] = int(blocks)
    if TierId.DRAM not in tiers:
        raise click.BadParameter("dram is always a tier, for example dram=1000,nvme=9000")
    return tiers


def _hints(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    hints = tuple(filter(None, value.split(",")))
    for hint in hints:
        if hint not in HINTS:
            what = f"a trace tells {' and '.join(HINTS)}"
            raise click.BadParameter(f"{hint!r} is no hint: {what}")
    return hints


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@daemon_options
@click.option(
    "--block-bytes",
    metavar="SIZE",
    default="64KiB",
    show_default=True,
    type=SIZE,
    help="Bytes of a block.",
)
@click.option(
    "--speed",
    metavar="X",
    default="max",
    show_default=True,
    callback=_speed,
    help="1: as fast as the trace was, 10: ten times that, max: as fast as it goes.",
)
@click.option(
    "--clients",
    metavar="N",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Clients that replay side by side, a thread each.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="The first N requests only.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A picture of the hit ratio by tier over time (needs matplotlib).",
)
@json_option
@click.option("--offline", is_flag=True, help="On the pure core: no daemon, no bytes, no waiting.")
@click.option(
    "--policy",
    type=click.Choice(NAMES),
    default=DEFAULT,
    show_default=True,
    help="Offline: the eviction policy, a bundle of policy and signals or an order alone.",
)
@click.option(
    "--hints",
    metavar="LIST",
    default="",
    callback=_hints,
    help="Offline: what the policy is told of each request: outlen, session, or both.",
)
@click.option(
    "--sweep",
    "is_sweep",
    is_flag=True,
    help="Offline: every policy at 1 to 20 % of the trace's blocks, beside the optimum.",
)
@click.option(
    "--capacity-blocks",
    type=click.IntRange(1),
    metavar="N",
    help="Offline: blocks that DRAM holds; default: without bound.",
)
@click.option(
    "--tiers",
    metavar="TIERS",
    callback=_tiers,
    help="Offline: several tiers with their blocks, for example dram=1000,nvme=9000.",
)
@click.pass_context
def replay(
    ctx: click.Context,
    *,
    trace: Path,
    target: Target,
    block_bytes: float,
    speed: float | None,
    clients: int,
    limit: int | None,
    picture: Path | None,
    is_json: bool,
    offline: bool,
    policy: str,
    hints: tuple[str, ...],
    is_sweep: bool,
    capacity_blocks: int | None,
    tiers: dict[TierId, int] | None,
) -> None:
    """Replay TRACE (Mooncake JSONL or kvt1, plain or gzipped) and report its block hit ratio.

    Every request becomes match, acquire, put of what was missed, release, with bytes that follow
    from the keys: every read is verified. Exits with 1 if any block was wrong.
    """
    _refuse_other_mode(ctx, LIVE_ONLY if offline else OFFLINE_ONLY, is_offline=offline)
    if tiers is not None and capacity_blocks is not None:
        raise click.UsageError("give --capacity-blocks for one tier or --tiers for several")
    source = open_trace(trace)
    if is_sweep:
        _sweep(ctx, source, hints, limit=limit, picture=picture, is_json=is_json)
        return
    if offline:
        capacity = tiers if capacity_blocks is None else {TierId.DRAM: capacity_blocks}
        done = _offline(
            source, policy=policy, hints=hints, capacity=capacity, limit=limit, is_quiet=is_json
        )
    else:
        options = LiveOptions(int(block_bytes), speed, clients, limit)
        done = _live(source, options, target, is_quiet=is_json)
    show(as_json(done), lambda: table(done), is_json=is_json)
    if picture is not None:
        plot(done, picture)
        click.echo(f"kvstored: the plot is in {picture}", err=True)
    if done.setup.blocks_before:
        click.echo(_FILLED, err=True)
    if done.wrong_blocks:
        ctx.exit(FAILED)


def _offline(
    source: Trace,
    *,
    policy: str,
    hints: tuple[str, ...],
    capacity: dict[TierId, int] | None,
    limit: int | None,
    is_quiet: bool,
) -> Result:
    model = CoreModel(source, policy=policy, capacity_blocks=capacity)
    setup = offline_setup(source, policy=policy, capacity_blocks=capacity)
    with progress(source.name, limit, is_quiet=is_quiet) as advance:
        return replay_offline(source, model, setup, limit=limit, hints=hints, advance=advance)


def _sweep(
    ctx: click.Context,
    source: Trace,
    hints: tuple[str, ...],
    *,
    limit: int | None,
    picture: Path | None,
    is_json: bool,
) -> None:
    for name in ("policy", "capacity_blocks", "tiers"):
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{OFFLINE_ONLY[name]} has no meaning with --sweep", ctx)
    done = sweep(source, [Order(policy, hints) for policy in POLICIES], limit=limit)
    show(done.as_json(), lambda: sweep_table(done), is_json=is_json)
    if picture is not None:
        plot_sweeps([done], picture)
        click.echo(f"kvstored: the plot is in {picture}", err=True)


def _live(source: Trace, options: LiveOptions, target: Target, *, is_quiet: bool) -> Result:
    with progress(source.name, options.limit, is_quiet=is_quiet) as advance:
        return replay_live(source, options, target.client, advance)


def _refuse_other_mode(ctx: click.Context, names: dict[str, str], *, is_offline: bool) -> None:
    """A flag of the other mode would be ignored in silence."""
    default = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    for name, flag in names.items():
        if ctx.get_parameter_source(name) not in (*default, None):
            where = "has no meaning with --offline" if is_offline else "needs --offline"
            raise click.UsageError(f"{flag} {where}", ctx)
