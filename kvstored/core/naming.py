"""Blocks that a caller names: their rows, and forgetting them."""

from collections.abc import Callable, Sequence

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Reason, Reserve, TouchEvent
from kvstored.core.columns import FILLING
from kvstored.core.leaving import drop_path
from kvstored.core.readability import NOT_READABLE
from kvstored.core.types import KeyBatch, NamespaceId, Rows, TierId, as_rows, chosen_keys
from kvstored.errors import Conflict

PATH_EVERY = 64
"""After so many blocks that went one by one, a path is tried again."""


def known_rows(books: Books, ns: NamespaceId, keys: KeyBatch) -> list[int]:
    """Rows of the keys in their order, each once; those of mere parents included."""
    rows = books.index.find(keys.fingerprints)
    there = (rows >= 0) & (books.blocks.ns[rows] == ns)
    return list(dict.fromkeys(rows[there].tolist()))


def rows_leaf_first(books: Books, ns: NamespaceId, keys: KeyBatch) -> Rows:
    """The same, deepest first, to forget them in slices."""
    rows = as_rows(known_rows(books, ns, keys))
    return rows[np.argsort(-books.tree.depth[rows], kind="stable")]


def readable_rows(books: Books, ns: NamespaceId, keys: KeyBatch) -> list[int]:
    fast = books.blocks.fast
    return [row for row in known_rows(books, ns, keys) if fast[row] != NOT_READABLE]


def readable_keys(books: Books, ns: NamespaceId, keys: KeyBatch) -> KeyBatch:
    """The keys of `readable_rows`, one a row."""
    rows = books.index.find(keys.fingerprints)
    there = (rows >= 0) & (books.blocks.ns[rows] == ns) & (books.blocks.fast[rows] != NOT_READABLE)
    at = np.flatnonzero(there)
    _, first = np.unique(rows[at], return_index=True)
    return chosen_keys(keys, at[np.sort(first)])


def count_reads(books: Books, ns: NamespaceId, keys: KeyBatch, now_s: float) -> int:
    """Keys were read without a lease, and count as hits like any others; how many of their blocks are still readable.

    Of the latest read first, each read from head to tail; a key that was read several times comes as often.
    """
    rows = books.index.find(keys.fingerprints)
    there = (rows >= 0) & (books.blocks.ns[rows] == ns) & (books.blocks.fast[rows] != NOT_READABLE)
    found, first, times = np.unique(rows[there], return_index=True, return_counts=True)
    order = np.argsort(first)
    blocks = found[order].astype(np.int32)
    books.blocks.hits[blocks] += (times[order] - 1).astype(np.uint32)
    books.touch(blocks, TouchEvent.HIT, now_s)
    return len(blocks)


def is_being_put(books: Books, block: int, is_target: Callable[[int], bool]) -> bool:
    """A fill is open on the block, or shards of it are still to come; targets of tasks do not count."""
    copies = books.copies
    return any(
        copies.tier[copy] == int(TierId.DRAM)
        and copies.state[copy] == FILLING
        and not is_target(copy)
        for copy in books.copies_of(block)
    )


def check_replaceable(
    books: Books,
    call: Reserve,
    current: Sequence[int],
    generations: Sequence[int],
    is_target: Callable[[int], bool],
) -> None:
    """Conflict unless all keys have the given generations, nobody is writing one, and the namespace is mutable."""
    if not books.layouts[call.ns].spec.mutable:
        raise Conflict("blocks of this namespace are immutable: declare it mutable")
    for i, (now, then) in enumerate(zip(current, generations, strict=True)):
        if now != then:
            raise Conflict(f"generation moved on: index={i} current={now} given={then}")
    for i, row in enumerate(books.index.find(call.keys.fingerprints).tolist()):
        if row >= 0 and is_being_put(books, row, is_target):
            raise Conflict(f"somebody is writing it: index={i}")


def forget_blocks(books: Books, rows: Sequence[int], reason: Reason, now_s: float) -> int:
    """Drop every copy of these blocks, deepest first; open fills on them are lost when they commit. Answers how many were readable."""
    order = as_rows(rows)
    order = order[np.argsort(-books.tree.depth[order], kind="stable")]
    parent, fast = books.tree.parent, books.blocks.fast
    forgotten = begin = try_from = 0
    while begin < len(order):
        is_path = begin + 1 < len(order) and parent[order[begin]] == order[begin + 1]
        if is_path and begin >= try_from:
            try_from = begin + PATH_EVERY
            readable = fast[order[begin:]] != NOT_READABLE
            if gone := drop_path(books, order[begin:], reason, now_s):
                forgotten += int(np.count_nonzero(readable[:gone]))
                begin += gone
                try_from = begin
                continue
        block = int(order[begin])
        forgotten += books.blocks.ns[block] >= 0 and fast[block] != NOT_READABLE
        for copy in list(books.copies_of(block)):
            books.drop_copy(copy, reason, now_s)
        begin += 1
    return int(forgotten)
