"""Pieces go to a GPU range of layers by range of layers: every byte once, the first layers of all before the next ones of any."""

import ctypes
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.core.types import UNIT_BYTES, Extent, GroupKind, GroupSpec, NamespaceSpec
from kvstored.errors import InvalidArgument, Unavailable
from kvstored.tiers.cuda import CudaDevice
from kvstored.tiers.device import Device, Moves, moves_of
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.layered import PARTS_MAX, layers_in, layers_of, runs_of
from kvstored.tiers.record import Record
from kvstored.tiers.stand_in import HostCopies, HostDevice
from tests.tiers.conformance import piece, read_one, same_bytes, scattered
from tests.tiers.conftest import POOL_BYTES
from tests.tiers.fake_cupy import FakeCupy, FakeRuntime


@pytest.fixture
def runtime(host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime(devices=2, device_bytes=512 << 20)
    made.can_share = True
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(made, host))
    return made


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.events: list[Sequence[tuple[int, bytes]]] = []

    def submitted(self, part: int, events: Sequence[tuple[int, bytes]]) -> None:
        self.calls.append(("submitted", part))
        self.events.append(events)

    def arrived(self, part: int) -> None:
        self.calls.append(("arrived", part))


@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 61, 1000])
def test_parts_cover_all_layers_in_order(count: int) -> None:
    layers = layers_of(count)
    parts = list(layers.parts())
    assert len(parts) == min(count, PARTS_MAX)
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == count == layers.ready(len(parts))
    assert layers.ready(0) == 0
    sizes = {end - begin for begin, end in parts}
    assert max(sizes) - min(sizes) <= 1


def test_layers_that_a_piece_does_not_have_are_refused() -> None:
    groups = (GroupSpec("a", GroupKind.LINEAR, 4096), GroupSpec("b", GroupKind.LINEAR, 4098))
    spec = NamespaceSpec("m", "r", "bf16", "l", 1, block_tokens=16, groups=groups)
    assert layers_in(spec, 1, 32).count == 32
    with pytest.raises(InvalidArgument, match="'b'"):
        layers_in(spec, 3, 32)
    with pytest.raises(InvalidArgument):
        layers_in(spec, 1, 1 << 20)


def test_the_parts_of_all_runs_are_those_bytes_of_the_pieces_and_each_once() -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    items = []
    at = 0
    for number, length in enumerate([24_000, 48_000, 12, 96_000]):
        place = scattered(number * 64, -(-length // UNIT_BYTES), 3)
        cuts = sorted(rng.integers(0, length + 1, 2).tolist())
        views = [view for view in np.split(memory[at : at + length], cuts) if len(view)]
        items.append((place, views))
        at += length
    runs = runs_of(items)
    seen = np.zeros(len(memory), dtype=np.uint8)
    for begin, end in layers_of(12).parts():
        moves = runs.part(0, 12, begin, end)
        for address, size in zip(moves.addresses.tolist(), moves.sizes.tolist(), strict=True):
            first = address - memory.ctypes.data
            seen[first : first + size] += 1
        at = 0
        for length in (24_000, 48_000, 12, 96_000):
            whole = seen[at : at + length]
            np.testing.assert_array_equal(whole, np.arange(length) < length * end // 12)
            at += length


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "staged"])
def test_what_went_up_in_order_is_what_was_put(hbm: Hbm, is_pinned: bool) -> None:
    items = [piece(i, (Extent(i % 2, i * 40, 30),), 30 * UNIT_BYTES) for i in range(1, 40)]
    if is_pinned:
        for _, (source,) in items:
            hbm.register(source)
    told = Told()
    outcomes = hbm.write_in_order(items, layers_of(30), told)
    parts = range(16)
    assert told.calls == [("submitted", i) for i in parts] + [("arrived", i) for i in parts]
    assert all({segment for segment, _ in events} == {0, 1} for events in told.events)
    handles = {handle for events in told.events for _, handle in events}
    assert len(handles) == 32, "an event for each submission on each gpu"
    for outcome, (_, source) in zip(outcomes, items, strict=True):
        assert isinstance(outcome, Record)
        _, target = read_one(hbm, outcome)
        assert same_bytes(target, source)


def test_events_are_recorded_behind_their_copies_and_nothing_is_waited_for_before(
    runtime: FakeRuntime,
) -> None:
    device = CudaDevice(0, POOL_BYTES)
    memory = np.zeros(4 << 20, dtype=np.uint8)
    device.register(memory)
    pieces: list[tuple[int, NDArray[np.uint8]]] = [
        (i * 8192, memory[i * 8192 : i * 8192 + 4096]) for i in range(100)
    ]
    copies = device.copies()
    runtime.calls.clear()
    first = copies.submit(moves_of(pieces[:60]))
    second = copies.submit(moves_of(pieces[60:]))
    assert runtime.calls == ["kernel 60", "recorded", "kernel 40", "recorded"]
    assert len(first) == len(second) == 64
    assert first != second
    copies.wait(1)
    copies.close()
    again = device.copies()
    assert again.submit(moves_of(pieces[:1])) == first, "events are kept with their stream"
    again.wait(0)
    again.close()
    assert len(runtime.pinned) == 1, "one stream and one buffer for both"
    device.close()


def test_a_driver_that_shares_no_events_gives_no_handles(runtime: FakeRuntime) -> None:
    runtime.can_share = False
    device = CudaDevice(0, POOL_BYTES)
    copies = device.copies()
    assert copies.submit(moves_of([(0, np.zeros(4096, dtype=np.uint8))])) == b""
    copies.wait(0)
    copies.close()
    device.close()


class Lost(HostDevice):
    def copies(self) -> HostCopies:
        class Failing(HostCopies):
            def wait(self, number: int) -> None:
                if number == 2:
                    raise Unavailable("gpu is lost: Xid 79")
                super().wait(number)

        return Failing(self)


def test_a_device_lost_on_the_way_leaves_nothing_readable() -> None:
    def opener(name: str, size_bytes: int) -> Device:
        return Lost(size_bytes)

    hbm = Hbm(["host:0"], POOL_BYTES, opener)
    hbm.grow()
    told = Told()
    item = piece(1, (Extent(0, 3, 2),), 8192)
    (outcome,) = hbm.write_in_order([item], layers_of(8), told)
    assert isinstance(outcome, Unavailable)
    assert told.calls[-1] == ("arrived", 1)
    assert "Xid 79" in str(hbm.fault)
    assert hbm.key_at(item[0].place) == b""
    hbm.close()


def test_a_lost_gpu_is_unavailable_when_it_is_waited_for(runtime: FakeRuntime) -> None:
    device = CudaDevice(0, POOL_BYTES)
    copies = device.copies()
    copies.submit(Moves(*(np.zeros(0, dtype=np.uint64) for _ in range(3))))
    runtime.lost = True
    with pytest.raises(Unavailable, match="cudaError 46"):
        copies.wait(0)
    copies.close()
    runtime.lost = False
    device.close()
