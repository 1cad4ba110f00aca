"""What `kvstored doctor` finds about software: LMDB, hashes against golden vectors, CuPy and driver, socket, ports, the daemon and its version."""

import importlib
import importlib.util
import os
import socket
import stat
import tempfile
from pathlib import Path

import lmdb
import xxhash

from kvstored import __version__
from kvstored.cli.checks import INDEX, Finding, Level, nearest_existing, scratch_parent
from kvstored.client import Client
from kvstored.config import Config
from kvstored.core import keys, namespace
from kvstored.core.types import GroupKind, GroupSpec, NamespaceSpec
from kvstored.errors import ConfigError, KvstoredError
from kvstored.fields import SOCKET_PATH_MAX, Endpoint
from kvstored.pb import kvstored_pb2 as pb
from kvstored.statedir import read_status
from kvstored.transport.bulk import Certificate

_ANSWER_S = 5.0
_READERS_BYTES = 64 << 10
"""More than LMDB's table of 126 readers takes."""


# ---- LMDB


def lmdb_opens(config: Config) -> list[Finding]:
    findings = [_lmdb_works(config)]
    if config.disk.capacity_bytes and (config.disk.path / INDEX / "data.mdb").exists():
        findings.append(_index_opens(config.disk.path / INDEX))
    return findings


def _lmdb_works(config: Config) -> Finding:
    where = scratch_parent(config.disk.path)
    try:
        with tempfile.TemporaryDirectory(prefix=".kvstored-doctor-", dir=where) as scratch:
            is_there = _keeps_a_value(Path(scratch))
    except (OSError, lmdb.Error) as error:
        remedy = f"see that {where} can be written to and its filesystem allows mmap"
        return Finding("LMDB", Level.FAIL, f"an environment cannot be made: {error}", remedy)
    version = ".".join(map(str, lmdb.version()))
    if not is_there:
        remedy = f"the filesystem of {where} loses writes: set another disk.path"
        return Finding("LMDB", Level.FAIL, f"LMDB {version} lost a committed value", remedy)
    instead = "" if where == config.disk.path else f" ({config.disk.path} is not there yet)"
    return Finding("LMDB", Level.OK, f"LMDB {version} writes and reads in {where}{instead}")


def _keeps_a_value(directory: Path) -> bool:
    """The table of readers is mapped and written to: on a full filesystem a hole in it would kill this process (SIGBUS), so its space is
    taken before LMDB opens it. Data pages are written by calls, which fail."""
    with (directory / "lock.mdb").open("xb") as readers:
        os.posix_fallocate(readers.fileno(), 0, _READERS_BYTES)
    with lmdb.open(str(directory), map_size=2**20) as environment:
        with environment.begin(write=True) as txn:
            txn.put(b"key", b"value")
        with environment.begin() as txn:
            return txn.get(b"key") == b"value"


def _index_opens(path: Path) -> Finding:
    """Read only and without its locks: a running daemon does not notice."""
    try:
        with lmdb.open(
            str(path), readonly=True, lock=False, max_dbs=2, create=False
        ) as environment:
            environment.info()
    except (OSError, lmdb.Error) as error:
        remedy = "serve would not use it: kvstored clean removes it, and the NVMe tier starts cold"
        text = f"the disk index does not open: path={path} error={error}"
        return Finding("disk index", Level.FAIL, text, remedy)
    return Finding("disk index", Level.OK, f"the disk index opens: {path}")


# ---- hashes


_GOLDEN_SPEC = NamespaceSpec(
    model="golden",
    revision="1",
    dtype="bf16",
    layout="nhd",
    layout_version=1,
    block_tokens=4,
    groups=(GroupSpec("kv", GroupKind.LINEAR, 4096),),
)
GOLDEN = {
    "namespace digest": "21ea8d22289b913e0a167ed8ab8a9f225b1abfb1f5381a4af1c706417c62aa3e",
    "root": "001672b302f7e69e4261f57029327909f296d11805dd1508456c93f40ce0010d",
    "salted root": "4bf7ed0aefcf64c416a45b21aeaf738504c43cf2b952150d304c7fd64c39b88f",
    "block key": "c7d57a3982fe35805f844e9dc940aa0639c2f5fbcf6a4a2b93ab51ffde04780d",
    "fingerprint": "cb724f4bb63629801d30673a9de04e28",
    "xxh3-64": "eb4b7c3707879151",
}
"""As in docs/identity.md: what any machine must compute, or it would never find a block of another one."""


def hashes() -> list[Finding]:
    digest = bytes(range(32))
    content = bytes(range(256)) * 16
    streamed = xxhash.xxh3_64()
    streamed.update(content)
    root = keys.root(digest)
    low, high = keys.fingerprint(root, 42)
    found = {
        "namespace digest": namespace.digest(_GOLDEN_SPEC).hex(),
        "root": root.hex(),
        "salted root": keys.root(digest, [b"salt", b"lora-7"]).hex(),
        "block key": keys.block_keys(root, [1, 2, 3, 4, 0, 0xFFFF_FFFF], 4)[-1].hex(),
        "fingerprint": f"{high:016x}{low:016x}",
        "xxh3-64": streamed.hexdigest(),
    }
    wrong = [name for name, golden in GOLDEN.items() if found[name] != golden]
    if wrong:
        remedy = "do not serve from here: reinstall kvstored, numpy and xxhash"
        text = f"computed otherwise than on other machines: {', '.join(wrong)}"
        return [Finding("hashes", Level.FAIL, text, remedy)]
    return [Finding("hashes", Level.OK, f"{len(GOLDEN)} golden vectors agree")]


