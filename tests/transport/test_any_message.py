"""Whatever a client sends, it is answered or refused with a typed error, and the books stay right.

Messages are made from their descriptors, so that a new method or field is sent too: mostly with values that mean something to the daemon
(keys, sessions, fills, places, leases of this or another caller), now and then with any. KVSTORED_TEST_SEED (a number) tries others.
"""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import xxhash
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.methods import METHODS, Method
from kvstored.wire.packing import pack_u64, unpack_u64
from tests.store.world import BLOCK_BYTES
from tests.transport.test_service import KEY_BYTES, Peer, namespace_of, serving

SEED = int(os.environ.get("KVSTORED_TEST_SEED", "0"))
CALLS, CHECK_EVERY, REOPEN_EVERY = 1500, 20, 20
KEYS, BATCH_MAX = 50, 6
DEADLINE_S = 2.0
"""Of a call: an event poll may wait for minutes."""
ZEROS = xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES))
"""Nothing is ever written."""
NUMBERS = (0, 0, 1, 1, 2, 3, 16, 100, 2**31 - 1)
MEANT, FOLLOWED = 0.97, 0.5
RARE = (
    "CloseSession",
    "RemoveNamespace",
    "RetireNamespace",
    "Clear",
    "OpenSession",
    "Remove",
    "Abort",
)
"""Each ends what the others build on."""
COMMON = ("Reserve", "SetAside", "Acquire")

Value = Any
"""What a field takes; protobuf checks it."""


