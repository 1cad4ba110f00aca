"""Flags that are settings: the same on every command that takes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvstored import config

Command = Callable[..., Any]  # click passes options by name, whatever the function's signature

_FLAGS = {
    "state_dir": ("state_dir", "DIR"),
    "socket": ("socket", "PATH"),
    "socket_mode": ("socket_mode", "MODE"),
    "listen": ("listen", "HOST:PORT"),
    "bulk_listen": ("bulk_listen", "HOST:PORT"),
    "metrics_listen": ("metrics_listen", "HOST:PORT"),
    "policy": ("policy", "NAME"),
    "dram": ("dram.capacity", "SIZE"),
    "disk": ("disk.capacity", "SIZE"),
    "log_level": ("log.level", "LEVEL"),
    "log_format": ("log.format", "FORMAT"),
}


def settings_flags(*names: str) -> Callable[[Command], Command]:
    """Flags for these settings (all without names) and `--config`; the command hands what it gets to `loaded`."""

    def decorate(command: Command) -> Command:
        for name in reversed(names or tuple(_FLAGS)):
            key, metavar = _FLAGS[name]
            flag = f"--{name.replace('_', '-')}"
            help_text = f"{config.meaning(key)}."
            command = click.option(flag, name, metavar=metavar, help=help_text)(command)
        file = click.option(
            "--config",
            "file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="TOML file with settings.",
        )
        return file(command)

    return decorate


def loaded(file: Path | None, flags: dict[str, str | None]) -> config.Loaded:
    """Settings with these flags on top, by flag name as click passes them."""
    return config.load(flags={_FLAGS[name][0]: value for name, value in flags.items()}, file=file)
