"""Engines' own code over a real daemon. Needs an engine's environment (docs/engines-sglang.md, docs/engines-lmcache.md)."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.served import Served


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        yield Path(name)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, dram="64MiB", disk="256MiB") as daemon:
        yield daemon
