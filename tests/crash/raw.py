"""The local protocol by hand: rights to write and read that a well-behaved client would have ended."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvstored.client import Client, Keys, Namespace
from kvstored.client.local import LocalDataLink
from kvstored.client.rows import shared_runs
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import (
    PackedPieces,
    Pieces,
    pack_u64,
    unpack_pieces,
    unpack_u8,
    unpack_u64,
)
from tests.crash.blocks import Bytes

Extent = tuple[int, int, int]
"""Segment, first byte, bytes."""


@dataclass(frozen=True, slots=True)
class Filling:
    """Rights to write, and the memory that they are about: it stays mapped whatever becomes of them."""

    session: bytes
    fills: list[int]
    memory: list[Bytes]
    extents: list[Extent]


@dataclass(frozen=True, slots=True)
class Reading:
    """One entry a key."""

    lease: int
    status: list[ReadStatus]
    must_verify: list[bool]
    extents: list[list[Extent]]


def reserve(
    client: Client, namespace: Namespace, keys: Sequence[bytes], *, ttl_s: float
) -> Filling:
    with client.link(None) as link:
        assert isinstance(link, LocalDataLink)
        request = pb.ReserveRequest(
            session=link.session.token,
            namespace=namespace.digest,
            keys=Keys.opaque(keys).message(),
            groups=1,
            fill_ttl_ms=round(ttl_s * 1000),
        )
        answer = link.call("Reserve", request, pb.ReserveResponse, 10)
        assert set(unpack_u8(answer.status, "status", len(keys))) == {FillStatus.GRANTED}
        packed = PackedPieces(answer.extent_counts, answer.extents, answer.sizes)
        pieces = unpack_pieces(packed, len(keys), 1)
        segments = link._mapped(pieces, 10)
        return Filling(
            link.session.token,
            unpack_u64(answer.fills, "fills", len(keys)).tolist(),
            [run for i in range(len(keys)) for run in shared_runs(pieces, i, segments)],
            [extent for i in range(len(keys)) for extent in _extents(pieces, i)],
        )


def commit(client: Client, filling: Filling, *, session: bytes | None = None) -> list[FillStatus]:
    """With the session that it was granted in, or another."""
    request = pb.CommitRequest(
        session=filling.session if session is None else session,
        fills=pack_u64(filling.fills),
        checksums=pack_u64([0] * len(filling.fills)),
    )
    answer = client.call("Commit", request, pb.CommitResponse)
    return [FillStatus(s) for s in unpack_u8(answer.status, "status", len(filling.fills))]


def acquire(client: Client, namespace: Namespace, keys: Sequence[bytes]) -> Reading:
    request = pb.AcquireRequest(
        session=client.session(),
        namespace=namespace.digest,
        keys=Keys.opaque(keys, unchained=True).message(),
        groups=1,
    )
    answer = client.call("Acquire", request, pb.AcquireResponse)
    packed = PackedPieces(answer.extent_counts, answer.extents, answer.sizes)
    pieces = unpack_pieces(packed, len(keys), 1)
    return Reading(
        answer.lease,
        [ReadStatus(s) for s in unpack_u8(answer.status, "status", len(keys))],
        [bool(each) for each in unpack_u8(answer.must_verify, "must_verify", len(keys))],
        [_extents(pieces, i) for i in range(len(keys))],
    )


def release(client: Client, lease: int) -> bool:
    """Whether it was held until now."""
    request = pb.ReleaseRequest(session=client.session(), leases=pack_u64([lease]))
    return not any(client.call("Release", request, pb.ReleaseResponse).lost)


def overlap(these: Sequence[Extent], those: Sequence[Extent]) -> bool:
    return any(
        a[0] == b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2] for a in these for b in those
    )


class Scribbler:
    """Writes to memory without end, as a thread that nobody told that its right is over."""

    def __init__(self, memory: Sequence[Bytes]) -> None:
        self._memory = memory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        value = 0
        while not self._stop.wait(0.001):
            value = (value + 1) % 251
            for run in self._memory:
                np.copyto(run, np.uint8(value))


def _extents(pieces: Pieces, i: int) -> list[Extent]:
    first, last = int(pieces.first[i]), int(pieces.first[i + 1])
    return [(int(a), int(b), int(c)) for a, b, c in pieces.extents[first:last].tolist()]
