"""The bulk channel of a remote daemon: its bytes over TCP connections of their own, under the session that gRPC opened.

Connections are pooled. Where one cannot be made the caller goes on over gRPC and it is tried again later.
"""

import hashlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvstored.client.bulk_socket import BulkSocket, Runs
from kvstored.client.frames import Frames, Sending
from kvstored.client.links import GetCall, PutPart
from kvstored.client.results import GetResult
from kvstored.client.rows import blocks_of, outputs_of
from kvstored.client.segments import Bytes
from kvstored.clock import Clock
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.errors import Corrupt, KvstoredError, Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.bulk import (
    DATA,
    FRAMED,
    FRAMES_VERSION,
    GREETING,
    HANDSHAKE_S,
    ID_BYTES,
    STALL_S,
    BulkAddress,
)
from kvstored.wire.frames import PAYLOAD_BYTES_MAX, deadline_field, frame
from kvstored.wire.methods import BY_NAME
from kvstored.wire.packing import pack_u64, unpack_table, unpack_u8, unpack_u64
from kvstored.wire.status import OK, error_of

Response = TypeVar("Response", bound=Message)

_CONNECTIONS_MAX = 16
_RETRY_S = 5.0
_ACQUIRE, _RESERVE = BY_NAME["Acquire"].number, BY_NAME["Reserve"].number
_KEEP_ALIVE = BY_NAME["KeepAlive"].number


class BulkPool:
    """Thread-safe. Never survives a fork: the child makes another one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._idle: deque[BulkConnection] = deque()
        self._open: set[BulkConnection] = set()
        self._failed: BulkAddress | None = None
        self._retry_at_s = 0.0
        self._is_closed = False

    @contextmanager
    def connection(
        self, address: BulkAddress, session: bytes, timeout_s: float
    ) -> Iterator["BulkConnection | None"]:
        """None where the channel cannot be had now, or all connections are busy."""
        if self._is_closed or not self._slots.acquire(blocking=False):
            yield None
            return
        try:
            made = self._taken(address, session) or self._made(address, session, timeout_s)
            try:
                yield made
            finally:
                if made is not None:
                    self._give_back(made)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Also in the child of a fork: closes its copies of the parent's sockets, without a word to the daemon."""
        self._is_closed = True
        for connection in list(self._open):
            connection.close()

    def close_idle(self) -> None:
        """At the end of the process' use; calls under way end by themselves."""
        self._is_closed = True
        while self._idle:
            self._drop(self._idle.pop())

    def _taken(self, address: BulkAddress, session: bytes) -> "BulkConnection | None":
        while True:
            try:
                known = self._idle.pop()
            except IndexError:
                return None
            if (known.address, known.session) == (address, session) and known.is_reusable:
                return known
            self._drop(known)

    def _made(
        self, address: BulkAddress, session: bytes, timeout_s: float
    ) -> "BulkConnection | None":
        if self._failed == address and self._clock.elapsed_s() < self._retry_at_s:
            return None
        try:
            made = BulkConnection(address, session, min(timeout_s, HANDSHAKE_S), self._clock)
        except KvstoredError:
            # gRPC has the same daemon, and says what is wrong where it is not the network between.
            self._failed, self._retry_at_s = address, self._clock.elapsed_s() + _RETRY_S
            return None
        self._open.add(made)
        return made

    def _give_back(self, connection: "BulkConnection") -> None:
        if connection.is_reusable and not self._is_closed:
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: "BulkConnection") -> None:
        self._open.discard(connection)
        connection.close()


