"""The rest of the oracle: pins, requests, the passing of time, ends of sessions, removal, write-back."""

from collections.abc import Sequence

from kvstored.core.calls import Reason
from kvstored.core.types import Part
from tests.core.oracle_asides import AsideOracle
from tests.core.oracle_rows import DRAM, NVME, Block, Copy, Kept, Pin, Request


class FullOracle(AsideOracle):
    # ---- claims

    def pin(self, ns: int, keys: Sequence[str]) -> tuple[list[Block], int, bool]:
        """Blocks to pin, their units, and whether they are within the share together with what is above them."""
        found = [self.blocks.get((ns, key)) for key in keys]
        blocks = [block for block in found if block is not None and self.is_readable(block)]
        path = list(dict.fromkeys(at for block in blocks for at in self.line(block)))
        pinned = dict.fromkeys(self.tiers, 0)
        for units in self.pin_units.values():
            for tier, more in units.items():
                pinned[tier] += more
        for block in path:
            if block not in self.pin_units:
                for tier, more in self.units_by_tier(block).items():
                    pinned[tier] += more
        fits = all(
            units <= int(self.tiers[tier].capacity_units * self.tiers[tier].pin_share)
            for tier, units in pinned.items()
        )
        return blocks, sum(sum(self.units_by_tier(block).values()) for block in blocks), fits

    def add_pin(self, id_: int, blocks: list[Block], hard: bool, until_s: float) -> None:
        path = self.hold(blocks)
        for block in path:
            self.pin_units.setdefault(block, self.units_by_tier(block))
        self.pins[id_] = Pin(blocks, path, hard, until_s)

    def removed(self, blocks: Sequence[Block]) -> None:
        """Removed by name: a pin holds nothing of them, and ends when nothing that it pinned is left."""
        for block in blocks:
            if block in self.pin_units:
                self.pin_units[block] = {}
        for id_, pin in list(self.pins.items()):
            if any(block in blocks for block in pin.rows) and not any(
                self.is_readable(block) for block in pin.rows
            ):
                self.unpin(id_)

    def run(self, ns: int, keys: Sequence[str]) -> list[Block]:
        """Blocks that there are, up to the first that there is not."""
        blocks: list[Block] = []
        for key in keys:
            block = self.blocks.get((ns, key))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def begin_request(self, at: tuple[int, bytes], ns: int, keys: Sequence[str]) -> None:
        blocks = self.run(ns, keys)
        self.requests[at] = Request(ns, [], [])
        self.seal(self.requests[at], blocks)
        self.touch(blocks, hit=False, now_s=self.now_s)

    def complete_request(self, at: tuple[int, bytes], *, discard: bool) -> int:
        request = self.requests.pop(at)
        for block in request.path:
            if not any(block in other.path for other in self.requests.values()):
                del self.running_units[block]
        self.let_go(request.path)
        dropped = 0
        for block in reversed(request.sealed) if discard else ():
            is_there = self.blocks.get((block.ns, block.key)) is block
            if is_there and not (block.children or block.holds or block.hits):
                dropped += bool(block.copies)
                self.drop_all([block], Reason.DISCARDED)
        return dropped

    # ---- forgetting

    def drop_all(self, blocks: Sequence[Block], reason: Reason) -> int:
        """Deepest first; answers how many were readable."""
        readable = 0
        for block in sorted(blocks, key=lambda each: -self.depth(each)):
            readable += self.is_readable(block)
            for copy in list(block.copies):
                self.drop(copy, reason)
        if reason is not Reason.DISCARDED:
            self.removed(blocks)
        return readable

    def retire(self, ns: int) -> None:
        self.retired.add(ns)
        for copy in self.all_copies():
            copy.is_first = copy.is_first or copy.block.ns == ns

    # ---- sessions and time

    def close_session(self, session: int, *, dead: bool) -> None:
        for at in [at for at in self.requests if at[0] == session]:
            self.complete_request(at, discard=False)
        for id_ in sorted(id_ for id_, fill in self.fills.items() if fill.session == session):
            self.end_fill(id_, self.now_s, keep=True)
        self.keep_asides(session)
        for id_ in sorted(id_ for id_, lease in self.leases.items() if lease.session == session):
            self.end_lease(id_, self.now_s, keep=True)
        if dead:
            self.writer_dead(session)

    def writer_dead(self, session: int) -> None:
        self._end_kept([kept for kept in self.kept if kept.session == session])

    def expire(self) -> tuple[int, int, int, int]:
        """Fills, leases, pins and copies that end."""
        now_s = self.now_s
        fills = sorted(id_ for id_, fill in self.fills.items() if fill.expires_s <= now_s)
        for id_ in sorted(fills, key=lambda each: self.fills[each].expires_s):
            self.end_fill(id_, now_s, keep=True)
        incomplete = [
            copy
            for copy in self.all_copies()
            if not copy.is_ready and not copy.fills and copy.pieces and copy.due_s <= now_s
        ]
        for copy in incomplete:
            self.drop(copy, Reason.INCOMPLETE)
        leases = sorted(id_ for id_, lease in self.leases.items() if lease.expires_s <= now_s)
        for id_ in leases:
            self.end_lease(id_, now_s, keep=True)
        pins = sorted(id_ for id_, pin in self.pins.items() if pin.expires_s <= now_s)
        for id_ in pins:
            self.unpin(id_)
        self._end_kept([kept for kept in self.kept if kept.until_s <= now_s])
        copies = len(incomplete) + self._expire_checkpoints()
        return len(fills), len(leases), len(pins), copies

    def _expire_checkpoints(self) -> int:
        ended = 0
        for copy in self.all_copies():
            if copy.part is not Part.CHECKPOINT or not copy.is_ready:
                continue
            if max(copy.block.last_s + self._lifetime_s(copy), copy.kept_s) > self.now_s:
                continue
            if copy.readers or copy.fills:
                copy.kept_s = self.now_s + self._lifetime_s(copy)
                continue
            self.drop(copy, Reason.EXPIRED)
            ended += 1
        return ended

    def _lifetime_s(self, copy: Copy) -> float:
        groups = self.specs[copy.block.ns].groups
        own = max((groups[g].retention_s for g in self.complete(copy)), default=0)
        return own or self.limits.checkpoint_ttl_s

    def _end_kept(self, ended: Sequence[Kept]) -> None:
        for kept in ended:
            self.kept.remove(kept)
            if kept.freed is not None:
                self._freed(DRAM, *kept.freed, Reason.FILL_LOST)
            for copy in kept.copies:
                self.unread(copy)

    # ---- write-back

    def try_write_back(
        self, ns: int, key: str, part: Part, task: int | None, *, everything: bool
    ) -> None:
        """The catalog tried this copy, and began the task, or found no room."""
        copy = self.at(self.blocks[ns, key], DRAM, part)
        assert copy is not None, "write-back of a copy that is not there"
        assert copy.is_ready, "write-back of a copy that is not ready"
        assert self.is_dirty(copy), "write-back of a clean copy"
        assert everything or self.is_admitted(copy), "write-back of a copy that is not admitted"
        began = self.begin(copy, NVME, [] if task is None else [task])
        assert (began is None) is (task is None)

    def left_behind(self) -> list[Copy]:
        """Dirty copies that a flush could still write: nothing of them is on disk, and the disk is large enough."""
        return [
            copy
            for copy in self.all_copies()
            if copy.tier is DRAM
            and copy.is_ready
            and self.at(copy.block, NVME, copy.part) is None
            and copy.units <= self.limit(NVME, copy.budget)
            and self.free(NVME) >= copy.units
            and self.used(NVME, copy.budget) + copy.units <= self.limit(NVME, copy.budget)
        ]

    def prefetch(self, ns: int, keys: Sequence[str], loads: list[int]) -> None:
        blocks = [self.blocks.get((ns, key)) for key in keys]
        for block in [block for block in blocks if self.is_readable(block)]:
            if block is None or self.blocks.get((ns, block.key)) is not block:
                continue
            for part in self.parts(block):
                sources = self.ready(block, part)
                if self.at(block, DRAM, part) is None and sources:
                    self.begin(sources[0], DRAM, loads)
