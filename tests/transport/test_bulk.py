"""The bulk channel of a real front before a fake daemon: our client, and peers that lie, stall and die."""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash

from kvstored.client import Client, Namespace
from kvstored.client.bulk import BulkConnection
from kvstored.client.segments import Segments
from kvstored.clock import SystemClock
from kvstored.core.calls import FillStatus
from kvstored.errors import ConfigError, Corrupt, DeadlineExceeded, NotFound, Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.pb import kvstored_pb2_grpc as stubs
from kvstored.transport import bulk_calls
from kvstored.transport.bulk import BulkServer, Certificate
from kvstored.wire.bulk import DATA, GREETING, BulkAddress
from kvstored.wire.frames import HEADER
from kvstored.wire.packing import pack_u64

from .bulk_peer import ACQUIRE, KEEP_ALIVE, RESERVE, Peer, eventually, peer
from .fake_daemon import FakeDaemon
from .test_front import SPEC, Front, rows_of, start_front, stop_front

KV = 3 * 4096
PEM = Path(__file__).parent / "bulk_test.pem"


@pytest.fixture(scope="module")
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        fake = FakeDaemon(Path(folder) / "s")
        fake.start()
        yield fake
        fake.kill()


@pytest.fixture(scope="module")
def front(daemon: FakeDaemon) -> Iterator[Front]:
    made = start_front(daemon.path, "127.0.0.1:0")
    yield made
    stop_front(made)


@pytest.fixture(scope="module")
def stub(front: Front) -> Iterator[stubs.KvstoredStub]:
    with grpc.insecure_channel(front.address) as channel:
        yield stubs.KvstoredStub(channel)


@pytest.fixture
def client(front: Front) -> Iterator[Client]:
    with Client(f"bulk://{front.address}", timeout_s=10) as made:
        yield made


@pytest.fixture
def namespace(client: Client) -> Iterator[Namespace]:
    opened = client.open_namespace(SPEC)
    yield opened
    opened.clear()


def connections_of(client: Client) -> int:
    """How many bulk connections it has."""
    return len(client._transport._bulk._open)


