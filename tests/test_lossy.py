"""Lossy frames through client, daemon and disk: opt-in twice, told, and refused to those who want exact blocks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import Client, Keys, Namespace
from kvstored.codec import report
from kvstored.codec.elements import Element
from tests.test_daemon import TinyKeeper, folder, kept, wait_until_recovered
from tests.test_frames import BLOCKS, KV_SPEC, from_disk, nvme, put, rows_of, written

__all__ = ["folder"]

LOSSY_SPEC = replace(KV_SPEC, groups=(replace(KV_SPEC.groups[0], lossy_ok=True),), sink_tokens=0)


@pytest.fixture
def keeper(folder: Path) -> Iterator[TinyKeeper]:
    with kept(folder, **{"disk.lossy": "cold=rotated4,shared=rotated4"}) as made:
        yield made


def near(namespace: Namespace, keys: Keys) -> list[bool]:
    """Which blocks came back as something else than was put; all are near it."""
    found = namespace.get(keys)
    differs = []
    for block, row in zip(found.blocks, rows_of("a"), strict=True):
        assert block is not None
        plain = np.asarray(block[0]).view(np.uint8)
        assert report.error_report(row[0], plain, Element.BF16).cosine > 0.99
        differs.append(not np.array_equal(plain, row[0]))
    assert list(found.lossy) == differs
    return differs


def test_blocks_that_may_be_near_take_a_quarter_and_say_what_they_are(keeper: TinyKeeper) -> None:
    with Client(keeper.address) as client:
        namespace = client.open_namespace(LOSSY_SPEC)
        keys = put(namespace, 1, "a")
        assert not any(near(namespace, keys)), "exact as long as they are in memory"
        with namespace.get_view(keys, exact=True) as view:
            assert (view.hits, view.lossy) == (BLOCKS, (False,) * BLOCKS)
        written(client)
        assert nvme(client).used_bytes < BLOCKS * KV_SPEC.groups[0].bytes_per_block / 3.5
        from_disk(keeper, client)
        match = namespace.match(keys)
        assert (match.hit_blocks, match.lossy_blocks) == (BLOCKS, BLOCKS)
        assert namespace.match(keys, exact=True).hit_blocks == 0
        assert namespace.match(keys, exact=True).miss_reason == "lossy"
        assert namespace.get(keys, exact=True).hits == 0
        assert all(near(namespace, keys))
        assert all(near(namespace, keys)), "read from memory it is what it was on disk"
        assert namespace.get(keys, exact=True).hits == 0
        with namespace.get_view(keys) as view:
            assert view.lossy == (True,) * BLOCKS
        with namespace.get_view(keys, exact=True) as view:
            assert (view.hits, view.lossy) == (0, (False,) * BLOCKS)
        # memory survives, and says so
        keeper.kill()
        keeper.start()
        wait_until_recovered(client)
        assert all(near(namespace, keys))
        put(namespace, 1, "a")
        assert namespace.get(keys, exact=True).hits == BLOCKS
        assert not any(near(namespace, keys))


def test_a_namespace_that_does_not_allow_it_is_exact(keeper: TinyKeeper) -> None:
    with Client(keeper.address) as client:
        namespace = client.open_namespace(replace(KV_SPEC, sink_tokens=0))
        keys = put(namespace, 1, "a")
        from_disk(keeper, client)
        assert not any(near(namespace, keys))
        assert namespace.get(keys, exact=True).hits == BLOCKS


def test_a_daemon_that_does_not_offer_it_is_exact(folder: Path) -> None:
    with kept(folder) as keeper, Client(keeper.address) as client:
        namespace = client.open_namespace(LOSSY_SPEC)
        keys = put(namespace, 1, "a")
        from_disk(keeper, client)
        assert not any(near(namespace, keys))
        assert namespace.match(keys).lossy_blocks == 0
