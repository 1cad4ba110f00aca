"""Links that are lent for the time of a `with`, so many at a time."""

from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

Lent = TypeVar("Lent")


class Slots:
    """A semaphore that costs a tenth of threading's, which is written in Python."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def acquire(self, timeout_s: float) -> bool:
        try:
            self._free.get(block=False)
        except Empty:
            return timeout_s > 0 and self._waited(timeout_s)
        return True

    def release(self) -> None:
        self._free.put(None)

    def _waited(self, timeout_s: float) -> bool:
        try:
            self._free.get(timeout=timeout_s)
        except Empty:
            return False
        return True


class Lender(Protocol[Lent]):
    def borrow(self, timeout_s: float) -> Lent: ...

    def give_back(self, lent: Lent) -> None: ...


class Borrowed(AbstractContextManager[Lent]):
    """Written out: entering and leaving a generator costs more than what is done in them."""

    __slots__ = ("_lender", "_lent", "_timeout_s")

    def __init__(self, lender: Lender[Lent], timeout_s: float) -> None:
        self._lender = lender
        self._timeout_s = timeout_s

    def __enter__(self) -> Lent:
        self._lent = self._lender.borrow(self._timeout_s)
        return self._lent

    def __exit__(self, *failure: object) -> None:
        self._lender.give_back(self._lent)