# ---- GPU


def gpu(driver: Path = Path("/proc/driver/nvidia/version")) -> list[Finding]:
    """CuPy is imported only where it is installed; a machine without is the usual case."""
    has_driver = driver.exists()
    if importlib.util.find_spec("cupy") is None:
        hint = "; pip install kvstored[cuda12] would find it" if has_driver else ""
        there = "an NVIDIA driver is there" if has_driver else "no NVIDIA driver"
        return [Finding("GPU", Level.OK, f"CuPy is not installed, {there}: no HBM tier{hint}")]
    try:
        cupy = importlib.import_module("cupy")
        devices = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001 - a broken CUDA installation fails in any way it likes
        remedy = "match CuPy to the driver (extras cuda12 or cuda13), or uninstall it"
        if not has_driver:
            remedy = "no NVIDIA driver is loaded: load it, or leave the GPU tier off"
        return [Finding("GPU", Level.WARN, f"CuPy finds no device: {error}", remedy)]
    return [Finding("GPU", Level.OK, f"CuPy {cupy.__version__}, {devices} devices")]


# ---- socket and daemon


def socket_path(config: Config) -> list[Finding]:
    path = config.socket
    length = len(os.fsencode(path))
    directory = nearest_existing(path.parent)
    text = f"{path} ({length} of {SOCKET_PATH_MAX} bytes)"
    if not os.access(directory, os.W_OK | os.X_OK):
        remedy = f"give this user the directory {directory}, or set another socket"
        return [Finding("socket", Level.FAIL, f"{text}: its directory is not writable", remedy)]
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        remedy = f"chmod o-w {directory}, or choose a directory of kvstored's own"
        return [
            Finding("socket", Level.WARN, f"{text}: anyone can replace it in {directory}", remedy)
        ]
    if path.exists() and not path.is_socket():
        remedy = "move it away, or set another socket"
        return [Finding("socket", Level.FAIL, f"{path} is there and is no socket", remedy)]
    return [Finding("socket", Level.OK, f"{text}, mode {config.socket_mode:04o}")]


def bulk(config: Config) -> list[Finding]:
    """Whether the bulk channel could listen, with its certificate."""
    if config.listen is None or config.bulk_listen is None:
        return [Finding("bulk", Level.OK, "off: remote clients stream over gRPC")]
    if config.bulk_tls.certificate is None:
        return [Finding("bulk", Level.OK, f"{config.bulk_listen}, plain TCP")]
    certificate = Certificate(
        config.bulk_tls.certificate, config.bulk_tls.key or config.bulk_tls.certificate
    )
    try:
        certificate.context()
    except ConfigError as error:
        return [Finding("bulk", Level.FAIL, str(error), "name a PEM certificate and its key")]
    return [Finding("bulk", Level.OK, f"{config.bulk_listen}, TLS")]


def daemon(config: Config) -> list[Finding]:
    keeper = read_status(str(config.state_dir))
    try:
        with Client(f"unix://{config.socket}", name="kvstored doctor", timeout_s=_ANSWER_S) as made:
            answer = made.call("Stat", pb.StatRequest(), pb.StatResponse)
    except KvstoredError as error:
        if keeper is None:
            text = f"none runs on {config.state_dir}; start one with kvstored serve"
            return [Finding("daemon", Level.OK, text), *ports(config)]
        remedy = "see its log; kvstored restart replaces it with DRAM warm"
        text = f"the keeper runs (pid {keeper.keeper_pid}) but the daemon does not answer: {error}"
        return [Finding("daemon", Level.FAIL, text, remedy)]
    text = (
        f"version {answer.version}, pid {answer.daemon_pid}, {answer.state}, {answer.blocks} blocks"
    )
    if answer.version != __version__:
        remedy = "kvstored restart replaces it with DRAM warm"
        return [Finding("daemon", Level.WARN, f"{text}; this command is {__version__}", remedy)]
    return [Finding("daemon", Level.OK, text), *_tiers_off(answer)]


def _tiers_off(answer: pb.StatResponse) -> list[Finding]:
    remedy = "mend the cause, then kvstored restart; blocks are served from the other tiers"
    return [
        Finding("daemon", Level.WARN, f"its tier {tier.name} is off: {tier.reason}", remedy)
        for tier in answer.tiers
        if tier.reason
    ]


def ports(config: Config) -> list[Finding]:
    wanted = {
        "listen": config.listen,
        "bulk_listen": config.bulk_listen,
        "metrics_listen": config.metrics_listen,
    }
    return [
        _port(name, endpoint)
        for name, endpoint in wanted.items()
        if endpoint is not None and not endpoint.path
    ]


def _port(name: str, endpoint: Endpoint) -> Finding:
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((endpoint.host, endpoint.port))
    except OSError as error:
        remedy = f"another process may have it: set another {name} (or off)"
        return Finding(
            "port", Level.FAIL, f"{name} {endpoint} cannot be used: {error.strerror}", remedy
        )
    return Finding("port", Level.OK, f"{name} {endpoint} is free")
