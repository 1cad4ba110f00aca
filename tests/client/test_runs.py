"""Places of an answer as arrays over the mapped segments."""

import random

import numpy as np
import pytest

from kvstored.client.copying import Bytes
from kvstored.client.runs import blocks_in_place, blocks_made
from kvstored.client.segments import extent_of
from kvstored.errors import Corrupt
from kvstored.wire.packing import PackedPieces, Pieces, pack_u8, pack_u64, unpack_pieces

SEGMENT_BYTES = 1 << 16


def segments() -> dict[int, Bytes]:
    made = np.random.default_rng(1).integers(0, 256, (3, SEGMENT_BYTES), dtype=np.uint8)
    return {2: made[0], 5: made[1], 1 << 40: made[2]}


def placed(extents: list[tuple[int, int, int]]) -> Pieces:
    flat = [each for extent in extents for each in extent]
    sizes = [length for *_, length in extents]
    packed = PackedPieces(pack_u8([1] * len(extents)), pack_u64(flat), pack_u64(sizes))
    return unpack_pieces(packed, len(extents), 1)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_one_extent_each_are_what_each_alone_is(seed: int) -> None:
    rng, mapped = random.Random(seed), segments()
    extents = []
    for _ in range(rng.choice([0, 1, 2, 50])):
        length = rng.randint(1, SEGMENT_BYTES)
        offset = rng.choice([0, SEGMENT_BYTES - length, rng.randint(0, SEGMENT_BYTES - length)])
        extents.append((rng.choice(list(mapped)), offset, length))
    hits = [rng.random() < 0.7 for _ in extents]
    blocks = blocks_in_place(placed(extents), mapped, hits)
    alone = blocks_made([extent_of(mapped, *extent) for extent in extents], hits)
    assert [block is None for block in blocks] == [block is None for block in alone]
    for block, right in zip(blocks, alone, strict=True):
        if block is None or right is None:
            continue
        (array,), (expected,) = block, right
        assert array is not None
        assert expected is not None
        assert array.ctypes.data == expected.ctypes.data
        assert array.size == expected.size
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (SEGMENT_BYTES - 4096, 4097),
        (SEGMENT_BYTES, 1),
        (1 << 63, 4096),
        ((1 << 64) - 4096, 8192),  # its end is small again
    ],
)
def test_a_place_outside_of_its_segment_among_good_ones_is_refused(
    offset: int, length: int
) -> None:
    extents = [(2, 0, 4096), (5, offset, length), (2, 4096, 4096)]
    with pytest.raises(Corrupt, match="segment=5"):
        blocks_in_place(placed(extents), segments(), [True, True, True])
