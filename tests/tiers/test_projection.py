"""The projection against a dict: what it says is always true, and what it does not say is a miss."""

import fcntl
import mmap
import os
import random

import numpy as np
import pytest
import xxhash

from kvstored.client.projected import Index
from kvstored.core.columnar import Places
from kvstored.core.keys import key_batch
from kvstored.core.types import UNIT_BYTES
from kvstored.errors import StateMismatch
from kvstored.tiers.entries import WAYS
from kvstored.tiers.filling import FillingColumns, pack_many
from kvstored.tiers.projection import BUCKETS_MIN, Projection

DIGEST, SEED = bytes(range(32)), 77
UNITS = 4
LENGTH = UNITS * UNIT_BYTES - 100


@pytest.fixture
def projection() -> Projection:
    return Projection(1 << 20, epoch=5, tenant="default")


def index_of(projection: Projection, epoch: int = 5) -> Index:
    return Index(os.dup(projection.read_fd), epoch)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def names(numbers: list[int]) -> np.ndarray:
    return key_batch(b"".join(map(key_of, numbers)), 32, SEED).fingerprints


def places_of(starts: list[int]) -> Places:
    start = np.array(starts, dtype=np.int64)
    return Places(start % 3, start * UNITS, np.full(len(starts), UNITS, dtype=np.int64))


def publish(projection: Projection, numbers: list[int], starts: list[int]) -> None:
    count = len(numbers)
    records = pack_many(
        FillingColumns(
            digest=DIGEST,
            keys=b"".join(map(key_of, numbers)),
            fingerprints=names(numbers),
            parents=np.zeros((count, 2), dtype=np.uint64),
            places=places_of(starts),
            generations=np.array(starts, dtype=np.uint64) + np.uint64(1),
            depths=np.zeros(count, dtype=np.int64),
            heats=np.zeros(count, dtype=np.uint8),
            length=LENGTH,
            valid_tokens=16,
            last_s=0.0,
            owner_pid=0,
        )
    )
    records["checksum"] = [xxhash.xxh3_64_intdigest(key_of(n)) for n in numbers]
    projection.publish(records.view(np.uint64).reshape(count, -1), places_of(starts))


def seen(index: Index, numbers: list[int]) -> dict[int, int]:
    """Number -> where it is, as the index tells, of those it has; everything else that it tells is checked."""
    found = index.find([key_of(n) for n in numbers], DIGEST, SEED)
    assert found.odd == 0
    there: dict[int, int] = {}
    for i, number in enumerate(numbers):
        if found.lengths[i]:
            assert found.lengths[i] == LENGTH
            assert found.checksums[i] == xxhash.xxh3_64_intdigest(key_of(number))
            start, rest = divmod(found.offsets[i], UNITS * UNIT_BYTES)
            assert (rest, found.segments[i]) == (0, start % 3)
            assert found.generations[i] == start + 1
            there[number] = start
    return there


@pytest.mark.parametrize("seed", range(4))
def test_what_it_tells_is_what_was_published_last_and_not_withdrawn(
    projection: Projection, seed: int
) -> None:
    rng, index = random.Random(seed), index_of(projection)
    told: dict[int, int] = {}
    following = 0
    for _ in range(150):
        numbers = rng.sample(range(900), rng.choice([1, 2, 3, 8, 100]))
        if rng.random() < 0.6:
            starts = list(range(following, following + len(numbers)))
            following += len(numbers)
            publish(projection, numbers, starts)
            told |= dict(zip(numbers, starts, strict=True))
        else:
            # with the right place they go; with another one, as of a copy that came later, they stay
            wrong = [n for n in numbers if n in told and rng.random() < 0.3]
            starts = [told.get(n, 0) + 7 * (n in wrong) for n in numbers]
            projection.withdraw(names(numbers), places_of(starts))
            for n in set(numbers) - set(wrong):
                told.pop(n, None)
        everything = seen(index, list(range(900)))
        assert everything.items() <= told.items()
        few = rng.sample(range(900), 3)
        assert seen(index, few) == {n: everything[n] for n in few if n in everything}
    # a bucket has so many ways, and the table so many buckets: most find a place all the same
    assert len(everything) > min(len(told), BUCKETS_MIN * WAYS) * 0.8


def test_more_blocks_than_a_bucket_has_ways_displace_others_and_none_is_told_wrong(
    projection: Projection,
) -> None:
    numbers = list(range(2000))
    publish(projection, numbers, numbers)
    publish(projection, [n + 2000 for n in numbers], numbers)
    assert projection.displaced > 0
    assert seen(index_of(projection), numbers + [n + 2000 for n in numbers])
    assert len(projection) <= BUCKETS_MIN * WAYS


def test_a_block_of_another_namespace_or_another_key_length_is_not_there(
    projection: Projection,
) -> None:
    index = index_of(projection)
    publish(projection, [1], [1])
    assert index.find([key_of(1)], DIGEST, SEED).lengths == [LENGTH]
    assert index.find([key_of(1)], bytes(32), SEED).lengths == [0]
    assert index.find([key_of(1)] * 5, bytes(32), SEED).lengths == [0] * 5
    assert index.find([key_of(1)[:16]], DIGEST, SEED).lengths == [0]


def test_an_entry_that_is_being_written_or_is_torn_is_odd_and_not_there(
    projection: Projection,
) -> None:
    index = index_of(projection)
    publish(projection, [1], [1])
    slot = int(np.flatnonzero(projection._tags)[0])
    for word, value in ((0, 1), (13, 4), (2, 9)):
        before = int(projection._entries[slot, word])
        projection._entries[slot, word] = before ^ value
        for keys in ([key_of(1)], [key_of(1)] * 4):
            found = index.find(keys, DIGEST, SEED)
            assert (found.odd, found.lengths) == (len(keys), [0] * len(keys))
        projection._entries[slot, word] = before
    assert seen(index, [1]) == {1: 1}


@pytest.mark.parametrize("count", [1, 6])
def test_an_entry_that_changed_after_it_was_found_is_told(
    projection: Projection, count: int
) -> None:
    index, numbers = index_of(projection), list(range(count))
    publish(projection, numbers, numbers)
    found = index.find([key_of(n) for n in numbers], DIGEST, SEED)
    assert index.unchanged(found) == [True] * count
    projection.withdraw(names([0]), places_of([0]))
    assert index.unchanged(found) == [False] + [True] * (count - 1)


def test_a_projection_of_another_boot_or_of_another_kind_is_refused(
    projection: Projection,
) -> None:
    with pytest.raises(StateMismatch, match="another boot"):
        index_of(projection, epoch=6)
    fd = os.memfd_create("other")
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(StateMismatch, match="superblock"):
        Index(fd, 5)


def test_nobody_can_write_through_what_clients_get(projection: Projection) -> None:
    size = projection.superblock.size_bytes
    with pytest.raises(PermissionError):
        mmap.mmap(projection.read_fd, size)
    with pytest.raises(OSError):
        os.ftruncate(projection.read_fd, size // 2)
    again = os.open(f"/proc/self/fd/{projection.read_fd}", os.O_RDWR)
    try:
        seals = fcntl.fcntl(again, fcntl.F_GET_SEALS)
        assert seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        assert seals & 0x10  # F_SEAL_FUTURE_WRITE
        with pytest.raises(PermissionError):
            mmap.mmap(again, size)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
    finally:
        os.close(again)