def without_grpc_streams(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with client.link(10):
        pass  # the transport is there
    for name in ("put_stream", "get_stream"):
        monkeypatch.setattr(client._transport, name, None)


def reserve(namespace: Namespace, blocks: int, size: int = KV) -> pb.ReserveRequest:
    return pb.ReserveRequest(
        namespace=namespace.digest,
        keys=namespace.keys(range(16 * blocks)).message(),
        sizes=pack_u64([size] * blocks),
    )


def acquire(namespace: Namespace, blocks: int) -> pb.AcquireRequest:
    keys = namespace.keys(range(16 * blocks)).message()
    return pb.AcquireRequest(namespace=namespace.digest, keys=keys)


class TestOurClient:
    def test_puts_and_gets_go_over_it_with_all_groups_and_no_grpc_stream(
        self, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_grpc_streams(client, monkeypatch)
        keys = namespace.keys(range(5 * 16))
        kv, state = rows_of(5, KV), rows_of(5, 100, 1)
        rows = [[kv[i], state[i] if i != 2 else None] for i in range(5)]
        assert namespace.put(keys, rows, groups=["kv", "state"]).committed == 5
        again = namespace.put(keys, kv)
        assert (again.committed, again.present) == (0, 5)
        out = [(np.zeros(KV, np.uint8), np.zeros(100, np.uint8)) for _ in range(5)]
        found = namespace.get(keys, groups=["kv", "state"], out=out)
        assert (found.hits, found.corrupt) == (5, 0)
        assert all(np.array_equal(block[0], row) for block, row in zip(out, kv, strict=True))
        there = [state[i] if i != 2 else np.zeros(100, np.uint8) for i in range(5)]
        assert all(np.array_equal(block[1], row) for block, row in zip(out, there, strict=True))
        assert connections_of(client) == 1

    def test_a_put_of_many_parts_keeps_every_byte_and_every_status(
        self, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Parts of 16 MiB: while one travels the next is reserved, and some have nothing to send."""
        without_grpc_streams(client, monkeypatch)
        monkeypatch.setattr("kvstored.client.rows._PART_BYTES_MAX", 2 * KV)
        keys = namespace.keys(range(13 * 16))
        rows = rows_of(13, KV)
        for there in ([2, 3], [6, 7, 8, 9], [12]):
            for i in there:
                namespace.put(keys[i : i + 1], rows[i : i + 1])
        there_before = {2, 3, 6, 7, 8, 9, 12}
        status = namespace.put(keys, rows).status
        assert status == tuple(
            FillStatus.PRESENT if i in there_before else FillStatus.COMMITTED for i in range(13)
        )
        found = namespace.get(keys).blocks
        assert b"".join(block[0].tobytes() for block in found) == rows.tobytes()

    def test_many_small_and_one_large_block(self, client: Client, namespace: Namespace) -> None:
        """More views than one system call takes, and a block of many steps."""
        count = 700
        path = namespace.keys(range(count * 16))
        rows = [rows_of(1, 1 + i % 50, i)[0] for i in range(count)]
        assert namespace.put(path, rows).committed == count
        found = namespace.get(path).blocks
        assert all(np.array_equal(block[0], row) for block, row in zip(found, rows, strict=True))
        large = namespace.keys(range(50_000, 50_016))
        row = rows_of(1, 5_000_001)
        assert namespace.put(large, row).committed == 1
        assert np.array_equal(namespace.get(large).blocks[0][0], row[0])

    def test_a_flipped_byte_is_a_miss_even_where_no_check_was_asked_for(
        self, client: Client, namespace: Namespace
    ) -> None:
        keys = namespace.keys(range(3 * 16))
        namespace.put(keys, rows_of(3, KV))
        flip = pb.ReportRequest(
            session=client.session(), namespace=namespace.digest, keys=keys[1:2].message(), group=1
        )
        client.call("Report", flip, pb.ReportResponse)
        found = namespace.get(keys, verify=False)
        assert [block is None for block in found.blocks] == [False, True, False]
        assert found.corrupt == 1

    def test_threads_have_connections_of_their_own(
        self, client: Client, namespace: Namespace
    ) -> None:
        wrong: list[int] = []

        def run(number: int) -> None:
            path = namespace.keys(range(1000 * number, 1000 * number + 16))
            row = rows_of(1, KV, number)
            for _ in range(10):
                namespace.put(path, row)
                block = namespace.get(path).blocks[0]
                if block is None or not np.array_equal(block[0], row[0]):
                    wrong.append(number)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(1, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not wrong
        assert 1 <= connections_of(client) <= 5

    def test_the_child_of_a_fork_connects_anew_and_the_parent_goes_on(
        self, client: Client, namespace: Namespace
    ) -> None:
        keys, row = namespace.keys(range(16)), rows_of(1, KV)
        namespace.put(keys, row)
        (theirs,) = client._transport._bulk._open
        client.after_fork()
        assert not theirs.is_reusable
        assert namespace.get(keys).hits == 1
        (ours,) = client._transport._bulk._open
        assert ours is not theirs


class TestFallingBack:
    def test_without_the_channel_bytes_go_over_grpc(self, daemon: FakeDaemon) -> None:
        bare = start_front(daemon.path, "127.0.0.1:0", "bulk_listen", "off")
        with Client(f"bulk://{bare.address}") as client:
            namespace = client.open_namespace(SPEC)
            keys = namespace.keys(range(16))
            assert namespace.put(keys, rows_of(1, KV)).stored == 1
            assert namespace.get(keys).hits == 1
            assert connections_of(client) == 0
            namespace.clear()
        stop_front(bare)

    def test_a_port_that_nobody_answers_is_not_tried_at_every_call(
        self, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried: list[BulkAddress] = []
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        real = client._transport._bulk._made.__func__

        def elsewhere(pool: object, address: BulkAddress, *rest: object) -> object:
            tried.append(address)
            return real(pool, replace(address, port=port), *rest)

        monkeypatch.setattr(type(client._transport._bulk), "_made", elsewhere)
        keys = namespace.keys(range(16))
        assert namespace.put(keys, rows_of(1, KV)).stored == 1
        assert namespace.get(keys).hits == 1
        assert tried
        assert client._transport._bulk._retry_at_s > 0

    def test_another_server_at_the_port_never_sees_the_token(self) -> None:
        """Behind a tunnel, say, where the told port is someone else's."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            seen: list[bytes] = []

            def serve() -> None:
                connected, _ = other.accept()
                with connected:
                    connected.sendall(GREETING + bytes(16))
                    seen.append(connected.recv(1000))

            thread = threading.Thread(target=serve)
            thread.start()
            address = BulkAddress("127.0.0.1", other.getsockname()[1], os.urandom(16))
            with pytest.raises(Corrupt, match="another server"):
                BulkConnection(address, b"token", 5.0, SystemClock())
            thread.join(10)
        assert seen == [b""]

    def test_a_front_that_was_restarted_is_found_at_its_other_port(
        self, daemon: FakeDaemon
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            listen = f"127.0.0.1:{probe.getsockname()[1]}"
        first = start_front(daemon.path, listen)
        with Client(f"bulk://{listen}", timeout_s=10) as client:
            namespace = client.open_namespace(SPEC)
            keys, row = namespace.keys(range(16)), rows_of(1, KV)
            namespace.put(keys, row)
            before = client._transport._bulk_address
            stop_front(first)
            with pytest.raises(Unavailable):
                namespace.get(keys)
            second = start_front(daemon.path, listen)
            for _ in range(600):
                try:
                    assert namespace.get(keys).hits == 1
                except Unavailable:
                    time.sleep(0.05)  # gRPC's own back-off
                    continue
                if client._transport._bulk_address != before:
                    break
            assert namespace.get(keys).hits == 1
            assert connections_of(client) == 1
            namespace.clear()
        stop_front(second)


class TestTls:
    def test_bytes_go_over_tls_and_the_certificate_is_the_one_that_the_session_told(
        self, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        front = start_front(daemon.path, "127.0.0.1:0", "bulk_tls.certificate", str(PEM))
        with Client(f"bulk://{front.address}", timeout_s=10) as client:
            namespace = client.open_namespace(SPEC)
            without_grpc_streams(client, monkeypatch)
            keys = namespace.keys(range(300 * 16))
            rows = [rows_of(1, 1000 + i, i)[0] for i in range(299)] + [rows_of(1, 3_000_000)[0]]
            assert namespace.put(keys, rows).committed == 300
            found = namespace.get(keys).blocks
            assert all(np.array_equal(b[0], row) for b, row in zip(found, rows, strict=True))
            namespace.clear()
            address = client._transport._bulk_address
            token = client.session()
            with pytest.raises(Corrupt, match="another certificate"):
                BulkConnection(replace(address, certificate=bytes(32)), token, 5, SystemClock())
            plain = replace(address, certificate=b"")
            with pytest.raises(DeadlineExceeded):  # each waits for the other's first word
                BulkConnection(plain, token, 0.5, SystemClock())
        stop_front(front)

    def test_files_that_are_no_certificate_are_said(self, tmp_path: Path) -> None:
        (tmp_path / "no.pem").write_text("nothing")
        for file in (tmp_path / "no.pem", tmp_path / "absent.pem"):
            with pytest.raises(ConfigError, match="both are PEM files"):
                Certificate(file, file).context()


class TestPeersThatLie:
    @pytest.fixture
    def liar(self, front: Front) -> Iterator[Peer]:
        made = peer(front.address)
        yield made
        made.connected.close()

    def test_a_wrong_token_is_refused_in_words(self, front: Front) -> None:
        stranger = peer(front.address, b"no such token...")
        assert stranger.refusal() == NotFound.__name__
        assert stranger.is_ended()
        stranger.connected.close()

    def test_nothing_is_served_before_a_session_is_shown(
        self, front: Front, namespace: Namespace
    ) -> None:
        stranger = peer(front.address, hello=False)
        stranger.send(ACQUIRE, 1, acquire(namespace, 1))
        assert stranger.refusal() == "PermissionDenied"
        assert stranger.is_ended()
        stranger.connected.close()

    def test_a_first_frame_is_small(self, front: Front) -> None:
        stranger = peer(front.address, hello=False)
        stranger.send(KEEP_ALIVE, 1, bytes(257))
        assert stranger.is_ended()
        stranger.connected.close()

    def test_who_says_nothing_is_left_after_seconds(self, front: Front) -> None:
        silent = peer(front.address, hello=False)
        silent.connected.send(b"\x00")  # half a header is nothing
        began = time.monotonic()
        silent.connected.settimeout(20)
        assert silent.is_ended()
        assert time.monotonic() - began < 15
        silent.connected.close()

    @pytest.mark.parametrize(
        "sent",
        [os.urandom(4000), b"GET / HTTP/1.1\r\n\r\n" * 10, HEADER.pack(0xFFFF_FFFF, RESERVE, 1, 1)],
        ids=["noise", "http", "oversize"],
    )
    def test_garbage_ends_the_connection_with_a_reason(self, liar: Peer, sent: bytes) -> None:
        liar.connected.sendall(sent)
        assert liar.refusal() in ("Corrupt", "InvalidArgument")
        assert liar.is_ended()

    def test_a_message_that_is_none_is_refused_and_the_connection_goes_on(self, liar: Peer) -> None:
        liar.send(ACQUIRE, 5, b"\xff" * 20)
        assert liar.refusal() == "InvalidArgument"
        liar.send(ACQUIRE, 6, pb.AcquireRequest(namespace=bytes(32)))
        assert liar.refusal() in ("InvalidArgument", "NotFound")

    def test_bytes_that_do_not_match_their_checksum_are_not_stored(
        self, liar: Peer, namespace: Namespace, stub: stubs.KvstoredStub
    ) -> None:
        block = rows_of(1, KV)[0].tobytes()
        for call, told in ((2, 1), (3, xxhash.xxh3_64_intdigest(block))):
            liar.send(RESERVE, call, reserve(namespace, 1))
            assert liar.answer()[1] == 0
            liar.send(DATA, call, b"")
            liar.connected.sendall(block + pack_u64([told]))
            if told == 1:
                assert liar.refusal() == "Corrupt"
                assert namespace.match(namespace.keys(range(16))).hit_blocks == 0
                eventually(stub, fills=0, leases=0)
        method, status, call, payload = liar.answer()
        assert (method, status, call) == (DATA, 0, 3)
        assert pb.PutResponse.FromString(payload).status == bytes([FillStatus.COMMITTED])

    def test_bytes_nobody_reserved_for_end_it(self, liar: Peer) -> None:
        liar.send(DATA, 77, b"")
        assert liar.refusal() == "InvalidArgument"
        assert liar.is_ended()

    def test_a_third_put_without_the_bytes_of_the_first_ends_it(
        self, liar: Peer, namespace: Namespace, stub: stubs.KvstoredStub
    ) -> None:
        for call in (2, 3, 4):
            request = reserve(namespace, 1)
            request.keys.CopyFrom(namespace.keys(range(call * 100, call * 100 + 16)).message())
            liar.send(RESERVE, call, request)
        assert [liar.answer()[:2] for _ in range(2)] == [(RESERVE, 0)] * 2
        assert liar.refusal() == "InvalidArgument"
        assert liar.is_ended()
        eventually(stub, fills=0, leases=0)


class TestPeersThatDie:
    def test_in_the_middle_of_a_put_its_fills_are_aborted(
        self, front: Front, namespace: Namespace, stub: stubs.KvstoredStub
    ) -> None:
        dying = peer(front.address)
        dying.send(RESERVE, 2, reserve(namespace, 4))
        assert dying.answer()[1] == 0
        dying.send(DATA, 2, b"")
        dying.connected.sendall(bytes(KV + 17))
        eventually(stub, fills=4, leases=0)
        dying.connected.close()
        eventually(stub, fills=0, leases=0)
        assert namespace.match(namespace.keys(range(64))).hit_blocks == 0

    def test_in_the_middle_of_a_get_its_lease_ends(
        self, front: Front, namespace: Namespace, stub: stubs.KvstoredStub
    ) -> None:
        blocks = 20
        namespace.put(namespace.keys(range(16 * blocks)), rows_of(blocks, 1 << 20))
        dying = peer(front.address)
        dying.send(ACQUIRE, 2, acquire(namespace, blocks))
        assert dying.answer()[:2] == (ACQUIRE, 0)
        eventually(stub, fills=0, leases=1)
        dying.connected.close()
        eventually(stub, fills=0, leases=0)

    def test_a_deadline_ends_a_get_that_nobody_reads(
        self, front: Front, namespace: Namespace, stub: stubs.KvstoredStub
    ) -> None:
        blocks = 20
        namespace.put(namespace.keys(range(16 * blocks)), rows_of(blocks, 1 << 20))
        slow = peer(front.address)
        slow.send(ACQUIRE, 2, acquire(namespace, blocks), deadline=50)
        assert slow.answer()[:2] == (ACQUIRE, 0)
        eventually(stub, fills=0, leases=0)
        slow.connected.close()


class TestBounds:
    @pytest.fixture
    def server(self, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[BulkServer]:
        """In this process, where its patience is short."""
        monkeypatch.setattr(bulk_calls, "STALL_S", 0.3)
        monkeypatch.setattr(bulk_calls, "IDLE_S", 0.6)
        made = BulkServer(
            "127.0.0.1",
            0,
            daemon=daemon.path,
            segments=Segments(),
            certificate=None,
            clock=SystemClock(),
            connections_max=2,
        )
        made.start()
        yield made
        made.close()

    @pytest.fixture
    def connect(self, server: BulkServer, client: Client) -> Iterator[Callable[[], Peer]]:
        opened: list[Peer] = []

        def connected() -> Peer:
            made = Peer(socket.create_connection(("127.0.0.1", server.address.port), 10), b"")
            opened.append(made)
            made.greeting = made.receive(24)
            made.send(KEEP_ALIVE, 1, pb.KeepAliveRequest(session=client.session()))
            return made

        yield connected
        for each in opened:
            each.connected.close()

    def test_one_more_connection_than_allowed_is_busy(
        self, server: BulkServer, connect: Callable[[], Peer]
    ) -> None:
        peers = [connect() for _ in range(2)]
        assert all(each.answer()[1] == 0 for each in peers)
        assert connect().refusal() == "Busy"
        ends = time.monotonic() + 20
        while (facts := server.report()).opened < 2:  # counted when the answer has gone
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert (facts.opened, facts.refused, facts.connections) == (2, 1, 2)
        assert facts.received_bytes > 0 < facts.sent_bytes

    def test_a_reader_that_stalls_loses_its_lease(
        self,
        server: BulkServer,
        connect: Callable[[], Peer],
        namespace: Namespace,
        stub: stubs.KvstoredStub,
    ) -> None:
        blocks = 20
        namespace.put(namespace.keys(range(16 * blocks)), rows_of(blocks, 1 << 20))
        stalled = connect()
        assert stalled.answer()[1] == 0
        stalled.send(ACQUIRE, 2, acquire(namespace, blocks))
        eventually(stub, fills=0, leases=1)
        eventually(stub, fills=0, leases=0)
        assert server.report().failures == 1

    def test_a_writer_that_stalls_loses_its_fills(
        self,
        server: BulkServer,
        connect: Callable[[], Peer],
        namespace: Namespace,
        stub: stubs.KvstoredStub,
    ) -> None:
        stalled = connect()
        assert stalled.answer()[1] == 0
        stalled.send(RESERVE, 2, reserve(namespace, 2))
        assert stalled.answer()[1] == 0
        stalled.send(DATA, 2, b"")
        stalled.connected.sendall(b"x")
        eventually(stub, fills=2, leases=0)
        eventually(stub, fills=0, leases=0)

    def test_idle_connections_end_and_closing_leaves_no_thread(
        self, server: BulkServer, connect: Callable[[], Peer]
    ) -> None:
        idle = connect()
        assert idle.answer()[1] == 0
        idle.connected.settimeout(10)
        assert idle.is_ended()
        held = connect()
        assert held.answer()[1] == 0
        server.close()
        assert held.is_ended()
        assert not [t for t in threading.enumerate() if t.name in ("bulk", "bulk-accept")]
