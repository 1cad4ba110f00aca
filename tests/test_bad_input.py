"""A real daemon and whatever callers may send it, by the local channel and by gRPC: a typed error that says what to do, and nothing left behind."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from kvstored.client import Client, FillStatus, GroupKind, GroupSpec, Keys, Namespace
from kvstored.errors import (
    InvalidArgument,
    KvstoredError,
    NamespaceMismatch,
    NotFound,
)
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.frames import HEADER, PAYLOAD_BYTES_MAX
from kvstored.wire.methods import METHODS, PROJECTION, SEGMENT, Method
from kvstored.wire.packing import pack_u64
from tests.crash.blocks import content_of, is_right, spec_of
from tests.crash.served import ROOT, Served, environment, free_port, wait_until

SIZE = 4096
SEED = int(os.environ.get("KVSTORED_TEST_SEED", "0"))
SETTINGS = {
    "limits.quarantine": "1s",
    "limits.fill_ttl": "60s",
    "limits.resume_ttl": "1s",
    "dram.segment": "32MiB",
}
DYING = """
import sys
from kvstored.client import Client, Keys
from kvstored.pb import kvstored_pb2 as pb
from tests.crash.blocks import spec_of
with Client(sys.argv[1]) as client:
    namespace = client.open_namespace(spec_of(4096))
    session = client.call("OpenSession", pb.OpenSessionRequest(resume_ttl_ms=300), pb.OpenSessionResponse).token
    there = Keys.opaque([b"there".ljust(32)]).message()
    fresh = Keys.opaque([i.to_bytes(32, "big") for i in range(1000)]).message()
    filled = client.call("Reserve", pb.ReserveRequest(session=session, namespace=namespace.digest, keys=fresh), pb.ReserveResponse)
    assert filled.status == bytes([1]) * 1000
    for _ in range(1000):
        call = pb.AcquireRequest(session=session, namespace=namespace.digest, keys=there, lease_ttl_ms=60_000)
        assert client.call("Acquire", call, pb.AcquireResponse).lease
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    port = free_port()
    with Served(
        folder, dram="64MiB", disk="64MiB", listen=f"127.0.0.1:{port}", settings=SETTINGS
    ) as served:
        with Client(f"grpc://127.0.0.1:{port}") as client:
            wait_until(lambda: _answers(client), what="the front answers")
        yield served


