"""The books of the oracle: what is true of blocks and copies, recomputed from scratch, and what follows from a change.

No code of the core but its value types. The calls are in oracle.py.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvstored.core.calls import Limits, Reason, TierLimits
from kvstored.core.types import Budget, GroupKind, GroupSpec, NamespaceSpec, Part, TierId
from tests.core.oracle_rows import (
    DRAM,
    NVME,
    Aside,
    Block,
    Copy,
    Fill,
    Gone,
    Kept,
    Lease,
    Piece,
    Pin,
    Request,
    Task,
)


class OracleBooks:
    """`gone`: copies forgotten by the last call, as Freed effects tell them, in order."""

    def __init__(self, tiers: Sequence[TierLimits], limits: Limits) -> None:
        self.tiers = {tier.tier: tier for tier in tiers}
        self.limits = limits
        self.specs: dict[int, NamespaceSpec] = {}
        self.retired: set[int] = set()
        self.blocks: dict[tuple[int, str], Block] = {}
        self.doomed: list[Copy] = []
        self.fills: dict[int, Fill] = {}
        self.asides: dict[int, Aside] = {}
        self.leases: dict[int, Lease] = {}
        self.tasks: dict[int, Task] = {}
        self.pins: dict[int, Pin] = {}
        self.pin_units: dict[Block, dict[TierId, int]] = {}
        self.running_units: dict[Block, dict[TierId, int]] = {}
        self.requests: dict[tuple[int, bytes], Request] = {}
        self.kept: list[Kept] = []
        self.discarding = 0
        self.now_s = 0.0
        self.gone: list[Gone] = []
        self._tick = 0
        self._sinks = 0
        self._lives = 0

    # ---- facts

    def groups(self, ns: int) -> list[tuple[int, GroupSpec]]:
        return list(enumerate(self.specs[ns].groups))

    def needed(self, block: Block, part: Part) -> set[Piece]:
        """Pieces of a whole required part: a compressed group has none before its first row."""
        spec = self.specs[block.ns]
        return {
            (g, shard)
            for g, group in self.groups(block.ns)
            if group.part is part and block.valid >= group.ratio
            for shard in range(spec.tp if group.sharded else 1)
        }

    def parts(self, block: Block) -> list[Part]:
        return [part for part in (Part.DENSE, Part.SPARSE) if self.needed(block, part)]

    def ready(self, block: Block, part: Part) -> list[Copy]:
        """Ready copies of a part, the fastest first."""
        found = [copy for copy in block.copies if copy.part is part and copy.is_ready]
        return sorted(found, key=lambda copy: copy.tier)

    def is_readable(self, block: Block | None) -> bool:
        if block is None or not self.parts(block):
            return False
        return all(self.ready(block, part) for part in self.parts(block))

    def complete(self, copy: Copy) -> set[int]:
        """Window and state groups of a copy of which every shard is there."""
        spec = self.specs[copy.block.ns]
        return {
            g
            for g, group in self.groups(copy.block.ns)
            if group.part is Part.CHECKPOINT
            and all((g, shard) in copy.written for shard in range(spec.tp if group.sharded else 1))
        }

    def have(self, block: Block) -> set[int]:
        copies = self.ready(block, Part.CHECKPOINT)
        return self.complete(copies[0]) if copies else set()

    def depth(self, block: Block) -> int:
        return 0 if block.parent is None else 1 + self.depth(block.parent)

    def all_copies(self) -> list[Copy]:
        return [copy for block in self.blocks.values() for copy in block.copies]

    def used(self, tier: TierId, budget: Budget) -> int:
        copies = self.all_copies() + self.doomed
        return sum(copy.units for copy in copies if copy.tier is tier and copy.budget is budget)

    def quarantined(self, tier: TierId) -> int:
        return sum(kept.units for kept in self.kept) if tier is DRAM else 0

    def aside(self) -> int:
        """Units set aside for puts to come."""
        return sum(aside.units for aside in self.asides.values())

    def free(self, tier: TierId) -> int:
        taken = sum(self.used(tier, budget) for budget in Budget) + self.quarantined(tier)
        taken += self.aside() if tier is DRAM else 0
        return self.tiers[tier].capacity_units - taken - (self.discarding if tier is NVME else 0)

    def limit(self, tier: TierId, budget: Budget) -> int:
        capacity = self.tiers[tier].capacity_units
        groups = [group for spec in self.specs.values() for group in spec.groups]
        checkpoints = 0
        if any(group.part is Part.CHECKPOINT for group in groups):
            checkpoints = int(capacity * self.tiers[tier].checkpoint_share)
        if budget is Budget.CHECKPOINT:
            return checkpoints
        aside = self.aside() if tier is DRAM else 0
        return max(0, capacity - checkpoints - self.quarantined(tier) - aside)

    def leased(self) -> int:
        copies = self.all_copies() + self.doomed
        return sum(copy.units for copy in copies if copy.tier is DRAM and copy.readers)

    def at(self, block: Block, tier: TierId, part: Part) -> Copy | None:
        found = [copy for copy in block.copies if copy.tier is tier and copy.part is part]
        return found[0] if found else None

    def is_evictable(self, copy: Copy) -> bool:
        block = copy.block
        if copy.is_doomed or not copy.is_ready or copy.readers or copy.fills:
            return False
        is_inner = any(self.at(child, copy.tier, copy.part) for child in block.children)
        if is_inner and copy.part is not Part.CHECKPOINT:
            return False
        if copy.is_sink and block.children:
            return False
        if not block.holds or self.ready(block, copy.part)[0] is not copy:
            return True
        pins = sum(block in pin.path for pin in self.pins.values())
        return block.holds == pins and not self.is_dirty(copy)

    def is_dirty(self, copy: Copy) -> bool:
        slower = [other for other in self.ready(copy.block, copy.part) if other.tier > copy.tier]
        return not any(self.complete(copy) <= self.complete(other) for other in slower)

    def units_by_tier(self, block: Block) -> dict[TierId, int]:
        units: dict[TierId, int] = {}
        for part in self.parts(block):
            for copy in self.ready(block, part)[:1]:
                units[copy.tier] = units.get(copy.tier, 0) + copy.units
        return units

    def line(self, block: Block | None) -> Iterator[Block]:
        while block is not None:
            yield block
            block = block.parent

    def first_victim(self, tier: TierId, budget: Budget) -> Copy | None:
        found = [
            copy
            for copy in self.all_copies()
            if copy.tier is tier and copy.budget is budget and self.is_evictable(copy)
        ]
        return min(found, key=lambda copy: (*self._class(copy), copy.rank), default=None)

    def _class(self, copy: Copy) -> tuple[bool, bool]:
        """First victims; then others; last the recent windows of running requests, where not all of their paths are held."""
        requests = self.requests.values()
        is_loose = not all(request.is_whole for request in requests)
        is_recent = is_loose and any(copy.block in request.recent for request in requests)
        return not copy.is_first, is_recent and not copy.is_first

    def match(self, ns: int, keys: Sequence[str]) -> tuple[int, int, int]:
        """Blocks, tokens, and tokens of the last usable checkpoint."""
        spec = self.specs[ns]
        run: list[Block] = []
        for key in keys:
            block = self.blocks.get((ns, key))
            if block is None or not self.is_readable(block):
                break
            run.append(block)
            if block.valid < spec.block_tokens:
                break
        boundaries = [
            sum(block.valid for block in run[:count])
            for count in range(1, len(run) + 1)
            if self._resumes(run[:count])
        ]
        return len(run), sum(block.valid for block in run), max(boundaries, default=0)

    def _resumes(self, run: Sequence[Block]) -> bool:
        for g, group in self.groups(run[-1].ns):
            if group.is_required:
                continue
            if group.kind is GroupKind.WINDOW and group.per_block:
                left = group.window_tokens - 1
                for block in reversed(run):
                    if left > 0 and g not in self.have(block):
                        return False
                    left -= block.valid
            elif g not in self.have(run[-1]):
                return False
        return True

    # ---- what follows from a change

    def ensure(self, ns: int, key: str, valid: int) -> Block:
        if (ns, key) not in self.blocks:
            self.blocks[ns, key] = Block(ns, key, valid)
        return self.blocks[ns, key]

    def open_copy(self, block: Block, tier: TierId, part: Part) -> Copy:
        copy = Copy(block, tier, part)
        block.copies.insert(0, copy)
        return copy

    def tidy(self) -> None:
        """Rows without copies, children and holds go."""
        idle = [b for b in self.blocks.values() if not (b.copies or b.children or b.holds)]
        for block in idle:
            del self.blocks[block.ns, block.key]
            if block.parent is not None:
                block.parent.children.remove(block)
        if idle:
            self.tidy()

    def below(self, block: Block) -> Iterable[Block]:
        for child in block.children:
            yield child
            if self.is_readable(child):
                yield from self.below(child)

    def touch(self, blocks: Sequence[Block], *, hit: bool, now_s: float) -> None:
        self._tick += 1
        for place, block in enumerate(reversed(blocks)):
            block.last_s = now_s
            block.hits += hit
            for i, copy in enumerate(block.copies):
                dense = copy.part is not Part.SPARSE
                copy.rank = (self._tick, dense * 1_000_000 + place * 100 + i)
                if hit and block.ns not in self.retired:
                    copy.is_first = False

    def written(self, copy: Copy, piece: Piece, now_s: float) -> None:
        before = self.is_readable(copy.block)
        copy.written.add(piece)
        if copy.part is Part.CHECKPOINT:
            if piece[0] not in self.complete(copy):
                return
        elif copy.written != self.needed(copy.block, copy.part):
            return
        block = copy.block
        if not copy.is_ready:
            copy.is_ready = True
            block.last_s = max(block.last_s, now_s)
            self._count_sink(copy)
        self._tick += 1
        copy.rank = (self._tick, 0)
        block.last_s = max(block.last_s, now_s)
        if not before and self.is_readable(block):
            for below in self.below(block):
                for each in below.copies:
                    each.is_first = each.is_first and below.ns in self.retired
            self._supersede(block)
        if block.ns in self.retired:
            copy.is_first = True

    def _supersede(self, block: Block) -> None:
        full = self.specs[block.ns].block_tokens
        for other in block.parent.children if block.parent is not None else ():
            if other.valid < full and other.valid < block.valid:
                for copy in other.copies:
                    copy.is_first = True

    def _count_sink(self, copy: Copy) -> None:
        spec = self.specs[copy.block.ns]
        is_sink = self.depth(copy.block) * spec.block_tokens < spec.sink_tokens
        if copy.part is Part.CHECKPOINT or not is_sink:
            return
        there = sum(
            other.units for other in self.all_copies() if other.is_sink and other.tier is copy.tier
        )
        cap = int(self.tiers[copy.tier].capacity_units * self.tiers[copy.tier].sink_share)
        colder = [
            other
            for other in self.all_copies()
            if other.is_sink and other.tier is copy.tier and other.block.last_s < copy.block.last_s
        ]
        colder.sort(key=lambda other: (other.block.last_s, other.sink_number))
        yielding: list[Copy] = []
        while there + copy.units > cap and colder:
            yielding.append(colder.pop(0))
            there -= yielding[-1].units
        copy.is_sink = there + copy.units <= cap
        if copy.is_sink:
            self._sinks += 1
            copy.sink_number = self._sinks
            for other in yielding:
                other.is_sink = False

    def drop(self, copy: Copy, reason: Reason) -> None:
        block = copy.block
        before = self.is_readable(block)
        block.copies.remove(copy)
        copy.is_doomed, copy.is_sink, copy.reason = True, False, reason
        self.doomed.append(copy)
        if before and not self.is_readable(block):
            for below in self.below(block):
                for each in below.copies:
                    each.is_first = True
        self.free_if_unused(copy)
        self.tidy()

    def free_if_unused(self, copy: Copy) -> None:
        if not copy.is_doomed or copy.readers or copy.fills or copy not in self.doomed:
            return
        self.doomed.remove(copy)
        if copy.pieces:
            self._freed(copy.tier, copy.block, tuple(sorted(copy.pieces)), copy.reason)
            self.discarding += copy.units if copy.tier is NVME else 0

    def _freed(self, tier: TierId, block: Block, pieces: tuple[Piece, ...], reason: Reason) -> None:
        self.gone.append((tier, block.ns, block.key, pieces, reason))

    def unread(self, copy: Copy) -> None:
        copy.readers -= 1
        self.free_if_unused(copy)

    def hold(self, blocks: Iterable[Block]) -> list[Block]:
        path: list[Block] = []
        for block in blocks:
            at: Block | None = block
            while at is not None:
                if at not in path:
                    path.append(at)
                at = at.parent
        for block in path:
            block.holds += 1
        return path

    def let_go(self, path: Iterable[Block]) -> None:
        for block in path:
            block.holds -= 1
        self.tidy()

    # ---- room

    def room(self, tier: TierId, budget: Budget, need: int) -> bool:
        if need > self.limit(tier, budget):
            return False
        while True:
            over = self.used(tier, budget) + need > self.limit(tier, budget)
            if not over and self.free(tier) >= need:
                return True
            if not over and tier is NVME and self.discarding:
                return False
            other = Budget(1 - budget)
            is_others = not over and self.used(tier, other) > self.limit(tier, other)
            if not self.evict(tier, other if is_others else budget, Reason.DEMAND):
                return False

    def evict(self, tier: TierId, budget: Budget, reason: Reason) -> bool:
        victim = self.first_victim(tier, budget)
        for id_, pin in sorted(self.pins.items()):
            if victim is not None or tier is not DRAM or reason is not Reason.DEMAND:
                break
            if not pin.is_hard and any(self._is_idle(block, budget) for block in pin.path):
                self.unpin(id_)
                victim = self.first_victim(tier, budget)
        if victim is None:
            return False
        self.drop(victim, Reason.RETIRED if victim.block.ns in self.retired else reason)
        return True

    def _is_idle(self, block: Block, budget: Budget) -> bool:
        mine = [copy for copy in block.copies if copy.tier is DRAM and copy.budget is budget]
        return any(copy.is_ready and not copy.readers for copy in mine)

    def make_room(self, tier: TierId) -> int:
        evicted = 0
        limits = self.tiers[tier]
        for budget in Budget:
            limit = self.limit(tier, budget)
            if self.used(tier, budget) <= int(limit * limits.high):
                continue
            while self.used(tier, budget) > int(limit * limits.low):
                if not self.evict(tier, budget, Reason.WATERMARK):
                    break
                evicted += 1
        return evicted

    def unpin(self, id_: int) -> bool:
        pin = self.pins.pop(id_, None)
        if pin is None:
            return False
        for block in pin.path:
            if not any(block in other.path for other in self.pins.values()):
                del self.pin_units[block]
        self.let_go(pin.path)
        return True
