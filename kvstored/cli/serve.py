"""`kvstored serve`: checks the settings and the machine, then becomes the keeper."""

import signal
import sys
from pathlib import Path

import click

from kvstored.cli.options import loaded, settings_flags
from kvstored.config import Config
from kvstored.launch import ChildPlan, Plan, launch, python_module
from kvstored.sizing import check_sizes


@click.command()
@settings_flags()
def serve(file: Path | None, **flags: str | None) -> None:
    """Run the store until SIGTERM: the keeper, the daemon and the gRPC front."""
    config = loaded(file, flags).config
    for warning in check_sizes(config):
        click.echo(f"kvstored: warning: {warning}", err=True)
    launch(plan(config), config.to_json())


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
