"""The local channel against peers that behave badly, over real sockets and one fake daemon process."""

import array
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.client.connection import Connection
from kvstored.errors import (
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    KvstoredError,
    NotFound,
    Unavailable,
)
from kvstored.pb import kvstored_pb2 as pb
from kvstored.transport.sockets import listen
from kvstored.wire import status
from kvstored.wire.frames import HEADER, PAYLOAD_BYTES_MAX, frame
from kvstored.wire.methods import BY_NAME

from .fake_daemon import FakeDaemon

STAT = BY_NAME["Stat"].number


@pytest.fixture(scope="module")
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        fake = FakeDaemon(Path(folder) / "s")
        fake.start()
        yield fake
        assert fake.stop() == 0
        assert not fake.path.exists()


@pytest.fixture
def peer(daemon: FakeDaemon) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(daemon.path))
        yield raw
    # Whatever the peer did, the daemon answers, and no connection stays behind.
    connection = Connection(str(daemon.path), 5)
    for _ in range(1000):
        stat = connection.call("Stat", pb.StatRequest(), pb.StatResponse, 5)
        if stat.counters["connections"] == 1:
            break
        time.sleep(0.02)
    assert stat.counters["connections"] == 1
    connection.close()


def answer_of(raw: socket.socket) -> tuple[int, int, bytes]:
    header = raw.recv(HEADER.size, socket.MSG_WAITALL)
    payload_bytes, _, number, call = HEADER.unpack(header)
    payload = raw.recv(payload_bytes, socket.MSG_WAITALL) if payload_bytes else b""
    return number, call, payload


def is_hung_up(raw: socket.socket) -> bool:
    try:
        return raw.recv(1) == b""
    except ConnectionResetError:
        return True


def test_text_instead_of_frames_closes_the_connection(peer: socket.socket) -> None:
    peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert is_hung_up(peer)


@pytest.mark.parametrize("seed", range(20))
def test_random_garbage_is_survived(peer: socket.socket, seed: int) -> None:
    peer.sendall(random.Random(seed).randbytes(1 << random.Random(seed).randrange(16)))
    peer.shutdown(socket.SHUT_WR)


def test_an_oversize_frame_closes_the_connection_before_it_is_read(peer: socket.socket) -> None:
    peer.sendall(HEADER.pack(PAYLOAD_BYTES_MAX + 1, STAT, 0, 1))
    assert is_hung_up(peer)


@pytest.mark.parametrize("sent", [1, 11, 12, 15])
def test_a_half_sent_message_is_given_up_after_a_while(peer: socket.socket, sent: int) -> None:
    peer.sendall(frame(STAT, 0, 1, b"\x00" * 100)[:sent])
    began = time.perf_counter()
    assert is_hung_up(peer)
    assert time.perf_counter() - began < 20


def test_a_message_in_single_bytes_is_a_message(peer: socket.socket) -> None:
    for byte in frame(STAT, 0, 7, b""):
        peer.sendall(bytes([byte]))
    number, call, payload = answer_of(peer)
    assert (number, call) == (status.OK, 7)
    assert pb.StatResponse.FromString(payload).epoch == 1


def test_messages_sent_at_once_are_answered_in_order(peer: socket.socket) -> None:
    peer.sendall(b"".join(frame(STAT, 0, call, b"") for call in range(1, 500)))
    assert [answer_of(peer)[1] for _ in range(1, 500)] == list(range(1, 500))


def test_unknown_methods_and_unreadable_requests_are_typed_errors(peer: socket.socket) -> None:
    peer.sendall(frame(60_000, 0, 1, b""))
    number, _, payload = answer_of(peer)
    assert isinstance(status.error_of(number, payload), InvalidArgument)
    peer.sendall(frame(BY_NAME["Match"].number, 0, 2, b"\xff\xff\xff"))
    number, _, payload = answer_of(peer)
    assert isinstance(status.error_of(number, payload), InvalidArgument)
    peer.sendall(frame(STAT, 0, 3, b""))
    assert answer_of(peer)[:2] == (status.OK, 3)


def test_a_peer_that_leaves_during_a_call_ends_the_call(peer: socket.socket) -> None:
    request = pb.PollEventsRequest(wait_ms=600_000)
    peer.sendall(frame(BY_NAME["PollEvents"].number, 0, 1, request.SerializeToString()))
    time.sleep(0.05)


def test_descriptors_that_a_peer_sends_are_ignored(peer: socket.socket) -> None:
    with tempfile.TemporaryFile() as file:
        ancillary = array.array("i", [file.fileno()])
        peer.sendmsg([frame(STAT, 0, 1, b"")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ancillary)])
    assert answer_of(peer)[0] == status.OK


def test_an_answer_that_nobody_takes_ends_the_connection(peer: socket.socket) -> None:
    peer.settimeout(0.2)
    try:
        for call in range(1, 1_000_000):
            peer.sendall(frame(STAT, 0, call, b""))
    except (TimeoutError, BrokenPipeError, ConnectionResetError):
        return
    pytest.fail("the daemon takes without end")


def test_connections_beyond_the_bound_are_refused_and_the_rest_served(daemon: FakeDaemon) -> None:
    held = [Connection(str(daemon.path), 5) for _ in range(65)]
    try:
        served = [is_served(connection) for connection in held]
        # The daemon may still count a connection or two of the tests before.
        assert 60 <= sum(served) <= 64
        assert served == sorted(served, reverse=True)
        assert is_served(held[0])
    finally:
        for connection in held:
            connection.close()


