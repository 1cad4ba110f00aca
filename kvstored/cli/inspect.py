"""Commands that look inside a running daemon and change nothing: stat, tree, leases, explain, locate, events."""

import json
import time
from datetime import datetime

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvstored import units
from kvstored.cli.output import as_json, facts, json_option, show, table
from kvstored.cli.reach import (
    KeyWords,
    Target,
    daemon_options,
    key_options,
    listed,
    namespace_named,
    opened,
)
from kvstored.client import Client
from kvstored.core.types import TierId
from kvstored.errors import InvalidArgument, Unavailable
from kvstored.pb import kvstored_pb2 as pb

_POLL_WAIT_MS = 1_000
"""An interrupt that comes just before the wait begins is seen at its end."""
_EVENTS_MAX = 1024
_RETRY_S = 0.2


# ---- stat


@click.command()
@daemon_options
@json_option
def stat(*, target: Target, is_json: bool) -> None:
    """Show what the daemon holds: processes, tiers, blocks, leases, counters."""
    with target.client() as client:
        answer = client.call("Stat", pb.StatRequest(), pb.StatResponse)
    show(as_json(answer), lambda: _stat_text(answer), is_json=is_json)


def _stat_text(answer: pb.StatResponse) -> Group:
    state = f"{answer.state}, recovering" if answer.recovering else answer.state
    front = f", front {answer.front_pid}" if answer.front_pid else ""
    head = facts(
        {
            "state": state,
            "version": answer.version,
            "pids": f"daemon {answer.daemon_pid}, keeper {answer.keeper_pid}{front}",
            "up": units.format_duration(round(answer.uptime_s)),
            "epoch": answer.epoch,
            "policy": answer.policy,
            "blocks": f"{answer.blocks} in {answer.tree_nodes} nodes of the prefix tree",
            "held": f"{answer.leases} leases, {answer.fills} fills, {answer.pins} pins, "
            f"{answer.requests} requests by {answer.sessions} sessions",
        }
    )
    budgets = facts(
        {
            f"{tier.name} writes": f"{units.format_about(tier.written_day_bytes)} of "
            f"{units.format_about(tier.write_budget_bytes)} in 24 hours: {tier.write_state}"
            for tier in answer.tiers
            if tier.write_budget_bytes
        }
    )
    counters = facts({name: _count(name, n) for name, n in sorted(answer.counters.items())})
    codecs = _codecs_text(answer)
    tables: list[RenderableType] = [_tiers_text(answer), *([codecs] if codecs.rows else [])]
    tables += [budgets] if budgets.rows else []
    tables += [f"{tier.name} is off: {tier.reason}" for tier in answer.tiers if tier.reason]
    return Group(head, "", *tables, "", counters)


def _count(name: str, count: float) -> str:
    return units.format_about(count) if "bytes" in name.partition(":")[0] else f"{count:.0f}"


def _tiers_text(answer: pb.StatResponse) -> Table:
    made = table(
        *("tier", "state", "capacity >", "granted >", "used >", "used % >", "copies >", "dirty >"),
        *("leased >", "pinned >", "quarantined >", "aside >", "fragmented >", "codec"),
    )
    for tier in answer.tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        # below the slowest tier there is none that a copy could lack
        dirty = "-" if tier is answer.tiers[-1] else str(tier.dirty_copies)
        made.add_row(
            *(tier.name, tier.state),
            *map(units.format_about, (tier.capacity_bytes, tier.granted_bytes, tier.used_bytes)),
            *(f"{share:.1%}", str(tier.copies), dirty),
            *map(units.format_about, (tier.leased_bytes, tier.pinned_bytes)),
            *map(units.format_about, (tier.quarantined_bytes, tier.aside_bytes)),
            *(f"{tier.fragmentation:.1%}", f"{tier.codec} {tier.codec_ratio:.2f}x".strip()),
        )
    return made


def _codecs_text(answer: pb.StatResponse) -> Table:
    made = table(
        *("namespace", "group", "plan", "written >", "stored >", "ratio >"),
        *("P frames >", "ratio >", "encoded /s >", "decoded /s >"),
    )
    for each in (each for tier in answer.tiers for each in tier.groups):
        made.add_row(
            *(each.namespace.hex()[:12], each.group, each.plan),
            *map(units.format_about, (each.plain_bytes, each.stored_bytes)),
            _ratio(each.plain_bytes, each.stored_bytes),
            units.format_about(each.p_plain_bytes),
            _ratio(each.p_plain_bytes, each.p_stored_bytes),
            *(_rate(each.plain_bytes, each.encode_s), _rate(each.decoded_bytes, each.decode_s)),
        )
    return made


