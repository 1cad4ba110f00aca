"""The gRPC front in a process of its own, before a fake daemon in another, called by grpc itself and by our client."""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstored.client import Client, GroupKind, GroupSpec, Namespace, NamespaceSpec
from kvstored.core.types import CheckpointPolicy
from kvstored.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KvstoredError,
    NamespaceMismatch,
    Unavailable,
)
from kvstored.pb import kvstored_pb2 as pb
from kvstored.pb import kvstored_pb2_grpc as stubs
from kvstored.transport.front import check_is_free, check_is_loopback
from kvstored.wire import status
from kvstored.wire.packing import pack_u64

from .fake_daemon import ROOT, FakeDaemon

SPEC = NamespaceSpec(
    model="model",
    revision="r1",
    dtype="bf16",
    layout="nhd",
    layout_version=1,
    block_tokens=16,
    groups=(
        GroupSpec("kv", GroupKind.LINEAR, 3 * 4096),
        GroupSpec("state", GroupKind.STATE, 100),
    ),
    checkpoint_policy=CheckpointPolicy.FULL,
)


@dataclass
class Front:
    process: subprocess.Popen[str]
    address: str


def start_front(socket_path: Path, listen: str, *settings: str) -> Front:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transport.run_front", socket_path, listen, *settings],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return Front(process, process.stdout.readline().strip())


def stop_front(front: Front) -> None:
    front.process.terminate()
    assert front.process.wait(15) == 0
    assert front.process.stdout is not None
    front.process.stdout.close()


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
def channel(front: Front) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(front.address) as made:
        yield made


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> stubs.KvstoredStub:
    return stubs.KvstoredStub(channel)


@pytest.fixture
def client(front: Front) -> Iterator[Client]:
    with Client(f"grpc://{front.address}", timeout_s=10) as made:
        yield made


@pytest.fixture
def namespace(client: Client) -> Iterator[Namespace]:
    opened = client.open_namespace(SPEC)
    yield opened
    opened.clear()
    stat = client.call("Stat", pb.StatRequest(), pb.StatResponse)
    assert (stat.fills, stat.leases) == (0, 0)


