"""OpenLake in its local mode: a daemon whose slab of shared memory the client copies to and from. One slot size a server.

Its keys have exactly 54 bytes; its memory is in whole GiB; it evicts by itself and forgets nothing by key.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.adapters.base import Address, Bytes, Environment, Need, Store
from bench.peers.environment import python_environment
from bench.peers.processes import accepts, free_port, running

KEY_BYTES = 54
FIRST_CLIENT = 2048
CONFIG = """
self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "127.0.0.1:{port}"
kv_agents = ["127.0.0.1:{port}"]
s3_addr = "127.0.0.1:{other}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1
[[credentials]]
access_key = "openlake"
secret_key = "openlake"
[[nodes]]
id = 0
rpc_addr = "127.0.0.1:{port}"
disk_count = 0
[kv_slab]
capacity_gb = {capacity_gib}
reserve_ttl_secs = 60
"""


class Daemon:
    def __init__(self, address: Address) -> None:
        self.address = address

    def chill(self) -> None:
        raise NotImplementedError("nothing is on disk")


def environment(way: str) -> Environment:
    return python_environment("openlake", [["openlake-vllm==0.8.1"]])


@contextmanager
def serve(environment: Environment, folder: Path, need: Need) -> Iterator[Daemon]:
    port = free_port()
    slot_bytes = need.block_bytes + KEY_BYTES
    capacity_gib = -(-need.capacity_bytes // (1 << 30))
    config = folder / "openlake.toml"
    config.write_text(CONFIG.format(port=port, other=free_port(), capacity_gib=capacity_gib))
    command = [environment.program("openlaked"), "--config", str(config)]
    with running(
        command,
        folder,
        is_ready=lambda: accepts(port),
        variables=environment.variables,
        shared=["openlake_kv_*"],
    ):
        yield Daemon({"daemon": f"127.0.0.1:{port}", "slot_bytes": str(slot_bytes)})


def connect(way: str, address: Address, index: int) -> "OpenLake":
    return OpenLake(address["daemon"], int(address["slot_bytes"]), FIRST_CLIENT + index)


class OpenLake(Store):
    def __init__(self, daemon: str, slot_bytes: int, client: int) -> None:
        # Any: the package is in the peer's environment only
        native: Any = importlib.import_module("openlake_client._native")
        self._client = native.Client("local", client)
        self._client.attach(daemon, 0, slot_bytes)

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        stored = self._client.put_batch(_keys(keys), _addresses(buffers), _sizes(buffers))
        if not all(int(each) == 0 for each in stored):
            raise KeyError(f"not stored: {sum(int(each) != 0 for each in stored)} blocks")

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        hits = self._client.get_batch(_keys(keys), _addresses(buffers), _sizes(buffers))
        if not all(int(each) == 0 for each in hits):
            raise KeyError(f"missed: {sum(int(each) != 0 for each in hits)} blocks")

    def clear(self, keys: Sequence[bytes]) -> None:
        """It has no such call: the oldest are evicted."""

    def close(self) -> None:
        self._client.close()


def _keys(keys: Sequence[bytes]) -> list[bytes]:
    return [key.ljust(KEY_BYTES, b"\0") for key in keys]


def _addresses(buffers: Sequence[Bytes]) -> list[list[int]]:
    return [[buffer.ctypes.data] for buffer in buffers]


def _sizes(buffers: Sequence[Bytes]) -> list[list[int]]:
    return [[buffer.nbytes] for buffer in buffers]
