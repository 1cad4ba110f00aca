"""Puts of one message, to a real daemon: into places that the connection holds, which always come back."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kvstored import native
from kvstored.client import Client, FillStatus, Keys, Namespace
from kvstored.client.connection import Connection
from kvstored.client.local_transport import LocalTransport
from kvstored.client.optimistic import Optimistic
from kvstored.client.stock import STOCK_BYTES_MAX, Places, Stock
from kvstored.errors import Corrupt
from kvstored.wire.packing import pack_u64
from tests.crash.blocks import content_of, is_right, spec_of
from tests.crash.served import ROOT, Served, environment, wait_until

SIZE = 64 << 10
BATCH = 8
COMMITTED = (FillStatus.COMMITTED,) * BATCH
salts = itertools.count(1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served"), dram="256MiB", disk="0B") as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    wait_until(lambda: not held_bytes(served), what="nothing is left of the test before")
    with Client(served.address) as client:
        yield client


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return client.open_namespace(spec_of(SIZE))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the messages."""
    names: list[str] = []
    begin = Connection.begin

    def noted(self: Connection, name: str, *arguments: object) -> None:
        names.append(name)
        begin(self, name, *arguments)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(Connection, "begin", noted)
    return names


def transport_of(client: Client) -> LocalTransport:
    transport = client._transport
    assert isinstance(transport, LocalTransport)
    return transport


def held_bytes(served: Served) -> int:
    return int(served.stat().tiers[0].aside_bytes)


def new_keys(count: int = BATCH) -> Keys:
    salt = next(salts) << 32 | os.getpid() << 64
    return Keys.opaque([(salt | n).to_bytes(32, "big") for n in range(count)])


def put(namespace: Namespace, keys: Keys) -> tuple[FillStatus, ...]:
    size = namespace.spec.groups[0].bytes_per_block
    return namespace.put(keys, [content_of(key, size) for key in keys]).status


def are_right(namespace: Namespace, keys: Keys) -> bool:
    got = namespace.get(keys)
    return all(b is not None and is_right(k, b[0]) for k, b in zip(keys, got.blocks, strict=True))


def test_a_put_like_the_ones_before_is_one_message(
    client: Client, namespace: Namespace, sent: list[str]
) -> None:
    batches = [new_keys() for _ in range(12)]
    for keys in batches:
        assert put(namespace, keys) == COMMITTED
    assert sent.count("Reserve") == 2, "the first two, before anything was ordered"
    assert sent.count("PutAside") == 10
    assert sent.count("SetAside") <= 6, "nobody waits for these"
    for keys in batches:
        assert are_right(namespace, keys)
        assert namespace.match(keys).hit_blocks == BATCH


@pytest.mark.parametrize("count", [1, 3, 100])
def test_without_c_they_go_so_as_well(
    client: Client,
    namespace: Namespace,
    sent: list[str],
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_of(client)._copier, "native", None)
    monkeypatch.setattr(native, "copies", None)
    batches = [new_keys(count) for _ in range(5)]
    for keys in batches:
        assert set(put(namespace, keys)) == {FillStatus.COMMITTED}
    assert sent.count("PutAside") == 3
    assert all(are_right(namespace, keys) for keys in batches)


@pytest.mark.parametrize("count", [1, 3, 100])
def test_any_number_of_blocks_goes_so(
    client: Client, namespace: Namespace, sent: list[str], count: int
) -> None:
    batches = [new_keys(count) for _ in range(5)]
    for keys in batches:
        assert set(put(namespace, keys)) == {FillStatus.COMMITTED}
    assert sent.count("PutAside") == 3
    assert all(are_right(namespace, keys) for keys in batches)


def test_a_path_goes_on_below_what_was_put_so(client: Client, namespace: Namespace) -> None:
    tokens = list(range(1000, 1000 + 16 * 16))
    for _ in range(2):
        put(namespace, new_keys(4))
    for blocks in range(4, 17, 4):
        keys = namespace.keys(tokens[: blocks * 16])
        assert set(put(namespace, keys[blocks - 4 :])) == {FillStatus.COMMITTED}
    whole = namespace.keys(tokens)
    assert namespace.match(whole).hit_blocks == 16
    assert are_right(namespace, whole)


