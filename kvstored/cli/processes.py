"""The keeper's children as commands; people have no use for them."""

import os
import sys

import click

from kvstored import config as settings
from kvstored import logs
from kvstored.lifeline import die_with_keeper


@click.command(hidden=True)
@click.option("--config-fd", type=int, required=True)
@click.option("--keeper-pid", type=int, required=True)
def daemon(config_fd: int, keeper_pid: int) -> None:
    """The process that owns the store."""
    config = _started(config_fd, keeper_pid)
    from kvstored.daemon import run

    sys.exit(run(config))


@click.command(hidden=True)
@click.option("--config-fd", type=int, required=True)
@click.option("--keeper-pid", type=int, required=True)
def front(config_fd: int, keeper_pid: int) -> None:
    """The gRPC server: a client of the daemon."""
    config = _started(config_fd, keeper_pid)
    from kvstored.transport.front import run

    sys.exit(run(config))


def _started(config_fd: int, keeper_pid: int) -> settings.Config:
    die_with_keeper(keeper_pid)
    size_bytes = os.fstat(config_fd).st_size
    config = settings.parse(os.pread(config_fd, size_bytes, 0).decode())
    os.close(config_fd)
    logs.configure(config.log.level, is_json=config.log.is_json(sys.stderr))
    return config
