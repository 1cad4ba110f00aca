"""Puts that nobody waits for, to a real daemon: told together, readable soon, and counted whatever becomes of them."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import Client, FillStatus, Keys, Namespace
from kvstored.client.optimistic import Optimistic
from kvstored.client.posted import BATCH_BLOCKS, Posts
from kvstored.core.types import BATCH_KEYS_MAX
from kvstored.errors import KvstoredError, NotFound
from kvstored.pb import kvstored_pb2 as pb
from tests.client.test_aside import SIZE, are_right, client, held_bytes, namespace, new_keys, sent
from tests.crash.blocks import content_of, is_right, spec_of, tokens_of
from tests.crash.served import ROOT, Served, environment, free_port, wait_until

__all__ = ["client", "namespace", "sent"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with Served(folder, dram="256MiB", disk="0B", listen=f"127.0.0.1:{free_port()}") as served:
        yield served


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told before a batch is full or somebody flushes."""
    monkeypatch.setattr(Posts, "_begin", lambda _: None)


def post(namespace: Namespace, keys: Keys) -> None:
    size = namespace.spec.groups[0].bytes_per_block
    rows = np.array([content_of(key, size) for key in keys])
    namespace.post(keys, rows)
    rows[:] = 0  # they are the caller's again


def prepared(client: Client, namespace: Namespace) -> None:
    """Places are there, and nothing is counted."""
    for _ in range(4):
        post(namespace, new_keys(1))
        client.flush()


def test_many_posts_are_told_in_few_messages(
    client: Client, namespace: Namespace, sent: list[str]
) -> None:
    batches = [new_keys(1) for _ in range(300)]
    for keys in batches:
        post(namespace, keys)
    done = client.flush()
    assert (done.blocks, done.committed) == (300, 300)
    assert sent.count("PutAside") < 300 / 4
    assert sent.count("SetAside") < 300 / 8
    assert sent.count("Reserve") <= 4, "the first ones, before anything was ordered"
    assert all(are_right(namespace, keys) for keys in batches)
    assert client.flush().blocks == 0, "each is told of once"


def test_what_was_posted_is_soon_readable_without_a_flush(
    client: Client, namespace: Namespace
) -> None:
    prepared(client, namespace)
    keys = new_keys()
    post(namespace, keys)
    wait_until(lambda: namespace.match(keys).hit_blocks == len(keys))
    assert are_right(namespace, keys)
    assert client.flush().committed == len(keys)


@pytest.mark.usefixtures("unhurried")
def test_nothing_is_readable_before_it_was_told(client: Client, namespace: Namespace) -> None:
    prepared(client, namespace)
    keys = new_keys()
    post(namespace, keys)
    assert namespace.get(keys).hits == 0
    client.flush()
    assert are_right(namespace, keys)


@pytest.mark.usefixtures("unhurried")
def test_paths_that_grow_block_by_block_in_turns(client: Client, namespace: Namespace) -> None:
    prepared(client, namespace)
    stem = list(range(1 << 20, (1 << 20) + 4))
    paths = [namespace.keys(tokens_of([*stem, *range(n << 8, (n << 8) + 9)])) for n in range(1, 6)]
    post(namespace, paths[0][:4])
    for at in range(4, 13):
        for path in paths:
            post(namespace, path[at : at + 1])
    assert client.flush().stored == 4 + 5 * 9
    for path in paths:
        assert namespace.match(path).hit_blocks == 13
        assert are_right(namespace, path)


