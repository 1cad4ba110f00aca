"""The HBM tier on a real GPU: the promises of every tier, copies of every kind of memory, kernels equal to the CPU codec."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.core.types import UNIT_BYTES
from kvstored.errors import NoSpace, Unavailable
from kvstored.tiers import kernels
from kvstored.tiers.base import Tier
from kvstored.tiers.cuda import LARGE_BYTES, CudaDevice
from kvstored.tiers.device import moves_of, open_device
from kvstored.tiers.hbm import Hbm
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


@pytest.mark.parametrize("width", [1, 2, 4])
def test_planes_are_split_and_merged_as_the_codec_does(width: int) -> None:
    cupy = module()
    compiled = cupy.RawModule(code=kernels.source(), options=("--std=c++14",))
    elements = np.random.default_rng(width).integers(0, 256, 100_000 * width, dtype=np.uint8)
    words = elements.view(f"<u{width}")
    shifts = range(8 * (width - 1), -1, -8)
    expected = np.concatenate([(words >> shift).astype(np.uint8) for shift in shifts])
    source, made, back = (
        cupy.asarray(elements),
        cupy.zeros_like(elements),
        cupy.zeros_like(elements),
    )
    numbers = (np.uint64(100_000), np.uint32(width))
    compiled.get_function("split_planes")((64,), (256,), (source, made, *numbers))
    compiled.get_function("merge_planes")((64,), (256,), (made, back, *numbers))
    np.testing.assert_array_equal(cupy.asnumpy(made), expected)
    np.testing.assert_array_equal(cupy.asnumpy(back), elements)


def module() -> Any:  # it ships no types
    import cupy

    return cupy
