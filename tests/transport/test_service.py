"""Every unary method, from message to message, over a real store without sockets."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstored.core import keys as block_keys
from kvstored.core.asides import PATH_WORK
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.core.types import Extent, TierId
from kvstored.errors import (
    Busy,
    Conflict,
    InvalidArgument,
    KvstoredError,
    LeaseLost,
    NamespaceMismatch,
    NoSpace,
    NotFound,
)
from kvstored.pb import kvstored_pb2 as pb
from kvstored.tiers.faulty import Faults
from kvstored.transport.caller import Caller
from kvstored.transport.inspection import Inspection, Surroundings, TierFacts
from kvstored.transport.service import StoreService
from kvstored.wire.methods import METHODS, Method
from kvstored.wire.packing import PackedPieces, pack_u64, unpack_pieces, unpack_u64
from tests.store.world import BLOCK_BYTES, BLOCK_TOKENS, World, content_of, running

KEY_BYTES = 32
CALLER = Caller(connection_id=7, pid=0, uid=os.getuid(), gid=os.getgid(), tenant="default")
STRANGER = Caller(connection_id=8, pid=0, uid=12345, gid=12345, tenant="other")


class Peer:
    """A service and what a caller needs to talk to it: a session and a namespace."""

    def __init__(self, tmp_path: Path, **sizes: int) -> None:
        self.world = World(tmp_path, **sizes)
        self.world.grow()
        around = Surroundings(
            front_pid=lambda: 0,
            keeper_pid=1,
            policy="lru",
            state=lambda: "ready",
            uptime_s=lambda: 3.0,
            tier_facts=lambda tier: TierFacts("on"),
            broken={},
        )
        self.service = StoreService(self.world.store, Inspection(self.world.store, around))
        self.token = b""
        self.digest = b""

    async def call(self, method: str, request: Any, caller: Caller = CALLER) -> Any:
        """Any: the classes are the method table's."""
        try:
            return await self.service.call(method, request, caller)
        finally:
            self.service.answered()

    async def begin(self, namespace: pb.Namespace | None = None) -> None:
        opened = await self.call("OpenSession", pb.OpenSessionRequest(client="test", protocol=1))
        self.token = opened.token
        answer = await self.call(
            "OpenNamespace", pb.OpenNamespaceRequest(namespace=namespace or namespace_of())
        )
        self.digest = answer.digest

    def reserve(self, keys: pb.Keys, **fields: Any) -> pb.ReserveRequest:
        return pb.ReserveRequest(session=self.token, namespace=self.digest, keys=keys, **fields)

    def acquire(self, keys: pb.Keys, **fields: Any) -> pb.AcquireRequest:
        return pb.AcquireRequest(session=self.token, namespace=self.digest, keys=keys, **fields)

    async def put(self, numbers: range, **fields: Any) -> bytes:
        """Reserve, write and commit; the statuses of the commit."""
        reserved = await self.call("Reserve", self.reserve(keys_of(numbers), **fields))
        request = self.filled(reserved, numbers)
        return bytes((await self.call("Commit", request)).status)

    def filled(self, reserved: pb.ReserveResponse, numbers: range) -> pb.CommitRequest:
        packed = PackedPieces(reserved.extent_counts, reserved.extents, reserved.sizes)
        pieces = unpack_pieces(packed, len(numbers), 1)
        fills, sums = [], []
        for i, fill in enumerate(unpack_u64(reserved.fills, "fills").tolist()):
            if not fill:
                continue
            runs = pieces.extents[pieces.first[i] : pieces.first[i + 1]].tolist()
            place = tuple(
                Extent(s, offset // 4096, -(-length // 4096)) for s, offset, length in runs
            )
            content = content_of(numbers[i])
            begin = 0
            for view in self.world.arena.views(place, len(content)):
                view[:] = content[begin : begin + len(view)]
                begin += len(view)
            fills.append(fill)
            sums.append(xxhash.xxh3_64_intdigest(content.tobytes()))
        return pb.CommitRequest(session=self.token, fills=pack_u64(fills), checksums=pack_u64(sums))


def serving(tmp_path: Path, test: Callable[[Peer], Awaitable[None]], **sizes: int) -> None:
    peer = Peer(tmp_path, **sizes)

    async def main() -> None:
        await peer.begin()
        await test(peer)
        await peer.world.check_nothing_leaked()

    running(peer.world, main)


def namespace_of(**fields: Any) -> pb.Namespace:
    given: dict[str, Any] = {
        "model": "model",
        "revision": "1",
        "dtype": "bf16",
        "layout": "nhd",
        "layout_version": 1,
        "block_tokens": BLOCK_TOKENS,
        "groups": [pb.Group(name="kv", kind=pb.LINEAR, bytes_per_block=BLOCK_BYTES)],
    }
    return pb.Namespace(**given | fields)


def keys_of(numbers: range, **fields: Any) -> pb.Keys:
    packed = b"".join(number.to_bytes(KEY_BYTES, "big") for number in numbers)
    return pb.Keys(packed=packed, key_bytes=KEY_BYTES, **fields)


def raises(error: type[KvstoredError], call: Awaitable[Any]) -> Awaitable[None]:
    async def check() -> None:
        with pytest.raises(error):
            await call

    return check()


def test_every_unary_method_of_the_protocol_is_answered(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.world.close()
    assert set(peer.service._answers) == {method.name for method in METHODS}


def test_put_and_get_with_checksums(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        assert await peer.put(range(3)) == bytes([FillStatus.COMMITTED] * 3)
        got = await peer.call("Acquire", peer.acquire(keys_of(range(4))))
        assert got.status == bytes([ReadStatus.HIT] * 3 + [ReadStatus.MISS])
        assert got.tiers == bytes([TierId.DRAM] * 3 + [255])
        assert got.miss_reason == "never-stored"
        sums = [xxhash.xxh3_64_intdigest(content_of(i).tobytes()) for i in range(3)]
        assert unpack_u64(got.checksums, "checksums").tolist() == [*sums, 0]
        assert unpack_u64(got.sizes, "sizes").tolist() == [BLOCK_BYTES] * 3 + [0]
        assert all(unpack_u64(got.generations, "generations")[:3] > 0)
        leases = pack_u64([got.lease, 12345])
        renewed = await peer.call(
            "Renew", pb.RenewRequest(session=peer.token, leases=leases, lease_ttl_ms=1000)
        )
        assert renewed.lost == b"\0\1"
        again = await peer.call("Acquire", peer.acquire(keys_of(range(1)), release=leases))
        assert again.released_lost == b"\0\1"
        released = await peer.call(
            "Release", pb.ReleaseRequest(session=peer.token, leases=pack_u64([again.lease]))
        )
        assert released.lost == b"\0"

    serving(tmp_path, test)


def test_a_second_put_of_the_same_keys_is_present(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(2))
        reserved = await peer.call("Reserve", peer.reserve(keys_of(range(3))))
        expected = [FillStatus.PRESENT, FillStatus.PRESENT, FillStatus.GRANTED]
        assert reserved.status == bytes(expected)
        other = await peer.call("Reserve", peer.reserve(keys_of(range(3))))
        assert other.status[2] == FillStatus.IN_PROGRESS
        fills = pack_u64([unpack_u64(reserved.fills, "fills")[2]])
        await peer.call("Abort", pb.AbortRequest(session=peer.token, fills=fills))
        lost = pb.CommitRequest(session=peer.token, fills=fills, checksums=pack_u64([1]))
        assert (await peer.call("Commit", lost)).status == bytes([FillStatus.LOST])

    serving(tmp_path, test)


def test_the_next_reservation_rides_on_a_commit(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        reserved = await peer.call("Reserve", peer.reserve(keys_of(range(2))))
        commit = peer.filled(reserved, range(2))
        commit.next.CopyFrom(peer.reserve(keys_of(range(2, 4))))
        answer = await peer.call("Commit", commit)
        assert answer.status == bytes([FillStatus.COMMITTED] * 2)
        assert answer.next.status == bytes([FillStatus.GRANTED] * 2)
        commit = peer.filled(answer.next, range(2, 4))
        peer.world.store.puts.is_draining = True
        commit.next.CopyFrom(peer.reserve(keys_of(range(4, 6))))
        answer = await peer.call("Commit", commit)
        assert answer.status == bytes([FillStatus.COMMITTED] * 2)
        assert answer.next.status == bytes([FillStatus.NO_SPACE] * 2)
        await raises(Busy, peer.call("Reserve", peer.reserve(keys_of(range(4, 6)))))

    serving(tmp_path, test)


def test_a_bad_next_reservation_leaves_the_commit_undone(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        reserved = await peer.call("Reserve", peer.reserve(keys_of(range(1))))
        commit = peer.filled(reserved, range(1))
        commit.next.CopyFrom(peer.reserve(keys_of(range(1, 2)), groups=8))
        await raises(InvalidArgument, peer.call("Commit", commit))
        commit.ClearField("next")
        assert (await peer.call("Commit", commit)).status == bytes([FillStatus.COMMITTED])

    serving(tmp_path, test)


def test_a_put_into_places_that_are_not_ones_own_does_nothing(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        request = pb.SetAsideRequest(session=peer.token, namespace=peer.digest, count=3)
        aside = await peer.call("SetAside", request)
        assert len(aside.extents) == 3 * 24
        opened = await peer.call("OpenSession", pb.OpenSessionRequest(client="other", protocol=1))
        mine = [aside.first + i for i in range(3)]

        async def put(places: list[int], token: bytes = peer.token, count: int = 2) -> bool:
            reserve = peer.reserve(keys_of(range(count)))
            reserve.session = token
            sums = pack_u64([1] * count)
            put = pb.PutAsideRequest(reserve=reserve, places=pack_u64(places), checksums=sums)
            return bool((await peer.call("PutAside", put)).stored)

        assert not await put(mine[:2], opened.token), "another session's"
        assert not await put([mine[0], mine[0]]), "one place twice"
        assert not await put([mine[0], mine[2] + 1]), "nobody's"
        await raises(InvalidArgument, put(mine))
        assert peer.world.catalog.counts["asides"] == 3
        assert await put(mine[:2])
        assert not await put(mine[:2]), "they hold blocks now"
        abort = pb.AbortRequest(session=opened.token, fills=pack_u64(mine))
        await peer.call("Abort", abort)
        assert peer.world.catalog.counts["asides"] == 1, "only its own are given back"
        await peer.call("Abort", pb.AbortRequest(session=peer.token, fills=pack_u64(mine)))
        assert peer.world.catalog.counts["asides"] == 0

    serving(tmp_path, test)


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": pb.Keys(packed=b"short", key_bytes=5)},
        {"keys": pb.Keys(packed=bytes(65), key_bytes=65)},
        {"keys": keys_of(range(1), parent=b"too short")},
        {"keys": keys_of(range(1), parent=bytes(KEY_BYTES))},
        {"keys": keys_of(range(1), parents=bytes(KEY_BYTES - 1))},
        {"sizes": pack_u64([BLOCK_BYTES + 1])},
        {"sizes": b"half"},
        {"groups": 2},
        {"shard": 1},
        {"last_valid_tokens": 1 << 20},
        {"request_id": bytes(65)},
        {"hint": pb.Hint(session="x" * 2000)},
        {"content_keys": b"short"},
    ],
    ids=", ".join,
)
def test_a_bad_put_of_one_block_is_refused_as_one_of_many_and_does_nothing(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async def test(peer: Peer) -> None:
        aside = pb.SetAsideRequest(session=peer.token, namespace=peer.digest, count=1)
        first = (await peer.call("SetAside", aside)).first
        reserve = peer.reserve(fields.get("keys", keys_of(range(1))))
        for name, value in fields.items():
            if name == "hint":
                reserve.hint.CopyFrom(value)
            elif name != "keys":
                setattr(reserve, name, value)
        put = pb.PutAsideRequest(reserve=reserve, places=pack_u64([first]), checksums=pack_u64([1]))
        await raises(InvalidArgument, peer.call("PutAside", put))
        await raises(InvalidArgument, peer.call("Reserve", reserve))
        for places, sums in ((b"", pack_u64([1])), (pack_u64([first]), b"cut"), (bytes(16), b"")):
            good = peer.reserve(keys_of(range(1)))
            bad = pb.PutAsideRequest(reserve=good, places=places, checksums=sums)
            await raises(InvalidArgument, peer.call("PutAside", bad))
        assert peer.world.catalog.counts["asides"] == 1
        assert peer.world.catalog.blocks == 0

    serving(tmp_path, test)


@pytest.mark.parametrize("method", [m for m in METHODS if m.is_prompt], ids=lambda m: m.name)
def test_a_prompt_method_never_waits(tmp_path: Path, method: Method) -> None:
    """The channel keeps no deadline for it."""
    token = {"session": "token", "namespace": "digest"}

    async def test(peer: Peer) -> None:
        await peer.put(range(3))
        asked: dict[str, Any] = {
            field: getattr(peer, token[field])
            for field in method.request.DESCRIPTOR.fields_by_name
            if field in token
        }
        if "keys" in method.request.DESCRIPTOR.fields_by_name:
            asked["keys"] = keys_of(range(2))
        if method.name == "PutAside":
            asked["reserve"] = peer.reserve(keys_of(range(1)))
            asked["places"] = asked["checksums"] = pack_u64([1])
        called = peer.service.call(method.name, method.request(**asked), CALLER)
        with pytest.raises(StopIteration):
            called.send(None)

    serving(tmp_path, test)


def test_whatever_looks_at_the_books_finds_those_of_small_puts_made(tmp_path: Path) -> None:
    """Their books are made together, a moment after their answers."""

    async def put_aside(peer: Peer, first: int, blocks: range) -> bool:
        keys = keys_of(blocks)
        if blocks.start:
            keys.parent = (blocks.start - 1).to_bytes(32, "big")
        places = pack_u64([first + i for i in blocks])
        sums = pack_u64([xxhash.xxh3_64_intdigest(content_of(i).tobytes()) for i in blocks])
        request = pb.PutAsideRequest(reserve=peer.reserve(keys), places=places, checksums=sums)
        stored = (await peer.call("PutAside", request)).stored
        peer.service.answered()
        return bool(stored)

    async def test(peer: Peer) -> None:
        catalog = peer.world.store.shell.behind
        request = pb.SetAsideRequest(session=peer.token, namespace=peer.digest, count=9)
        first = (await peer.call("SetAside", request)).first
        for i in range(4):
            assert await put_aside(peer, first, range(i, i + 1))
        assert not await put_aside(peer, first, range(3, 4)), "it is known"
        assert await put_aside(peer, first, range(6, 8)), "its parent is not known"
        assert not await put_aside(peer, first, range(5, 6)), "it stands in"
        assert catalog.asides.planned_work == 7 + 5 * PATH_WORK, (
            "five puts, and a parent that stands in"
        )
        assert catalog.blocks == 0
        match = await peer.call(
            "Match", pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(9)))
        )
        assert (match.hit_blocks, catalog.asides.planned_work, catalog.blocks) == (4, 0, 7)
        catalog.check()
        events = (await peer.call("PollEvents", pb.PollEventsRequest())).events
        told = [
            (int.from_bytes(e.key, "big"), e.depth_blocks) for e in events if e.kind == pb.STORED
        ]
        assert told == [(0, 0), (1, 1), (2, 2), (3, 3), (6, 1), (7, 2)]
        assert await put_aside(peer, first, range(8, 9))
        ends_s = asyncio.get_running_loop().time() + 5
        while catalog.asides.planned_work and asyncio.get_running_loop().time() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert catalog.asides.planned_work == 0, "nobody looked, and they were made all the same"
        assert catalog.blocks == 8

    serving(tmp_path, test, arena_blocks=256)


@pytest.mark.parametrize(("count", "own"), [(1, 0), (2, 0), (5, 0), (5, 4), (40, 20)])
def test_a_path_below_one_of_its_own_blocks_changes_nothing_of_the_tree(
    tmp_path: Path, count: int, own: int
) -> None:
    async def test(peer: Peer) -> None:
        keys = keys_of(range(count))
        keys.parent = own.to_bytes(32, "big")
        if own == 0:
            await raises(InvalidArgument, peer.call("Reserve", peer.reserve(keys)))
        else:
            await peer.call("Reserve", peer.reserve(keys))
        peer.world.catalog.check()
        assert await peer.put(range(50, 52)) == bytes([FillStatus.COMMITTED] * 2)

    serving(tmp_path, test, arena_blocks=64)


def test_what_comes_after_a_commit_finds_its_blocks(tmp_path: Path) -> None:
    """Their books are made once the answer is on its way: no call may come in between."""

    async def test(peer: Peer) -> None:
        reserved = await peer.call("Reserve", peer.reserve(keys_of(range(8))))
        commit = peer.filled(reserved, range(8))
        commit.next.CopyFrom(peer.reserve(keys_of(range(12))))
        answer = await peer.call("Commit", commit)
        present, granted = [FillStatus.PRESENT] * 8, [FillStatus.GRANTED] * 4
        assert answer.next.status == bytes(present + granted)
        match = pb.MatchRequest(session=peer.token, namespace=peer.digest, keys=keys_of(range(12)))
        assert (await peer.call("Match", match)).hit_blocks == 8
        await peer.call("Abort", pb.AbortRequest(session=peer.token, fills=answer.next.fills))

    serving(tmp_path, test)


def test_bad_input_is_a_typed_error_and_changes_nothing(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        keys = keys_of(range(2))
        bad = [
            peer.reserve(pb.Keys(packed=b"x" * 33, key_bytes=32)),
            peer.reserve(pb.Keys(packed=b"x" * 7, key_bytes=7)),
            peer.reserve(keys_of(range(10_000))),
            peer.reserve(keys, sizes=pack_u64([BLOCK_BYTES, BLOCK_BYTES + 1])),
            peer.reserve(keys, sizes=pack_u64([BLOCK_BYTES])),
            peer.reserve(keys, groups=2),
            peer.reserve(keys, shard=1),
            peer.reserve(keys, last_valid_tokens=BLOCK_TOKENS + 1),
            peer.reserve(keys, request_id=b"x" * 65),
            peer.reserve(keys_of(range(2), parent=b"short")),
            peer.reserve(keys_of(range(2), parents=b"x" * 32)),
        ]
        for request in bad:
            await raises(InvalidArgument, peer.call("Reserve", request))
        unknown = pb.ReserveRequest(session=peer.token, namespace=b"n" * 32, keys=keys)
        await raises(NotFound, peer.call("Reserve", unknown))
        await raises(NotFound, peer.call("Reserve", pb.ReserveRequest(session=b"s" * 16)))
        await raises(InvalidArgument, peer.call("Reserve", pb.ReserveRequest(session=b"s")))
        await raises(InvalidArgument, peer.call("NoSuchMethod", pb.StatRequest()))
        await raises(
            InvalidArgument,
            peer.call("Release", pb.ReleaseRequest(session=peer.token, leases=b"12345")),
        )
        assert peer.world.catalog.counts["fills"] == 0

    serving(tmp_path, test)


def test_checksums_have_one_column_a_group(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        reserved = await peer.call("Reserve", peer.reserve(keys_of(range(2))))
        commit = peer.filled(reserved, range(2))
        commit.checksums = pack_u64([1, 2, 3])
        await raises(InvalidArgument, peer.call("Commit", commit))
        commit.checksums = pack_u64([1, 2, 3, 4])
        await raises(InvalidArgument, peer.call("Commit", commit))

    serving(tmp_path, test)


def test_sessions_are_resumed_by_token_and_end(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        again = await peer.call(
            "OpenSession", pb.OpenSessionRequest(resume_token=peer.token, protocol=1)
        )
        assert (again.resumed, again.token) == (True, peer.token)
        fresh = await peer.call("OpenSession", pb.OpenSessionRequest(resume_token=b"x" * 16))
        assert not fresh.resumed
        alive = await peer.call("KeepAlive", pb.KeepAliveRequest(session=fresh.token))
        assert alive.epoch == again.epoch == 1
        await peer.call("CloseSession", pb.CloseSessionRequest(session=fresh.token))
        await raises(NotFound, peer.call("KeepAlive", pb.KeepAliveRequest(session=fresh.token)))
        await raises(
            NotFound, peer.call("KeepAlive", pb.KeepAliveRequest(session=peer.token), STRANGER)
        )
        await raises(InvalidArgument, peer.call("OpenSession", pb.OpenSessionRequest(protocol=99)))

    serving(tmp_path, test)


def test_a_disconnected_session_loses_what_it_held_after_its_time(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(1))
        await peer.call("Acquire", peer.acquire(keys_of(range(1))))
        await peer.call("Reserve", peer.reserve(keys_of(range(5, 6))))
        peer.service.disconnected(CALLER, has_hung_up=False)
        peer.world.clock.advance(9.0)
        await peer.world.janitor.expire_once()
        assert peer.world.catalog.counts["leases"] == 1
        peer.world.clock.advance(2.0)
        await peer.world.janitor.expire_once()
        counts = peer.world.catalog.counts
        assert (counts["leases"], counts["fills"], counts["sessions"]) == (0, 0, 0)

    serving(tmp_path, test)


def test_a_detached_session_outlives_its_connection(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        opened = await peer.call("OpenSession", pb.OpenSessionRequest(detached=True))
        peer.service.disconnected(CALLER, has_hung_up=False)
        for _ in range(3):
            peer.world.clock.advance(8.0)
            await peer.world.janitor.expire_once()
            await peer.call("KeepAlive", pb.KeepAliveRequest(session=opened.token))

    serving(tmp_path, test)


def test_namespaces_open_list_retire_and_go(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        again = await peer.call("OpenNamespace", pb.OpenNamespaceRequest(namespace=namespace_of()))
        assert (again.created, again.digest) == (False, peer.digest)
        other = pb.OpenNamespaceRequest(namespace=namespace_of(dtype="fp8"))
        await raises(NamespaceMismatch, peer.call("OpenNamespace", other))
        foreign = pb.OpenNamespaceRequest(namespace=namespace_of(tenant="other"))
        await raises(InvalidArgument, peer.call("OpenNamespace", foreign))
        await peer.put(range(4))
        listed = await peer.call("ListNamespaces", pb.ListNamespacesRequest())
        (one,) = listed.namespaces
        assert (one.alias, one.blocks, one.retired) == ("model@1", 4, False)
        assert one.tier_bytes[TierId.DRAM] == 4 * 2 * 4096
        retire = pb.RetireNamespaceRequest(namespace=peer.digest)
        await raises(NotFound, peer.call("RetireNamespace", retire, STRANGER))
        await peer.call("RetireNamespace", retire)
        assert (await peer.call("ListNamespaces", pb.ListNamespacesRequest())).namespaces[0].retired
        removed = await peer.call(
            "RemoveNamespace", pb.RemoveNamespaceRequest(namespace=peer.digest)
        )
        assert removed.blocks == 4
        match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(4)))
        await raises(NotFound, peer.call("Match", match))
        await peer.begin()
        assert await peer.put(range(2)) == bytes([FillStatus.COMMITTED] * 2)

    serving(tmp_path, test)


def test_a_group_that_no_tier_could_hold_is_refused(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        group = pb.Group(name="kv", kind=pb.LINEAR, bytes_per_block=1 << 40)
        request = pb.OpenNamespaceRequest(namespace=namespace_of(model="x", groups=[group]))
        await raises(InvalidArgument, peer.call("OpenNamespace", request))

    serving(tmp_path, test)


def test_match_and_locate(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(3))
        found = await peer.call(
            "Match", pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(5)))
        )
        assert (found.hit_blocks, found.hit_tokens) == (3, 3 * BLOCK_TOKENS)
        assert list(found.tier_blocks) == [0, 3, 0, 0]
        assert found.miss_reason == "never-stored"
        located = await peer.call(
            "Locate", pb.LocateRequest(namespace=peer.digest, keys=keys_of(range(2, 4)))
        )
        assert located.tiers == bytes([0x80 | 1 << TierId.DRAM, 0])
        assert unpack_u64(located.generations, "generations")[1] == 0

    serving(tmp_path, test)


def test_extra_keys_make_other_blocks(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        salted = keys_of(range(2), extra_keys=[b"lora-7"])
        reserved = await peer.call("Reserve", peer.reserve(salted))
        await peer.call("Commit", peer.filled(reserved, range(2)))
        plain = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(2)))
        assert (await peer.call("Match", plain)).hit_blocks == 0
        same = pb.MatchRequest(namespace=peer.digest, keys=salted)
        assert (await peer.call("Match", same)).hit_blocks == 2
        root = block_keys.root(peer.digest, [b"lora-7"])
        mixed = b"".join(block_keys.mix(root, n.to_bytes(32, "big")) for n in range(2))
        by_hand = pb.MatchRequest(namespace=peer.digest, keys=pb.Keys(packed=mixed, key_bytes=32))
        assert (await peer.call("Match", by_hand)).hit_blocks == 2

    serving(tmp_path, test)


@pytest.mark.parametrize(
    ("fields", "depths"),
    [
        ({}, [0, 1, 2]),
        ({"unchained": True}, [0, 0, 0]),
        ({"parents": bytes(32) + (10).to_bytes(32, "big") + bytes(32)}, [0, 1, 0]),
    ],
)
def test_parents_are_the_keys_before_unless_said_otherwise(
    tmp_path: Path, fields: dict[str, Any], depths: list[int]
) -> None:
    async def test(peer: Peer) -> None:
        reserved = await peer.call("Reserve", peer.reserve(keys_of(range(10, 13), **fields)))
        await peer.call("Commit", peer.filled(reserved, range(10, 13)))
        tree = await peer.call("Tree", pb.TreeRequest(namespace=peer.digest))
        found = [n.depth_blocks + i for n in tree.nodes for i in range(n.blocks)]
        assert sorted(found) == sorted(depths)

    serving(tmp_path, test)


def test_a_parent_given_by_key_links_across_calls(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(2))
        more = keys_of(range(2, 4), parent=(1).to_bytes(32, "big"))
        reserved = await peer.call("Reserve", peer.reserve(more))
        await peer.call("Commit", peer.filled(reserved, range(2, 4)))
        tree = await peer.call("Tree", pb.TreeRequest(namespace=peer.digest))
        assert [(n.depth_blocks, n.blocks, n.parent) for n in tree.nodes] == [(0, 4, 0)]

    serving(tmp_path, test)


def test_replace_if_compares_generations(tmp_path: Path) -> None:
    peer = Peer(tmp_path)

    async def main() -> None:
        await peer.begin(namespace_of(mutable=True))
        await peer.put(range(1))
        located = await peer.call(
            "Locate", pb.LocateRequest(namespace=peer.digest, keys=keys_of(range(1)))
        )
        wrong = pb.ReplaceIfRequest(
            reserve=peer.reserve(keys_of(range(1))), generations=pack_u64([1])
        )
        await raises(Conflict, peer.call("ReplaceIf", wrong))
        right = pb.ReplaceIfRequest(
            reserve=peer.reserve(keys_of(range(1))), generations=located.generations
        )
        granted = await peer.call("ReplaceIf", right)
        assert granted.status == bytes([FillStatus.GRANTED])
        await peer.call("Commit", peer.filled(granted, range(1)))
        await raises(Conflict, peer.call("ReplaceIf", right))
        await peer.world.check_nothing_leaked()

    running(peer.world, main)


def test_replace_if_needs_a_mutable_namespace(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        request = pb.ReplaceIfRequest(
            reserve=peer.reserve(keys_of(range(1))), generations=pack_u64([0])
        )
        await raises(InvalidArgument, peer.call("ReplaceIf", request))

    serving(tmp_path, test)


def test_pins_keep_and_have_bounds(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(4))

        def pin(numbers: range, ttl_s: int = 60) -> pb.PinRequest:
            return pb.PinRequest(
                session=peer.token,
                namespace=peer.digest,
                keys=keys_of(numbers),
                strength=pb.HARD,
                ttl_s=ttl_s,
            )

        pinned = await peer.call("Pin", pin(range(4)))
        assert (pinned.blocks, pinned.bytes) == (4, 4 * 8192)
        await raises(InvalidArgument, peer.call("Pin", pin(range(4), ttl_s=0)))
        assert (await peer.call("Unpin", pb.UnpinRequest(pin=pinned.pin))).found
        assert not (await peer.call("Unpin", pb.UnpinRequest(pin=pinned.pin))).found
        await peer.put(range(4, 44))
        await raises(NoSpace, peer.call("Pin", pin(range(44))))

    serving(tmp_path, test)


def test_a_tenant_sees_and_ends_its_own_holds_only(tmp_path: Path) -> None:
    """Pins, leases and tree nodes were looked up by number or listed whole, whoever asked."""

    async def test(peer: Peer) -> None:
        await peer.put(range(4))
        got = await peer.call("Acquire", peer.acquire(keys_of(range(4))))
        request = pb.PinRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(2)), ttl_s=60
        )
        unpin = pb.UnpinRequest(pin=(await peer.call("Pin", request)).pin)
        theirs = await peer.call("Leases", pb.LeasesRequest(), STRANGER)
        assert (len(theirs.leases), theirs.cut) == (0, False)
        assert len((await peer.call("Leases", pb.LeasesRequest())).leases) == 2
        assert not (await peer.call("Tree", pb.TreeRequest(nodes_max=1), STRANGER)).nodes
        assert len((await peer.call("Tree", pb.TreeRequest())).nodes) == 1
        assert not (await peer.call("Unpin", unpin, STRANGER)).found
        assert (await peer.call("Unpin", unpin)).found
        await peer.call(
            "Release", pb.ReleaseRequest(session=peer.token, leases=pack_u64([got.lease]))
        )

    serving(tmp_path, test)


def test_prefetch_is_a_job(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        for i in range(8):
            await peer.put(range(i, i + 1))
            await peer.world.janitor.write_back_once()
            await peer.world.settle()
        request = pb.PrefetchRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(2)), tier="dram"
        )
        job = await peer.call("Prefetch", request)
        assert job.blocks == 2
        await peer.world.settle()
        status = await peer.call("JobStatus", pb.JobStatusRequest(job=job.job))
        assert (status.state, status.blocks_done) == (pb.DONE, 2)
        cancelled = await peer.call("CancelJob", pb.CancelJobRequest(job=job.job))
        assert cancelled.state == pb.DONE
        await raises(NotFound, peer.call("JobStatus", pb.JobStatusRequest(job=99)))
        request.tier = "hbm"
        await raises(InvalidArgument, peer.call("Prefetch", request))

    serving(tmp_path, test, arena_blocks=4, disk_blocks=64)


def test_the_life_of_a_request(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(2))
        begun = await peer.call(
            "BeginRequest",
            pb.BeginRequestRequest(
                session=peer.token, namespace=peer.digest, keys=keys_of(range(4))
            ),
        )
        assert begun.match.hit_blocks == 2
        more = keys_of(range(2, 4), parent=(1).to_bytes(32, "big"))
        reserved = await peer.call("Reserve", peer.reserve(more, request_id=begun.request_id))
        await peer.call("Commit", peer.filled(reserved, range(2, 4)))
        extended = await peer.call(
            "ExtendRequest",
            pb.ExtendRequestRequest(
                session=peer.token, request_id=begun.request_id, keys=keys_of(range(2, 4))
            ),
        )
        assert extended.blocks == 0, "the put on its behalf was told already"
        complete = pb.CompleteRequestRequest(session=peer.token, request_id=begun.request_id)
        complete.outcome = 7
        await raises(InvalidArgument, peer.call("CompleteRequest", complete))
        complete.outcome = pb.DISCARD
        assert (await peer.call("CompleteRequest", complete)).dropped_blocks == 2
        await raises(NotFound, peer.call("CompleteRequest", complete))
        match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(4)))
        assert (await peer.call("Match", match)).hit_blocks == 2

    serving(tmp_path, test)


