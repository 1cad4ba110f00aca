"""How commands find the daemon and name what is in it: the address, a namespace by alias or digest, keys by token ids or hexadecimal."""

import difflib
import functools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from kvstored import config
from kvstored.cli.output import Command
from kvstored.cli.params import DURATION
from kvstored.client import Client, Keys, Namespace
from kvstored.client.results import OpenedNamespace
from kvstored.errors import InvalidArgument, NotFound
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.namespaces import spec_of

DIGEST_TEXT_MIN = 4
"""Hexadecimal digits that name a namespace: fewer would often name several."""


@dataclass(frozen=True, slots=True)
class Target:
    """The daemon that a command talks to, as the flags name it."""

    address: str | None
    config_file: Path | None
    timeout_s: float

    @contextmanager
    def client(self) -> Iterator[Client]:
        address = self.address or f"unix://{config.load(file=self.config_file).config.socket}"
        if address.startswith("/"):
            address = f"unix://{address}"
        with Client(address, name="kvstored CLI", timeout_s=self.timeout_s) as made:
            yield made


def daemon_options(command: Command) -> Command:
    """Flags that name the daemon; the command gets them as `target`."""

    @functools.wraps(command)
    def called(
        *, address: str | None, config_file: Path | None, timeout_s: float, **rest: object
    ) -> object:
        if timeout_s <= 0:
            raise InvalidArgument("a timeout is above 0, for example 30s")
        return command(target=Target(address, config_file, timeout_s), **rest)

    for option in (
        click.option(
            "--timeout",
            "timeout_s",
            metavar="DURATION",
            type=DURATION,
            default="30s",
            show_default=True,
            help="How long one answer may take.",
        ),
        click.option(
            "--config",
            "config_file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="TOML file with settings: where the socket is.",
        ),
        click.option(
            "--address",
            metavar="ADDRESS",
            help="The daemon: unix:///PATH or HOST:PORT.  [default: the configured socket]",
        ),
    ):
        option(called)
    return called


# ---- namespaces


def listed(client: Client) -> list[pb.NamespaceInfo]:
    request = pb.ListNamespacesRequest()
    return list(client.call("ListNamespaces", request, pb.ListNamespacesResponse).namespaces)


def namespace_named(client: Client, name: str) -> pb.NamespaceInfo:
    """By `model@revision`, by the bare model where one is in use, or by the first digits of the digest."""
    known = listed(client)
    for found in (
        [each for each in known if each.alias == name and not each.retired],
        [each for each in known if each.alias == name],
        [each for each in known if each.namespace.model == name and not each.retired],
        [each for each in known if _is_digest_of(each, name)],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f"{each.alias} {each.digest.hex()[:12]}" for each in found)
            raise InvalidArgument(
                f"several namespaces are named so: name={name!r} they are {names}"
            )
    near = difflib.get_close_matches(name, [each.alias for each in known], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "kvstored namespaces lists all"
    raise NotFound(f"no such namespace: name={name!r}; {hint}")


def opened(client: Client, name: str) -> Namespace:
    """For calls on it. Not by OpenNamespace, which would bring a retired one back into use."""
    return handle(client, namespace_named(client, name))


def handle(client: Client, info: pb.NamespaceInfo) -> Namespace:
    spec = spec_of(info.namespace, caller_tenant=info.namespace.tenant)
    with client.link(None) as link:
        return Namespace(client, OpenedNamespace(info.digest, spec, False), link.session)


def _is_digest_of(info: pb.NamespaceInfo, text: str) -> bool:
    return len(text) >= DIGEST_TEXT_MIN and info.digest.hex().startswith(text.lower())


# ---- keys


@dataclass(frozen=True, slots=True)
class KeyWords:
    """Keys as the command line names them, before the namespace is known."""

    keys: tuple[str, ...]
    tokens: str | None
    extra_keys: tuple[str, ...]
    parent: str | None

    @property
    def reads_stdin(self) -> bool:
        return self.tokens == "@-"

    def of(self, namespace: Namespace) -> Keys:
        extra_keys = tuple(text.encode() for text in self.extra_keys)
        if self.tokens is not None:
            return namespace.keys(tokens_of(self.tokens), extra_keys)
        parent = b"" if self.parent is None else _key_of(self.parent)
        return Keys.opaque(
            [_key_of(text) for text in self.keys], parent=parent, extra_keys=extra_keys
        )


def key_options(command: Command) -> Command:
    """The KEY arguments and what goes with them; the command gets them as `words`."""

    @functools.wraps(command)
    def called(
        *,
        keys: tuple[str, ...],
        tokens: str | None,
        extra_keys: tuple[str, ...],
        parent: str | None,
        **rest: object,
    ) -> object:
        if bool(keys) == (tokens is not None):
            raise click.UsageError("name blocks by KEYs or by --tokens, one of the two")
        if parent is not None and tokens is not None:
            raise click.UsageError("--parent goes with KEYs; token ids name their parents")
        return command(words=KeyWords(keys, tokens, extra_keys, parent), **rest)

    for option in (
        click.option(
            "--parent",
            metavar="KEY",
            help="Key of the block before the first KEY.",
        ),
        click.option(
            "--extra-key",
            "extra_keys",
            metavar="TEXT",
            multiple=True,
            help="Cache salt, LoRA id or image hash of the request; may be given again.",
        ),
        click.option(
            "--tokens",
            metavar="IDS",
            help="Token ids of the whole sequence: 1,2,3 or @FILE or @- (numbers or a JSON list).",
        ),
        click.argument("keys", metavar="[KEY]...", nargs=-1),
    ):
        option(called)
    return called


def tokens_of(text: str) -> list[int]:
    """Ids from `1,2,3`, `@FILE` or `@-`."""
    if text.startswith("@"):
        text = _read(text[1:])
    try:
        if text.lstrip().startswith("["):
            ids = json.loads(text)
            if not all(type(each) is int for each in ids):
                raise ValueError("not only integers")
            return list(ids)
        return [int(word) for word in re.split(r"[\s,]+", text.strip()) if word]
    except ValueError as error:
        raise InvalidArgument(
            f"not token ids: {error}; write for example --tokens 1,2,3 or --tokens @ids.json"
        ) from error


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"token ids cannot be read: file={name!r} error={error}") from error


def _key_of(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidArgument(
            f"not a key in hexadecimal: value={text!r}; a key has 8 to 64 bytes"
        ) from error