def rows_of(count: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


class TestUnary:
    def test_calls_pass_through_and_sessions_live_without_a_connection(
        self, stub: stubs.KvstoredStub
    ) -> None:
        opened = stub.OpenSession(pb.OpenSessionRequest(client="third party"), timeout=10)
        time.sleep(0.2)
        again = stub.OpenSession(pb.OpenSessionRequest(resume_token=opened.token), timeout=10)
        assert again.resumed
        assert again.token == opened.token
        assert stub.Stat(pb.StatRequest(), timeout=10).epoch == 1
        stub.CloseSession(pb.CloseSessionRequest(session=opened.token), timeout=10)

    @pytest.mark.parametrize("known", status.STATUSES, ids=lambda s: s.error.__name__)
    def test_every_error_has_its_code_and_arrives_as_its_class(
        self, stub: stubs.KvstoredStub, client: Client, known: status.Status
    ) -> None:
        request = pb.JobStatusRequest(job=known.number)
        with pytest.raises(grpc.RpcError) as raised:
            stub.JobStatus(request, timeout=10)
        assert raised.value.code() is grpc.StatusCode[known.grpc_code]
        trailing = dict(raised.value.trailing_metadata())
        failure = pb.Failure.FromString(trailing[status.ERROR_DETAIL_KEY])
        assert failure.kind == known.error.__name__
        with pytest.raises(KvstoredError, match=f"as asked job={known.number}") as typed:
            client.call("JobStatus", request, pb.JobStatusResponse)
        assert type(typed.value) is known.error

    def test_the_deadline_is_forwarded_and_the_daemon_s_call_ends(
        self, stub: stubs.KvstoredStub, client: Client
    ) -> None:
        began = time.perf_counter()
        with pytest.raises(grpc.RpcError) as raised:
            stub.PollEvents(pb.PollEventsRequest(wait_ms=60_000, cursor=10**6), timeout=0.3)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        request = pb.PollEventsRequest(wait_ms=60_000, cursor=10**6)
        with pytest.raises(DeadlineExceeded):
            client.call("PollEvents", request, pb.PollEventsResponse, 0.3)
        assert time.perf_counter() - began < 20

    def test_an_unreadable_request_is_an_invalid_argument(self, channel: grpc.Channel) -> None:
        raw = channel.unary_unary("/kvstored.v1.Kvstored/Match")
        with pytest.raises(grpc.RpcError) as raised:
            raw(b"\xff\xff\xff", timeout=10)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    def test_segments_are_not_for_grpc(self, channel: grpc.Channel) -> None:
        raw = channel.unary_unary("/kvstored.v1.Kvstored/Segment")
        with pytest.raises(grpc.RpcError) as raised:
            raw(b"", timeout=10)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


class TestRemoteClient:
    def test_on_the_daemons_own_host_a_bare_address_leads_to_shared_memory(
        self, front: Front
    ) -> None:
        with Client(front.address, timeout_s=10) as near:
            opened = near.open_namespace(SPEC)
            keys = opened.keys(range(SPEC.block_tokens))
            assert opened.put(keys, rows_of(1, SPEC.groups[0].bytes_per_block)).committed == 1
            with opened.get_view(keys) as view:  # streams have no views
                assert view.hits == 1
            opened.clear()

    def test_what_was_put_by_stream_is_read_back(self, namespace: Namespace) -> None:
        keys = namespace.keys(range(6 * 16))
        kv, state = rows_of(6, 3 * 4096), rows_of(6, 100, 1)
        rows = [(k, s if i % 2 else None) for i, (k, s) in enumerate(zip(kv, state, strict=True))]
        put = namespace.put(keys[:5], rows[:5], groups=["kv", "state"])
        assert put.committed == 5
        assert namespace.put(keys, rows, groups=["kv", "state"]).stored == 6
        got = namespace.get(keys, groups=["kv", "state"])
        assert (got.hits, got.corrupt) == (6, 0)
        for i, block in enumerate(got.blocks):
            assert block is not None
            assert np.array_equal(block[0], kv[i])
            assert block[1] is None if i % 2 == 0 else np.array_equal(block[1], state[i])

    def test_large_blocks_and_misses(self, namespace: Namespace) -> None:
        keys = namespace.keys(range(3 * 16))
        rows = rows_of(1, (5 << 20) + 7)
        assert namespace.put(keys[1:2], rows).committed == 1
        got = namespace.get(keys)
        assert [block is not None for block in got.blocks] == [False, True, False]
        assert np.array_equal(got.blocks[1][0], rows[0])
        out = [np.zeros((5 << 20) + 7, dtype=np.uint8) for _ in range(3)]
        assert namespace.get(keys, out=out).hits == 1
        assert np.array_equal(out[1], rows[0])

    def test_bytes_that_changed_are_a_miss(self, client: Client, namespace: Namespace) -> None:
        keys = namespace.keys(range(2 * 16))
        namespace.put(keys, rows_of(2, 4096))
        flip = pb.ReportRequest(namespace=namespace.digest, keys=keys[1:].message(), group=1)
        client.call("Report", flip, pb.ReportResponse)
        got = namespace.get(keys)
        assert got.hits == 0
        assert got.corrupt == 2

    def test_views_and_replacing_need_the_local_channel(self, namespace: Namespace) -> None:
        keys = namespace.keys(range(16))
        with pytest.raises(InvalidArgument, match="local channel"):
            namespace.get_view(keys)
        with pytest.raises(InvalidArgument, match="local channel"):
            namespace.replace_if(keys, rows_of(1, 4096), [0])

    def test_results_that_are_no_errors(self, client: Client, namespace: Namespace) -> None:
        full = namespace.put(namespace.keys(range(70 * 16)), rows_of(70, 1 << 20))
        assert 0 < full.committed < 70
        with pytest.raises(NamespaceMismatch):
            client.open_namespace(NamespaceSpec("model", "r1", "fp8", "nhd", 1, 16, SPEC.groups))


class TestPutStreams:
    def reserve(
        self, stub: stubs.KvstoredStub, namespace: Namespace, sizes: list[int]
    ) -> pb.PutRequest:
        session = stub.OpenSession(pb.OpenSessionRequest(), timeout=10).token
        keys = namespace.keys(range(len(sizes) * 16))
        return pb.PutRequest(
            reserve=pb.ReserveRequest(
                session=session,
                namespace=namespace.digest,
                keys=keys.message(),
                sizes=pack_u64(sizes),
            )
        )

    @pytest.mark.parametrize(
        ("rest", "code"),
        [
            ([], "INVALID_ARGUMENT"),
            ([pb.PutRequest(data=b"x" * 50)], "INVALID_ARGUMENT"),
            ([pb.PutRequest(data=b"x" * 101)], "INVALID_ARGUMENT"),
            ([pb.PutRequest(data=b"x" * 100), pb.PutRequest(checksums=b"1" * 8)], "DATA_LOSS"),
            (
                [pb.PutRequest(data=b"x" * 100), pb.PutRequest(checksums=b"1" * 7)],
                "INVALID_ARGUMENT",
            ),
        ],
    )
    def test_streams_that_lie_store_nothing_and_leave_nothing(
        self,
        stub: stubs.KvstoredStub,
        namespace: Namespace,
        rest: list[pb.PutRequest],
        code: str,
    ) -> None:
        first = self.reserve(stub, namespace, [100])
        with pytest.raises(grpc.RpcError) as raised:
            stub.Put(iter([first, *rest]), timeout=10)
        assert raised.value.code().name == code
        assert namespace.match(namespace.keys(range(16))).hit_blocks == 0
        assert stub.Stat(pb.StatRequest(), timeout=10).fills == 0

    def test_a_put_needs_a_reservation_first(self, stub: stubs.KvstoredStub) -> None:
        for messages in ([], [pb.PutRequest(data=b"x")]):
            with pytest.raises(grpc.RpcError) as raised:
                stub.Put(iter(messages), timeout=10)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    def test_without_checksums_the_front_computes_them(
        self, stub: stubs.KvstoredStub, namespace: Namespace
    ) -> None:
        data = rows_of(1, 300)[0].tobytes()
        messages = [self.reserve(stub, namespace, [100, 200])]
        messages += [pb.PutRequest(data=data[i : i + 7]) for i in range(0, 300, 7)]
        assert stub.Put(iter(messages), timeout=10).status == bytes([5, 5])
        first, second = namespace.get(namespace.keys(range(32))).blocks
        assert first[0].tobytes() + second[0].tobytes() == data

    def test_a_put_that_is_cancelled_leaves_nothing(
        self, stub: stubs.KvstoredStub, namespace: Namespace
    ) -> None:
        first = self.reserve(stub, namespace, [1 << 20])
        hold = threading.Event()

        def messages() -> Iterator[pb.PutRequest]:
            yield first
            yield pb.PutRequest(data=b"x" * 1000)
            hold.wait(20)

        call = stub.Put.future(messages(), timeout=20)
        eventually_fills(stub, 1)
        call.cancel()
        eventually_fills(stub, 0)
        hold.set()


def eventually_fills(stub: stubs.KvstoredStub, wanted: int) -> None:
    for _ in range(250):
        if stub.Stat(pb.StatRequest(), timeout=10).fills == wanted:
            return
        time.sleep(0.02)
    raise AssertionError(f"fills are not {wanted}")


class TestStreams:
    def test_keep_alive_answers_every_message(self, stub: stubs.KvstoredStub) -> None:
        token = stub.OpenSession(pb.OpenSessionRequest(), timeout=10).token
        answers = stub.KeepAlive(iter([pb.KeepAliveRequest(session=token)] * 3), timeout=10)
        assert [answer.epoch for answer in answers] == [1, 1, 1]
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.KeepAlive(iter([pb.KeepAliveRequest(session=b"gone")]), timeout=10))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND

    def test_events_arrive_as_they_happen_and_resume_by_cursor(
        self, stub: stubs.KvstoredStub, namespace: Namespace
    ) -> None:
        cursor = stub.PollEvents(pb.PollEventsRequest(events_max=10**6), timeout=10).cursor
        keys = namespace.keys(range(3 * 16))
        watch = stub.WatchEvents(pb.WatchEventsRequest(epoch=1, cursor=cursor), timeout=20)
        namespace.put(keys, rows_of(3, 4096))
        seen = [next(watch).key for _ in range(3)]
        watch.cancel()
        assert seen == list(keys)
        watch = stub.WatchEvents(pb.WatchEventsRequest(epoch=1, cursor=cursor + 2), timeout=20)
        assert next(watch).key == keys.keys[2]
        watch.cancel()


