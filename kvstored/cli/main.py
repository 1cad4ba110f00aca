"""The `kvstored` command: a group whose commands are imported when they are called, and the one place where errors become exit codes."""

import sys
from collections.abc import Callable

import click

from kvstored import __version__
from kvstored.errors import ConfigError, KvstoredError, StateMismatch

EXIT_FAILED = 1
EXIT_REFUSED = 78
"""It cannot work as it is configured (EX_CONFIG): a service manager need not try again."""


def _serve() -> click.Command:
    from kvstored.cli.serve import serve

    return serve


def _daemon() -> click.Command:
    from kvstored.cli.processes import daemon

    return daemon


def _front() -> click.Command:
    from kvstored.cli.processes import front

    return front


def _restart() -> click.Command:
    from kvstored.cli.restart import restart

    return restart


def _config() -> click.Command:
    from kvstored.cli.config import config

    return config


_COMMANDS: dict[str, Callable[[], click.Command]] = {
    "serve": _serve,
    "restart": _restart,
    "config": _config,
    "daemon": _daemon,
    "front": _front,
}


class _Lazy(click.Group):
    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        load = _COMMANDS.get(name)
        return load() if load is not None else None


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvstored")
def cli() -> None:
    """KV cache store for LLM inference engines."""


def main() -> None:
    try:
        cli(prog_name="kvstored")
    except KvstoredError as error:
        click.echo(f"kvstored: {error}", err=True)
        sys.exit(EXIT_REFUSED if isinstance(error, ConfigError | StateMismatch) else EXIT_FAILED)
