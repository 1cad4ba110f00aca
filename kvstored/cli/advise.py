"""`kvstored advise`: what more space in a tier would bring, from what was asked for since the daemon's start."""

import click
import numpy as np
from rich.console import Group
from rich.table import Table

from kvstored import units
from kvstored.cli.output import facts, json_option, show, table
from kvstored.cli.params import SIZE
from kvstored.cli.reach import Target, daemon_options
from kvstored.core.types import TierId
from kvstored.core.what_if import Gain, Hits, Room, gains
from kvstored.pb import kvstored_pb2 as pb

EXA = 1e18
HOUR_S = 3600.0
MONTH_H = 730.0


@click.command()
@daemon_options
@click.option(
    "--more",
    "more_bytes",
    type=SIZE,
    default="10GiB",
    show_default=True,
    help="What each tier would have more.",
)
@click.option(
    "--exaflop-price",
    "price",
    type=click.FloatRange(0),
    metavar="PRICE",
    help="What 10^18 FLOPs of prefill cost you: adds what is saved a month.",
)
@json_option
def advise(*, target: Target, more_bytes: float, price: float | None, is_json: bool) -> None:
    """Show what more space in a tier would bring: hits, prefill saved and, given a price, money.

    Estimated from a sample of all that was asked for, for leaf-first LRU: the default policy hits
    more where memory is short. What was asked for a day ago counts half.
    """
    with target.client() as client:
        stat = client.call("Stat", pb.StatRequest(), pb.StatResponse)
    found = gains(_hits(stat.what_if), _rooms(stat), more_bytes)
    view = _as_json(stat.what_if, found, more_bytes, price)
    show(view, lambda: _text(stat.what_if, found, more_bytes, price), is_json=is_json)


def _hits(what_if: pb.WhatIf) -> Hits:
    """By bytes."""
    capacities = [0.0, *(point.capacity_bytes for point in what_if.points)]
    blocks = [0.0, *(point.blocks for point in what_if.points)]
    flops = [0.0, *(point.flops for point in what_if.points)]

    def hits(size_bytes: float) -> tuple[float, float]:
        return (
            float(np.interp(size_bytes, capacities, blocks)),
            float(np.interp(size_bytes, capacities, flops)),
        )

    return hits


def _rooms(stat: pb.StatResponse) -> list[Room]:
    """What a tier holds in decoded bytes."""
    return [
        Room(TierId[tier.name.upper()], tier.capacity_bytes * max(tier.codec_ratio, 1.0))
        for tier in stat.tiers
        if tier.state != "off"
    ]


def _hourly(what_if: pb.WhatIf, amount: float) -> float:
    return amount / max(what_if.span_s, 1.0) * HOUR_S


def _monthly(what_if: pb.WhatIf, flops: float, price: float) -> float:
    return _hourly(what_if, flops) * MONTH_H / EXA * price


def _as_json(
    what_if: pb.WhatIf, found: tuple[Gain, ...], more_bytes: float, price: float | None
) -> dict[str, object]:
    tiers = [
        {
            "tier": gain.tier.name.lower(),
            "hit_blocks_per_hour": _hourly(what_if, gain.blocks),
            "nearer_blocks_per_hour": _hourly(what_if, gain.nearer_blocks),
            "saved_flops_per_hour": _hourly(what_if, gain.flops),
            "saved_per_month": None if price is None else _monthly(what_if, gain.flops, price),
        }
        for gain in found
    ]
    return {
        "more_bytes": int(more_bytes),
        "span_s": what_if.span_s,
        "asked_blocks": what_if.blocks,
        "asked_flops": what_if.flops,
        "sampled_share": what_if.sampled_share,
        "tiers": tiers,
    }


def _text(
    what_if: pb.WhatIf, found: tuple[Gain, ...], more_bytes: float, price: float | None
) -> Group:
    head = facts(
        {
            "asked for": f"{what_if.blocks:.0f} blocks, {what_if.flops / EXA:.3g} EFLOP of prefill",
            "within": units.format_duration(round(what_if.span_s)),
            "sample": f"{what_if.sampled_share:.2%} of the blocks",
        }
    )
    return Group(head, "", _table(what_if, found, more_bytes, price))


def _table(
    what_if: pb.WhatIf, found: tuple[Gain, ...], more_bytes: float, price: float | None
) -> Table:
    money = () if price is None else ("saved a month >",)
    more = f"+{units.format_about(more_bytes)} in"
    made = table(more, "more hits/h >", "nearer hits/h >", "EFLOP saved/h >", *money)
    for gain in found:
        saved = () if price is None else (f"{_monthly(what_if, gain.flops, price):.2f}",)
        made.add_row(
            gain.tier.name.lower(),
            f"{_hourly(what_if, gain.blocks):.0f}",
            f"{_hourly(what_if, gain.nearer_blocks):.0f}",
            f"{_hourly(what_if, gain.flops) / EXA:.3g}",
            *saved,
        )
    return made
