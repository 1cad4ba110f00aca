"""Blocks of the same tokens behind another prompt, through client, daemon and disk: fewer bytes, the same bits, over removal and kill -9."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.client import Client, GroupKind, GroupSpec, Keys, Namespace
from kvstored.pb import kvstored_pb2 as pb
from tests.codec import real
from tests.test_daemon import SPEC, TinyKeeper, folder, kept, wait_until_recovered

__all__ = ["folder"]

TILES = 8
BLOCK_BYTES = TILES * 32768
BLOCKS = 6
VARIANTS = "a", "b"
KV_SPEC = replace(SPEC, block_tokens=256, groups=(GroupSpec("kv", GroupKind.LINEAR, BLOCK_BYTES),))
Bytes = NDArray[np.uint8]


def rows_of(variant: str) -> list[list[Bytes]]:
    """Blocks of real KV, each with tiles in an order of its own."""
    k, v = real.bits(variant)
    tiles = [np.roll(tile, 64 * step) for step in range(TILES // 2) for tile in (k, v)]
    return [
        [np.concatenate(tiles[i:] + tiles[:i]).reshape(-1).view(np.uint8)] for i in range(BLOCKS)
    ]


def tokens_of(user: int) -> NDArray[np.int64]:
    """The same text behind a block that names the user."""
    text = np.arange(256 * (BLOCKS + 1))
    text[:256] = user
    return text


@pytest.fixture
def keeper(folder: Path) -> Iterator[TinyKeeper]:
    with kept(folder, **{"disk.codec": "fast"}) as made:
        yield made


def put(namespace: Namespace, user: int, variant: str) -> Keys:
    """The blocks behind the one that names the user; that one is not stored, as if it were too short."""
    keys = namespace.keys(tokens_of(user))[1:]
    assert namespace.put(keys, rows_of(variant)).stored == BLOCKS
    return keys


def nvme(client: Client) -> pb.TierStat:
    return client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[1]


def written(client: Client) -> None:
    def is_clean() -> bool:
        return not client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[0].dirty_copies

    wait_until(is_clean)


def wait_until(is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def from_disk(keeper: TinyKeeper, client: Client) -> None:
    """The daemon is killed, and memory with it."""
    written(client)
    keeper.kill()
    keeper.forget()
    keeper.start()
    wait_until_recovered(client)


def remove(keeper: TinyKeeper, client: Client, namespace: Namespace, keys: Keys) -> None:
    """Until it is so on the disk: a kill right after a removal may undo it."""
    for _ in range(10):
        namespace.remove(keys)
        time.sleep(0.3)
        from_disk(keeper, client)
        if not namespace.match(keys).hit_blocks:
            return
    raise AssertionError("the removal does not last")


def check(namespace: Namespace, keys: Keys, variant: str) -> None:
    for found, row in zip(namespace.get(keys).blocks, rows_of(variant), strict=True):
        assert found is not None
        np.testing.assert_array_equal(found[0], row[0])


def test_the_same_text_of_another_user_takes_a_third_and_is_read_exactly(
    keeper: TinyKeeper,
) -> None:
    with Client(keeper.address) as client:
        namespace = client.open_namespace(KV_SPEC)
        a = put(namespace, 1, "a")
        written(client)
        alone_bytes = nvme(client).used_bytes
        b = put(namespace, 2, "b")
        written(client)
        (group,) = nvme(client).groups
        assert group.p_plain_bytes == BLOCKS * BLOCK_BYTES
        assert nvme(client).used_bytes - alone_bytes < alone_bytes * 0.52
        assert group.encode_s > 0
        from_disk(keeper, client)
        check(namespace, b, "b")
        check(namespace, a, "a")
        (group,) = nvme(client).groups
        assert group.decoded_bytes == 2 * BLOCKS * BLOCK_BYTES
        assert group.decode_s > 0


def test_it_outlives_the_block_that_it_refers_to_and_a_kill(keeper: TinyKeeper) -> None:
    with Client(keeper.address) as client:
        namespace = client.open_namespace(KV_SPEC)
        a = put(namespace, 1, "a")
        written(client)
        b = put(namespace, 2, "b")
        written(client)
        both_bytes = nvme(client).used_bytes
        remove(keeper, client, namespace, a)
        assert nvme(client).kept_bytes > 0
        assert nvme(client).used_bytes == both_bytes
        check(namespace, b, "b")
        # the same key again, while its old extent is still referred to
        put(namespace, 1, "a")
        from_disk(keeper, client)
        check(namespace, a, "a")
        check(namespace, b, "b")
        remove(keeper, client, namespace, b)
        assert nvme(client).kept_bytes == 0
        check(namespace, a, "a")
        namespace.remove(a)
        wait_until(lambda: nvme(client).used_bytes == 0)


def test_the_other_may_go_first(keeper: TinyKeeper) -> None:
    with Client(keeper.address) as client:
        namespace = client.open_namespace(KV_SPEC)
        a = put(namespace, 1, "a")
        written(client)
        alone_bytes = nvme(client).used_bytes
        namespace.remove(put(namespace, 2, "b"))
        wait_until(lambda: nvme(client).used_bytes == alone_bytes)
        from_disk(keeper, client)
        check(namespace, a, "a")


def test_a_reference_that_is_damaged_is_a_miss(keeper: TinyKeeper, folder: Path) -> None:
    with Client(keeper.address) as client:
        namespace = client.open_namespace(KV_SPEC)
        a = put(namespace, 1, "a")
        written(client)
        b = put(namespace, 2, "b")
        written(client)
        remove(keeper, client, namespace, a)
        with (folder / "state" / "disk" / "slab-00000.dat").open("r+b") as slab:
            slab.seek(3 * 4096 + 100)  # of the first block that was written
            slab.write(b"damage")
        found = namespace.get(b)
        assert found.prefix_hits < BLOCKS
        assert [block is not None for block in found.blocks].count(False) == 1
        for block, row in zip(found.blocks, rows_of("b"), strict=True):
            if block is not None:
                np.testing.assert_array_equal(block[0], row[0])
        assert namespace.match(b).hit_blocks < BLOCKS


@pytest.mark.parametrize("flags", [{"disk.codec": "raw"}, {"disk.references": "false"}])
def test_where_the_operator_does_not_want_it_nothing_refers(
    folder: Path, flags: dict[str, str]
) -> None:
    with kept(folder, **flags) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(KV_SPEC)
        keys = [put(namespace, user, variant) for user, variant in enumerate(VARIANTS)]
        written(client)
        assert not any(group.p_plain_bytes for group in nvme(client).groups)
        from_disk(keeper, client)
        for mine, variant in zip(keys, VARIANTS, strict=True):
            check(namespace, mine, variant)


@pytest.mark.parametrize("extra", [["salt"], []])
def test_other_salts_and_namespaces_are_never_referred_to(
    keeper: TinyKeeper, extra: list[str]
) -> None:
    with Client(keeper.address) as client:
        namespace = client.open_namespace(KV_SPEC)
        put(namespace, 1, "a")
        written(client)
        other = namespace if extra else client.open_namespace(replace(KV_SPEC, revision="2"))
        keys = other.keys(tokens_of(2), extra_keys=extra)[1:]
        assert other.put(keys, rows_of("b")).stored == BLOCKS
        written(client)
        assert all(group.p_plain_bytes == 0 for group in nvme(client).groups)
        from_disk(keeper, client)
        check(other, keys, "b")


def test_without_content_keys_every_block_stands_alone(keeper: TinyKeeper) -> None:
    with Client(keeper.address) as client:
        namespace = client.open_namespace(KV_SPEC)
        for user, variant in enumerate(VARIANTS):
            keys = replace(namespace.keys(tokens_of(user))[1:], content_keys=())
            namespace.put(keys, rows_of(variant))
            written(client)
        (group,) = nvme(client).groups
        assert group.p_plain_bytes == 0


def test_where_the_disk_lies_in_memory_cold_blocks_are_frames_there(folder: Path) -> None:
    # What a host without NVMe has: blocks that leave the arena stay in memory in two thirds of their bytes.
    with tempfile.TemporaryDirectory(prefix="kvs", dir="/dev/shm") as memory:
        with (
            kept(folder, **{"disk.path": memory, "disk.codec": "fast"}) as keeper,
            Client(keeper.address) as client,
        ):
            namespace = client.open_namespace(KV_SPEC)
            keys = put(namespace, 1, "a")
            from_disk(keeper, client)
            assert client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[0].copies == 0
            assert nvme(client).used_bytes < BLOCKS * BLOCK_BYTES / 1.3
            check(namespace, keys, "a")
        assert any(Path(memory).glob("slab-*.dat"))
