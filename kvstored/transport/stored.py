"""Blocks that lie coded on NVMe, sent to another host as the frames that they are: read from the slab files by the front, neither decoded nor encoded here.

The daemon leases them where they lie and tells places; what is read is compared with the frame's checksum.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstored.client.connection import Connection
from kvstored.client.copying import Bytes, checksum_of
from kvstored.client.framing import DAMAGED, Framed, Ready, framed
from kvstored.core.calls import ReadStatus
from kvstored.core.types import UNIT_BYTES
from kvstored.errors import Corrupt
from kvstored.pb import kvstored_pb2 as pb
from kvstored.tiers.slabs import aligned, slab_path
from kvstored.wire.packing import (
    U64S,
    PackedPieces,
    unpack_pieces,
    unpack_u8,
    unpack_u64,
)


@dataclass(slots=True)
class Stored:
    """What of one get goes as it lies. `hits`: numbers of such keys; `frames`: by number among keys x groups; `bad`: of those that were read wrongly."""

    found: pb.AcquireResponse
    plain_sizes: U64S
    hits: list[int]
    frames: dict[int, Ready] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)

    def bad_keys(self, keys: int) -> list[int]:
        groups = len(self.plain_sizes) // keys
        return sorted({number // groups for number in self.bad})


def acquired(
    daemon: Connection, request: pb.AcquireRequest, keys: int, timeout_s: float
) -> Stored | None:
    """Leased in `found.lease`; None where there is none."""
    answer = daemon.call(
        "AcquireStored",
        pb.AcquireStoredRequest(acquire=request),
        pb.AcquireStoredResponse,
        timeout_s,
    )
    found = answer.found
    if not found.lease:
        return None
    hits = np.flatnonzero(unpack_u8(found.status, "status", keys) == ReadStatus.HIT).tolist()
    groups = len(found.extent_counts) // keys
    pieces = unpack_pieces(
        PackedPieces(found.extent_counts, found.extents, found.sizes), keys, groups
    )
    checksums = unpack_u64(answer.stored_checksums, "stored_checksums", keys * groups).tolist()
    stored = Stored(found, unpack_u64(answer.plain_sizes, "plain_sizes", keys * groups), hits)
    sizes = pieces.sizes.reshape(-1).tolist()
    for i in (key * groups + group for key in hits for group in range(groups)):
        extents = pieces.extents[int(pieces.first[i]) : int(pieces.first[i + 1])].tolist()
        if extents:
            reading = _Reading(Path(answer.folder), extents, sizes[i], checksums[i], i, stored.bad)
            stored.frames[i] = Ready(sizes[i], reading.read)
    return stored


def others(request: pb.AcquireRequest, hits: Sequence[int], keys: int) -> pb.AcquireRequest:
    """The same request of the keys that are left."""
    left = pb.AcquireRequest()
    left.CopyFrom(request)
    left.keys.packed = _picked(request.keys.packed, request.keys.key_bytes, left_of(hits, keys))
    left.keys.parents = b""
    left.keys.unchained = True
    return left


def merged(stored: Stored, answer: pb.AcquireResponse, keys: int) -> pb.AcquireResponse:
    """The head of all keys: `answer` is of those that `others` left."""
    groups = len(stored.found.extent_counts) // keys
    hits, left = np.asarray(stored.hits), np.asarray(left_of(stored.hits, keys), dtype=np.intp)
    head = pb.AcquireResponse(miss_reason=answer.miss_reason)
    mine, its = stored.found, answer
    sizes = stored.plain_sizes.tobytes()
    for name, width, own, other in (
        ("status", 1, mine.status, its.status),
        ("must_verify", 1, mine.must_verify, its.must_verify),
        ("tiers", 1, mine.tiers, its.tiers),
        ("generations", 8, mine.generations, its.generations),
        ("sizes", 8 * groups, sizes, its.sizes),
        ("checksums", 8 * groups, mine.checksums, its.checksums),
        ("lossy", 1, mine.lossy or bytes(keys), its.lossy or bytes(len(left))),
    ):
        rows = np.zeros((keys, width), dtype=np.uint8)
        rows[hits] = np.frombuffer(own, dtype=np.uint8).reshape(keys, width)[hits]
        if len(left):
            rows[left] = np.frombuffer(other, dtype=np.uint8).reshape(len(left), width)
        setattr(head, name, rows.tobytes())
    if not any(head.lossy):
        head.lossy = b""
    return head


@dataclass(frozen=True, slots=True)
class _Reading:
    folder: Path
    extents: list[list[int]]
    size_bytes: int
    checksum: int
    number: int
    bad: set[int]

    def read(self) -> Framed:
        """In one of the coding threads. What is not the frame that was promised is a miss at the receiver."""
        try:
            frame = self._bytes()
            if checksum_of([frame]) != self.checksum:
                raise Corrupt(
                    f"a stored frame does not match its checksum: bytes={self.size_bytes}"
                )
            return framed(frame)
        except (OSError, Corrupt):
            self.bad.add(self.number)
            return DAMAGED

    def _bytes(self) -> Bytes:
        whole, begin = aligned(self.size_bytes), 0
        for segment, offset, count in self.extents:
            with closing(_SlabFile(slab_path(self.folder, segment))) as slab:
                slab.read_into(whole[begin : begin + -(-count // UNIT_BYTES) * UNIT_BYTES], offset)
            begin += count
        return whole[: self.size_bytes]


class _SlabFile:
    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self._fd = os.open(path, flags)  # a filesystem without it

    def read_into(self, target: Bytes, offset: int) -> None:
        """All of it: whole units."""
        done = 0
        while done < target.size:
            more = os.preadv(self._fd, [target[done:].data], offset + done)
            if not more:
                raise Corrupt(f"a slab file is too short: {offset=} bytes={target.size} {done=}")
            done += more

    def close(self) -> None:
        os.close(self._fd)


def left_of(hits: Iterable[int], keys: int) -> list[int]:
    return sorted(set(range(keys)) - set(hits))


def _picked(packed: bytes, width: int, numbers: Sequence[int]) -> bytes:
    return b"".join(packed[i * width : (i + 1) * width] for i in numbers)
