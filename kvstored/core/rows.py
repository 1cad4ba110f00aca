"""Blocks, copies and pieces as linked rows: finding, making, linking and unlinking them.

What a change means for readability, eviction and accounting is decided in books.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import log2

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import Fingerprint, PieceRow, TierLimits
from kvstored.core.columnar import Places
from kvstored.core.columns import FILLING, READY, SINK, SUSPECT, Blocks, Copies, Pieces
from kvstored.core.groups import pieces_needed
from kvstored.core.index import FingerprintIndex
from kvstored.core.policies.base import budget_of
from kvstored.core.space import Space, units_in
from kvstored.core.tags import Tags
from kvstored.core.tree import PrefixTree
from kvstored.core.types import (
    UNIT_BYTES,
    Extent,
    Fingerprints,
    Heat,
    Layout,
    Part,
    Place,
    Rows,
    TierId,
    as_rows,
)
from kvstored.core.windows import Windows

FLOPS_A_TOKEN = 16e9
"""Of prefill, where a namespace does not say: a model of 8 billion parameters."""


class Tables:
    """The tables, the index, the tree and the space, kept in step with each other.

    `recent`: blocks within the recent window of running requests. `pin_holds`: of a block's holds, those that are pins. `partials`:
    partial blocks by their parent.
    """

    def __init__(self, *, tiers: Sequence[TierLimits], epoch: int) -> None:
        self.blocks = Blocks()
        self.copies = Copies()
        self.pieces = Pieces()
        self.index = FingerprintIndex()
        self.tree = PrefixTree()
        self.space = Space(tiers)
        self.layouts: dict[int, Layout] = {}
        self.long_places: dict[int, Place] = {}
        self.partials: dict[int, set[int]] = {}
        self.recent = Windows()
        self.tags = Tags(self.index)
        self.pin_holds: Counter[int] = Counter()
        self._needed: dict[tuple[int, int], tuple[Part, ...]] = {}
        self._sink_blocks: Rows = np.zeros(64, dtype=np.int32)
        self._generation = epoch << 32

    # ---- namespaces and blocks

    def add_layout(self, layout: Layout) -> None:
        self.layouts[layout.id] = layout
        if layout.id >= len(self._sink_blocks):
            more = np.zeros(layout.id, dtype=np.int32)
            self._sink_blocks = np.concatenate((self._sink_blocks, more))
        self._sink_blocks[layout.id] = -(-layout.spec.sink_tokens // layout.spec.block_tokens)
        self.space.has_checkpoints |= bool(layout.groups_of(Part.CHECKPOINT))

    def layout_of(self, block: int) -> Layout:
        return self.layouts[int(self.blocks.ns[block])]

    def needed_parts(self, block: int) -> tuple[Part, ...]:
        """Required parts of a block; one too short for a row of any of a part's groups does without that part."""
        at = int(self.blocks.ns[block]), int(self.blocks.valid[block])
        needed = self._needed.get(at)
        if needed is None:
            parts = (Part.DENSE, Part.SPARSE)
            needed = tuple(
                part for part in parts if pieces_needed(self.layouts[at[0]], part, at[1])
            )
            self._needed[at] = needed
        return needed

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def next_generations(self, count: int) -> NDArray[np.uint64]:
        first = self._generation + 1
        self._generation += count
        return np.arange(first, first + count, dtype=np.uint64)

    def saw_generation(self, generation: int) -> None:
        """A recovered copy has this one: later ones are greater."""
        self._generation = max(self._generation, generation)

    def fingerprint(self, block: int) -> Fingerprint:
        low, high = self.index.fingerprints[block].tolist()
        return low, high

    def block_of(self, fingerprint: Fingerprint) -> int:
        """Its row, -1 where there is none."""
        return self.index.find_one(fingerprint)

    def parent_fingerprint(self, block: int) -> Fingerprint:
        parent = int(self.tree.parent[block])
        return self.fingerprint(parent) if parent >= 0 else (0, 0)

    def ensure_block(self, ns: int, fingerprint: Fingerprint, valid_tokens: int) -> int:
        """The block's row, made as a root without copies if there is none."""
        block = self.index.find_one(fingerprint)
        if block >= 0:
            return block
        block = self.blocks.take()
        self.blocks.ns[block] = ns
        self.blocks.valid[block] = valid_tokens
        self.blocks.generation[block] = self.next_generation()
        self.tree.ensure(self.blocks.capacity)
        self.index.put(block, *fingerprint)
        self.tree.add(block)
        return block

    def fingerprints_of(self, blocks: Rows) -> Fingerprints:
        return self.index.fingerprints.take(blocks, axis=0)

    def weight(self, copy: int) -> int:
        """What a hit of it saves a byte, in FLOPs, as a power of two in halves: blocks are weighed in few classes."""
        block = self.copies.block.item(copy)
        spec = self.layouts[self.blocks.ns.item(block)].spec
        tokens = self.blocks.valid.item(block)
        flops = spec.flops_base or FLOPS_A_TOKEN
        flops += spec.flops_slope * (self.tree.depth.item(block) * spec.block_tokens + tokens / 2)
        density = tokens * flops / (max(1, self.copies.units.item(copy)) * UNIT_BYTES)
        return round(2 * log2(density)) if density > 0 else 0

    def are_sinks(self, blocks: Rows) -> NDArray[np.bool_]:
        sinks = self._sink_blocks.take(self.blocks.ns.take(blocks))
        mask: NDArray[np.bool_] = self.tree.depth.take(blocks) < sinks
        return mask

    def sink_blocks(self, ns: int) -> int:
        """Blocks of a path that are its sink."""
        return int(self._sink_blocks[ns])

    def heat(self, block: int) -> Heat:
        if self.tree.depth.item(block) < self._sink_blocks.item(self.blocks.ns.item(block)):
            return Heat.SINK
        if block in self.recent:
            return Heat.RECENT
        shared = self.blocks.hits.item(block) or self.tree.children.item(block) > 1
        return Heat.SHARED if shared else Heat.COLD

    def link(self, block: int, parent: int) -> bool:
        """Make `parent` the parent of a block that has none; a cycle or an oversize subtree leaves it a root (False), and so does a
        parent that is no full block of the same namespace."""
        full = self.blocks.valid[parent] == self.layout_of(parent).spec.block_tokens
        same = self.blocks.ns[parent] == self.blocks.ns[block]
        if not (full and same) or self.tree.parent[block] >= 0 or not self.tree.link(block, parent):
            return False
        for copy in self.copies_of(block):
            above = self.copy_in(parent, int(self.copies.tier[copy]), int(self.copies.part[copy]))
            if above >= 0:
                self.copies.kids[above] += 1
        if self.blocks.valid[block] < self.layout_of(block).spec.block_tokens:
            self.partials.setdefault(parent, set()).add(block)
        return True

    def resize(self, block: int, valid_tokens: int) -> bool:
        """A block that is only known as a parent or by a hold takes the size of its first copy; a stored one keeps its own."""
        blocks = self.blocks
        if blocks.valid[block] == valid_tokens:
            return True
        if blocks.first_copy[block] >= 0 or self.tree.children[block]:
            return False
        blocks.valid[block] = valid_tokens
        parent = int(self.tree.parent[block])
        self.forget_partial(block, parent)
        if parent >= 0 and valid_tokens < self.layout_of(block).spec.block_tokens:
            self.partials.setdefault(parent, set()).add(block)
        return True

    def forget_partial(self, block: int, parent: int) -> None:
        """The block is no partial child of this parent any more."""
        partials = self.partials.get(parent)
        if partials is not None:
            partials.discard(block)
            if not partials:
                del self.partials[parent]

    # ---- copies

    def copies_of(self, block: int) -> Iterator[int]:
        copy = int(self.blocks.first_copy[block])
        while copy >= 0:
            following = int(self.copies.next[copy])
            yield copy
            copy = following

    def copies_of_many(self, blocks: Rows) -> Rows:
        """The copies of the first block, then those of the second, and so on."""
        if len(blocks) == 1:
            return as_rows(list(self.copies_of(int(blocks[0]))))
        place = np.arange(len(blocks))
        at = self.blocks.first_copy[blocks]
        places, found = [], []
        while len(at):
            place, at = place[at >= 0], at[at >= 0]
            places.append(place)
            found.append(at)
            at = self.copies.next[at]
        if len(found) <= 1:
            return found[0] if found else at
        rows: Rows = np.concatenate(found)[np.argsort(np.concatenate(places), kind="stable")]
        return rows

    def copy_in(self, block: int, tier: int, part: int) -> int:
        copies = self.copies
        copy = int(self.blocks.first_copy[block])
        # int: a numpy scalar takes microseconds to compare itself with a member of an enumeration
        while copy >= 0 and (int(copies.tier[copy]) != tier or int(copies.part[copy]) != part):
            copy = int(copies.next[copy])
        return copy

    def fastest_copy(self, block: int, part: int) -> int:
        """The ready copy of a part in the fastest tier that has one, or -1."""
        copies = self.copies
        best = -1
        for copy in self.copies_of(block):
            if int(copies.part[copy]) == part and copies.state[copy] == READY:
                best = copy if best < 0 or copies.tier[copy] < copies.tier[best] else best
        return best

    def open_copy(self, block: int, tier: TierId, part: Part) -> int:
        """A FILLING copy without pieces, linked to its block, its kids counted."""
        copies = self.copies
        copy = copies.take()
        copies.block[copy] = block
        copies.tier[copy] = tier
        copies.part[copy] = part
        copies.state[copy] = FILLING
        if part is not Part.CHECKPOINT:
            valid = int(self.blocks.valid[block])
            copies.missing[copy] = pieces_needed(self.layout_of(block), part, valid)
        copies.next[copy] = self.blocks.first_copy[block]
        self.blocks.first_copy[block] = copy
        parent = int(self.tree.parent[block])
        above = self.copy_in(parent, tier, part) if parent >= 0 else -1
        if above >= 0:
            copies.kids[above] += 1
        if self.tree.children[block]:
            below = (self.copy_in(child, tier, part) for child in self.tree.children_of(block))
            copies.kids[copy] = sum(1 for kid in below if kid >= 0)
        self.space.books[tier].copies += 1
        return copy

    def unlink_copy(self, copy: int, block: int) -> None:
        copies = self.copies
        before = -1
        for other in self.copies_of(block):
            if other == copy:
                break
            before = other
        if before < 0:
            self.blocks.first_copy[block] = copies.next[copy]
        else:
            copies.next[before] = copies.next[copy]
        copies.next[copy] = -1

    # ---- pieces

    def pieces_of(self, copy: int) -> Iterator[int]:
        piece = int(self.copies.first_piece[copy])
        while piece >= 0:
            following = int(self.pieces.next[piece])
            yield piece
            piece = following

    def piece_in(self, copy: int, group: int, shard: int) -> int:
        for piece in self.pieces_of(copy):
            if self.pieces.group[piece] == group and self.pieces.shard[piece] == shard:
                return piece
        return -1

    def place(self, piece: int) -> Place:
        pieces = self.pieces
        units = int(pieces.units[piece])
        if units:
            return (Extent(int(pieces.segment[piece]), int(pieces.start[piece]), units),)
        return self.long_places[piece]

    def places(self, pieces: Rows) -> Places:
        """Of pieces that lie in one extent each."""
        table = self.pieces
        columns = table.segment[pieces], table.start[pieces], table.units[pieces]
        return Places(*(column.astype(np.int64) for column in columns))

    def heads_of(self, copy: int) -> list[tuple[int, int]]:
        """Segment and first unit of each of its pieces."""
        pieces = self.pieces
        return [
            (int(pieces.segment[piece]), int(pieces.start[piece]))
            if pieces.units[piece]
            else self.long_places[piece][0][:2]
            for piece in self.pieces_of(copy)
        ]

    def piece_rows(self, copy: int) -> tuple[PieceRow, ...]:
        pieces = self.pieces
        return tuple(
            PieceRow(int(pieces.group[piece]), int(pieces.shard[piece]), self.place(piece))
            for piece in self.pieces_of(copy)
        )

    def add_piece(self, copy: int, group: int, shard: int, length: int, place: Place) -> int:
        pieces, copies = self.pieces, self.copies
        piece = pieces.take()
        pieces.copy[piece] = copy
        pieces.group[piece] = group
        pieces.shard[piece] = shard
        pieces.state[piece] = FILLING
        pieces.length[piece] = length
        pieces.next[piece] = copies.first_piece[copy]
        copies.first_piece[copy] = piece
        self._set_place(piece, place)
        self._use(copy, units_in(place))
        is_memory = (
            int(copies.tier[copy]) != TierId.HBM
        )  # nobody is granted the right to write there
        if is_memory and self.space.suspects and self.space.is_suspect(place):
            copies.flags[copy] |= SUSPECT
        return piece

    def trim_piece(self, piece: int, kept: Place) -> None:
        """Give back the tail of a FILLING piece's place that turned out not to be needed; nothing was written there."""
        before = self.place(piece)
        if kept == before:
            return
        tail: list[Extent] = []
        for i, extent in enumerate(before):
            units = kept[i].units if i < len(kept) else 0
            if units < extent.units:
                tail.append(Extent(extent.segment, extent.start + units, extent.units - units))
        copy = int(self.pieces.copy[piece])
        self._use(copy, -units_in(tail))
        self.long_places.pop(piece, None)
        self._set_place(piece, kept)
        self.space.books[TierId(int(self.copies.tier[copy]))].extents.give(tuple(tail))

    def remove_piece(self, piece: int) -> Place:
        """Unlink a piece; its space is the caller's to give back or keep aside."""
        pieces, copies = self.pieces, self.copies
        copy = int(pieces.copy[piece])
        place = self.place(piece)
        before = -1
        for other in self.pieces_of(copy):
            if other == piece:
                break
            before = other
        if before < 0:
            copies.first_piece[copy] = pieces.next[piece]
        else:
            pieces.next[before] = pieces.next[piece]
        self._use(copy, -units_in(place))
        self.long_places.pop(piece, None)
        pieces.give(piece)
        return place

    def _set_place(self, piece: int, place: Place) -> None:
        pieces = self.pieces
        if len(place) == 1:
            pieces.segment[piece], pieces.start[piece], pieces.units[piece] = place[0]
        else:
            pieces.units[piece] = 0
            self.long_places[piece] = place

    def _use(self, copy: int, units: int) -> None:
        """A copy that is being read grows and shrinks too: by another group of a checkpoint, by the trim of a load."""
        copies = self.copies
        copies.units[copy] = int(copies.units[copy]) + units
        book = self.space.books[TierId(int(copies.tier[copy]))]
        book.used[budget_of(int(copies.part[copy]))] += units
        if copies.readers[copy]:
            book.leased += units
        if copies.flags[copy] & SINK:
            book.sinks += units
