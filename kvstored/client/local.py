"""Put and get on one host: messages for the places, copies through mapped segments for the bytes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvstored.client.aside import AsidePuts, Filled
from kvstored.client.carrying import Acquired
from kvstored.client.channel import LocalLink, Session
from kvstored.client.copying import Bytes, Copier, checksum_of
from kvstored.client.gpu import Pool, Pools, blocks_on_gpu
from kvstored.client.links import GetCall, Glance, Leased, Post, PutPart, milliseconds
from kvstored.client.optimistic import Optimistic
from kvstored.client.reserved import ReservedPuts
from kvstored.client.results import Blocks, GetResult
from kvstored.client.rows import mapped_segments, privates_of, segments_of, shared_runs
from kvstored.client.runs import (
    Privates,
    blocks_in_place,
    blocks_made,
    runs_between,
    walks_between,
)
from kvstored.client.scatter import scatter_all
from kvstored.client.segments import Segments
from kvstored.clock import Clock
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import (
    PackedPieces,
    Pieces,
    pack_keys,
    pack_u64,
    unpack_pieces,
    unpack_table,
    unpack_u8,
    unpack_u64,
)

Response = TypeVar("Response", bound=Message)
BoolS = NDArray[np.bool_]


_RIDING_BYTES_MAX = 256 << 20
"""A lease on more does not wait for the next Acquire: it would keep that much from being evicted until then."""

_COPY_LEASE_MS = 10_000
"""Lease of a copying get, beside the time of its loads. A client that falls silent after it holds nothing for longer."""

_SURE_S = 0.08
"""An unverified copy, or a view, that ended so soon after its lease was asked for had it all the time: no configuration ends a lease in less than 0.1 s,
the daemon counts from when it was asked, and it still lives. It tells nothing of a leased copy to anybody before; the rest are asked about."""

_ANSWER_S = 1.0
"""Beside the time that the daemon waits for layers."""

_READ = {int(status): status for status in ReadStatus}
_FILL = {int(status): status for status in FillStatus}


class Asked(NamedTuple):
    """An Acquire whose answer was not taken yet, and the leases that it releases."""

    call: GetCall
    asked_s: float
    releases: Sequence[int]


GetEach = Callable[["LocalDataLink", Sequence[GetCall], float], list[GetResult]]
"""By a link and another one, where there is one."""


class LocalDataLink:
    shares_memory = True

    def __init__(
        self,
        link: LocalLink,
        segments: Segments,
        pools: Pools,
        copier: Copier,
        clock: Clock,
        optimistic: Optimistic,
        get_each: "GetEach",
    ) -> None:
        self.borrowed = link
        self._get_each = get_each
        self._optimistic = optimistic
        self._segments = segments
        self._pools = pools
        self._copier = copier
        self._clock = clock

    @property
    def session(self) -> Session:
        return self.borrowed.session

    def call(
        self, name: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response:
        return self.borrowed.call(name, request, response, timeout_s)

    # ---- put

    def put(self, parts: Sequence[PutPart], timeout_s: float) -> list[FillStatus]:
        """One message where there are places set aside for all of it and the projection shows none of the blocks; else reserved first."""
        token = self.borrowed.session.token
        for part in parts:
            part.request.session = token
        part = parts[0]
        aside, keys = part.aside, part.request.keys
        if len(parts) > 1 or aside is None:
            return self._reserved().put(parts, timeout_s)
        plain = aside.plain
        may_be_new = bool(keys.extra_keys) or not self._optimistic.may_show(
            self.borrowed, plain.seed, keys.packed, keys.key_bytes, timeout_s
        )
        is_stored = may_be_new and self._asides().put(
            part, aside, self._clock.elapsed_s(), timeout_s
        )
        stored = [FillStatus.COMMITTED] * part.keys
        status = stored if is_stored else self._reserved().put(parts, timeout_s)
        self.borrowed.stock.restock(plain.namespace, part.keys, plain.block_bytes, timeout_s)
        return status

    def fill(self, post: Post, timeout_s: float) -> Filled | None:
        """Blocks that the projection does not show, copied to places set aside; None where they have to be put."""
        packed, key_bytes = pack_keys(post.keys.keys)
        if self._optimistic.may_show(self.borrowed, post.plain.seed, packed, key_bytes, timeout_s):
            return None
        return self._asides().fill(post, self._clock.elapsed_s(), timeout_s)

    def put_again(self, filled: Filled, timeout_s: float) -> list[FillStatus]:
        """Blocks of `fill` that the daemon did not take, reserved now; their places are free again."""
        try:
            part = self._asides().again(filled, timeout_s)
            return self._reserved().put([part], timeout_s)
        finally:
            self.borrowed.stock.put_back(filled.plain.namespace, filled.places)

    def _asides(self) -> AsidePuts:
        return AsidePuts(self.borrowed, self._copier, self._segments, self._mapped)

    def _reserved(self) -> ReservedPuts:
        return ReservedPuts(self.borrowed, self._copier, self._mapped)

    # ---- get

    def glance(self, glance: Glance, timeout_s: float) -> GetResult | None:
        return self._optimistic.read(self.borrowed, glance, timeout_s)

    def get(self, call: GetCall, timeout_s: float) -> GetResult:
        """Acquire, copy, verify; the release rides on the next Acquire unless it holds much memory."""
        return self.end_get(self.begin_get(call, timeout_s), timeout_s)

    def get_each(self, calls: Sequence[GetCall], timeout_s: float) -> list[GetResult]:
        return self._get_each(self, calls, timeout_s)

    def begin_get(self, call: GetCall, timeout_s: float) -> Asked:
        call.request.lease_ttl_ms = _COPY_LEASE_MS + call.request.deadline_ms
        return self._begin_acquire(call, timeout_s)

    def end_get(self, asked: Asked, timeout_s: float) -> GetResult:
        call, asked_s, answer = asked.call, asked.asked_s, self._end_acquire(asked)
        try:
            acquired = self._unpacked(call, answer, timeout_s)
            is_verified = call.verify or bool(answer.must_verify.strip(b"\0"))
            bad, indexes, blocks = self._copied_out(call, acquired, is_verified)
        except BaseException:
            self.session.release_later(answer.lease)
            raise
        is_sure = call.verify or (
            self._clock.elapsed_s() - asked_s < _SURE_S and self.borrowed.connection.is_reusable
        )
        status = acquired.status
        if is_sure and int(acquired.pieces.sizes.sum()) <= _RIDING_BYTES_MAX:
            self.session.release_later(answer.lease)
        elif self._was_lost(answer.lease, timeout_s) and not is_sure:
            status = np.where(status == ReadStatus.HIT, ReadStatus.MISS, status).astype(np.uint8)
        if len(bad):
            status = status.copy()
            status[bad] = ReadStatus.MISS
        told = status.tolist()
        count = call.keys
        result = GetResult(
            blocks=lambda: blocks([s == ReadStatus.HIT for s in told]),
            status=tuple([_READ[s] for s in told]),
            tiers=answer.tiers,
            generations=tuple(
                unpack_u64(answer.generations or bytes(8 * count), "generations", count).tolist()
            ),
            miss_reason=answer.miss_reason,
            corrupt=len(bad),
            verified=is_verified,
            lossy=answer.lossy,
        )
        return result.into_buffers(indexes, call.groups) if call.gathers else result

    def _copied_out(
        self, call: GetCall, acquired: Acquired, is_verified: bool
    ) -> tuple[NDArray[np.intp], list[int], Callable[[list[bool]], Blocks]]:
        """Keys that did not verify, the pieces that were copied, and what makes blocks of them."""
        pieces, segments, copier = acquired.pieces, acquired.segments, self._copier
        if call.gathers:
            indexes, walks = walks_between(pieces, call.gathers, segments, call.ranges)
            found = scatter_all(walks, copier, checked=is_verified)
            privates: Privates = ()
        else:
            privates = privates_of(pieces.sizes, acquired.status == ReadStatus.HIT, call.out)
            indexes, runs = runs_between(pieces, privates, segments)
            found = copier.copy_out(runs) if is_verified else copier.copy_out_unchecked(runs)
        blocks = partial(blocks_made, privates)
        if not is_verified:
            return np.empty(0, dtype=np.intp), indexes, blocks
        wrong = np.array(found, dtype=np.uint64) != acquired.checksums[indexes]
        if not wrong.any():
            return np.empty(0, dtype=np.intp), indexes, blocks
        return np.unique(np.array(indexes, dtype=np.intp)[wrong] // call.groups), indexes, blocks

    def lease(self, call: GetCall, timeout_s: float) -> Leased:
        """Acquire without copying. A piece in several extents is copied: an array has one run of memory."""
        asked_s = self._clock.elapsed_s()
        answer = self._acquire(call, timeout_s)
        try:
            acquired = self._unpacked(call, answer, timeout_s)
            checked = (acquired.must_verify != 0) | call.verify
            hits = acquired.status == ReadStatus.HIT
            if checked.any():
                hits &= ~self._corrupt(acquired, call.groups, checked)
            blocks = blocks_in_place(acquired.pieces, acquired.segments, hits.tolist())
        except BaseException:
            self.session.release_later(answer.lease)
            raise
        is_bad = ~hits & (acquired.status == ReadStatus.HIT)
        told = np.where(is_bad, np.uint8(ReadStatus.MISS), acquired.status)
        status = tuple([_READ[s] for s in told.tolist()])
        sure_s = min(call.request.lease_ttl_ms / 1250 or _SURE_S, _SURE_S)
        return Leased(
            session=self.session,
            lease=answer.lease,
            held_until_s=asked_s + sure_s,
            bytes=int(acquired.pieces.sizes.sum()),
            blocks=blocks,
            status=status,
            miss_reason=answer.miss_reason,
            lossy=answer.lossy,
        )

    def lease_on_gpu(self, call: GetCall, timeout_s: float) -> Leased:
        """The daemon answers when the bytes are there and its GPU has said so, or, asked for layers, when they are on their way."""
        call.request.tier = "hbm"
        answer = self._acquire(call, timeout_s)
        try:
            packed = PackedPieces(answer.extent_counts, answer.extents, answer.sizes)
            pieces = unpack_pieces(packed, call.keys, call.groups)
            status = unpack_u8(answer.status, "status", call.keys).tolist()
            pools = {each: self._pool(each, timeout_s) for each in segments_of(pieces)}
            hits = [each == ReadStatus.HIT for each in status]
            blocks = blocks_on_gpu(pieces, pools, hits)
        except BaseException:
            self.session.release_later(answer.lease)
            raise

        def settle() -> None:
            for pool in pools.values():
                pool.settle()

        return Leased(
            session=self.session,
            lease=answer.lease,
            held_until_s=0.0,  # GPU memory is scarce: its leases never wait for the next message
            bytes=int(pieces.sizes.sum()),
            blocks=blocks,
            status=tuple([_READ[each] for each in status]),
            miss_reason=answer.miss_reason,
            lossy=answer.lossy,
            settle=settle,
            pools=pools if answer.arriving else None,
        )

    def wait_layers(self, leased: Leased, layers: int, stream: int | None, timeout_s: float) -> int:
        if leased.pools is None:
            return layers
        request = pb.WaitLayersRequest(
            session=self.session.token,
            lease=leased.lease,
            layers=layers,
            wait_ms=max(1, milliseconds(timeout_s)),  # 0 would be the daemon's default
            events=stream is not None,
        )
        answer = self.call("WaitLayers", request, pb.WaitLayersResponse, timeout_s + _ANSWER_S)
        if answer.events and stream is not None:
            for event in answer.events:
                pool = leased.pools.get(event.segment)  # None: nothing of it is read here
                if pool is not None:
                    pool.wait_event(event.handle, stream, timeout_s)
        return answer.layers

    def _pool(self, segment: int, timeout_s: float) -> Pool:
        def fetch(number: int) -> pb.GpuPoolResponse:
            request = pb.GpuPoolRequest(segment=number)
            return self.call("GpuPool", request, pb.GpuPoolResponse, timeout_s)

        return self._pools.mapped(segment, self.session.epoch, fetch)

    def release(self, leased: Leased, timeout_s: float) -> bool:
        """Rides on the next Acquire where the lease held for sure and is not much; else the daemon is asked."""
        is_sure = (
            self._clock.elapsed_s() < leased.held_until_s and self.borrowed.connection.is_reusable
        )
        if is_sure and leased.bytes <= _RIDING_BYTES_MAX and self.session.may_ride:
            self.session.release_later(leased.lease)
            return True
        return not self._was_lost(leased.lease, timeout_s)

    def _corrupt(self, acquired: Acquired, groups: int, checked: BoolS) -> BoolS:
        """Keys of which a piece does not verify where it lies."""
        corrupt = np.zeros(len(checked), dtype=np.bool_)
        for i, checksum in enumerate(acquired.checksums.tolist()):
            if checked[i // groups]:
                runs = shared_runs(acquired.pieces, i, acquired.segments)
                corrupt[i // groups] |= bool(runs) and checksum_of(runs) != checksum
        return corrupt

    def _acquire(self, call: GetCall, timeout_s: float) -> pb.AcquireResponse:
        return self._end_acquire(self._begin_acquire(call, timeout_s))

    def _begin_acquire(self, call: GetCall, timeout_s: float) -> Asked:
        call.request.session = self.session.token
        asked = Asked(call, self._clock.elapsed_s(), self.session.take_releases())
        call.request.release = pack_u64(asked.releases)
        try:
            self.borrowed.connection.begin("Acquire", call.request, timeout_s)
        except KvstoredError:
            self._release_again(asked)
            raise
        return asked

    def _end_acquire(self, asked: Asked) -> pb.AcquireResponse:
        try:
            return self.borrowed.connection.end("Acquire", pb.AcquireResponse)
        except KvstoredError:
            self._release_again(asked)
            raise

    def _release_again(self, asked: Asked) -> None:
        """Whether they were released is not known; releasing twice does no harm."""
        for lease in asked.releases:
            self.session.release_later(lease)

    def _unpacked(self, call: GetCall, answer: pb.AcquireResponse, timeout_s: float) -> Acquired:
        packed = PackedPieces(answer.extent_counts, answer.extents, answer.sizes)
        pieces = unpack_pieces(packed, call.keys, call.groups)
        checksums = unpack_table(answer.checksums, "checksums", call.keys, call.groups)
        must_verify = answer.must_verify or bytes(call.keys)
        return Acquired(
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
            return self.borrowed.connection.segment(segment, timeout_s)

        return mapped_segments(self._segments, pieces, self.session.epoch, fetch)
