"""The streaming calls of the gRPC front: bytes between streams and the daemon's mapped segments."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import numpy as np
import xxhash

from kvstored.client.connection import Connection
from kvstored.client.copying import Bytes
from kvstored.client.framing import Framing, Runs, Unframing
from kvstored.client.rows import mapped_segments, shared_runs
from kvstored.client.segments import Segments
from kvstored.core.calls import ReadStatus
from kvstored.errors import Corrupt, InvalidArgument, KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.transport.bulk_calls import headed, learn_namespaces
from kvstored.transport.transit import Transit
from kvstored.transport.upstream import Upstream, UpstreamLink
from kvstored.wire.bulk import FRAMES_VERSION
from kvstored.wire.frames import DEADLINE_S_MAX
from kvstored.wire.packing import (
    U64S,
    PackedPieces,
    Pieces,
    check_is_streamed,
    check_keys,
    pack_u64,
    unpack_pieces,
    unpack_table,
    unpack_u8,
    unpack_u64,
)

Context = Any  # grpc.aio.ServicerContext: grpc ships no types
T = TypeVar("T")

_THREADS = 4
_DATA_BYTES = 1 << 20
_POLL_MS = 10_000


class Streams:
    """Put, Get, KeepAlive and WatchEvents. Copies and hashes on threads of its own, never on the loop."""

    def __init__(self, upstream: Upstream, segments: Segments, framing: Framing | None) -> None:
        self._framing = framing
        self._upstream = upstream
        self._transit = Transit(upstream.path)
        self._segments = segments
        self._pool = ThreadPoolExecutor(_THREADS, "front-copy")

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    async def put(self, requests: AsyncIterator[pb.PutRequest], context: Context) -> pb.PutResponse:
        """Reserve, copy as the data comes, commit. Nothing stays reserved when the stream breaks, lies or is cancelled."""
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("reserve") or not first.reserve.sizes:
            raise InvalidArgument("the first message of a put holds its reservation with all sizes")
        if first.frames and (self._framing is None or first.frames != FRAMES_VERSION):
            raise InvalidArgument(
                f"no such frames here: version={first.frames}; send bytes as they are"
            )
        keys = check_keys(len(first.reserve.keys.packed), first.reserve.keys.key_bytes)
        groups = _groups(len(first.reserve.sizes) // 8, keys)
        timeout_s = _timeout_s(context)
        async with self._upstream.link() as link:
            reserved = await link.call("Reserve", first.reserve, pb.ReserveResponse, timeout_s)
            fills = unpack_u64(reserved.fills, "fills", keys)
            granted = np.flatnonzero(fills)
            try:
                sizes = unpack_table(first.reserve.sizes, "sizes", keys, groups)
                pieces = await self._pieces(link, reserved, keys, groups)
                sink = _Sink(pieces[0], sizes.reshape(-1).tolist(), pieces[1])
                with self._transit.of(first.reserve.session):
                    checksums = await self._received(sink, first, requests)
                commit = pb.CommitRequest(
                    session=first.reserve.session,
                    fills=pack_u64(fills[granted]),
                    checksums=pack_u64(checksums.reshape(keys, groups)[granted]),
                )
                committed = await link.call("Commit", commit, pb.CommitResponse, timeout_s)
            except BaseException:
                await asyncio.shield(self._abort(first.reserve.session, fills[granted]))
                raise
        status = unpack_u8(reserved.status, "status", keys).copy()
        status[granted] = unpack_u8(committed.status, "status", len(granted))
        return pb.PutResponse(status=status.tobytes())

    async def get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[pb.GetResponse]:
        """The head, the bytes of all hits, and `failed` where one of them did not verify; the lease ends with the stream."""
        with self._transit.of(request.acquire.session):
            async with aclosing(self._got(request, context)) as messages:
                async for message in messages:
                    yield message

    async def _got(
        self, request: pb.GetRequest, context: Context
    ) -> AsyncGenerator[pb.GetResponse, None]:
        acquire = request.acquire
        keys = check_keys(len(acquire.keys.packed), acquire.keys.key_bytes)
        check_is_streamed(acquire.tier)
        async with self._upstream.link() as link:
            answer = await link.call("Acquire", acquire, pb.AcquireResponse, _timeout_s(context))
            try:
                groups = _groups(len(answer.extent_counts), keys)
                pieces, segments = await self._pieces(link, answer, keys, groups)
                hits = unpack_u8(answer.status, "status", keys) == ReadStatus.HIT
                checksums = unpack_u64(answer.checksums, "checksums", keys * groups)
                has_place = np.diff(pieces.first) > 0
                wanted = np.flatnonzero(np.repeat(hits, groups) & has_place).tolist()
                head = headed(answer)
                places = [(i, shared_runs(pieces, i, segments)) for i in wanted]
                framed = await self._framed(link, acquire, places)
                head.frames = FRAMES_VERSION if framed else 0
                yield pb.GetResponse(head=head)
                if self._framing is not None and framed:
                    told = checksums[wanted].tolist()
                    made = self._sent_framed(self._framing, acquire.namespace, framed, told)
                    async with aclosing(made) as messages:
                        async for message in messages:
                            yield message
                    return
                for i in wanted:
                    hasher = xxhash.xxh3_64()
                    for run in shared_runs(pieces, i, segments):
                        for start in range(0, run.size, _DATA_BYTES):
                            part = run[start : start + _DATA_BYTES]
                            yield pb.GetResponse(data=await self._on_thread(_read, part, hasher))
                    if hasher.intdigest() != checksums[i]:
                        yield pb.GetResponse(failed=True)
                        return
            finally:
                if answer.lease:
                    await asyncio.shield(self._release(acquire.session, answer.lease))

    async def _framed(
        self, link: UpstreamLink, request: pb.AcquireRequest, pieces: list[tuple[int, Runs]]
    ) -> list[tuple[int, Runs]]:
        """The pieces with their groups where they go as frames; else none."""
        framing, speed = self._framing, float(request.link_bytes_per_s)
        if framing is None or request.frames < FRAMES_VERSION or not framing.may_pay(speed):
            return []
        if not framing.knows(request.namespace):
            listed = await link.call(
                "ListNamespaces", pb.ListNamespacesRequest(), pb.ListNamespacesResponse, 5.0
            )
            learn_namespaces(framing, listed)
        found = framing.with_groups(request.namespace, request.groups, pieces)
        pays = await self._on_thread(
            lambda: framing.pays(
                request.namespace,
                found,
                link_bytes_per_s=speed,
                decoders=max(1, request.decoders),
            )
        )
        return found if pays else []

    async def _sent_framed(
        self,
        framing: Framing,
        digest: bytes,
        pieces: list[tuple[int, Runs]],
        checksums: list[int],
    ) -> AsyncGenerator[pb.GetResponse, None]:
        """As in `get`: `failed` where a piece is not what it was."""
        encoding = framing.encoding(digest, pieces)
        made = encoding.__enter__()
        try:
            for checksum in checksums:
                each = await self._on_thread(next, made)
                for view in (each.head, *each.views):
                    for start in range(0, view.size, _DATA_BYTES):
                        yield pb.GetResponse(data=view[start : start + _DATA_BYTES].tobytes())
                if each.checksum != checksum:
                    yield pb.GetResponse(failed=True)
                    return
        finally:
            await self._on_thread(encoding.__exit__, None, None, None)

    async def keep_alive(
        self, requests: AsyncIterator[pb.KeepAliveRequest], context: Context
    ) -> AsyncIterator[pb.KeepAliveResponse]:
        async for request in requests:
            async with self._upstream.link() as link:
                answer = await link.call("KeepAlive", request, pb.KeepAliveResponse, 10.0)
            yield answer

    async def watch_events(
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.Event]:
        """Polls as long as the caller listens; a gap is one EVENTS_LOST event."""
        epoch, cursor = request.epoch, request.cursor
        while True:
            poll = pb.PollEventsRequest(epoch=epoch, cursor=cursor, wait_ms=_POLL_MS)
            async with self._upstream.link() as link:
                answer = await link.call(
                    "PollEvents", poll, pb.PollEventsResponse, _POLL_MS / 1000 + 10
                )
            if answer.lost:
                yield pb.Event(kind=pb.EVENTS_LOST, epoch=answer.epoch, sequence=answer.cursor)
            for event in answer.events:
                yield event
            epoch, cursor = answer.epoch, answer.cursor

    # ---- inside

    async def _pieces(
        self,
        link: UpstreamLink,
        answer: pb.ReserveResponse | pb.AcquireResponse,
        keys: int,
        groups: int,
    ) -> tuple[Pieces, dict[int, Bytes]]:
        packed = PackedPieces(answer.extent_counts, answer.extents, answer.sizes)
        pieces = unpack_pieces(packed, keys, groups)
        mapped = await self._on_thread(
            mapped_segments, self._segments, pieces, link.epoch, self._fetch
        )
        return pieces, mapped

    def _fetch(self, segment: int) -> tuple[pb.SegmentResponse, int]:
        """On a copying thread: asyncio's own streams cannot take descriptors."""
        connection = Connection(str(self._upstream.path), 5.0)
        try:
            return connection.segment(segment, 5.0)
        finally:
            connection.close()

    async def _received(
        self, sink: "_Sink", first: pb.PutRequest, requests: AsyncIterator[pb.PutRequest]
    ) -> U64S:
        """All data into place; the checksums, which are the caller's where it sent any."""
        told = first.checksums
        unframing = None
        if first.frames and self._framing is not None:
            unframing = Unframing(sink.sizes, sink.take, self._framing.count_received)

        def write(data: bytes) -> None:
            (unframing.write if unframing else sink.take)(np.frombuffer(data, dtype=np.uint8))

        if first.data:
            await self._on_thread(write, first.data)
        async for request in requests:
            if request.data:
                await self._on_thread(write, request.data)
            told = request.checksums or told
        found = sink.finished()
        if told:
            sent = unpack_u64(told, "checksums", len(found))
            if np.any((sent != found) & sink.has_bytes):
                raise Corrupt("bytes of a put do not match their checksums: nothing was stored")
        return found

    async def _abort(self, session: bytes, fills: U64S) -> None:
        """On another link: that of the put may be in the middle of a call."""
        with suppress(KvstoredError):
            async with self._upstream.link() as link:
                request = pb.AbortRequest(session=session, fills=pack_u64(fills))
                await link.call("Abort", request, pb.AbortResponse, 5.0)

    async def _release(self, session: bytes, lease: int) -> None:
        with suppress(KvstoredError):
            async with self._upstream.link() as link:
                request = pb.ReleaseRequest(session=session, leases=pack_u64([lease]))
                await link.call("Release", request, pb.ReleaseResponse, 5.0)

    async def _on_thread(self, call: Callable[..., T], *arguments: object) -> T:
        """Waits for the end even when cancelled: the thread touches memory that is given back afterwards."""
        running = asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