def test_buffers_go_to_places_set_aside_without_being_joined(
    client: Client, namespace: Namespace, sent: list[str]
) -> None:
    for _ in range(4):
        keys = new_keys()
        whole = [content_of(key, SIZE) for key in keys]
        buffers = [[each[: SIZE // 4], each[SIZE // 4 :]] for each in whole]
        assert namespace.put_from(keys, buffers).status == COMMITTED
        assert are_right(namespace, keys)
    assert sent.count("PutAside") == 2


def test_segments_that_are_not_mapped_yet_are_when_places_lie_there(
    client: Client, namespace: Namespace, sent: list[str]
) -> None:
    for _ in range(3):
        put(namespace, new_keys())
    for _ in range(3):
        transport_of(client)._segments.clear()
        keys = new_keys()
        assert put(namespace, keys) == COMMITTED
        assert are_right(namespace, keys)
    assert sent.count("PutAside") == 4


def test_a_place_that_is_none_is_not_written_to(
    served: Served, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        put(namespace, new_keys())
    take = Stock.take

    def taken(stock: Stock, space: bytes, count: int, now_s: float) -> Places | None:
        places = take(stock, space, count, now_s)
        assert places is not None
        first = places.extents[:8]
        return Places(places.ids, (first + pack_u64([2**40, SIZE])) * count)

    with monkeypatch.context() as wrong:
        wrong.setattr(Stock, "take", taken)
        with pytest.raises(Corrupt):
            put(namespace, new_keys())
    wait_until(lambda: held_bytes(served) == 0, what="the connection was closed")
    assert put(namespace, new_keys()) == COMMITTED


def test_known_blocks_are_told_as_present_and_the_places_are_kept(
    client: Client, namespace: Namespace, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [new_keys() for _ in range(3)]
    for keys in old:
        put(namespace, keys)
    present = (FillStatus.PRESENT,) * BATCH
    sent.clear()
    assert put(namespace, old[0]) == present
    assert "PutAside" not in sent, "the projection shows them: nothing is copied"
    # blocks on the disk are not in the projection
    monkeypatch.setattr(Optimistic, "may_show", lambda *_: False)
    mixed = Keys((*new_keys(4).keys, *old[1].keys[:4]), unchained=True)
    for _ in range(3):
        assert set(put(namespace, mixed)) <= {FillStatus.PRESENT, FillStatus.COMMITTED}
        assert are_right(namespace, mixed)
    assert 0 < sent.count("PutAside") < 3, "what copied for nothing asks first the next times"
    assert put(namespace, old[2]) == present


def test_all_that_was_held_comes_back_with_the_client(served: Served, client: Client) -> None:
    with Client(served.address) as other:
        namespace = other.open_namespace(spec_of(SIZE))
        for _ in range(3):
            put(namespace, new_keys())
        wait_until(lambda: held_bytes(served) > 0, what="places are set aside")
    assert held_bytes(served) == 0
    assert served.stat().tiers[0].quarantined_bytes == 0, "it said that it does not write there"


def test_what_is_not_used_for_a_while_is_given_back(
    served: Served, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        put(namespace, new_keys())
    wait_until(lambda: held_bytes(served) > 0, what="places are set aside")
    monkeypatch.setattr("kvstored.client.channel.IDLE_S", 0.0)
    keys = new_keys()
    namespace.match(keys)
    wait_until(lambda: held_bytes(served) == 0, what="they are given back")
    assert put(namespace, keys) == COMMITTED


def test_several_namespaces_share_the_bound_of_a_connection(served: Served, client: Client) -> None:
    sizes = (1 << 20, 2 << 20, 4 << 20)
    for size in sizes:
        namespace = client.open_namespace(spec_of(size))
        for _ in range(4):
            keys = new_keys(4)
            put(namespace, keys)
            assert are_right(namespace, keys)
        namespace.match(keys)  # what was ordered has come
        assert held_bytes(served) <= min(STOCK_BYTES_MAX, 16 << 20), "half of an eighth of 256 MiB"


def test_threads_hold_places_of_their_own(
    served: Served, client: Client, namespace: Namespace
) -> None:
    wrong: list[Keys] = []

    def work() -> None:
        for _ in range(20):
            keys = new_keys(3)
            if set(put(namespace, keys)) != {FillStatus.COMMITTED} or not are_right(
                namespace, keys
            ):
                wrong.append(keys)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_child_of_a_fork_does_not_use_its_parents_places(
    client: Client, namespace: Namespace
) -> None:
    for _ in range(3):
        put(namespace, new_keys())
    theirs = new_keys()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if put(namespace, theirs) == COMMITTED else 1)
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            os._exit(2)
    mine = new_keys()
    assert put(namespace, mine) == COMMITTED
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert are_right(namespace, mine)
    assert are_right(namespace, theirs)


_HOLDER = """
import sys
from kvstored.client import Client
from tests.client.test_aside import new_keys, put
from tests.crash.blocks import spec_of
client = Client(sys.argv[1])
namespace = client.open_namespace(spec_of(65536))
for _ in range(3):
    put(namespace, new_keys())
namespace.match(new_keys())
print("held", flush=True)
sys.stdin.read()
"""


def test_the_places_of_a_dead_process_are_free_again(served: Served, client: Client) -> None:
    command = [sys.executable, "-c", _HOLDER, served.address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), cwd=ROOT, text=True, **pipes) as holder:  # type: ignore[call-overload]  # two pipes
        assert holder.stdout.readline() == "held\n"
        assert held_bytes(served) > 0
        holder.kill()
    wait_until(lambda: held_bytes(served) == 0, what="they are free")
    wait_until(lambda: not served.stat().tiers[0].quarantined_bytes, what="nobody writes there")


def test_after_a_kill_of_the_daemon_nothing_goes_to_places_of_before(tmp_path: Path) -> None:
    settings = {"limits.quarantine": "2s"}
    with (
        Served(tmp_path, dram="64MiB", disk="0B", settings=settings) as served,
        Client(served.address) as client,
    ):
        namespace = client.open_namespace(spec_of(SIZE))
        before = [new_keys() for _ in range(3)]
        for keys in before:
            assert put(namespace, keys) == COMMITTED
        namespace.match(before[0])
        held = held_bytes(served)
        assert held > 0
        stat = served.kill_daemon()
        served.answered(after_epoch=stat.epoch)
        served.recovered()
        assert served.stat().tiers[0].quarantined_bytes == held, "its writer lives"
        for keys in before:
            assert are_right(namespace, keys)
        for _ in range(200):  # three times around
            keys = new_keys()
            assert put(namespace, keys) == COMMITTED
            assert are_right(namespace, keys)
        wait_until(lambda: not served.stat().tiers[0].quarantined_bytes, what="it is over")
        for _ in range(200):
            keys = new_keys()
            assert put(namespace, keys) == COMMITTED
            assert are_right(namespace, keys)


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[tuple[Served, Client, Namespace]]:
    """With places set aside, on a daemon of its own."""
    with Served(tmp_path, dram="256MiB", disk="0B") as served, Client(served.address) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        for _ in range(3):
            put(namespace, new_keys())
        wait_until(lambda: held_bytes(served) > 0, what="places are set aside")
        yield served, client, namespace


def test_what_a_broken_connection_held_is_set_aside_no_longer(
    broken: tuple[Served, Client, Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session lived on with other connections, and the places were nobody's: after some breaks there were none to be had any more."""
    served, client, namespace = broken
    session = client.session()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as now:
        now.setattr(Connection, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            namespace.match(new_keys())
    wait_until(lambda: held_bytes(served) == 0, what="they end with the connection")
    assert client.session() == session, "which was not the session's end"
    assert served.stat().tiers[0].quarantined_bytes == 0, "it said that it does not write there"


def test_an_interrupt_behind_its_answer_leaves_what_a_put_stored_as_it_is(
    broken: tuple[Served, Client, Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places were taken for free, and the next put wrote its bytes over the blocks."""
    served, _, namespace = broken
    stored, end, ended = new_keys(), Connection.end, list[str]()

    def interrupted(connection: Connection, name: str, response: type[Message]) -> Message:
        answer = end(connection, name, response)
        if name == "PutAside":
            ended.append(name)
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as late:
        late.setattr(Connection, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put(namespace, stored)
    assert ended
    for _ in range(3):
        assert put(namespace, new_keys()) == COMMITTED
    with Client(served.address) as client:
        view = client.open_namespace(spec_of(SIZE)).get_view(stored)
        with view:
            assert view.hits == BATCH
            for key, block in zip(stored, view.blocks, strict=True):
                assert block is not None
                assert is_right(key, block[0])
