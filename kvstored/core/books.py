"""The books of copies: what follows when a copy, a reader or a hold comes or goes.

Primitives only: fills, leases, claims and tasks are kept by the modules beside this one, which call these. Every primitive leaves the
derived columns (kids, fast, tiers, have, use of tiers) right; `checks.py` recomputes them.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvstored.core.asked import Asked
from kvstored.core.calls import (
    Fingerprint,
    Freed,
    Hidden,
    Leased,
    Limits,
    PieceRow,
    Reason,
    TierLimits,
    TouchEvent,
    Visible,
)
from kvstored.core.columnar import AnyEffect
from kvstored.core.columns import CLEAN, DOOMED, FILLING, FIRST, READY, SINK, SUSPECT, WAITING
from kvstored.core.frame_classes import warmed_bases
from kvstored.core.hints import Hint
from kvstored.core.history import Doomed, Forgotten, History
from kvstored.core.lifetimes import Lifetimes, due_s
from kvstored.core.policies.base import Policy
from kvstored.core.policies.named import policy_named
from kvstored.core.readability import (
    NOT_READABLE,
    are_plainly_idle,
    copies_below,
    is_complete,
    recount_clean,
    refresh,
)
from kvstored.core.rows import Tables
from kvstored.core.sinks import Sinks
from kvstored.core.types import NamespaceId, Part, Rows, TierId, as_rows

WAITING_SLACK = 4096
_HBM, _CHECKPOINT = int(TierId.HBM), int(Part.CHECKPOINT)


class Books(Tables):
    """See the module. `effects` are what the shell has to do; `history` is bounded and tells why a key is gone; `waiting` are dirty
    copies in the order in which write-back looks at them; `lifetimes` are window and state copies by the time they may end."""

    def __init__(
        self, *, tiers: Sequence[TierLimits], policy: str, limits: Limits, epoch: int
    ) -> None:
        super().__init__(tiers=tiers, epoch=epoch)
        self.limits = limits
        self.retired: set[int] = set()
        self.recovering: set[TierId] = set()
        self.lost: set[TierId] = set()
        self.doomed: dict[int, Doomed] = {}
        self.effects: list[AnyEffect] = []
        self.history = History(limits.history_max)
        self.waiting: deque[int] = deque()
        self.lifetimes = Lifetimes()
        self.sinks = Sinks(self, self.consider)
        self.policy: Policy = policy_named(policy, self)
        self.asked = Asked(self)

    # ---- blocks

    def drop_idle(self, block: int) -> None:
        """Forget the row of a block without copies, children and holds, and then its parents that are left so."""
        blocks, tree = self.blocks, self.tree
        while block >= 0 and blocks.ns[block] >= 0:
            if blocks.first_copy[block] >= 0 or tree.children[block] or blocks.holds[block]:
                return
            parent = int(tree.parent[block])
            self.forget_partial(block, parent)
            gone = as_rows([block])
            self.policy.forget(gone)
            self.recent.forget(gone)
            tree.remove(block)
            self.index.pop(block)
            blocks.give(block)
            if parent >= 0 and tree.children[parent] == 0:
                for copy in self.copies_of(parent):
                    self.consider(copy)
            block = parent

    # ---- becoming readable

    def piece_ready(self, piece: int, checksum: int, now_s: float) -> None:
        """The bytes are there: completes the copy, or a group of a window/state copy, when it was the last."""
        pieces, copies = self.pieces, self.copies
        copy = int(pieces.copy[piece])
        pieces.state[piece] = READY
        pieces.checksum[piece] = checksum
        if int(copies.part[copy]) != Part.CHECKPOINT:
            copies.missing[copy] -= 1
            if copies.missing[copy] == 0:
                self._copy_ready(copy, now_s)
            return
        group = int(pieces.group[piece])
        if is_complete(self, copy, group):
            copies.have[copy] |= np.uint32(1 << group)
            self._copy_ready(copy, now_s)

    # ---- forgetting

    def drop_copy(self, copy: int, reason: Reason, now_s: float) -> None:
        """Forget a copy now; its space comes back when nobody reads or writes it any more."""
        copies, blocks = self.copies, self.blocks
        block, part = int(copies.block[copy]), int(copies.part[copy])
        tier = TierId(int(copies.tier[copy]))
        fingerprint = self.fingerprint(block)
        if copies.state[copy] == READY and not copies.flags[copy] & CLEAN:
            self.space.books[tier].dirty -= 1
        self.unlink_copy(copy, block)
        self.space.frames.forget(copy)
        was_readable = blocks.fast[block] != NOT_READABLE
        was_filling = copies.state[copy] == FILLING
        copies.state[copy] = DOOMED
        if copies.flags[copy] & SINK:
            self.space.books[tier].sinks -= int(copies.units[copy])
        copies.flags[copy] &= SUSPECT
        copies.block[copy] = -1
        self.doomed[copy] = Doomed(NamespaceId(int(blocks.ns[block])), fingerprint, reason)
        parent = int(self.tree.parent[block])
        above = self.copy_in(parent, tier, part) if parent >= 0 else -1
        if above >= 0:
            copies.kids[above] -= 1
            self.consider(above)
        refresh(self, block)
        recount_clean(self, block, part)
        if blocks.fast[block] == NOT_READABLE and (was_readable or was_filling):
            self.history.add(fingerprint, Forgotten(reason, tier, now_s))
        if was_readable and blocks.fast[block] == NOT_READABLE and self.tree.children[block]:
            self.policy.first(copies_below(self, block))
        for other in self.copies_of(block):
            self.consider(other)
        if tier is TierId.DRAM and copies.readers[copy]:
            self.effects.append(Hidden(fingerprint, self.piece_rows(copy)))
        self.free_if_unused(copy)
        self.drop_idle(block)

    def free_if_unused(self, copy: int) -> None:
        """Give back the space of a DOOMED copy once nobody reads or writes it."""
        copies = self.copies
        if copies.state[copy] != DOOMED or copies.readers[copy] or copies.fills[copy]:
            return
        tier = TierId(int(copies.tier[copy]))
        gone = self.doomed.pop(copy)
        rows = self.piece_rows(copy)
        for piece in list(self.pieces_of(copy)):
            self.remove_piece(piece)
        self.space.books[tier].copies -= 1
        copies.give(copy)
        self.free_rows(tier, gone.ns, gone.fingerprint, rows, gone.reason)

    def free_rows(
        self,
        tier: TierId,
        ns: NamespaceId,
        fingerprint: Fingerprint,
        rows: tuple[PieceRow, ...],
        reason: Reason,
    ) -> None:
        """Space of unlinked pieces returns to its tier."""
        if rows:
            token = self.space.give(tier, tuple(row.place for row in rows))
            units = sum(extent.units for row in rows for extent in row.place)
            self.effects.append(Freed(tier, ns, fingerprint, rows, reason, token, units))
            self.consider_loosened()

    def consider_loosened(self) -> None:
        """Copies on NVMe that nothing refers to any more are like others again."""
        for copy in self.space.frames.loosened():
            self.consider(copy)

    # ---- reading, holding, evictability

    def is_evictable(self, copy: int) -> bool:
        """Idle, and nothing refers to it: forgetting it would free no space."""
        return not self.space.frames.is_referred_to(copy) and self.is_idle(copy)

    def is_idle(self, copy: int) -> bool:
        """Ready, unread, a leaf in its tier and part, no exempt sink, not what a GPU alone has, and not the fastest copy of a held block: only
        pinned is less, there a clean copy may leave."""
        copies = self.copies  # `item`: a third of what a numpy scalar takes
        if copies.state.item(copy) != READY or copies.readers.item(copy) or copies.fills.item(copy):
            return False
        flags = copies.flags.item(copy)
        if not flags & CLEAN and copies.tier.item(copy) == _HBM:
            return False  # it goes down first
        if copies.kids.item(copy) and copies.part.item(copy) != _CHECKPOINT:
            return False
        block = copies.block.item(copy)
        if flags & SINK and self.tree.children.item(block):
            return False
        holds = self.blocks.holds.item(block)
        if not holds:
            return True
        if holds == self.pin_holds[block] and flags & CLEAN:
            return True
        return self.fastest_copy(block, copies.part.item(copy)) != copy

    def consider(self, copy: int) -> None:
        """Offer a copy to the policy if nothing is in the way any more. Called after whatever may have been."""
        if self.is_evictable(copy):
            self.policy.offer(copy)

    def consider_many(self, rows: Rows) -> None:
        """The same for each of many."""
        is_referred_to, offer = self.space.frames.is_referred_to, self.policy.offer
        for copy, idle in zip(rows.tolist(), are_plainly_idle(self, rows).tolist(), strict=True):
            if not is_referred_to(copy) and (idle or self.is_idle(copy)):
                offer(copy)

    def read(self, copy: int) -> None:
        """One reader more."""
        copies = self.copies
        copies.readers[copy] += 1
        if copies.readers[copy] == 1:
            tier = TierId(int(copies.tier[copy]))
            self.space.books[tier].leased += int(copies.units[copy])
            self._mark_leased(copy, leased=True)

    def unread(self, copy: int) -> None:
        """One reader less; the last one of a DOOMED copy frees it."""
        copies = self.copies
        copies.readers[copy] -= 1
        if copies.readers[copy]:
            return
        self.space.books[TierId(int(copies.tier[copy]))].leased -= int(copies.units[copy])
        if copies.state[copy] == DOOMED:
            self.free_if_unused(copy)
            return
        self._mark_leased(copy, leased=False)
        self.consider(copy)

    def hold(self, path: Rows) -> None:
        self.blocks.holds[path] += 1

    def release_hold(self, block: int) -> None:
        self.blocks.holds[block] -= 1
        for copy in self.copies_of(block):
            self.consider(copy)
        if not self.blocks.holds[block]:
            self.drop_idle(block)

    def release_holds(self, path: Rows) -> None:
        if len(path) == 1:
            self.release_hold(int(path[0]))
            return
        holds = self.blocks.holds
        holds[path] -= 1
        self.consider_blocks(path)
        loose = path[(holds[path] == 0) & (self.blocks.first_copy[path] < 0)]
        for block in loose.tolist():
            self.drop_idle(block)

    def wait(self, copy: int) -> None:
        """Let write-back look at a dirty copy."""
        if TierId.NVME in self.space.books and not self.copies.flags[copy] & WAITING:
            self.copies.flags[copy] |= WAITING
            self.waiting.append(copy)
            if len(self.waiting) > 2 * self.copies.live + WAITING_SLACK:
                # rows were given back and taken again, and nobody writes back
                self.waiting = deque(dict.fromkeys(self.waiting))

    def consider_blocks(self, blocks: Rows) -> None:
        """The same for every copy of many blocks, most of which are no leaves."""
        copies = self.copies
        at = self.copies_of_many(blocks)
        idle = (copies.readers[at] == 0) & (copies.state[at] == READY)
        leaf = (copies.kids[at] == 0) | (copies.part[at] == int(Part.CHECKPOINT))
        self.consider_many(at[idle & leaf])

    def touch(self, blocks: Rows, event: TouchEvent, now_s: float) -> None:
        """Blocks of one path, head to tail, were used: every copy's rank moves, the tail's first."""
        if event is not TouchEvent.STORED:
            self.blocks.hits[blocks] += np.uint32(event is TouchEvent.HIT)
            self.blocks.last_s[blocks] = now_s
        at = self.copies.as_they_leave(self.copies_of_many(blocks[::-1]))
        if event is TouchEvent.HIT:
            self._forgive(at)
            self.asked.hit(blocks)
        self.policy.touch(at, event, now_s)
        if len(bases := warmed_bases(self, at)):
            self.policy.touch(bases, event, now_s)
        self._wait_again(at[::-1])  # parents before children

    def hint(self, path: Rows, hint: Hint, now_s: float) -> None:
        """An engine says this of the request that used these blocks, head to tail."""
        if self.limits.hears_hints:
            self.policy.hint(self.copies_of_many(path[::-1]), hint, now_s)

    # ---- inside

    def _copy_ready(self, copy: int, now_s: float) -> None:
        copies = self.copies
        block, tier = int(copies.block[copy]), TierId(int(copies.tier[copy]))
        if copies.state[copy] != READY:
            copies.state[copy] = READY
            self.space.books[tier].dirty += 1
            self.blocks.last_s[block] = max(self.blocks.last_s[block], now_s)
            self.count_sink(copy, block, tier)
        was_readable = self.blocks.fast[block] != NOT_READABLE
        self.blocks.last_s[block] = max(self.blocks.last_s[block], now_s)
        if tier not in self.recovering:  # else all are ranked at its end
            self.policy.touch(as_rows([copy]), TouchEvent.STORED, now_s)
        refresh(self, block)
        recount_clean(self, block, int(copies.part[copy]))
        self.effects.append(
            Visible(
                NamespaceId(int(self.blocks.ns[block])),
                self.fingerprint(block),
                tier,
                int(self.tree.depth[block]),
                self.piece_rows(copy),
            )
        )
        if copies.readers[copy]:
            self._mark_leased(copy, leased=True)
        if tier is TierId.DRAM and not copies.flags[copy] & CLEAN:
            self.wait(copy)
        if int(copies.part[copy]) == Part.CHECKPOINT:
            self.lifetimes.watch(copy, due_s(self, copy, self.limits.checkpoint_ttl_s))
        if not was_readable and self.blocks.fast[block] != NOT_READABLE:
            self.block_returned(block)
            if tier not in self.recovering:
                self.asked.stored(as_rows([block]))
        if int(self.blocks.ns[block]) in self.retired:
            self.policy.first(as_rows([copy]))
        if tier not in self.recovering:
            for other in self.copies_of(block):
                self.consider(other)

    def _wait_again(self, copies: Rows) -> None:
        """Dirty copies that write-back passed over were hit: they may be admitted now."""
        if TierId.NVME not in self.space.books:
            return
        table = self.copies
        flags = table.flags[copies]
        dirty = (flags & (CLEAN | WAITING) == 0) & (table.state[copies] == READY)
        for copy in copies[dirty & (table.tier[copies] == int(TierId.DRAM))]:
            self.wait(int(copy))

    def mark_leased(self, copies: Rows, tier: TierId, *, leased: bool) -> None:
        """The first reader of these ready copies of one extent came, or the last one went: memory's records say so."""
        if tier is not TierId.DRAM or not len(copies):
            return
        pieces = self.copies.first_piece[copies]
        heads = zip(
            self.pieces.segment[pieces].tolist(), self.pieces.start[pieces].tolist(), strict=True
        )
        self._leased_effect(leased=leased).heads.extend(heads)

    def _mark_leased(self, copy: int, *, leased: bool) -> None:
        if int(self.copies.tier[copy]) == TierId.DRAM and self.copies.state[copy] == READY:
            self._leased_effect(leased=leased).heads.extend(self.heads_of(copy))

    def _leased_effect(self, *, leased: bool) -> Leased:
        last = self.effects[-1] if self.effects else None
        if isinstance(last, Leased) and last.leased is leased:
            return last
        fresh = Leased([], leased)
        self.effects.append(fresh)
        return fresh

    def block_returned(self, block: int) -> None:
        """What it made unreachable is of use again; shorter blocks of the same parent are not."""
        if self.tree.children[block] and self._may_forgive(block):
            self._forgive(copies_below(self, block))
        tokens = int(self.blocks.valid[block])
        partials = self.partials.get(int(self.tree.parent[block]), ())
        shorter = [partial for partial in partials if self.blocks.valid[partial] < tokens]
        if shorter:
            self.policy.first(self.copies_of_many(as_rows(sorted(shorter))))

    def _may_forgive(self, block: int) -> bool:
        """Whether there may be first victims below a block: seldom, where a path is put head to tail."""
        child, *others = self.tree.children_of(block)
        if others or self.blocks.fast[child] != NOT_READABLE:
            return True
        return any(self.copies.flags[copy] & FIRST for copy in self.copies_of(child))

    def _forgive(self, copies: Rows) -> None:
        """First victims no more, but for those of retired namespaces."""
        first = copies[self.copies.flags[copies] & FIRST != 0]
        if self.retired and len(first):
            owners = self.blocks.ns[self.copies.block[first]]
            first = first[~np.isin(owners, list(self.retired))]
        self.copies.flags[first] &= ~FIRST & 0xFF

    def count_sink(self, copy: int, block: int, tier: TierId) -> None:
        """A copy just became ready, and its block's last use is known. While a tier is recovered what was counted first stays."""
        self.sinks.count(copy, block, tier, may_yield=tier not in self.recovering)
