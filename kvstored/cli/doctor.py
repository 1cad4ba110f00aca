"""`kvstored doctor`: whether the store can run on this machine as it is configured, one line a check, each with what to do."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstored import machine
from kvstored.cli import checks, checks_engine, checks_gpu, checks_pages, checks_software
from kvstored.cli.checks import Finding, Level
from kvstored.cli.options import loaded, settings_flags
from kvstored.cli.output import FAILED, json_option, show
from kvstored.config import Config
from kvstored.errors import ConfigError

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
_CHECKS: tuple[Callable[[Config], list[Finding]], ...] = (
    lambda config: checks.memory(config, machine.memory_limit()),
    lambda _config: checks.shared_memory(),
    checks.descriptors,
    lambda _config: checks_pages.pages(),
    lambda _config: checks_pages.copies(),
    checks.disk,
    checks_software.lmdb_opens,
    lambda _config: checks_software.gpu(),
    checks_gpu.hbm,
    lambda _config: checks_software.hashes(),
    checks_software.socket_path,
    checks_software.bulk,
    checks_software.daemon,
)


@click.command()
@settings_flags("state_dir", "socket", "listen", "bulk_listen", "metrics_listen", "dram", "disk")
@click.option(
    "--engine",
    type=click.Choice(sorted(checks_engine.ENGINES)),
    help="Check an engine of this Python environment instead: version, hashes, socket, what to set.",
)
@click.option(
    "--block-tokens",
    type=int,
    metavar="TOKENS",
    help="With --engine: whether its block or page size fits.",
)
@json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    *,
    file: Path | None,
    engine: str | None,
    block_tokens: int | None,
    is_json: bool,
    **flags: str | None,
) -> None:
    """Check this machine against the settings: memory, disk, LMDB, GPU, hashes, socket, daemon.

    Each line says ok, warn or fail, and what to do. The exit code is 1 where a check failed.
    """
    found = list(_findings(file, flags, engine, block_tokens))
    is_failed = any(finding.level is Level.FAIL for finding in found)
    value = {
        "ok": not is_failed,
        "checks": [
            {"name": each.name, "level": each.level, "text": each.text, "remedy": each.remedy}
            for each in found
        ],
    }
    show(value, lambda: _text(found), is_json=is_json)
    if is_failed:
        ctx.exit(FAILED)


def _findings(
    file: Path | None, flags: dict[str, str | None], engine: str | None, block_tokens: int | None
) -> Iterator[Finding]:
    try:
        settings = loaded(file, flags)
    except ConfigError as error:
        yield Finding("settings", Level.FAIL, str(error), "nothing else can be checked before")
        return
    if engine is not None:
        chosen = checks_engine.ENGINES[engine]
        yield from checks_engine.findings(chosen, settings.config, os.environ, block_tokens)
        return
    changed = len(settings.origins)
    text = f"{changed} differ from their defaults; kvstored config shows all"
    yield Finding("settings", Level.OK, text)
    for check in _CHECKS:
        yield from check(settings.config)


def _text(found: list[Finding]) -> Group:
    made = Table(box=None, pad_edge=False, show_header=False)
    for column in ("level", "name", "text"):
        made.add_column(column, overflow="fold")
    for each in found:
        remedy = f"\n-> {each.remedy}" if each.remedy else ""
        made.add_row(Text(each.level, _STYLES[each.level]), each.name, each.text + remedy)
    failed = sum(each.level is Level.FAIL for each in found)
    warned = sum(each.level is Level.WARN for each in found)
    return Group(made, "", f"{failed} failed, {warned} warnings, {len(found)} checks")
