"""The catalog with the tiers whose books it keeps, and the carrying out of its effects.

Every catalog call is followed by `apply`, in the same turn of the loop, before anything else can be granted: space that the catalog
forgot may be granted by its very next call, so its records must be free by then.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstored.clock import Clock
from kvstored.core.calls import Fingerprint, Freed, Hidden, Leased, Linked, Reason, Visible
from kvstored.core.catalog import Catalog
from kvstored.core.columnar import FreedMany, Places, VisibleMany
from kvstored.core.types import Layout, NamespaceId, Place, Rows, TierId
from kvstored.core.usage import blocks_in
from kvstored.errors import KvstoredError
from kvstored.metrics import Metrics
from kvstored.store.events import EventKind, Events
from kvstored.store.lane import Ended, Lane, Urgency
from kvstored.store.pace import Pace
from kvstored.store.showing import Showing
from kvstored.tiers.arena import Arena
from kvstored.tiers.base import Counters, Crossed, Link, PieceRef, Tier
from kvstored.tiers.coding import Coding
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.projection import Projection
from kvstored.tiers.record import Record

DISCARD_BATCH_PIECES = 4096

_KINDS = {
    Reason.REMOVED: EventKind.REMOVED,
    Reason.DISCARDED: EventKind.REMOVED,
    Reason.REPLACED: EventKind.REMOVED,
    Reason.CORRUPT: EventKind.CORRUPTED,
}
_SILENT = (Reason.FILL_LOST, Reason.INCOMPLETE, Reason.IO_ERROR, Reason.NO_SPACE)
"""Such copies were never readable, so nobody is told that they went."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """What bytes lie in, and whose threads move them. `disk` is None where NVMe is off, `hbm` where no GPU is configured.

    What the NVMe tier has beside `Tier`: `flush_disk_counters` keeps heat, hits and last use, `relink_disk` parents that became known late, `disk_index_share`
    tells how full the index is, `unpack_disk` reads what crosses to a GPU packed; `coding` chooses its frames and wants to know the namespaces;
    `described` gives records of pieces, None of what is not there, whose slab files are in `slabs`.
    """

    arena: Arena
    arena_lane: Lane
    disk: Tier | None
    disk_lane: Lane
    flush_disk_counters: Callable[[Sequence[Counters]], None]
    relink_disk: Callable[[Sequence[Link]], None]
    disk_index_share: Callable[[], float]
    unpack_disk: Callable[[Sequence[tuple[PieceRef, Place, int]]], list[Crossed | KvstoredError]]
    coding: Coding
    projection: Projection
    described: Callable[[Sequence[tuple[PieceRef, Place]]], list[Record | None]]
    slabs: str = ""
    hbm: Hbm | None = None
    hbm_lane: Lane | None = None

    def tier(self, tier: TierId) -> Tier:
        if tier is TierId.DRAM:
            return self.arena
        if tier is TierId.HBM:
            return self.hbm_records
        assert tier is TierId.NVME, f"no such tier here: tier={tier}"
        assert self.disk is not None, "the NVMe tier is off"
        return self.disk

    @property
    def hbm_records(self) -> Hbm:
        assert self.hbm is not None, "the HBM tier is off"
        return self.hbm

    def lane(self, tier: TierId) -> Lane:
        """Whose threads carry bytes between DRAM and this tier."""
        if tier is TierId.HBM:
            assert self.hbm_lane is not None, "the HBM tier is off"
            return self.hbm_lane
        return self.disk_lane

    def lanes(self) -> tuple[Lane, ...]:
        """Those that there are."""
        own = (self.arena_lane, self.disk_lane)
        return own if self.hbm_lane is None else (*own, self.hbm_lane)


class Shell:
    """`counts` are facts for metrics and stat, by (name, label)."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        events: Events,
        clock: Clock,
        metrics: Metrics,
        report: Callable[[str, BaseException], None],
    ) -> None:
        self.behind = catalog
        self.unsettled: list[Callable[[], None]] = []
        self.tiers = tiers
        self.events = events
        self.metrics = metrics
        self.counts: Counter[tuple[str, str]] = Counter()
        self.layouts: dict[NamespaceId, Layout] = {}
        space = catalog.books.space
        self.showing = Showing(tiers.projection, tiers.arena, space, self.layouts)
        self.report = report
        self._clock = clock
        self._discards: list[Freed] = []
        self._discarding = 0

    @property
    def catalog(self) -> Catalog:
        """Its books are whole: those of puts that were answered before they were made are made first. Not to be kept over an await."""
        if self.unsettled:
            self.settle()
        return self.behind

    def settle(self) -> None:
        """Makes the books of what was answered. A fault in one is reported and the others are made all the same: whoever looks at the books now has
        no part in it, and what was answered cannot be refused any more."""
        unsettled, self.unsettled = self.unsettled, []
        for each in unsettled:
            try:
                each()
                self.apply()
            except Exception as error:  # noqa: BLE001 - border of what was answered before
                self.report("books of what was answered could not be made", error)

    def now_s(self) -> float:
        return self._clock.now_s()

    def elapsed_s(self) -> float:
        return self._clock.elapsed_s()

    @property
    def discards_waiting(self) -> int:
        """Copies on NVMe that are forgotten but whose space is not free yet."""
        return len(self._discards) + self._discarding

    def apply(self, moved: Record | None = None) -> None:
        """Carry out what the catalog's last call asks for. Discards on NVMe run in the background.

        `moved`: a record of the copy that this call committed, where bytes came from another tier.
        """
        freed: list[Place] = []
        freed_many: list[Places] = []
        for effect in self.behind.drain():
            if isinstance(effect, FreedMany) and effect.tier is TierId.HBM:
                for each in effect.each():
                    self._free_hbm(each)
            elif isinstance(effect, FreedMany):
                self.showing.withdraw_many(effect)
                self._free_many(effect)
                freed_many.append(effect.places)
            elif isinstance(effect, VisibleMany):
                self.showing.show_many(effect)
                self._tell_visible_many(effect)
            elif isinstance(effect, Freed):
                if effect.tier is TierId.HBM:
                    self._free_hbm(effect)
                    continue
                self._count_freed(effect)
                if effect.tier is TierId.DRAM:
                    self.showing.withdraw(effect.fingerprint, effect.pieces)
                    self._tell_freed(effect, self.tiers.arena.key_at(effect.pieces[0].place))
                    freed.extend(piece.place for piece in effect.pieces)
                else:
                    self._discards.append(effect)
            elif isinstance(effect, Hidden):
                self.showing.withdraw(effect.fingerprint, effect.pieces)
            elif isinstance(effect, Leased):
                self.tiers.arena.set_leased(effect.heads, leased=effect.leased)
            elif isinstance(effect, Linked):
                self._relink(effect)
            else:
                self.showing.show(effect)
                self._tell_visible(effect, moved)
        self.showing.settle()
        if freed:
            self.tiers.arena.mark_free(freed)
        for places in freed_many:
            self.tiers.arena.free_many(places)
        if self._discards and not self._discarding:
            self.discard()

    async def clear(self, ns: NamespaceId) -> int:
        """Forget the blocks of a namespace in slices, between which others are served."""
        return await self.forget(ns, blocks_in(self.catalog.books, ns))

    async def forget(self, ns: NamespaceId, rows: Rows) -> int:
        """The same for these blocks of it, deepest first; not for those that took their rows meanwhile. Blocks that were readable."""
        index = self.catalog.books.index
        names = index.fingerprints[rows]
        blocks, begin, pace = 0, 0, Pace()
        while begin < len(rows):
            end, begun_s = min(begin + pace.step, len(rows)), self.elapsed_s()
            part = rows[begin:end]
            part = part[(index.fingerprints[part] == names[begin:end]).all(axis=1)]
            blocks += self.catalog.clear_rows(ns, part, self.now_s())
            self.apply()
            begin = end
            pace.took(self.elapsed_s() - begun_s)
            if begin < len(rows):
                await asyncio.sleep(0)
        return blocks

    def discard(self) -> None:
        """Begin the next batch of discards on NVMe unless one is under way. The janitor calls it again after a failure."""
        if self._discarding or not self._discards:
            return
        disk = self.tiers.disk
        assert disk is not None, "a copy was freed on a tier that is off"
        batch, pieces = 0, 0
        while batch < len(self._discards) and pieces < DISCARD_BATCH_PIECES:
            pieces += len(self._discards[batch].pieces)
            batch += 1
        taken, self._discards = self._discards[:batch], self._discards[batch:]
        items = [item for freed in taken for item in items_of(freed)]
        try:
            running = self.tiers.disk_lane.submit(lambda: disk.discard(items), Urgency.BACKGROUND)
        except KvstoredError:
            self._discards = taken + self._discards
            return
        self._discarding = len(taken)
        running.when_ended(lambda ended: self._discarded(taken, ended))

    def _discarded(self, taken: list[Freed], ended: Ended[list[Record | None]]) -> None:
        self._discarding = 0
        if ended.error is not None:
            # the records may still be there: the space must not be granted, the janitor tries again
            self._discards = taken + self._discards
            self.counts["discard_failures", ""] += 1
            self.report("discard failed", ended.error)
            return
        records = iter(ended.unwrap())
        for freed in taken:
            found = [record for _, record in zip(freed.pieces, records, strict=False)]
            key = next((record.key for record in found if record is not None), b"")
            self._tell_freed(freed, key)
            self.catalog.discarded(freed.token)
        self.apply()

    def _relink(self, linked: Linked) -> None:
        """Records on disk lag behind; one that is not written in time makes its block a root after a restart, nothing worse."""
        name = fingerprint_bytes(linked.fingerprint)
        parent = fingerprint_bytes(linked.parent)
        links = [
            Link(PieceRef(name, row.group, row.shard), row.place, parent, linked.depth)
            for row in linked.pieces
        ]
        if linked.tier is TierId.DRAM:
            self.tiers.arena.relink(links)
            return
        if linked.tier is TierId.HBM:
            self.tiers.hbm_records.relink(links)
            return
        relink = self.tiers.relink_disk
        try:
            running = self.tiers.disk_lane.submit(lambda: relink(links), Urgency.BACKGROUND)
        except KvstoredError:
            self.counts["relink_failures", ""] += len(links)
            return
        running.when_ended(lambda ended: self._relinked(len(links), ended))

    def _relinked(self, links: int, ended: Ended[None]) -> None:
        if ended.error is not None:
            self.counts["relink_failures", ""] += links
            self.report("relink failed", ended.error)

    def _free_hbm(self, freed: Freed) -> None:
        hbm = self.tiers.hbm_records
        self._count_freed(freed)
        self._tell_freed(freed, hbm.key_at(freed.pieces[0].place))
        hbm.mark_free([piece.place for piece in freed.pieces])

    def _count_freed(self, freed: Freed) -> None:
        if not freed.pieces:  # an extent that others referred to, not a copy
            return
        self.counts["forgotten_copies", f"{freed.tier.name.lower()}:{freed.reason}"] += 1

    def _tell_freed(self, freed: Freed, key: bytes) -> None:
        layout = self.layouts.get(freed.ns)
        if layout is None or freed.reason in _SILENT:
            return
        kind = _KINDS.get(freed.reason, EventKind.EVICTED)
        self.events.add(kind, digest=layout.digest, key=key, tier=freed.tier)

    def _free_many(self, freed: FreedMany) -> None:
        label = f"{freed.tier.name.lower()}:{freed.reason}"
        self.counts["forgotten_copies", label] += freed.places.size
        layout = self.layouts.get(freed.ns)
        if layout is None or freed.reason in _SILENT:
            return
        lines = self.tiers.arena.lineages(freed.places)
        kind = _KINDS.get(freed.reason, EventKind.EVICTED)
        self.events.add_run(
            kind,
            digest=layout.digest,
            tier=freed.tier,
            keys=lines.keys,
            key_bytes=lines.key_bytes,
        )

    def _tell_visible_many(self, visible: VisibleMany) -> None:
        layout = self.layouts.get(visible.ns)
        if layout is None:
            return
        lines = self.tiers.arena.lineages(visible.lines or visible.places)
        self.events.add_run(
            EventKind.LOADED if visible.is_load else EventKind.STORED,
            digest=layout.digest,
            tier=visible.tier,
            keys=lines.keys,
            key_bytes=lines.key_bytes,
            parents=lines.parents,
            depths=visible.depths,
        )

    def _tell_visible(self, visible: Visible, moved: Record | None) -> None:
        layout = self.layouts.get(visible.ns)
        if layout is None or not visible.pieces:
            return
        is_load = moved is not None and visible.tier <= TierId.DRAM
        key, parent = (
            (moved.key, moved.parent)
            if moved
            else self.tiers.arena.lineage_at(visible.pieces[0].place)
        )
        self.events.add(
            EventKind.LOADED if is_load else EventKind.STORED,
            digest=layout.digest,
            key=key,
            tier=visible.tier,
            parent=parent,
            depth_blocks=visible.depth,
        )


def fingerprint_bytes(fingerprint: Fingerprint) -> bytes:
    return fingerprint[0].to_bytes(8, "little") + fingerprint[1].to_bytes(8, "little")


def items_of(freed: Freed) -> Sequence[tuple[PieceRef, Place]]:
    name = fingerprint_bytes(freed.fingerprint)
    return [(PieceRef(name, p.group, p.shard), p.place) for p in freed.pieces]
