"""Put and get on one host: messages for the places, copies through mapped segments for the bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from kvstored.client.channel import LocalChannel, LocalLink, Session
from kvstored.client.copying import Bytes, Copier, Piece, checksum_of
from kvstored.client.links import GetCall, Leased, PutPart
from kvstored.client.results import Block, GetResult
from kvstored.client.rows import (
    blocks_of,
    mapped_segments,
    outputs_of,
    pieces_between,
    shared_runs,
)
from kvstored.client.segments import Segments
from kvstored.clock import Clock
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import (
    U8S,
    U64S,
    PackedPieces,
    Pieces,
    pack_u64,
    unpack_pieces,
    unpack_table,
    unpack_u8,
    unpack_u64,
)

Response = TypeVar("Response", bound=Message)


_FILL_STATUS = {int(status): status for status in FillStatus}
_READ_STATUS = {int(status): status for status in ReadStatus}
"""Ten times as fast as making the member."""

_RIDING_BYTES_MAX = 256 << 20
"""A lease on more does not wait for the next Acquire: it would keep that much from being evicted until then."""

_COPY_LEASE_MS = 10_000
"""Lease of a copying get, beside the time of its loads. A client that falls silent after it holds nothing for longer."""

_SURE_S = _COPY_LEASE_MS / 2000
"""A copy that ended so soon after its lease was asked for was leased all the time, by this clock alone: what is leased is given to nobody
else before the lease ends by its time, by its release, or by quarantine after the daemon's death. Half of the time is the margin."""


class LocalTransport:
    """The local channel, the mapped segments and the copying threads of one client in one process."""

    def __init__(self, channel: LocalChannel, copy_threads: int) -> None:
        self._channel = channel
        self._segments = Segments()
        self._copier = Copier(copy_threads)

    @contextmanager
    def link(self, timeout_s: float) -> Iterator["LocalDataLink"]:
        with self._channel.link(timeout_s) as link:
            yield LocalDataLink(link, self._segments, self._copier, self._channel.clock)

    def close(self) -> None:
        self._channel.close()
        self._segments.clear()
        self._copier.close()

    def forked(self) -> None:
        self._channel.forked()


@dataclass(frozen=True, slots=True)
class _Acquired:
    """An answer to Acquire, unpacked, its segments mapped."""

    lease: int
    status: U8S
    pieces: Pieces
    checksums: U64S
    must_verify: U8S
    segments: dict[int, Bytes]


@dataclass(frozen=True, slots=True)
class _Filling:
    """A reserved part. `granted`: indexes of keys whose `fills` are to be written; `pairs`: their pieces, number `indexes`."""

    status: list[FillStatus]
    granted: list[int]
    fills: U64S
    indexes: list[int]
    pairs: list[Piece]
    checksums: U64S


