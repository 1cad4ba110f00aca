"""Keys of trace blocks are stable and distinct; contents follow from them, and any change is seen."""

import numpy as np
import pytest
import xxhash

from kvstored.sim.keys import Contents, TraceKeys, block_key

ROOT = bytes(range(32))
GOLDEN = "c350a51c9c8a26b832f7dbfd757112fc0deaf264432c2aab13cfa6420c01090e"


def test_a_key_is_the_same_on_every_machine() -> None:
    assert block_key(ROOT, 7).hex() == GOLDEN


def test_a_batch_holds_each_key_with_its_fingerprint() -> None:
    keys = TraceKeys(ROOT, seed=5)
    ids = np.array([3, 1 << 62, 0, *range(4000, 8000)], dtype=np.int64)
    batch = keys.batch(ids)
    assert len(batch) == len(ids)
    for i in (0, 1, 2, 4002):
        assert batch.key(i) == block_key(ROOT, int(ids[i]))
        low, high = batch.fingerprints[i].tolist()
        assert low | high << 64 == xxhash.xxh3_128_intdigest(batch.key(i), seed=5)
    assert keys.keys(ids[:2]) == [batch.key(0), batch.key(1)]
    assert np.array_equal(keys.batch(ids).fingerprints, batch.fingerprints)


def test_other_roots_and_ids_give_other_keys() -> None:
    assert len({block_key(ROOT, 0), block_key(ROOT, 1), block_key(bytes(32), 0)}) == 3


@pytest.mark.parametrize("size", [1, 8, 4096, 4099])
def test_content_is_right_for_its_key_only(size: int) -> None:
    contents = Contents(size)
    mine, other = block_key(ROOT, 1), block_key(ROOT, 2)
    made = contents.of(mine)
    assert made.nbytes == size
    assert contents.is_right(mine, made)
    assert not contents.is_right(other, made)
    assert not contents.is_right(mine, made[:-1])
    for place in {0, size // 2, size - 1}:
        broken = made.copy()
        broken[place] ^= 1
        assert not contents.is_right(mine, broken)


def test_two_places_of_a_block_cannot_be_swapped_unseen() -> None:
    contents = Contents(8192)
    made = contents.of(block_key(ROOT, 1))
    assert not contents.is_right(block_key(ROOT, 1), np.concatenate([made[4096:], made[:4096]]))
