"""Commands on blocks: match, put, get, pin, unpin, prefetch, remove, clear."""

import math
import sys
import time
from pathlib import Path

import click

from kvstored.cli.output import Command, ask, facts, json_option, progress, show, yes_option
from kvstored.cli.params import DURATION, SIZE
from kvstored.cli.reach import (
    KeyWords,
    Target,
    daemon_options,
    key_options,
    namespace_named,
    opened,
)
from kvstored.cli.transfer import Shape, get_into, parts_of, put_from, sink_of, source_of
from kvstored.client import Client, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec
from kvstored.core.types import TierId
from kvstored.errors import InvalidArgument, NoSpace, NotFound
from kvstored.pb import kvstored_pb2 as pb

_JOB_POLL_S = 0.05
_PUT_WORDS = ("committed", "present", "in_progress", "no_space", "lost")


def _piece_options(command: Command) -> Command:
    command = click.option(
        "--group",
        "groups",
        metavar="NAME",
        multiple=True,
        help="Only these groups; may be given again.  [default: the required ones]",
    )(command)
    return click.option(
        "--shard",
        metavar="N",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="The rank whose sharded groups these are.",
    )(command)


# ---- match, put, get


@click.command()
@click.argument("namespace")
@key_options
@daemon_options
@json_option
def match(*, namespace: str, words: KeyWords, target: Target, is_json: bool) -> None:
    """Find the longest stored prefix: hit, checkpoint and replay tokens, and why it ends."""
    with target.client() as client:
        there = opened(client, namespace)
        keys = words.of(there)
        found = there.match(keys)
    by_tier = {tier.name.lower(): found.tier_blocks[tier] for tier in TierId}
    value = {
        "blocks": len(keys),
        "hit_blocks": found.hit_blocks,
        "hit_tokens": found.hit_tokens,
        "checkpoint_tokens": found.checkpoint_tokens,
        "replay_tokens": found.replay_tokens,
        "tier_blocks": by_tier,
        "miss_reason": found.miss_reason,
    }
    tiers = ", ".join(f"{count} {tier}" for tier, count in by_tier.items() if count)
    shown = {**value, "tier_blocks": tiers or "none", "miss_reason": found.miss_reason or "no miss"}
    show({**value, "keys": [key.hex() for key in keys]}, lambda: facts(shown), is_json=is_json)


@click.command()
@click.argument("namespace")
@key_options
@click.option(
    "--in",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Bytes of the blocks, back to back.  [default: stdin]",
)
@click.option(
    "--block-bytes",
    metavar="SIZE",
    type=SIZE,
    help="Make NAMESPACE (model@revision) with one group of such blocks, where it is new.",
)
@click.option(
    "--block-tokens",
    metavar="N",
    type=click.IntRange(1),
    help="With --block-bytes: tokens of a block.  [default: 256]",
)
@_piece_options
@daemon_options
@json_option
def put(
    *,
    namespace: str,
    words: KeyWords,
    file: Path | None,
    block_bytes: int | None,
    block_tokens: int | None,
    groups: tuple[str, ...],
    shard: int,
    target: Target,
    is_json: bool,
) -> None:
    """Store blocks from a file or stdin: their bytes back to back, in key then group order.

    Prints how many were committed, present already, in progress elsewhere, or found no space.
    """
    if words.reads_stdin and file is None:
        raise click.UsageError("--tokens @- and the blocks cannot both come from stdin: give --in")
    if block_tokens is not None and block_bytes is None:
        raise click.UsageError("--block-tokens goes with --block-bytes")
    with target.client() as client:
        spec = _simple_spec(namespace, block_bytes, block_tokens) if block_bytes else None
        there = client.open_namespace(spec) if spec else opened(client, namespace)
        keys = words.of(there)
        shape = Shape(there, groups)
        total = shape.total_bytes(keys)
        with (
            source_of(file) as source,
            progress("put", total, is_quiet=is_json) as advance,
        ):
            outcome = put_from(source, there, keys, shape, shard=shard, advance=advance)
    by_status = {word: outcome[word] for word in _PUT_WORDS}
    value = {"blocks": len(keys), "bytes": total, **by_status}
    detail = {"namespace": there.digest.hex(), "keys": [key.hex() for key in keys]}
    show({**value, **detail}, lambda: facts(value), is_json=is_json)
    if refused := outcome["no_space"] + outcome["lost"]:
        raise NoSpace(f"blocks are not stored: blocks={refused}")


def _simple_spec(name: str, block_bytes: int, block_tokens: int | None) -> NamespaceSpec:
    """One required group of opaque bytes; whoever puts the same way shares it."""
    model, _, revision = name.partition("@")
    if not model or not revision:
        raise InvalidArgument(f"a new namespace is named model@revision: name={name!r}")
    return NamespaceSpec(
        model=model,
        revision=revision,
        dtype="bytes",
        layout="opaque",
        layout_version=1,
        block_tokens=block_tokens or 0,
        groups=(GroupSpec("kv", GroupKind.LINEAR, int(block_bytes)),),
    )