def _rate(size_bytes: int, took_s: float) -> str:
    """A second of one core."""
    return units.format_about(size_bytes / took_s) if took_s else "-"


def _ratio(plain_bytes: int, stored_bytes: int) -> str:
    return f"{plain_bytes / stored_bytes:.2f}x" if stored_bytes else "-"


# ---- tree, leases


@click.command()
@click.argument("namespace", required=False)
@click.option(
    "--nodes",
    "nodes_max",
    metavar="N",
    type=click.IntRange(1, 10_000),
    default=200,
    show_default=True,
    help="At most so many nodes.",
)
@daemon_options
@json_option
def tree(*, namespace: str | None, nodes_max: int, target: Target, is_json: bool) -> None:
    """Draw the prefix tree of NAMESPACE, or of all: one line a run of blocks between two branchings."""
    with target.client() as client:
        digest = namespace_named(client, namespace).digest if namespace else b""
        names = {each.digest: each.alias for each in listed(client)}
        request = pb.TreeRequest(namespace=digest, nodes_max=nodes_max)
        answer = client.call("Tree", request, pb.TreeResponse)
    show(as_json(answer), lambda: _tree_text(answer, names), is_json=is_json)


def _tree_text(answer: pb.TreeResponse, names: dict[bytes, str]) -> Group:
    drawn: dict[int, Tree] = {}
    roots: dict[bytes, Tree] = {}
    for node in sorted(answer.nodes, key=lambda node: (node.depth_blocks, node.id)):
        above = drawn.get(node.parent)
        if above is None:
            name = names.get(node.namespace, node.namespace.hex()[:12])
            above = roots.setdefault(node.namespace, Tree(Text(name, "bold")))
        drawn[node.id] = above.add(Text(_node_text(node)))
    cut = [f"only the first {len(answer.nodes)} nodes: --nodes shows more"] if answer.cut else []
    lines: list[RenderableType] = [*roots.values()]
    return Group(*(lines or ["no blocks"]), *cut)


def _node_text(node: pb.TreeNode) -> str:
    tiers = ", ".join(
        f"{count} {TierId(tier).name.lower()}"
        for tier, count in enumerate(node.tier_blocks)
        if count
    )
    held = f", held {node.holds}x" if node.holds else ""
    return (
        f"fingerprint {node.head_fingerprint.hex()[:12]}, depth {node.depth_blocks}: {_counted(node.blocks, 'block')}, "
        f"{_counted(node.tokens, 'token')} ({tiers or 'no copy'}), {node.heat}, {_counted(node.hits, 'hit')}{held}"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@click.command()
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 10_000),
    default=1000,
    show_default=True,
    help="At most so many.",
)
@daemon_options
@json_option
def leases(*, limit: int, target: Target, is_json: bool) -> None:
    """List what clients hold: leases, fills, pins and running requests, with age and end."""
    with target.client() as client:
        answer = client.call("Leases", pb.LeasesRequest(max=limit), pb.LeasesResponse)
    show(as_json(answer), lambda: _leases_text(answer), is_json=is_json)


def _leases_text(answer: pb.LeasesResponse) -> Group:
    made = table("kind", "id >", "client", "blocks >", "bytes >", "age >", "ends in >", "state")
    for held in answer.leases:
        ends = f"{held.expires_in_s:.1f} s" if held.expires_in_s else ""
        made.add_row(
            *(held.kind, str(held.id), held.client, str(held.blocks)),
            *(units.format_about(held.bytes), f"{held.age_s:.1f} s", ends, held.state),
        )
    cut = [f"only the first {len(answer.leases)}: --limit shows more"] if answer.cut else []
    return Group(made if answer.leases else "nothing is held", *cut)


# ---- explain, locate


@click.command()
@click.argument("namespace")
@key_options
@daemon_options
@json_option
def explain(*, namespace: str, words: KeyWords, target: Target, is_json: bool) -> None:
    """Tell why each block is where it is, or why it missed: never stored, evicted by which rule, expired, corrupt ..."""
    with target.client() as client:
        there = opened(client, namespace)
        request = pb.ExplainRequest(namespace=there.digest, keys=words.of(there).message())
        answer = client.call("Explain", request, pb.ExplainResponse)

    def text() -> Table:
        made = table("key", "verdict", "tiers", "why")
        for each in answer.keys:
            made.add_row(each.key.hex(), each.verdict, ", ".join(each.tiers), each.text)
        return made

    show(as_json(answer), text, is_json=is_json)


