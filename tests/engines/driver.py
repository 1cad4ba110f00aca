"""An engine's own storage path with a connector at its end, as the tests of faults drive it: numbered chunks whose bytes follow from the number."""

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvstored.connectors.breaker import State
from kvstored.connectors.guarded import GuardedNamespace

LIMITS = {"lookup": "500ms", "load": "1s", "store": "1s", "probe": "500ms", "revision": "weights-1"}
"""Options of the connector, so that faults cost seconds."""
SLOWEST_S = 0.5 + 1.0 + 1.0 + 1.0 + 3.0
"""What one round may take: each limit, the second that a client gives a daemon beyond its deadline, and a busy machine."""


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def content(chunk: int, size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(chunk).integers(0, 256, size, dtype=np.uint8)


class Driver(ABC):
    """`close` ends it, and fails where a thread of the engine has died."""

    @abstractmethod
    def store(self, chunks: Iterable[int]) -> int:
        """Chunks that the engine was told are stored."""

    @abstractmethod
    def load(self, chunks: Iterable[int]) -> int:
        """Chunks of this prefix that the engine would use; each has its own bytes, or this fails."""

    @abstractmethod
    def guarded(self) -> list[GuardedNamespace]:
        """Namespaces of it that are there already."""

    @abstractmethod
    def close(self) -> None: ...

    def up(self, wait_s: float = 30.0) -> None:
        for each in self.guarded():
            assert each.connected(wait_s), "the daemon is reached"

    @property
    def states(self) -> set[State]:
        return {each.state for each in self.guarded()}


def quiet() -> None:
    """Engines log a line a miss."""
    for name in ("sglang", "lmcache"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
