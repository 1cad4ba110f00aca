"""A real daemon, and guarded namespaces of it."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstored.client import GroupKind, GroupSpec, NamespaceSpec
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.identity import namespace_of
from kvstored.connectors.options import ConnectorOptions
from tests.crash.served import Served

BLOCK_BYTES = 8192
BLOCK_TOKENS = 16

Open = Callable[..., GuardedNamespace]


def spec_with(**changed: object) -> NamespaceSpec:
    facts = {
        "model": "model",
        "revision": "r1",
        "dtype": "bfloat16",
        "layout": "test",
        "layout_version": 1,
        "block_tokens": BLOCK_TOKENS,
        "groups": [GroupSpec("kv", GroupKind.LINEAR, BLOCK_BYTES)],
    }
    return namespace_of(**{**facts, **changed})


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        yield Path(name)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, dram="64MiB", disk="256MiB") as daemon:
        yield daemon


@pytest.fixture
def guard(folder: Path) -> Iterator[Open]:
    """Makes guarded namespaces of the daemon in this folder, there or not, with short limits."""
    opened: list[GuardedNamespace] = []

    def make(spec: NamespaceSpec | None = None, **options: object) -> GuardedNamespace:
        limits = {"address": f"unix://{folder}/s", "lookup_s": 1.0, "probe_s": 0.5, "load_s": 2.0}
        chosen = ConnectorOptions(**{**limits, **options})
        opened.append(GuardedNamespace(spec or spec_with(), chosen, name="test"))
        return opened[-1]

    yield make
    for each in opened:
        each.close(0.1)
