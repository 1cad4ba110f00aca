"""Commands that keep blocks and bring them nearer: pin, unpin, prefetch."""

import math
import time

import click

from kvstored.cli.output import facts, json_option, progress, show
from kvstored.cli.params import DURATION, PIN
from kvstored.cli.reach import KeyWords, Target, daemon_options, key_options, opened
from kvstored.client import Client
from kvstored.core.types import TierId
from kvstored.errors import NotFound
from kvstored.pb import kvstored_pb2 as pb

_JOB_POLL_S = 0.05


@click.command()
@click.argument("namespace")
@key_options
@click.option(
    "--ttl",
    "ttl_s",
    metavar="DURATION",
    type=DURATION,
    default="10min",
    show_default=True,
    help="How long it keeps them.",
)
@click.option(
    "--hard",
    "is_hard",
    is_flag=True,
    help="Also where nothing else can be evicted. Blocks stay in the tier where they are.",
)
@daemon_options
@json_option
def pin(
    *,
    namespace: str,
    words: KeyWords,
    ttl_s: float,
    is_hard: bool,
    target: Target,
    is_json: bool,
) -> None:
    """Keep blocks and their ancestors for a while; prints the pin's number for unpin.

    Those that are there: none is not found. A pin ends with its time, by unpin, or with the daemon.
    """
    with target.client() as client:
        there = opened(client, namespace)
        keys = words.of(there)
        pinned = there.pin(keys, ttl_s=math.ceil(ttl_s), hard=is_hard)
        if not pinned.blocks:
            there.unpin(pinned.pin)
            raise NotFound(
                f"none of the blocks is there, nothing is pinned: blocks={len(keys)}; kvstored explain tells why"
            )
    value = {
        "pin": str(pinned.pin),
        "keys": len(keys),
        "blocks": pinned.blocks,
        "bytes": pinned.bytes,
    }
    shown = {**value, "blocks": f"{pinned.blocks} of {len(keys)}"}
    del shown["keys"]
    show(value, lambda: facts(shown), is_json=is_json)


@click.command()
@click.argument("pin", metavar="PIN", type=PIN)
@daemon_options
@json_option
def unpin(*, pin: int, target: Target, is_json: bool) -> None:
    """End a pin before its time."""
    with target.client() as client:
        is_found = client.call("Unpin", pb.UnpinRequest(pin=pin), pb.UnpinResponse).found
    if not is_found:
        raise NotFound(f"no such pin, or it ended: pin={pin}; kvstored leases lists all")
    show({"pin": str(pin), "found": True}, lambda: f"unpinned {pin}", is_json=is_json)


@click.command()
@click.argument("namespace")
@key_options
@click.option(
    "--deadline",
    "deadline_s",
    metavar="DURATION",
    type=DURATION,
    default="0",
    help="What is not loaded by then is not loaded.  [default: the daemon's]",
)
@click.option(
    "--tier",
    "tier_name",
    type=click.Choice(("dram", "hbm")),
    default="dram",
    show_default=True,
    help="Where to: hbm is GPU memory.",
)
@click.option("--wait", "is_waited", is_flag=True, help="Until it is done.")
@daemon_options
@json_option
def prefetch(
    *,
    namespace: str,
    words: KeyWords,
    tier_name: str,
    deadline_s: float,
    is_waited: bool,
    target: Target,
    is_json: bool,
) -> None:
    """Start loading blocks from disk into DRAM, or on into GPU memory."""
    tier = TierId[tier_name.upper()]
    with target.client() as client:
        there = opened(client, namespace)
        keys = words.of(there)
        tiers = there.locate(keys).tiers
        job = there.prefetch(keys, tier=tier_name, deadline_s=deadline_s)
        value: dict[str, object] = {
            "job": job.job,
            "keys": len(keys),
            "already_there": sum(bits >> tier & 1 for bits in tiers),
            "absent": sum(not bits for bits in tiers),
            "blocks": job.blocks,
        }
        if is_waited:
            ended = _job_ended(client, job.job, job.blocks, is_quiet=is_json)
            value |= {
                "state": pb.JobState.Name(ended.state).lower(),
                "blocks_done": ended.blocks_done,
                "blocks_failed": ended.blocks_failed,
            }
    shown = {("blocks to load" if name == "blocks" else name): each for name, each in value.items()}
    show(value, lambda: facts(shown), is_json=is_json)


def _job_ended(client: Client, job: int, blocks: int, *, is_quiet: bool) -> pb.JobStatusResponse:
    done = 0
    with progress("prefetch", blocks, is_quiet=is_quiet) as advance:
        while True:
            status = client.call("JobStatus", pb.JobStatusRequest(job=job), pb.JobStatusResponse)
            advance(status.blocks_done + status.blocks_failed - done)
            done = status.blocks_done + status.blocks_failed
            if status.state != pb.RUNNING:
                return status
            time.sleep(_JOB_POLL_S)


COMMANDS = (pin, unpin, prefetch)
