import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.core.types import Extent, GroupKind, GroupSpec, NamespaceSpec, Place
from kvstored.errors import InvalidArgument
from kvstored.wire import packing

SPEC = NamespaceSpec(
    model="m",
    revision="r",
    dtype="bf16",
    layout="l",
    layout_version=1,
    block_tokens=16,
    groups=(
        GroupSpec("kv", GroupKind.LINEAR, 4096),
        GroupSpec("state", GroupKind.STATE, 512),
        GroupSpec("csa", GroupKind.COMPRESSED, 1024, ratio=4),
    ),
)


def test_keys_lie_back_to_back_and_odd_ones_are_refused() -> None:
    keys = [bytes([i]) * 20 for i in range(5)]
    packed, key_bytes = packing.pack_keys(keys)
    assert (packed, key_bytes) == (b"".join(keys), 20)
    assert packing.check_keys(len(packed), key_bytes) == 5
    assert packing.pack_keys([]) == (b"", 8)
    for packed, key_bytes in ((b"x" * 21, 20), (b"x" * 7, 7), (b"x" * 65, 65), (b"", 0)):
        with pytest.raises(InvalidArgument):
            packing.check_keys(len(packed), key_bytes)
    with pytest.raises(InvalidArgument, match="one length"):
        packing.pack_keys([b"12345678", b"123456789"])


def test_ten_thousand_keys_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="keys=10000 max=4096"):
        packing.pack_keys([b"k" * 32] * 10_000)


def test_numbers_need_their_exact_length() -> None:
    assert packing.unpack_u64(packing.pack_u64([1, 2**64 - 1]), "x", 2).tolist() == [1, 2**64 - 1]
    for count in (1, 3):
        with pytest.raises(InvalidArgument, match="field=x"):
            packing.unpack_u64(packing.pack_u64([1, 2]), "x", count)
    with pytest.raises(InvalidArgument, match="multiple of 8"):
        packing.unpack_u64(b"1234567", "x")
    with pytest.raises(InvalidArgument):
        packing.unpack_u8(b"12", "x", 3)


def test_group_masks() -> None:
    assert packing.selected_groups(0, SPEC) == (0, 2)
    assert packing.selected_groups(0b110, SPEC) == (1, 2)
    assert packing.mask_of((1, 2, 2)) == 0b110
    with pytest.raises(InvalidArgument, match="unknown groups"):
        packing.selected_groups(0b1000, SPEC)


extents = st.builds(
    Extent,
    segment=st.integers(0, 100),
    start=st.integers(0, 1 << 20),
    units=st.integers(1, 1 << 10),
)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Place, int] | None:
    if draw(st.booleans()):
        return None
    place = tuple(draw(st.lists(extents, min_size=1, max_size=5)))
    total = sum(extent.units for extent in place) * 4096
    return place, total - draw(st.integers(0, 4095))


@given(st.lists(pieces(), max_size=12).filter(lambda p: len(p) % 2 == 0))
def test_places_round_trip(given_pieces: list[tuple[Place, int] | None]) -> None:
    packed = packing.pack_pieces(given_pieces)
    out = packing.unpack_pieces(packed, len(given_pieces) // 2, 2)
    for i, piece in enumerate(given_pieces):
        rows = out.extents[out.first[i] : out.first[i + 1]]
        if piece is None:
            assert len(rows) == 0
            continue
        place, length = piece
        assert int(out.sizes.reshape(-1)[i]) == length == int(rows[:, 2].sum())
        assert [(int(s), int(o)) for s, o, _ in rows] == [
            (e.segment, e.start * 4096) for e in place
        ]


@given(st.binary(max_size=40), st.binary(max_size=200), st.binary(max_size=80), st.integers(0, 8))
def test_garbage_places_are_refused_and_never_crash(
    counts: bytes, extents: bytes, sizes: bytes, keys: int
) -> None:
    try:
        out = packing.unpack_pieces(packing.PackedPieces(counts, extents, sizes), keys, 2)
    except InvalidArgument:
        return
    assert len(out) == keys * 2


def test_extents_that_do_not_add_up_are_refused() -> None:
    good = packing.pack_pieces([((Extent(0, 0, 1),), 4096)])
    bad = packing.PackedPieces(good.extent_counts, good.extents, packing.pack_u64([4095]))
    with pytest.raises(InvalidArgument, match="add up"):
        packing.unpack_pieces(bad, 1, 1)
    assert np.array_equal(packing.unpack_pieces(good, 1, 1).sizes, [[4096]])
