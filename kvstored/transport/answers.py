"""What the store answered -> messages. Only translation."""

from collections.abc import Sequence

from kvstored.core.calls import FillStatus, Grant, Granted, ReadStatus, Reason, Reserved
from kvstored.core.types import Layout, Match, Place
from kvstored.core.views import TreeNode, Verdict
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.events import Event
from kvstored.store.jobs import Job
from kvstored.wire.packing import pack_pieces, pack_u8, pack_u64

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
    )


def reserve_message(reserved: Reserved, columns: Sequence[int]) -> pb.ReserveResponse:
    pieces: list[Piece | None] = []
    for grant in reserved.grants:
        pieces.extend(_granted(grant, columns))
    packed = pack_pieces(pieces)
    return pb.ReserveResponse(
        status=pack_u8([int(status) for status in reserved.status]),
        fills=pack_u64([0 if grant is None else grant.fill for grant in reserved.grants]),
        extent_counts=packed.extent_counts,
        extents=packed.extents,
        sizes=packed.sizes,
    )


def refused_message(keys: int, columns: Sequence[int]) -> pb.ReserveResponse:
    """Nothing granted: of a reservation that rode on a commit and came too late."""
    return reserve_message(Reserved([FillStatus.NO_SPACE] * keys, [None] * keys), columns)


def acquire_message(grant: Grant, groups: int) -> pb.AcquireResponse:
    pieces: list[Piece | None] = []
    checksums: list[int] = []
    for block in grant.blocks:
        for piece in block.pieces:
            pieces.append(None if piece is None else (piece.place, piece.length))
            checksums.append(0 if piece is None else piece.checksum)
        assert len(block.pieces) == groups, "one piece or none for every selected group"
    packed = pack_pieces(pieces)
    missed = next((b for b in grant.blocks if b.status is ReadStatus.MISS), None)
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
        tiers=pack_u8(
            [
                NO_TIER if block.status is ReadStatus.MISS else int(block.tier)
                for block in grant.blocks
            ]
        ),
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
        tokens=node.blocks * layout.spec.block_tokens,
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
