"""The end of window and state copies: they live for minutes after their last use, while global KV lives for days."""

from kvstored.core.books import Books
from kvstored.core.calls import Reason
from kvstored.core.columns import READY
from kvstored.core.types import Part

LOOKS_MAX = 4096
"""Copies that one call looks at; the rest waits for the next."""


def expire_checkpoints(books: Books, now_s: float) -> int:
    """Forget window and state copies whose time is over and that nobody uses; answers how many."""
    copies = books.copies
    ended = 0
    for _ in range(min(len(books.mortal), LOOKS_MAX)):
        copy = books.mortal.popleft()
        if copies.state[copy] != READY or copies.part[copy] != Part.CHECKPOINT:
            continue
        due_s = float(books.blocks.last_s[copies.block[copy]]) + _lifetime_s(books, copy)
        if due_s > now_s or copies.readers[copy] or copies.fills[copy]:
            books.mortal.append(copy)
            continue
        books.drop_copy(copy, Reason.EXPIRED, now_s)
        ended += 1
    return ended


def _lifetime_s(books: Books, copy: int) -> float:
    """The longest retention among the groups that the copy has, or the daemon's default."""
    groups = books.layout_of(int(books.copies.block[copy])).spec.groups
    have = int(books.copies.have[copy])
    own = [group.retention_s for g, group in enumerate(groups) if have >> g & 1]
    return float(max(own, default=0)) or books.limits.checkpoint_ttl_s
