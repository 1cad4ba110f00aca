"""What follows from the copies of one block: where it can be read from, which of its copies are clean, what it makes unreachable. Recomputed
from the rows."""

import numpy as np
from numpy.typing import NDArray

from kvstored.core.columns import CLEAN, READY, SINK
from kvstored.core.rows import Tables
from kvstored.core.types import Part, Rows, TierId, as_rows

NOT_READABLE = 255
READABLE = 0x80
_ALL_TIERS = 0x7F
BELOW_MAX = 65_536
"""Blocks below a lost one that become first victims: bounds the time that its loss takes."""


def refresh(tables: Tables, block: int) -> None:
    """Recompute from where a block can be read. Of several window/state copies the fastest counts: it is the one that is read."""
    copies, blocks = tables.copies, tables.blocks
    masks = [0, 0]
    checkpoint = -1
    for copy in tables.copies_of(block):
        if copies.state[copy] != READY:
            continue
        part = int(copies.part[copy])
        if part != Part.CHECKPOINT:
            masks[part] |= 1 << int(copies.tier[copy])
        elif checkpoint < 0 or copies.tier[copy] < copies.tier[checkpoint]:
            checkpoint = copy
    parts = tables.needed_parts(block)
    full, fast = _ALL_TIERS, 0
    for part in parts:
        mask = masks[part]
        full &= mask
        fast = max(fast, (mask & -mask).bit_length() - 1) if mask else NOT_READABLE
        if not mask:
            break
    readable = bool(parts) and fast != NOT_READABLE
    blocks.fast[block] = fast if readable else NOT_READABLE
    blocks.tiers[block] = full | READABLE if readable else 0
    blocks.have[block] = copies.have[checkpoint] if checkpoint >= 0 else 0


def recount_clean(tables: Tables, block: int, part: int) -> None:
    """A copy is clean while a slower tier has a ready copy that holds all it holds."""
    copies = tables.copies
    ready = [
        copy
        for copy in tables.copies_of(block)
        if int(copies.part[copy]) == part and copies.state[copy] == READY
    ]
    for copy in ready:
        clean = any(
            copies.tier[other] > copies.tier[copy]
            and not int(copies.have[copy]) & ~int(copies.have[other])
            for other in ready
        )
        was_clean = bool(copies.flags[copy] & CLEAN)
        if clean != was_clean:
            copies.flags[copy] ^= CLEAN
            tables.space.books[TierId(int(copies.tier[copy]))].dirty += 1 if was_clean else -1


def is_complete(tables: Tables, copy: int, group: int) -> bool:
    """Whether every shard of a window or state group is there."""
    layout = tables.layout_of(int(tables.copies.block[copy]))
    shards = layout.spec.shards if layout.spec.groups[group].sharded else 1
    pieces = tables.pieces
    ready = sum(
        1
        for piece in tables.pieces_of(copy)
        if pieces.group[piece] == group and pieces.state[piece] == READY
    )
    return ready == shards


def copies_below(tables: Tables, block: int) -> Rows:
    """Copies of what lies below a block and hangs on it alone: below another unreadable block nothing is reached."""
    below: list[int] = []
    pending = [block]
    while pending and len(below) < BELOW_MAX:
        children = tables.tree.children_of(pending.pop())
        below.extend(children)
        pending.extend(
            child
            for child in children
            if tables.tree.children[child] and tables.blocks.fast[child] != NOT_READABLE
        )
    return tables.copies_of_many(as_rows(below))


def are_plainly_idle(tables: Tables, copies: Rows) -> NDArray[np.bool_]:
    """Which of many copies are idle as `Books.is_idle` has it because nothing at all is in the way; others may be too."""
    table, at = tables.copies, copies.astype(np.intp)
    block = table.block[at]
    idle = (table.state[at] == READY) & (table.readers[at] == 0) & (table.fills[at] == 0)
    idle &= (table.kids[at] == 0) & (table.tier[at] != int(TierId.HBM))
    idle &= (table.flags[at] & SINK == 0) | (tables.tree.children[block] == 0)
    plain: NDArray[np.bool_] = idle & (tables.blocks.holds[block] == 0)
    return plain
