"""What selection logs say, offline: selection stats."""

from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from kvstored.cli.output import json_option, show, table
from kvstored.errors import InvalidArgument
from kvstored.model.selection import HORIZONS, StreamStats, runs_of, stats_of, weights_text


@click.group()
def selection() -> None:
    """Analyse what the attention of engines selected, from the daemon's `feedback.log`."""


@selection.command()
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--weights",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write a weight for each group and layer, for the setting feedback.weights.",
)
@json_option
def stats(*, logs: tuple[Path, ...], weights: Path | None, is_json: bool) -> None:
    """Show how often blocks are selected, how steady that is, and how well a selection predicts later ones."""
    lines: list[str] = []
    for log in logs:
        try:
            lines += log.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"a log cannot be read: path={log} error={error}") from error
    found = stats_of(runs_of(lines))
    if weights is not None:
        weights.write_text(weights_text(found), encoding="utf-8")
    value: dict[str, object] = {"reports": len(lines), "streams": [asdict(each) for each in found]}
    show(value, lambda: _text(found), is_json=is_json)


def _text(found: list[StreamStats]) -> Table:
    ahead = [f"reuse {steps} >" for steps in HORIZONS]
    made = table(
        *("group", "layer >", "steps >", "blocks >", "selected >", "always >", "never >"),
        *("stability >", *ahead, "gap p95 >", "weight >"),
    )
    for each in found:
        reuse = [f"{each.reuse[s]:.3f}" if s in each.reuse else "-" for s in HORIZONS]
        made.add_row(
            *(each.group, str(each.layer) if each.layer >= 0 else "any"),
            *(str(each.steps), str(each.blocks), f"{each.frequency:.1%}"),
            *(f"{each.always:.1%}", f"{each.never:.1%}", f"{each.stability:.3f}"),
            *(*reuse, str(each.gap_p95), f"{each.weight:.2f}"),
        )
    return made


COMMANDS = (selection,)
