"""The GPU's kernels: their source, and the list of runs that copies are made of."""

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COPY_RUNS = "copy_runs"
EXPANSION = ("expand_sections", "hash_blocks", "hash_lanes", "hash_merge")
"""In the order in which they follow each other."""
UPLOAD, DOWNLOAD = np.uint32(0), np.uint32(1)
RUN = np.dtype([("host", "<u8"), ("offset", "<u8"), ("size", "<u8"), ("tile", "<u8")])
"""As `struct Run` in the source. `tile`: number of its first tile among those of all runs."""
TILE_BYTES = 16384
BLOCKS_MAX = 32
"""Of 132 multiprocessors of an H100: enough for PCIe, the others are the engine's."""
THREADS = 512


@cache
def source() -> str:
    return Path(__file__).with_name("kernels.cu").read_text()


def number_tiles(runs: NDArray[np.void]) -> int:
    """Fills in the runs' tiles; how many there are."""
    counts = (runs["size"] + np.uint64(TILE_BYTES - 1)) // np.uint64(TILE_BYTES)
    ends = np.cumsum(counts)
    runs["tile"] = ends - counts
    return int(ends[-1])
