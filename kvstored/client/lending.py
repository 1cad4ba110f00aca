"""Links that are lent for the time of a `with`."""

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

Lent = TypeVar("Lent")


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
