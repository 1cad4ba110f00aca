"""What the remote path cannot beat: buffers over bare loopback TCP, into and out of shared memory of another process.

One `recv_into` and one `sendall` a buffer, nothing else; hashed: each buffer once at each end that a put or get has to hash at.
`python -m bench.bare_tcp DESCRIPTOR RING_BYTES` is that other process.
"""

import mmap
import os
import socket
import struct
import subprocess
import sys
from types import TracebackType
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.machine import REPOSITORY

Bytes = NDArray[np.uint8]

_COMMAND = struct.Struct("<BBII")
"""Put or get, hashed or not, bytes of a buffer, buffers."""
_PUT, _GET = 0, 1


class BareTcp:
    """One connection to a process of its own, which goes through a ring of shared memory in turn."""

    def __init__(self, ring_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._socket = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with theirs:
            command = [sys.executable, "-m", "bench.bare_tcp", str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*command, str(ring_bytes)], cwd=REPOSITORY, pass_fds=[theirs.fileno()]
            )
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._process.wait(10)

    def put(self, sources: list[Bytes], *, is_hashed: bool) -> None:
        self._ask(_PUT, sources, is_hashed=is_hashed)
        _send(self._socket, sources, is_hashed=is_hashed)
        self._wait()

    def get(self, targets: list[Bytes], *, is_hashed: bool) -> None:
        self._ask(_GET, targets, is_hashed=is_hashed)
        _receive(self._socket, targets, is_hashed=is_hashed)

    def _ask(self, what: int, buffers: list[Bytes], *, is_hashed: bool) -> None:
        self._socket.sendall(_COMMAND.pack(what, is_hashed, buffers[0].size, len(buffers)))

    def _wait(self) -> None:
        if self._socket.recv(1) != b".":
            raise ConnectionError("the process at the other end died")


def _send(connected: socket.socket, buffers: list[Bytes], *, is_hashed: bool) -> None:
    for buffer in buffers:
        connected.sendall(buffer.data)
        if is_hashed:
            _hash(buffer)


def _receive(connected: socket.socket, buffers: list[Bytes], *, is_hashed: bool) -> None:
    for buffer in buffers:
        if connected.recv_into(buffer.data, buffer.size, socket.MSG_WAITALL) != buffer.size:
            raise ConnectionError("cut in the middle of a buffer")
        if is_hashed:
            _hash(buffer)


def _hash(buffer: Bytes) -> None:
    hasher = xxhash.xxh3_64()
    hasher.update(buffer.data)
    hasher.intdigest()


def main() -> None:
    connected = socket.socket(fileno=int(sys.argv[1]))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ring_bytes = int(sys.argv[2])
    descriptor = os.memfd_create("kvstored-bench")
    os.posix_fallocate(descriptor, 0, ring_bytes)
    ring = np.frombuffer(mmap.mmap(descriptor, ring_bytes), dtype=np.uint8)
    ring[:] = 1
    connected.sendall(b".")
    at = 0
    while asked := connected.recv(_COMMAND.size, socket.MSG_WAITALL):
        what, is_hashed, size, count = _COMMAND.unpack(asked)
        at = 0 if at + size * count > ring_bytes else at
        buffers = list(ring[at : at + size * count].reshape(count, size))
        at += size * count
        if what == _PUT:
            _receive(connected, buffers, is_hashed=bool(is_hashed))
            connected.sendall(b".")
        else:
            # the receiver hashes: what lies here was hashed when it was put
            _send(connected, buffers, is_hashed=False)


if __name__ == "__main__":
    main()
