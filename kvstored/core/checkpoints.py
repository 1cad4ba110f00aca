"""Which window and state copies end now."""

from kvstored.core.books import Books
from kvstored.core.calls import Reason
from kvstored.core.columns import READY
from kvstored.core.history import Forgotten
from kvstored.core.lifetimes import due_s, lifetime_s
from kvstored.core.types import Part, TierId

LOOKS_MAX = 4096
"""Copies that one call looks at; the rest waits for the next."""


def expire_checkpoints(books: Books, now_s: float) -> int:
    """Forget window and state copies whose time is over; one that is in use then has another lifetime. Answers how many."""
    copies = books.copies
    ended = 0
    for _ in range(LOOKS_MAX):
        copy = books.lifetimes.take(now_s)
        if copy is None:
            break
        if copies.state[copy] != READY or copies.part[copy] != Part.CHECKPOINT:
            continue
        end_s = due_s(books, copy, books.limits.checkpoint_ttl_s)
        if end_s <= now_s and (copies.readers[copy] or copies.fills[copy]):
            end_s = now_s + lifetime_s(books, copy, books.limits.checkpoint_ttl_s)
        if end_s > now_s:
            books.lifetimes.watch(copy, end_s)
            continue
        fingerprint = books.fingerprint(int(copies.block[copy]))
        line = Forgotten(Reason.EXPIRED, TierId(int(copies.tier[copy])), now_s)
        books.drop_copy(copy, Reason.EXPIRED, now_s)
        books.history.lapse(fingerprint, line)
        ended += 1
    return ended
