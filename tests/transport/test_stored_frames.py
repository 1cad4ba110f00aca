"""Blocks that lie coded on the NVMe of a real daemon, sent to another host as the frames that they are."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.client import Client, Keys, Namespace
from kvstored.errors import Unavailable
from kvstored.tiers.slabs import slab_path
from tests.crash.served import Served, free_port, wait_until
from tests.test_frames import BLOCK_BYTES, BLOCKS, KV_SPEC, rows_of, tokens_of

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Place:
    served: Served
    address: str

    def remote(self) -> Client:
        made = Client(self.address, timeout_s=20)
        wait_until(lambda: _answers(made), what="the front serves")
        return made

    def cold(self) -> None:
        """All is on NVMe, and memory is gone."""
        assert self.served.terminate() == 0
        self.served.start()
        self.served.recovered()

    def written(self) -> None:
        wait_until(lambda: not self.served.stat().tiers[0].dirty_copies, what="is written")

    def in_memory(self) -> int:
        return int(self.served.stat().tiers[0].copies)


def _answers(client: Client) -> bool:
    try:
        with client.link(5):
            return True
    except Unavailable:
        return False


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    listen = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        settings = {"wire.codec": "lossless", "disk.codec": "fast"}
        with Served(Path(folder), listen=listen, settings=settings) as served:
            made = Place(served, f"bulk://{listen}")
            with Client(served.address, timeout_s=20) as client:
                namespace = client.open_namespace(KV_SPEC)
                for user in (2, 3, 6):
                    put(namespace, user, alone=True)
                put(namespace, 1)
                made.written()
                put(namespace, 4, "b")
                made.written()
            made.cold()
            yield made


def put(namespace: Namespace, user: int, variant: str = "a", *, alone: bool = False) -> Keys:
    """`alone`: refers to nothing, and nothing to it."""
    keys = namespace.keys(tokens_of(user))[1:]
    if alone:
        keys = replace(keys, content_keys=())
    assert namespace.put(keys, rows_of(variant)).stored == BLOCKS
    return keys


def assert_all(namespace: Namespace, keys: Keys, variant: str = "a") -> bytes:
    found = namespace.get(keys)
    assert (found.hits, found.corrupt) == (BLOCKS, 0)
    for block, row in zip(found.blocks, rows_of(variant), strict=True):
        assert block is not None
        assert np.array_equal(block[0], row[0])
    return found.tiers


def received(client: Client) -> int:
    """Bytes that came as frames, as decoded."""
    return int(client._transport.frames.framing.received.plain_bytes)


NVME, DRAM = 2, 1


def test_they_go_as_they_lie_once_and_come_up_when_they_are_asked_for_again(place: Place) -> None:
    with place.remote() as client:
        namespace = client.open_namespace(KV_SPEC)
        keys, before = namespace.keys(tokens_of(1))[1:], place.in_memory()
        assert assert_all(namespace, keys) == bytes([NVME] * BLOCKS)
        assert place.in_memory() == before, "nothing was loaded"
        assert received(client) == BLOCKS * BLOCK_BYTES
        assert place.served.stat().leases == 0
        assert assert_all(namespace, keys) == bytes([NVME] * BLOCKS)
        assert place.in_memory() == before + BLOCKS, "used again: it came up"
        assert assert_all(namespace, keys) == bytes([DRAM] * BLOCKS)


def test_some_of_a_path_may_lie_in_memory_and_some_may_be_missing(place: Place) -> None:
    with Client(place.served.address, timeout_s=20) as client:
        namespace = client.open_namespace(KV_SPEC)
        keys = namespace.keys(tokens_of(2))[1:]
        assert namespace.get(keys[1:3]).hits == 2  # these come up
        assert namespace.remove(keys[BLOCKS - 1 :]) == 1
    with place.remote() as client:
        namespace = client.open_namespace(KV_SPEC)
        found = namespace.get(keys)
        assert found.tiers == bytes([NVME, DRAM, DRAM, *[NVME] * (BLOCKS - 4), 255])
        assert found.miss_reason == "removed"
        rows = rows_of("a")
        for block, row in zip(found.blocks[:-1], rows[:-1], strict=True):
            assert block is not None
            assert np.array_equal(block[0], row[0])
        assert found.blocks[-1] is None
        assert found.generations[0] > 0


def test_what_refers_to_others_is_loaded_and_decoded_by_the_daemon(place: Place) -> None:
    with place.remote() as client:
        namespace = client.open_namespace(KV_SPEC)
        before = place.in_memory()
        assert_all(namespace, namespace.keys(tokens_of(4))[1:], "b")
        assert place.in_memory() == before + BLOCKS
        assert_all(namespace, namespace.keys(tokens_of(3))[1:])
        assert place.in_memory() == before + BLOCKS, "the others stand alone"


def test_a_client_that_asks_for_plain_bytes_gets_them(place: Place) -> None:
    with place.remote() as client:
        namespace = client.open_namespace(KV_SPEC)
        client._transport.frames, before = None, place.in_memory()
        assert_all(namespace, namespace.keys(tokens_of(6))[1:])
        assert place.in_memory() == before + BLOCKS


def test_a_damaged_one_is_a_miss_and_is_dropped(place: Place) -> None:
    with Client(place.served.address, timeout_s=20) as client:
        namespace = client.open_namespace(KV_SPEC)
        namespace.clear()
        put(namespace, 5)
    assert place.served.terminate() == 0
    path = slab_path(place.served.state_dir / "disk", 0)
    slab = np.memmap(path, dtype=np.uint8, mode="r+")
    starts = [at for at in range(0, slab.size, 4096) if bytes(slab[at : at + 4]) == b"KVF1"]
    assert len(starts) >= BLOCKS
    for start in starts:
        slab[start + 8192] ^= 1
    slab.flush()
    del slab
    place.served.start()
    place.served.recovered()
    with place.remote() as client:
        namespace = client.open_namespace(KV_SPEC)
        keys = namespace.keys(tokens_of(5))[1:]
        found = namespace.get(keys)
        assert (found.hits, found.corrupt) == (0, BLOCKS)

        def is_gone() -> bool:
            return namespace.match(keys).hit_blocks == 0

        wait_until(is_gone, what="the daemon has looked at them")
        assert place.served.stat().leases == 0
        namespace.clear()
