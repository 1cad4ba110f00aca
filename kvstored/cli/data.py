"""Commands on blocks: match, put, get, remove, clear."""

import sys
from pathlib import Path

import click

from kvstored.cli.advice import advice_facts, advice_json
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
from kvstored.client import GroupKind, GroupSpec, Keys, LoadQuestion, Namespace, NamespaceSpec
from kvstored.core.types import TierId
from kvstored.errors import InvalidArgument, NoSpace, NotFound
from kvstored.pb import kvstored_pb2 as pb

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
@click.option(
    "--advise",
    "is_advised",
    is_flag=True,
    help="Tell how long the hit takes to load beside computing it, and the best split.",
)
@click.option(
    "--deadline",
    "deadline_s",
    metavar="TIME",
    type=DURATION,
    default=0.0,
    help="With --advise: which prefix can be loaded within, such as 50ms.  [default: none]",
)
@click.option(
    "--prefill-tokens-per-s",
    metavar="N",
    type=click.FloatRange(0, min_open=True),
    help="With --advise: how fast the engine computes.  [default: as engines told]",
)
@daemon_options
@json_option
def match(
    *,
    namespace: str,
    words: KeyWords,
    is_advised: bool,
    deadline_s: float,
    prefill_tokens_per_s: float | None,
    target: Target,
    is_json: bool,
) -> None:
    """Find the longest stored prefix: hit, checkpoint and replay tokens, and why it ends."""
    if not is_advised and (deadline_s or prefill_tokens_per_s):
        raise click.UsageError("--deadline and --prefill-tokens-per-s go with --advise")
    ask = LoadQuestion(deadline_s, prefill_tokens_per_s or 0.0) if is_advised else None
    with target.client() as client:
        there = opened(client, namespace)
        keys = words.of(there)
        found = there.match(keys, ask=ask)
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
    shown: dict[str, object] = {**value, "tier_blocks": tiers or "none"}
    shown["miss_reason"] = found.miss_reason or "no miss"
    detail: dict[str, object] = {"keys": [key.hex() for key in keys]}
    if found.advice is not None:
        detail["advice"] = advice_json(found.advice)
        shown.update(advice_facts(found.advice, has_deadline=deadline_s > 0))
    show({**value, **detail}, lambda: facts(shown), is_json=is_json)


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
@click.option(
    "--supersede",
    "is_superseding",
    is_flag=True,
    help="With --block-bytes: where NAMESPACE has another identity, retire that one and take its name.",
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
    is_superseding: bool,
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
    if block_bytes is None and (block_tokens is not None or is_superseding):
        raise click.UsageError("--block-tokens and --supersede go with --block-bytes")
    with target.client() as client:
        spec = _simple_spec(namespace, block_bytes, block_tokens) if block_bytes else None
        there = (
            client.open_namespace(spec, supersede=is_superseding)
            if spec
            else opened(client, namespace)
        )
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
    """One required group of opaque bytes, dtype `bytes`; whoever puts the same way shares it."""
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


COMMANDS = (match, put, get, remove, clear)
