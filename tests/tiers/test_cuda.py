"""The device that speaks to CUDA, over a CuPy whose GPU is host memory: it keeps every promise of the tier, in as few submissions as it says, and
each failure of CUDA is the typed error that it should be."""

import ctypes
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.codec.elements import Element
from kvstored.codec.plan import Step
from kvstored.codec.unpacked import as_it_is
from kvstored.core.devices import HandleKind
from kvstored.core.types import UNIT_BYTES
from kvstored.errors import NoSpace, Unavailable
from kvstored.tiers.base import Tier
from kvstored.tiers.cuda import LARGE_BYTES, CudaDevice
from kvstored.tiers.cuda_worker import STAGING_BYTES
from kvstored.tiers.device import moves_of, open_device
from kvstored.tiers.expansion import expansion_of
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.nvml import used_bytes
from tests.gpu import test_device as on_device
from tests.tiers.conformance import SEGMENT_UNITS, Conformance
from tests.tiers.fake_cupy import FakeCupy, FakeRuntime

POOL_BYTES = 64 << 20


@pytest.fixture
def runtime(host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime(devices=2, device_bytes=256 << 20)
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(made, host))
    return made


@pytest.fixture
def device(runtime: FakeRuntime) -> Iterator[CudaDevice]:
    made = CudaDevice(0, POOL_BYTES)
    yield made
    made.close()
    assert not runtime.allocated
    assert not runtime.pinned
    assert not runtime.registered


class TestCudaConforms(Conformance):
    @pytest.fixture
    def tier(self, runtime: FakeRuntime) -> Iterator[Tier]:
        hbm = Hbm(["1"], SEGMENT_UNITS * UNIT_BYTES, open_device)
        hbm.grow()
        yield hbm
        hbm.close()


def pieces_of(memory: NDArray[np.uint8], sizes: list[int]) -> list[tuple[int, NDArray[np.uint8]]]:
    """Pieces with gaps on both sides, in another order in the pool."""
    pieces = []
    at, offset = 0, POOL_BYTES
    for size in sizes:
        offset -= size + 4096
        offset -= offset % 16
        pieces.append((offset, memory[at : at + size]))
        at += size + 48
    return pieces


@pytest.mark.parametrize("pinned", ["all", "half", "none"])
def test_pieces_of_every_size_go_up_and_come_down(
    device: CudaDevice, runtime: FakeRuntime, pinned: str
) -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 256, 8 << 20, dtype=np.uint8)
    for begin in range(0, {"all": 8, "half": 4, "none": 0}[pinned] << 20, 1 << 20):
        device.register(memory[begin : begin + (1 << 20)])  # in chunks, as the arena is
    sizes = [1, 4096, 70_000, LARGE_BYTES, 3 << 20, *[65_536] * 40, 5]
    pieces, original = pieces_of(memory, sizes), memory.copy()
    device.upload(moves_of(pieces))
    for _, view in pieces:
        view[:] = 0
    device.download(moves_of(pieces))
    np.testing.assert_array_equal(memory, original)


def test_thousands_of_pinned_pieces_are_one_kernel_and_one_wait(
    device: CudaDevice, runtime: FakeRuntime
) -> None:
    memory = np.zeros(24 << 20, dtype=np.uint8)
    device.register(memory)
    pieces = [(i * 8192, memory[i * 8192 : i * 8192 + 4096]) for i in range(3000)]
    device.upload(moves_of(pieces))
    assert runtime.calls == ["kernel 3000", "synchronized"]


def test_what_is_not_pinned_is_staged_in_bounded_parts(
    device: CudaDevice, runtime: FakeRuntime
) -> None:
    memory = np.arange(40 << 20, dtype=np.uint8)
    device.upload(moves_of([(0, memory)]))
    assert runtime.calls.count("synchronized") == 2  # 32 and 8 MiB
    assert max(runtime.pinned.values()) < STAGING_BYTES + (4 << 20)
    back = np.zeros_like(memory)
    device.download(moves_of([(0, back)]))
    np.testing.assert_array_equal(back, memory)