@pytest.fixture(params=["local", "grpc"])
def client(served: Served, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Of a daemon that is the same one, and at rest, when the test is over."""
    pid = served.stat().daemon_pid
    with Client(address_of(served, request.param), timeout_s=20.0) as client:
        yield client
    check_at_rest(served, pid)


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return client.open_namespace(spec_of(SIZE))


def address_of(served: Served, channel: str) -> str:
    return served.address if channel == "local" else f"grpc://{served.listen}"


def check_at_rest(served: Served, pid: int) -> None:
    """Alive, and holding nothing for anyone."""
    wait_until(lambda: not _held(served.stat()), 20, f"nothing is held: {_held(served.stat())}")
    assert served.stat().daemon_pid == pid
    with Client(served.address) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        keys = [random.randbytes(32) for _ in range(2)]
        assert namespace.put(Keys.opaque(keys), [content_of(k, SIZE) for k in keys]).committed == 2
        got = namespace.get(Keys.opaque(keys))
        assert all(
            block and is_right(k, block[0]) for k, block in zip(keys, got.blocks, strict=True)
        )
        namespace.clear()


def _held(stat: pb.StatResponse) -> dict[str, int]:
    dram = stat.tiers[0]
    held = {
        "sessions": stat.sessions - 1,
        "fills": stat.fills,
        "leases": stat.leases,
        "pins": stat.pins,
        "requests": stat.requests,
        "leased": dram.leased_bytes,
        "pinned": dram.pinned_bytes,
        "quarantined": dram.quarantined_bytes,
    }
    return {name: count for name, count in held.items() if count}


def _answers(client: Client) -> bool:
    try:
        client.call("Stat", pb.StatRequest(), pb.StatResponse)
    except KvstoredError:
        return False
    return True


def keys_of(count: int) -> pb.Keys:
    """Not by the client's own class, which would refuse a bad batch itself."""
    packed = b"".join(i.to_bytes(32, "big") for i in range(count))
    return pb.Keys(packed=packed, key_bytes=32, unchained=True)


def send(client: Client, method: str, request: Message) -> Any:  # Any: the method's response
    response = next(m.response for m in METHODS if m.name == method)
    return client.call(method, request, response)


def with_keys(client: Client, digest: bytes, keys: pb.Keys) -> dict[str, Message]:
    """A good request of every method that takes keys, but for the given ones."""
    session = client.session()
    named: dict[str, Any] = {"namespace": digest, "keys": keys}
    return {
        "Match": pb.MatchRequest(**named),
        "Locate": pb.LocateRequest(**named),
        "Reserve": pb.ReserveRequest(session=session, **named),
        "Acquire": pb.AcquireRequest(session=session, **named),
        "Pin": pb.PinRequest(session=session, ttl_s=60, **named),
        "Prefetch": pb.PrefetchRequest(session=session, **named),
        "BeginRequest": pb.BeginRequestRequest(session=session, **named),
        "Remove": pb.RemoveRequest(**named),
        "Touch": pb.TouchRequest(session=session, **named),
        "Explain": pb.ExplainRequest(**named),
        "Tree": pb.TreeRequest(**named),
    }


@pytest.mark.parametrize(
    "keys",
    [
        pb.Keys(packed=bytes(32), key_bytes=0),
        pb.Keys(packed=bytes(28), key_bytes=7),
        pb.Keys(packed=bytes(130), key_bytes=65),
        pb.Keys(packed=bytes(33), key_bytes=32),
        pb.Keys(packed=bytes(64), key_bytes=2**32 - 1),
        keys_of(4097),
        keys_of(10_000),
    ],
    ids=["no-length", "too-short", "too-long", "cut", "absurd", "4097", "10000"],
)
def test_malformed_keys_and_large_batches_are_refused_by_every_method(
    client: Client, namespace: Namespace, keys: pb.Keys
) -> None:
    for method, request in with_keys(client, namespace.digest, keys).items():
        with pytest.raises(InvalidArgument, match="key"):
            send(client, method, request)


@pytest.mark.parametrize(
    "keys",
    [
        pb.Keys(packed=bytes(64), key_bytes=32, parent=bytes(31)),
        pb.Keys(packed=bytes(64), key_bytes=32, parents=bytes(32)),
        pb.Keys(packed=bytes(64), key_bytes=32, parents=bytes(65)),
    ],
    ids=["parent", "few-parents", "cut-parents"],
)
def test_parents_that_do_not_fit_their_keys_are_refused(
    client: Client, namespace: Namespace, keys: pb.Keys
) -> None:
    request = pb.ReserveRequest(session=client.session(), namespace=namespace.digest, keys=keys)
    with pytest.raises(InvalidArgument, match="parent"):
        send(client, "Reserve", request)


@pytest.mark.parametrize("digest", [b"", b"short", bytes(32), bytes(100)])
def test_an_unknown_namespace_is_not_found_by_every_method(client: Client, digest: bytes) -> None:
    for method, request in with_keys(client, digest, keys_of(1)).items():
        if method == "Tree" and not digest:
            continue  # of all namespaces
        with pytest.raises((NotFound, InvalidArgument), match="namespace"):
            send(client, method, request)
    for method, other in (
        ("RetireNamespace", pb.RetireNamespaceRequest(namespace=digest)),
        ("RemoveNamespace", pb.RemoveNamespaceRequest(namespace=digest)),
        ("Clear", pb.ClearRequest(namespace=digest)),
    ):
        if method == "Clear" and not digest:
            continue  # all namespaces
        with pytest.raises((NotFound, InvalidArgument), match="namespace"):
            send(client, method, other)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"sizes": pack_u64([SIZE, SIZE - 1])}, "size"),
        ({"sizes": pack_u64([SIZE, 2**64 - 1])}, "size"),
        ({"sizes": pack_u64([SIZE])}, "sizes"),
        ({"sizes": bytes(15)}, "sizes"),
        ({"groups": 2}, "group"),
        ({"groups": 2**63}, "group"),
        ({"shard": 1}, "shard"),
        ({"shard": 2**32 - 1}, "shard"),
        ({"last_valid_tokens": 17}, "valid_tokens"),
        ({"request_id": bytes(65)}, "request id"),
    ],
)
def test_wrong_sizes_groups_and_shards_of_a_put_are_refused(
    client: Client, namespace: Namespace, fields: dict[str, Any], fault: str
) -> None:
    request = pb.ReserveRequest(
        session=client.session(), namespace=namespace.digest, keys=keys_of(2), **fields
    )
    with pytest.raises(InvalidArgument, match=fault):
        send(client, "Reserve", request)


