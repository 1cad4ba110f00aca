"""Recovery of many plain copies at once, as columns: a million records in seconds.

Plain: the piece is a whole required copy (one piece), its block is full and has no copy yet. Everything else goes the way of single pieces.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.calls import Fingerprint, Recovered
from kvstored.core.columns import READY, UNVERIFIED
from kvstored.core.policies.base import budget_of
from kvstored.core.readability import READABLE
from kvstored.core.types import (
    Extent,
    Fingerprints,
    Heat,
    Layout,
    NamespaceId,
    Part,
    Rows,
    TierId,
)

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RecoveredColumns:
    """Pieces of one namespace and of one extent each, as a scan found them; every array has a row a piece."""

    fingerprints: Fingerprints
    parents: Fingerprints
    group: NDArray[np.uint16]
    shard: NDArray[np.uint16]
    length: NDArray[np.uint64]
    checksum: NDArray[np.uint64]
    extents: NDArray[np.uint32]
    """(n, 3): segment, start, units."""
    generation: NDArray[np.uint64]
    depth: NDArray[np.uint32]
    valid: NDArray[np.uint32]
    hits: NDArray[np.uint32]
    last_s: NDArray[np.float64]
    leased: Mask
    content: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.group)

    def fingerprint(self, i: int) -> Fingerprint:
        return int(self.fingerprints[i, 0]), int(self.fingerprints[i, 1])

    def parent(self, i: int) -> Fingerprint:
        return int(self.parents[i, 0]), int(self.parents[i, 1])

    def extent(self, i: int) -> Extent:
        segment, start, units = self.extents[i].tolist()
        return Extent(segment, start, units)

    def piece(self, i: int) -> Recovered:
        return Recovered(
            fingerprint=self.fingerprint(i),
            parent=self.parent(i),
            group=int(self.group[i]),
            shard=int(self.shard[i]),
            length=int(self.length[i]),
            checksum=int(self.checksum[i]),
            place=(self.extent(i),),
            generation=int(self.generation[i]),
            depth=int(self.depth[i]),
            valid_tokens=int(self.valid[i]),
            hits=int(self.hits[i]),
            heat=Heat.COLD,
            last_s=float(self.last_s[i]),
            leased=bool(self.leased[i]),
            content=int(self.content[i]),
        )


def is_plain(books: Books, layout: Layout, columns: RecoveredColumns) -> Mask:
    """Which pieces `recover_plain` may take."""
    spec = layout.spec
    single = [
        g
        for g, group in enumerate(spec.groups)
        if group.is_required
        and layout.pieces_of(group.part) == 1
        and _only_part(layout, group.part)
    ]
    rows = books.index.find(columns.fingerprints)
    vacant = (rows < 0) | (books.blocks.first_copy[rows] < 0)
    # By halves: of two that share one the second is taken singly, which is right for any piece.
    _, first = np.unique(columns.fingerprints[:, 0], return_index=True)
    is_first = np.zeros(len(columns), dtype=np.bool_)
    is_first[first] = True
    full = columns.valid == spec.block_tokens
    mask: Mask = np.isin(columns.group, single) & (columns.shard == 0)
    plain: Mask = mask & vacant & is_first & full & ~columns.leased
    return plain


def recover_plain(
    books: Books, tier: TierId, ns: NamespaceId, columns: RecoveredColumns, rows: NDArray[np.int64]
) -> None:
    """Take the plain pieces at `rows`, whose space is claimed. Their copies are offered to the policy when recovery is done."""
    blocks = _blocks(books, ns, columns, rows)
    _link(books, ns, columns, rows, blocks)
    copies = _copies(books, tier, ns, columns, rows, blocks)
    if tier is TierId.NVME:
        for i in np.flatnonzero(columns.content[rows]).tolist():
            content = int(columns.content[rows[i]]), int(books.copies.part[copies[i]])
            books.space.frames.settle(content, int(copies[i]), is_alone=True)
    count_kids(books, tier, blocks, copies)
    if books.layouts[ns].spec.sink_tokens:
        is_root = books.tree.depth[blocks] == 0
        for copy, block in zip(copies[is_root].tolist(), blocks[is_root].tolist(), strict=True):
            books.count_sink(copy, block, tier)


def _only_part(layout: Layout, part: Part) -> bool:
    other = Part.SPARSE if part is Part.DENSE else Part.DENSE
    return not layout.groups_of(other)


def _blocks(
    books: Books, ns: NamespaceId, columns: RecoveredColumns, rows: NDArray[np.int64]
) -> Rows:
    """Block rows, made where they are not standing in as parents already."""
    table = books.blocks
    fingerprints = columns.fingerprints[rows]
    blocks = books.index.find(fingerprints)
    fresh = np.flatnonzero(blocks < 0)
    blocks[fresh] = _made(books, ns, fingerprints[fresh])
    table.valid[blocks] = columns.valid[rows]
    table.hits[blocks] = columns.hits[rows]
    table.last_s[blocks] = columns.last_s[rows]
    table.generation[blocks] = columns.generation[rows]
    table.content[blocks] = columns.content[rows]
    books.saw_generation(int(columns.generation[rows].max()))
    return blocks


def _link(
    books: Books,
    ns: NamespaceId,
    columns: RecoveredColumns,
    rows: NDArray[np.int64],
    blocks: Rows,
) -> None:
    """Shallow ones first: linking a subtree late costs its size. The blocks are full and have no copies, so that the rows' links are all
    there is to do."""
    tree, tokens = books.tree, books.layouts[ns].spec.block_tokens
    parents = columns.parents[rows]
    loose = np.flatnonzero((parents != 0).any(axis=1) & (tree.parent[blocks] < 0))
    loose = loose[np.argsort(columns.depth[rows[loose]], kind="stable")]
    parents = parents[loose]
    above = books.index.find(parents)
    absent = np.flatnonzero(above < 0)
    distinct, which = _distinct(parents[absent])
    stand_ins = _made(books, ns, distinct)
    books.blocks.valid[stand_ins] = tokens
    books.blocks.generation[stand_ins] = [books.next_generation() for _ in distinct]
    above[absent] = stand_ins[which]
    fit = (books.blocks.ns[above] == ns) & (books.blocks.valid[above] == tokens)
    tree.link_many(blocks[loose[fit]], above[fit])
    for parent in stand_ins[tree.children[stand_ins] == 0].tolist():
        books.drop_idle(parent)


def _made(books: Books, ns: NamespaceId, fingerprints: Fingerprints) -> Rows:
    """Roots without copies."""
    table = books.blocks
    made: Rows = table.take_many(len(fingerprints))
    table.ns[made] = ns
    books.tree.ensure(table.capacity)
    books.index.put_many(made, fingerprints)
    books.tree.add_many(made)
    return made


def _distinct(fingerprints: Fingerprints) -> tuple[Fingerprints, NDArray[np.int64]]:
    """Each once, and which of these each was."""
    order = np.lexsort((fingerprints[:, 1], fingerprints[:, 0]))
    ordered = fingerprints[order]
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    which = np.empty(len(order), dtype=np.int64)
    which[order] = np.cumsum(is_first) - 1
    return ordered[is_first], which


def _copies(
    books: Books,
    tier: TierId,
    ns: NamespaceId,
    columns: RecoveredColumns,
    rows: NDArray[np.int64],
    blocks: Rows,
) -> Rows:
    table, pieces = books.copies, books.pieces
    group = books.layouts[ns].spec.groups[int(columns.group[rows[0]])]
    extents = columns.extents[rows]
    copies = table.take_many(len(rows))
    table.block[copies] = blocks
    table.tier[copies] = tier
    table.part[copies] = group.part
    table.state[copies] = READY
    table.units[copies] = extents[:, 2]
    if tier <= TierId.DRAM:
        table.flags[copies] |= UNVERIFIED
    at = pieces.take_many(len(rows))
    pieces.copy[at] = copies
    pieces.group[at] = columns.group[rows]
    pieces.shard[at] = columns.shard[rows]
    pieces.state[at] = READY
    pieces.length[at] = columns.length[rows]
    pieces.checksum[at] = columns.checksum[rows]
    pieces.segment[at], pieces.start[at], pieces.units[at] = extents.T
    table.first_piece[copies] = at
    books.blocks.first_copy[blocks] = copies
    books.blocks.fast[blocks] = tier
    books.blocks.tiers[blocks] = 1 << tier | READABLE
    book = books.space.books[tier]
    book.copies += len(rows)
    book.dirty += len(rows)
    book.used[budget_of(group.part)] += int(extents[:, 2].sum())
    if tier is TierId.DRAM:
        for copy in copies.tolist():
            books.wait(copy)
    return copies


def count_kids(books: Books, tier: TierId, blocks: Rows, copies: Rows) -> None:
    """Count the new copies at their parents' copies, and the children that were there before at the new ones."""
    table, tree = books.copies, books.tree
    part = int(table.part[copies[0]])
    is_new = np.zeros(books.blocks.capacity, dtype=np.bool_)
    is_new[blocks] = True
    parents = tree.parent[blocks]
    parents = parents[parents >= 0]
    above = copies_in(books, parents[~is_new[parents]], tier, part)
    np.add.at(table.kids, above[above >= 0], 1)
    owners, children = tree.children_of_many(blocks)
    has_copy = copies_in(books, children, tier, part) >= 0
    table.kids[copies] = np.bincount(owners[has_copy], minlength=len(copies))


def copies_in(books: Books, blocks: Rows, tier: TierId, part: int) -> Rows:
    """The copy of each block in a tier and part, -1 where there is none."""
    table = books.copies
    at = books.blocks.first_copy[blocks]
    other = np.flatnonzero(at >= 0)
    while len(other):
        here = at[other]
        other = other[(table.tier[here] != int(tier)) | (table.part[here] != part)]
        at[other] = table.next[at[other]]
        other = other[at[other] >= 0]
    return at
