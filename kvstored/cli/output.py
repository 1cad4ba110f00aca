"""What a command prints: a table or one JSON object on stdout; when it fails, one line on stderr and an exit code by class of error."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import click
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstored import errors
from kvstored.errors import KvstoredError

PIPE_COLUMNS = 400
"""Where there is no terminal to be as wide as: tables must not be cut."""

Command = Callable[..., Any]  # click passes options by name, whatever the function's signature
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Exit:
    """`classes`: the errors that end with this code."""

    code: int
    name: str
    meaning: str
    classes: tuple[type[KvstoredError], ...] = ()


EXITS = (
    Exit(0, "done", "what was asked is done; a miss that was asked about is an answer"),
    Exit(1, "failed", "a check found something wrong (doctor, verify, replay), or it was aborted"),
    Exit(2, "usage", "the command line cannot work as it is", (errors.InvalidArgument,)),
    Exit(65, "corrupt", "bytes do not match their checksum", (errors.Corrupt,)),
    Exit(66, "not found", "no such namespace, pin or block", (errors.NotFound,)),
    Exit(69, "unavailable", "the daemon is not reachable", (errors.Unavailable,)),
    Exit(
        75,
        "try again",
        "no space, busy, too late, or overtaken: it may work later",
        (
            errors.NoSpace,
            errors.Busy,
            errors.DeadlineExceeded,
            errors.Conflict,
            errors.LeaseLost,
        ),
    ),
    Exit(77, "not allowed", "this user or tenant may not do that", (errors.PermissionDenied,)),
    Exit(
        78,
        "configuration",
        "a setting is wrong, or the state directory belongs to another process or version",
        (errors.ConfigError, errors.StateMismatch),
    ),
)
FAILED = 1
"""Exit code of a command that worked and found something wrong."""


def exit_of(error: KvstoredError) -> Exit:
    return next((each for each in EXITS if isinstance(error, each.classes)), EXITS[FAILED])


def refuse(ctx: click.Context, error: KvstoredError | click.UsageError) -> NoReturn:
    """Ends the command with one line and the error's exit code."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else ctx.command_path
        click.echo(f"{path}: {_line(error.format_message())} (see {path} --help)", err=True)
        ctx.exit(error.exit_code)
    click.echo(f"kvstored: {_line(str(error)) or type(error).__name__}", err=True)
    ctx.exit(exit_of(error).code)


def _line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def json_option(command: Command) -> Command:
    return click.option("--json", "is_json", is_flag=True, help="One JSON object instead of text.")(
        command
    )


def yes_option(command: Command) -> Command:
    return click.option("--yes", "-y", "is_agreed", is_flag=True, help="Do not ask.")(command)


def ask(question: str, *, is_agreed: bool) -> None:
    """Goes on only where the answer is yes. On stderr, so that stdout is the result alone."""
    if not is_agreed:
        click.confirm(question, abort=True, err=True)


def show(value: Mapping[str, object], text: Callable[[], RenderableType], *, is_json: bool) -> None:
    """`text` is made only when it is printed."""
    if is_json:
        click.echo(json.dumps(value, indent=2))
    else:
        console().print(text())


def console() -> Console:
    """On stdout; colours only where that is a terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)


def table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # A column named "blocks >" holds numbers.
        is_number = column.endswith(" >")
        made.add_column(
            column.removesuffix(" >"), justify="right" if is_number else "left", overflow="fold"
        )
    return made


def facts(pairs: Mapping[str, object]) -> Table:
    """Names and values in two columns."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in pairs.items():
        made.add_row(name.replace("_", " "), str(value))
    return made


@contextmanager
def progress(title: str, total: int | None, *, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, which vanishes at the end; gives the call that advances it."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=is_quiet or not sys.stderr.isatty(),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)


def as_json(message: Message) -> Json:
    """Every field by name, unset ones too: bytes as hexadecimal, choices by name, numbers as numbers (protobuf's own JSON makes text of 64 bits).

    Only ids are text: they use all 64 bits, and many readers of JSON round a number beyond 2**53.
    """
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(
    message: Message, field: Any
) -> object:  # Any: protobuf has a descriptor class for each of its backends
    value: Any = getattr(message, field.name)  # Any: a field has any type that protobuf has
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_value(field, each) for each in value]
    return _value(field, value)


def _value(field: Any, value: Any) -> object:  # Any: as above
    if isinstance(value, Message):
        return as_json(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.name == "id":
        return str(value)
    if field.enum_type is not None:
        number = field.enum_type.values_by_number.get(value)
        return number.name.lower() if number else int(value)
    return value
