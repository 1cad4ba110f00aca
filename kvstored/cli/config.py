"""`kvstored config`: every setting with its effective value and where that came from."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvstored.cli.options import loaded, settings_flags
from kvstored.cli.output import PIPE_COLUMNS


@click.command()
@settings_flags()
@click.option("--json", "is_json", is_flag=True, help="A JSON object by key instead of the table.")
def config(file: Path | None, is_json: bool, **flags: str | None) -> None:
    """Show every setting: its value, where that came from, its default and its meaning."""
    settings = loaded(file, flags).settings()
    if is_json:
        click.echo(json.dumps({setting.key: asdict(setting) for setting in settings}, indent=2))
        return
    table = Table("key", "value", "origin", "default", "meaning", box=None)
    for setting in settings:
        default = "" if setting.origin == "default" else setting.default
        table.add_row(setting.key, setting.value, setting.origin, default, setting.meaning)
    table.columns[1].overflow = table.columns[2].overflow = "fold"
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)
