import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.client import Client, GroupKind, GroupSpec, Namespace, NamespaceSpec
from tests.transport.fake_daemon import FakeDaemon

BLOCK_TOKENS = 16


def spec_with(*groups: GroupSpec, model: str = "model") -> NamespaceSpec:
    return NamespaceSpec(
        model=model,
        revision="r1",
        dtype="bf16",
        layout="nhd",
        layout_version=1,
        block_tokens=BLOCK_TOKENS,
        groups=groups or (GroupSpec("kv", GroupKind.LINEAR, 8192),),
    )


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        fake = FakeDaemon(Path(folder) / "s")
        fake.start()
        yield fake
        fake.kill()


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.address, timeout_s=10) as made:
        yield made


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return client.open_namespace(spec_with())
