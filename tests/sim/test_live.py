"""The live driver against a store of its own: what it counts, verifies, holds and how it stops."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import perf_counter

import pytest

from kvstored.errors import LeaseLost, Unavailable
from kvstored.sim.keys import Content
from kvstored.sim.live import LiveOptions, Store, drive
from kvstored.sim.measure import NO_BLOCKS, Recorder, TierBlocks
from kvstored.sim.traces import open_trace

TINY = Path(__file__).parent / "fixtures" / "tiny.kvt"
BLOCK_BYTES = 4096


class DictStore:
    """A store without bound. `shown` limits what a read finds of what was matched."""

    def __init__(self) -> None:
        self.root = bytes(32)
        self.stored: dict[bytes, Content] = {}
        self.parents: dict[bytes, bytes] = {}
        self.leases = self.leases_max = self.closed = 0
        self.shown = 1 << 30
        self.loses_leases = False
        self.lock = Lock()

    def match(self, keys: Sequence[bytes]) -> TierBlocks:
        """The first block of a path is in the slow tier."""
        found = next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))
        return (0, max(0, found - 1), min(1, found), 0)

    @contextmanager
    def read(self, keys: Sequence[bytes]) -> Iterator[Sequence[Content]]:
        self.leases += 1
        yield [self.stored[key] for key in keys][: self.shown]
        self.leases -= 1
        if self.loses_leases:
            raise LeaseLost("too late")

    def put(self, keys: Sequence[bytes], parent: bytes, contents: Sequence[Content]) -> int:
        new = 0
        self.leases_max = max(self.leases_max, self.leases)
        for key, content in zip(keys, contents, strict=True):
            with self.lock:
                new += key not in self.stored
                self.stored[key] = content
                self.parents[key] = parent
            parent = key
        return new

    @contextmanager
    def connected(self) -> Iterator[Store]:
        try:
            yield self
        finally:
            self.closed += 1


def driven(store: DictStore, *, clients: int = 1, speed: float | None = None) -> Recorder:
    options = LiveOptions(block_bytes=BLOCK_BYTES, speed=speed, clients=clients, limit=None)
    return drive(open_trace(TINY), options, store.connected, lambda _: None)


def test_a_replay_reads_what_earlier_requests_put() -> None:
    store = DictStore()
    total = driven(store)
    assert (total.requests, total.blocks) == (6, 19)
    assert total.hits == (0, 6, 4, 0)
    assert total.put_blocks == 9 == len(store.stored)
    assert (total.wrong_blocks, total.lost_blocks) == (0, 0)
    assert (store.leases, store.closed) == (0, 1)


def test_leases_are_held_while_the_rest_is_put() -> None:
    store = DictStore()
    driven(store)
    assert store.leases_max == 1


def test_every_put_block_has_its_predecessor_as_parent() -> None:
    store = DictStore()
    driven(store)
    assert sorted(store.parents.values()).count(b"") == 2
    assert set(store.parents.values()) - {b""} <= set(store.stored)


def test_a_block_with_other_bytes_is_counted_as_wrong() -> None:
    store = DictStore()
    driven(store)
    for content in store.stored.values():
        content[17] ^= 1
    assert driven(store).wrong_blocks == 19


def test_a_block_of_another_size_is_wrong() -> None:
    store = DictStore()
    driven(store)
    store.stored = {key: content[:-1] for key, content in store.stored.items()}
    assert driven(store).wrong_blocks == 19


def test_what_is_matched_but_gone_at_the_read_is_lost_and_put_again() -> None:
    store = DictStore()
    driven(store)
    store.shown = 1
    total = driven(store)
    assert (sum(total.hits), total.lost_blocks) == (6, 13)
    assert total.wrong_blocks == 0


def test_what_was_read_under_a_lost_lease_counts_as_lost_and_is_never_wrong() -> None:
    store = DictStore()
    driven(store)
    for content in store.stored.values():
        content[17] ^= 1
    store.loses_leases = True
    total = driven(store)
    assert (total.hits, total.lost_blocks, total.wrong_blocks) == (NO_BLOCKS, 19, 0)


def test_several_clients_serve_each_request_once() -> None:
    total = driven(DictStore(), clients=4)
    assert (total.requests, total.blocks) == (6, 19)
    assert total.put_blocks == 9
    assert total.latencies()["request"].count == 6


def test_speed_keeps_the_pace_of_the_trace() -> None:
    begun_s = perf_counter()
    driven(DictStore(), speed=0.2)
    assert 0.150 <= perf_counter() - begun_s < 5


def test_a_failing_store_ends_the_replay_with_its_error() -> None:
    class Broken(DictStore):
        def match(self, keys: Sequence[bytes]) -> TierBlocks:
            raise Unavailable("gone")

    store = Broken()
    with pytest.raises(Unavailable, match="gone"):
        driven(store, clients=3)
    assert store.closed == 3