@pytest.mark.parametrize("session", [b"", b"short", bytes(16)])
def test_a_session_that_does_not_exist_is_told_so(
    client: Client, namespace: Namespace, session: bytes
) -> None:
    keys, digest = keys_of(1), namespace.digest
    for method, request in (
        ("Reserve", pb.ReserveRequest(session=session, namespace=digest, keys=keys)),
        ("Acquire", pb.AcquireRequest(session=session, namespace=digest, keys=keys)),
        ("Commit", pb.CommitRequest(session=session)),
        ("Abort", pb.AbortRequest(session=session)),
        ("Renew", pb.RenewRequest(session=session)),
        ("Release", pb.ReleaseRequest(session=session)),
        ("CloseSession", pb.CloseSessionRequest(session=session)),
    ):
        with pytest.raises((NotFound, InvalidArgument), match="session"):
            send(client, method, request)


def test_rights_that_do_not_exist_are_lost_or_not_found(
    client: Client, namespace: Namespace
) -> None:
    session, none = client.session(), [0, 1, 2**64 - 1]
    commit = pb.CommitRequest(session=session, fills=pack_u64(none), checksums=pack_u64(none))
    assert send(client, "Commit", commit).status == bytes([FillStatus.LOST] * 3)
    send(client, "Abort", pb.AbortRequest(session=session, fills=pack_u64(none)))
    release = pb.ReleaseRequest(session=session, leases=pack_u64(none))
    assert send(client, "Release", release).lost == bytes([1] * 3)
    renew = pb.RenewRequest(session=session, leases=pack_u64(none), lease_ttl_ms=2**32 - 1)
    assert send(client, "Renew", renew).lost == bytes([1] * 3)
    assert not send(client, "Unpin", pb.UnpinRequest(pin=2**64 - 1)).found
    missing: list[tuple[str, Message]] = [
        ("JobStatus", pb.JobStatusRequest(job=99_999)),
        ("CancelJob", pb.CancelJobRequest(job=99_999)),
        ("CompleteRequest", pb.CompleteRequestRequest(session=session, request_id=b"none")),
        ("ExtendRequest", pb.ExtendRequestRequest(session=session, request_id=b"none")),
    ]
    for method, request in missing:
        with pytest.raises(NotFound):
            send(client, method, request)


@pytest.mark.parametrize("packed", [bytes(7), bytes(9), bytes(8 * 65_537)])
def test_handles_that_are_cut_or_too_many_are_refused(client: Client, packed: bytes) -> None:
    session = client.session()
    for method, request in (
        ("Commit", pb.CommitRequest(session=session, fills=packed)),
        ("Abort", pb.AbortRequest(session=session, fills=packed)),
        ("Release", pb.ReleaseRequest(session=session, leases=packed)),
        ("Renew", pb.RenewRequest(session=session, leases=packed)),
    ):
        with pytest.raises(InvalidArgument):
            send(client, method, request)


