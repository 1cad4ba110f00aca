"""Threads, forks, restarts, closing: what happens around the calls."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import AsyncClient, Client, Namespace
from kvstored.errors import (
    Busy,
    DeadlineExceeded,
    InvalidArgument,
    LeaseLost,
    NotFound,
    Unavailable,
)
from kvstored.pb import kvstored_pb2 as pb
from tests.crash.served import wait_until
from tests.transport.fake_daemon import FakeDaemon

from .conftest import BLOCK_TOKENS, spec_with
from .test_round_trips import rows_of


def stat(client: Client) -> pb.StatResponse:
    return client.call("Stat", pb.StatRequest(), pb.StatResponse)


def eventually(is_true: Callable[[], bool]) -> None:
    for _ in range(250):
        if is_true():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come true")


def stored(namespace: Namespace, count: int = 2) -> tuple[object, np.ndarray]:
    keys, rows = namespace.keys(range(count * BLOCK_TOKENS)), rows_of(count)
    assert namespace.put(keys, rows).stored == count
    return keys, rows


class TestLeases:
    def test_a_lease_of_a_get_rides_on_the_next_one(
        self, client: Client, namespace: Namespace
    ) -> None:
        keys, _ = stored(namespace)
        for _ in range(5):
            namespace.get(keys)
            assert stat(client).leases == 1
        namespace.get(keys, verify=False, optimistic=False)
        assert stat(client).leases == 1

    def test_an_unverified_get_that_took_long_asks_whether_its_lease_held(
        self, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys, _ = stored(namespace)
        monkeypatch.setattr("kvstored.client.local._SURE_S", -1.0)
        assert namespace.get(keys, verify=False, optimistic=False).hits == len(keys)
        assert stat(client).leases == 0

    def test_a_view_is_in_place_read_only_and_released_at_its_end(
        self, client: Client, namespace: Namespace
    ) -> None:
        keys, rows = stored(namespace)
        with namespace.get_view(namespace.keys(range(3 * BLOCK_TOKENS))) as view:
            assert (view.hits, view.miss_reason) == (2, "never-stored")
            assert view.blocks[2] is None
            array = view.blocks[1][0]
            assert np.array_equal(array, rows[1])
            assert not array.flags.writeable
            assert not array.flags.owndata
            view.renew(60)
            assert stat(client).leases == 1
        view.release()
        with pytest.raises(LeaseLost):
            view.renew(60)
        assert stat(client).leases == 1  # its release rides on the next one
        with namespace.get_view(keys) as view:
            assert stat(client).leases == 1
        namespace.get(keys)
        assert stat(client).leases == 1

    def test_a_view_that_took_long_asks_whether_its_lease_held(
        self, client: Client, namespace: Namespace
    ) -> None:
        keys, _ = stored(namespace)
        with namespace.get_view(keys):
            time.sleep(0.1)
        assert stat(client).leases == 0

    def test_views_that_are_much_or_many_are_released_at_once(
        self, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys, _ = stored(namespace)
        views = [namespace.get_view(keys) for _ in range(20)]
        for view in views:
            view.release()
        assert stat(client).leases == 16
        monkeypatch.setattr("kvstored.client.local._RIDING_BYTES_MAX", 2 * 8192 - 1)
        with namespace.get_view(keys):
            pass
        assert stat(client).leases == 0

    def test_a_view_left_after_the_daemon_died_is_lost(
        self, daemon: FakeDaemon, namespace: Namespace
    ) -> None:
        keys, _ = stored(namespace)
        view = namespace.get_view(keys)
        daemon.kill()
        with pytest.raises(LeaseLost):
            view.release()

    def test_a_view_over_several_extents_is_one_array(self, client: Client) -> None:
        namespace = client.open_namespace(spec_with(model="odd"))
        keys, rows = namespace.keys(range(BLOCK_TOKENS)), rows_of(1, 3 * 4096)
        namespace.put(keys, rows)
        with namespace.get_view(keys, verify=True) as view:
            assert np.array_equal(view.blocks[0][0], rows[0])

    def test_a_view_that_does_not_verify_is_a_miss(
        self, client: Client, namespace: Namespace
    ) -> None:
        keys, _ = stored(namespace)
        flip = pb.ReportRequest(namespace=namespace.digest, keys=keys.message(), group=1)
        client.call("Report", flip, pb.ReportResponse)
        with namespace.get_view(keys, verify=True) as view:
            assert view.hits == 0

    def test_a_lease_that_expired_is_lost_at_the_end_of_the_view(
        self, namespace: Namespace
    ) -> None:
        keys, _ = stored(namespace)
        view = namespace.get_view(keys, ttl_s=0.01)
        time.sleep(0.05)
        with pytest.raises(LeaseLost):
            view.release()

    def test_an_error_within_the_view_is_not_hidden(self, namespace: Namespace) -> None:
        keys, _ = stored(namespace)
        view = namespace.get_view(keys, ttl_s=0.01)
        time.sleep(0.05)
        with pytest.raises(ZeroDivisionError), view:
            raise ZeroDivisionError

    def test_closing_with_live_views_is_no_error_and_their_arrays_stay_readable(
        self, daemon: FakeDaemon
    ) -> None:
        client = Client(daemon.address)
        namespace = client.open_namespace(spec_with())
        keys, rows = stored(namespace)
        view = namespace.get_view(keys)
        array = view.blocks[0][0]
        client.close()
        client.close()
        del client, namespace
        gc.collect()
        assert np.array_equal(array, rows[0])
        with pytest.raises(LeaseLost):
            view.release()
        with Client(daemon.address) as other:
            assert (stat(other).leases, stat(other).sessions) == (0, 1)

    def test_mappings_end_with_their_last_array(self, daemon: FakeDaemon) -> None:
        def mappings() -> int:
            return Path("/proc/self/maps").read_text().count("fake-segment")

        gc.collect()
        before = mappings()
        for _ in range(3):
            with Client(daemon.address) as client:
                namespace = client.open_namespace(spec_with())
                keys, _ = stored(namespace)
                view = namespace.get_view(keys)
                view.release()
            del client, namespace, view
        gc.collect()
        assert mappings() == before


class TestThreads:
    def test_threads_share_a_client(self, client: Client, namespace: Namespace) -> None:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for i in range(15):
                    tokens = np.arange(4 * BLOCK_TOKENS) + 10_000 * seed + 1_000_000 * i
                    keys, rows = namespace.keys(tokens), rows_of(4, 8192, seed * 100 + i)
                    assert namespace.put(keys, rows).committed == 4
                    got = namespace.get(keys, verify=bool(i % 2))
                    assert all(
                        np.array_equal(b[0], r) for b, r in zip(got.blocks, rows, strict=True)
                    )
                    with namespace.get_view(keys) as view:
                        assert view.hits == 4
            except BaseException as error:  # noqa: BLE001 - told to the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert errors == []
        assert stat(client).sessions == 1
        assert stat(client).counters["connections"] <= 16

    def test_more_callers_than_connections_wait_and_then_are_busy(
        self, client: Client, namespace: Namespace
    ) -> None:
        def block() -> None:
            request = pb.PollEventsRequest(wait_ms=1500, cursor=99)
            client.call("PollEvents", request, pb.PollEventsResponse)

        threads = [threading.Thread(target=block) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        with pytest.raises(Busy):
            client.call("Stat", pb.StatRequest(), pb.StatResponse, 0.1)
        assert stat(client).epoch == 1
        for thread in threads:
            thread.join(20)


class TestFork:
    def test_a_child_has_its_own_session_and_never_the_parent_s_leases(
        self, client: Client, namespace: Namespace
    ) -> None:
        keys, rows = stored(namespace)
        view = namespace.get_view(keys)
        parent_session = client.session()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                got = namespace.get(keys)
                assert all(np.array_equal(b[0], r) for b, r in zip(got.blocks, rows, strict=True))
                assert client.session() != parent_session
                try:
                    view.release()
                except LeaseLost:
                    code = 0
            finally:
                os._exit(code)
        _, code = os.waitpid(child, 0)
        assert code == 0
        assert client.session() == parent_session
        view.release()
        eventually(lambda: stat(client).sessions == 1)
        assert namespace.get(keys).hits == 2

    def test_a_child_that_lives_on_does_not_keep_the_parent_s_session(
        self, daemon: FakeDaemon, client: Client
    ) -> None:
        program = f"""
