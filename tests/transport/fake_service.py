"""A store in a few lines behind the real local channel: dictionaries over one real memfd segment and a bump allocator.

Run as a program: `fake_service.py SOCKET EPOCH`. Two methods serve the tests: Report with group=1 flips a byte of each stored key,
JobStatus raises the error whose status number is the job (0: a bug).
"""

import argparse
import asyncio
import os
import re
import signal
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from google.protobuf.message import Message

from kvstored.clock import SystemClock
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.core.types import Extent, Place
from kvstored.errors import Conflict, InvalidArgument, NamespaceMismatch, NotFound
from kvstored.pb import kvstored_pb2 as pb
from kvstored.transport.caller import Caller
from kvstored.transport.local import LocalLimits, LocalServer
from kvstored.wire import packing, status
from kvstored.wire.namespaces import message_of, spec_of

SEGMENT_BYTES = 64 << 20
UNIT = 4096
NOW = SystemClock()


@dataclass
class Block:
    pieces: list[tuple[Place, int] | None]
    checksums: list[int] = field(default_factory=list)
    generation: int = 1


@dataclass
class Fill:
    name: tuple[bytes, bytes]
    session: bytes
    block: Block


class FakeService:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.memory_fd = os.memfd_create("fake-segment")
        os.truncate(self.memory_fd, SEGMENT_BYTES)
        self.next_unit = 1
        self.free: list[Extent] = []
        self.namespaces: dict[bytes, pb.Namespace] = {}
        self.blocks: dict[tuple[bytes, bytes], Block] = {}
        self.sessions: dict[bytes, set[int]] = {}
        self.fills: dict[int, Fill] = {}
        self.leases: dict[int, tuple[bytes, float]] = {}
        self.events: list[pb.Event] = []
        self.last_id = epoch << 32
        self.connections: set[int] = set()

    # ---- the Service protocol

    async def call(self, method: str, request: Message, caller: Caller) -> Message:
        if method == "PollEvents":
            return await self.poll_events(request)
        if method == "OpenSession":
            return self.open_session(request, caller)
        answer = getattr(self, "do" + re.sub("([A-Z])", r"_\1", method).lower())(request)
        assert isinstance(answer, Message)
        return answer

    def projection_fd(self, caller: Caller) -> int:
        raise NotFound("no projection here")

    def answered(self) -> None:
        pass

    def segment_fd(self, segment: int, caller: Caller) -> int:
        return self.memory_fd

    def connected(self, caller: Caller) -> None:
        self.connections.add(caller.connection_id)

    def disconnected(self, caller: Caller, *, has_hung_up: bool) -> None:
        self.connections.remove(caller.connection_id)
        for token, tied in list(self.sessions.items()):
            if caller.connection_id in tied:
                tied.discard(caller.connection_id)
                if not tied:
                    self.end_session(token)

    # ---- sessions

    def open_session(self, request: pb.OpenSessionRequest, caller: Caller) -> Message:
        token, resumed = request.resume_token, True
        if token not in self.sessions:
            token, resumed = os.urandom(16), False
            self.sessions[token] = set()
        self.sessions[token].add(-1 if request.detached else caller.connection_id)
        return pb.OpenSessionResponse(
            token=token,
            epoch=self.epoch,
            resumed=resumed,
            resume_ttl_ms=30_000,
            keys_max=4096,
            daemon_pid=os.getpid(),
        )

    def do_close_session(self, request: pb.CloseSessionRequest) -> Message:
        self.end_session(request.session)
        return pb.CloseSessionResponse()

    def do_keep_alive(self, request: pb.KeepAliveRequest) -> Message:
        self.check(request.session)
        return pb.KeepAliveResponse(epoch=self.epoch, session_expires_unix_ms=1)

    def end_session(self, token: bytes) -> None:
        self.sessions.pop(token, None)
        for id_, fill in list(self.fills.items()):
            if fill.session == token:
                self.drop_fill(id_)
        self.leases = {id_: held for id_, held in self.leases.items() if held[0] != token}

    def check(self, token: bytes) -> None:
        if token not in self.sessions:
            raise NotFound("no such session")

    def drop_fill(self, id_: int) -> None:
        for piece in self.fills.pop(id_).block.pieces:
            self.free += piece[0] if piece else ()

    def do_list_namespaces(self, request: pb.ListNamespacesRequest) -> Message:
        known = self.namespaces.items()
        listed = [pb.NamespaceInfo(digest=digest, namespace=each) for digest, each in known]
        return pb.ListNamespacesResponse(namespaces=listed)

    def do_stat(self, request: pb.StatRequest) -> Message:
        return pb.StatResponse(
            daemon_pid=os.getpid(),
            epoch=self.epoch,
            sessions=len(self.sessions),
            leases=len(self.leases),
            fills=len(self.fills),
            blocks=len(self.blocks),
            counters={"connections": len(self.connections)},
        )

    def do_acquire_stored(self, request: pb.AcquireStoredRequest) -> Message:
        return pb.AcquireStoredResponse()

    def do_report_bulk(self, request: pb.ReportBulkRequest) -> Message:
        return pb.ReportBulkResponse()

    def do_segment(self, request: pb.SegmentRequest) -> Message:
        if request.segment != 0:
            raise NotFound(f"no such segment segment={request.segment}")
        return pb.SegmentResponse(segment=0, bytes=SEGMENT_BYTES, incarnation=self.epoch)

    # ---- namespaces

    def do_open_namespace(self, request: pb.OpenNamespaceRequest) -> Message:
        spec = spec_of(request.namespace, caller_tenant="default")
        message = message_of(spec)
        digest = sha256(message.SerializeToString(deterministic=True)).digest()
        for known in self.namespaces.values():
            if (known.model, known.revision) == (spec.model, spec.revision) and known != message:
                raise NamespaceMismatch("the alias is open with another digest")
        created = digest not in self.namespaces
        self.namespaces[digest] = message
        return pb.OpenNamespaceResponse(digest=digest, namespace=message, created=created)

    def namespace(self, digest: bytes) -> pb.Namespace:
        if digest not in self.namespaces:
            raise NotFound("no such namespace")
        return self.namespaces[digest]

    def names(self, digest: bytes, keys: pb.Keys) -> list[tuple[bytes, bytes]]:
        self.namespace(digest)
        count = packing.check_keys(len(keys.packed), keys.key_bytes)
        cuts = [i * keys.key_bytes for i in range(count + 1)]
        return [(digest, keys.packed[a:b]) for a, b in pairwise(cuts)]

    # ---- put

    def groups(self, digest: bytes, mask: int) -> tuple[int, ...]:
        spec = spec_of(self.namespace(digest), caller_tenant="default")
        return packing.selected_groups(mask, spec)

    def take(self, length: int) -> tuple[Place, int] | None:
        """Odd sizes come in two extents, so that both forms are exercised."""
        units = -(-length // UNIT)
        for i, free in enumerate(self.free):
            if free.units == units:
                return (self.free.pop(i),), length
        if (self.next_unit + units) * UNIT > SEGMENT_BYTES:
            return None
        start, self.next_unit = self.next_unit, self.next_unit + units
        if units % 2 and units > 1:
            return (Extent(0, start + 1, units - 1), Extent(0, start, 1)), length
        return (Extent(0, start, units),), length

    def do_reserve(self, request: pb.ReserveRequest) -> Message:
        self.check(request.session)
        names = self.names(request.namespace, request.keys)
        groups = self.groups(request.namespace, request.groups)
        spec = spec_of(self.namespace(request.namespace), caller_tenant="default")
        full = packing.pack_u64([spec.groups[g].bytes_per_block for g in groups] * len(names))
        sizes = packing.unpack_table(request.sizes or full, "sizes", len(names), len(groups))
        told, fills, pieces = [], [], []
        being_filled = {fill.name for fill in self.fills.values()}
        for name, row in zip(names, sizes.tolist(), strict=True):
            fill, places = 0, [None] * len(groups)
            if name in self.blocks:
                told.append(FillStatus.PRESENT)
            elif name in being_filled:
                told.append(FillStatus.IN_PROGRESS)
            else:
                taken = [self.take(size) if size else None for size in row]
                if any(size and t is None for size, t in zip(row, taken, strict=True)):
                    told.append(FillStatus.NO_SPACE)
                else:
                    told.append(FillStatus.GRANTED)
                    self.last_id += 1
                    fill, places = self.last_id, taken
                    self.fills[fill] = Fill(name, request.session, Block(taken))
            fills.append(fill)
            pieces += places
        packed = packing.pack_pieces(pieces)
        return pb.ReserveResponse(
            status=packing.pack_u8(told),
            fills=packing.pack_u64(fills),
            extent_counts=packed.extent_counts,
            extents=packed.extents,
            sizes=packed.sizes,
        )

    def do_replace_if(self, request: pb.ReplaceIfRequest) -> Message:
        names = self.names(request.reserve.namespace, request.reserve.keys)
        wanted = packing.unpack_u64(request.generations, "generations", len(names)).tolist()
        current = [self.blocks[n].generation if n in self.blocks else 0 for n in names]
        if wanted != current:
            raise Conflict(f"generations differ wanted={wanted} current={current}")
        for name in names:
            self.blocks.pop(name, None)
        return self.do_reserve(request.reserve)

    def do_commit(self, request: pb.CommitRequest) -> Message:
        fills = packing.unpack_u64(request.fills, "fills").tolist()
        told = []
        groups = len(request.checksums) // 8 // max(len(fills), 1)
        checksums = packing.unpack_table(request.checksums, "checksums", len(fills), groups)
        for id_, row in zip(fills, checksums.tolist(), strict=True):
            if id_ not in self.fills or self.fills[id_].session != request.session:
                told.append(FillStatus.LOST)
                continue
            fill = self.fills.pop(id_)
            fill.block.checksums = row
            fill.block.generation = id_
            self.blocks[fill.name] = fill.block
            self.tell(pb.STORED, fill.name)
            told.append(FillStatus.COMMITTED)
        answer = pb.CommitResponse(status=packing.pack_u8(told))
        if request.HasField("next"):
            answer.next.CopyFrom(self.do_reserve(request.next))
        return answer

    def do_abort(self, request: pb.AbortRequest) -> Message:
        for id_ in packing.unpack_u64(request.fills, "fills").tolist():
            if id_ in self.fills:
                self.drop_fill(id_)
        return pb.AbortResponse()

    # ---- get

    def do_match(self, request: pb.MatchRequest) -> Message:
        names = self.names(request.namespace, request.keys)
        hits = next((i for i, name in enumerate(names) if name not in self.blocks), len(names))
        tokens = hits * self.namespace(request.namespace).block_tokens
        return pb.MatchResponse(
            hit_blocks=hits,
            hit_tokens=tokens,
            checkpoint_tokens=tokens,
            tier_blocks=[0, hits, 0, 0],
            miss_reason="" if hits == len(names) else "never-stored",
        )

    def do_locate(self, request: pb.LocateRequest) -> Message:
        found = [self.blocks.get(name) for name in self.names(request.namespace, request.keys)]
        return pb.LocateResponse(
            tiers=packing.pack_u8([2 if block else 0 for block in found]),
            generations=packing.pack_u64([b.generation if b else 0 for b in found]),
        )

    def do_acquire(self, request: pb.AcquireRequest) -> Message:
        self.check(request.session)
        lost = self.end_leases(request.release)
        names = self.names(request.namespace, request.keys)
        groups = self.groups(request.namespace, request.groups)
        told, pieces, checksums, generations = [], [], [], []
        for name in names:
            block = self.blocks.get(name)
            told.append(ReadStatus.HIT if block else ReadStatus.MISS)
            pieces += block.pieces if block else [None] * len(groups)
            checksums += block.checksums if block else [0] * len(groups)
            generations.append(block.generation if block else 0)
        self.last_id += 1
        lease = self.last_id if ReadStatus.HIT in told else 0
        if lease:
            ttl_s = (request.lease_ttl_ms or 30_000) / 1000
            self.leases[lease] = (request.session, NOW.now_s() + ttl_s)
        packed = packing.pack_pieces(pieces)
        return pb.AcquireResponse(
            lease=lease,
            status=packing.pack_u8(told),
            extent_counts=packed.extent_counts,
            extents=packed.extents,
            sizes=packed.sizes,
            checksums=packing.pack_u64(checksums),
            generations=packing.pack_u64(generations),
            must_verify=bytes(len(names)),
            tiers=packing.pack_u8([1 if s == ReadStatus.HIT else 255 for s in told]),
            miss_reason="never-stored" if ReadStatus.MISS in told else "",
            released_lost=lost,
        )

    def end_leases(self, packed: bytes) -> bytes:
        ended = [self.leases.pop(i, None) for i in packing.unpack_u64(packed, "leases").tolist()]
        return bytes(held is None or held[1] < NOW.now_s() for held in ended)

    def do_release(self, request: pb.ReleaseRequest) -> Message:
        return pb.ReleaseResponse(lost=self.end_leases(request.leases))

    def do_renew(self, request: pb.RenewRequest) -> Message:
        lost = []
        for id_ in packing.unpack_u64(request.leases, "leases").tolist():
            held = self.leases.get(id_)
            lost.append(held is None or held[1] < NOW.now_s())
            if not lost[-1]:
                expires = NOW.now_s() + request.lease_ttl_ms / 1000
                self.leases[id_] = (request.session, expires)
        return pb.RenewResponse(lost=bytes(lost))

    # ---- the rest

    def do_pin(self, request: pb.PinRequest) -> Message:
        names = self.names(request.namespace, request.keys)
        return pb.PinResponse(pin=7, blocks=sum(name in self.blocks for name in names), bytes=1)

    def do_unpin(self, request: pb.UnpinRequest) -> Message:
        return pb.UnpinResponse(found=request.pin == 7)

    def do_prefetch(self, request: pb.PrefetchRequest) -> Message:
        return pb.PrefetchResponse(job=3, blocks=0)

    def do_touch(self, request: pb.TouchRequest) -> Message:
        names = self.names(request.namespace, request.keys)
        return pb.TouchResponse(blocks=sum(name in self.blocks for name in names))

    def do_remove(self, request: pb.RemoveRequest) -> Message:
        names = self.names(request.namespace, request.keys)
        return pb.RemoveResponse(blocks=sum(self.forget(name) for name in names))

    def do_clear(self, request: pb.ClearRequest) -> Message:
        names = [name for name in self.blocks if name[0] == request.namespace]
        return pb.ClearResponse(blocks=sum(self.forget(name) for name in names))

    def forget(self, name: tuple[bytes, bytes]) -> bool:
        block = self.blocks.pop(name, None)
        for piece in block.pieces if block else ():
            self.free += piece[0] if piece else ()
        return block is not None

    def do_begin_request(self, request: pb.BeginRequestRequest) -> Message:
        return pb.BeginRequestResponse(request_id=request.request_id or b"made-here")

    def do_extend_request(self, request: pb.ExtendRequestRequest) -> Message:
        return pb.ExtendRequestResponse(blocks=5)

    def do_complete_request(self, request: pb.CompleteRequestRequest) -> Message:
        return pb.CompleteRequestResponse(dropped_blocks=int(request.outcome))

    def do_report(self, request: pb.ReportRequest) -> Message:
        assert request.group == 1
        for name in self.names(request.namespace, request.keys):
            place, _ = next(piece for piece in self.blocks[name].pieces if piece)
            offset = place[0].start * UNIT
            byte = os.pread(self.memory_fd, 1, offset)
            os.pwrite(self.memory_fd, bytes([byte[0] ^ 1]), offset)
        return pb.ReportResponse(blocks=1)

    def do_job_status(self, request: pb.JobStatusRequest) -> Message:
        if request.job == 0:
            raise RuntimeError("a bug")
        raise status.BY_NUMBER[request.job].error(f"as asked job={request.job}")

    def tell(self, kind: "pb.EventKind", name: tuple[bytes, bytes]) -> None:
        sequence = len(self.events) + 1
        event = pb.Event(
            sequence=sequence, epoch=self.epoch, kind=kind, namespace=name[0], key=name[1]
        )
        self.events.append(event)

    async def poll_events(self, request: pb.PollEventsRequest) -> Message:
        if request.wait_ms > 600_000:
            raise InvalidArgument("wait_ms is too long")
        ends = NOW.now_s() + request.wait_ms / 1000
        while len(self.events) <= request.cursor and NOW.now_s() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        fresh = self.events[request.cursor :][: request.events_max or 100]
        return pb.PollEventsResponse(
            events=fresh, epoch=self.epoch, cursor=request.cursor + len(fresh)
        )


async def main(path: Path, epoch: int) -> None:
    server = LocalServer(FakeService(epoch), path, limits=LocalLimits(connections=64, stall_s=1.0))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with asyncio.TaskGroup() as tasks:
        server.start(tasks)
        await ended.wait()
        await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("epoch", type=int)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.path, arguments.epoch))