class LocalDataLink:
    def __init__(self, link: LocalLink, segments: Segments, copier: Copier, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._segments = segments
        self._copier = copier

    @property
    def session(self) -> Session:
        return self._link.session

    def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response:
        return self._link.call(name, request, response, timeout_s)

    # ---- put

    def put(self, parts: Sequence[PutPart], timeout_s: float) -> list[FillStatus]:
        """Part by part: while one is copied, the daemon commits the part before it and reserves the one after."""
        for part in parts:
            part.request.session = self.session.token
        status: list[FillStatus] = []
        filling = self._filling(parts[0], self._reserve(parts[0], timeout_s), timeout_s)
        filled: _Filling | None = None
        for following in [*parts[1:], None]:
            reserved = self._copied(filling, filled, following, timeout_s)
            if filled is not None:
                status += filled.status
            filled = filling
            if following is not None:
                filling = self._filling(following, reserved, timeout_s)
        assert filled is not None, "a put has parts"
        if filled.granted:
            request = self._commit_request(filled)
            self._settle(filled, self.call("Commit", request, pb.CommitResponse, timeout_s))
        return status + filled.status

    def _copied(
        self,
        filling: "_Filling",
        before: "_Filling | None",
        after: PutPart | None,
        timeout_s: float,
    ) -> pb.ReserveResponse:
        """Copies a part; meanwhile the one `before` is committed and the one `after` reserved, whose answer this returns.

        Gives the fills of this part back when anything fails.
        """
        request = pb.CommitRequest() if before is None else self._commit_request(before)
        if after is not None:
            request.session = self.session.token
            request.next.CopyFrom(after.request)
        is_sent = after is not None or (before is not None and bool(before.granted))
        answer = pb.CommitResponse()
        try:
            if is_sent:
                self._link.connection.begin("Commit", request, timeout_s)
            try:
                filling.checksums[filling.indexes] = self._copier.copy_in(filling.pairs)
            finally:
                if is_sent:
                    answer = self._link.connection.end("Commit", pb.CommitResponse)
            if before is not None:
                self._settle(before, answer)
        except BaseException:
            self._abort(filling.fills, timeout_s)
            if after is not None and answer.HasField("next"):
                self._abort(_granted_fills(answer.next, after.keys), timeout_s)
            raise
        return answer.next

    def _filling(self, part: PutPart, reserved: pb.ReserveResponse, timeout_s: float) -> "_Filling":
        """What was reserved, mapped: a segment's descriptor has to be asked for before the next call is under way."""
        told = unpack_u8(reserved.status, "status", part.keys)
        status = [_FILL_STATUS[s] for s in told.tolist()]
        fills = _granted_fills(reserved, part.keys)
        indexes: list[int] = []
        pairs: list[Piece] = []
        if len(fills):
            try:
                packed = PackedPieces(reserved.extent_counts, reserved.extents, reserved.sizes)
                pieces = unpack_pieces(packed, part.keys, part.groups)
                segments = self._mapped(pieces, timeout_s)
                indexes, pairs = pieces_between(pieces, part.sources, segments)
            except BaseException:
                self._abort(fills, timeout_s)
                raise
        granted = [i for i, s in enumerate(status) if s is FillStatus.GRANTED]
        checksums = np.zeros(part.keys * part.groups, dtype=np.uint64)
        return _Filling(status, granted, fills, indexes, pairs, checksums)

    def _commit_request(self, filled: "_Filling") -> pb.CommitRequest:
        by_key = filled.checksums.reshape(len(filled.status), -1)
        return pb.CommitRequest(
            session=self.session.token,
            fills=pack_u64(filled.fills),
            checksums=pack_u64(by_key[filled.granted]),
        )

    def _settle(self, filled: "_Filling", answer: pb.CommitResponse) -> None:
        outcome = unpack_u8(answer.status, "status", len(filled.granted))
        for i, s in zip(filled.granted, outcome.tolist(), strict=True):
            filled.status[i] = _FILL_STATUS[s]

    def _reserve(self, part: PutPart, timeout_s: float) -> pb.ReserveResponse:
        if part.generations is None:
            return self.call("Reserve", part.request, pb.ReserveResponse, timeout_s)
        request = pb.ReplaceIfRequest(reserve=part.request, generations=pack_u64(part.generations))
        return self.call("ReplaceIf", request, pb.ReserveResponse, timeout_s)

    def _abort(self, fills: U64S, timeout_s: float) -> None:
        request = pb.AbortRequest(session=self.session.token, fills=pack_u64(fills))
        try:
            if self._link.connection.is_reusable:
                self.call("Abort", request, pb.AbortResponse, timeout_s)
        except KvstoredError:
            # The fills end by their TTL or with the session; the first error is the one to tell.
            pass

    # ---- get

    def get(self, call: GetCall, timeout_s: float) -> GetResult:
        """Acquire, copy, verify; the release rides on the next Acquire unless it holds much memory."""
        call.request.lease_ttl_ms = _COPY_LEASE_MS + call.request.deadline_ms
        asked_s = self._clock.elapsed_s()
        answer = self._acquire(call, timeout_s)
        try:
            acquired = self._unpacked(call, answer, timeout_s)
            hits: list[bool] = (acquired.status == ReadStatus.HIT).tolist()
            outputs = outputs_of(acquired.pieces.sizes, hits, call.out)
            flat = [output for row in outputs for output in row]
            indexes, pairs = pieces_between(acquired.pieces, flat, acquired.segments)
            if call.verify or acquired.must_verify.any():
                found = self._copier.copy_out(pairs)
                bad = np.array(found, dtype=np.uint64) != acquired.checksums[indexes]
                corrupt = {indexes[i] // call.groups for i in np.flatnonzero(bad).tolist()}
            else:
                self._copier.copy_out_unchecked(pairs)
                corrupt = set()
        except BaseException:
            self.session.release_later(answer.lease)
            raise
        is_sure = call.verify or self._clock.elapsed_s() - asked_s < _SURE_S
        if is_sure and sum(pair.private.size for pair in pairs) <= _RIDING_BYTES_MAX:
            self.session.release_later(answer.lease)
        elif self._was_lost(answer.lease, timeout_s) and not is_sure:
            hits = [False] * call.keys
        good = [hit and i not in corrupt for i, hit in enumerate(hits)]
        return _result(answer, acquired.status, outputs, good, len(corrupt))

    def lease(self, call: GetCall, timeout_s: float) -> Leased:
        """Acquire without copying. A piece in several extents is copied: an array has one run of memory."""
        answer = self._acquire(call, timeout_s)
        try:
            acquired = self._unpacked(call, answer, timeout_s)
            checked = (acquired.must_verify != 0) | call.verify
            hits = acquired.status == ReadStatus.HIT
            blocks = tuple(
                self._in_place(acquired, i, call.groups, bool(checked[i])) if hits[i] else None
                for i in range(call.keys)
            )
        except BaseException:
            self.session.release_later(answer.lease)
            raise
        status = tuple(
            ReadStatus.MISS if blocks[i] is None and s == ReadStatus.HIT else ReadStatus(s)
            for i, s in enumerate(acquired.status.tolist())
        )
        return Leased(self.session, answer.lease, blocks, status, answer.miss_reason)

    def _in_place(self, acquired: _Acquired, key: int, groups: int, check: bool) -> Block | None:
        """None where a piece does not verify."""
        block: list[Bytes | None] = []
        for i in range(key * groups, (key + 1) * groups):
            runs = shared_runs(acquired.pieces, i, acquired.segments)
            if check and runs and checksum_of(runs) != int(acquired.checksums[i]):
                return None
            array = None
            if runs:
                array = runs[0].view() if len(runs) == 1 else np.concatenate(runs)
                array.flags.writeable = False
            block.append(array)
        return tuple(block)

    def _acquire(self, call: GetCall, timeout_s: float) -> pb.AcquireResponse:
        call.request.session = self.session.token
        releases = self.session.take_releases()
        call.request.release = pack_u64(releases)
        try:
            return self.call("Acquire", call.request, pb.AcquireResponse, timeout_s)
        except KvstoredError:
            # Whether they were released is not known; releasing twice does no harm.
            for lease in releases:
                self.session.release_later(lease)
            raise

    def _unpacked(self, call: GetCall, answer: pb.AcquireResponse, timeout_s: float) -> _Acquired:
        packed = PackedPieces(answer.extent_counts, answer.extents, answer.sizes)
        pieces = unpack_pieces(packed, call.keys, call.groups)
        checksums = unpack_table(answer.checksums, "checksums", call.keys, call.groups)
        must_verify = answer.must_verify or bytes(call.keys)
        return _Acquired(
            lease=answer.lease,
            status=unpack_u8(answer.status, "status", call.keys),
            pieces=pieces,
            checksums=checksums.reshape(-1),
            must_verify=unpack_u8(must_verify, "must_verify", call.keys),
            segments=self._mapped(pieces, timeout_s),
        )

    def _was_lost(self, lease: int, timeout_s: float) -> bool:
        """Releases at once: unverified bytes count only if the lease held to the end."""
        if not lease:
            return False
        request = pb.ReleaseRequest(session=self.session.token, leases=pack_u64([lease]))
        return any(self.call("Release", request, pb.ReleaseResponse, timeout_s).lost)

    def _mapped(self, pieces: Pieces, timeout_s: float) -> dict[int, Bytes]:
        def fetch(segment: int) -> tuple[pb.SegmentResponse, int]:
            return self._link.connection.segment(segment, timeout_s)

        return mapped_segments(self._segments, pieces, self.session.epoch, fetch)


def _granted_fills(reserved: pb.ReserveResponse, keys: int) -> U64S:
    fills = unpack_u64(reserved.fills, "fills", keys)
    granted: U64S = fills[fills != 0]
    return granted


def _result(
    answer: pb.AcquireResponse,
    status: U8S,
    outputs: list[list[Bytes | None]],
    good: list[bool],
    corrupt: int,
) -> GetResult:
    told = [_READ_STATUS[s] for s in status.tolist()]
    return GetResult(
        blocks=blocks_of(outputs, good),
        status=tuple(
            ReadStatus.MISS if s is ReadStatus.HIT and not ok else s
            for s, ok in zip(told, good, strict=True)
        ),
        tiers=answer.tiers,
        generations=tuple(
            unpack_u64(
                answer.generations or bytes(8 * len(good)), "generations", len(good)
            ).tolist()
        ),
        miss_reason=answer.miss_reason,
        corrupt=corrupt,
    )
