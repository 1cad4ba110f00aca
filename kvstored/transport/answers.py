"""What the store answered -> messages. Only translation."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvstored.core.asides import SetAside
from kvstored.core.calls import FillStatus, Granted, ReadBlock, ReadStatus, Reason
from kvstored.core.columnar import Grant, ReadMany, Reserved
from kvstored.core.types import Advice, Layout, Match, Place, TierId
from kvstored.core.views import TreeNode, Verdict
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.events import Event
from kvstored.store.jobs import Job
from kvstored.store.stored_reads import StoredGrant
from kvstored.wire.packing import pack_pieces, pack_runs, pack_u8, pack_u64

NO_TIER = 255

Piece = tuple[Place, int]

_WORDS = {
    Reason.DISCARDED: "removed",
    Reason.REPLACED: "removed",
    Reason.FILL_LOST: "incomplete",
    Reason.NO_SPACE: "never-stored",
    Reason.IO_ERROR: "corrupt",
}
"""Reasons whose word in the protocol is another; the others are their own."""


def match_message(found: Match) -> pb.MatchResponse:
    return pb.MatchResponse(
        hit_blocks=found.hit_blocks,
        hit_tokens=found.hit_tokens,
        checkpoint_tokens=found.checkpoint_tokens,
        replay_tokens=found.replay_tokens,
        tier_blocks=found.tier_blocks,
        miss_reason=found.miss_reason,
        lossy_blocks=found.lossy_blocks,
        advice=None if found.advice is None else _advice_message(found.advice),
    )


def _advice_message(advice: Advice) -> pb.Advice:
    return pb.Advice(
        load_bytes=advice.load_bytes,
        load_s=advice.load_s,
        queue_s=advice.queue_s,
        total_load_s=advice.total_load_s,
        prefill_s=advice.prefill_s,
        prefill_source=advice.prefill_source,
        split_blocks=advice.split_blocks,
        split_tokens=advice.split_tokens,
        split_s=advice.split_s,
        overlap_blocks=advice.overlap_blocks,
        overlap_s=advice.overlap_s,
        deadline_blocks=advice.deadline_blocks,
        deadline_tokens=advice.deadline_tokens,
    )


def reserve_message(reserved: Reserved, columns: Sequence[int]) -> pb.ReserveResponse:
    """Key by key what was decided so; then the columns of many plain blocks; then what found no space."""
    pieces: list[Piece | None] = []
    fills: list[int] = []
    for outcome in reserved.first:
        grant = outcome if isinstance(outcome, Granted) else None
        pieces.extend(_granted(grant, columns))
        fills.append(0 if grant is None else grant.fill)
    packed = pack_pieces(pieces)
    many = reserved.many
    rest = reserved.no_space * len(columns)
    response = pb.ReserveResponse(
        status=pack_u8([int(status) for status in reserved.status]),
        fills=pack_u64(fills),
        extent_counts=packed.extent_counts,
        extents=packed.extents,
        sizes=packed.sizes,
    )
    if many is not None:
        ids = np.arange(many.first_fill, many.first_fill + len(many), dtype=np.uint64)
        lengths = np.full(len(many), many.length, dtype=np.uint64)
        response.fills += pack_u64(ids) + bytes(8 * reserved.no_space)
        response.extent_counts += b"\1" * len(many) + bytes(rest)
        response.extents += pack_runs(many.places, lengths)
        response.sizes += pack_u64(lengths) + bytes(8 * rest)
    return response


def refused_message(keys: int, columns: Sequence[int]) -> pb.ReserveResponse:
    """Nothing granted: of a reservation that rode on a commit and came too late."""
    return reserve_message(Reserved([FillStatus.NO_SPACE] * keys), columns)


def aside_message(aside: SetAside, layout: Layout) -> pb.SetAsideResponse:
    length = layout.spec.groups[0].bytes_per_block
    lengths = np.full(aside.places.size, length, dtype=np.uint64)
    return pb.SetAsideResponse(first=aside.first, extents=pack_runs(aside.places, lengths))


def acquire_message(grant: Grant, groups: int) -> pb.AcquireResponse:
    if grant.many is not None:
        return _acquire_many_message(grant.lease, grant.many)
    pieces: list[Piece | None] = []
    checksums: list[int] = []
    for block in grant.blocks:
        for piece in block.pieces:
            pieces.append(None if piece is None else (piece.place, piece.length))
            checksums.append(0 if piece is None else piece.checksum)
        assert len(block.pieces) == groups, "one piece or none for every selected group"
    packed = pack_pieces(pieces)
    missed = next((b for b in grant.blocks if b.status is ReadStatus.MISS), None)
    lossy = [int(block.lossy) for block in grant.blocks]
    return pb.AcquireResponse(
        lease=grant.lease,
        status=pack_u8([int(block.status) for block in grant.blocks]),
        extent_counts=packed.extent_counts,
        extents=packed.extents,
        sizes=packed.sizes,
        checksums=pack_u64(checksums),
        generations=pack_u64([block.generation for block in grant.blocks]),
        must_verify=pack_u8([int(block.must_verify) for block in grant.blocks]),
        miss_reason=str(missed.reason) if missed else "",
        lossy=pack_u8(lossy) if any(lossy) else b"",
        tiers=pack_u8(
            [
                NO_TIER if block.status is ReadStatus.MISS else int(block.tier)
                for block in grant.blocks
            ]
        ),
    )


def stored_message(
    found: StoredGrant, keys: int, groups: int, folder: str
) -> pb.AcquireStoredResponse:
    """Of all keys: those that were not found so are misses."""
    nothing = (None,) * groups
    absent = ReadBlock(ReadStatus.MISS, TierId.NVME, 0, nothing, False, False, Reason.UNKNOWN)
    blocks = [absent] * keys
    for number, block in zip(found.numbers, found.grant.blocks, strict=True):
        frames = [
            None if p is None else p._replace(length=found.records[p.place].stored_length)
            for p in block.pieces
        ]
        blocks[number] = replace(block, pieces=tuple(frames))
    records = [
        None if piece is None else found.records[piece.place]
        for block in blocks
        for piece in block.pieces
    ]
    return pb.AcquireStoredResponse(
        found=acquire_message(Grant(found.grant.lease, blocks), groups),
        plain_sizes=pack_u64([0 if record is None else record.length for record in records]),
        stored_checksums=pack_u64([0 if r is None else r.stored_checksum for r in records]),
        folder=folder,
    )


def _acquire_many_message(lease: int, many: ReadMany) -> pb.AcquireResponse:
    hits = many.hits
    first_miss = min(many.reasons, default=None)
    return pb.AcquireResponse(
        lease=lease,
        status=pack_u8(np.where(hits, int(ReadStatus.HIT), int(ReadStatus.MISS))),
        extent_counts=pack_u8(hits.astype(np.uint8)),
        extents=pack_runs(many.hit_places, many.lengths[hits]),
        sizes=pack_u64(many.lengths),
        checksums=pack_u64(many.checksums),
        generations=pack_u64(many.generations),
        must_verify=bytes(len(hits)),
        miss_reason="" if first_miss is None else str(many.reasons[first_miss]),
        tiers=pack_u8(np.where(hits, many.tiers, NO_TIER)),
    )


def job_message(job: Job) -> pb.JobStatusResponse:
    return pb.JobStatusResponse(
        state=pb.JobState.Name(job.state),
        blocks_done=job.done,
        blocks_failed=job.failed,
        blocks=job.blocks,
    )


def tree_message(node: TreeNode, layout: Layout) -> pb.TreeNode:
    low, high = node.head
    return pb.TreeNode(
        id=node.id + 1,
        parent=node.parent + 1,
        head_fingerprint=low.to_bytes(8, "little") + high.to_bytes(8, "little"),
        depth_blocks=node.depth,
        blocks=node.blocks,
        tokens=node.tokens,
        children=node.children,
        holds=node.holds,
        hits=node.hits,
        heat=node.heat.name.lower(),
        tier_blocks=node.tier_blocks,
        namespace=layout.digest,
    )


def event_message(event: Event, epoch: int) -> pb.Event:
    return pb.Event(
        sequence=event.sequence,
        epoch=epoch,
        kind=pb.EventKind.Name(event.kind),
        namespace=event.digest,
        key=event.key,
        parent_fingerprint=event.parent,
        tier="" if event.tier is None else event.tier.name.lower(),
        unix_s=event.at_s,
        job=event.job,
        depth_blocks=event.depth_blocks,
    )


def _granted(grant: Granted | None, columns: Sequence[int]) -> list[Piece | None]:
    if grant is None:
        return [None] * len(columns)
    by_group = {piece.group: (piece.place, piece.length) for piece in grant.pieces}
    return [by_group.get(group) for group in columns]


def explanation_message(key: bytes, verdict: Verdict) -> pb.Explanation:
    """The verdict in the words of the protocol; the text has the rule and the time."""
    return pb.Explanation(
        key=key,
        verdict="stored" if verdict.reason is None else _word(verdict.reason),
        text=verdict.text,
        tiers=[tier.name.lower() for tier in verdict.tiers],
    )


def _word(reason: Reason) -> str:
    return "evicted" if reason.value.startswith("evicted-") else _WORDS.get(reason, reason.value)
