"""Pieces that may come back near: only where the group allows it, by class, once, and the record says so."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstored.clock import ManualClock
from kvstored.codec import levels, report
from kvstored.codec.elements import Element
from kvstored.codec.frame import Codec
from kvstored.core.types import GroupKind, GroupSpec, Heat
from kvstored.tiers import views as memory
from kvstored.tiers.disk import Disk, Options
from kvstored.tiers.record import Base, Record
from kvstored.tiers.values import LOSSY
from tests.tiers.conformance import read_one, same_bytes, write_one
from tests.tiers.test_coding import FULL_BYTES, block, layout_of, record_of
from tests.tiers.test_references import of

OPTIONS = Options(map_bytes=1 << 20, slab_bytes=8 << 20, codec=Codec.FRAME)
LOSSY_KV = GroupSpec("kv", GroupKind.LINEAR, FULL_BYTES, lossy_ok=True)


def disk_of(folder: Path, *groups: GroupSpec, lossy: str = "cold=int4,shared=int8") -> Disk:
    made = Disk(folder, replace(OPTIONS, lossy=levels.parsed(lossy)), clock=ManualClock())
    made.grow()
    made.coding.learn(layout_of(*groups))
    return made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = disk_of(tmp_path, LOSSY_KV)
    yield made
    made.close()


def stored(disk: Disk, heat: Heat, number: int = 1, **values: object) -> Record:
    record = replace(record_of(number, block(), at=70 * number), heat=int(heat), **values)  # type: ignore[arg-type]  # fields of a record
    return write_one(disk, record, [block()])


def test_cold_blocks_come_back_near_and_their_record_says_so(disk: Disk) -> None:
    made = stored(disk, Heat.COLD)
    assert made.flags & LOSSY
    assert made.stored_length < FULL_BYTES / 3
    found, target = read_one(disk, made)
    assert found == made
    whole = np.concatenate(target)
    assert made.checksum == memory.hash_of([whole]) != memory.hash_of([block()])
    assert report.error_max(block(), whole, Element.BF16) > 0
    assert report.error_report(block(), whole, Element.BF16).cosine > 0.99


def test_the_class_says_how_near(disk: Disk) -> None:
    sizes = [
        stored(disk, heat, i).stored_length for i, heat in enumerate((Heat.COLD, Heat.SHARED), 1)
    ]
    assert sizes[0] * 1.5 < sizes[1]
    for i, heat in enumerate((Heat.SINK, Heat.RECENT), 3):
        made = stored(disk, heat, i)
        assert not made.flags & LOSSY
        assert same_bytes(read_one(disk, made)[1], [block()])


def test_what_is_not_exact_any_more_loses_no_more(disk: Disk) -> None:
    made = stored(disk, Heat.COLD, flags=LOSSY)
    assert made.flags & LOSSY
    assert same_bytes(read_one(disk, made)[1], [block()])


@pytest.mark.parametrize(
    "group",
    [
        replace(LOSSY_KV, lossy_ok=False),
        replace(LOSSY_KV, name="kv_rope"),
        replace(LOSSY_KV, name="indexer"),
        replace(LOSSY_KV, resident=True),
        replace(LOSSY_KV, kind=GroupKind.WINDOW, window_tokens=256, per_block=True),
    ],
)
def test_groups_that_must_be_exact_are(tmp_path: Path, group: GroupSpec) -> None:
    disk = disk_of(tmp_path, group)
    made = stored(disk, Heat.COLD)
    assert not made.flags & LOSSY
    assert same_bytes(read_one(disk, made)[1], [block()])
    disk.close()


def test_bounded_ones_may_refer_and_others_do_not(tmp_path: Path) -> None:
    for name, refers in (("bounded32", True), ("int4", False)):
        disk = disk_of(tmp_path / name, LOSSY_KV, lossy=f"cold={name}")
        one = write_one(disk, replace(record_of(1, of("a")), heat=int(Heat.SINK)), [of("a")])
        base = Base(fingerprint=one.fingerprint, place=one.place)
        other = replace(record_of(7, of("b"), at=200), heat=int(Heat.COLD), base=base)
        made = write_one(disk, other, [of("b")])
        assert (made.base is not None) is refers
        assert made.flags & LOSSY
        found, target = read_one(disk, made)
        assert found == made
        error = report.error_report(of("b"), np.concatenate(target), Element.BF16)
        assert error.cosine > 0.99
        disk.close()