def is_served(connection: Connection) -> bool:
    try:
        connection.call("Stat", pb.StatRequest(), pb.StatResponse, 5)
    except Unavailable:
        return False
    return True


class TestConnection:
    @pytest.fixture
    def connection(self, daemon: FakeDaemon) -> Iterator[Connection]:
        for _ in range(1000):
            made = Connection(str(daemon.path), 5)
            try:
                made.call("Stat", pb.StatRequest(), pb.StatResponse, 5)
                break
            except Unavailable:
                made.close()
                time.sleep(0.02)
        yield made
        made.close()

    @pytest.mark.parametrize("known", status.STATUSES, ids=lambda s: s.error.__name__)
    def test_every_error_arrives_as_its_class(
        self, connection: Connection, known: status.Status
    ) -> None:
        with pytest.raises(KvstoredError, match=f"as asked job={known.number}") as raised:
            connection.call(
                "JobStatus", pb.JobStatusRequest(job=known.number), pb.JobStatusResponse, 5
            )
        assert type(raised.value) is known.error
        assert connection.is_reusable

    def test_a_bug_in_the_daemon_is_an_error_without_its_details(
        self, connection: Connection
    ) -> None:
        with pytest.raises(KvstoredError, match="internal error"):
            connection.call("JobStatus", pb.JobStatusRequest(job=0), pb.JobStatusResponse, 5)
        assert connection.is_reusable

    def test_the_daemon_keeps_the_deadline(self, connection: Connection) -> None:
        began = time.perf_counter()
        with pytest.raises(DeadlineExceeded, match="method=PollEvents"):
            connection.call(
                "PollEvents", pb.PollEventsRequest(wait_ms=60_000), pb.PollEventsResponse, 0.2
            )
        assert time.perf_counter() - began < 10
        assert connection.is_reusable

    def test_a_segment_comes_with_a_descriptor_of_its_own(self, connection: Connection) -> None:
        facts, descriptor = connection.segment(0, 5)
        assert os.fstat(descriptor).st_size == facts.bytes > 0
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)
        with pytest.raises(NotFound):
            connection.segment(5, 5)
        assert connection.is_reusable

    def test_a_large_answer_and_a_too_large_request(self, connection: Connection) -> None:
        with pytest.raises(InvalidArgument, match="too large"):
            connection.call(
                "Match",
                pb.MatchRequest(namespace=b"x" * PAYLOAD_BYTES_MAX),
                pb.MatchResponse,
                5,
            )
        assert connection.is_reusable
        big = pb.MatchRequest(namespace=b"x" * (4 << 20))
        with pytest.raises(NotFound):
            connection.call("Match", big, pb.MatchResponse, 5)


class TestClientOfABadDaemon:
    """What a client does with answers that no daemon of ours gives."""

    @pytest.fixture
    def server(self) -> Iterator[socket.socket]:
        with (
            tempfile.TemporaryDirectory(prefix="kvs") as folder,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(f"{folder}/s")
            listener.listen()
            listener.settimeout(5)
            yield listener

    @pytest.mark.parametrize(
        ("answer", "error"),
        [
            (HEADER.pack(1 << 30, STAT, 0, 1), Corrupt),
            (HEADER.pack(0, STAT, 0, 99), Corrupt),
            (HEADER.pack(0, STAT, 0, 1) + b"tail", Corrupt),
            (HEADER.pack(3, STAT, 0, 1) + b"\xff\xff\xff", Corrupt),
            (HEADER.pack(100, STAT, 0, 1) + b"cut", Unavailable),
            (b"", Unavailable),
        ],
    )
    def test_it_is_a_typed_error(
        self, server: socket.socket, answer: bytes, error: type[Exception]
    ) -> None:
        connection = Connection(server.getsockname(), 5)
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(answer)
            accepted.shutdown(socket.SHUT_WR)
            with pytest.raises(error):
                connection.call("Stat", pb.StatRequest(), pb.StatResponse, 5)
        assert not connection.is_reusable
        connection.close()

    def test_silence_is_a_deadline(
        self, server: socket.socket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstored.client.connection._GRACE_S", 0.1)
        connection = Connection(server.getsockname(), 5)
        with pytest.raises(DeadlineExceeded):
            connection.call("Stat", pb.StatRequest(), pb.StatResponse, 0.1)
        assert not connection.is_reusable
        connection.close()


class TestListening:
    def test_a_path_too_long_or_taken_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(KvstoredError, match="too long bytes="):
            listen(Path("/tmp/" + "x" * 120), 0o600)
        with tempfile.TemporaryDirectory(prefix="kvs") as folder:
            file = Path(folder) / "s"
            file.write_text("mine")
            with pytest.raises(KvstoredError, match="no socket"):
                listen(file, 0o600)
            assert file.read_text() == "mine"

    def test_a_dead_daemon_s_socket_is_replaced_and_the_mode_is_as_asked(self) -> None:
        with tempfile.TemporaryDirectory(prefix="kvs") as folder:
            path = Path(folder) / "s"
            listen(path, 0o600).close()
            with listen(path, 0o660):
                assert path.stat().st_mode & 0o777 == 0o660
