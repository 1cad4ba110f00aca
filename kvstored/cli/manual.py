"""The manual: `kvstored --help` in sections, and the same text with every command as Markdown (docs/cli.md)."""

import difflib
from collections.abc import Iterator, Mapping

import click

from kvstored.cli.output import EXITS, refuse
from kvstored.errors import KvstoredError

ABOUT = """A KV cache store for LLM inference engines: a daemon beside the engine that keeps the KV
cache of prompt prefixes in shared memory and on NVMe, so that a prefix is prefilled once."""

EXAMPLES = (
    ("start the store, then look at it", "kvstored serve --dram 64GiB --disk 1TiB"),
    ("", "kvstored stat"),
    ("will it run here?", "kvstored doctor --dram 64GiB --disk 1TiB"),
    (
        "two blocks of 256 tokens, in a namespace made for it",
        "head -c 128KiB /dev/urandom > kv.bin",
    ),
    ("", "seq 1 512 | kvstored put demo@1 --tokens @- --block-bytes 64KiB --in kv.bin"),
    ("how much of a prompt is there?", "seq 1 600 | kvstored match demo@1 --tokens @-"),
    ("read it back, verified", "seq 1 512 | kvstored get demo@1 --tokens @- --out kv.out"),
    ("why did it miss?", "seq 1 600 | kvstored explain demo@1 --tokens @-"),
    ("a real trace against the daemon", "kvstored replay trace.jsonl --block-bytes 64KiB"),
    ("for scripts: every command has --json", "kvstored stat --json | jq .blocks"),
)

WORDS = (
    ("NAMESPACE", "model@revision, a model in use, or the first digits of the namespace's digest"),
    ("KEY", "a block's key, 16 to 128 hexadecimal digits; consecutive KEYs form one path"),
    ("IDS", "token ids of a sequence from its first: 1,2,3 or @FILE or @- for stdin"),
    ("SIZE", "needs a unit: 64KiB, 64GB, 1.5TiB; a bare number is refused"),
    ("DURATION", "needs a unit: 500ms, 30s, 10min, 2h, 7d"),
    ("ADDRESS", "unix:///PATH (this host, through shared memory) or HOST:PORT (gRPC)"),
)

ENVIRONMENT = (
    ("KVSTORED_CONFIG", "the TOML file with settings; --config goes before it"),
    ("KVSTORED_<KEY>", "any setting, as KVSTORED_DRAM_CAPACITY=64GiB; kvstored config lists all"),
    ("KVSTORED_NATIVE", "off: clients copy and read in Python, as where no C compiler was"),
    ("XDG_STATE_HOME", "the default state directory is $XDG_STATE_HOME/kvstored"),
    ("XDG_RUNTIME_DIR", "the default socket is $XDG_RUNTIME_DIR/kvstored/kvstored.sock"),
    ("XDG_CONFIG_HOME", "the default file is $XDG_CONFIG_HOME/kvstored/kvstored.toml"),
    ("NO_COLOR", "no colours on a terminal either"),
)

Family = tuple[str, tuple[str, ...]]
"""A heading and the names of its commands."""


class ManualGroup(click.Group):
    """A group whose help reads like a manual, and where every error is one line and an exit code."""

    families: tuple[Family, ...] = ()

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return [name for _, names in self.families for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            ctx.fail(f"no such command: {name!r}" + "".join(f"; did you mean {n}?" for n in near))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except (KvstoredError, click.UsageError) as error:
            refuse(ctx, error)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        with formatter.section("About"):
            formatter.write_text(" ".join(ABOUT.split()))
        for heading, names in self.families:
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, each.get_short_help_str(200)) for name, each in commands if each]
            with formatter.section(heading):
                formatter.write_dl(rows)
        with formatter.section("Words"):
            formatter.write_dl(WORDS)
        with formatter.section("Examples"):
            for title, line in EXAMPLES:
                formatter.write("".join(f"  # {title}\n" for _ in [0] if title) + f"  {line}\n")
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(each.code), f"{each.name}: {each.meaning}") for each in EXITS])
        with formatter.section("Environment"):
            formatter.write_dl(ENVIRONMENT)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [row for param in self.get_params(ctx) if (row := param.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text("kvstored COMMAND --help tells more about each command.")


def markdown(group: ManualGroup) -> str:
    """docs/cli.md: made from the commands themselves."""
    ctx = click.Context(group, info_name="kvstored")
    return "\n".join(_lines(group, ctx)) + "\n"


def _lines(group: ManualGroup, ctx: click.Context) -> Iterator[str]:
    yield "# The kvstored command"
    yield ""
    yield "<!-- Made from the commands by `scripts/generate-cli-docs`; a test keeps it in step. -->"
    yield ""
    yield " ".join(ABOUT.split())
    yield ""
    yield from _definitions("Words", dict(WORDS))
    yield "## Examples"
    yield ""
    yield "```sh"
    for title, line in EXAMPLES:
        yield from [f"# {title}"] if title else []
        yield line
    yield "```"
    yield ""
    yield from _definitions("Exit codes", {str(e.code): f"{e.name}: {e.meaning}" for e in EXITS})
    yield from _definitions("Environment", dict(ENVIRONMENT))
    for heading, names in group.families:
        yield f"## {heading}"
        yield ""
        for name in names:
            command = group.get_command(ctx, name)
            assert command is not None, name
            yield from _command(click.Context(command, parent=ctx, info_name=name))


def _definitions(title: str, pairs: Mapping[str, str]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, meaning in pairs.items():
        yield f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |"
    yield ""


def _command(ctx: click.Context) -> Iterator[str]:
    usage = " ".join(ctx.command.collect_usage_pieces(ctx))
    yield f"### {ctx.command_path}"
    yield ""
    yield f"    {ctx.command_path} {usage}"
    yield ""
    for paragraph in (ctx.command.help or "").split("\n\n"):
        yield " ".join(paragraph.split())
        yield ""
    for param in ctx.command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and param is not ctx.command.get_help_option(ctx):
            yield f"- `{record[0]}`: {' '.join(record[1].split())}"
    yield ""
    if isinstance(ctx.command, click.Group):
        for name, below in ctx.command.commands.items():
            yield from _command(click.Context(below, parent=ctx, info_name=name))