def test_a_commit_with_too_few_checksums_changes_nothing(
    client: Client, namespace: Namespace
) -> None:
    session = client.session()
    reserve = pb.ReserveRequest(session=session, namespace=namespace.digest, keys=keys_of(3))
    fills = send(client, "Reserve", reserve).fills
    for checksums in (b"", bytes(7), bytes(16), bytes(32)):
        commit = pb.CommitRequest(session=session, fills=fills, checksums=checksums)
        with pytest.raises(InvalidArgument, match="checksum"):
            send(client, "Commit", commit)
    send(client, "Abort", pb.AbortRequest(session=session, fills=fills))


def test_a_namespace_that_makes_no_sense_is_refused(client: Client) -> None:
    good = spec_of(SIZE)
    group = good.groups[0]
    for bad in (
        replace(good, model=""),
        replace(good, model="m" * 100_000),
        replace(good, groups=()),
        replace(good, groups=(group, group)),
        replace(good, groups=tuple(replace(group, name=f"g{i}") for i in range(100))),
        replace(good, groups=(replace(group, bytes_per_block=0),)),
        replace(good, groups=(replace(group, bytes_per_block=2**63),)),
        replace(good, groups=(replace(group, bytes_per_block=(1 << 30) + 16),)),
        replace(good, tp=100_000),
        replace(good, tenant="somebody-else"),
        replace(good, flops_base=float("nan")),
        replace(good, block_tokens=2**31),
        replace(
            good,
            block_tokens=100,
            groups=(GroupSpec("csa", GroupKind.COMPRESSED, SIZE, ratio=64),),
        ),
    ):
        with pytest.raises(InvalidArgument):
            client.open_namespace(bad)


def test_an_alias_with_another_meaning_is_refused_with_the_difference(
    client: Client, namespace: Namespace
) -> None:
    with pytest.raises(NamespaceMismatch, match="dtype"):
        client.open_namespace(replace(spec_of(SIZE), dtype="fp8"))


def test_a_block_larger_than_the_store_finds_no_space(client: Client) -> None:
    namespace = client.open_namespace(spec_of(128 << 20))
    key = b"large".ljust(32)
    assert namespace.put(Keys.opaque([key]), [bytes(128 << 20)]).status == (FillStatus.NO_SPACE,)
    send(client, "RemoveNamespace", pb.RemoveNamespaceRequest(namespace=namespace.digest))


def test_extreme_times_and_counts_are_bounded(client: Client, namespace: Namespace) -> None:
    session, most = client.session(), 2**32 - 1
    digest, keys = namespace.digest, keys_of(1)
    for method, request in (
        ("Acquire", pb.AcquireRequest(session=session, namespace=digest, keys=keys, lease_ttl_ms=most, deadline_ms=most)),
        ("Tree", pb.TreeRequest(nodes_max=most)),
        ("Leases", pb.LeasesRequest(max=most)),
        ("Verify", pb.VerifyRequest(blocks_max=most, cursor=2**64 - 1)),
        ("PollEvents", pb.PollEventsRequest(cursor=2**64 - 1, epoch=most, events_max=most)),
        ("Prefetch", pb.PrefetchRequest(session=session, namespace=digest, keys=keys, deadline_ms=most)),
    ):  # fmt: skip
        send(client, method, request)
    for ttl_s in (0, most):
        pin = pb.PinRequest(session=session, namespace=digest, keys=keys, ttl_s=ttl_s)
        with pytest.raises(InvalidArgument, match="time to live"):
            send(client, "Pin", pin)


# ---- whatever the fields hold