class BulkConnection:
    """Not thread-safe. After a call that failed it is not used again: what the daemon still holds of it ends with it."""

    def __init__(
        self, address: BulkAddress, session: bytes, timeout_s: float, clock: Clock
    ) -> None:
        self.address = address
        self.session = session
        self._clock = clock
        self._call = 0
        self._is_idle = False
        try:
            connected = _connected(address, timeout_s)
        except OSError as error:
            raise Unavailable(f"no bulk channel at port={address.port}: {error}") from error
        self._socket = BulkSocket(connected, clock)
        try:
            self._socket.wait_at_most(timeout_s)
            greeting = bytearray(len(GREETING) + ID_BYTES)
            self._socket.receive_into(memoryview(greeting), clock.elapsed_s() + timeout_s)
            if bytes(greeting) != GREETING + address.id:
                raise Corrupt(f"another server answers at port={address.port}")
            self._ask(_KEEP_ALIVE, pb.KeepAliveRequest(session=session), timeout_s)
            self._answer((_KEEP_ALIVE,), self._call, pb.KeepAliveResponse)
            self._socket.wait_at_most(STALL_S)
        except BaseException:
            self._socket.close()
            raise
        self._is_idle = True

    @property
    def is_reusable(self) -> bool:
        return self._is_idle and self._socket.is_quiet

    def close(self) -> None:
        self._is_idle = False
        self._socket.close()

    def put(
        self, parts: Sequence[PutPart], timeout_s: float, frames: Frames | None
    ) -> list[FillStatus]:
        """While the bytes of a part travel, the next one is reserved and the one before committed. `frames`: they may go as such."""
        assert self._is_idle, "the connection is in use or broken"
        self._is_idle = False
        sending = None if frames is None else frames.sending(self._clock)
        waiting: deque[tuple[int, int]] = deque()
        status: list[list[FillStatus]] = [[] for _ in parts]
        reserving = self._ask(_RESERVE, parts[0].request, timeout_s)
        for i, part in enumerate(parts):
            if waiting and waiting[0][0] == i - 2:  # answered before this part's reservation
                self._stored(*waiting.popleft(), parts, status)
            asked = reserving
            reserved = self._answer((_RESERVE,), asked, pb.ReserveResponse)
            if i + 1 < len(parts):
                reserving = self._ask(_RESERVE, parts[i + 1].request, timeout_s)
            status[i] = _statuses(reserved.status, part.keys)
            if FillStatus.GRANTED in status[i]:
                self._send_data(asked, part, reserved, timeout_s, sending)
                waiting.append((i, asked))
        while waiting:
            self._stored(*waiting.popleft(), parts, status)
        self._is_idle = True
        if sending is not None:
            sending.ended()
        return [each for of_part in status for each in of_part]

    def get(self, call: GetCall, timeout_s: float, frames: Frames | None) -> GetResult:
        """Straight into the outputs, verified as they lie there; what does not verify is a miss. `frames`: they may come as such."""
        assert self._is_idle, "the connection is in use or broken"
        self._is_idle = False
        if frames is not None:
            frames.ask_for(call.request)
        asked = self._ask(_ACQUIRE, call.request, timeout_s)
        ends_s = self._clock.elapsed_s() + timeout_s
        self._socket.wait_at_most(timeout_s)
        head = self._answer((_ACQUIRE,), asked, pb.AcquireResponse)
        self._socket.wait_at_most(STALL_S)
        status = unpack_u8(head.status, "status", call.keys)
        sizes = unpack_table(head.sizes, "sizes", call.keys, call.groups)
        checksums = unpack_table(head.checksums, "checksums", call.keys, call.groups)
        hits: list[bool] = (status == ReadStatus.HIT).tolist()
        outputs = outputs_of(sizes, hits, call.out)
        flat = [output for row in outputs for output in row]
        indexes = [i for i, output in enumerate(flat) if output is not None]
        pieces = [(output,) for output in flat if output is not None]
        found = self._received(head, pieces, ends_s, frames)
        self._is_idle = True
        told = checksums.reshape(-1)[indexes].tolist()
        bad = [i for i, one, other in zip(indexes, found, told, strict=True) if one != other]
        corrupt = {i // call.groups for i in bad}
        good = [hit and i not in corrupt for i, hit in enumerate(hits)]
        return _result(head, outputs, good, len(corrupt))

    # ---- inside

    def _send_data(
        self,
        call: int,
        part: PutPart,
        reserved: pb.ReserveResponse,
        timeout_s: float,
        sending: Sending | None,
    ) -> None:
        """The pieces that have a place, and their checksums, under the number of their reservation."""
        counts = unpack_u8(reserved.extent_counts, "extent_counts", len(part.sources))
        pieces: list[tuple[int, Runs]] = [
            (i, (source,))
            for i, (source, count) in enumerate(zip(part.sources, counts.tolist(), strict=True))
            if source is not None and count
        ]
        ends_s = self._clock.elapsed_s() + timeout_s
        framed = sending.chosen(part.request, pieces) if sending is not None else []
        method = FRAMED if framed else DATA
        self._socket.send_frame(frame(method, deadline_field(timeout_s), call, b""))
        if sending is not None and framed:
            sums = sending.send(self._socket, part.request.namespace, framed, ends_s)
        else:
            sums = self._socket.send_summed([runs for _, runs in pieces], ends_s)
        self._socket.send_frame(pack_u64(sums))

    def _received(
        self,
        head: pb.AcquireResponse,
        pieces: Sequence[Runs],
        ends_s: float,
        frames: Frames | None,
    ) -> Sequence[int | None]:
        """Their checksums as they lie; None of a frame that was damaged."""
        if head.frames:
            if frames is None or head.frames != FRAMES_VERSION:
                raise Corrupt(f"frames that were not asked for version={head.frames}")
            return frames.receive(self._socket, pieces, ends_s)
        begun_s = self._clock.elapsed_s()
        found = self._socket.receive_summed(pieces, ends_s)
        if frames is not None:
            size = sum(run.size for runs in pieces for run in runs)
            frames.incoming.carried(size, self._clock.elapsed_s() - begun_s)
        return found

    def _stored(
        self, i: int, call: int, parts: Sequence[PutPart], status: list[list[FillStatus]]
    ) -> None:
        answer = self._answer((DATA, FRAMED), call, pb.PutResponse)
        status[i] = _statuses(answer.status, parts[i].keys)

    def _ask(self, method: int, request: Message, timeout_s: float) -> int:
        self._call = self._call % 0xFFFF_FFFF + 1
        sent = frame(method, deadline_field(timeout_s), self._call, request.SerializeToString())
        self._socket.send_frame(sent)
        return self._call

    def _answer(self, methods: tuple[int, ...], call: int, response: type[Response]) -> Response:
        answered, status, told, payload = self._socket.receive_frame(PAYLOAD_BYTES_MAX)
        if status != OK:
            raise error_of(status, payload)
        if answered not in methods or told != call:
            raise Corrupt(f"the answer is to another call method={answered} wanted={methods}")
        try:
            return response.FromString(payload)
        except DecodeError as error:
            raise Corrupt(f"an answer is no {response.DESCRIPTOR.name}") from error


def _connected(address: BulkAddress, timeout_s: float) -> socket.socket:
    plain = socket.create_connection((address.host, address.port), timeout_s)
    if not address.certificate:
        return plain
    # Whose certificate it is was told over gRPC: no authority need vouch for it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        wrapped = context.wrap_socket(plain)
    except BaseException:
        plain.close()
        raise
    shown = wrapped.getpeercert(binary_form=True) or b""
    if hashlib.sha256(shown).digest() != address.certificate:
        wrapped.close()
        raise Corrupt(f"another certificate than the session told port={address.port}")
    return wrapped


def _statuses(packed: bytes, keys: int) -> list[FillStatus]:
    return [FillStatus(s) for s in unpack_u8(packed, "status", keys)]


def _result(
    head: pb.AcquireResponse, outputs: list[list[Bytes | None]], good: list[bool], corrupt: int
) -> GetResult:
    keys = len(good)
    told = head.generations or bytes(8 * keys)
    return GetResult(
        blocks=blocks_of(outputs, good),
        status=tuple(
            ReadStatus.MISS if s == ReadStatus.HIT and not ok else ReadStatus(s)
            for s, ok in zip(unpack_u8(head.status, "status", keys), good, strict=True)
        ),
        tiers=head.tiers,
        generations=tuple(unpack_u64(told, "generations", keys).tolist()),
        miss_reason=head.miss_reason,
        corrupt=corrupt,
        lossy=head.lossy,
    )
