"""The HBM tier on a real GPU: the promises of every tier, copies of every kind of memory, kernels equal to the CPU codec."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.codec import blocks
from kvstored.codec.elements import Element
from kvstored.codec.frame import Codec
from kvstored.codec.lossy import BY_CHANNEL, Grid
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.unpacked import as_it_is, unpack
from kvstored.codec.values import words_of_floats
from kvstored.core.types import UNIT_BYTES
from kvstored.errors import NoSpace, Unavailable
from kvstored.tiers.base import Tier
from kvstored.tiers.cuda import LARGE_BYTES, CudaDevice
from kvstored.tiers.device import moves_of, open_device
from kvstored.tiers.expansion import expansion_of
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.views import hash_of
from tests.tiers.conformance import SEGMENT_UNITS, Conformance

pytestmark = pytest.mark.gpu
POOL_BYTES = 64 << 20


class TestHbmConforms(Conformance):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        hbm = Hbm(["0"], SEGMENT_UNITS * UNIT_BYTES, open_device)
        hbm.grow()
        yield hbm
        hbm.close()


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice(0, POOL_BYTES)
    yield made
    made.close()


@pytest.mark.parametrize("pinned_mib", [0, 4, 8])
def test_pieces_of_every_size_go_up_and_come_down(device: CudaDevice, pinned_mib: int) -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 256, 8 << 20, dtype=np.uint8)
    for begin in range(0, pinned_mib << 20, 1 << 20):
        device.register(memory[begin : begin + (1 << 20)])
    sizes = [1, 4096, 70_001, LARGE_BYTES, 3 << 20, *[65_536] * 40, 5]
    pieces: list[tuple[int, NDArray[np.uint8]]] = []
    at, offset = 0, POOL_BYTES
    for size in sizes:
        offset -= size + 4096
        offset -= offset % 16
        pieces.append((offset, memory[at : at + size]))
        at += size + 48
    original = memory.copy()
    device.upload(moves_of(pieces))
    for _, view in pieces:
        view[:] = 0
    device.download(moves_of(pieces))
    np.testing.assert_array_equal(memory, original)


def test_failures_are_typed() -> None:
    with pytest.raises(NoSpace):
        CudaDevice(0, 1 << 46)
    with pytest.raises(Unavailable):
        CudaDevice(63, POOL_BYTES)


def test_the_context_s_footprint_is_told(device: CudaDevice) -> None:
    assert 0 <= device.footprint_bytes < 4 << 30


LENGTHS = [241, 1024, 1025, 4096, 4159, 8192 + 63, 100_000, 1 << 20, 3 << 20]


def test_hashes_are_xxh3_of_what_lies_in_the_pool(device: CudaDevice) -> None:
    rng = np.random.default_rng(5)
    pieces = [rng.integers(0, 256, length, dtype=np.uint8) for length in LENGTHS]
    extents = []
    at = 0
    for piece in pieces:  # every second one in two extents with a gap
        cut = len(piece) // 2 // UNIT_BYTES * UNIT_BYTES if len(extents) % 2 else 0
        parts = (
            [(at, cut), (at + cut + UNIT_BYTES, len(piece) - cut)] if cut else [(at, len(piece))]
        )
        extents.append(parts)
        at += (len(piece) // UNIT_BYTES + 3) * UNIT_BYTES
    items = [(as_it_is(piece), each) for piece, each in zip(pieces, extents, strict=True)]
    found = device.expand(expansion_of(items))
    assert found == [hash_of([piece]) for piece in pieces]
    back = [np.zeros_like(piece) for piece in pieces]
    moves = [
        (offset, target[sum(s for _, s in parts[:i]) :][:size])
        for target, parts in zip(back, extents, strict=True)
        for i, (offset, size) in enumerate(parts)
    ]
    device.download(moves_of(moves))
    for piece, target in zip(pieces, back, strict=True):
        np.testing.assert_array_equal(target, piece)


STEPS = [
    Step(Method.PLANES),
    Step(Method.EXPONENTS),
    *(Step(Method.UNIFORM, int(grid)) for grid in Grid),
    Step(Method.UNIFORM, int(Grid.INT4) | BY_CHANNEL),
    Step(Method.ROTATED, 4),
    Step(Method.BOUNDED, 4),
]


@pytest.mark.parametrize("element", [Element.BF16, Element.F16, Element.F8E4M3, Element.F32])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_what_crosses_packed_becomes_the_codec_s_bytes(
    device: CudaDevice, element: Element, step: Step
) -> None:
    rng = np.random.default_rng([int(element), step.method, step.parameter])
    values = np.clip(rng.normal(0, 4, 1 << 18).astype(np.float32), -400, 400)
    plain = words_of_floats(values, element).view(np.uint8)
    frame = blocks.encode(plain, Plan(element, (step,), rows=64, columns=128))
    expected = np.empty_like(plain)
    blocks.decode(frame, expected)
    piece = unpack(Codec.FRAME, frame, len(plain))
    (found,) = device.expand(expansion_of([(piece, [(1 << 20, len(plain))])]))
    made = np.zeros_like(plain)
    device.download(moves_of([(1 << 20, made)]))
    np.testing.assert_array_equal(made, expected)
    assert found == hash_of([expected])


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "staged"])
def test_copies_in_order_follow_each_other(device: CudaDevice, is_pinned: bool) -> None:
    memory = np.random.default_rng(7).integers(0, 256, 24 << 20, dtype=np.uint8)
    if is_pinned:
        device.register(memory)
    step = 1 << 20
    copies = device.copies()
    handles = [
        copies.submit(moves_of([(i * step, memory[i * step : (i + 1) * step])])) for i in range(24)
    ]
    assert len(set(handles)) in (1, 24), "the same for all where none is shared"
    for number in (3, 23):
        copies.wait(number)
        back = np.zeros((number + 1) * step, dtype=np.uint8)
        device.download(moves_of([(0, back)]))
        np.testing.assert_array_equal(back, memory[: len(back)])
    copies.close()
