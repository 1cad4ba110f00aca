"""Mooncake Store. Ways: `tcp` between processes over loopback, `sidecar` its client without a segment, which shares memory with a
`mooncake_client` process that does the copying.
"""

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.adapters.base import Address, Bytes, Environment, Need, Store
from bench.peers.environment import python_environment, with_libraries
from bench.peers.processes import accepts, free_port, running

LIBRARIES = ("ibverbs", "rdmacm", "numa", "uring", "curl")
PACKAGES = (
    *("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200", "libnuma1", "liburing2"),
    *(
        "libcurl4",
        "libnghttp2-14",
        "librtmp1",
        "libssh2-1",
        "libpsl5",
        "libldap-2.5-0",
        "libsasl2-2",
    ),
    *("libbrotli1",),
)
POOL_SPARE = 64 << 20


class Master:
    def __init__(self, address: Address) -> None:
        self.address = address

    def chill(self) -> None:
        raise NotImplementedError("nothing is on disk")


def environment(way: str) -> Environment:
    made = python_environment("mooncake", [["mooncake-transfer-engine-non-cuda==0.3.13.post1"]])
    return with_libraries(made, LIBRARIES, PACKAGES)


@contextmanager
def serve(environment: Environment, folder: Path, need: Need) -> Iterator[Master]:
    master, metrics, segment = free_port(), free_port(), free_port()
    command = [environment.program("mooncake_master"), "--rpc_address=127.0.0.1"]
    command += [f"--rpc_port={master}", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
    command += ["--rpc_thread_num=2", "--default_kv_lease_ttl=10000"]
    client = [environment.program("mooncake_client"), "--host=127.0.0.1", f"--port={segment}"]
    client += [f"--master_server_address=127.0.0.1:{master}", "--metadata_server=P2PHANDSHAKE"]
    client += [f"--global_segment_size={_whole_mib(need.capacity_bytes)} MB", "--protocol=tcp"]
    client += ["--threads=2"]
    variables = environment.variables
    with (
        running(command, folder, is_ready=lambda: accepts(master), variables=variables),
        running(
            client,
            folder,
            is_ready=lambda: accepts(segment),
            variables=variables,
            shared=["*mooncake*"],
        ),
    ):
        yield Master(
            {
                "master": f"127.0.0.1:{master}",
                "segment": f"127.0.0.1:{segment}",
                "pool_bytes": str(2 * need.blocks * need.block_bytes),
            }
        )


def connect(way: str, address: Address, index: int) -> "Mooncake":
    return Mooncake(way, address)


class Mooncake(Store):
    def __init__(self, way: str, address: Address) -> None:
        # Any: the package is in the peer's environment only
        module: Any = importlib.import_module("mooncake.store")
        self._store = module.MooncakeDistributedStore()
        self._is_sidecar = way == "sidecar"
        pool = int(address["pool_bytes"])
        if self._is_sidecar:
            code = self._store.setup_dummy(pool + POOL_SPARE, POOL_SPARE, address["segment"])
        else:
            code = self._store.setup(
                "127.0.0.1", "P2PHANDSHAKE", 0, POOL_SPARE, "tcp", "", address["master"]
            )
        if code:
            raise ConnectionError(f"setup failed: code={code}")
        self._pool = self._pool_of(pool)
        self._turn = 0

    def buffers(self, count: int, block_bytes: int) -> list[Bytes]:
        """Sources and targets of a cell are the two halves of one registered pool; one cell is there at a time."""
        start = self._turn * (self._pool.size // 2)
        self._turn = 1 - self._turn
        memory = self._pool[start : start + count * block_bytes]
        return list(memory.reshape(count, block_bytes))

    def _pool_of(self, size: int) -> Bytes:
        if self._is_sidecar:
            start = self._store.alloc_from_mem_pool(size)
            if not start:
                raise MemoryError(f"no room in its pool: bytes={size}")
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        else:
            memory = np.zeros(size, np.uint8)
        if code := self._store.register_buffer(memory.ctypes.data, size):
            raise MemoryError(f"not registered: code={code}")
        memory[:] = 1
        return memory

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        pointers, sizes = _pointers(buffers)
        codes = self._store.batch_put_from(_names(keys), pointers, sizes)
        if any(codes):
            raise KeyError(f"not stored: code={min(codes)}")

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        pointers, sizes = _pointers(buffers)
        got = self._store.batch_get_into(_names(keys), pointers, sizes)
        if got != sizes:
            raise KeyError(f"missed: code={min(got)}")

    def clear(self, keys: Sequence[bytes]) -> None:
        self._store.batch_remove(_names(keys), force=True)

    def close(self) -> None:
        self._store.close()


def _names(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _pointers(buffers: Sequence[Bytes]) -> tuple[list[int], list[int]]:
    return [buffer.ctypes.data for buffer in buffers], [buffer.nbytes for buffer in buffers]


def _whole_mib(size_bytes: int) -> int:
    return -(-size_bytes // (1 << 20))