class TestServing:
    def test_health_and_reflection_are_on(self, channel: grpc.Channel) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        for _ in range(600):
            for service in ("", "kvstored.v1.Kvstored"):
                told = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            if told.status == health_pb2.HealthCheckResponse.SERVING:
                break
            time.sleep(0.05)
        assert told.status == health_pb2.HealthCheckResponse.SERVING
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        names = {service.name for service in next(reflected).list_services_response.service}
        assert {"kvstored.v1.Kvstored", "grpc.health.v1.Health"} <= names

    def test_a_front_outlives_its_daemon_and_says_so(self) -> None:
        with tempfile.TemporaryDirectory(prefix="kvs") as folder:
            fake = FakeDaemon(Path(folder) / "s")
            front = start_front(fake.path, f"unix://{folder}/g")
            with Client(f"grpc+unix://{folder}/g") as client:
                with pytest.raises(Unavailable):
                    client.call("Stat", pb.StatRequest(), pb.StatResponse)
                fake.start()
                namespace = client.open_namespace(SPEC)
                keys = namespace.keys(range(16))
                assert namespace.put(keys, rows_of(1, 4096)).committed == 1
                fake.kill()
                with pytest.raises(Unavailable):
                    namespace.match(keys)
                fake.start()
                client.after_fork()  # as another process would: a session of its own
                assert namespace.put(keys, rows_of(1, 4096, 1)).committed == 1
                block = namespace.get(keys).blocks[0]
                assert block is not None
                assert np.array_equal(block[0], rows_of(1, 4096, 1)[0])
            assert (Path(folder) / "g").stat().st_mode & 0o777 == 0o600
            stop_front(front)
            fake.kill()

    @pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7439"])
    def test_tcp_beyond_loopback_is_refused_without_tls(self, listen: str) -> None:
        with pytest.raises(ConfigError, match="needs TLS"):
            check_is_loopback(listen)

    def test_the_refusal_ends_the_process_before_it_listens(self, daemon: FakeDaemon) -> None:
        front = start_front(daemon.path, "0.0.0.0:0")
        assert front.address == ""
        assert front.process.wait(15) != 0
        front.process.stdout.close()

    @pytest.mark.parametrize("listen", ["7439", "host", ":1", "127.0.0.1:port", "127.0.0.1:99999"])
    def test_addresses_that_are_none_are_said(self, listen: str) -> None:
        with pytest.raises(ConfigError):
            check_is_loopback(listen)

    @pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0", "unix:///x"])
    def test_loopback_needs_no_tls(self, listen: str) -> None:
        check_is_loopback(listen)

    def test_a_taken_port_is_an_error(self, daemon: FakeDaemon, front: Front) -> None:
        """gRPC said so in two lines of its own, and named no flag."""
        with pytest.raises(ConfigError, match=r"Address already in use; give another --listen"):
            check_is_free(front.address)
        other = start_front(daemon.path, front.address)
        assert other.process.wait(15) != 0
        other.process.stdout.close()
