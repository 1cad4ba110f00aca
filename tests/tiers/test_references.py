"""Pieces on disk that are stored as what they differ by from another one: smaller, exact, and lost with what they refer to."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.clock import ManualClock
from kvstored.codec.frame import Codec
from kvstored.codec.planner import Goal
from kvstored.core.types import Extent, Place
from kvstored.errors import Corrupt, NotFound
from kvstored.tiers.base import Link, ref_of
from kvstored.tiers.disk import Disk, Options
from kvstored.tiers.record import Base, Record
from tests.codec import real
from tests.tiers.conformance import read_one, same_bytes, write_one
from tests.tiers.test_coding import FULL_BYTES, KV, layout_of, record_of

OPTIONS = Options(map_bytes=1 << 20, slab_bytes=8 << 20, codec=Codec.FRAME, codec_goal=Goal.RATIO)
A_UNITS = FULL_BYTES // 4096


def of(variant: str) -> NDArray[np.uint8]:
    """Eight tiles, each pair begins at another token; those of `b` have the same tokens as those of `a`."""
    tiles = [np.roll(real.bits(variant), 67 * i, axis=1) for i in range(4)]
    return np.concatenate(tiles).reshape(-1).view(np.uint8)


def opened(folder: Path) -> Disk:
    disk = Disk(folder, OPTIONS, clock=ManualClock())
    disk.coding.learn(layout_of(KV))
    return disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = opened(tmp_path)
    made.grow()
    yield made
    made.close()


def wish(stored: Record) -> Base:
    """As the catalog knows it."""
    return Base(fingerprint=stored.fingerprint, place=stored.place)


def pair(disk: Disk) -> tuple[Record, Record]:
    one = write_one(disk, record_of(1, of("a")), [of("a")])
    other = replace(record_of(7, of("b"), at=200), base=wish(one), content=77)
    return one, write_one(disk, other, [of("b")])


def damaged(disk: Disk, folder: Path, place: Place) -> None:
    with (folder / f"slab-{place[0].segment:05}.dat").open("r+b") as slab:
        slab.seek(place[0].start * 4096 + 2000)
        slab.write(b"damage")


def test_the_same_tokens_after_another_prompt_take_a_third_and_come_back_exactly(
    disk: Disk,
) -> None:
    one, other = pair(disk)
    assert other.base is not None
    assert one.base is None
    assert other.stored_length < FULL_BYTES / 2.8
    assert other.stored_length < one.stored_length * 0.65
    found, target = read_one(disk, other)
    assert found == other
    assert same_bytes(target, [of("b")])
    (shown,) = disk.coding.shown()
    assert shown.p_plain_bytes == FULL_BYTES
    assert shown.p_stored_bytes == other.stored_length


def test_what_is_not_like_its_base_stands_alone(disk: Disk) -> None:
    one = write_one(disk, record_of(1, of("a")), [of("a")])
    far = np.roll(of("a"), 64 * 2 * 31)
    stored = write_one(disk, replace(record_of(7, far, at=200), base=wish(one)), [far])
    assert stored.base is None
    assert same_bytes(read_one(disk, stored)[1], [far])


def test_it_is_read_when_the_record_of_its_base_is_gone(disk: Disk) -> None:
    one, other = pair(disk)
    assert disk.discard([(ref_of(one), one.place)]) == [one]
    assert same_bytes(read_one(disk, other)[1], [of("b")])
    # and when another piece has the key of its base
    write_one(disk, record_of(1, of("a")[::-1].copy(), at=400), [of("a")[::-1].copy()])
    assert same_bytes(read_one(disk, other)[1], [of("b")])


def test_it_is_corrupt_where_its_base_is_damaged(disk: Disk, tmp_path: Path) -> None:
    one, other = pair(disk)
    damaged(disk, tmp_path, one.place)
    with pytest.raises(Corrupt):
        read_one(disk, other)


def test_it_is_corrupt_where_something_else_lies_in_its_base(disk: Disk) -> None:
    one, other = pair(disk)
    disk.discard([(ref_of(one), one.place)])
    write_one(disk, replace(record_of(3, of("b")), place=(Extent(0, 0, A_UNITS),)), [of("b")])
    with pytest.raises(Corrupt):
        read_one(disk, other)


def test_a_base_that_is_gone_moved_or_refers_itself_is_not_used(disk: Disk) -> None:
    one, other = pair(disk)
    b, at = of("b"), 400
    elsewhere = replace(wish(one), place=(Extent(0, 700, A_UNITS),))
    unknown = replace(wish(one), fingerprint=b"?" * 16)
    for number, base in zip((11, 13, 15), (elsewhere, unknown, wish(other)), strict=True):
        stored = write_one(disk, replace(record_of(number, b, at=at), base=base), [b])
        assert stored.base is None
        assert same_bytes(read_one(disk, stored)[1], [b])
        at += 70


def test_a_base_of_another_namespace_is_not_used(disk: Disk) -> None:
    disk.coding.learn(replace(layout_of(KV), digest=b"m" * 32))
    one = write_one(disk, replace(record_of(1, of("a")), digest=b"m" * 32), [of("a")])
    stored = write_one(disk, replace(record_of(7, of("b"), at=200), base=wish(one)), [of("b")])
    assert stored.base is None


def test_it_is_found_again_with_its_base_and_content(disk: Disk, tmp_path: Path) -> None:
    _, other = pair(disk)
    disk.relink([Link(ref_of(other), other.place, b"p" * 16, 5)])
    disk.close()
    again = opened(tmp_path)
    batch = again.scan(0, 100)
    assert batch.records["content"].tolist().count(77) == 1
    ((at, base),) = batch.bases.items()
    assert base == other.base
    assert batch.records["fingerprint"][at].tobytes() == other.fingerprint
    assert batch.records["depth"][at] == 5
    assert same_bytes(read_one(again, other)[1], [of("b")])
    again.close()


def test_it_can_be_discarded_like_others(disk: Disk) -> None:
    _, other = pair(disk)
    assert disk.discard([(ref_of(other), (Extent(0, 200, 1),))]) == [None]
    assert disk.discard([(ref_of(other), other.place)]) == [other]
    with pytest.raises(NotFound):
        read_one(disk, other)


def test_a_record_whose_base_lies_outside_of_the_slabs_is_forgotten(
    disk: Disk, tmp_path: Path
) -> None:
    _, other = pair(disk)
    base = other.base
    assert base is not None
    far = replace(base, place=(Extent(5, 0, A_UNITS),))
    disk._env.put([replace(other, base=far)])
    with pytest.raises(Corrupt):
        read_one(disk, other)
    batch = disk.scan(0, 100)
    assert (batch.rejected, len(batch.records)) == (1, 1)
    assert disk.records() == 1
