"""Sorting a million rows in slices of a few milliseconds each, for loops that must not stand still."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_SLICE_ROWS = 32_768
_CHUNK_ROWS = 8192
_SAMPLES = 16
"""Of each chunk, of which one in so many begins a chunk: more make chunks of more even sizes."""


def in_order(major: NDArray[np.float64], minor: NDArray[np.int32]) -> Iterator[NDArray[np.int64]]:
    """Row numbers by (major, minor) in chunks; empty ones before, while it is sorting. Rows of one `major` come in one chunk."""
    runs: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    for begin in range(0, len(major), _SLICE_ROWS):
        here = slice(begin, begin + _SLICE_ROWS)
        run = np.lexsort((minor[here], major[here]))
        runs.append((begin + run, major[here][run]))
        yield run[:0]
    if not runs:
        return
    samples = np.sort(np.concatenate([values[:: _CHUNK_ROWS // _SAMPLES] for _, values in runs]))
    starts = np.unique(samples[_SAMPLES::_SAMPLES])
    bounds = [[0, *np.searchsorted(values, starts).tolist(), len(run)] for run, values in runs]
    for i in range(len(starts) + 1):
        parts = [run[ends[i] : ends[i + 1]] for (run, _), ends in zip(runs, bounds, strict=True)]
        rows = np.concatenate(parts)
        yield rows[np.lexsort((minor[rows], major[rows]))]
