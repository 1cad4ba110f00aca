"""Tags of blocks: advice that fades. It moves a block a few places in the order of victims, and neither keeps nor deletes anything."""

from random import Random

import numpy as np
import pytest

from kvstored.core.classes import AMONG
from kvstored.core.feedback import SHED, FeedbackLimits
from kvstored.core.plan import Bounds
from kvstored.core.policies.named import POLICIES
from kvstored.core.tags import HALF_LIFE_S, LIFE_S, Tag
from kvstored.core.types import Part, TierId
from tests.core.desk import Desk

DRAM, NVME = TierId.DRAM, TierId.NVME
NAMES = "".join(chr(0x100 + i) for i in range(32))


def tag(desk: Desk, names: str, kind: Tag = Tag.ENTITY) -> None:
    rows = desk.catalog.books.index.find(desk.keys(names).fingerprints)
    kinds = np.full(len(rows), int(kind), dtype=np.uint8)
    assert desk.catalog.feedback.tagged(rows, kinds, desk.now_s).is_taken
    desk.catalog.check()


def tag_of(desk: Desk, name: str) -> Tag:
    row = int(desk.catalog.books.index.find(desk.keys(name).fingerprints)[0])
    return desk.catalog.books.tags.of(row, desk.now_s)


def full() -> Desk:
    """Paths of one block each, all of the same age: an hour passes without a difference."""
    desk = Desk(dram=len(NAMES))
    for name in NAMES:
        desk.put(name)
    desk.gone()
    return desk


def left(desk: Desk, count: int) -> str:
    for i in range(count):
        desk.put(chr(0x2000 + i))
    return "".join(name for name, _ in desk.gone())


def test_a_tagged_block_is_passed_over_by_the_next_few_victims() -> None:
    desk = full()
    tag(desk, NAMES[0])
    assert left(desk, 3) == NAMES[1:4]


def test_a_run_of_victims_ends_below_a_tagged_block() -> None:
    desk = Desk(dram=8)
    desk.put("abcde")
    for name in "xyz":
        desk.put(name)
    tag(desk, "c")
    desk.gone()
    desk.put("1234")
    assert [name for name, _ in desk.gone()] == ["e", "d", "x", "y"]


def test_a_tag_fades_with_the_places_that_it_is_worth() -> None:
    """All but the last of so many are tagged: as many victims are looked at as the tag is still worth."""
    for age_s, places in ((0.0, AMONG), (HALF_LIFE_S, AMONG // 2), (2 * HALF_LIFE_S, AMONG // 4)):
        for tagged in (places - 1, places):
            desk = full()
            tag(desk, NAMES[:tagged])
            desk.now_s += age_s
            expected = NAMES[tagged] if tagged < places else NAMES[0]
            assert left(desk, 1) == expected, (age_s, tagged)


def test_a_tag_is_forgotten() -> None:
    desk = full()
    tag(desk, NAMES[0], Tag.NUMBER | Tag.SIGNATURE)
    assert tag_of(desk, NAMES[0]) == Tag.NUMBER | Tag.SIGNATURE
    desk.now_s += LIFE_S
    assert tag_of(desk, NAMES[0]) == Tag(0)
    assert left(desk, 1) == NAMES[0]


def test_what_is_told_last_counts_and_nothing_takes_a_tag_away() -> None:
    desk = full()
    tag(desk, NAMES[0])
    tag(desk, NAMES[0], Tag.FIELD_LABEL)
    assert tag_of(desk, NAMES[0]) == Tag.FIELD_LABEL
    tag(desk, NAMES[0], Tag(0))
    assert left(desk, 1) == NAMES[0]


def test_a_block_that_takes_anothers_row_has_no_tag_of_it() -> None:
    desk = full()
    tag(desk, NAMES)
    fresh = "".join(chr(0x2000 + i) for i in range(8))
    before = desk.catalog.books.blocks.top
    for name in fresh:
        desk.put(name)
    assert desk.catalog.books.blocks.top <= before + 1, "rows were given to others"
    assert not any(tag_of(desk, name) for name in fresh)


def test_a_tagged_block_is_not_cold_for_attention_that_leaves_it_alone() -> None:
    desk = Desk(dram=8, nvme=16)
    for name in "abcdefgh":
        desk.put(name)
        desk.now_s += 1
    desk.write_back()
    feedback = desk.catalog.feedback
    feedback.limits = FeedbackLimits(sink_steps=8, stable_steps=1000)
    tag(desk, "g")
    for cold, new in (("h", "x"), ("g", "y")):
        rows = desk.catalog.books.index.find(desk.keys(cold).fingerprints)
        feedback.selected(rows, Part.DENSE, np.zeros((8, 1), dtype=np.bool_), 1.0, desk.now_s)
        desk.put(new)
    assert DRAM not in desk.tiers_of("h")
    assert DRAM in desk.tiers_of("g")
    assert DRAM not in desk.tiers_of("a")


def test_tags_are_shed_with_the_other_reports() -> None:
    desk = full()
    desk.catalog.feedback.limits = FeedbackLimits(blocks_per_s=0)
    rows = desk.catalog.books.index.find(desk.keys(NAMES).fingerprints)
    kinds = np.ones(len(rows), dtype=np.uint8)
    assert desk.catalog.feedback.tagged(rows, kinds, desk.now_s) is SHED
    assert tag_of(desk, NAMES[0]) == Tag(0)


@pytest.mark.parametrize("policy", POLICIES)
def test_tags_keep_nothing_and_delete_nothing(policy: str) -> None:
    """Where everything is tagged the policy's order is as without tags, and what is referenced stays."""
    for seed in range(4):
        lost: list[list[str]] = []
        for is_tagged in (False, True):
            random = Random(seed)
            desk = Desk(dram=24, nvme=48, policy=policy, high=0.9, low=0.6)
            for i in range(6):
                desk.now_s += random.random()
                desk.put(NAMES[4 * i : 4 * i + 4])
            desk.write_back()
            desk.catalog.begin_request(
                desk.session, b"r", desk.ns, desk.keys(NAMES[:4]), desk.now_s
            )
            desk.gone()
            if is_tagged:
                tag(desk, NAMES[:24])
                assert not desk.gone()
            desk.catalog.scheduler.run(Bounds({DRAM: None}), desk.now_s)
            assert all(DRAM in desk.tiers_of(name) for name in NAMES[:4])
            lost.append([name for name, _ in desk.gone()])
        assert lost[0] == lost[1], seed