import os, threading, time
from kvstored.client import Client
from kvstored.pb import kvstored_pb2 as pb
client = Client({daemon.address!r})
client.session()
poll = pb.PollEventsRequest(wait_ms=30000, cursor=99)
call = lambda: client.call("PollEvents", poll, pb.PollEventsResponse)
threading.Thread(target=call, daemon=True).start()
time.sleep(0.3)
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(20)
    os._exit(0)
print(child, flush=True)
os._exit(0)
"""
        root = Path(__file__).resolve().parents[2]
        parent = subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            timeout=60,
            check=True,
            stdout=subprocess.PIPE,
        )
        eventually(lambda: stat(client).sessions == 1)
        os.kill(int(parent.stdout), signal.SIGKILL)

    def test_children_forked_while_threads_call_do_not_hang(
        self, client: Client, namespace: Namespace
    ) -> None:
        keys, _ = stored(namespace)
        ends = threading.Event()

        def work() -> None:
            while not ends.is_set():
                namespace.get(keys)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(8):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        code = 0 if namespace.get(keys).hits == 2 else 2
                    finally:
                        os._exit(code)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            ends.set()
            for thread in threads:
                thread.join(20)


class TestRestart:
    def test_calls_fail_at_once_while_the_daemon_is_down(
        self, daemon: FakeDaemon, client: Client, namespace: Namespace
    ) -> None:
        keys, _ = stored(namespace)
        daemon.kill()
        for _ in range(20):
            began = time.perf_counter()
            with pytest.raises(Unavailable):
                namespace.get(keys)
            assert time.perf_counter() - began < 2

    def test_after_a_restart_the_same_objects_go_on(
        self, daemon: FakeDaemon, client: Client, namespace: Namespace
    ) -> None:
        keys, rows = stored(namespace)
        view = namespace.get_view(keys)
        array = view.blocks[0][0]
        daemon.kill()
        daemon.start()
        eventually(lambda: is_up(namespace, keys))
        with pytest.raises(LeaseLost):
            view.release()
        assert np.array_equal(array, rows[0])
        assert namespace.get(keys).hits == 0
        assert namespace.put(keys, rows).committed == 2
        assert namespace.get(keys).hits == 2
        assert stat(client).epoch == 2

    def test_a_daemon_that_dies_in_the_middle_of_a_call_is_unavailable(
        self, daemon: FakeDaemon, client: Client
    ) -> None:
        client.session()
        killer = threading.Timer(0.3, daemon.kill)
        killer.start()
        with pytest.raises(Unavailable):
            client.call("PollEvents", pb.PollEventsRequest(wait_ms=9000), pb.PollEventsResponse)
        killer.join()

    def test_the_fills_and_leases_of_a_client_that_is_killed_are_freed(
        self, daemon: FakeDaemon, client: Client
    ) -> None:
        program = f"""
