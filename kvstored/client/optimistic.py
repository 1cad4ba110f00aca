"""Get without a message: what the projection says is copied to private memory, and counts only if the entry did not change meanwhile and
the private copy has its checksum. Everything else is read by Acquire.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvstored.client.channel import LocalLink, Session
from kvstored.client.copying import Bytes, Copier, Piece
from kvstored.client.links import Glance
from kvstored.client.projected import NOT_THERE, Entry, Index
from kvstored.client.reports import Reports
from kvstored.client.results import GetResult, OptimisticReads
from kvstored.client.rows import blocks_of, outputs_of
from kvstored.client.segments import Segments
from kvstored.core.calls import ReadStatus
from kvstored.core.types import TierId
from kvstored.errors import KvstoredError

_HIT, _MISS = ReadStatus.HIT, ReadStatus.MISS
_DRAM, _NOWHERE = int(TierId.DRAM), 255


class Optimistic:
    """Of one client in one process. The projection is that of the session's boot; a session without one has no optimistic reads."""

    def __init__(self, segments: Segments, copier: Copier, reports: Reports) -> None:
        self.reports = reports
        self.reads = OptimisticReads()
        self._segments = segments
        self._copier = copier
        self._of: tuple[Session, Index | None] | None = None

    def read(self, link: LocalLink, glance: Glance, timeout_s: float) -> GetResult | None:
        """What could be read so, the other keys as misses; None where that is nothing."""
        known = self._of
        if known is None or known[0] is not link.session:
            known = self._of = (link.session, _index_of(link, timeout_s))
        index = known[1]
        if index is None:
            return None
        keys = glance.keys.keys
        found, odd = index.find(keys, glance.digest, glance.seed)
        reads = self.reads
        reads.changed += odd
        reads.absent += found.count(NOT_THERE) - odd
        hits = [entry.length != 0 for entry in found]
        if True not in hits:
            return None
        sizes = np.array([[entry.length] for entry in found], dtype=np.uint64)
        outputs = outputs_of(sizes, hits, glance.out)
        pieces = [
            Piece(output, (self._shared(link, entry, timeout_s),))
            for (output,), entry in zip(outputs, found, strict=True)
            if output is not None
        ]
        self._check(index, found, hits, self._copier.copy_out(pieces))
        count = hits.count(True)
        if count:
            reads.hits += count
            whole = count == len(keys)
            mine = keys if whole else [k for k, hit in zip(keys, hits, strict=True) if hit]
            self.reports.add(glance.digest, mine)
        return _result(found, outputs, hits)

    def _shared(self, link: LocalLink, entry: Entry, timeout_s: float) -> Bytes:
        segment = self._segments.mapped(
            entry.segment, link.session.epoch, lambda n: link.connection.segment(n, timeout_s)
        )
        return segment[entry.offset : entry.offset + entry.length]

    def _check(
        self, index: Index, found: Sequence[Entry], hits: list[bool], sums: Sequence[int]
    ) -> None:
        """No hits any more: what changed, and what has another checksum."""
        copied = (i for i, hit in enumerate(list(hits)) if hit)
        for i, checksum in zip(copied, sums, strict=True):
            entry = found[i]
            if not index.is_current(entry):
                self.reads.changed += 1
                hits[i] = False
            elif checksum != entry.checksum:
                self.reads.mismatched += 1
                hits[i] = False


def completed(
    glance: Glance,
    seen: GetResult | None,
    acquire: Callable[[Glance], GetResult],
) -> GetResult:
    """What was seen, with the rest acquired."""
    if seen is None:
        return acquire(glance)
    rest = [i for i, block in enumerate(seen.blocks) if block is None]
    if not rest:
        return seen
    got = acquire(glance.part(rest))
    blocks, status, tiers = list(seen.blocks), list(seen.status), bytearray(seen.tiers)
    generations = list(seen.generations)
    for j, i in enumerate(rest):
        blocks[i], status[i], tiers[i] = got.blocks[j], got.status[j], got.tiers[j]
        generations[i] = got.generations[j]
    return GetResult(
        blocks=tuple(blocks),
        status=tuple(status),
        tiers=bytes(tiers),
        generations=tuple(generations),
        miss_reason=got.miss_reason,
        corrupt=got.corrupt,
    )


def _index_of(link: LocalLink, timeout_s: float) -> Index | None:
    """None where the daemon has none for this client; it is not asked again in this session."""
    if not link.session.has_projection:
        return None
    try:
        return Index(link.connection.projection(timeout_s), link.session.epoch)
    except KvstoredError:
        # the next message tells what is wrong; until then everything is acquired
        return None


def _result(
    found: Sequence[Entry], outputs: list[list[Bytes | None]], hits: Sequence[bool]
) -> GetResult:
    return GetResult(
        blocks=blocks_of(outputs, hits),
        status=tuple([_HIT if hit else _MISS for hit in hits]),
        tiers=bytes([_DRAM if hit else _NOWHERE for hit in hits]),
        generations=tuple([entry.generation for entry in found]),
        miss_reason="",
        corrupt=0,
    )