@click.command()
@click.argument("namespace")
@key_options
@daemon_options
@json_option
def locate(*, namespace: str, words: KeyWords, target: Target, is_json: bool) -> None:
    """Show in which tiers each block can be read, and its generation."""
    with target.client() as client:
        there = opened(client, namespace)
        keys = words.of(there)
        found = there.locate(keys)
    rows = [
        {
            "key": key.hex(),
            "tiers": [tier.name.lower() for tier in TierId if bits >> tier & 1],
            "readable": bool(bits),
            "generation": str(generation),  # as ids: 64 bits
        }
        for key, bits, generation in zip(keys, found.tiers, found.generations, strict=True)
    ]

    def text() -> Table:
        made = table("key", "tiers", "generation >")
        for key, bits, generation in zip(keys, found.tiers, found.generations, strict=True):
            tiers = [tier.name.lower() for tier in TierId if bits >> tier & 1]
            over = "over several tiers" if bits else "not there"
            made.add_row(key.hex(), ", ".join(tiers) or over, str(generation or ""))
        return made

    show({"keys": rows}, text, is_json=is_json)


# ---- events


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens, until interrupted.")
@click.option(
    "--since",
    metavar="EPOCH:CURSOR",
    help="Only what came after, as an earlier call told.  [default: all that is kept]",
)
@daemon_options
@json_option
def events(*, follow: bool, since: str | None, target: Target, is_json: bool) -> None:
    """Print what was stored, loaded, evicted, removed or found corrupt, oldest first.

    With --json one object; with --follow --json one object a line and event.
    """
    epoch, cursor = _since(since)
    with target.client() as client:
        if not follow:
            _print_kept(client, epoch, cursor, is_json=is_json)
            return
        _print_coming(client, epoch, cursor, is_json=is_json)


_AWAY = "kvstored: the daemon is away, waiting for it"
_LOST = "kvstored: some events are gone: the ring is bounded, or the daemon was restarted"


def _print_coming(client: Client, epoch: int, cursor: int, *, is_json: bool) -> None:
    """Until interrupted. A daemon that is away is waited for, as long as it has answered once: its successor has another epoch."""
    is_away = has_answered = False
    try:
        while True:
            try:
                answer = _poll(client, epoch, cursor, wait_ms=_POLL_WAIT_MS)
            except Unavailable:
                if not has_answered:
                    raise
                if not is_away:
                    click.echo(_AWAY, err=True)
                is_away = True
                time.sleep(_RETRY_S)
                continue
            is_away, has_answered = False, True
            epoch, cursor = answer.epoch, answer.cursor
            if answer.lost:
                click.echo(_LOST, err=True)
            for event in answer.events:
                click.echo(json.dumps(as_json(event)) if is_json else _event_text(event))
    except KeyboardInterrupt:
        click.echo(_continues(epoch, cursor), err=True)


def _print_kept(client: Client, epoch: int, cursor: int, *, is_json: bool) -> None:
    kept: list[pb.Event] = []
    is_lost = False
    while True:
        answer = _poll(client, epoch, cursor, wait_ms=0)
        epoch, cursor = answer.epoch, answer.cursor
        is_lost = is_lost or answer.lost
        kept += answer.events
        if not answer.events:
            break
    if is_json:
        found = {"epoch": epoch, "cursor": cursor, "lost": is_lost}
        click.echo(json.dumps({**found, "events": [as_json(event) for event in kept]}))
        return
    if is_lost:
        click.echo(_LOST, err=True)
    for event in kept:
        click.echo(_event_text(event))
    click.echo(_continues(epoch, cursor), err=True)


def _continues(epoch: int, cursor: int) -> str:
    return f"--since {epoch}:{cursor} continues here"


def _poll(client: Client, epoch: int, cursor: int, *, wait_ms: int) -> pb.PollEventsResponse:
    wait_ms = min(wait_ms, int(client.timeout_s * 500))
    request = pb.PollEventsRequest(
        epoch=epoch, cursor=cursor, events_max=_EVENTS_MAX, wait_ms=wait_ms
    )
    return client.call("PollEvents", request, pb.PollEventsResponse)


def _event_text(event: pb.Event) -> str:
    at = datetime.fromtimestamp(event.unix_s).astimezone().isoformat(timespec="milliseconds")
    kind = pb.EventKind.Name(event.kind).lower()
    parts = [
        f"{event.sequence:>8} {at} {kind:<18}",
        event.tier,
        event.key.hex(),
        f"namespace={event.namespace.hex()[:12]}" if event.namespace else "",
        f"job={event.job}" if event.job else "",
    ]
    return " ".join(part for part in parts if part).rstrip()


def _since(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 0
    epoch, colon, cursor = text.partition(":")
    if not (colon and epoch.isdecimal() and cursor.isdecimal()):
        raise InvalidArgument(f"not EPOCH:CURSOR: value={text!r}; write for example --since 3:1024")
    return int(epoch), int(cursor)


COMMANDS = (stat, tree, leases, explain, locate, events)
