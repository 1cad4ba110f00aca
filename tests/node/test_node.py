"""Another language, from the proto and docs/identity.md alone: Node.js derives the same identity and moves the same bytes."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvstored.client import Client, GroupKind, GroupSpec, NamespaceSpec
from kvstored.core.keys import block_keys, root
from tests.crash.served import ROOT, Served, environment, free_port, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(60, func_only=True)]

EXAMPLE = ROOT / "examples" / "node"
INSTALL_S = 300


@pytest.fixture(scope="module")
def modules() -> Path:
    """The example's packages, installed once below the user's cache folder."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node.js is not here: node and npm are needed")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kvstored-engines" / "node"
    wanted, stamp = (EXAMPLE / "package.json").read_text(), folder / "installed"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(EXAMPLE / "package.json", folder)
        command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--omit=dev"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
        if done.returncode:
            pytest.skip(f"npm cannot install the packages: {done.stderr.strip()[-200:]}")
        stamp.write_text(wanted)
    return folder / "node_modules"


def told(script: Path, *arguments: str, modules: Path) -> dict[str, Any]:
    done = subprocess.run(
        ["node", str(script), *arguments],
        env={**environment(), "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole: dict[str, Any] = json.loads(done.stdout)
    return whole


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        made = Served(Path(folder), dram="64MiB", disk="64MiB", listen=f"127.0.0.1:{free_port()}")
        with made:
            yield made


def test_it_encodes_decodes_and_derives_what_the_golden_conversation_holds(modules: Path) -> None:
    found = told(Path(__file__).parent / "golden.js", modules=modules)
    assert found["differ"] == []
    assert found["messages"] > 20


def test_it_puts_matches_and_gets_blocks_that_our_own_client_reads(
    modules: Path, served: Served
) -> None:
    wait_until(lambda: served.stat().front_pid, what="the gRPC front is up")
    found = told(EXAMPLE / "roundtrip.js", served.listen, modules=modules)
    assert found["own_digest"] == found["digest"]
    assert found["hit_tokens"] == [0, 37]
    assert found["status"] == [5, 5, 5]  # COMMITTED
    assert found["is_equal"] == [True, True, True]
    assert found["miss"]
    start = root(bytes.fromhex(found["digest"]), [b"salt"])
    assert [key.hex() for key in block_keys(start, found["tokens"], 16)] == found["keys"]
    spec = NamespaceSpec(
        model="node-example",
        revision="r1",
        dtype="bfloat16",
        layout="nhd",
        layout_version=1,
        block_tokens=16,
        groups=(GroupSpec("kv", GroupKind.LINEAR, 3 << 20),),
    )
    with Client(served.address, timeout_s=10) as client:
        namespace = client.open_namespace(spec)
        assert namespace.digest.hex() == found["digest"]
        read = namespace.get(namespace.keys(found["tokens"], extra_keys=["salt"]))
        assert read.hits == 3
        for i, (block,) in enumerate(b for b in read.blocks if b is not None):
            assert block[:1000].tolist() == [(at * 31 + i) % 251 for at in range(1000)]
            assert str(xxhash.xxh3_64_intdigest(block)) == found["checksums"][i]