class Anybody:
    """Sends anything. Handles that it hears of it uses again."""

    def __init__(self, peer: Peer, rng: random.Random) -> None:
        self.peer = peer
        self.rng = rng
        self.tokens = [peer.token, bytes(16)]
        self.digests = [peer.digest]
        self.handles = [1]
        self.runs = [[1]]
        """Fills or places that were granted together."""
        self.run = [1]
        self.done: Counter[str] = Counter()
        self.names = [b"r1", b"r2"]
        self.count = 1
        """Keys of the message that is being made: most packed fields have as many values."""

    async def open_all(self) -> None:
        """What is open already stays as it is."""
        group = pb.Group(name="kv", kind=pb.LINEAR, bytes_per_block=BLOCK_BYTES)
        window = pb.Group(name="win", kind=pb.WINDOW, bytes_per_block=4096, window_tokens=32)
        self.digests = []
        for namespace in (
            namespace_of(),
            namespace_of(model="two", groups=[group, window]),
            namespace_of(model="mutable", mutable=True),
            namespace_of(
                model="shards",
                tp=2,
                groups=[
                    pb.Group(name="kv", kind=pb.LINEAR, bytes_per_block=BLOCK_BYTES, sharded=True)
                ],
            ),
        ):
            request = pb.OpenNamespaceRequest(namespace=namespace)
            self.digests.append((await self.peer.call("OpenNamespace", request)).digest)
        for i, token in enumerate(self.tokens):
            if await self.send("KeepAlive", pb.KeepAliveRequest(session=token)) is None:
                opened = await self.peer.call("OpenSession", pb.OpenSessionRequest(protocol=1))
                self.tokens[i] = opened.token

    async def send_one(self, method: Method) -> None:
        """And often, after space was granted, what uses it."""
        self.run = self.rng.choice(self.runs)
        self.count = len(self.run) if self.rng.random() < 0.7 else self.rng.randint(0, BATCH_MAX)
        request = self.message(method.request)
        answer = await self.send(method.name, request)
        if answer is None:
            return
        self.hear(answer)
        if self.rng.random() > (0.95 if isinstance(request, pb.SetAsideRequest) else FOLLOWED):
            return
        self.count = len(self.run)
        sums = pack_u64([ZEROS] * self.count)
        if isinstance(request, pb.ReserveRequest):
            fills = pack_u64(self.run)
            commit = pb.CommitRequest(session=request.session, fills=fills, checksums=sums)
            await self.send("Commit", commit)
        elif isinstance(request, pb.SetAsideRequest):
            keys = pb.Keys()
            self.fill_keys(keys)
            names = {"session": request.session, "namespace": request.namespace}
            reserve = pb.ReserveRequest(**names, keys=keys)
            put = pb.PutAsideRequest(reserve=reserve, places=pack_u64(self.run), checksums=sums)
            await self.send("PutAside", put)
            if self.rng.random() < 0.95:  # else its session holds all that it may
                give_back = pb.AbortRequest(session=request.session, fills=pack_u64(self.run))
                await self.send("Abort", give_back)

    async def send(self, name: str, request: Message) -> Message | None:
        """None where it was refused."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer: Message = await self.peer.call(name, request)
        except (KvstoredError, TimeoutError):
            return None
        except Exception as error:
            raise AssertionError(f"{name} failed by {error!r} of\n{request}") from error
        for field, value in answer.ListFields():
            if field.name == "status" and isinstance(value, bytes):
                self.done += Counter(f"{name} {status}" for status in value)
            elif field.name == "stored":
                self.done["stored"] += bool(value)
        return answer

    def hear(self, answer: Message) -> None:
        for field, value in answer.ListFields():
            if field.name in ("lease", "pin", "job"):
                self.handles.append(value)
            elif field.name == "fills" and isinstance(value, bytes):
                self.run = [fill for fill in unpack_u64(value, "fills").tolist() if fill]
        if isinstance(answer, pb.SetAsideResponse) and answer.first:
            self.run = [answer.first + i for i in range(len(answer.extents) // 24)]
        self.runs = [*self.runs[-12:], self.run]
        self.handles = [*self.handles[-40:], *self.run[:1]]

    def message(self, kind: type[Message]) -> Message:
        made = kind()
        if isinstance(made, pb.Keys):
            self.fill_keys(made)
            return made
        for field in made.DESCRIPTOR.fields:
            is_needed = field.name in (
                "session",
                "namespace",
                "keys",
                "reserve",
                "places",
                "checksums",
                "fills",
                "count",
            )
            if self.rng.random() < (0.99 if is_needed else 0.06):
                self.fill_field(made, field)
        return made

    def fill_field(self, made: Message, field: FieldDescriptor) -> None:
        if field.message_type is not None:
            kind = GetMessageClass(field.message_type)
            inner = self.message(kind)
            if field.is_repeated:
                getattr(made, field.name).append(inner)
            else:
                getattr(made, field.name).CopyFrom(inner)
        elif field.is_repeated:
            getattr(made, field.name).extend([self.value(field), self.value(field)])
        else:
            setattr(made, field.name, self.value(field))

    def value(self, field: FieldDescriptor) -> Value:
        rng, is_meant = self.rng, self.rng.random() < MEANT
        if field.type == field.TYPE_BYTES:
            return (
                self.meant_bytes(field.name)
                if is_meant
                else rng.randbytes(rng.choice((0, 8, 31, 32)))
            )
        if field.type == field.TYPE_STRING:
            return rng.choice(("", "dram", "kv", "tool", "x" * 300))
        if field.type == field.TYPE_BOOL:
            return rng.random() < 0.3
        if field.type == field.TYPE_ENUM:
            return rng.choice((0, 1, 2, 77))
        if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
            return rng.choice((0.0, 0.5, -1.0, float("inf"), float("nan")))
        if field.name in ("pin", "job", "lease") and is_meant:
            return rng.choice(self.handles)
        return rng.choice(NUMBERS)

    def meant_bytes(self, name: str) -> bytes:
        rng = self.rng
        if name in ("session", "resume_token", "token"):
            return rng.choice(self.tokens)
        if name in ("namespace", "digest"):
            return rng.choice(self.digests)
        if name == "request_id":
            return rng.choice(self.names)
        if name in ("fills", "places", "leases", "release"):
            chosen = (
                self.run[: self.count] if rng.random() < 0.9 else rng.choices(self.handles, k=3)
            )
            return pack_u64(chosen)
        if name == "sizes":
            return rng.choice(
                (b"", pack_u64([BLOCK_BYTES] * self.count), pack_u64([0] * self.count))
            )
        return pack_u64([rng.choice((0, ZEROS, 2**64 - 1)) for _ in range(self.count)])

    def fill_keys(self, keys: pb.Keys) -> None:
        """Runs of one path mostly, with parents that are right, missing, of another path, or among the keys themselves."""
        rng, first = self.rng, self.rng.randrange(KEYS)
        numbers = [first + i for i in range(self.count)]
        if rng.random() < 0.2:
            numbers = [rng.randrange(KEYS) for _ in numbers]
        keys.packed = b"".join(map(_key, numbers))
        keys.key_bytes = KEY_BYTES if rng.random() < 0.97 else rng.choice((0, 7, 16, 65))
        chosen = rng.random()
        if chosen < 0.5 and first:
            keys.parent = _key(first - 1)
        elif chosen < 0.7:
            keys.parent = _key(rng.randrange(KEYS))
        elif chosen < 0.8:
            keys.parents = b"".join(_key(rng.randrange(KEYS)) for _ in numbers)
        keys.unchained = rng.random() < 0.1
        if rng.random() < 0.1:
            keys.extra_keys.append(b"salt")


def _key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_sent_the_books_stay_right(tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"{SEED}:{seed}")
    weights = [0.1 if m.name in RARE else 8.0 if m.name in COMMON else 1.0 for m in METHODS]

    async def test(peer: Peer) -> None:
        anybody = Anybody(peer, rng)
        await anybody.open_all()
        for number in range(CALLS):
            (method,) = rng.choices(METHODS, weights)
            await anybody.send_one(method)
            if number % REOPEN_EVERY == 0:
                await anybody.open_all()
            if number % CHECK_EVERY == 0:
                peer.world.shell.catalog.check()
            if rng.random() < 0.02:
                await peer.world.janitor.write_back_once()
            if rng.random() < 0.02:
                peer.world.clock.advance(rng.choice((0.1, 40.0)))
                await peer.world.janitor.expire_once()
        hits, stored = (anybody.done[each] for each in ("Acquire 1", "Commit 5"))
        assert min(hits, stored, anybody.done["stored"]) > 3, (
            f"little was stored and read: {anybody.done}"
        )

    serving(tmp_path, test, arena_blocks=160, disk_blocks=100)
