"""Copies between pinned host memory and a GPU's pool in scattered pieces, beside one large cudaMemcpyAsync of as many bytes: `python -m bench.gpu`.

Each figure is the median of five copies of TOTAL_BYTES, the planning of the submission included; pieces lie in random order on both sides.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstored.codec import blocks
from kvstored.codec.elements import Element
from kvstored.codec.frame import Codec
from kvstored.codec.lossy import Grid
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.unpacked import as_it_is, unpack
from kvstored.codec.values import words_of_floats
from kvstored.errors import KvstoredError
from kvstored.tiers.cuda import CudaDevice
from kvstored.tiers.device import Moves
from kvstored.tiers.expansion import expansion_of
from kvstored.tiers.submission import Pinned

TOTAL_BYTES = 256 << 20
PACKED_BYTES = 1 << 20
PIECES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 32 << 20]
REPEATS = 5
TARGET_BYTES, TARGET = 64 << 10, 0.8
TO_DEVICE, TO_HOST, BETWEEN = 1, 2, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, default=0)
    arguments = parser.parse_args()
    try:
        device = CudaDevice(arguments.device, 2 * TOTAL_BYTES)
    except KvstoredError as error:
        print(f"no GPU to measure: {error}")
        return 3
    memory = np.zeros(TOTAL_BYTES, dtype=np.uint8)
    for begin in range(0, TOTAL_BYTES, 64 << 20):
        device.register(memory[begin : begin + (64 << 20)])
    try:
        return report(device, memory)
    finally:
        device.close()


def report(device: CudaDevice, memory: np.ndarray) -> int:  # type: ignore[type-arg]
    runtime: Any = device._runtime  # the ceiling is measured below the tier on purpose
    name = bytes(runtime.getDeviceProperties(device._ordinal)["name"]).decode()
    driver, version = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    print(f"{name}, driver {driver}, runtime {version}, {TOTAL_BYTES >> 20} MiB a copy, GB/s")
    ceilings = [ceiling(device, memory, kind) for kind in (TO_DEVICE, TO_HOST, BETWEEN)]
    print(f"{'piece':>9} {'H2D':>7} {'share':>6} {'D2H':>7} {'share':>6} {'D2D':>7} {'share':>6}")
    print(f"{'one large':>9} " + " ".join(f"{c:7.1f} {'1.00':>6}" for c in ceilings))
    reached = 0.0
    for piece in PIECES:
        moves = scattered(memory, piece)
        speeds = [
            speed(lambda moves=moves: device.upload(moves)),  # type: ignore[misc]
            speed(lambda moves=moves: device.download(moves)),  # type: ignore[misc]
            speed(lambda piece=piece: between(device, piece)),  # type: ignore[misc]
        ]
        shares = [s / c for s, c in zip(speeds, ceilings, strict=True)]
        cells = [f"{s:7.1f} {share:6.2f}" for s, share in zip(speeds, shares, strict=True)]
        print(f"{label(piece):>9} " + " ".join(cells))
        if piece == TARGET_BYTES:
            reached = min(shares[:2])
    for line in packed(device):
        print(line)
    verdict = "reached" if reached >= TARGET else "missed"
    print(
        f"target: {TARGET} of one large copy for {label(TARGET_BYTES)} pieces: {reached:.2f}, {verdict}"
    )
    return 0 if reached >= TARGET else 1


def packed(device: CudaDevice) -> Iterator[str]:
    """Pieces that cross packed: plain bytes a second, the hash of what lies in the pool included. `plain`: the same bytes, hashed but not coded."""
    values = np.random.default_rng(1).normal(0, 1, PACKED_BYTES // 2).astype(np.float32)
    plain = words_of_floats(values, Element.BF16).view(np.uint8)
    whole = as_it_is(plain)
    steps = {
        "planes": Step(Method.PLANES),
        "exponents": Step(Method.EXPONENTS),
        "int8": Step(Method.UNIFORM, int(Grid.INT8)),
    }
    kinds = {"plain": whole}
    for name, step in steps.items():
        frame = blocks.encode(plain, Plan(Element.BF16, (step,), rows=256, columns=128))
        kinds[name] = unpack(Codec.FRAME, frame, len(plain))
    count = TOTAL_BYTES // PACKED_BYTES
    for name, piece in kinds.items():
        items = [(piece, [(i * PACKED_BYTES, PACKED_BYTES)]) for i in range(count)]
        expansion = expansion_of(items)
        figure = speed(lambda expansion=expansion: device.expand(expansion))  # type: ignore[misc]
        share = len(expansion.packed) / TOTAL_BYTES
        yield f"packed {name}: {figure:.1f} in {label(PACKED_BYTES)} pieces, of which {share:.2f} cross"


def scattered(memory: np.ndarray, piece: int) -> Moves:  # type: ignore[type-arg]
    rng = np.random.default_rng(piece)
    count = TOTAL_BYTES // piece
    addresses = memory.ctypes.data + rng.permutation(count).astype(np.uint64) * np.uint64(piece)
    offsets = rng.permutation(count).astype(np.uint64) * np.uint64(piece)
    return Moves(offsets, addresses, np.full(count, piece, dtype=np.uint64))


def between(device: CudaDevice, piece: int) -> None:
    """From one half of the pool to the other: to the kernel device memory is memory that it reaches like any other."""
    rng = np.random.default_rng(piece)
    count = TOTAL_BYTES // piece
    own = np.uint64(device._pool + TOTAL_BYTES)
    addresses = own + rng.permutation(count).astype(np.uint64) * np.uint64(piece)
    offsets = rng.permutation(count).astype(np.uint64) * np.uint64(piece)
    on_host, device._pinned = device._pinned, Pinned()
    device._pinned.add(device._pool, 2 * TOTAL_BYTES)
    try:
        device.upload(Moves(offsets, addresses, np.full(count, piece, dtype=np.uint64)))
    finally:
        device._pinned = on_host


def ceiling(device: CudaDevice, memory: np.ndarray, kind: int) -> float:  # type: ignore[type-arg]
    """Chunk by chunk, as the memory was pinned: a copy over the end of a chunk is refused."""
    runtime: Any = device._runtime
    stream: Any = device._cupy.cuda.Stream(non_blocking=True)
    chunk = min(64 << 20, TOTAL_BYTES)

    def copy() -> None:
        for begin in range(0, TOTAL_BYTES, chunk):
            host, own = memory.ctypes.data + begin, device._pool + begin
            other = own + TOTAL_BYTES
            to, source = {
                TO_DEVICE: (own, host),
                TO_HOST: (host, own),
                BETWEEN: (other, own),
            }[kind]
            runtime.memcpyAsync(to, source, chunk, kind, stream.ptr)
        stream.synchronize()

    return speed(copy)


def speed(copy: Callable[[], object]) -> float:
    """GB/s, after one copy that is not counted."""
    copy()
    taken: list[float] = []
    for _ in range(REPEATS):
        begun_s = time.perf_counter()
        copy()
        taken.append(time.perf_counter() - begun_s)
    return TOTAL_BYTES / statistics.median(taken) / 1e9


def label(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


if __name__ == "__main__":
    raise SystemExit(main())