def edges(rng: random.Random, given: Any, repeats: int = 3) -> Any:
    """A message of this kind with fields drawn from what tends to break things."""
    message: Any = given.__class__()
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            continue
        many = field.is_repeated
        values = [_edge(rng, field, message) for _ in range(rng.randint(0, repeats) if many else 1)]
        target = getattr(message, field.name)
        if field.type == field.TYPE_MESSAGE and many:
            for value in values:
                target.add().CopyFrom(value)
        elif field.type == field.TYPE_MESSAGE:
            target.CopyFrom(values[0])
        elif many:
            target.extend(values)
        else:
            setattr(message, field.name, values[0])
    return message


def _edge(rng: random.Random, field: Any, message: Message) -> Any:
    if field.type == field.TYPE_MESSAGE:
        child = getattr(message, field.name)
        return edges(rng, child.add() if field.is_repeated else child)
    if field.type == field.TYPE_BYTES:
        return rng.randbytes(rng.choice([0, 1, 7, 8, 16, 31, 32, 64, 100, 4096]))
    if field.type == field.TYPE_STRING:
        return rng.choice(["", "x", "dram", "default", "\x00", "é" * 300])
    if field.type == field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        return rng.choice([0.0, -1.0, 1e300, float("nan"), float("inf")])
    if field.type == field.TYPE_ENUM:
        return rng.choice([0, 1, 2, 77])
    bits = 64 if field.type in (field.TYPE_UINT64, field.TYPE_INT64) else 32
    return rng.choice([0, 1, 2, 8, 16, 32, 4096, 2**bits - 1, 2 ** (bits - 1)])


@pytest.mark.parametrize("part", range(4))
def test_fields_of_any_value_get_an_answer_or_a_typed_error(served: Served, part: int) -> None:
    pid = served.stat().daemon_pid
    for method in METHODS[part::4]:
        if method not in (SEGMENT, PROJECTION):
            _send_edges(served, method)
    _forget_the_rest(served)
    check_at_rest(served, pid)


def _send_edges(served: Served, method: Method) -> None:
    """`KvstoredError` itself is what a bug in the daemon looks like."""
    rng = random.Random(f"{SEED}:{method.name}")
    with Client(served.address, timeout_s=5.0) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        token = client.session()
        for _ in range(60):
            request: Any = edges(rng, method.request())
            _put_right(rng, request, token, namespace.digest)
            if method.name == "PollEvents":
                request.wait_ms = 0
            if method.name == "OpenSession":
                request.resume_ttl_ms = min(request.resume_ttl_ms, 100)
            fault = _fault_of(lambda: client.call(method.name, request, method.response))  # noqa: B023 - called at once
            assert fault is not KvstoredError, (request, served.tail())
            if method.name in ("CloseSession", "RemoveNamespace"):
                token, namespace = client.session(), client.open_namespace(spec_of(SIZE))


def _fault_of(call: Callable[[], object]) -> type[KvstoredError] | None:
    try:
        call()
    except KvstoredError as error:
        return type(error)
    return None


def _put_right(rng: random.Random, message: Any, token: bytes, digest: bytes) -> None:
    """Most of the time name the session and the namespace that are there, and keys that could be: so that errors lie deeper."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.2:
            continue
        if field.name == "session":
            message.session = token
        elif field.name == "namespace" and field.type == field.TYPE_BYTES:
            message.namespace = digest
        elif field.name in ("reserve", "next") and message.HasField(field.name):
            _put_right(rng, getattr(message, field.name), token, digest)
        elif field.name == "keys" and field.type == field.TYPE_MESSAGE:
            message.keys.CopyFrom(keys_of(rng.choice([0, 1, 3])))


def _forget_the_rest(served: Served) -> None:
    """Pins and namespaces are nobody's in particular: they would stay."""
    with Client(served.address) as client:
        for held in send(client, "Leases", pb.LeasesRequest()).leases:
            if held.kind == "pin":
                send(client, "Unpin", pb.UnpinRequest(pin=held.id))


# ---- the socket


