"""`kvstored serve`: checks the settings and the machine, then becomes the keeper."""

import os
import signal
import sys
from pathlib import Path

import click

from kvstored import logs
from kvstored.cli.options import loaded, settings_flags
from kvstored.config import Config
from kvstored.launch import ChildPlan, Plan, launch, python_module
from kvstored.sizing import check_sizes

log = logs.get("serve")


@click.command()
@settings_flags()
@click.option(
    "--json",
    "is_json",
    is_flag=True,
    help="Log to stdout, one JSON object a line, on a terminal too.",
)
def serve(*, file: Path | None, is_json: bool, **flags: str | None) -> None:
    """Run the store until SIGTERM: the keeper, the daemon and the gRPC front."""
    if is_json:
        flags["log_format"] = "json"
    config = loaded(file, flags).config
    if is_json:
        os.dup2(1, 2)  # every process of the store logs to stderr
    logs.configure(config.log.level, is_json=config.log.is_json(sys.stderr))
    for warning in check_sizes(config):
        log.warning(warning)
    launch(plan(config), config.to_json(), config.dram.non_temporal_bytes)


def plan(config: Config) -> Plan:
    """The daemon leaves on SIGHUP without flushing: what it would flush stays in DRAM for the next."""
    kvstored = python_module("kvstored")
    daemon = ChildPlan("daemon", [*kvstored, "daemon"], True, signal.SIGHUP)
    front = ChildPlan("front", [*kvstored, "front"], False, signal.SIGTERM)
    return Plan(
        state_dir=str(config.state_dir),
        drain_s=config.limits.drain_s,
        log_json=config.log.is_json(sys.stderr),
        children=[daemon] if config.listen is None else [daemon, front],
    )
