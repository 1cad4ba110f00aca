"""Tests that need a GPU skip with the reason where there is none."""

import functools

import pytest


@functools.cache
def why_not() -> str:
    """Empty where a GPU can be used."""
    try:
        import cupy
    except Exception as error:  # noqa: BLE001 - a wheel for another CUDA fails in any way it likes
        return f"cupy cannot be imported: {error}"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if reason := why_not():
        pytest.skip(reason)
