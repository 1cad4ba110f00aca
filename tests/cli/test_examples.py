"""The examples of the documents, run as they stand against a real daemon."""

import re
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Served


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("page", "number"),
    [
        (page, number)
        for page in ("README.md", "docs/api.md")
        for number in range(len(examples(ROOT / page)))
    ],
)
def test_an_example_runs(page: str, number: int, daemon: Served) -> None:
    code = examples(ROOT / page)[number]
    exec(compile(code, f"{page}, example {number}", "exec"), {})
