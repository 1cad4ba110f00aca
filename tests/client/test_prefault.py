"""Prefaulting maps every page, changes none, and never makes anybody wait."""

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import prefault
from kvstored.client.prefault import Prefaulter
from kvstored.paging import Bytes, Populate, touched

WAIT_S = 20.0
SIZE_BYTES = 9 << 20


def backed(size_bytes: int = SIZE_BYTES) -> Bytes:
    """A fresh mapping of shared memory that is backed and has contents already."""
    descriptor = os.memfd_create("kvstored-test")
    try:
        os.write(descriptor, np.arange(size_bytes // 8, dtype=np.uint64).tobytes())
        return np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8)
    finally:
        os.close(descriptor)


def mapped_bytes(memory: Bytes) -> int:
    """Of the mapping that begins where `memory` does: what this process has mapped of it."""
    address = memory.__array_interface__["data"][0]
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            found = next(each for each in lines if each.startswith("Rss:"))
            return int(found.split()[1]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("populate", [Populate(), touched], ids=["populate", "touch"])
def test_every_page_is_mapped_and_none_is_changed(populate: Callable[[Bytes], object]) -> None:
    memory = backed()
    assert mapped_bytes(memory) == 0
    prefaulter = Prefaulter(populate)
    prefaulter.add(memory)
    assert prefaulter.wait(WAIT_S)
    assert mapped_bytes(memory) == SIZE_BYTES
    assert np.array_equal(memory.view(np.uint64), np.arange(SIZE_BYTES // 8, dtype=np.uint64))


def test_a_kernel_without_populate_is_asked_once_and_pages_are_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstored.paging._MADV_POPULATE_READ", 9999)
    memory, populate = backed(), Populate()
    populate(memory)
    assert not populate.is_known
    assert mapped_bytes(memory) == SIZE_BYTES


def test_adding_does_not_wait_and_a_closed_one_stops_after_its_step() -> None:
    begun, go_on = threading.Event(), threading.Event()
    steps: list[int] = []

    def slow(memory: Bytes) -> None:
        steps.append(memory.size)
        begun.set()
        assert go_on.wait(WAIT_S)

    prefaulter = Prefaulter(slow)
    for _ in range(3):
        prefaulter.add(backed())  # returns although the first step has not
    assert begun.wait(WAIT_S)
    prefaulter.close()
    go_on.set()
    assert prefaulter.wait(WAIT_S)
    assert steps == [prefault.STEP_BYTES]
    prefaulter.add(backed())
    assert prefaulter.wait(WAIT_S)
    assert steps == [prefault.STEP_BYTES]


def test_what_comes_after_the_thread_ended_is_mapped_too() -> None:
    prefaulter = Prefaulter()
    for _ in range(3):
        memory = backed()
        prefaulter.add(memory)
        assert prefaulter.wait(WAIT_S)
        assert mapped_bytes(memory) == SIZE_BYTES
