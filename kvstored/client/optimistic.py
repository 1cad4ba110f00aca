"""Get without a message: what the projection says is copied to private memory, and counts only if the entry did not change meanwhile and
the private copy has its checksum. Everything else is read by Acquire.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from kvstored.client.channel import LocalLink, Session
from kvstored.client.copying import Bytes, Copier, Run, copied_out
from kvstored.client.level import LEVEL_BLOCK_BYTES_MAX, LEVEL_BYTES_MAX, copied_level, level_rows
from kvstored.client.links import Glance
from kvstored.client.native_reads import NativeReads, is_spread
from kvstored.client.projected import MANY, Found, FoundMany, Index
from kvstored.client.reports import Reports
from kvstored.client.results import GetResult, OptimisticReads
from kvstored.client.rows import Rows, outputs_of, private_of, privates_of
from kvstored.client.runs import Privates, blocks_made, runs_between
from kvstored.client.scatter import scatter_all, walk_of
from kvstored.client.segments import Segments, extent_of
from kvstored.core.calls import ReadStatus
from kvstored.core.namespace import seed
from kvstored.core.types import Layout, NamespaceId, NamespaceSpec, TierId
from kvstored.errors import KvstoredError
from kvstored.wire.packing import Pieces

_HIT, _MISS = ReadStatus.HIT, ReadStatus.MISS
_DRAM, _NOWHERE = int(TierId.DRAM), 255
_ONE_HIT, _ONE_DRAM = (_HIT,), bytes([_DRAM])


class Optimistic:
    """Of one client in one process. The projection is that of the session's boot; a session without one has no optimistic reads."""

    def __init__(self, segments: Segments, copier: Copier, reports: Reports) -> None:
        self.reports = reports
        self.reads = OptimisticReads()
        self._segments = segments
        self._copier = copier
        self._natively = (
            None
            if copier.native is None
            else NativeReads(copier.native, copier, reports, self.reads, self._mapped)
        )
        self._of: tuple[Session, Index | None] | None = None

    def read(self, link: LocalLink, glance: Glance, timeout_s: float) -> GetResult | None:
        """What could be read so, the other keys as misses; None where that is nothing."""
        index = self._index(link, timeout_s)
        if index is None:
            return None
        keys = glance.keys.keys
        if not keys or (len(keys) > 1 and len(set(map(len, keys))) > 1):
            return None
        if self._natively is not None and (not glance.gathers or is_spread(glance)):
            return self._natively.read(link, index, glance, timeout_s)
        if glance.gathers:
            return self._read_into(link, index, glance, timeout_s)
        if len(keys) == 1:
            return self._read_one(link, index, glance, timeout_s)
        if len(keys) < MANY:
            found = index.find(keys, glance.digest, glance.seed)
        else:
            many = index.find_many(keys, glance.digest, glance.seed)
            level = self._read_level(link, index, many, glance, timeout_s)
            if level is not None:
                return level
            found = many.singly()
        lengths = found.lengths
        absent = lengths.count(0)
        self.reads.changed += found.odd
        self.reads.absent += absent - found.odd
        if absent == len(keys):
            return None
        privates, runs = self._runs(link, found, glance.out, timeout_s)
        hits = self._good(index, found, self._copier.copy_out(runs))
        mine = keys if all(hits) else [k for k, hit in zip(keys, hits, strict=True) if hit]
        self.reads.hits += len(mine)
        if mine:
            self.reports.add(glance.digest, mine)
        return GetResult(
            blocks=lambda: blocks_made(privates, hits),
            status=tuple([_HIT if hit else _MISS for hit in hits]),
            tiers=bytes([_DRAM if hit else _NOWHERE for hit in hits]),
            generations=tuple(found.generations),
            miss_reason="",
            corrupt=0,
        )

    def _read_one(
        self, link: LocalLink, index: Index, glance: Glance, timeout_s: float
    ) -> GetResult | None:
        """The same for one key: around a small block everything else would cost more than its copy."""
        found, reads = index.find(glance.keys.keys, glance.digest, glance.seed), self.reads
        length = found.lengths[0]
        if not length:
            reads.changed += found.odd
            reads.absent += 1 - found.odd
            return None
        segment = found.segments[0]
        segments = self._mapped(link, (segment,), timeout_s)
        shared = extent_of(segments, segment, found.offsets[0], length)
        private = private_of(length, glance.out)
        (checksum,) = copied_out(Run(private, (shared,), (length,)))
        if not index.is_unchanged(found.slots[0], found.sequences[0]):
            reads.changed += 1
            return None
        if checksum != found.checksums[0]:
            reads.mismatched += 1
            return None
        reads.hits += 1
        self.reports.add(glance.digest, glance.keys.keys)
        return GetResult(
            blocks=((private,),),
            status=_ONE_HIT,
            tiers=_ONE_DRAM,
            generations=(found.generations[0],),
            miss_reason="",
            corrupt=0,
        )

    def _read_into(
        self, link: LocalLink, index: Index, glance: Glance, timeout_s: float
    ) -> GetResult | None:
        """The same into buffers, where every key is there; None where one is not: then all are acquired."""
        keys, gathers = glance.keys.keys, [each for each in glance.gathers if each is not None]
        found = self._found(index, glance)
        absent, reads = found.lengths.count(0), self.reads
        reads.changed += found.odd
        reads.absent += absent - found.odd
        if absent or len(gathers) < len(keys):
            return None
        segments = self._mapped(link, set(found.segments), timeout_s)
        extents = map(partial(extent_of, segments), found.segments, found.offsets, found.lengths)
        walks = [
            walk_of((extent,), gather, glance.ranges)
            for extent, gather in zip(extents, gathers, strict=True)
        ]
        sums = scatter_all(walks, self._copier, checked=True)
        if not all(self._good(index, found, sums)):
            return None
        reads.hits += len(keys)
        self.reports.add(glance.digest, keys)
        return GetResult(
            blocks=(),
            status=_ONE_HIT * len(keys),
            tiers=_ONE_DRAM * len(keys),
            generations=tuple(found.generations),
            miss_reason="",
            corrupt=0,
            filled=((True,),) * len(keys),
        )

    def _found(self, index: Index, glance: Glance) -> Found:
        keys = glance.keys.keys
        if len(keys) < MANY:
            return index.find(keys, glance.digest, glance.seed)
        return index.find_many(keys, glance.digest, glance.seed).singly()

    def _mapped(
        self, link: LocalLink, numbers: Iterable[int], timeout_s: float
    ) -> dict[int, Bytes]:
        epoch = link.session.epoch
        return {
            number: self._segments.mapped(
                number, epoch, lambda n: link.connection.segment(n, timeout_s)
            )
            for number in numbers
        }

    def _read_level(
        self, link: LocalLink, index: Index, found: FoundMany, glance: Glance, timeout_s: float
    ) -> GetResult | None:
        """Many small blocks of one size that are all there, read with little looking at each; None where something is otherwise, or changed."""
        size, count = found.level_bytes, len(found.lengths)
        if not 0 < size <= LEVEL_BLOCK_BYTES_MAX or size * count > LEVEL_BYTES_MAX:
            return None
        rows = level_rows(glance.out, count, size)
        if rows is None:
            return None
        segment = int(found.segments[0])
        segments = self._mapped(link, (segment,), timeout_s)
        sums = copied_level(segments[segment], found.offsets, rows)
        if not ((found.checksums == sums) & index.are_unchanged(found)).all():
            return None
        self.reads.hits += count
        self.reports.add(glance.digest, glance.keys.keys)
        return GetResult(
            blocks=lambda: tuple((row,) for row in rows),
            status=(_HIT,) * count,
            tiers=bytes([_DRAM]) * count,
            generations=tuple(found.generations.tolist()),
            miss_reason="",
            corrupt=0,
        )

    def may_show(
        self, link: LocalLink, seed: int, packed: bytes, key_bytes: int, timeout_s: float
    ) -> bool:
        """Whether the projection has any of these keys, as far as that is known."""
        index = self._index(link, timeout_s)
        return index is not None and index.may_have(packed, key_bytes, seed)

    def _index(self, link: LocalLink, timeout_s: float) -> Index | None:
        known = self._of
        if known is None or known[0] is not link.session:
            known = self._of = (link.session, _index_of(link, timeout_s))
        return known[1]

    def _runs(
        self, link: LocalLink, found: Found, out: Rows | None, timeout_s: float
    ) -> tuple[Privates, list[Run]]:
        """Private sides of what was found, and the runs that carry it there: the pieces in their order, neighbours joined where many
        go into one array."""
        lengths = found.lengths
        places = [p for p in zip(found.segments, found.offsets, lengths, strict=True) if p[2]]
        segments = self._mapped(link, {segment for segment, _, _ in places}, timeout_s)
        sizes = np.array(lengths, dtype=np.uint64).reshape(-1, 1)
        is_one_array = out is None or isinstance(out, np.ndarray)
        if len(lengths) < MANY or not is_one_array:
            outputs = outputs_of(sizes, [length != 0 for length in lengths], out)
            apart = [output for (output,) in outputs]
            wanted = (private for private in apart if private is not None)
            return apart, [
                Run(private, (extent_of(segments, *place),), (place[2],))
                for private, place in zip(wanted, places, strict=True)
            ]
        is_there = sizes[:, 0] != 0
        first = np.concatenate(([0], np.cumsum(is_there, dtype=np.int64)))
        pieces = Pieces(np.array(places, dtype=np.uint64), first, sizes)
        privates = privates_of(sizes, is_there, out)
        return privates, runs_between(pieces, privates, segments)[1]

    def _good(self, index: Index, found: Found, sums: Sequence[int]) -> list[bool]:
        """Which keys were read: their entries did not change, and the copied bytes have their checksums."""
        unchanged, copied, reads = index.unchanged(found), iter(sums), self.reads
        good: list[bool] = []
        for length, checksum, is_current in zip(
            found.lengths, found.checksums, unchanged, strict=True
        ):
            is_same = bool(length) and next(copied) == checksum
            good.append(is_same and is_current)
            if length and not is_current:
                reads.changed += 1
            elif length and not is_same:
                reads.mismatched += 1
        return good


def seed_if_shown(digest: bytes, spec: NamespaceSpec) -> int | None:
    """What salts the fingerprints of a namespace, None for one that the daemon never shows."""
    layout = Layout(NamespaceId(0), digest, seed(digest), spec)
    return layout.seed if layout.is_plain and not spec.mutable else None


def _index_of(link: LocalLink, timeout_s: float) -> Index | None:
    """None where the daemon has none for this client; it is not asked again in this session."""
    if not link.session.has_projection:
        return None
    try:
        return Index(link.connection.projection(timeout_s), link.session.epoch)
    except KvstoredError:
        # the next message tells what is wrong; until then everything is acquired
        return None
