"""What a peer must offer to be measured: a server side that the benchmark starts, and a store side that lives in a worker process.

A store's module is imported in the peer's own environment: at its top it imports nothing but the standard library and numpy, and
nothing of kvstored.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Address = dict[str, str]
"""What a worker needs to reach a server."""
STORED = "stored"
"""In an address: the file that holds what is read from disk."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a server is started for. `capacity_bytes`: what it must be able to hold with room to spare;
    `blocks`: most of one call."""

    block_bytes: int
    capacity_bytes: int
    blocks: int
    clients: int
    has_disk: bool


class Server(Protocol):
    address: Address

    def chill(self) -> None:
        """Everything stored is on disk only afterwards; clients must connect again."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a peer's programs are and what they must find."""

    python: str
    folder: Path
    variables: dict[str, str]

    def program(self, name: str) -> str:
        return str(Path(self.python).parent / name)


class Peer(Protocol):
    """The server side of an adapter module, in the benchmark's process."""

    def environment(self, way: str) -> Environment:
        """Installs what is lacking; raises Missing with the reason."""

    def serve(
        self, environment: Environment, folder: Path, need: Need
    ) -> AbstractContextManager[Server]: ...


class Store(ABC):
    """One client of a peer, in a worker process. Keys are 32 bytes. A call that does not do all of it raises."""

    def buffers(self, count: int, block_bytes: int) -> list[Bytes]:
        """Memory that the peer copies from and to; as it asks for it."""
        return list(np.zeros(count * block_bytes, np.uint8).reshape(count, block_bytes))

    @abstractmethod
    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None: ...

    def settle(self) -> bool:
        """Waits for puts that returned before they were stored; whether puts do so here."""
        return False

    @abstractmethod
    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None: ...

    def read_back(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        """As `get`, for the check of the bytes: a way of getting that copies nothing copies here."""
        self.get(keys, buffers)

    @abstractmethod
    def clear(self, keys: Sequence[bytes]) -> None:
        """Forgets these, so that their room is free."""

    @abstractmethod
    def close(self) -> None: ...
