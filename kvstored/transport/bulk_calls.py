"""The calls of one bulk connection: rights from the daemon over its local channel, bytes between the socket and the mapped segments.

Runs on a thread of its own. Whatever ends it, no fill and no lease stays behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from kvstored.client.bulk_socket import BulkSocket, Runs
from kvstored.client.connection import Connection
from kvstored.client.framed_socket import receive_framed, send_framed
from kvstored.client.framing import NO_GROUP, Framing, Piece, Ready
from kvstored.client.rows import mapped_segments, shared_runs
from kvstored.client.segments import Bytes, Segments
from kvstored.clock import Clock
from kvstored.core.calls import ReadStatus
from kvstored.errors import (
    Corrupt,
    InvalidArgument,
    KvstoredError,
    PermissionDenied,
    Unavailable,
)
from kvstored.pb import kvstored_pb2 as pb
from kvstored.transport.stored import Stored, acquired, left_of, merged, others
from kvstored.transport.transit import Transit
from kvstored.wire.bulk import (
    DATA,
    FRAMED,
    FRAMES_VERSION,
    HANDSHAKE_S,
    HELLO_BYTES_MAX,
    IDLE_S,
    OPEN_PUTS_MAX,
    STALL_S,
)
from kvstored.wire.frames import DEADLINE_S_MAX, PAYLOAD_BYTES_MAX, frame
from kvstored.wire.methods import BY_NAME
from kvstored.wire.namespaces import spec_of
from kvstored.wire.packing import (
    U64S,
    PackedPieces,
    Pieces,
    check_is_streamed,
    check_keys,
    pack_u64,
    unpack_pieces,
    unpack_u8,
    unpack_u64,
)
from kvstored.wire.status import OK, failure_of, status_of

Request = TypeVar("Request", bound=Message)

_ACQUIRE, _RESERVE = BY_NAME["Acquire"].number, BY_NAME["Reserve"].number
_KEEP_ALIVE = BY_NAME["KeepAlive"].number
_DAEMON_S = 5.0
"""For Commit, Abort and Release, which wait for nothing."""


@dataclass(frozen=True, slots=True)
class _Put:
    """A reservation whose bytes have not come. `places`: one a piece that was granted, `columns` its number among keys x groups."""

    keys: int
    groups: int
    status: bytes
    fills: U64S
    places: list[Runs]
    columns: list[int]
    ends_s: float


class BulkCalls:
    def __init__(
        self,
        peer: BulkSocket,
        daemon: Path,
        segments: Segments,
        clock: Clock,
        framing: Framing | None,
        transit: Transit,
    ) -> None:
        self._framing = framing
        self._transit = transit
        self._peer = peer
        self._path = str(daemon)
        self._daemon = Connection(self._path, HANDSHAKE_S)
        self._segments = segments
        self._session = b""
        self._epoch = 0
        self._clock = clock
        self._puts: dict[int, _Put] = {}
        self._is_over = False
        self.failures = 0

    def close(self) -> None:
        self._daemon.close()

    def greet(self, greeting: bytes) -> None:
        """The peer answers with a session that the daemon knows, or is refused: raises what was refused."""
        self._peer.wait_at_most(HANDSHAKE_S)
        self._peer.send_frame(greeting)
        method, _, call, payload = self._peer.receive_frame(HELLO_BYTES_MAX)
        try:
            if method != _KEEP_ALIVE:
                raise PermissionDenied(f"a bulk connection begins with its session method={method}")
            request = _parsed(pb.KeepAliveRequest, payload)
            answer = self._daemon.call("KeepAlive", request, pb.KeepAliveResponse, HANDSHAKE_S)
        except KvstoredError as error:
            self._refuse(method, call, error)
            raise
        self._session, self._epoch = request.session, answer.epoch
        self._tell(method, call, answer)

    def serve(self) -> None:
        """Until the peer leaves, stays silent, or says what is no call; raises where the transport broke in the middle of one."""
        try:
            while not self._is_over:
                self._peer.wait_at_most(IDLE_S)
                try:
                    method, deadline, call, payload = self._peer.receive_frame(PAYLOAD_BYTES_MAX)
                except Corrupt as error:
                    self.failures += 1
                    self._refuse(0, 0, error)
                    return
                self._peer.wait_at_most(STALL_S)
                self._serve(method, deadline / 100 or DEADLINE_S_MAX, call, payload)
        finally:
            for put in self._puts.values():
                self._abort(put.fills)

    def _serve(self, method: int, timeout_s: float, call: int, payload: bytes) -> None:
        try:
            if method == _ACQUIRE:
                self._get(call, _parsed(pb.AcquireRequest, payload), timeout_s)
            elif method == _RESERVE:
                self._reserve(call, _parsed(pb.ReserveRequest, payload), timeout_s)
            elif method in (DATA, FRAMED):
                self._data(method, call)
            else:
                self._is_over = True
                raise InvalidArgument(f"no call of the bulk channel method={method}")
        except KvstoredError as error:
            self.failures += 1
            if self._peer.is_broken:
                raise
            self._is_over |= isinstance(error, Unavailable)
            self._refuse(method, call, error)

    # ---- put

    def _reserve(self, call: int, request: pb.ReserveRequest, timeout_s: float) -> None:
        if len(self._puts) == OPEN_PUTS_MAX or call in self._puts:
            self._is_over = True
            raise InvalidArgument(f"too many puts without their bytes open={len(self._puts)}")
        if not request.sizes:
            raise InvalidArgument("a put over the bulk channel has all sizes")
        keys = check_keys(len(request.keys.packed), request.keys.key_bytes)
        request.session = self._session
        # No byte comes after the deadline and the step that it interrupts: the place is not granted to others before.
        request.fill_ttl_ms = max(request.fill_ttl_ms, int((timeout_s + 2 * STALL_S) * 1000))
        answer = self._daemon.call("Reserve", request, pb.ReserveResponse, timeout_s)
        fills = unpack_u64(answer.fills, "fills", keys)
        if fills.any():
            try:
                self._puts[call] = self._opened(answer, fills, timeout_s)
            except BaseException:
                self._abort(fills)
                raise
        told = pb.ReserveResponse(status=answer.status, extent_counts=answer.extent_counts)
        self._tell(_RESERVE, call, told)

    def _opened(self, answer: pb.ReserveResponse, fills: U64S, timeout_s: float) -> _Put:
        keys = len(fills)
        groups = len(answer.extent_counts) // keys
        pieces, segments = self._pieces(answer, keys, groups)
        columns = np.flatnonzero(np.diff(pieces.first)).tolist()
        places = [shared_runs(pieces, i, segments) for i in columns]
        ends_s = self._clock.elapsed_s() + timeout_s
        return _Put(keys, groups, answer.status, fills, places, columns, ends_s)

    def _data(self, method: int, call: int) -> None:
        """Bytes straight to their places; committed once they are what the peer says that they are."""
        put = self._puts.get(call)
        if put is None or (method == FRAMED and self._framing is None):
            self._is_over = True
            raise InvalidArgument(f"bytes of a put that is not open, or frames call={call}")
        with self._transit.of(self._session):
            found, is_damaged = self._received(method, put)
            told = bytearray(8 * len(found))
            self._peer.receive_into(memoryview(told), put.ends_s)
        del self._puts[call]
        granted = np.flatnonzero(put.fills)
        try:
            if is_damaged or np.any(unpack_u64(bytes(told), "checksums") != found):
                raise Corrupt("bytes of a put do not match their checksums: nothing was stored")
            checksums = np.zeros(put.keys * put.groups, dtype=np.uint64)
            checksums[put.columns] = found
            request = pb.CommitRequest(
                session=self._session,
                fills=pack_u64(put.fills[granted]),
                checksums=pack_u64(checksums.reshape(put.keys, put.groups)[granted]),
            )
            committed = self._daemon.call("Commit", request, pb.CommitResponse, _DAEMON_S)
        except BaseException:
            self._abort(put.fills)
            raise
        status = unpack_u8(put.status, "status", put.keys).copy()
        status[granted] = unpack_u8(committed.status, "status", len(granted))
        self._tell(method, call, pb.PutResponse(status=status.tobytes()))

    def _received(self, method: int, put: _Put) -> tuple[U64S, bool]:
        """The checksum of each piece as it lies in its place, and whether a frame was damaged."""
        if method == DATA or self._framing is None:
            sums = self._peer.receive_summed(put.places, put.ends_s)
            return np.array(sums, dtype=np.uint64), False
        self._is_over = True  # unless all of it is understood
        found = receive_framed(self._peer, self._framing, put.places, put.ends_s)
        self._is_over = False
        return np.array([each or 0 for each in found], dtype=np.uint64), None in found

    def _abort(self, fills: U64S) -> None:
        request = pb.AbortRequest(session=self._session, fills=pack_u64(fills[fills != 0]))
        self._give_back("Abort", request, pb.AbortResponse)

    # ---- get

    def _get(self, call: int, request: pb.AcquireRequest, timeout_s: float) -> None:
        """The head, then the bytes of all hits; the receiver verifies. The leases last as long as the call may, and end with it."""
        keys = check_keys(len(request.keys.packed), request.keys.key_bytes)
        check_is_streamed(request.tier)
        request.session = self._session
        request.lease_ttl_ms = int((timeout_s + STALL_S) * 1000)
        ends_s = self._clock.elapsed_s() + timeout_s
        stored = self._stored(request, keys, timeout_s)
        leases = [stored.found.lease] if stored is not None else []
        try:
            asked = request if stored is None else others(request, stored.hits, keys)
            answer = pb.AcquireResponse()
            if stored is None or len(stored.hits) < keys:
                answer = self._daemon.call("Acquire", asked, pb.AcquireResponse, timeout_s)
            leases.append(answer.lease)
            with self._transit.of(self._session):
                self._answered(call, request, stored, answer, ends_s)
        finally:
            if any(leases):
                held = pack_u64([lease for lease in leases if lease])
                ended = pb.ReleaseRequest(session=self._session, leases=held)
                self._give_back("Release", ended, pb.ReleaseResponse)
        if stored is not None and stored.bad:
            self._let_daemon_look(request, stored.bad_keys(keys), keys)

    def _stored(self, request: pb.AcquireRequest, keys: int, timeout_s: float) -> Stored | None:
        """Blocks that go as they lie on NVMe."""
        if not keys or not self._may_frame(request):
            return None
        return acquired(self._daemon, request, keys, timeout_s)

    def _answered(
        self,
        call: int,
        request: pb.AcquireRequest,
        stored: Stored | None,
        answer: pb.AcquireResponse,
        ends_s: float,
    ) -> None:
        """`answer`: of the keys that are not `stored`."""
        keys = len(request.keys.packed) // request.keys.key_bytes
        left = list(range(keys)) if stored is None else left_of(stored.hits, keys)
        groups = len(answer.extent_counts) // max(len(left), 1)
        pieces, segments = self._pieces(answer, len(left), groups)
        hits = unpack_u8(answer.status, "status", len(left)) == ReadStatus.HIT
        wanted = np.flatnonzero(np.repeat(hits, groups) & (np.diff(pieces.first) > 0)).tolist()
        places = {
            left[i // groups] * groups + i % groups: shared_runs(pieces, i, segments)
            for i in wanted
        }
        head = headed(answer) if stored is None else merged(stored, answer, keys)
        framed = self._framed(request, places, {} if stored is None else stored.frames)
        head.frames = FRAMES_VERSION if framed else 0
        self._tell(_ACQUIRE, call, head)
        if self._framing is not None and framed:
            send_framed(self._peer, self._framing, request.namespace, framed, ends_s)
        else:
            self._peer.send_pieces(list(places.values()), ends_s)

    def _may_frame(self, request: pb.AcquireRequest) -> bool:
        framing, speed = self._framing, float(request.link_bytes_per_s)
        is_known = request.frames >= FRAMES_VERSION
        return framing is not None and is_known and framing.may_pay(speed)

    def _framed(
        self, request: pb.AcquireRequest, places: Mapping[int, Runs], frames: Mapping[int, Ready]
    ) -> list[Piece]:
        """All pieces in their order, where any goes as a frame; else none."""
        framing, digest = self._framing, request.namespace
        if framing is None or not self._may_frame(request):
            return []
        if not framing.knows(digest):
            everything, response = pb.ListNamespacesRequest(), pb.ListNamespacesResponse
            listed = self._daemon.call("ListNamespaces", everything, response, _DAEMON_S)
            learn_namespaces(framing, listed)
        known = framing.with_groups(digest, request.groups, places.items())
        pays = framing.pays(
            digest,
            known,
            link_bytes_per_s=float(request.link_bytes_per_s),
            decoders=max(1, request.decoders),
        )
        if not pays and not frames:
            return []
        plain = known if pays else [(NO_GROUP, runs) for runs in places.values()]
        pieces: dict[int, Piece] = {**dict(zip(places, plain, strict=True)), **frames}
        return [pieces[i] for i in sorted(pieces)]

    def _let_daemon_look(self, request: pb.AcquireRequest, bad: list[int], keys: int) -> None:
        """At blocks that were read wrongly from NVMe: it drops what is damaged."""
        asked = others(request, left_of(bad, keys), keys)
        answer = self._daemon.call("Acquire", asked, pb.AcquireResponse, _DAEMON_S)
        if answer.lease:
            ended = pb.ReleaseRequest(session=self._session, leases=pack_u64([answer.lease]))
            self._give_back("Release", ended, pb.ReleaseResponse)

    # ---- inside

    def _pieces(
        self, answer: pb.ReserveResponse | pb.AcquireResponse, keys: int, groups: int
    ) -> tuple[Pieces, dict[int, Bytes]]:
        packed = PackedPieces(answer.extent_counts, answer.extents, answer.sizes)
        pieces = unpack_pieces(packed, keys, groups)
        segments = mapped_segments(
            self._segments,
            pieces,
            self._epoch,
            lambda segment: self._daemon.segment(segment, _DAEMON_S),
        )
        return pieces, segments

    def _give_back(self, name: str, request: Message, response: type[Message]) -> None:
        """A daemon that is not there any more has taken it back already; this connection is of no use then."""
        try:
            if not self._daemon.is_reusable:
                self._daemon.close()
                self._is_over = True
                self._daemon = Connection(self._path, _DAEMON_S)
            self._daemon.call(name, request, response, _DAEMON_S)
        except KvstoredError:
            self._is_over = True

    def _tell(self, method: int, call: int, answer: Message) -> None:
        self._peer.send_frame(frame(method, OK, call, answer.SerializeToString()))

    def _refuse(self, method: int, call: int, error: KvstoredError) -> None:
        payload = failure_of(error).SerializeToString()
        self._peer.send_frame(frame(method, status_of(error).number, call, payload))


def headed(answer: pb.AcquireResponse) -> pb.AcquireResponse:
    """What a peer is told: no places, and no lease."""
    head = pb.AcquireResponse()
    head.CopyFrom(answer)
    for name in ("lease", "extent_counts", "extents"):
        head.ClearField(name)
    return head


def learn_namespaces(framing: Framing, listed: pb.ListNamespacesResponse) -> None:
    """What the blocks of the daemon's namespaces are made of."""
    for each in listed.namespaces:
        framing.learn(each.digest, spec_of(each.namespace, caller_tenant="default"))


def _parsed(request: type[Request], payload: bytes) -> Request:
    try:
        return request.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument(f"no {request.DESCRIPTOR.name} bytes={len(payload)}") from error