import os, signal
from kvstored.client import Client
from tests.client.conftest import spec_with
from tests.client.test_life import stored
client = Client({daemon.address!r})
namespace = client.open_namespace(spec_with())
keys, _ = stored(namespace)
views = [namespace.get_view(keys) for _ in range(1000)]
os.kill(os.getpid(), signal.SIGKILL)
"""
        root = Path(__file__).resolve().parents[2]
        subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=False)
        eventually(lambda: stat(client).sessions == 1)
        assert (stat(client).leases, stat(client).fills) == (0, 0)


def is_up(namespace: Namespace, keys: object) -> bool:
    try:
        namespace.match(keys)
    except Unavailable:
        return False
    return True


class TestClosed:
    def test_a_closed_client_and_odd_addresses_say_so(self, client: Client) -> None:
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            client.session()
        for address in ("", "host", "/run/x.sock", "http://host:1/x"):
            with pytest.raises(InvalidArgument):
                Client(address)

    def test_no_daemon_at_all_is_unavailable(self, tmp_path: Path) -> None:
        for address in (f"unix://{tmp_path}/s", f"grpc+unix://{tmp_path}/g"):
            with (
                Client(address) as client,
                pytest.raises(Unavailable, match=f"{tmp_path}.*start it with `kvstored serve`"),
            ):
                client.session()

    def test_the_daemon_s_deadline_reaches_the_caller(self, client: Client) -> None:
        began = time.perf_counter()
        with pytest.raises(DeadlineExceeded):
            client.call(
                "PollEvents", pb.PollEventsRequest(wait_ms=60_000), pb.PollEventsResponse, 0.2
            )
        assert time.perf_counter() - began < 10


class TestAsync:
    def test_the_same_calls_awaited(self, daemon: FakeDaemon) -> None:
        async def main() -> None:
            async with AsyncClient(daemon.address) as client:
                namespace = await client.open_namespace(spec_with())
                keys, rows = namespace.keys(range(4 * BLOCK_TOKENS)), rows_of(4)
                assert (await namespace.put(keys, rows)).committed == 4
                assert (await namespace.match(keys)).hit_blocks == 4
                many = await asyncio.gather(*(namespace.get(keys) for _ in range(50)))
                assert all(got.hits == 4 for got in many)
                async with namespace.get_view(keys) as view:
                    assert np.array_equal(view.blocks[3][0], rows[3])

                async def view_too_long() -> None:
                    async with namespace.get_view(keys, ttl_s=0.01):
                        await asyncio.sleep(0.05)

                with pytest.raises(LeaseLost):
                    await view_too_long()
                with pytest.raises(NotFound):
                    await client.call(
                        "Match", pb.MatchRequest(namespace=b"?" * 32), pb.MatchResponse
                    )

        asyncio.run(main())

    def test_more_than_its_bound_is_busy_and_cancelled_views_are_released(
        self, daemon: FakeDaemon, client: Client, namespace: Namespace
    ) -> None:
        keys, _ = stored(namespace)

        async def main() -> None:
            async with AsyncClient(daemon.address, threads=2, calls_max=20) as other:
                opened = await other.open_namespace(spec_with())
                results = await asyncio.gather(
                    *(opened.match(keys) for _ in range(30)), return_exceptions=True
                )
                assert 0 < sum(isinstance(r, Busy) for r in results) <= 10

                async def view_forever() -> None:
                    async with opened.get_view(keys):
                        await asyncio.sleep(60)

                tasks = [asyncio.ensure_future(view_forever()) for _ in range(15)]
                await asyncio.sleep(0.001)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for _ in range(200):
                    await opened.get(keys)  # takes along what waits, and leaves its own lease
                    told = await other.call("Stat", pb.StatRequest(), pb.StatResponse)
                    if told.leases == 1:
                        return
                    await asyncio.sleep(0.02)
                pytest.fail(f"leases stay leases={told.leases}")

        asyncio.run(main())

    def test_a_close_that_is_cancelled_closes_and_what_comes_after_is_refused(
        self, daemon: FakeDaemon, client: Client
    ) -> None:
        """It was taken out of the pool's queue with its waiter: the session stayed until the process ended."""

        async def main() -> None:
            other = AsyncClient(daemon.address, threads=1)
            await other.open_namespace(spec_with())
            assert sessions() == before + 1
            held = threading.Event()
            other.start(lambda: held.wait(10))
            closing = asyncio.ensure_future(other.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            held.set()
            with pytest.raises(Unavailable, match="closed"):
                await other.call("Stat", pb.StatRequest(), pb.StatResponse)
            await other.close()

        def sessions() -> int:
            return int(client.call("Stat", pb.StatRequest(), pb.StatResponse).sessions)

        before = sessions()
        asyncio.run(main())
        wait_until(lambda: sessions() == before, what="the session is closed")
