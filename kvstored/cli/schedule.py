"""What the scheduler does next: schedule."""

from collections.abc import Sequence

import click
from rich.console import Group
from rich.table import Table

from kvstored import units
from kvstored.cli.output import as_json, json_option, show, table
from kvstored.cli.reach import Target, daemon_options
from kvstored.pb import kvstored_pb2 as pb


@click.command()
@click.option(
    "--run",
    "is_run",
    is_flag=True,
    help="Run a round now, as the daemon does by itself all the time, and tell what it did.",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 4096),
    default=20,
    show_default=True,
    help="Rows of each list.",
)
@daemon_options
@json_option
def schedule(*, is_run: bool, limit: int, target: Target, is_json: bool) -> None:
    """Show what comes up to memory, leaves and is written to NVMe next, in order, and why."""
    with target.client() as client:
        request = pb.ScheduleRequest(dry_run=not is_run, rows_max=limit)
        answer = client.call("Schedule", request, pb.ScheduleResponse)
    show(as_json(answer), lambda: _text(answer, is_run=is_run), is_json=is_json)


def _text(answer: pb.ScheduleResponse, *, is_run: bool) -> Group:
    parts: list[Table | str] = [
        f"objectives: {', then '.join(answer.objectives)}; running requests: {answer.running_requests}",
        "",
        _rooms(answer),
        "",
        _page_ins(answer) if answer.page_ins else "nothing is to come up",
        "",
        _moves(answer.evictions) if answer.evictions else "nothing has to leave",
        "",
        _moves(answer.writes) if answer.writes else "nothing is to be written",
    ]
    if answer.cut:
        parts += ["", "there is more: --limit shows it"]
    if is_run:
        loaded, written = map(units.format_about, (answer.load_bytes, answer.write_bytes))
        parts += [
            "",
            f"begun: {loaded} to load, {written} to write; {answer.evicted_copies} copies evicted",
        ]
    return Group(*parts)


def _rooms(answer: pb.ScheduleResponse) -> Table:
    made = table("tier", "granted >", "used >", "free >", "evict above >", "down to >")
    for room in answer.tiers:
        sizes = room.granted_bytes, room.used_bytes, room.free_bytes
        made.add_row(room.name, *map(units.format_about, (*sizes, room.high_bytes, room.low_bytes)))
    return made


def _page_ins(answer: pb.ScheduleResponse) -> Table:
    made = table("comes up", "blocks >", "bytes >", "from", "signal", "deadline >", "there in >")
    for each in answer.page_ins:
        deadline = f"{each.deadline_in_s:.3f} s" if each.HasField("deadline_in_s") else ""
        made.add_row(
            *(each.head_fingerprint.hex()[:16], str(each.blocks)),
            *(units.format_about(each.bytes), each.tier),
            "under way" if each.loading else each.signal,
            *(deadline, f"{each.ready_in_s:.3f} s"),
        )
    return made


def _moves(moves: Sequence[pb.NodeMove]) -> Table:
    made = table("node", "depth >", "blocks >", "bytes >", "tier", "decision", "why")
    for each in moves:
        made.add_row(
            *(each.head_fingerprint.hex()[:16], str(each.depth_blocks), str(each.blocks)),
            *(units.format_about(each.bytes), each.tier, each.decision, each.why),
        )
    return made
