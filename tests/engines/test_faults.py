"""What an engine sees of a daemon that is away, killed, hung, slow, full, damaged or refuses: misses, in time, and never wrong KV.

Each test goes through the engine's own threads; drivers compare every byte that they are told is there.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import Client, GroupKind, GroupSpec, NamespaceSpec, View
from kvstored.connectors.breaker import State
from tests.crash.served import Served, wait_until

from .driver import SLOWEST_S, Driver, is_installed

# Loose: engines take half a minute to import on a busy machine, and one test is about half a minute.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(180),
]

Make = Callable[..., Driver]
HANG_S = 30.0


def sglang_driver(folder: Path, address: str) -> Driver:
    from .drive_sglang import SglangDriver

    return SglangDriver(folder, address)


def l2_driver(folder: Path, address: str) -> Driver:
    from .drive_lmcache import L2Driver

    return L2Driver(folder, address)


def remote_driver(folder: Path, address: str) -> Driver:
    from .drive_lmcache import RemoteDriver

    return RemoteDriver(folder, address)


def engine(name: str, make: object, identity: str) -> object:
    reason = f"{name} is not installed in this environment (docs/engines-{name}.md)"
    return pytest.param(
        make, id=identity, marks=pytest.mark.skipif(not is_installed(name), reason=reason)
    )


@pytest.fixture(
    params=[
        engine("sglang", sglang_driver, "sglang"),
        engine("lmcache", l2_driver, "lmcache-l2"),
        engine("lmcache", remote_driver, "lmcache-remote"),
    ]
)
def make(request: pytest.FixtureRequest, folder: Path) -> Iterator[Make]:
    made: list[Driver] = []

    def driver() -> Driver:
        made.append(request.param(folder, f"unix://{folder}/s"))
        return made[-1]

    yield driver
    for each in made:
        each.close()


def timed_round(driver: Driver, chunks: range) -> float:
    """Asks, loads and stores as the engine does; how long it took."""
    began_s = time.perf_counter()
    driver.load(chunks)
    driver.store(chunks)
    return time.perf_counter() - began_s


def test_absent_at_the_start_and_found_when_it_comes(folder: Path, make: Make) -> None:
    driver = make()
    assert timed_round(driver, range(8)) < SLOWEST_S
    assert driver.store(range(8)) == 0
    assert driver.load(range(8)) == 0
    with Served(folder, dram="64MiB", disk="256MiB"):
        driver.up()
        assert driver.store(range(8)) == 8
        assert driver.load(range(8)) == 8


def test_killed_and_back_with_what_it_had(served: Served, folder: Path, make: Make) -> None:
    driver = make()
    driver.up()
    assert driver.store(range(8)) == 8
    epoch = served.kill_daemon().epoch
    for _ in range(5):
        assert timed_round(driver, range(100, 108)) < SLOWEST_S
    served.answered(after_epoch=epoch)
    wait_until(lambda: driver.load(range(8)) == 8, what="hits come back by themselves")


def test_hung_for_half_a_minute(served: Served, make: Make) -> None:
    driver = make()
    driver.up()
    assert driver.store(range(8)) == 8
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    rounds: list[float] = []
    try:
        ends_s = time.monotonic() + HANG_S
        while time.monotonic() < ends_s:
            rounds.append(timed_round(driver, range(8)))
            time.sleep(0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert max(rounds) < SLOWEST_S
    assert sum(rounds) < 0.5 * HANG_S, "after a few deadlines nothing waits any more"
    wait_until(lambda: driver.load(range(8)) == 8, what="hits come back by themselves")


def on_disk_only(served: Served, make: Make) -> None:
    """Eight chunks, in a daemon that was ended in order and started again."""
    first = make()
    first.up()
    assert first.store(range(8)) == 8
    served.terminate()
    served.start()
    served.recovered()


def test_a_slow_disk_is_a_miss_in_time(folder: Path, make: Make) -> None:
    served = Served(folder, dram="64MiB", disk="256MiB")
    flag = served.slowed()
    with served:
        on_disk_only(served, make)
        driver = make()
        driver.up()
        flag.touch()
        began_s = time.perf_counter()
        assert driver.load(range(8)) == 0
        assert time.perf_counter() - began_s < SLOWEST_S
        flag.unlink()
        wait_until(lambda: driver.load(range(8)) == 8, what="the disk is fast again")


def test_a_damaged_block_is_a_miss(folder: Path, make: Make) -> None:
    served = Served(folder, dram="64MiB", disk="256MiB")
    with served:
        first = make()
        first.up()
        assert first.store(range(8)) == 8
        served.terminate()
        assert damaged(folder) > 0
        served.start()
        served.recovered()
        driver = make()
        driver.up()
        assert driver.load(range(8)) == 0
        assert driver.store(range(8)) == 8, "the bad copies are gone"
        assert driver.load(range(8)) == 8


def damaged(folder: Path) -> int:
    """One bit of every 512 bytes that hold anything, in every slab; how many."""
    count = 0
    for slab in folder.glob("state/**/slab-*.dat"):
        with slab.open("r+b") as opened:
            data = np.frombuffer(opened.read(4 << 20), dtype=np.uint8).copy()
            sectors = data[: data.size // 512 * 512].reshape(-1, 512)
            used = sectors.any(axis=1)
            sectors[used, 7] ^= 1
            opened.seek(0)
            opened.write(data.tobytes())
            count += int(used.sum())
    return count


def test_full_tiers_refuse_and_nothing_else(folder: Path, make: Make) -> None:
    with Served(folder, dram="16MiB", disk="0B") as served:
        driver = make()
        driver.up()
        assert driver.store(range(8)) == 8
        with Client(served.address) as client:
            held = [lease_all(client, 64 << 10), lease_all(client, 4 << 10)]
            assert driver.store(range(100, 132)) < 32
            assert driver.load(range(100, 132)) < 32
            assert driver.states == {State.UP}, "a full store is no outage"
            for each in held:
                each.release()
        assert driver.store(range(8)) == 8, "and there is room again"


def lease_all(client: Client, block_bytes: int) -> View:
    """Takes what room there is for blocks of this size."""
    kind = GroupSpec("kv", GroupKind.LINEAR, block_bytes)
    filler = client.open_namespace(
        NamespaceSpec(f"filler-{block_bytes}", "1", "bytes", "any", 1, 16, (kind,))
    )
    count = (16 << 20) // block_bytes - 1
    keys = filler.keys(range(16 * min(count, 4095)))
    filler.put(keys, np.zeros((len(keys), block_bytes), dtype=np.uint8))
    return filler.get_view(keys)


def test_a_refused_namespace_turns_it_off(served: Served, make: Make) -> None:
    first = make()
    first.up()
    first.store(range(8))
    (spec,) = {each.spec for each in first.guarded()}
    assert served.terminate() == 0
    for path in sorted(served.state_dir.rglob("*"), reverse=True):
        path.unlink() if path.is_file() or path.is_symlink() else path.rmdir()
    served.start()
    with Client(served.address) as client:
        client.open_namespace(replace(spec, layout=f"{spec.layout} of another kind"))
    driver = make()
    assert timed_round(driver, range(8)) < SLOWEST_S
    wait_until(lambda: driver.states == {State.OFF}, what="it is refused")
    assert driver.store(range(8)) == 0
    assert driver.load(range(8)) == 0