class _Sink:
    """Takes the bytes of a put however they are cut, and puts each piece where it was granted; others are skipped."""

    def __init__(self, pieces: Pieces, sizes: list[int], segments: dict[int, Bytes]) -> None:
        self._pieces = pieces
        self.sizes = sizes
        self._segments = segments
        self._checksums = np.zeros(len(sizes), dtype=np.uint64)
        self._piece = -1
        self._runs: list[Bytes] = []
        self._left = 0
        self._hasher = xxhash.xxh3_64()
        self.has_bytes = np.asarray(sizes, dtype=np.uint64) > 0

    def take(self, view: Bytes) -> None:
        while view.size:
            if self._left == 0:
                self._next_piece()
            count = min(view.size, self._left)
            self._put(view[:count])
            view = view[count:]

    def finished(self) -> U64S:
        """The checksum of each piece; raises InvalidArgument where bytes are missing."""
        if self._left or any(self.sizes[self._piece + 1 :]):
            raise InvalidArgument("a put ended before all its bytes came")
        return self._checksums

    def _next_piece(self) -> None:
        self._piece += 1
        while self._piece < len(self.sizes) and self.sizes[self._piece] == 0:
            self._piece += 1
        if self._piece == len(self.sizes):
            raise InvalidArgument("a put has more bytes than its sizes say")
        self._left = self.sizes[self._piece]
        self._hasher = xxhash.xxh3_64()
        self._runs = list(shared_runs(self._pieces, self._piece, self._segments))
        if self._runs and sum(run.size for run in self._runs) != self._left:
            raise Corrupt("a place has another size than its piece")

    def _put(self, part: Bytes) -> None:
        self._hasher.update(part.data)
        self._left -= part.size
        if self._left == 0:
            self._checksums[self._piece] = self._hasher.intdigest()
        while self._runs and part.size:
            run = self._runs[0]
            count = min(run.size, part.size)
            np.copyto(run[:count], part[:count])
            part = part[count:]
            self._runs[0] = run[count:]
            if not self._runs[0].size:
                self._runs.pop(0)


def _read(part: Bytes, hasher: "xxhash.xxh3_64") -> bytes:
    data = part.tobytes()
    hasher.update(data)
    return data


def _groups(count: int, keys: int) -> int:
    groups, rest = divmod(count, max(keys, 1))
    if rest:
        raise InvalidArgument(f"sizes are one a key and group values={count} keys={keys}")
    return groups


def _timeout_s(context: Context) -> float:
    remaining: float | None = context.time_remaining()
    return DEADLINE_S_MAX if remaining is None else min(max(remaining, 0.01), DEADLINE_S_MAX)
