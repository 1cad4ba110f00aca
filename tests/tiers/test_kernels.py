"""The GPU's kernels, compiled for the host, do to the bit what the CPU codec does, and their copies move every byte once; for sm_90 they
compile without a GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from kvstored.codec import blocks, unpacked
from kvstored.codec.elements import FORMS, Element, words_of
from kvstored.codec.frame import Codec
from kvstored.codec.lossy import BY_CHANNEL, Grid
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.values import floats_of, words_of_floats
from kvstored.core.types import UNIT_BYTES
from kvstored.tiers import kernels
from kvstored.tiers.device import moves_of
from kvstored.tiers.expansion import Expansion, expansion_of, hash_tables
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
    assert all(
        name.encode() in cubin.read_bytes()
        for name in ("copy_runs", "expand_sections", "hash_lanes")
    )


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


# ---- packed sections


def extents_of(rng: np.random.Generator, length: int, extents: int) -> list[tuple[int, int]]:
    """Whole units but for the last extent, in any order in a pool, with gaps."""
    units = -(-length // UNIT_BYTES)
    cuts = sorted(rng.choice(np.arange(1, units), min(extents, units) - 1, replace=False).tolist())
    begins, ends = [0, *cuts], [*cuts, units]
    places = rng.permutation(2 * units)[: len(begins)] * 2 * units * UNIT_BYTES
    sizes = [(end - begin) * UNIT_BYTES for begin, end in zip(begins, ends, strict=True)]
    sizes[-1] -= units * UNIT_BYTES - length
    return list(zip(places.tolist(), sizes, strict=True))


def expanded(host: ctypes.CDLL, expansion: Expansion, pool_bytes: int) -> Bytes:
    """As `CudaDevice` does it, window by window."""
    pool = np.full(pool_bytes, 0xEE, dtype=np.uint8)
    for window in expansion.windows(96 << 10, 7):
        sections, packed = np.ascontiguousarray(window.sections), window.packed.copy()
        launched(host.host_expand_sections, at(sections), ctypes.c_uint(len(sections)), at(packed), at(pool))  # fmt: skip
    return pool


def read_back(pool: Bytes, extents: list[tuple[int, int]]) -> Bytes:
    return np.concatenate([pool[offset : offset + size] for offset, size in extents])


STEPS = [
    Step(Method.PLANES),
    Step(Method.EXPONENTS),
    Step(Method.ZSTD, 1),
    *(Step(Method.UNIFORM, int(grid)) for grid in Grid),
    *(Step(Method.UNIFORM, int(grid) | BY_CHANNEL) for grid in (Grid.INT8, Grid.FP4)),
    *(Step(Method.ROTATED, bits) for bits in (2, 3, 4)),
    *(Step(Method.BOUNDED, power) for power in (1, 4, 6)),
]


@pytest.mark.parametrize("element", NUMBERS)
@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (48, 40)])
def test_what_crosses_packed_becomes_the_bytes_of_the_codec(
    host: ctypes.CDLL, element: Element, step: Step, rows: int, columns: int
) -> None:
    rng = np.random.default_rng([int(element), step.method, step.parameter, columns])
    count = 3 * rows * columns
    scales = np.exp(rng.normal(0, 2, count)).astype(np.float32)
    values = np.clip(rng.normal(0, 1, count).astype(np.float32) * scales, -400, 400)
    plain = words_of_floats(values, element).view(np.uint8)
    width = FORMS[element].width_bytes
    plain = plain[: len(plain) - (width > 1)]  # the last element is cut off
    plan = Plan(element, (step,), rows, columns, section_bytes=rows * columns * width)
    frame = blocks.encode(plain, plan)
    expected = np.empty_like(plain)
    blocks.decode(frame, expected)
    piece = unpacked.unpack(Codec.FRAME, frame, len(plain))
    items = [(piece, extents_of(rng, len(plain), extents)) for extents in (1, 3)]
    items[1] = (piece, [(offset + (16 << 20), size) for offset, size in items[1][1]])
    pool = expanded(host, expansion_of(items), 32 << 20)
    touched = 0
    for _, extents in items:
        np.testing.assert_array_equal(read_back(pool, extents), expected)
        touched += len(expected)
    assert np.count_nonzero(pool != 0xEE) <= touched, "bytes beside the pieces were written"


@pytest.mark.parametrize("element", [Element.BF16, Element.F16, Element.F32])
@pytest.mark.parametrize(
    ("rows", "columns"), [(256, 16), (255, 16), (0, 0)], ids=["even", "odd", "unknown"]
)
@pytest.mark.parametrize("far", [0, 10, 600])
def test_exponents_in_any_layout_and_with_exceptions_become_the_bytes_of_the_codec(
    host: ctypes.CDLL, element: Element, rows: int, columns: int, far: int
) -> None:
    rng = np.random.default_rng([rows, far])
    count, width = 3 * 255 * 16 + far % 7, FORMS[element].width_bytes
    plain = words_of_floats(rng.normal(0, 1, count).astype(np.float32), element)
    plain[rng.integers(0, count, far)] = 0
    plain[-1:] = 0
    plain = plain.view(np.uint8)
    plan = Plan(element, (Step(Method.EXPONENTS),), rows, columns, (rows or 255) * 16 * width)
    piece = unpacked.unpack(Codec.FRAME, blocks.encode(plain, plan), len(plain))
    extents = extents_of(rng, len(plain), 3)
    pool = expanded(host, expansion_of([(piece, extents)]), 4 << 20)
    np.testing.assert_array_equal(read_back(pool, extents), plain)


@pytest.mark.parametrize("blocks", [1, 5])
def test_hashes_of_what_lies_in_the_pool_are_xxh3(host: ctypes.CDLL, blocks: int) -> None:
    rng = np.random.default_rng(11)
    pool = rng.integers(0, 256, 64 << 20, dtype=np.uint8)
    lengths = [
        241,
        1023,
        1024,
        1025,
        1087,
        1088,
        4096,
        4097,
        4159,
        4160,
        8192 + 63,
        100_000,
        1 << 20,
    ]
    pieces = [
        extents_of(rng, length, extents)
        for length in lengths
        for extents in (1, 2, 5)
        if -(-length // UNIT_BYTES) >= extents
    ]
    pieces = [[(offset % (32 << 20), size) for offset, size in piece] for piece in pieces]
    found = hashed(host, pool, pieces, blocks)
    assert found == [xxhash.xxh3_64_intdigest(read_back(pool, piece).tobytes()) for piece in pieces]
    pool[pieces[-1][0][0] + 5] ^= 1
    assert hashed(host, pool, pieces, blocks)[-1] != found[-1]


def hashed(
    host: ctypes.CDLL, pool: Bytes, pieces: list[list[tuple[int, int]]], blocks: int
) -> list[int]:
    tables = hash_tables(pieces)
    sums = np.empty(max(1, tables.blocks) * 8, dtype=np.uint64)
    lanes = np.empty(len(pieces) * 8, dtype=np.uint64)
    hashes = np.empty(len(pieces), dtype=np.uint64)
    rows = ctypes.c_uint(len(pieces))
    stretches = (at(tables.stretches), ctypes.c_uint(len(tables.stretches)), u64(tables.blocks))
    launched(host.host_hash_blocks, *stretches, at(pool), at(sums), blocks=blocks)
    launched(host.host_hash_lanes, at(tables.pieces), rows, at(pool), at(sums), at(lanes), blocks=blocks)  # fmt: skip
    launched(host.host_hash_merge, at(tables.pieces), rows, at(lanes), at(hashes), blocks=blocks)
    found: list[int] = hashes.tolist()
    return found


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
