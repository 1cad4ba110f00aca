"""The help that reads like a manual, its copy in docs/, and what is true of every command."""

from pathlib import Path

import click
import pytest

from kvstored import errors
from kvstored.cli.main import cli
from kvstored.cli.manual import ManualGroup, markdown
from kvstored.cli.output import EXITS, exit_of
from tests.cli.conftest import done, run

ROOT = Path(__file__).parents[2]
assert isinstance(cli, ManualGroup)
NAMES = cli.list_commands(click.Context(cli))


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def test_the_document_is_what_the_commands_say() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == markdown(cli), "run scripts/generate-cli-docs"


def test_help_has_the_sections_of_a_manual_and_every_command() -> None:
    text = done("--help").stdout
    for section in ("Usage", "Examples", "Exit codes", "Environment", "Words", "Options"):
        assert f"\n{section}:" in f"\n{text}"
    for name in NAMES:
        assert f"\n  {name} " in text


def test_the_keepers_own_commands_are_not_in_the_manual() -> None:
    for name in ("daemon", "front"):
        assert name not in NAMES
        assert command(name).hidden


def paths() -> list[tuple[str, ...]]:
    """Of every command, those below another one too."""
    found: list[tuple[str, ...]] = []
    for name in NAMES:
        above = command(name)
        below = list(above.commands) if isinstance(above, click.Group) else []
        found += [(name, each) for each in below] or [(name,)]
    return found


@pytest.mark.parametrize("path", paths(), ids=" ".join)
def test_every_command_explains_itself_and_its_flags(path: tuple[str, ...]) -> None:
    found = command(path[0])
    assert found.help
    if isinstance(found, click.Group):
        found = found.commands[path[1]]
        assert found.help
    for param in found.params:
        if isinstance(param, click.Option):
            assert param.help, param.name
    assert "--json" in done(*path, "--help").stdout


def test_every_class_of_error_has_one_exit_code() -> None:
    classes = [
        each
        for each in vars(errors).values()
        if isinstance(each, type)
        and issubclass(each, errors.KvstoredError)
        and each is not errors.KvstoredError
    ]
    assert len(classes) > 10
    for each in classes:
        assert exit_of(each("x")).code not in (0, 1), each
    codes = [each.code for each in EXITS]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["put", "m@1", "00" * 8, "--block-bytes", "64"], "64GiB"),
        (["pin", "m@1", "00" * 8, "--ttl", "60"], "30s"),
        (["prefetch", "m@1", "00" * 8, "--deadline", "5"], "30s"),
        (["stat", "--timeout", "5"], "30s"),
        (["doctor", "--dram", "1024"], "64GiB"),
    ],
)
def test_a_bare_number_is_refused_with_an_example(
    arguments: list[str], example: str, bare: Path
) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert "without a unit" in result.output
    assert example in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["bogus"], 2, "no such command: 'bogus' (see"),
        (["sttat"], 2, "no such command: 'sttat'; did you mean stat?"),
        (["match", "m@1"], 2, "name blocks by KEYs or by --tokens"),
        (["match", "m@1", "aa", "--tokens", "1"], 2, "one of the two"),
        (["match", "m@1", "--tokens", "1", "--parent", "aa"], 2, "--parent goes with KEYs"),
        (["clear"], 2, "--all"),
        (["put", "m@1", "aa", "--block-tokens", "4"], 2, "go with --block-bytes"),
        (["put", "m@1", "aa", "--supersede"], 2, "go with --block-bytes"),
        (["put", "m@1", "--tokens", "@-"], 2, "cannot both come from stdin"),
        (["get", "m@1", "aa", "--json"], 2, "--json needs --out"),
        (["stat"], 69, "the daemon is not reachable"),
        (["stat", "--address", "nonsense"], 2, "unix:///path"),
        (["stat", "--timeout", "0"], 2, "above 0"),
        (["events", "--since", "3"], 2, "EPOCH:CURSOR"),
        (["config", "--dram", "64"], 78, "dram.capacity"),
    ],
)
def test_a_failure_is_one_line_on_stderr_and_an_exit_code(
    arguments: list[str], code: int, words: str, bare: Path
) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_bare_path_is_an_address_too(bare: Path) -> None:
    result = run("stat", "--address", str(bare / "elsewhere.sock"))
    assert result.exit_code == 69
    assert "elsewhere.sock" in result.stderr
