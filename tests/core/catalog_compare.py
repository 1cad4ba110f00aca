"""How the state of the catalog is compared with the oracle's, and what every step of the state machine needs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from kvstored.core.calls import Fingerprint, Freed, Limits, TierLimits
from kvstored.core.catalog import Catalog
from kvstored.core.columnar import singly
from kvstored.core.columns import FIRST, READY, SINK
from kvstored.core.copying import Copying, CopyRun
from kvstored.core.readability import are_plainly_idle
from kvstored.core.types import Extent, NamespaceId, NamespaceSpec, Place, SessionId, as_rows
from tests.core.desk import BLOCK_TOKENS, Namer
from tests.core.oracle_claims import FullOracle
from tests.core.oracle_rows import DRAM, EVICTED, NVME, Gone

T = TypeVar("T")
LIMITS = Limits(
    lease_ttl_max_s=50.0,
    fill_ttl_max_s=50.0,
    quarantine_s=20.0,
    checkpoint_ttl_s=15.0,
    incomplete_ttl_s=12.0,
)
PATHS = (
    ("a", "b", "c", "d"),
    ("a", "b", "e"),
    ("a", "f"),
    ("g", "h"),
    ("a", "b", "p1"),
    (
        "a",
        "p1x",
    ),
    ("a", "p3"),
)
"""Chains of keys; a name p<n> is a last block of n tokens."""
PARENTS = {key: path[i - 1] if i else None for path in PATHS for i, key in enumerate(path)}


@dataclass(frozen=True)
class Profile:
    specs: tuple[NamespaceSpec, ...]
    dram: tuple[TierLimits, ...]
    nvme: tuple[TierLimits, ...]


def valid_of(key: str) -> int:
    return int(key[1]) if key.startswith("p") else BLOCK_TOKENS


class ComparingMachine(RuleBasedStateMachine):
    """`places`: of granted fills and leases; `discards`: tokens and units that wait for `discarded`; `tasks`: by the id of each copy."""

    catalog: Catalog
    oracle: FullOracle
    namers: list[Namer]
    sessions: list[SessionId]
    tasks: dict[int, Copying]
    discards: list[tuple[int, int]]
    generations: dict[tuple[int, str], tuple[int, int]]
    places: dict[tuple[str, int], list[Place]]

    @property
    def now_s(self) -> float:
        return self.oracle.now_s

    def begun(self, copying: Iterable[Copying]) -> list[int]:
        ids: list[int] = []
        for each in copying:
            mine = list(each.ids) if isinstance(each, CopyRun) else [each.id]
            self.tasks.update(dict.fromkeys(mine, each))
            ids += mine
        return ids

    def name_of(self, ns: int, fingerprint: Fingerprint) -> str:
        return self.namer_of(ns).names[fingerprint]

    def compare(self) -> None:
        self.compare_gone()
        self.catalog.check()
        self.compare_copies()
        self.compare_reading()
        self.compare_places()

    def compare_gone(self) -> None:
        """What was forgotten, in the order in which it was evicted; nothing that is still read or written is freed."""
        freed = [effect for effect in singly(self.catalog.drain()) if isinstance(effect, Freed)]
        gone = [self.gone_of(effect) for effect in freed]
        evicted = [each for each in gone if each[4] in EVICTED]
        assert evicted == [each for each in self.oracle.gone if each[4] in EVICTED]
        assert sorted(gone) == sorted(self.oracle.gone)
        self.oracle.gone = []
        self.discards.extend((effect.token, effect.units) for effect in freed if effect.token)
        covered = self.covered()
        for effect in freed:
            units = {unit for piece in effect.pieces for unit in units_of(piece.place)}
            assert effect.tier is not DRAM or not units & covered, "freed under a reader or writer"

    def gone_of(self, effect: Freed) -> Gone:
        pieces = tuple(sorted((piece.group, piece.shard) for piece in effect.pieces))
        name = self.name_of(effect.ns, effect.fingerprint) if effect.ns >= 0 else ""
        return effect.tier, effect.ns, name, pieces, effect.reason

    def covered(self) -> set[tuple[int, int]]:
        """Units of open fills and granted leases."""
        open_ = {("fill", id_) for id_ in self.oracle.fills}
        open_ |= {("lease", id_) for id_ in self.oracle.leases}
        open_ |= {("aside", id_) for id_ in self.oracle.asides}
        self.places = {at: places for at, places in self.places.items() if at in open_}
        return {
            unit for places in self.places.values() for place in places for unit in units_of(place)
        }

    def compare_copies(self) -> None:
        books = self.catalog.books
        assert self.catalog.blocks == len(self.oracle.blocks)
        kept = []
        for (ns, key), block in self.oracle.blocks.items():
            fingerprint = self.fingerprint_of(ns, key)
            row = books.index.find_one(fingerprint)
            assert row >= 0, f"no row of {key}"
            assert int(books.blocks.holds[row]) == block.holds, f"holds of {key}"
            assert int(books.blocks.hits[row]) == block.hits, f"hits of {key}"
            copies = self.catalog.looking.copies_of(NamespaceId(ns), fingerprint)
            assert len(copies) == len(block.copies), f"copies of {key}"
            for at, copy in zip(copies, block.copies, strict=True):
                kept.append(at)
                table = books.copies
                assert (table.tier[at], table.part[at]) == (copy.tier, copy.part)
                assert (table.readers[at], table.fills[at]) == (copy.readers, copy.fills)
                assert table.units[at] == copy.units
                assert bool(table.state[at] == READY) is copy.is_ready
                assert bool(table.flags[at] & FIRST) is copy.is_first, f"first victim {key}"
                assert bool(table.flags[at] & SINK) is copy.is_sink, f"sink {key}"
        assert books.copies.live == len(kept) + len(self.oracle.doomed)
        plainly = are_plainly_idle(books, as_rows(kept)).tolist()
        for at, is_plain in zip(kept, plainly, strict=True):
            assert books.is_idle(at) or not is_plain, "it is told idle at once, and is not"

    def fingerprint_of(self, ns: int, key: str) -> Fingerprint:
        low, high = self.namer_of(ns).batch([key]).fingerprints[0].tolist()
        return low, high

    def namer_of(self, ns: int) -> Namer:
        return next(namer for namer in self.namers if namer.layout.id == ns)

    def compare_reading(self) -> None:
        for namer in self.namers:
            ns = namer.layout.id
            for path in PATHS:
                found = self.catalog.match(ns, namer.batch(path), 0, self.now_s)
                expected = self.oracle.match(ns, path)
                assert (found.hit_blocks, found.hit_tokens, found.checkpoint_tokens) == expected
                assert found.replay_tokens == found.hit_tokens - found.checkpoint_tokens
                assert sum(found.tier_blocks) == found.hit_blocks
            keys = sorted(PARENTS)
            tiers, generations = self.catalog.locate(ns, namer.batch(keys))
            for key, mask, generation in zip(
                keys, tiers.tolist(), generations.tolist(), strict=True
            ):
                self.compare_located(ns, key, mask, generation)

    def compare_located(self, ns: int, key: str, mask: int, generation: int) -> None:
        block = self.oracle.blocks.get((ns, key))
        if block is None or not self.oracle.is_readable(block):
            assert (mask, generation) == (0, 0)
            return
        whole = [
            {copy.tier for copy in self.oracle.ready(block, part)}
            for part in self.oracle.parts(block)
        ]
        assert mask == 0x80 | sum(1 << tier for tier in set.intersection(*whole))
        known = self.generations.setdefault((ns, key), (block.life, generation))
        if known[0] != block.life:
            assert generation > known[1], "a new life of a block needs a new generation"
            self.generations[ns, key] = block.life, generation
        else:
            assert generation == known[1]

    def compare_places(self) -> None:
        """No two live places overlap, and what is taken is what the oracle says."""
        books = self.catalog.books
        for tier in (DRAM, NVME):
            seen: set[tuple[int, int]] = set()
            for piece in range(books.pieces.top):
                copy = int(books.pieces.copy[piece])
                if copy >= 0 and books.copies.tier[copy] == tier:
                    units = units_of(books.place(piece))
                    assert not seen & units, "two live places overlap"
                    seen |= units
            assert books.space.books[tier].extents.free_units == self.oracle.free(tier)


def units_of(place: Iterable[Extent]) -> set[tuple[int, int]]:
    return {(extent.segment, extent.start + i) for extent in place for i in range(extent.units)}
