"""Redis over a Unix socket with hiredis, nothing persisted. Batches are pipelines of single commands in groups of 2 MiB: MSET and MGET
of as many bytes are two to four times slower.
"""

import importlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.adapters.base import Address, Bytes, Environment, Need, Store
from bench.peers.environment import python_environment, with_program
from bench.peers.processes import running

PACKAGES = ("redis-tools", "libjemalloc2", "liblzf1", "libatomic1")
GROUP_BYTES = 2 << 20


class Socket:
    def __init__(self, path: Path) -> None:
        self.address: Address = {"socket": str(path)}

    def chill(self) -> None:
        raise NotImplementedError("nothing is on disk")


def environment(way: str) -> Environment:
    """The program is redis-server, which in Debian is a name of redis-check-rdb."""
    made = python_environment("redis", [["redis==8.1.0", "hiredis==3.5.0"]])
    program, variables = with_program(
        "redis-server" if shutil.which("redis-server") else "redis-check-rdb", PACKAGES
    )
    link = made.folder / "bin" / "redis-server"
    if not link.exists():
        link.symlink_to(program)
    return Environment(made.python, made.folder, variables)


@contextmanager
def serve(environment: Environment, folder: Path, need: Need) -> Iterator[Socket]:
    path = folder / "redis.sock"
    command = [environment.program("redis-server"), "--port", "0", "--unixsocket", str(path)]
    command += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
    with running(command, folder, is_ready=path.exists, variables=environment.variables):
        yield Socket(path)


def connect(way: str, address: Address, index: int) -> "Redis":
    return Redis(address["socket"])


class Redis(Store):
    def __init__(self, path: str) -> None:
        # Any: the package is in the peer's environment only
        redis: Any = importlib.import_module("redis")
        importlib.import_module("hiredis")  # the parser in C, or this fails
        self._redis = redis.Redis(unix_socket_path=path)

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        if len(keys) == 1:
            done = [self._redis.set(keys[0], buffers[0].data)]
        else:
            done = []
            for at, end in _groups(buffers):
                pipeline = self._redis.pipeline(transaction=False)
                for key, buffer in zip(keys[at:end], buffers[at:end], strict=True):
                    pipeline.set(key, buffer.data)
                done += pipeline.execute()
        if not all(done):
            raise KeyError("not stored")

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        if len(keys) == 1:
            np.copyto(buffers[0], np.frombuffer(self._redis.get(keys[0]), np.uint8))
            return
        for at, end in _groups(buffers):
            pipeline = self._redis.pipeline(transaction=False)
            for key in keys[at:end]:
                pipeline.get(key)
            for value, buffer in zip(pipeline.execute(), buffers[at:end], strict=True):
                np.copyto(buffer, np.frombuffer(value, np.uint8))

    def clear(self, keys: Sequence[bytes]) -> None:
        self._redis.delete(*keys)

    def close(self) -> None:
        self._redis.close()


def _groups(buffers: Sequence[Bytes]) -> Iterator[tuple[int, int]]:
    step = max(1, GROUP_BYTES // buffers[0].nbytes)
    for at in range(0, len(buffers), step):
        yield at, min(at + step, len(buffers))