def test_remove_clear_touch_and_report(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(6))
        touch = pb.TouchRequest(session=peer.token, namespace=peer.digest, keys=keys_of(range(8)))
        assert (await peer.call("Touch", touch)).blocks == 6
        report = pb.ReportRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(2)), scores=[0.0, 0.7]
        )
        assert (await peer.call("Report", report)).blocks == 1
        report.scores.append(1.0)
        await raises(InvalidArgument, peer.call("Report", report))
        remove = pb.RemoveRequest(namespace=peer.digest, keys=keys_of(range(5, 9)))
        assert (await peer.call("Remove", remove)).blocks == 1
        assert (await peer.call("Clear", pb.ClearRequest())).blocks == 5
        assert (await peer.call("Clear", pb.ClearRequest(namespace=peer.digest))).blocks == 0

    serving(tmp_path, test)


def test_hints_reach_the_policy_from_every_call_that_takes_one(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        said = {name: pb.Hint(category=name) for name in ("reserve", "touch", "begin", "complete")}
        ids = {"session": peer.token, "request_id": b"r"}
        path = {"session": peer.token, "namespace": peer.digest, "keys": keys_of(range(4))}

        def learned() -> list[str]:
            dumped = peer.world.catalog.books.policy.dump(0.0)
            return [name for name in said if f'"{name}"'.encode() in dumped]

        await peer.put(range(4), hint=said["reserve"])
        assert learned() == ["reserve"]
        await peer.call("Touch", pb.TouchRequest(**path, hint=said["touch"]))
        assert learned() == ["reserve", "touch"]
        begin = pb.BeginRequestRequest(**path, request_id=b"r", hint=said["begin"])
        await peer.call("BeginRequest", begin)
        assert learned() == ["reserve", "touch", "begin"]
        await peer.call("CompleteRequest", pb.CompleteRequestRequest(**ids, hint=said["complete"]))
        assert learned() == ["reserve", "touch", "begin", "complete"]

    serving(tmp_path, test)


def test_retention_is_a_soft_pin_within_the_share_of_pins(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        path = {"session": peer.token, "namespace": peer.digest, "keys": keys_of(range(2))}
        await peer.put(range(2))
        await peer.call("Touch", pb.TouchRequest(**path, hint=pb.Hint(retention_s=60)))
        assert peer.world.catalog.counts["pins"] == 1
        peer.world.clock.advance(61.0)
        await peer.world.janitor.expire_once()
        assert peer.world.catalog.counts["pins"] == 0
        all_of_it = keys_of(range(60))
        await peer.put(range(60))
        much = pb.TouchRequest(
            session=peer.token,
            namespace=peer.digest,
            keys=all_of_it,
            hint=pb.Hint(retention_s=60),
        )
        assert (await peer.call("Touch", much)).blocks > 30
        assert peer.world.catalog.counts["pins"] == 0  # more than half of memory

    serving(tmp_path, test, arena_blocks=64)


def test_hints_out_of_range_are_refused(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(2))
        for bad in (pb.Hint(priority=4), pb.Hint(session="s" * 129), pb.Hint(category="c" * 129)):
            request = pb.TouchRequest(
                session=peer.token, namespace=peer.digest, keys=keys_of(range(2)), hint=bad
            )
            await raises(InvalidArgument, peer.call("Touch", request))

    serving(tmp_path, test)


def test_stat_tree_leases_and_explain(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(3))
        got = await peer.call("Acquire", peer.acquire(keys_of(range(3))))
        stat = await peer.call("Stat", pb.StatRequest())
        assert (stat.state, stat.keeper_pid, stat.leases, stat.sessions) == ("ready", 1, 1, 1)
        dram = next(tier for tier in stat.tiers if tier.name == "dram")
        assert (dram.copies, dram.used_bytes, dram.leased_bytes) == (3, 3 * 8192, 3 * 8192)
        assert stat.counters["put_blocks"] == 3
        leases = await peer.call("Leases", pb.LeasesRequest())
        (lease,) = leases.leases
        assert (lease.kind, lease.id, lease.client) == ("lease", got.lease, "test")
        tree = await peer.call("Tree", pb.TreeRequest(namespace=peer.digest, nodes_max=10))
        (node,) = tree.nodes
        assert (node.blocks, node.tokens, node.namespace) == (3, 3 * BLOCK_TOKENS, peer.digest)
        await peer.call("Remove", pb.RemoveRequest(namespace=peer.digest, keys=keys_of(range(1))))
        explained = await peer.call(
            "Explain", pb.ExplainRequest(namespace=peer.digest, keys=keys_of(range(4)))
        )
        verdicts = [each.verdict for each in explained.keys]
        assert verdicts == ["removed", "stored", "stored", "never-stored"]
        assert list(explained.keys[1].tiers) == ["dram"]

    serving(tmp_path, test)


def test_a_key_of_another_namespace_is_explained_by_that_namespace(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        right = peer.digest
        salted = keys_of(range(1), extra_keys=[b"salt"])
        reserved = await peer.call("Reserve", peer.reserve(salted))
        await peer.call("Commit", peer.filled(reserved, range(1)))
        await peer.put(range(2))
        await peer.begin(namespace_of(revision="2"))
        assert peer.digest != right
        for keys in (keys_of(range(1)), salted):
            request = pb.ExplainRequest(namespace=peer.digest, keys=keys)
            (explained,) = (await peer.call("Explain", request)).keys
            assert (explained.verdict, list(explained.tiers)) == ("wrong-namespace", [])
            assert f"model@1 (digest {right.hex()[:12]})" in explained.text
        missing = pb.ExplainRequest(namespace=peer.digest, keys=keys_of(range(7, 8)))
        (explained,) = (await peer.call("Explain", missing)).keys
        assert explained.verdict == "never-stored"

    serving(tmp_path, test)


def test_verify_pages_through_all_tiers(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(5))
        await peer.world.janitor.write_back_once()
        await peer.world.settle()
        cursor, blocks, rounds = 0, 0, 0
        while True:
            answer = await peer.call(
                "Verify", pb.VerifyRequest(namespace=peer.digest, cursor=cursor, blocks_max=2)
            )
            cursor, blocks, rounds = answer.cursor, blocks + answer.blocks, rounds + 1
            assert answer.corrupt == 0
            if answer.done:
                break
        assert (blocks, answer.blocks_total) == (10, 5)

    serving(tmp_path, test)


def test_events_are_polled_by_cursor(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(2))
        first = await peer.call("PollEvents", pb.PollEventsRequest())
        kinds = [event.kind for event in first.events]
        assert kinds == [pb.NAMESPACE_OPENED, pb.STORED, pb.STORED]
        assert first.events[1].key == (0).to_bytes(32, "big")
        assert (first.events[2].depth_blocks, first.events[2].tier) == (1, "dram")
        poll = pb.PollEventsRequest(epoch=first.epoch, cursor=first.cursor, wait_ms=10_000)
        waiting = asyncio.ensure_future(peer.call("PollEvents", poll))
        await asyncio.sleep(0)
        await peer.call(
            "Remove", pb.RemoveRequest(namespace=peer.digest, keys=keys_of(range(1, 2)))
        )
        removed = await waiting
        assert [event.kind for event in removed.events] == [pb.REMOVED]
        assert removed.events[0].key == (1).to_bytes(32, "big")

    serving(tmp_path, test)


def test_who_waits_for_a_pending_load_hears_that_it_failed(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        for i in range(8):
            await peer.put(range(i, i + 1))
            await peer.world.janitor.write_back_once()
            await peer.world.settle()
        cursor = (await peer.call("PollEvents", pb.PollEventsRequest())).cursor
        poll = pb.PollEventsRequest(epoch=1, cursor=cursor, wait_ms=10_000)
        waiting = asyncio.ensure_future(peer.call("PollEvents", poll))
        peer.world.disk.faults = Faults(read_error=1.0)
        got = await peer.call("Acquire", peer.acquire(keys_of(range(1)), no_wait=True))
        assert got.status == bytes([ReadStatus.PENDING])
        await waiting
        await peer.world.settle()
        events = (await peer.call("PollEvents", poll)).events
        failed = [event.key for event in events if event.kind == pb.LOAD_FAILED]
        assert failed == [(0).to_bytes(32, "big")]

    serving(tmp_path, test, arena_blocks=4, disk_blocks=64)


def test_segments_are_described_and_lent(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        answer = await peer.call("Segment", pb.SegmentRequest(segment=0))
        assert answer.bytes == os.fstat(peer.service.segment_fd(0, CALLER)).st_size
        await raises(NotFound, peer.call("Segment", pb.SegmentRequest(segment=9)))

    serving(tmp_path, test)


def test_a_call_that_is_cancelled_while_it_loads_holds_nothing(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        for i in range(8):
            await peer.put(range(i, i + 1))
            await peer.world.janitor.write_back_once()
            await peer.world.settle()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await peer.call("Acquire", peer.acquire(keys_of(range(1))))
        assert peer.world.catalog.counts["leases"] == 0

    serving(tmp_path, test, arena_blocks=4, disk_blocks=64)


def test_a_lease_that_runs_out_during_its_load_is_lost(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        for i in range(8):
            await peer.put(range(i, i + 1))
            await peer.world.janitor.write_back_once()
            await peer.world.settle()
        call = asyncio.ensure_future(
            peer.call("Acquire", peer.acquire(keys_of(range(1)), lease_ttl_ms=100))
        )
        await asyncio.sleep(0)
        peer.world.clock.advance(1.0)
        await peer.world.janitor.expire_once()
        await raises(LeaseLost, call)

    serving(tmp_path, test, arena_blocks=4, disk_blocks=64)


def test_numpy_arrays_of_the_answers_line_up(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(3))
        got = await peer.call("Acquire", peer.acquire(keys_of(range(3))))
        packed = PackedPieces(got.extent_counts, got.extents, got.sizes)
        pieces = unpack_pieces(packed, 3, 1)
        for i in range(3):
            runs = pieces.extents[pieces.first[i] : pieces.first[i + 1]].tolist()
            read = np.concatenate(
                [
                    self_view[:length]
                    for segment, offset, length in runs
                    for self_view in peer.world.arena.views(
                        (Extent(segment, offset // 4096, -(-length // 4096)),), length
                    )
                ]
            )
            np.testing.assert_array_equal(read, content_of(i))

    serving(tmp_path, test)


def test_a_sharded_block_is_there_when_all_its_shards_are(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        groups = [
            pb.Group(name="kv", kind=pb.LINEAR, bytes_per_block=BLOCK_BYTES, sharded=True),
            pb.Group(name="latent", kind=pb.LINEAR, bytes_per_block=4096),
        ]
        await peer.begin(namespace_of(model="tp2", tp=2, groups=groups))
        match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(1)))
        first = await peer.call("Reserve", peer.reserve(keys_of(range(1)), shard=0))
        assert list(first.extent_counts) == [1, 1], "rank 0 writes both groups"
        second = await peer.call("Reserve", peer.reserve(keys_of(range(1)), shard=1))
        assert list(second.extent_counts) == [1, 0], "the replicated group is written once"
        sums = pack_u64([1, 2])
        commit = pb.CommitRequest(session=peer.token, fills=first.fills, checksums=sums)
        await peer.call("Commit", commit)
        assert (await peer.call("Match", match)).hit_blocks == 0
        commit = pb.CommitRequest(session=peer.token, fills=second.fills, checksums=sums)
        await peer.call("Commit", commit)
        assert (await peer.call("Match", match)).hit_blocks == 1
        got = [await peer.call("Acquire", peer.acquire(keys_of(range(1)), shard=s)) for s in (0, 1)]
        places = [np.frombuffer(each.extents, dtype="<u8").reshape(-1, 3) for each in got]
        assert places[0][0].tolist() != places[1][0].tolist(), "each rank has bytes of its own"
        assert places[0][1].tolist() == places[1][1].tolist(), "the replicated group is shared"

    serving(tmp_path, test)


def test_a_hybrid_hit_says_from_where_to_replay(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        groups = [
            pb.Group(name="kv", kind=pb.LINEAR, bytes_per_block=BLOCK_BYTES),
            pb.Group(name="state", kind=pb.STATE, bytes_per_block=4096),
        ]
        await peer.begin(namespace_of(model="hybrid", groups=groups, checkpoint_policy=pb.FULL))
        sizes = pack_u64([BLOCK_BYTES, 0, BLOCK_BYTES, 4096, BLOCK_BYTES, 0])
        reserved = await peer.call(
            "Reserve", peer.reserve(keys_of(range(3)), groups=3, sizes=sizes)
        )
        assert list(reserved.extent_counts) == [1, 0, 1, 1, 1, 0]
        commit = pb.CommitRequest(
            session=peer.token, fills=reserved.fills, checksums=pack_u64([1, 0, 2, 3, 4, 0])
        )
        await peer.call("Commit", commit)
        found = await peer.call(
            "Match", pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(3)))
        )
        tokens = (found.hit_tokens, found.checkpoint_tokens, found.replay_tokens)
        assert tokens == (3 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, BLOCK_TOKENS)
        got = await peer.call("Acquire", peer.acquire(keys_of(range(3)), groups=3))
        assert got.status == bytes([ReadStatus.HIT] * 3)
        assert list(got.extent_counts) == [1, 0, 1, 1, 1, 0]

    serving(tmp_path, test)


def test_a_partial_last_block_is_put_and_hit(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        reserved = await peer.call("Reserve", peer.reserve(keys_of(range(2)), last_valid_tokens=4))
        part_bytes = BLOCK_BYTES * 4 // BLOCK_TOKENS
        assert unpack_u64(reserved.sizes, "sizes").tolist() == [BLOCK_BYTES, part_bytes]
        commit = pb.CommitRequest(
            session=peer.token, fills=reserved.fills, checksums=pack_u64([1, 2])
        )
        await peer.call("Commit", commit)
        found = await peer.call(
            "Match",
            pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(2)), last_valid_tokens=4),
        )
        assert (found.hit_blocks, found.hit_tokens) == (2, BLOCK_TOKENS + 4)
        too_many = pb.MatchRequest(
            namespace=peer.digest, keys=keys_of(range(2)), last_valid_tokens=BLOCK_TOKENS + 1
        )
        await raises(InvalidArgument, peer.call("Match", too_many))

    serving(tmp_path, test)
