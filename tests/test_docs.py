"""The documents name what exists: metrics, settings, files and commands."""

import re
from pathlib import Path

import click
import pytest

from kvstored import config
from kvstored.cli.main import cli
from kvstored.metrics import Build, Metrics, Sets

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "DESIGN.md", *sorted((ROOT / "docs").glob("*.md"))]


def ids(path: object) -> str:
    return path.name if isinstance(path, Path) else str(path)


def test_every_metric_in_the_documents_is_exported() -> None:
    metrics = Metrics(
        Sets(methods=("Match",), errors=("Busy",), queues=("disk",)), Build("0", "lru", "raw")
    )
    exported = set(
        re.findall(r"^# TYPE (kvstored_\w+)", metrics.exposition().decode(), re.MULTILINE)
    )
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(kvstored_\w+)", page.read_text())
        if not name.startswith("kvstored_pb")
    }
    assert named
    assert named <= exported


def test_every_setting_in_the_documents_exists() -> None:
    known = {setting.key for setting in config.load(environ={}).settings()}
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`((?:dram|disk|hbm|limits|log)\.[a-z_]+)`", page.read_text())
    }
    assert named
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_in_the_documents_exist(page: Path) -> None:
    context = click.Context(cli)
    for name in re.findall(r"`kvstored ([a-z][a-z-]*)", page.read_text()):
        assert cli.get_command(context, name) is not None, name


def test_the_example_is_the_one_of_the_readme() -> None:
    example = (ROOT / "examples/hello.py").read_text()
    code = (ROOT / "README.md").read_text().split("```python\n", 1)[1].split("```", 1)[0]
    assert example.endswith(code)


def test_the_example_of_transformers_is_the_one_of_its_page() -> None:
    example = (ROOT / "examples/generate.py").read_text()
    page = (ROOT / "docs/transformers.md").read_text()
    assert example.endswith(page.split("```python\n", 1)[1].split("```", 1)[0])