def test_a_large_piece_over_two_chunks_of_pinned_memory_is_two_copies(
    device: CudaDevice, runtime: FakeRuntime
) -> None:
    """One copy over ranges that were registered apart is refused by CUDA."""
    memory = np.zeros(4 << 20, dtype=np.uint8)
    device.register(memory[: 2 << 20])
    device.register(memory[2 << 20 :])
    device.upload(moves_of([(0, memory[1 << 20 : 3 << 20])]))
    assert runtime.calls == ["memcpy 1048576", "memcpy 1048576", "synchronized"]


def test_a_gpu_that_does_not_reach_host_memory_stages_everything(
    runtime: FakeRuntime,
) -> None:
    runtime.reaches_host = 0
    device = CudaDevice(0, POOL_BYTES)
    memory = np.arange(1 << 20, dtype=np.uint8)
    with pytest.raises(NoSpace):
        device.register(memory)
    device.upload(moves_of([(0, memory)]))
    device.close()


def test_memory_that_cannot_be_pinned_is_no_space_and_still_copied(
    device: CudaDevice,
) -> None:
    memory = np.arange(1 << 20, dtype=np.uint8)
    device.register(memory)
    with pytest.raises(NoSpace, match="cannot be pinned"):
        device.register(memory)
    device.upload(moves_of([(0, memory)]))


def test_a_pool_that_does_not_fit_is_no_space(runtime: FakeRuntime) -> None:
    with pytest.raises(NoSpace, match="cudaError 2"):
        CudaDevice(0, 1 << 40)


def test_a_device_that_is_not_there_is_unavailable(runtime: FakeRuntime) -> None:
    with pytest.raises(Unavailable, match="device=7 devices=2"):
        CudaDevice(7, POOL_BYTES)


def test_a_lost_device_is_unavailable(device: CudaDevice, runtime: FakeRuntime) -> None:
    runtime.lost = True
    with pytest.raises(Unavailable, match="cudaError 46"):
        device.upload(moves_of([(0, np.zeros(4096, dtype=np.uint8))]))
    runtime.lost = False
    device.upload(moves_of([(0, np.zeros(4096, dtype=np.uint8))]))


def test_a_wheel_that_does_not_import_is_unavailable_and_names_the_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Unavailable, match="cuda12 or cuda13"):
        CudaDevice(0, POOL_BYTES)


def test_handles_tell_whether_the_pool_can_be_shared(runtime: FakeRuntime) -> None:
    device = CudaDevice(0, POOL_BYTES)
    assert device.handle.kind is HandleKind.NOT_SHARED
    device.close()
    runtime.can_share = True
    device = CudaDevice(0, POOL_BYTES)
    assert (device.handle.kind, len(device.handle.payload)) == (HandleKind.CUDA_IPC, 64)
    assert device.handle.device == b"0000:00:00.0"
    device.close()


def test_clients_map_the_pool_by_its_handle_and_let_go_with_the_last_array(
    runtime: FakeRuntime,
) -> None:
    from kvstored.client import gpu
    from kvstored.pb import kvstored_pb2 as pb

    runtime.can_share = True
    device = CudaDevice(0, POOL_BYTES)
    memory = np.arange(8192, dtype=np.uint8)
    device.upload(moves_of([(4096, memory)]))
    handle = device.handle
    facts = pb.GpuPoolResponse(
        kind=pb.CUDA_IPC, handle=handle.payload, device=handle.device, pool_bytes=POOL_BYTES
    )
    pools = gpu.Pools()
    pool = pools.mapped(0, 1, lambda _: facts)
    part = pool.array[4096 : 4096 + 8192]
    np.testing.assert_array_equal(part, memory)
    pool.settle()
    del pool
    pools.clear()
    assert runtime.calls.count("ipc close") == 0, "an array still shows the pool"
    del part
    assert runtime.calls.count("ipc close") == 1
    assert "device synchronized" in runtime.calls
    device.close()


