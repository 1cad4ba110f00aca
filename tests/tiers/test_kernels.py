"""The GPU's kernels, compiled for the host, do to the bit what the CPU codec does, and their copies move every byte once; for sm_90 they
compile without a GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from kvstored.codec import lossy, planes
from kvstored.codec.elements import FORMS, Element, words_of
from kvstored.codec.lossy import BY_CHANNEL, Grid
from kvstored.codec.plan import Method, Step
from kvstored.codec.streams import Reader, Writer
from kvstored.codec.values import floats_of, words_of_floats
from kvstored.tiers import kernels
from kvstored.tiers.device import moves_of
from kvstored.tiers.submission import Pinned, planned
from kvstored.tiers.views import at_address

SOURCE = Path(kernels.__file__).with_name("kernels.cu")
NUMBERS = [Element.BF16, Element.F16, Element.F8E4M3, Element.F8E5M2, Element.F32]
Bytes = NDArray[np.uint8]
Run = tuple[int, Bytes]


def at(array: NDArray[np.generic]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def launched(call: Callable[..., None], *arguments: object, blocks: int = 3) -> None:
    call(blocks, 32, *arguments)


def u64(value: int) -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(value)


@pytest.mark.parametrize("arch", ["sm_90"])
def test_the_kernels_compile_for_a_gpu_without_one(tmp_path: Path, arch: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed: the kernels are not compiled for a GPU here")
    cubin = tmp_path / "kernels.cubin"
    command = [nvcc, f"-arch={arch}", "-cubin", "-std=c++14", "-Werror", "all-warnings"]
    done = subprocess.run(
        [*command, "-o", str(cubin), str(SOURCE)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(name.encode() in cubin.read_bytes() for name in ("copy_runs", "dequantise"))


# ---- copies


def scattered(rng: np.random.Generator, memory: Bytes, pool_bytes: int) -> list[Run]:
    """Pieces of every size and alignment that do not overlap, each cut into a few views."""
    runs: list[Run] = []
    at_host = at_pool = 0
    for _ in range(200):
        size = int(rng.choice([1, 15, 16, 4096, 4097, kernels.TILE_BYTES, 40_000]))
        at_host += int(rng.integers(0, 40))
        at_pool += int(rng.integers(0, 40))
        if at_host + size > len(memory) or at_pool + size > pool_bytes:
            break
        cuts = sorted(rng.integers(0, size + 1, 2).tolist())
        piece = memory[at_host : at_host + size]
        at_host += size
        for part in np.split(piece, cuts):
            if len(part):
                runs.append((at_pool, part))
                at_pool += len(part)
    assert len(runs) > 50
    return runs


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0], ids=["staged", "partly pinned", "pinned"])
@pytest.mark.parametrize("blocks", [1, 32])
def test_copies_of_scattered_runs_move_every_byte_and_no_other(
    host: ctypes.CDLL, share: float, blocks: int
) -> None:
    rng = np.random.default_rng(7)
    memory = rng.integers(0, 256, 3_000_000, dtype=np.uint8)
    pool = np.full(3_200_000, 0xEE, dtype=np.uint8)
    moves = scattered(rng, memory, len(pool))
    pinned = Pinned()
    chunk = 100_000
    for begin in range(0, int(len(memory) * share), chunk):
        pinned.add(memory.ctypes.data + begin, chunk)
    expected = pool.copy()
    for offset, view in moves:
        expected[offset : offset + len(view)] = view
    carry(host, moves, pinned, pool, kernels.UPLOAD, blocks)
    np.testing.assert_array_equal(pool, expected)
    original = memory.copy()
    for _, view in moves:
        view[:] = 0
    carry(host, moves, pinned, pool, kernels.DOWNLOAD, blocks)
    np.testing.assert_array_equal(memory, original)


def carry(
    host: ctypes.CDLL,
    runs_of_views: list[Run],
    pinned: Pinned,
    pool: Bytes,
    direction: np.uint32,
    blocks: int,
) -> None:
    """As `CudaDevice` does it."""
    staging = np.empty(1 << 19, dtype=np.uint8)
    for submission in planned(moves_of(runs_of_views), pinned, len(staging), 1000):
        if direction == kernels.UPLOAD:
            for begin, address, size in submission.staged:
                staging[begin : begin + size] = at_address(address, size)
        runs = submission.runs.copy()
        runs["host"][len(runs) - len(submission.staged) :] += np.uint64(staging.ctypes.data)
        kernels.number_tiles(runs)
        count = ctypes.c_uint(len(runs))
        way = ctypes.c_uint(int(direction))
        launched(host.host_copy_runs, at(runs), count, at(pool), way, blocks=blocks)
        if direction == kernels.DOWNLOAD:
            for begin, address, size in submission.staged:
                at_address(address, size)[:] = staging[begin : begin + size]


# ---- byte planes


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 1000])
def test_planes_are_split_and_merged_as_the_codec_does(
    host: ctypes.CDLL, width: int, count: int
) -> None:
    rng = np.random.default_rng(width)
    elements = rng.integers(0, 256, count * width, dtype=np.uint8)
    words = elements.view(f"<u{width}")
    shifts = range(8 * (width - 1), -1, -8)
    expected = np.concatenate([(words >> shift).astype(np.uint8) for shift in shifts])
    made = np.empty(count * width, dtype=np.uint8)
    wide = ctypes.c_uint(width)
    launched(host.host_split_planes, at(elements), at(made), u64(count), wide)
    np.testing.assert_array_equal(made, expected)
    back = np.zeros_like(elements)
    launched(host.host_merge_planes, at(made), at(back), u64(count), wide)
    np.testing.assert_array_equal(back, elements)


# ---- lossy sections


@pytest.mark.parametrize("element", NUMBERS)
@pytest.mark.parametrize("by_channel", [0, BY_CHANNEL])
@pytest.mark.parametrize("grid", list(Grid))
@pytest.mark.parametrize("tile", [(2, 64, 128), (1, 48, 40)])
def test_quantised_values_come_back_to_the_bit_of_the_codec(
    host: ctypes.CDLL, element: Element, by_channel: int, grid: Grid, tile: tuple[int, int, int]
) -> None:
    rng = np.random.default_rng([int(element), by_channel, int(grid), tile[2]])
    count = int(np.prod(tile))
    scales = np.exp(rng.normal(0, 2, count)).astype(np.float32)
    values = np.clip(rng.normal(0, 1, count).astype(np.float32) * scales, -400, 400)
    words = words_of_floats(values, element)
    step = Step(Method.UNIFORM, int(grid) | by_channel)
    out = np.empty(8 * count + 4096, dtype=np.uint8)
    writer = Writer(out, 0)
    writer.begin(len(out))
    assert lossy.encode(writer, words, (), element, tile, step)
    stored = out[: writer.end()]
    expected = np.empty_like(words)
    lossy.decode(Reader(stored, zstandard.ZstdDecompressor()), expected, (), element, tile, step)
    low, scale, codes = parts_of(stored, tile, step.parameter)
    made = np.zeros(count * FORMS[element].width_bytes, dtype=np.uint8)
    numbers = (tile[1], tile[2], count // len(low), bool(by_channel), int(grid), int(element))
    small = [ctypes.c_uint(int(number)) for number in numbers]
    launched(host.host_dequantise, at(codes), at(low), at(scale), at(made), u64(count), *small)
    np.testing.assert_array_equal(words_of(made, element), expected)


def parts_of(
    stored: Bytes, tile: tuple[int, int, int], parameter: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], Bytes]:
    """What the streams of a section hold; entropy coding stays on the CPU."""
    reader = Reader(stored, zstandard.ZstdDecompressor())
    groups, length = lossy._group_shape(tile, parameter)
    halves = np.empty((2, groups), dtype="<u2")
    for side in halves:
        planes.decode(reader, side)
    return halves[0].copy(), halves[1].copy(), reader.take(groups * length).copy()


@pytest.mark.parametrize("element", [Element.F16, Element.F8E4M3, Element.F8E5M2])
def test_every_value_between_two_codes_is_rounded_as_the_codec_does(
    host: ctypes.CDLL, element: Element
) -> None:
    """Each finite value of the form, its middles to the next, and what lies just beside both: subnormals, ties and carries included."""
    width = FORMS[element].width_bytes
    every = floats_of(np.arange(1 << 8 * width).astype(f"<u{width}"), element)
    finite = np.unique(every[np.isfinite(every)])
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    around = np.concatenate([finite, middles])
    beside = [np.nextafter(around, np.float32(side)) for side in (-np.inf, np.inf)]
    values = np.concatenate([around, *beside]).astype(np.float32)
    expected = words_of_floats(values + np.float32(0), element)
    made = rounded_by_kernel(host, values, element)
    np.testing.assert_array_equal(words_of(made, element), expected)


def rounded_by_kernel(host: ctypes.CDLL, values: NDArray[np.float32], element: Element) -> Bytes:
    store = host.host_store_values
    made = np.zeros(len(values) * FORMS[element].width_bytes, dtype=np.uint8)
    store(at(np.ascontiguousarray(values)), at(made), u64(len(values)), ctypes.c_uint(int(element)))
    return made
