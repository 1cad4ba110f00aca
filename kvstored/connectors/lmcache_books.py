"""What the L2 adapter remembers of LMCache's objects: which it stored, for LMCache's accounts, and which are locked. No I/O."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")

OBJECTS_MAX = 1 << 18
LOCKS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Stored(Generic[K]):
    """An object of LMCache's that this adapter put; `space` is the digest of its namespace."""

    key: K
    size_bytes: int
    space: bytes


class Ledger(Generic[K]):
    """Objects by block key, the oldest forgotten first when there are too many: LMCache then takes them for gone. Thread-safe."""

    def __init__(self, objects_max: int = OBJECTS_MAX) -> None:
        self._objects_max = objects_max
        self._objects: OrderedDict[bytes, Stored[K]] = OrderedDict()
        self._lock = threading.Lock()

    def add(
        self, objects: Iterable[tuple[bytes, Stored[K]]]
    ) -> tuple[list[Stored[K]], list[Stored[K]]]:
        """Those that are new, and those that were forgotten for them."""
        new: list[Stored[K]] = []
        forgotten: list[Stored[K]] = []
        with self._lock:
            for block_key, stored in objects:
                if block_key in self._objects:
                    continue
                self._objects[block_key] = stored
                new.append(stored)
                if len(self._objects) > self._objects_max:
                    forgotten.append(self._objects.popitem(last=False)[1])
        return new, forgotten

    def remove(self, block_keys: Iterable[bytes]) -> list[Stored[K]]:
        with self._lock:
            found = [self._objects.pop(key, None) for key in block_keys]
        return [each for each in found if each is not None]

    def size_of(self, block_key: bytes) -> int | None:
        found = self._objects.get(block_key)
        return None if found is None else found.size_bytes

    def items(self) -> list[tuple[bytes, Stored[K]]]:
        with self._lock:
            return list(self._objects.items())

    def __len__(self) -> int:
        return len(self._objects)


@dataclass(eq=False, slots=True)
class Lock:
    """One pin of the daemon; `left`: keys of it that are still locked."""

    space: bytes
    pin: int
    left: int


class Locks:
    """A key may be locked several times; each unlock ends the oldest. Thread-safe."""

    def __init__(self) -> None:
        self._locks: OrderedDict[bytes, list[Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, block_keys: Sequence[bytes], lock: Lock) -> list[Lock]:
        """Locks that fell out since nobody ever unlocked so many: to be unpinned, their time is over soon anyway."""
        with self._lock:
            for key in block_keys:
                self._locks.setdefault(key, []).append(lock)
            dropped = [
                self._locks.popitem(last=False)[1]
                for _ in range(max(len(self._locks) - LOCKS_MAX, 0))
            ]
        return [each for locks in dropped for each in locks if self._is_last(each)]

    def unlock(self, block_keys: Iterable[bytes]) -> list[Lock]:
        """Locks whose last key this was: to be unpinned."""
        ended: list[Lock] = []
        with self._lock:
            for key in block_keys:
                locks = self._locks.get(key)
                if not locks:
                    continue
                lock = locks.pop(0)
                if not locks:
                    del self._locks[key]
                if self._is_last(lock):
                    ended.append(lock)
        return ended

    def __len__(self) -> int:
        return len(self._locks)

    @staticmethod
    def _is_last(lock: Lock) -> bool:
        lock.left -= 1
        return lock.left == 0
