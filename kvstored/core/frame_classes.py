"""Temperature of blocks that are stored against others: an I frame is as warm as the warmest P frame that refers to it, since whoever reads that reads it too;
a P frame that no running request needs is cold, whatever its block is in memory.
"""

from kvstored.core.columns import READY
from kvstored.core.frames import NOBODY
from kvstored.core.rows import Tables
from kvstored.core.types import Heat, Rows, TierId, as_rows


def heat_of(tables: Tables, copy: int) -> Heat:
    """The class of a copy; that of its block everywhere but on NVMe."""
    block = tables.copies.block.item(copy)
    own, frames = tables.heat(block), tables.space.frames
    if tables.copies.tier[copy] != int(TierId.NVME) or not len(frames):
        return own
    if refers(tables, copy):
        return own if tables.blocks.holds[block] else Heat.COLD
    return min(own, frames.warmth(copy, Heat.COLD))


def refers(tables: Tables, copy: int) -> bool:
    """Whether it is on NVMe, and stored as what it differs by from another one."""
    if tables.copies.tier.item(copy) != int(TierId.NVME) or not len(tables.space.frames):
        return False
    return any(tables.space.frames.refers(tables.place(p)) for p in tables.pieces_of(copy))


def warm_base(tables: Tables, copy: int) -> None:
    """This copy is stored against another one now, which is as warm as it."""
    heat = tables.heat(tables.copies.block.item(copy))
    for piece in tables.pieces_of(copy):
        extent = tables.place(piece)[0]
        owner = tables.space.frames.owner_of_base((extent.segment, extent.start))
        if owner != NOBODY:
            tables.space.frames.warm(owner, heat)


def warmed_bases(tables: Tables, copies: Rows) -> Rows:
    """These copies were used: the ones that they refer to, each once and in their order, are as warm as they are from now on."""
    frames, table, blocks = tables.space.frames, tables.copies, tables.blocks
    if not len(frames):
        return as_rows([])
    told = (table.tier[copies] == int(TierId.NVME)) & (table.state[copies] == READY)
    told &= blocks.content[table.block[copies]] != 0
    at = copies[told]
    pieces = table.first_piece[at]
    heads = zip(
        tables.pieces.segment[pieces].tolist(), tables.pieces.start[pieces].tolist(), strict=True
    )
    found: dict[int, None] = {}
    for copy, head in zip(at.tolist(), heads, strict=True):
        owner = frames.owner_of_base(head)
        if owner != NOBODY:
            frames.warm(owner, tables.heat(table.block.item(copy)))
            found[owner] = None
    return as_rows([owner for owner in found if table.state[owner] == READY])
