"""A client of the bulk channel by hand, that may say anything, and settings of fronts for tests."""

import socket
import time
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message

from kvstored.pb import kvstored_pb2 as pb
from kvstored.pb import kvstored_pb2_grpc as stubs
from kvstored.wire.bulk import GREETING, ID_BYTES
from kvstored.wire.frames import HEADER, HEADER_BYTES, frame
from kvstored.wire.methods import BY_NAME
from kvstored.wire.status import error_of

ACQUIRE, RESERVE, KEEP_ALIVE = (
    BY_NAME[name].number for name in ("Acquire", "Reserve", "KeepAlive")
)


@dataclass
class Peer:
    """After its greeting; `token` is of a session that gRPC opened."""

    connected: socket.socket
    token: bytes
    greeting: bytes = b""
    told: pb.OpenSessionResponse = field(default_factory=pb.OpenSessionResponse)

    def send(self, method: int, call: int, request: Message | bytes, deadline: int = 2000) -> None:
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        self.connected.sendall(frame(method, deadline, call, payload))

    def receive(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            more = self.connected.recv(count - len(received))
            if not more:
                raise EOFError
            received += more
        return received

    def answer(self) -> tuple[int, int, int, bytes]:
        payload_bytes, method, status, call = HEADER.unpack(self.receive(HEADER_BYTES))
        return method, status, call, self.receive(payload_bytes)

    def refusal(self) -> str:
        """The class of the error that comes next."""
        _, status, _, payload = self.answer()
        assert status, "it was no refusal"
        return type(error_of(status, payload)).__name__

    def is_ended(self) -> bool:
        try:
            return self.connected.recv(1) == b""
        except ConnectionResetError:
            return True


def peer(address: str, token: bytes | None = None, *, hello: bool = True) -> Peer:
    """`token`: another than that of its session."""
    with grpc.insecure_channel(address) as channel:
        told = stubs.KvstoredStub(channel).OpenSession(
            pb.OpenSessionRequest(client="peer"), timeout=10
        )
    connected = socket.create_connection((told.bulk_host, told.bulk_port), 10)
    made = Peer(connected, told.token, told=told)
    made.greeting = made.receive(len(GREETING) + ID_BYTES)
    if hello:
        made.send(KEEP_ALIVE, 1, pb.KeepAliveRequest(session=token or told.token))
        if token is None:
            assert made.answer()[:3] == (KEEP_ALIVE, 0, 1)
    return made


def eventually(stub: stubs.KvstoredStub, *, fills: int, leases: int) -> None:
    for _ in range(400):
        stat = stub.Stat(pb.StatRequest(), timeout=10)
        if (stat.fills, stat.leases) == (fills, leases):
            return
        time.sleep(0.02)
    raise AssertionError(f"fills={stat.fills} leases={stat.leases}")
