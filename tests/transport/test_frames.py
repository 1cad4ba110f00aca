"""Blocks of real KV between a client and a daemon as frames: over the bulk channel and gRPC, in both directions, and every way not to."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from kvstored.client import Client, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec
from kvstored.client import frames as client_frames
from kvstored.client.framing import Framing
from kvstored.codec import blocks
from kvstored.codec.elements import Element
from kvstored.codec.link import AGAIN, Gain, Link, is_faster
from kvstored.codec.plan import Method, Plan, Step
from kvstored.errors import Corrupt
from kvstored.pb import kvstored_pb2 as pb
from kvstored.pb import kvstored_pb2_grpc as stubs
from kvstored.wire.bulk import FRAMED, FRAMES_VERSION, PIECE_HEAD
from kvstored.wire.packing import pack_u64, unpack_u64
from tests.codec import real
from tests.crash.served import wait_until

from .bulk_peer import ACQUIRE, RESERVE, Peer, eventually, peer
from .fake_daemon import FakeDaemon
from .test_front import Front, start_front, stop_front

BLOCK_BYTES = 4 * 65536
BLOCKS = 4
SPEC = NamespaceSpec(
    model="smollm2-135m",
    revision="r",
    dtype="bfloat16",
    layout="head-token-channel",
    layout_version=1,
    block_tokens=256,
    groups=(
        GroupSpec("kv", GroupKind.LINEAR, BLOCK_BYTES),
        GroupSpec("state", GroupKind.STATE, 8192),
    ),
)
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Wire:
    """A front that was started so, and clients of it."""

    front: Front

    def client(self, scheme: str) -> Client:
        address = self.front.address
        return Client(
            f"bulk://{address}" if scheme == "bulk" else f"grpc://{address}", timeout_s=20
        )


@pytest.fixture(scope="module")
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        fake = FakeDaemon(Path(folder) / "s")
        fake.start()
        yield fake
        fake.kill()


def _wire(daemon: FakeDaemon, *settings: str) -> Iterator[Wire]:
    made = start_front(daemon.path, "127.0.0.1:0", *settings)
    yield Wire(made)
    stop_front(made)


@pytest.fixture(scope="module")
def lossless(daemon: FakeDaemon) -> Iterator[Wire]:
    yield from _wire(daemon, "wire.codec", "lossless")


@pytest.fixture(scope="module")
def slow(daemon: FakeDaemon) -> Iterator[Wire]:
    yield from _wire(daemon, "wire.link_bytes_per_s", "10MB")


@pytest.fixture(scope="module")
def fast(daemon: FakeDaemon) -> Iterator[Wire]:
    yield from _wire(daemon, "wire.link_bytes_per_s", "7GB")


@pytest.fixture(scope="module")
def raw(daemon: FakeDaemon) -> Iterator[Wire]:
    yield from _wire(daemon, "wire.codec", "raw")


@pytest.fixture(params=["bulk", "grpc"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rows_of(seed: int) -> list[list[Bytes | None]]:
    """Real KV that differs from block to block, and a state blob."""
    k, v = real.bits("a")
    tiles = [np.roll(tile, 64 * (seed + step)) for step in range(4) for tile in (k, v)]
    block = np.concatenate(tiles).reshape(-1).view(np.uint8)
    state = np.random.default_rng(seed).integers(0, 256, 8192, dtype=np.uint8)
    return [[np.roll(block, 65536 * i), state] for i in range(BLOCKS)]


def stored(namespace: Namespace, seed: int) -> tuple[Keys, list[list[Bytes | None]]]:
    rows, keys = rows_of(seed), namespace.keys(np.arange(256 * BLOCKS) + 1000 * seed)
    assert namespace.put(keys, rows, groups=["kv", "state"]).committed == BLOCKS
    return keys, rows


def stored_kv(namespace: Namespace, seed: int) -> tuple[Keys, list[Bytes]]:
    """Without state: the fake daemon gives all that a block has."""
    rows = [row[0] for row in rows_of(seed) if row[0] is not None]
    keys = namespace.keys(np.arange(256 * BLOCKS) + 1000 * seed)
    assert namespace.put(keys, rows).committed == BLOCKS
    return keys, rows


def assert_is(namespace: Namespace, keys: Keys, rows: list[list[Bytes | None]]) -> None:
    found = namespace.get(keys, groups=["kv", "state"])
    assert (found.hits, found.corrupt) == (BLOCKS, 0)
    for block, row in zip(found.blocks, rows, strict=True):
        assert block is not None
        for mine, other in zip(block, row, strict=True):
            assert mine is None or np.array_equal(mine, other)
        assert block[0] is not None


def moved(client: Client) -> tuple[int, int, int, int]:
    """Plain bytes and bytes on the wire of frames: sent and received."""
    frames = client._transport.frames
    if frames is None:
        return 0, 0, 0, 0
    sent, received = frames.framing.sent, frames.framing.received
    return sent.plain_bytes, sent.wire_bytes, received.plain_bytes, received.wire_bytes


KV_BYTES = BLOCKS * BLOCK_BYTES


class TestOnTheWire:
    def test_real_kv_takes_two_thirds_both_ways_and_is_the_same(
        self, lossless: Wire, scheme: str
    ) -> None:
        with lossless.client(scheme) as client:
            namespace = client.open_namespace(SPEC)
            keys, rows = stored(namespace, 1)
            assert_is(namespace, keys, rows)
            sent, sent_wire, received, received_wire = moved(client)
            assert (sent, received) == (KV_BYTES, KV_BYTES), "all of kv, and nothing of the blobs"
            assert sent / sent_wire > 1.4
            assert received / received_wire > 1.4
            namespace.clear()
            keys, plain = stored_kv(namespace, 4)
            buffers = [np.zeros((8, BLOCK_BYTES // 8), np.uint8) for _ in plain]
            assert namespace.get_into(keys, [list(buffer) for buffer in buffers]).hits == BLOCKS
            assert all(
                np.array_equal(b.reshape(-1), row) for b, row in zip(buffers, plain, strict=True)
            )
            assert moved(client)[2] == 2 * KV_BYTES
            namespace.clear()

    def test_a_partial_block_and_noise_travel_too(self, lossless: Wire, scheme: str) -> None:
        with lossless.client(scheme) as client:
            namespace = client.open_namespace(SPEC)
            _, rows = stored(namespace, 2)
            keys = namespace.keys(np.arange(256 + 128) + 7)
            noise = np.random.default_rng(2).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
            kv = rows[0][0]
            assert kv is not None
            half = np.ascontiguousarray(kv.reshape(8, 2, -1)[:, 0]).reshape(-1)
            assert namespace.put(keys, [[noise], [half]]).committed == 2
            found = namespace.get(keys).blocks
            assert found[0] is not None
            assert found[1] is not None
            assert np.array_equal(found[0][0], noise)
            assert np.array_equal(found[1][0], half)
            namespace.clear()

    def test_a_slow_link_takes_frames_once_the_group_is_known(
        self, slow: Wire, scheme: str
    ) -> None:
        with slow.client(scheme) as client:
            namespace = client.open_namespace(SPEC)
            seeds = itertools.count(3)

            def both_ways() -> bool:
                """Both ends look at the group beside the first transfers."""
                keys, rows = stored(namespace, next(seeds) % 32)
                assert_is(namespace, keys, rows)
                namespace.clear()
                sent, _, received, _ = moved(client)
                return bool(sent and received)

            wait_until(both_ways)
            namespace.clear()


class TestFallbacks:
    def test_a_front_that_offers_none_gets_and_gives_plain_bytes(
        self, raw: Wire, scheme: str
    ) -> None:
        with raw.client(scheme) as client:
            namespace = client.open_namespace(SPEC)
            keys, rows = stored(namespace, 50)
            assert_is(namespace, keys, rows)
            assert client._transport.frames is None
            namespace.clear()

    def test_a_client_that_has_no_codec_gets_and_gives_plain_bytes(
        self, lossless: Wire, scheme: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "kvstored.client.framing", None)
        assert client_frames.offered(pb.Frames(version=FRAMES_VERSION)) is None
        with lossless.client(scheme) as client:
            namespace = client.open_namespace(SPEC)
            keys, rows = stored(namespace, 51)
            assert_is(namespace, keys, rows)
            assert client._transport.frames is None
            namespace.clear()

    def test_frames_of_another_version_are_not_taken(self) -> None:
        for version in (0, FRAMES_VERSION - 1, FRAMES_VERSION + 1):
            assert client_frames.offered(pb.Frames(version=version)) is None
        assert client_frames.offered(pb.Frames(version=FRAMES_VERSION)) is not None

    def test_a_fast_link_gets_plain_bytes(self, fast: Wire) -> None:
        with fast.client("bulk") as client:
            namespace = client.open_namespace(SPEC)
            frames, seeds = client._transport.frames, itertools.count(52)

            def looked_at() -> bool:
                keys, rows = stored(namespace, next(seeds))
                assert_is(namespace, keys, rows)
                namespace.clear()
                return bool(frames.framing._known)

            wait_until(looked_at)
            keys, rows = stored(namespace, 90)
            assert_is(namespace, keys, rows)
            assert moved(client) == (0, 0, 0, 0)
            namespace.clear()


def _frame(plain: Bytes) -> Bytes:
    return blocks.encode(plain, Plan(Element.BF16, (Step(Method.PLANES),)))


def _piece(frame: Bytes | bytes, size: int | None = None) -> bytes:
    data = bytes(frame)
    return PIECE_HEAD.pack((len(data) if size is None else size) << 1 | 1) + data


def _flipped(frame: Bytes) -> Bytes:
    bad = frame.copy()
    bad[len(bad) // 2] ^= 1
    return bad


def _against_another(plain: Bytes) -> Bytes:
    return blocks.encode(
        plain, Plan(Element.BF16, (Step(Method.PLANES),)), [blocks.known(b"k" * 16, plain)]
    )


DAMAGED: dict[str, Callable[[Bytes], bytes]] = {
    "a flipped bit": lambda plain: _piece(_flipped(_frame(plain))),
    "of other bytes": lambda plain: _piece(_frame(np.roll(plain, 2))),
    "against another block": lambda plain: _piece(_against_another(plain)),
    "no frame": lambda plain: _piece(b"no frame" * 100),
    "another length": lambda plain: _piece(_frame(plain[:-4096])),
}


@pytest.fixture
def open_peer(lossless: Wire) -> Iterator[tuple[Peer, Namespace, stubs.KvstoredStub]]:
    with (
        lossless.client("bulk") as client,
        grpc.insecure_channel(lossless.front.address) as channel,
    ):
        namespace = client.open_namespace(SPEC)
        made = peer(lossless.front.address)
        yield made, namespace, stubs.KvstoredStub(channel)
        made.connected.close()
        namespace.clear()


class TestPeersThatLie:
    @pytest.mark.parametrize("damage", DAMAGED)
    def test_a_damaged_frame_of_a_put_stores_nothing(
        self, open_peer: tuple[Peer, Namespace, stubs.KvstoredStub], damage: str
    ) -> None:
        lying, namespace, stub = open_peer
        (row, *_), keys = rows_of(60), namespace.keys(np.arange(256))
        plain = row[0]
        assert plain is not None
        for told in (xxhash.xxh3_64_intdigest(plain), 0):
            self._reserve(lying, namespace, keys, plain)
            lying.connected.sendall(DAMAGED[damage](plain) + pack_u64([told]))
            assert lying.refusal() == "Corrupt"
        assert namespace.match(keys).hit_blocks == 0
        eventually(stub, fills=0, leases=0)
        # nothing is lost of what follows
        self._reserve(lying, namespace, keys, plain)
        good = _piece(_frame(plain)) + pack_u64([xxhash.xxh3_64_intdigest(plain)])
        lying.connected.sendall(good)
        assert lying.answer()[:2] == (FRAMED, 0)
        assert namespace.get(keys).hits == 1
        namespace.clear()

    @pytest.mark.parametrize("size", [BLOCK_BYTES, 1 << 40, (1 << 63) - 1])
    def test_a_frame_that_claims_too_much_ends_the_connection_before_anything_is_allocated(
        self, open_peer: tuple[Peer, Namespace, stubs.KvstoredStub], size: int
    ) -> None:
        lying, namespace, stub = open_peer
        plain = rows_of(61)[0][0]
        assert plain is not None
        self._reserve(lying, namespace, namespace.keys(np.arange(256)), plain)
        lying.connected.sendall(_piece(b"x" * 100, size=size))
        assert lying.refusal() == "Corrupt"
        assert lying.is_ended()
        eventually(stub, fills=0, leases=0)

    def test_frames_come_only_to_those_who_ask(
        self, open_peer: tuple[Peer, Namespace, stubs.KvstoredStub]
    ) -> None:
        asking, namespace, stub = open_peer
        keys, rows = stored_kv(namespace, 62)
        plain = rows[0]
        request = pb.AcquireRequest(namespace=namespace.digest, keys=keys[:1].message())
        asking.send(ACQUIRE, 3, request)
        assert pb.AcquireResponse.FromString(asking.answer()[3]).frames == 0
        assert asking.receive(BLOCK_BYTES) == plain.tobytes()
        request.frames = FRAMES_VERSION - 1  # an older client
        asking.send(ACQUIRE, 4, request)
        assert pb.AcquireResponse.FromString(asking.answer()[3]).frames == 0
        assert asking.receive(BLOCK_BYTES) == plain.tobytes()
        request.frames = FRAMES_VERSION
        asking.send(ACQUIRE, 5, request)
        head = pb.AcquireResponse.FromString(asking.answer()[3])
        assert head.frames == FRAMES_VERSION
        (told,) = PIECE_HEAD.unpack(asking.receive(PIECE_HEAD.size))
        assert told & 1
        frame = np.frombuffer(asking.receive(told >> 1), dtype=np.uint8)
        target = np.empty(BLOCK_BYTES, dtype=np.uint8)
        blocks.decode(frame, target)
        assert np.array_equal(target, plain)
        assert unpack_u64(head.checksums, "checksums")[0] == xxhash.xxh3_64_intdigest(plain)
        eventually(stub, fills=0, leases=0)

    @pytest.mark.parametrize("damage", DAMAGED)
    def test_a_damaged_frame_of_a_streamed_put_stores_nothing(
        self, open_peer: tuple[Peer, Namespace, stubs.KvstoredStub], damage: str
    ) -> None:
        lying, namespace, stub = open_peer
        plain, keys = rows_of(63)[0][0], namespace.keys(np.arange(256))
        assert plain is not None
        data = DAMAGED[damage](plain)
        reserve = pb.ReserveRequest(
            session=lying.token,
            namespace=namespace.digest,
            keys=keys.message(),
            sizes=pack_u64([BLOCK_BYTES]),
        )
        sums = pack_u64([xxhash.xxh3_64_intdigest(plain)])
        messages = [pb.PutRequest(reserve=reserve, frames=FRAMES_VERSION)]
        messages += [pb.PutRequest(data=data[i : i + 9999]) for i in range(0, len(data), 9999)]
        with pytest.raises(grpc.RpcError) as refused:
            stub.Put(iter([*messages, pb.PutRequest(checksums=sums)]), timeout=10)
        assert refused.value.code() is grpc.StatusCode.DATA_LOSS
        assert namespace.match(keys).hit_blocks == 0
        eventually(stub, fills=0, leases=0)

    @staticmethod
    def _reserve(lying: Peer, namespace: Namespace, keys: Keys, plain: Bytes) -> None:
        request = pb.ReserveRequest(
            namespace=namespace.digest, keys=keys.message(), sizes=pack_u64([len(plain)])
        )
        lying.send(RESERVE, 7, request)
        assert lying.answer()[:2] == (RESERVE, 0)
        lying.send(FRAMED, 7, b"")


class TestDamagedGets:
    @pytest.mark.parametrize("damage", ["a flipped bit", "of other bytes", "against another block"])
    def test_a_damaged_frame_is_a_miss(
        self, lossless: Wire, scheme: str, damage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever a daemon, or the way to it, makes of a frame."""
        with lossless.client(scheme) as client:
            namespace = client.open_namespace(SPEC)
            keys, rows = stored_kv(namespace, 70)
            decode = blocks.decode
            bad = np.frombuffer(DAMAGED[damage](rows[0]), dtype=np.uint8)[PIECE_HEAD.size :]

            def damaged(frame: Bytes, target: Bytes) -> object:
                return decode(bad, target)

            monkeypatch.setattr("kvstored.client.framing.blocks.decode", damaged)
            found = namespace.get(keys[:1])
            assert (found.hits, found.corrupt, found.blocks) == (0, 1, (None,))
            monkeypatch.undo()
            assert namespace.get(keys).hits == BLOCKS
            namespace.clear()

    def test_a_piece_of_an_impossible_length_is_an_error_and_the_connection_is_not_used_again(
        self, lossless: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with lossless.client("bulk") as client:
            namespace = client.open_namespace(SPEC)
            keys, _ = stored_kv(namespace, 71)
            monkeypatch.setattr("kvstored.client.framed_socket.size_of", lambda runs: 100)
            with pytest.raises(Corrupt):
                namespace.get(keys[:1])
            monkeypatch.undo()
            assert namespace.get(keys).hits == BLOCKS
            namespace.clear()


class TestBounds:
    @pytest.mark.parametrize("blocks_max", [0, 1, 3])
    def test_what_is_ahead_is_bounded_over_all_connections_and_given_back(
        self, monkeypatch: pytest.MonkeyPatch, blocks_max: int
    ) -> None:
        monkeypatch.setattr("kvstored.client.framing._AHEAD_BYTES", blocks_max * BLOCK_BYTES)
        framing, most = Framing(always=True), [0]
        framing.threads = 100
        taken = framing.goes_ahead

        def counted(more_bytes: int) -> None:
            taken(more_bytes)
            most[0] = max(most[0], framing._ahead_bytes)

        monkeypatch.setattr(framing, "goes_ahead", counted)
        framing.learn(b"d", SPEC)
        pieces = [(0, (row[0],)) for row in rows_of(80) if row[0] is not None]
        assert framing.pays(b"d", pieces, link_bytes_per_s=0, decoders=1)
        with framing.encoding(b"d", pieces) as one, framing.encoding(b"d", pieces) as other:
            sent = [each for both in zip(one, other, strict=True) for each in both]
        targets = [np.empty(BLOCK_BYTES, np.uint8) for _ in sent]
        with framing.decoding() as decoding:
            for i, (each, target) in enumerate(zip(sent, targets, strict=True)):
                decoding.start(i, each.views[0], (target,))
            decoding.settle()
        assert decoding.sums == {i: each.checksum for i, each in enumerate(sent)}
        assert most[0] <= (blocks_max + 2) * BLOCK_BYTES
        with framing.encoding(b"d", pieces) as left:
            next(left)
        assert framing._ahead_bytes == 0


class TestWhenFramesAreFaster:
    GAIN = Gain(ratio=1.5, encode_bytes_per_s=0.7e9, decode_bytes_per_s=1.4e9)

    @pytest.mark.parametrize(
        ("link_bytes_per_s", "encoders", "decoders", "is_so"),
        [
            (0.1e9, 1, 1, True),  # gigabit
            (0.6e9, 1, 1, True),
            (0.65e9, 1, 1, False),  # one core encodes no faster
            (1.25e9, 1, 4, False),
            (1.25e9, 4, 1, True),  # 10 gigabit: the decoder keeps up
            (1.3e9, 4, 1, False),
            (3e9, 4, 4, False),
        ],
    )
    def test_the_slowest_of_encoding_link_and_decoding_decides(
        self, link_bytes_per_s: float, encoders: int, decoders: int, is_so: bool
    ) -> None:
        assert is_faster(self.GAIN, link_bytes_per_s, encoders, decoders) is is_so

    def test_what_gains_nothing_is_never_faster(self) -> None:
        assert not is_faster(Gain(1.05, 1e12, 1e12), 1e6, 4, 4)

    def test_a_link_is_measured_by_plain_transfers_and_now_and_then_again(self) -> None:
        link = Link()
        assert link.bytes_per_s == 0, "unknown"
        link.carried(1000, 1e-9)
        assert link.bytes_per_s == 0, "too small to tell"
        link.carried(100 << 20, 1.0)
        assert link.bytes_per_s == 100 << 20
        link.carried(200 << 20, 1.0)
        assert link.bytes_per_s == 150 << 20
        for _ in range(AGAIN):
            assert link.bytes_per_s == 150 << 20
            link.framed()
        assert link.bytes_per_s == 0, "the next one goes plain"
        link.carried(1000, 1e-9)
        assert link.bytes_per_s == 150 << 20, "a small one changes nothing"

    def test_what_the_operator_says_holds(self) -> None:
        link = Link(5e6)
        link.carried(100 << 20, 1.0)
        for _ in range(2 * AGAIN):
            link.framed()
        assert link.bytes_per_s == 5e6
