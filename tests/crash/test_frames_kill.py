"""P frames under kill -9 at random moments, memory lost each time: blocks are as they were put or a miss, whatever became of what they refer to.

Seeds are fixed; KVSTORED_TEST_SEED (a number) tries others.
"""

import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import Client, Keys, Namespace
from kvstored.errors import KvstoredError
from tests.codec import real
from tests.test_daemon import TinyKeeper, wait_until_recovered
from tests.test_frames import BLOCKS, KV_SPEC, TILES, Bytes, nvme, tokens_of, wait_until

SEED = int(os.environ.get("KVSTORED_TEST_SEED", "0"))
USERS = 5
ROUNDS = 4
BASE = np.concatenate([real.bits(variant) for variant in ("a", "b")] * (TILES // 4)).reshape(-1)


@pytest.fixture
def keeper() -> Iterator[TinyKeeper]:
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        made = TinyKeeper(Path(name), **{"disk.capacity": "64MiB"})
        made.start()
        yield made
        made.close()


def rows_of(user: int) -> list[list[Bytes]]:
    """Near each other for all users, and those of no two are the same."""
    rng = np.random.default_rng(user)
    rows = []
    for i in range(BLOCKS):
        noise = rng.integers(-3, 4, len(BASE)).astype(np.uint16)
        rows.append([(np.roll(BASE, 64 * i) + noise).astype(np.uint16).view(np.uint8)])
    return rows


def keys_of(namespace: Namespace, user: int) -> Keys:
    return namespace.keys(tokens_of(user))[1:]


def at_work(address: str, rng: random.Random, stop: threading.Event) -> None:
    """Puts and removes until the daemon is gone."""
    with suppress(KvstoredError), Client(address, timeout_s=5) as client:
        namespace = client.open_namespace(KV_SPEC)
        while not stop.is_set():
            user = rng.randrange(USERS)
            if rng.random() < 0.6:
                namespace.put(keys_of(namespace, user), rows_of(user))
            else:
                first = rng.randrange(BLOCKS)
                namespace.remove(keys_of(namespace, user)[first:])
            time.sleep(rng.random() * 0.1)


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_blocks_are_right_or_a_miss_after_every_kill(keeper: TinyKeeper, seed: int) -> None:
    rng = random.Random(seed)
    read = referred = 0
    for _ in range(ROUNDS):
        stop = threading.Event()
        worker = threading.Thread(
            target=at_work, args=(keeper.address, random.Random(rng.random()), stop)
        )
        worker.start()
        time.sleep(0.8 + rng.random())
        with Client(keeper.address) as client:
            referred += sum(group.p_plain_bytes for group in nvme(client).groups)
        keeper.kill()
        stop.set()
        worker.join()
        keeper.forget()
        keeper.start()
        with Client(keeper.address) as client:
            wait_until_recovered(client)
            namespace = client.open_namespace(KV_SPEC)
            for user in range(USERS):
                found = namespace.get(keys_of(namespace, user))
                for block, row in zip(found.blocks, rows_of(user), strict=True):
                    if block is not None:
                        read += 1
                        np.testing.assert_array_equal(block[0], row[0])
    assert read, "nothing was ever there to be read"
    assert referred, "nothing ever referred to anything"
    with Client(keeper.address) as client:
        namespace = client.open_namespace(KV_SPEC)
        for user in range(USERS):
            namespace.remove(keys_of(namespace, user))
        wait_until(lambda: nvme(client).used_bytes == nvme(client).kept_bytes == 0)