def test_clients_open_an_event_once_and_let_their_stream_wait_for_it(runtime: FakeRuntime) -> None:
    from kvstored.client import gpu
    from kvstored.pb import kvstored_pb2 as pb

    runtime.can_share = True
    device = CudaDevice(0, POOL_BYTES)
    copies = device.copies()
    event = copies.submit(moves_of([(0, np.zeros(4096, dtype=np.uint8))]))
    handle = device.handle
    facts = pb.GpuPoolResponse(
        kind=pb.CUDA_IPC, handle=handle.payload, device=handle.device, pool_bytes=POOL_BYTES
    )
    pool = gpu.Pools().mapped(0, 1, lambda _: facts)
    runtime.calls.clear()
    pool.wait_event(event, 77, 1.0)
    pool.wait_event(event, 77, 1.0)
    waits = [call for call in runtime.calls if call.startswith("stream 77 waits")]
    assert (runtime.calls.count("event open"), len(waits)) == (1, 2)
    del pool
    assert runtime.calls.count("event destroyed") == 1
    copies.wait(0)
    copies.close()
    device.close()


def test_use_of_a_gpu_without_its_library_is_not_known() -> None:
    assert used_bytes("0000:00:00.0", library="no-such-library.so") == 0


def test_the_footprint_is_what_came_beside_the_pool_and_what_unpacking_took(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([3 << 30, (3 << 30) + POOL_BYTES + (480 << 20)])
    monkeypatch.setattr("kvstored.tiers.nvml.used_bytes", lambda _: next(used))
    device = CudaDevice(0, POOL_BYTES)
    assert device.footprint_bytes == 480 << 20
    plain = np.arange(8192, dtype=np.uint8)
    device.expand(expansion_of([(as_it_is(plain), [(0, 8192)])]))
    taken = sum(runtime.allocated.values()) - POOL_BYTES
    assert device.footprint_bytes == (480 << 20) + taken > 480 << 20
    device.close()


def test_the_bandwidth_table_has_every_size_and_says_whether_the_target_is_reached(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench import gpu

    monkeypatch.setattr(gpu, "TOTAL_BYTES", 8 << 20)
    monkeypatch.setattr(gpu, "PACKED_BYTES", 256 << 10)
    monkeypatch.setattr(gpu, "PIECES", [64 << 10, 1 << 20])
    monkeypatch.setattr(gpu, "REPEATS", 1)
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    runtime.device_bytes = 64 << 20
    assert gpu.main() in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        *("piece", "one", "64", "1", "packed", "packed", "packed", "packed", "target:")
    ]
    runtime.devices = 0
    assert gpu.main() == 3


def test_memory_is_pinned_once_for_all_devices(runtime: FakeRuntime) -> None:
    hbm = Hbm(["0", "1"], 1 << 20, open_device)
    hbm.grow()
    hbm.grow()
    memory = np.zeros(2 << 20, dtype=np.uint8)
    hbm.register(memory)
    assert list(runtime.registered.values()) == [2 << 20]
    second = hbm._devices[1]
    assert isinstance(second, CudaDevice)
    second.upload(moves_of([(0, memory[: 1 << 20])]))
    assert runtime.calls == ["memcpy 1048576", "synchronized"]
    source = memory.ctypes.data
    assert second._pinned.reach(source, 1 << 20) == (True, 1 << 20), "staged"
    hbm.close()
    assert not runtime.registered


# ---- what scripts/gpu-check runs on a real GPU, here over the same fake


@pytest.mark.parametrize("pinned_mib", [0, 4, 8])
def test_copies_of_gpu_check(device: CudaDevice, pinned_mib: int) -> None:
    on_device.test_pieces_of_every_size_go_up_and_come_down(device, pinned_mib)


def test_hashes_of_gpu_check(device: CudaDevice) -> None:
    on_device.test_hashes_are_xxh3_of_what_lies_in_the_pool(device)


@pytest.mark.parametrize("element", [Element.BF16, Element.F8E4M3])
@pytest.mark.parametrize("step", on_device.STEPS, ids=str)
def test_kernels_of_gpu_check(device: CudaDevice, element: Element, step: Step) -> None:
    on_device.test_what_crosses_packed_becomes_the_codec_s_bytes(device, element, step)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_copies_in_order_of_gpu_check(device: CudaDevice, is_pinned: bool) -> None:
    on_device.test_copies_in_order_follow_each_other(device, is_pinned)


def test_failures_of_gpu_check(runtime: FakeRuntime) -> None:
    on_device.test_failures_are_typed()
