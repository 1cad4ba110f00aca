"""`kvstored restart`: a new daemon process, with what DRAM holds."""

import os
import signal
import time
from pathlib import Path

import click

from kvstored import units
from kvstored.cli.options import loaded, settings_flags
from kvstored.cli.output import json_option, show
from kvstored.cli.params import DURATION
from kvstored.errors import DeadlineExceeded, Unavailable
from kvstored.statedir import KeeperStatus, read_status

_POLL_S = 0.02


@click.command()
@settings_flags("state_dir")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="DURATION",
    type=DURATION,
    default="60s",
    show_default=True,
    help="How long the new daemon may need until it is ready.",
)
@json_option
def restart(*, file: Path | None, timeout_s: float, is_json: bool, **flags: str | None) -> None:
    """Replace the running daemon (after an upgrade, say); blocks in DRAM stay. Settings are those that `serve` began with."""
    state_dir = str(loaded(file, flags).config.state_dir)
    before = read_status(state_dir)
    if before is None:
        raise Unavailable(f"no kvstored runs on this state directory: {state_dir=}")
    begun_s = time.monotonic()
    os.kill(before.keeper_pid, signal.SIGHUP)
    while not _is_replaced(before, read_status(state_dir)):
        if time.monotonic() - begun_s > timeout_s:
            raise DeadlineExceeded(
                f"the daemon is not ready again yet: waited={units.format_duration(timeout_s)}"
            )
        time.sleep(_POLL_S)
    took_s = time.monotonic() - begun_s
    show(
        {"restarted_in_s": round(took_s, 3)},
        lambda: f"restarted in {took_s:.2f} s",
        is_json=is_json,
    )


def _is_replaced(before: KeeperStatus, now: KeeperStatus | None) -> bool:
    if now is None:
        raise Unavailable("the keeper ended")
    return all(
        child.is_ready and child.starts > before.children[name].starts
        for name, child in now.children.items()
        if name in before.children
    )
