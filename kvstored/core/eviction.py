"""Room in a tier: which copies leave so that others fit.

The policy orders, the books allow, this module counts units. A budget that is within its limit is never shrunk for the other one.
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from kvstored.core.books import Books
from kvstored.core.calls import Freed, PieceRow, Reason
from kvstored.core.clearing import clear_run
from kvstored.core.columns import CLEAN, READY, SINK
from kvstored.core.history import Forgotten
from kvstored.core.policies.base import budget_of
from kvstored.core.readability import NOT_READABLE
from kvstored.core.types import Budget, NamespaceId, Part, Place, Rows, TierId


class Evictor:
    """`soft_pins`: pins that give way, oldest first, when nothing else in memory can; the claims module registers what each holds and
    how to release it. On disk they need not: pins have a share of it, and a write-back has time."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._shrinking: set[tuple[TierId, Budget]] = set()
        self.soft_pins: OrderedDict[int, tuple[Rows, Callable[[], bool]]] = OrderedDict()

    def room(
        self, tier: TierId, budget: Budget, units: list[int], now_s: float
    ) -> list[Place] | None:
        """Places for pieces of these sizes, evicting as needed; None when that cannot be had (on disk: not yet)."""
        space = self._books.space
        need = sum(units)
        if need > space.limit(tier, budget) or tier in self._books.recovering:
            return None
        book = space.books[tier]
        while space.over(tier, budget, need) or book.extents.free_units < need:
            over = space.over(tier, budget, need)
            if not over and book.discarding:
                return None
            if not self._evict(tier, self._debtor(tier, budget, over), Reason.DEMAND, now_s):
                return None
        places = space.take(tier, budget, units)
        return self._cleared(tier, budget, units, now_s) if places is None else places

    def plain_room(self, tier: TierId, units: int, count: int, now_s: float) -> int:
        """How many of `count` equal pieces there is room for, after evicting as for one after the other."""
        space, book = self._books.space, self._books.space.books[tier]
        limit, need = space.limit(tier, Budget.GLOBAL), units * count
        if units > limit or tier in self._books.recovering:
            return 0
        while book.used[Budget.GLOBAL] + need > limit or book.extents.free_units < need:
            over = book.used[Budget.GLOBAL] + need > limit
            if not over and book.discarding:
                break
            debtor = self._debtor(tier, Budget.GLOBAL, over)
            if not self._evict(tier, debtor, Reason.DEMAND, now_s):
                break
        free = min(limit - book.used[Budget.GLOBAL], book.extents.free_units)
        return max(0, min(count, free // units))

    def _cleared(
        self, tier: TierId, budget: Budget, units: list[int], now_s: float
    ) -> list[Place] | None:
        """Enough is free, but in too many pieces: clear runs of it."""
        space = self._books.space
        need, largest = sum(units), space.books[tier].extents.segment_units_max
        for _ in range(need // max(1, largest) + 1):
            if space.books[tier].discarding:
                return None
            if not clear_run(self._books, tier, budget, min(need, largest), now_s):
                return None
            places = space.take(tier, budget, units)
            if places is not None:
                return places
        return None

    def trim(self, tier: TierId, now_s: float, copies_max: int | None) -> int:
        """Above the high watermark evict down to the low one; answers how many copies left.

        After `copies_max` of them it stops, and the next call goes on to the low watermark.
        """
        space = self._books.space
        limits = space.books[tier].limits
        evicted = 0
        for budget in Budget:
            limit = space.limit(tier, budget)
            if space.books[tier].used[budget] > int(limit * limits.high):
                self._shrinking.add((tier, budget))
            if (tier, budget) not in self._shrinking:
                continue
            while space.books[tier].used[budget] > int(limit * limits.low):
                if evicted == copies_max:
                    return evicted
                if not self._evict(tier, budget, Reason.WATERMARK, now_s):
                    break
                evicted += 1
            self._shrinking.discard((tier, budget))
        return evicted

    def shed(self, tier: TierId, now_s: float, copies_max: int) -> int:
        """Evict whatever the watermarks, one copy of each budget in turn: what runs out is not the tier's space. How many left."""
        evicted = 0
        while evicted < copies_max:
            left = sum(self._evict(tier, budget, Reason.WATERMARK, now_s) for budget in Budget)
            if not left:
                break
            evicted += left
        return evicted

    def _debtor(self, tier: TierId, budget: Budget, over: bool) -> Budget:
        """Whose copy leaves: the own budget's, unless only the other one is over its limit."""
        other = Budget(1 - budget)
        if not over and self._books.space.over(tier, other, 0):
            return other
        return budget

    def _evict(self, tier: TierId, budget: Budget, reason: Reason, now_s: float) -> bool:
        victim = self._books.policy.victim(tier, budget, now_s)
        if victim is None and tier <= TierId.DRAM and reason is Reason.DEMAND:
            victim = self._victim_of_pins(tier, budget, now_s)
        if victim is None:
            return False
        if int(self._books.blocks.ns[self._books.copies.block[victim]]) in self._books.retired:
            reason = Reason.RETIRED
        if not drop_leaf(self._books, victim, reason, now_s):
            self._books.drop_copy(victim, reason, now_s)
        return True

    def _victim_of_pins(self, tier: TierId, budget: Budget, now_s: float) -> int | None:
        for path, release in list(self.soft_pins.values()):
            if self._holds_any(path, tier, budget):
                release()
                victim = self._books.policy.victim(tier, budget, now_s)
                if victim is not None:
                    return victim
        return None

    def _holds_any(self, path: Rows, tier: TierId, budget: Budget) -> bool:
        """Whether a path has copies there that nothing but a hold may keep."""
        copies = self._books.copies
        rows = self._books.copies_of_many(path)
        mine = (copies.part[rows] == Part.CHECKPOINT) == (budget is Budget.CHECKPOINT)
        idle = (copies.state[rows] == READY) & (copies.readers[rows] == 0)
        return bool(np.any(mine & idle & (copies.tier[rows] == tier)))


def drop_leaf(books: Books, copy: int, reason: Reason, now_s: float) -> bool:
    """`Books.drop_copy` for the usual victim: the only copy of a block that nothing hangs on, of one piece, which goes with its block.
    False, with nothing done, for any other."""
    copies, blocks, tree = books.copies, books.blocks, books.tree
    block, piece = int(copies.block[copy]), int(copies.first_piece[copy])
    is_only = blocks.first_copy[block] == copy and copies.next[copy] < 0
    if not is_only or blocks.holds[block] or tree.children[block] or books.pieces.next[piece] >= 0:
        return False
    tier, part = TierId(int(copies.tier[copy])), int(copies.part[copy])
    book, units, flags = (
        books.space.books[tier],
        int(copies.units[copy]),
        int(copies.flags[copy]),
    )
    fingerprint, ns = books.fingerprint(block), NamespaceId(int(blocks.ns[block]))
    place, pieces = books.place(piece), books.pieces
    row = PieceRow(int(pieces.group[piece]), int(pieces.shard[piece]), place)
    book.dirty -= not flags & CLEAN
    book.sinks -= units if flags & SINK else 0
    book.used[budget_of(part)] -= units
    book.copies -= 1
    if blocks.fast[block] != NOT_READABLE:
        books.history.add(fingerprint, Forgotten(reason, tier, now_s))
    books.long_places.pop(piece, None)
    pieces.give(piece)
    copies.give(copy)
    blocks.first_copy[block] = -1
    token = books.space.give(tier, (place,))
    books.effects.append(Freed(tier, ns, fingerprint, (row,), reason, token, units))
    parent = int(tree.parent[block])
    above = books.copy_in(parent, tier, part) if parent >= 0 else -1
    if above >= 0:
        copies.kids[above] -= 1
    books.drop_idle(block)
    if above >= 0:
        books.consider(above)
    return True
