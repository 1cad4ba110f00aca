"""Put and get over gRPC, for callers on another host: bytes travel in the stream, verified at both ends.

The only module of the client that loads grpc, and only when a client is made for such an address.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvstored.client.bulk import BulkConnection, BulkPool
from kvstored.client.channel import PROTOCOL, Session
from kvstored.client.copying import Bytes, checksum_of
from kvstored.client.frames import Frames, offered
from kvstored.client.links import GetCall, Glance, Leased, Post, PutPart
from kvstored.client.nearby import reachable_socket
from kvstored.client.results import GetResult, OptimisticReads
from kvstored.client.rows import blocks_of, outputs_of, sizes_of
from kvstored.client.streams import Outputs, put_messages, received, unframed
from kvstored.clock import Clock
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.errors import InvalidArgument, KvstoredError, NotFound, Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.bulk import BulkAddress
from kvstored.wire.frames import PAYLOAD_BYTES_MAX
from kvstored.wire.methods import BY_NAME, SERVICE
from kvstored.wire.namespaces import spec_of
from kvstored.wire.packing import pack_u64, unpack_table, unpack_u8, unpack_u64
from kvstored.wire.status import ERROR_DETAIL_KEY, error_of_grpc

Response = TypeVar("Response", bound=Message)

_RESUME_TTL_S = 30.0
_parents_channels: list[object] = []
"""Kept for ever in a forked child."""


class RemoteTransport:
    """One gRPC channel and one session; `bulk` carries the bytes where there is one and the daemon offers it. Thread-safe."""

    def __init__(self, target: str, *, name: str, clock: Clock, bulk: BulkPool | None) -> None:
        import grpc  # noqa: PLC0415 - clients on the daemon's host never need it

        self._errors: type[Exception] = grpc.RpcError
        self._target = target
        self._name = name
        self.clock = clock
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._used_s = 0.0
        self._is_closed = False
        self._near: str | None = None
        self._bulk = bulk
        self._bulk_address: BulkAddress | None = None
        self.frames: Frames | None = None
        """Whether bytes may travel as such: as the daemon of this session offers."""
        size_options = [
            ("grpc.max_receive_message_length", PAYLOAD_BYTES_MAX),
            ("grpc.max_send_message_length", PAYLOAD_BYTES_MAX),
            # Else the child of a fork is handed its parent's connection, and its first call fails ("wrong file descriptor generation").
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.insecure_channel(target, options=size_options)

    @contextmanager
    def link(self, timeout_s: float) -> Iterator["RemoteLink"]:
        if self._is_closed:
            raise Unavailable("the client is closed")
        with self._lock:
            session = self._current(timeout_s)
        yield RemoteLink(self, session)

    def near_socket(self, timeout_s: float) -> str | None:
        """The daemon's local socket, if it runs on this host and can be reached there."""
        with self._lock:
            self._current(timeout_s)
        return self._near

    @contextmanager
    def bulk(self, session: Session, timeout_s: float) -> Iterator[BulkConnection | None]:
        """None where bytes go over gRPC."""
        address = self._bulk_address
        if self._bulk is None or address is None:
            yield None
            return
        with self._bulk.connection(address, session.token, timeout_s) as connection:
            if connection is None:
                self._doubt()
            try:
                yield connection
            except (Unavailable, NotFound):
                self._doubt()
                raise

    def optimistic_reads(self) -> OptimisticReads:
        return OptimisticReads()

    def post(self, post: Post, timeout_s: float) -> bool:
        """Never: there is no memory of the daemon to leave bytes in."""
        return False

    def flush(self, timeout_s: float) -> Counter[FillStatus]:
        return Counter()

    def close(self) -> None:
        if self._bulk is not None:
            self._bulk.close_idle()
        session, self._session = self._session, None
        try:
            if session is not None and not self._is_closed:
                request = pb.CloseSessionRequest(session=session.token)
                self.call("CloseSession", request, pb.CloseSessionResponse, 2.0)
        except KvstoredError:
            # Unreachable: the session ends by its TTL.
            pass
        finally:
            self._is_closed = True
            self._channel.close()

    def forked(self) -> None:
        # Its threads did not come along: closing or collecting the channel here would wait for them.
        _parents_channels.append(self._channel)
        self._is_closed = True
        if self._bulk is not None:
            self._bulk.close()

    def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response:
        method = BY_NAME[name]
        unary: Callable[..., Response] = self._channel.unary_unary(
            method.path,
            request_serializer=_serialized,
            response_deserializer=response.FromString,
        )
        with self.translated():
            return unary(request, timeout=timeout_s)

    def put_stream(self, messages: Iterator[pb.PutRequest], timeout_s: float) -> pb.PutResponse:
        stream: Callable[..., pb.PutResponse] = self._channel.stream_unary(
            f"/{SERVICE}/Put",
            request_serializer=_serialized,
            response_deserializer=pb.PutResponse.FromString,
        )
        with self.translated():
            return stream(messages, timeout=timeout_s)

    def get_stream(self, request: pb.GetRequest, timeout_s: float) -> Iterator[pb.GetResponse]:
        stream: Callable[..., Iterator[pb.GetResponse]] = self._channel.unary_stream(
            f"/{SERVICE}/Get",
            request_serializer=_serialized,
            response_deserializer=pb.GetResponse.FromString,
        )
        with self.translated():
            yield from stream(request, timeout=timeout_s)

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            translated = _translated(error, self._target)
            if isinstance(translated, Unavailable | NotFound):
                self._doubt()
            raise translated from error

    @contextmanager
    def within(self, session: Session, timeout_s: float) -> Iterator[None]:
        """A call of this session. That it went with its daemon is Unavailable: the next call has another, and namespaces reopen in it."""
        try:
            yield
        except NotFound as error:
            with self._lock:
                current = self._current(timeout_s)
            if current is session:
                raise
            raise Unavailable("the daemon was restarted: call again") from error

    def _doubt(self) -> None:
        """The daemon or its front may be another by now: the next call asks whether the session lives, and where the bulk channel is."""
        self._used_s = 0.0

    def _current(self, timeout_s: float) -> Session:
        """The session, opened or resumed where it is new or has been idle for a good part of its life."""
        known, now_s = self._session, self.clock.now_s()
        if known is not None and now_s - self._used_s < (known.resume_ttl_s or _RESUME_TTL_S) / 3:
            self._used_s = now_s
            return known
        request = pb.OpenSessionRequest(
            client=self._name,
            resume_token=known.token if known is not None else b"",
            protocol=PROTOCOL,
            detached=True,
        )
        answer = self.call("OpenSession", request, pb.OpenSessionResponse, timeout_s)
        if known is None or (known.token, known.epoch) != (answer.token, answer.epoch):
            known = Session(answer.token, answer.epoch, answer.resume_ttl_ms / 1000)
        self._session, self._used_s = known, now_s
        self._near = reachable_socket(answer.host, answer.local_socket)
        self._bulk_address = _bulk_address(answer, self._target)
        if self.frames is None or self.frames.offer != answer.frames:
            self.frames = offered(answer.frames)
        return known


