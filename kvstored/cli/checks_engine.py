"""What `kvstored doctor --engine` finds: whether an engine of this environment can use the daemon, and what to set.

Runs where the engine runs, which may be another container than the daemon's: of the daemon it needs the socket only.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstored.cli.checks import Finding, Level
from kvstored.client import Client
from kvstored.config import Config
from kvstored.connectors import versions
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb

_ANSWER_S = 2.0
_SEED = "PYTHONHASHSEED"
_NEEDED = ("numpy", "xxhash", "google.protobuf")


@dataclass(frozen=True, slots=True)
class Engine:
    """`page_tokens`: block sizes are a multiple of it. `needs_seed`: its own hashes repeat in another process only with PYTHONHASHSEED.
    `arguments`: what to start it with, of the daemon's address.
    """

    supported: versions.Supported
    page_tokens: int
    needs_seed: bool
    hashing: str
    arguments: Callable[[str], str]


def _vllm(address: str) -> str:
    config = {
        "kv_connector": "KvstoredConnector",
        "kv_connector_module_path": "kvstored.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address},
    }
    return f"--kv-transfer-config '{json.dumps(config)}'"


def _sglang(address: str) -> str:
    config = {
        "backend_name": "kvstored",
        "module_path": "kvstored.connectors.sglang",
        "class_name": "KvstoredHiCache",
        "interface_v1": 1,
        "allocator": "shm",
        "hicache_storage_pass_prefix_keys": True,
        "address": address,
    }
    return (
        "--enable-hierarchical-cache --hicache-mem-layout page_first_direct --hicache-io-backend direct"
        " --hicache-write-policy write_through --hicache-storage-prefetch-policy timeout"
        f" --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{json.dumps(config)}'"
    )


def _lmcache(address: str) -> str:
    config = {
        "type": "plugin",
        "module_path": "kvstored.connectors.lmcache_l2",
        "class_name": "KvstoredL2",
        "config_class_name": "KvstoredL2Config",
        "adapter_params": {"address": address, "revision": "COMMIT OR VERSION OF THE WEIGHTS"},
    }
    return f"lmcache server --l2-adapter '{json.dumps(config)}'"


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        versions.VLLM,
        16,
        False,
        "sha256 (the default) and sha256_cbor give the same hashes in every process; xxhash does only with PYTHONHASHSEED",
        _vllm,
    ),
    "sglang": Engine(
        versions.SGLANG, 1, False, "pages are keyed by SHA-256, the same in every process", _sglang
    ),
    "lmcache": Engine(
        versions.LMCACHE,
        16,
        True,
        "in-process LMCache hashes with Python's own hash, which differs from process to process",
        _lmcache,
    ),
}


def findings(
    engine: Engine, config: Config, environ: Mapping[str, str], block_tokens: int | None
) -> list[Finding]:
    address = f"unix://{config.socket}"
    return [
        version(engine.supported),
        packages(),
        hashes(engine, environ.get(_SEED)),
        blocks(engine, block_tokens),
        reachable(config.socket),
        Finding("set", Level.OK, f"start it with {engine.arguments(address)}"),
    ]


def version(supported: versions.Supported) -> Finding:
    found = versions.installed(supported)
    if found is None:
        text = f"{supported.engine} is not in this Python environment"
        remedy = "ask in the engine's own: /path/to/its/bin/python -m kvstored doctor --engine ..."
        return Finding("engine", Level.FAIL, text, remedy)
    known = f"tested with {supported.first} to {supported.last}"
    text = f"{supported.engine} {found}; {known}"
    if versions.is_older(found, supported):
        return Finding("engine", Level.FAIL, text, f"upgrade it to {supported.first} or newer")
    if versions.is_newer(found, supported):
        remedy = (
            "newer than what is tested: compare its answers with and without before relying on it"
        )
        return Finding("engine", Level.WARN, text, remedy)
    return Finding("engine", Level.OK, text)


def packages() -> Finding:
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        remedy = f"pip install {' '.join(name.replace('google.', '') for name in absent)}"
        return Finding("packages", Level.FAIL, f"the client needs {' '.join(absent)}", remedy)
    return Finding("packages", Level.OK, f"{' '.join(_NEEDED)} are there")


def hashes(engine: Engine, seed: str | None) -> Finding:
    told = f"{_SEED}={seed}" if seed is not None else f"{_SEED} is not set"
    text = f"{engine.hashing}; {told}"
    if engine.needs_seed and seed is None:
        remedy = f"set {_SEED} to the same number for every process of the engine"
        return Finding("hashes", Level.WARN, text, remedy)
    if seed == "random":
        remedy = f"set {_SEED} to a number, the same for every engine that shares, or unset it"
        return Finding("hashes", Level.FAIL, text, remedy)
    return Finding("hashes", Level.OK, text)


def blocks(engine: Engine, block_tokens: int | None) -> Finding:
    rule = f"a multiple of {engine.page_tokens} tokens, equal on all engines that share"
    if block_tokens is None:
        return Finding("blocks", Level.OK, f"{rule}; --block-tokens checks a size")
    if block_tokens <= 0 or block_tokens % engine.page_tokens:
        below = max(block_tokens // engine.page_tokens, 1) * engine.page_tokens
        remedy = f"{below} or {below + engine.page_tokens}"
        return Finding("blocks", Level.FAIL, f"{block_tokens} is not {rule}", remedy)
    return Finding("blocks", Level.OK, f"{block_tokens}: {rule}")


def reachable(socket: Path) -> Finding:
    """As this user, by asking: permissions of every directory on the way, the socket's mode, a daemon behind it."""
    try:
        is_there = socket.is_socket()
    except PermissionError:
        is_there = False
    if not is_there:
        text = f"{socket} is not there, or its directory may not be entered by uid {os.getuid()}"
        remedy = "share the socket's directory with the engine (docs/engines.md), or name it with --socket"
        return Finding("socket", Level.FAIL, text, remedy)
    if not os.access(socket, os.R_OK | os.W_OK):
        told = socket.stat()
        text = f"{socket} is of uid {told.st_uid}, gid {told.st_gid}, mode {told.st_mode & 0o777:04o}; this is uid {os.getuid()}"
        remedy = "run both as one user, or give them a group and set socket_mode = 0660"
        return Finding("socket", Level.FAIL, text, remedy)
    try:
        with Client(f"unix://{socket}", name="kvstored doctor", timeout_s=_ANSWER_S) as client:
            answer = client.call("Stat", pb.StatRequest(), pb.StatResponse)
    except KvstoredError as error:
        remedy = "kvstored doctor on the daemon's side says why"
        return Finding("socket", Level.FAIL, f"{socket} does not answer: {error}", remedy)
    return Finding("socket", Level.OK, f"{socket}: version {answer.version}, {answer.state}")
