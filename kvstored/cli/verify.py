"""`kvstored verify`: every stored block is read and checked by the daemon, which drops what is wrong."""

import time

import click

from kvstored import units
from kvstored.cli.output import FAILED, facts, json_option, progress, show
from kvstored.cli.reach import Target, daemon_options, namespace_named
from kvstored.client import Client
from kvstored.pb import kvstored_pb2 as pb

_PIECES_FIRST, _PIECES_MIN, _PIECES_MAX = 64, 8, 4096
_CALL_S = 0.5
"""What one call should take: the bar moves, and the daemon is not asked for long answers."""


@click.command()
@click.argument("namespace", required=False)
@daemon_options
@json_option
@click.pass_context
def verify(ctx: click.Context, *, namespace: str | None, target: Target, is_json: bool) -> None:
    """Read and check every stored block of NAMESPACE, or of all, in every tier, beside the running load.

    What does not match its checksum is dropped and counted; the exit code is then 1.
    """
    with target.client() as client:
        digest = namespace_named(client, namespace).digest if namespace else b""
        begun_s = time.perf_counter()
        checked = _checked(client, digest, is_quiet=is_json)
        duration_s = time.perf_counter() - begun_s
    value = {
        "pieces": checked.blocks,
        "bytes": checked.bytes,
        "corrupt": checked.corrupt,
        "duration_s": round(duration_s, 3),
    }
    shown = {
        "pieces": checked.blocks,
        "bytes": units.format_about(checked.bytes),
        "corrupt": f"{checked.corrupt}, dropped" if checked.corrupt else "none",
        "read at": units.format_rate(checked.bytes / max(duration_s, 1e-9)),
    }
    show(value, lambda: facts(shown), is_json=is_json)
    if checked.corrupt:
        ctx.exit(FAILED)


def _checked(client: Client, digest: bytes, *, is_quiet: bool) -> pb.VerifyResponse:
    """The sums over all calls. A block has a piece for each of its groups and shards in each tier."""
    total = pb.VerifyResponse()
    cursor, pieces = 0, _PIECES_FIRST
    stat = client.call("Stat", pb.StatRequest(), pb.StatResponse)
    copies = sum(tier.copies for tier in stat.tiers)
    with progress("verify", copies or None, is_quiet=is_quiet) as advance:
        while True:
            begun_s = time.perf_counter()
            request = pb.VerifyRequest(namespace=digest, cursor=cursor, blocks_max=pieces)
            answer = client.call("Verify", request, pb.VerifyResponse)
            total.blocks += answer.blocks
            total.bytes += answer.bytes
            total.corrupt += answer.corrupt
            advance(answer.blocks)
            if answer.done:
                return total
            cursor = answer.cursor
            is_quick = time.perf_counter() - begun_s < _CALL_S
            pieces = min(pieces * 2, _PIECES_MAX) if is_quick else max(pieces // 2, _PIECES_MIN)
