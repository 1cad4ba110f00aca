"""The `kvstored` command: a group whose commands are imported when they are called, and the one place where errors become exit codes."""

import os
import sys
from collections.abc import Callable

import click

from kvstored import __version__
from kvstored.cli.manual import ManualGroup
from kvstored.cli.output import FAILED


def _serve() -> tuple[click.Command, ...]:
    from kvstored.cli.serve import serve

    return (serve,)


def _restart() -> tuple[click.Command, ...]:
    from kvstored.cli.restart import restart

    return (restart,)


def _config() -> tuple[click.Command, ...]:
    from kvstored.cli.config import config

    return (config,)


def _doctor() -> tuple[click.Command, ...]:
    from kvstored.cli.doctor import doctor

    return (doctor,)


def _clean() -> tuple[click.Command, ...]:
    from kvstored.cli.clean import clean

    return (clean,)


def _inspect() -> tuple[click.Command, ...]:
    from kvstored.cli.inspect import COMMANDS

    return COMMANDS


def _schedule() -> tuple[click.Command, ...]:
    from kvstored.cli.schedule import schedule

    return (schedule,)


def _advise() -> tuple[click.Command, ...]:
    from kvstored.cli.advise import advise

    return (advise,)


def _data() -> tuple[click.Command, ...]:
    from kvstored.cli.data import COMMANDS

    return COMMANDS


def _keeping() -> tuple[click.Command, ...]:
    from kvstored.cli.keeping import COMMANDS

    return COMMANDS


def _namespaces() -> tuple[click.Command, ...]:
    from kvstored.cli.namespaces import COMMANDS

    return COMMANDS


def _verify() -> tuple[click.Command, ...]:
    from kvstored.cli.verify import verify

    return (verify,)


def _replay() -> tuple[click.Command, ...]:
    from kvstored.cli.replay import replay

    return (replay,)


def _codec() -> tuple[click.Command, ...]:
    from kvstored.cli.codec import COMMANDS

    return COMMANDS


def _selection() -> tuple[click.Command, ...]:
    from kvstored.cli.selection import COMMANDS

    return COMMANDS


def _processes() -> tuple[click.Command, ...]:
    from kvstored.cli.processes import daemon, front

    return (daemon, front)


Load = Callable[[], tuple[click.Command, ...]]

_FAMILIES: dict[str, dict[str, Load]] = {
    "Run the store": {
        "serve": _serve,
        "restart": _restart,
        "config": _config,
        "doctor": _doctor,
        "clean": _clean,
    },
    "Look inside": {
        **dict.fromkeys(("stat", "tree", "leases", "explain", "locate", "events"), _inspect),
        "namespaces": _namespaces,
        "schedule": _schedule,
        "advise": _advise,
    },
    "Blocks": {
        **dict.fromkeys(("match", "put", "get"), _data),
        **dict.fromkeys(("pin", "unpin", "prefetch"), _keeping),
        **dict.fromkeys(("remove", "clear"), _data),
    },
    "Namespaces": dict.fromkeys(("retire", "remove-namespace"), _namespaces),
    "Prove it": {"verify": _verify, "replay": _replay, "codec": _codec, "selection": _selection},
}
_HIDDEN: dict[str, Load] = dict.fromkeys(("daemon", "front"), _processes)
_LOADS = {name: load for family in (*_FAMILIES.values(), _HIDDEN) for name, load in family.items()}


class _Lazy(ManualGroup):
    families = tuple((heading, tuple(names)) for heading, names in _FAMILIES.items())

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        load = _LOADS.get(name)
        if load is None:
            return None
        return next(command for command in load() if command.name == name)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvstored")
def cli() -> None:
    """KV cache store for LLM inference engines."""


def main() -> None:
    try:
        try:
            cli(prog_name="kvstored")
        finally:
            sys.stdout.flush()
    except OSError as error:
        # What is still buffered would fail again at the interpreter's end, in words of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        click.echo(f"kvstored: input or output failed: {error}", err=True)
        sys.exit(FAILED)