class RemoteLink:
    shares_memory = False

    def __init__(self, transport: RemoteTransport, session: Session) -> None:
        self._transport = transport
        self._session = session

    @property
    def session(self) -> Session:
        return self._session

    def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response:
        with self._transport.within(self._session, timeout_s):
            answer = self._transport.call(name, request, response, timeout_s)
        frames = self._transport.frames
        if frames is not None and isinstance(answer, pb.OpenNamespaceResponse):
            frames.learn(answer.digest, spec_of(answer.namespace, caller_tenant="default"))
        return answer

    def put(self, parts: Sequence[PutPart], timeout_s: float) -> list[FillStatus]:
        with self._transport.within(self._session, timeout_s):
            return self._put(parts, timeout_s)

    def get(self, call: GetCall, timeout_s: float) -> GetResult:
        with self._transport.within(self._session, timeout_s):
            return self._get(call, timeout_s)

    def get_each(self, calls: Sequence[GetCall], timeout_s: float) -> list[GetResult]:
        return [self.get(call, timeout_s) for call in calls]

    def glance(self, glance: Glance, timeout_s: float) -> None:
        """Nothing is shared with a daemon on another host."""
        return

    def lease(self, call: GetCall, timeout_s: float) -> Leased:
        raise InvalidArgument("views need the local channel: connect to the daemon's Unix socket")

    def lease_on_gpu(self, call: GetCall, timeout_s: float) -> Leased:
        raise InvalidArgument(
            "gpu memory needs the local channel: connect to the daemon's Unix socket"
        )

    def wait_layers(self, leased: Leased, layers: int, stream: int | None, timeout_s: float) -> int:
        """Never reached by a view of this link: there is none."""
        return 0

    def release(self, leased: Leased, timeout_s: float) -> bool:
        """Never reached by a view of this link: there is none."""
        return False

    def _put(self, parts: Sequence[PutPart], timeout_s: float) -> list[FillStatus]:
        for part in parts:
            if part.generations is not None:
                raise InvalidArgument("replacing needs the local channel")
            part.request.session = self._session.token
            part.request.sizes = pack_u64(sizes_of(part.sources))
        with self._transport.bulk(self._session, timeout_s) as connection:
            if connection is not None:
                return connection.put(parts, timeout_s, self._transport.frames)
        status: list[FillStatus] = []
        frames = self._transport.frames
        for part in parts:
            sending = None if frames is None else frames.sending(self._transport.clock)
            answer = self._transport.put_stream(put_messages(part, sending), timeout_s)
            if sending is not None:
                sending.ended()
            status += [FillStatus(s) for s in unpack_u8(answer.status, "status", part.keys)]
        return status

    def _get(self, call: GetCall, timeout_s: float) -> GetResult:
        call.request.session = self._session.token
        with self._transport.bulk(self._session, timeout_s) as connection:
            if connection is not None:
                return connection.get(call, timeout_s, self._transport.frames)
        frames = self._transport.frames
        if frames is not None:
            frames.ask_for(call.request)
        stream = self._transport.get_stream(pb.GetRequest(acquire=call.request), timeout_s)
        head = next(stream, pb.GetResponse()).head
        status = unpack_u8(head.status, "status", call.keys)
        sizes = unpack_table(head.sizes, "sizes", call.keys, call.groups)
        checksums = unpack_table(head.checksums, "checksums", call.keys, call.groups)
        hits: list[bool] = (status == ReadStatus.HIT).tolist()
        outputs = outputs_of(sizes, hits, call.out)
        flat = [o for row in outputs for o in row if o is not None]
        if head.frames:
            is_good = frames is not None and unframed(stream, flat, frames)
        else:
            begun_s = self._transport.clock.elapsed_s()
            is_good = received(stream, Outputs(flat))
            if frames is not None:
                took_s = self._transport.clock.elapsed_s() - begun_s
                frames.incoming.carried(sum(each.size for each in flat), took_s)
        corrupt = 0
        for i, row in enumerate(outputs):
            if not hits[i]:
                continue
            if not is_good or (call.verify and not _verifies(row, checksums[i].tolist())):
                hits[i], corrupt = False, corrupt + 1
        return GetResult(
            blocks=blocks_of(outputs, hits),
            status=tuple(
                ReadStatus.MISS if s == ReadStatus.HIT and not ok else ReadStatus(s)
                for s, ok in zip(status.tolist(), hits, strict=True)
            ),
            tiers=head.tiers,
            generations=tuple(
                unpack_u64(
                    head.generations or bytes(8 * call.keys), "generations", call.keys
                ).tolist()
            ),
            miss_reason=head.miss_reason,
            corrupt=corrupt,
            verified=call.verify,
            lossy=head.lossy,
        )


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _translated(
    error: Any,  # a grpc.RpcError that is also a grpc.Call, which grpc has no class for
    target: str,
) -> KvstoredError:
    detail = None
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_DETAIL_KEY:
            detail = value if isinstance(value, bytes) else value.encode()
    if detail is None and error.code().name == "UNAVAILABLE":
        return Unavailable(
            f"the daemon is not reachable: address={target} error={error.details()}; start it with `kvstored serve`, "
            "or give the address that its `listen` names"
        )
    return error_of_grpc(error.code().name, error.details() or "", detail)


def _bulk_address(answer: pb.OpenSessionResponse, target: str) -> BulkAddress | None:
    if not answer.bulk_port:
        return None
    here = "127.0.0.1" if target.startswith("unix:") else target.rpartition(":")[0].strip("[]")
    return BulkAddress(
        answer.bulk_host or here, answer.bulk_port, answer.bulk_id, answer.bulk_certificate
    )


def _verifies(row: list[Bytes | None], checksums: list[int]) -> bool:
    return all(
        output is None or checksum_of([output]) == checksum
        for output, checksum in zip(row, checksums, strict=True)
    )