def connected(served: Served) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(str(served.socket))
    return sock


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: kvstored\r\n\r\n",
        bytes(4096),
        b"\xff" * 4096,
        HEADER.pack(PAYLOAD_BYTES_MAX + 1, 1, 0, 1) + bytes(1000),
        HEADER.pack(2**32 - 1, 1, 0, 1),
        HEADER.pack(100, 1, 0, 1) + bytes(50),
        HEADER.pack(8, 1, 0, 1)[:5],
        HEADER.pack(4, 60_000, 0, 1) + b"\xff" * 4,
        HEADER.pack(4, 1, 65_535, 1) + b"\xff" * 4,
    ],
)
def test_garbage_on_the_local_socket_ends_its_connection_and_nothing_else(
    served: Served, sent: bytes
) -> None:
    pid = served.stat().daemon_pid
    with connected(served) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    check_at_rest(served, pid)


def test_random_garbage_from_many_peers_at_once_is_survived(served: Served) -> None:
    rng = random.Random(f"{SEED}:garbage")
    pid = served.stat().daemon_pid
    peers = [connected(served) for _ in range(200)]
    for _ in range(5):
        for peer in peers:
            try:
                peer.sendall(rng.randbytes(rng.randint(1, 2000)))
            except OSError:
                continue  # it was closed on us, as it should be
    assert served.stat().daemon_pid == pid
    for peer in peers:
        peer.close()
    check_at_rest(served, pid)


def test_half_sent_messages_hold_up_nobody(served: Served) -> None:
    pid = served.stat().daemon_pid
    peers = [connected(served) for _ in range(100)]
    for peer in peers:
        peer.sendall(HEADER.pack(1 << 20, 1, 0, 1) + bytes(100_000))
    begun_s = time.monotonic()
    check_at_rest(served, pid)
    assert time.monotonic() - begun_s < 8, "others wait for half a message"
    for peer in peers:
        peer.close()


def test_an_oversize_grpc_message_is_refused(served: Served) -> None:
    pid = served.stat().daemon_pid
    with Client(address_of(served, "grpc")) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        keys = pb.Keys(packed=bytes(2 * PAYLOAD_BYTES_MAX), key_bytes=32)
        large = pb.MatchRequest(namespace=namespace.digest, keys=keys)
        with pytest.raises(KvstoredError) as refused:
            send(client, "Match", large)
        assert type(refused.value) is not KvstoredError
    check_at_rest(served, pid)


# ---- clients that die


@pytest.mark.parametrize("channel", ["local", "grpc"])
def test_a_client_that_dies_with_a_thousand_leases_and_fills_leaves_none(
    served: Served, channel: str
) -> None:
    pid = served.stat().daemon_pid
    with Client(served.address) as client:
        key = b"there".ljust(32)
        namespace = client.open_namespace(spec_of(SIZE))
        assert namespace.put(Keys.opaque([key]), [content_of(key, SIZE)]).stored == 1
    dying = subprocess.Popen(
        [sys.executable, "-c", DYING, address_of(served, channel)],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert dying.stdout is not None
    assert dying.stdout.readline() == b"ready\n"
    stat = served.stat()
    assert (stat.leases, stat.fills) == (1000, 1000)
    dying.send_signal(signal.SIGKILL)
    dying.communicate(timeout=10)
    check_at_rest(served, pid)


def test_a_client_that_dies_in_the_middle_of_a_call_leaves_nothing(served: Served) -> None:
    pid = served.stat().daemon_pid
    request = pb.PollEventsRequest(cursor=2**62, wait_ms=50_000).SerializeToString()
    number = next(m.number for m in METHODS if m.name == "PollEvents")
    peers = [connected(served) for _ in range(50)]
    for peer in peers:
        peer.sendall(HEADER.pack(len(request), number, 0, 1) + request)
    for peer in peers:
        peer.close()
    check_at_rest(served, pid)