@click.command()
@click.argument("namespace")
@key_options
@click.option(
    "--out",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Where the bytes go; replaced only when all were read.  [default: stdout]",
)
@click.option(
    "--prefix", "is_prefix", is_flag=True, help="As many blocks as there are before a miss."
)
@_piece_options
@daemon_options
@json_option
def get(
    *,
    namespace: str,
    words: KeyWords,
    file: Path | None,
    is_prefix: bool,
    groups: tuple[str, ...],
    shard: int,
    target: Target,
    is_json: bool,
) -> None:
    """Read blocks into a file or stdout: verified, back to back, in key then group order.

    All of them or none, unless --prefix.
    """
    if file is None and is_json:
        raise click.UsageError("--json needs --out: stdout has room for one of the two")
    if file is None and sys.stdout.isatty():
        raise click.UsageError("not writing blocks to a terminal: give --out FILE or pipe it")
    with target.client() as client:
        there = opened(client, namespace)
        wanted = words.of(there)
        keys = _readable(there, wanted, is_prefix=is_prefix)
        shape = Shape(there, groups)
        with (
            sink_of(file) as sink,
            progress("get", shape.total_bytes(keys), is_quiet=is_json) as advance,
        ):
            written = get_into(sink, there, keys, shape, shard=shard, advance=advance)
    if file is not None:
        value = {"blocks": len(wanted), "read_blocks": len(keys), "bytes": written}
        show(value, lambda: facts(value), is_json=is_json)


def _readable(namespace: Namespace, keys: Keys, *, is_prefix: bool) -> Keys:
    """The keys before the first that is not there; NotFound where that is not enough."""
    count = 0
    for part in parts_of(keys, 1):
        bits = namespace.locate(part).tiers
        missed = next((i for i, each in enumerate(bits) if not each), len(bits))
        count += missed
        if missed < len(bits):
            break
    if count < len(keys) and not (is_prefix and count):
        raise NotFound(
            f"block is not there: key={keys.keys[count].hex()} blocks_before_it={count}; "
            "kvstored explain tells why"
        )
    return keys[:count]


# ---- pin, unpin, prefetch


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
    """Keep blocks and their ancestors for a while; prints the pin's number for unpin."""
    with target.client() as client:
        there = opened(client, namespace)
        pinned = there.pin(words.of(there), ttl_s=math.ceil(ttl_s), hard=is_hard)
    value = {"pin": str(pinned.pin), "blocks": pinned.blocks, "bytes": pinned.bytes}
    show(value, lambda: facts(value), is_json=is_json)


@click.command()
@click.argument("pin", metavar="PIN", type=click.IntRange(1))
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
@click.option("--wait", "is_waited", is_flag=True, help="Until it is done.")
@daemon_options
@json_option
def prefetch(
    *,
    namespace: str,
    words: KeyWords,
    deadline_s: float,
    is_waited: bool,
    target: Target,
    is_json: bool,
) -> None:
    """Start loading blocks from disk into DRAM."""
    with target.client() as client:
        there = opened(client, namespace)
        job = there.prefetch(words.of(there), deadline_s=deadline_s)
        value: dict[str, object] = {"job": job.job, "blocks": job.blocks}
        if is_waited:
            ended = _job_ended(client, job.job, job.blocks, is_quiet=is_json)
            value |= {
                "state": pb.JobState.Name(ended.state).lower(),
                "blocks_done": ended.blocks_done,
                "blocks_failed": ended.blocks_failed,
            }
    show(value, lambda: facts(value), is_json=is_json)


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


# ---- remove, clear


@click.command()
@click.argument("namespace")
@key_options
@daemon_options
@json_option
def remove(*, namespace: str, words: KeyWords, target: Target, is_json: bool) -> None:
    """Forget these blocks in every tier."""
    with target.client() as client:
        there = opened(client, namespace)
        keys = words.of(there)
        blocks = sum(there.remove(part) for part in parts_of(keys, 1))
    _show_blocks("removed", blocks, is_json=is_json)


@click.command()
@click.argument("namespace", required=False)
@click.option("--all", "is_all", is_flag=True, help="Every namespace.")
@yes_option
@daemon_options
@json_option
def clear(
    *, namespace: str | None, is_all: bool, is_agreed: bool, target: Target, is_json: bool
) -> None:
    """Forget every block of NAMESPACE, or of --all; the namespaces stay open."""
    if is_all == (namespace is not None):
        raise click.UsageError("name a NAMESPACE or give --all, one of the two")
    with target.client() as client:
        digest = namespace_named(client, namespace).digest if namespace is not None else b""
        ask(f"Forget all blocks of {namespace or 'every namespace'}?", is_agreed=is_agreed)
        request = pb.ClearRequest(namespace=digest)
        blocks = client.call("Clear", request, pb.ClearResponse).blocks
    _show_blocks("removed", blocks, is_json=is_json)


def _show_blocks(what: str, blocks: int, *, is_json: bool) -> None:
    show({"blocks": blocks}, lambda: f"{what} {blocks} blocks", is_json=is_json)


COMMANDS = (match, put, get, pin, unpin, prefetch, remove, clear)
