"""A dumb oracle of the catalog: it is told each call, works out what has to come of it, and remembers.

Evictions are worked out one by one: each is the first copy of its (tier, budget) that nothing holds, and only while there is a need.
Ids are the catalog's: the machine passes them in.
"""

from collections.abc import Sequence

from kvstored.core.calls import FillStatus, ReadStatus, Reason
from kvstored.core.types import UNIT_BYTES, Budget, Part, TierId
from tests.core.oracle_books import OracleBooks
from tests.core.oracle_rows import (
    DRAM,
    NVME,
    Block,
    Copy,
    Fill,
    Kept,
    Lease,
    Piece,
    Request,
    Task,
)

Asked = tuple[str, str | None, int]
"""A key with its parent's (None: not told) and its tokens."""


class Oracle(OracleBooks):
    # ---- fills

    def wanted(
        self, ns: int, block: Block | None, shard: int, sizes: dict[int, int]
    ) -> tuple[dict[Part, dict[Piece, int]], bool]:
        """Units of the pieces to write, by part; and whether some are being written."""
        wanted: dict[Part, dict[Piece, int]] = {}
        filling = False
        for part in Part:
            mine = {
                (g, shard if group.sharded else 0): sizes[g]
                for g, group in self.groups(ns)
                if group.part is part and sizes.get(g)
            }
            missing: dict[Piece, int] = {}
            for piece, units in mine.items():
                state = self._state(block, part, piece)
                filling = filling or state == "filling"
                if state == "absent":
                    missing[piece] = units
            is_new = block is None or self.at(block, DRAM, part) is None
            if missing and part is Part.CHECKPOINT and is_new:
                missing = mine
            if missing:
                wanted[part] = missing
        return wanted, filling

    def _state(self, block: Block | None, part: Part, piece: Piece) -> str:
        copies = [copy for copy in block.copies if copy.part is part] if block else []
        if part is Part.CHECKPOINT:
            copies = sorted(copies, key=lambda copy: copy.tier)[:1]
        if any(piece in copy.written for copy in copies):
            return "ready"
        if part is not Part.CHECKPOINT and any(copy.is_ready for copy in copies):
            return "ready"
        return "filling" if any(piece in copy.pieces for copy in copies) else "absent"

    def reserve(
        self,
        session: int,
        ns: int,
        shard: int,
        asked: Sequence[Asked],
        sizes: dict[int, int],
        fills: list[int],
        *,
        expires_s: float,
        now_s: float,
        request: tuple[int, bytes] | None = None,
        replace: bool = False,
    ) -> list[FillStatus]:
        """`fills`: ids that the catalog gave, in order; taken as far as they have to have been given."""
        status: list[FillStatus] = []
        is_full = False
        for key, parent, valid in asked:
            mine = {g: units for g, units in sizes.items() if valid >= self.ratio(ns, g)}
            block = self.blocks.get((ns, key))
            wanted, filling = self.wanted(ns, None if replace else block, shard, mine)
            if not wanted:
                if block is not None:
                    self._link(block, parent)
                status.append(FillStatus.IN_PROGRESS if filling else FillStatus.PRESENT)
                continue
            is_full = is_full and not replace
            if is_full or (replace and not self._make_way(block, wanted)):
                status.append(FillStatus.NO_SPACE)
                is_full = True
                continue
            block = self._row(ns, key, parent, valid)
            pieces = self._place(block, wanted)
            if not pieces:
                status.append(FillStatus.NO_SPACE)
                is_full = True
                self.tidy()
                continue
            block.holds += 1
            self.fills[fills.pop(0)] = Fill(session, block, pieces, expires_s, request)
            status.append(FillStatus.GRANTED)
        return status

    def ratio(self, ns: int, g: int) -> int:
        return self.specs[ns].groups[g].ratio

    def _row(self, ns: int, key: str, parent: str | None, valid: int) -> Block:
        block = self.ensure(ns, key, valid)
        self._link(block, parent)
        if not block.copies:
            self._lives += 1
            block.life = self._lives
        return block

    def is_being_put(self, ns: int, key: str) -> bool:
        block = self.blocks.get((ns, key))
        targets = [task.target for task in self.tasks.values()]
        return block is not None and any(
            copy.tier is DRAM and not copy.is_ready and copy not in targets for copy in block.copies
        )

    def _link(self, block: Block, parent: str | None) -> None:
        if parent is not None and block.parent is None:
            block.parent = self.ensure(block.ns, parent, self.specs[block.ns].block_tokens)
            block.parent.children.append(block)

    def _make_way(self, block: Block | None, wanted: dict[Part, dict[Piece, int]]) -> bool:
        """For a replacement: room beside the old block, which goes only then."""
        if block is not None:
            block.holds += 1
        units = {
            Budget.GLOBAL: self._units(wanted, Part.DENSE) + self._units(wanted, Part.SPARSE),
            Budget.CHECKPOINT: self._units(wanted, Part.CHECKPOINT),
        }
        fits = [self.room(DRAM, budget, need) for budget, need in units.items() if need]
        if block is not None:
            for copy in list(block.copies) if fits[0] else ():
                self.drop(copy, Reason.REPLACED)
            block.holds -= 1
        return fits[0]

    def _units(self, wanted: dict[Part, dict[Piece, int]], part: Part) -> int:
        return sum(wanted.get(part, {}).values())

    def _place(
        self, block: Block, wanted: dict[Part, dict[Piece, int]]
    ) -> list[tuple[Copy, Piece]]:
        """Required pieces together or not at all; window and state beside them if they fit too."""
        copies = {
            part: self.at(block, DRAM, part) or self.open_copy(block, DRAM, part) for part in wanted
        }
        for copy in copies.values():
            copy.fills += 1
        placed: list[tuple[Copy, Piece]] = []
        is_refused = False
        for parts in ((Part.DENSE, Part.SPARSE), (Part.CHECKPOINT,)):
            need = sum(self._units(wanted, part) for part in parts)
            if not need or is_refused:
                continue
            if not self.room(DRAM, Budget(parts[0] is Part.CHECKPOINT), need):
                is_refused = True
                continue
            for part in parts:
                for piece, units in wanted.get(part, {}).items():
                    copies[part].pieces[piece] = units
                    placed.append((copies[part], piece))
        for copy in copies.values():
            if all(each is not copy for each, _ in placed):
                self.close(copy, Reason.NO_SPACE, self.now_s)
        return placed

    def close(self, copy: Copy, reason: Reason, now_s: float) -> None:
        copy.fills -= 1
        if copy.is_doomed:
            self.free_if_unused(copy)
        elif not copy.pieces:
            self.drop(copy, reason)
        elif not copy.is_ready and not copy.fills:
            copy.due_s = now_s + self.limits.incomplete_ttl_s

    def commit(self, session: int, id_: int, now_s: float) -> bool | None:
        """None: lost. Else whether the block is readable."""
        fill = self.fills.get(id_)
        if fill is None or fill.session != session:
            return None
        if any(copy.is_doomed for copy, _ in fill.pieces):
            self.end_fill(id_, now_s, keep=False)
            return None
        for copy, piece in sorted(fill.pieces, key=lambda each: each[1]):
            self.written(copy, piece, now_s)
        del self.fills[id_]
        for copy in dict.fromkeys(copy for copy, _ in fill.pieces):
            self.close(copy, Reason.INCOMPLETE, now_s)
        self.let_go([fill.block])
        request = self.requests.get(fill.request) if fill.request else None
        is_own = request is not None and request.ns == fill.block.ns
        if request is not None and is_own and self.is_readable(fill.block):
            if fill.block not in request.sealed:
                request.sealed.append(fill.block)
            self.seal(request, [fill.block])
        return self.is_readable(fill.block)

    def end_fill(self, id_: int, now_s: float, *, keep: bool) -> None:
        fill = self.fills.pop(id_)
        pieces = tuple(sorted(piece for _, piece in fill.pieces))
        units = sum(copy.pieces.pop(piece) for copy, piece in fill.pieces)
        for copy in dict.fromkeys(copy for copy, _ in fill.pieces):
            self.close(copy, Reason.FILL_LOST, now_s)
        self.let_go([fill.block])
        freed = fill.block, pieces
        if keep:
            until_s = now_s + self.limits.quarantine_s
            self.kept.append(Kept(fill.session, until_s, units, freed))
        else:
            self._freed(DRAM, *freed, Reason.FILL_LOST)

    def seal(self, request: Request, blocks: Sequence[Block]) -> int:
        """Blocks join the path of a request, with what is above them, as far as the share of running requests goes."""
        fresh = [block for block in blocks if block not in request.path]
        for block in fresh:
            added = [at for at in self.line(block) if at not in request.path]
            if not self._has_share(added):
                request.is_whole = False
                break
            for at in added:
                self.running_units.setdefault(at, self.units_by_tier(at))
                request.path.append(at)
                at.holds += 1
        spec = self.specs[request.ns]
        keep = -(-spec.recent_tokens // spec.block_tokens)
        recent = [block for block in request.recent if block not in fresh] + fresh
        request.recent = recent[-keep:] if keep else []
        return len(fresh)

    def _has_share(self, blocks: Sequence[Block]) -> bool:
        held = dict.fromkeys(self.tiers, 0)
        more = {at: self.units_by_tier(at) for at in blocks if at not in self.running_units}
        for units in (*self.running_units.values(), *more.values()):
            for tier, count in units.items():
                held[tier] += count
        grown = {tier for units in more.values() for tier in units}
        return all(
            held[tier] <= int(self.tiers[tier].capacity_units * self.tiers[tier].lease_share)
            for tier in grown
        )

    # ---- leases

    def acquire(
        self,
        session: int,
        ns: int,
        keys: Sequence[str],
        groups: set[int],
        *,
        load: bool,
        loads: list[int],
        expires_s: float,
        now_s: float,
    ) -> Lease:
        """`loads`: ids of the tasks that the catalog began, in order."""
        found = [self.blocks.get((ns, key)) for key in keys]
        path = self.hold([block for block in found if block is not None and block.copies])
        lease = Lease(session, path, [], [], expires_s)
        parts = sorted({self.specs[ns].groups[g].part for g in groups})
        for block in found:
            copies = self._read(block, parts, load, loads) if block else []
            lease.copies.append(copies)
            lease.blocks.append(block if copies else None)
        hit = [block for block in lease.blocks if block is not None]
        if hit:
            self.touch(hit, hit=True, now_s=now_s)
        return lease

    def _read(
        self, block: Block, parts: Sequence[Part], load: bool, loads: list[int]
    ) -> list[Copy]:
        if parts[0] is not Part.CHECKPOINT and not self.is_readable(block):
            return []
        chosen: list[Copy] = []
        for part in parts:
            if part is not Part.CHECKPOINT and not self.needed(block, part):
                continue
            copy = self._in_dram(block, part, load, loads)
            if copy is None and part is Part.CHECKPOINT:
                continue
            if copy is None or not self._count_reader(copy):
                for each in chosen:
                    self.unread(each)
                return []
            chosen.append(copy)
        return chosen

    def _in_dram(self, block: Block, part: Part, load: bool, loads: list[int]) -> Copy | None:
        """The copy to read, loaded or being loaded if need be."""
        copy = self.at(block, DRAM, part)
        if copy is not None and copy.is_ready:
            return copy
        sources = self.ready(block, part)
        if not sources:
            return None
        if copy is not None:
            is_loading = any(task.target is copy for task in self.tasks.values())
            return copy if is_loading else None
        return self.begin(sources[0], DRAM, loads) if load else None

    def _count_reader(self, copy: Copy) -> bool:
        share = int(self.tiers[DRAM].capacity_units * self.tiers[DRAM].lease_share)
        if not copy.readers and self.leased() + copy.units > share:
            return False
        copy.readers += 1
        return True

    def grant(self, id_: int, now_s: float) -> list[ReadStatus]:
        """Status of each key; what cannot be read leaves the lease, and one that reads nothing ends."""
        lease = self.leases[id_]
        status: list[ReadStatus] = []
        for i, copies in enumerate(lease.copies):
            if copies and all(copy.is_ready and not copy.is_doomed for copy in copies):
                status.append(ReadStatus.HIT)
                continue
            is_pending = bool(copies) and not any(copy.is_doomed for copy in copies)
            status.append(ReadStatus.PENDING if is_pending else ReadStatus.MISS)
            lease.copies[i] = []
            for copy in copies:
                self.unread(copy)
        if not any(lease.copies):
            self.end_lease(id_, now_s, keep=False)
        return status

    def end_lease(self, id_: int, now_s: float, *, keep: bool) -> None:
        lease = self.leases.pop(id_)
        copies = [copy for copies in lease.copies for copy in copies]
        if keep and copies:
            until_s = now_s + self.limits.quarantine_s
            self.kept.append(Kept(lease.session, until_s, copies=tuple(copies)))
        else:
            for copy in copies:
                self.unread(copy)
        self.let_go(lease.path)

    # ---- copies between tiers

    def begin(self, source: Copy, target: TierId, tasks: list[int]) -> Copy | None:
        """The target copy of a new task; its id is the next of `tasks`."""
        block = source.block
        there = self.at(block, target, source.part)
        if there is not None:
            is_idle = there.is_ready and not there.readers and not there.fills
            less, more = self.complete(there), self.complete(source)
            if not is_idle or not less < more:
                return None
            self.drop(there, Reason.SUPERSEDED)
        source.readers += 1
        copy = self.open_copy(block, target, source.part)
        copy.fills = 1
        groups = self.specs[block.ns].groups  # a disk may keep it in less, memory does not
        pieces = {piece: groups[piece[0]].bytes_per_block // UNIT_BYTES for piece in source.written}
        if not self.room(target, copy.budget, sum(pieces.values())):
            copy.fills = 0
            self.drop(copy, Reason.NO_SPACE)
            self.unread(source)
            return None
        copy.pieces = pieces
        self.tasks[tasks.pop(0)] = Task(source, copy)
        return copy

    def commit_copy(self, id_: int, units: dict[Piece, int], now_s: float) -> None:
        task = self.tasks.pop(id_)
        copy = task.target
        copy.fills -= 1
        copy.pieces.update(units)
        if copy.is_doomed:
            self.free_if_unused(copy)
        else:
            for piece in sorted(units):
                self.written(copy, piece, now_s)
        self.unread(task.source)

    def abort_copy(self, id_: int, reason: Reason) -> None:
        task = self.tasks.pop(id_)
        task.target.fills -= 1
        if task.target.is_doomed:
            self.free_if_unused(task.target)
        else:
            self.drop(task.target, reason)
        if reason is Reason.CORRUPT and not task.source.is_doomed:
            self.drop(task.source, reason)
        self.unread(task.source)

    def is_admitted(self, copy: Copy) -> bool:
        room = int(self.limit(NVME, copy.budget) * self.tiers[NVME].high)
        fits = self.used(NVME, copy.budget) + copy.units <= room
        return fits or copy.block.hits >= self.tiers[NVME].admit_hits