@pytest.mark.usefixtures("unhurried")
def test_one_known_block_costs_the_others_nothing(
    client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = new_keys()
    namespace.put(known, [content_of(key, SIZE) for key in known])
    prepared(client, namespace)
    # blocks on the disk are not in the projection
    monkeypatch.setattr(Optimistic, "may_show", lambda *_: False)
    before, after = new_keys(), new_keys()
    for keys in (before, known, after, after):
        post(namespace, keys)
    done = client.flush()
    assert (done.committed, done.present) == (2 * len(known), 2 * len(known))
    for keys in (before, known, after):
        assert are_right(namespace, keys)


@pytest.mark.usefixtures("unhurried")
def test_no_message_tells_of_more_blocks_than_it_may(client: Client) -> None:
    namespace = client.open_namespace(spec_of(4096))
    for _ in range(4):
        post(namespace, new_keys(BATCH_KEYS_MAX // 2))
        client.flush()
    few, many = new_keys(BATCH_BLOCKS - 1), new_keys(BATCH_KEYS_MAX - 8)
    post(namespace, few)
    post(namespace, many)
    assert client.flush().committed == len(few) + len(many)
    assert are_right(namespace, few)


def test_all_places_come_back(
    served: Served, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.client.posted._IDLE_S", 0.05)
    monkeypatch.setattr("kvstored.client.channel.IDLE_S", 0.0)
    prepared(client, namespace)
    wait_until(lambda: held_bytes(served) > 0)
    wait_until(lambda: "kvstored-posts" not in [each.name for each in threading.enumerate()])
    namespace.match(new_keys())
    wait_until(lambda: held_bytes(served) == 0, what="its link was given back, and its places")
    prepared(client, namespace)
    client.close()
    assert held_bytes(served) == 0
    assert served.stat().tiers[0].quarantined_bytes == 0


@pytest.mark.usefixtures("unhurried")
def test_the_end_of_a_client_tells_what_waits(served: Served, client: Client) -> None:
    keys = new_keys()
    with Client(served.address) as other:
        namespace = other.open_namespace(spec_of(SIZE))
        prepared(other, namespace)
        post(namespace, keys)
    assert are_right(client.open_namespace(spec_of(SIZE)), keys)
    assert other.flush().blocks == 0, "it is closed"


def test_threads_post_at_once(client: Client, namespace: Namespace) -> None:
    batches = [[new_keys(1 + n % 3) for n in range(60)] for _ in range(4)]

    def work(mine: list[Keys]) -> None:
        for keys in mine:
            post(namespace, keys)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.flush().committed == sum(len(keys) for mine in batches for keys in mine)
    assert all(are_right(namespace, keys) for mine in batches for keys in mine)


def test_what_cannot_be_posted_is_put_and_counted_all_the_same(
    served: Served, client: Client, namespace: Namespace, sent: list[str]
) -> None:
    prepared(client, namespace)
    partial = namespace.keys(tokens_of([1 << 19])[:-1])
    salted = Keys.opaque([os.urandom(32)], extra_keys=["salt"])
    whole = SIZE // 16
    namespace.post(partial, [content_of(partial.keys[0], SIZE)[: whole * 15]])
    namespace.post(salted, [content_of(salted.keys[0], SIZE)])
    namespace.post(Keys(()), [])
    assert client.flush().committed == 2
    assert sent.count("Reserve") >= 2
    assert are_right(namespace, salted)
    with Client(f"grpc://{served.listen}") as far:
        keys = new_keys()
        post(far.open_namespace(spec_of(SIZE)), keys)
        assert far.flush().committed == len(keys)
    assert are_right(namespace, keys)


@pytest.mark.usefixtures("unhurried")
def test_a_child_of_a_fork_has_nothing_of_its_parents_posts(
    client: Client, namespace: Namespace
) -> None:
    prepared(client, namespace)
    mine, theirs = new_keys(), new_keys()
    post(namespace, mine)
    child = os.fork()
    if child == 0:
        try:
            post(namespace, theirs)
            os._exit(0 if client.flush().blocks == len(theirs) else 1)
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.flush().committed == len(mine)
    assert are_right(namespace, mine)
    assert are_right(namespace, theirs)


@pytest.mark.usefixtures("unhurried")
def test_what_dies_with_the_daemon_is_counted_as_lost(tmp_path: Path) -> None:
    with Served(tmp_path, dram="64MiB", disk="0B") as served, Client(served.address) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        prepared(client, namespace)
        lost = new_keys()
        post(namespace, lost)
        epoch = served.kill_daemon().epoch
        served.answered(after_epoch=epoch)
        served.recovered()
        done = client.flush()
        assert done.status == {FillStatus.LOST: len(lost)}
        assert namespace.get(lost).hits == 0
        batches = [new_keys(1) for _ in range(50)]
        for keys in batches:
            post(namespace, keys)
        assert client.flush().committed == 50
        assert all(are_right(namespace, keys) for keys in batches)


@pytest.mark.usefixtures("unhurried")
def test_a_daemon_that_hangs_costs_a_flush_its_time_and_no_more(tmp_path: Path) -> None:
    with Served(tmp_path, dram="64MiB", disk="0B") as served, Client(served.address) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        prepared(client, namespace)
        keys = new_keys()
        post(namespace, keys)
        pid = served.stat().daemon_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(KvstoredError):
                client.flush(timeout_s=0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert client.flush().status == {FillStatus.LOST: len(keys)}
        batches = [new_keys(1) for _ in range(20)]
        for each in batches:
            post(namespace, each)
        assert client.flush().committed == 20
        assert all(are_right(namespace, each) for each in batches)


_POSTER = """
import sys
from kvstored.client import Client
from tests.client.test_aside import new_keys
from tests.client.test_posted import post
from tests.crash.blocks import spec_of
client = Client(sys.argv[1])
namespace = client.open_namespace(spec_of(65536))
while True:
    post(namespace, new_keys(1))
    print("posted", flush=True)
"""


def test_a_poster_that_dies_leaves_nothing_held(served: Served, client: Client) -> None:
    command = [sys.executable, "-c", _POSTER, served.address]
    with subprocess.Popen(
        command, env=environment(), cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as poster:
        assert poster.stdout is not None
        for _ in range(100):
            assert poster.stdout.readline() == "posted\n"
        poster.kill()
    wait_until(lambda: held_bytes(served) == 0, what="they are free")
    wait_until(lambda: not served.stat().tiers[0].quarantined_bytes, what="nobody writes there")


# sockets of connections that an interrupt kept from being made are closed by the collector; one inside a finalizer ends there
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_cost_blocks_and_never_a_wrong_one(
    served: Served, client: Client, namespace: Namespace
) -> None:
    rng = random.Random(7)
    batches = [new_keys(1 + n % 9) for n in range(300)]
    interrupted, left = 0, iter(batches)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in batches:  # each interrupt costs a turn; one may come late
            try:
                for keys in left:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 800e-6))
                    post(namespace, keys)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                time.sleep(0.01)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.collect()
    assert interrupted > 10, "of 300"
    client.flush()
    for keys in batches:
        got = namespace.get(keys)
        assert all(b is None or is_right(k, b[0]) for k, b in zip(keys, got.blocks, strict=True))
    fresh = [new_keys() for _ in range(20)]
    for keys in fresh:
        post(namespace, keys)
    assert client.flush().committed == 20 * len(fresh[0])
    assert all(are_right(namespace, keys) for keys in fresh)
    client.close()
    wait_until(lambda: held_bytes(served) == 0, what="no place is left behind")


@pytest.mark.usefixtures("unhurried")
def test_a_namespace_that_goes_takes_its_posts_along(client: Client) -> None:
    namespace = client.open_namespace(spec_of(8192))
    prepared(client, namespace)
    keys = new_keys()
    post(namespace, keys)
    request = pb.RemoveNamespaceRequest(namespace=namespace.digest)
    client.call("RemoveNamespace", request, pb.RemoveNamespaceResponse)
    with pytest.raises(NotFound):
        client.flush()
    assert client.flush().status == {FillStatus.LOST: len(keys)}
    other = client.open_namespace(spec_of(SIZE))
    prepared(client, other)
    post(other, keys)
    assert client.flush().committed == len(keys)
