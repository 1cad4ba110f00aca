"""Load or recompute: the cuts are the best of all cuts, and the times are those of the tiers and the queue."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from kvstored.core.advice import HitPath, Prefill, TierSpeed, advise
from kvstored.core.speed import Line, Speed
from kvstored.core.types import TierId

DRAM, NVME = TierId.DRAM, TierId.NVME
MIB = 1 << 20
SPEEDS = {
    DRAM: TierSpeed(Line(0.0, 1e-10)),
    NVME: TierSpeed(Line(0.002, 1e-9), queue_s=0.01),
}
KNOWN = Prefill(work_per_s=10_000.0, source="asked")
"""Tokens a second."""


def path_of(
    tiers: Sequence[TierId],
    *,
    size: int = MIB,
    tokens: int = 256,
    boundaries: Sequence[int] | None = None,
    resume_bytes: int = 0,
) -> HitPath:
    count = len(tiers)
    is_boundary = np.ones(count, dtype=np.bool_)
    if boundaries is not None:
        is_boundary[:] = False
        is_boundary[list(boundaries)] = True
    return HitPath(
        np.asarray(tiers, dtype=np.uint8),
        np.full(count, size, dtype=np.int64),
        np.full(count, tokens, dtype=np.int64),
        is_boundary,
        resume_bytes,
    )


def test_blocks_in_memory_take_no_queue_and_blocks_on_disk_are_copied_out_of_memory_too() -> None:
    advice = advise(path_of([DRAM, DRAM, NVME]), SPEEDS, KNOWN)
    assert advice.load_bytes == (0, 2 * MIB, MIB, 0)
    assert advice.load_s[DRAM] == pytest.approx(2 * MIB * 1e-10)
    assert advice.load_s[NVME] == pytest.approx(0.012 + MIB * 1.1e-9)
    assert advice.total_load_s == pytest.approx(sum(advice.load_s))
    assert advice.queue_s == 0.01
    assert advise(path_of([DRAM]), SPEEDS, KNOWN).queue_s == 0.0


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    slow = {DRAM: SPEEDS[DRAM], NVME: TierSpeed(Line(0.002, 1e-6))}
    advice = advise(path_of([DRAM, DRAM, NVME, NVME]), slow, KNOWN)
    assert advice.split_blocks == 2
    assert advice.split_tokens == 512
    assert advice.split_s == pytest.approx(2 * MIB * 1e-10 + 512 / 10_000)


def test_a_fast_tier_is_loaded_whole() -> None:
    advice = advise(path_of([DRAM] * 8), SPEEDS, KNOWN)
    assert advice.split_blocks == 8
    assert advice.split_s == advice.total_load_s < advice.prefill_s


def test_computing_the_head_while_the_tail_loads_is_no_slower_than_either_alone() -> None:
    even = {DRAM: SPEEDS[DRAM], NVME: TierSpeed(Line(1e-4, 256 / 10_000 / MIB))}
    advice = advise(path_of([NVME] * 16), even, KNOWN)
    assert advice.overlap_blocks in (8, 9)
    assert advice.overlap_s < 0.6 * min(advice.prefill_s, advice.total_load_s)


def test_nothing_is_said_of_computing_where_its_speed_is_not_known() -> None:
    advice = advise(path_of([NVME] * 4), SPEEDS, Prefill())
    assert (advice.prefill_s, advice.prefill_source, advice.split_blocks) == (0.0, "", 4)


def test_a_path_is_cut_only_where_it_can_be_resumed() -> None:
    slow = {DRAM: SPEEDS[DRAM], NVME: TierSpeed(Line(0.0, 1e-7))}
    advice = advise(path_of([DRAM] * 3 + [NVME] * 5, boundaries=[1, 5]), slow, KNOWN, 1.0)
    assert advice.split_blocks in (0, 2, 6)
    assert advice.deadline_blocks == 6
    assert advice.overlap_blocks == 8, "the end cannot be resumed: all of it is computed"


def test_what_is_read_at_the_resumption_counts_once() -> None:
    plain, resumed = (
        advise(path_of([NVME] * 4, resume_bytes=each), SPEEDS, KNOWN) for each in (0, MIB)
    )
    assert resumed.total_load_s - plain.total_load_s == pytest.approx(MIB * 1.1e-9)


def test_the_cuts_are_the_best_of_all_that_there_are() -> None:
    for seed in range(200):
        random = Random(seed)
        count = random.randrange(0, 12)
        tiers = [random.choice((DRAM, NVME)) for _ in range(count)]
        boundaries = [i for i in range(count) if random.random() < 0.7]
        path = path_of(tiers, boundaries=boundaries, resume_bytes=random.choice((0, MIB)))
        speeds = {
            DRAM: TierSpeed(Line(1e-5, 10 ** random.uniform(-11, -8))),
            NVME: TierSpeed(Line(1e-4, 10 ** random.uniform(-10, -7)), random.choice((0.0, 0.05))),
        }
        deadline_s = 10 ** random.uniform(-4, 0)
        advice = advise(path, speeds, KNOWN, deadline_s)
        loads = [load_of(path, speeds, k) for k in range(count + 1)]
        cuts = [0, *(i + 1 for i in boundaries)]
        times = {k: loads[k] + (count - k) * 256 / 10_000 for k in cuts}
        if count:
            assert advice.split_s == pytest.approx(min(times.values())), seed
            assert times[advice.split_blocks] == pytest.approx(min(times.values())), seed
        assert advice.deadline_blocks == max(k for k in cuts if loads[k] <= deadline_s), seed
        assert advice.deadline_tokens == 256 * advice.deadline_blocks


def load_of(path: HitPath, speeds: dict[TierId, TierSpeed], count: int) -> float:
    total = 0.0
    memory = speeds[DRAM].line
    for tier in (DRAM, NVME):
        blocks = [i for i in range(count) if path.tiers[i] == tier]
        if blocks:
            line = speeds[tier].line
            more = memory if tier == NVME else Line(0.0, 0.0)
            size = int(sum(path.size_bytes[blocks]))
            size += path.resume_bytes * (count - 1 in blocks)
            total += speeds[tier].queue_s + line.fixed_s + more.fixed_s
            total += size * (line.size_s + more.size_s)
    return total


# ---- speeds


def test_a_speed_is_learned_from_work_of_many_sizes() -> None:
    speed = Speed(Line(300e-6, 1e-9))
    random = Random(1)
    for _ in range(300):
        size = 2 ** random.uniform(12, 24)
        speed.note(size, (1e-3 + size * 4e-9) * random.uniform(0.9, 1.1))
    assert speed.line.fixed_s == pytest.approx(1e-3, rel=0.2)
    assert speed.line.size_s == pytest.approx(4e-9, rel=0.2)


def test_work_of_one_size_is_predicted_at_that_size() -> None:
    speed = Speed(Line(300e-6, 1e-9))
    for _ in range(100):
        speed.note(MIB, 5e-3)
    assert speed.line.seconds(MIB) == pytest.approx(5e-3, rel=0.1)
    assert speed.line.seconds(4 * MIB) > speed.line.seconds(MIB)


def test_a_speed_that_changes_is_learned_anew() -> None:
    speed = Speed(Line(300e-6, 1e-9))
    for seconds in [1e-3] * 200 + [20e-3] * 200:
        speed.note(MIB, seconds)
    assert speed.line.seconds(MIB) == pytest.approx(20e-3, rel=0.2)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    speed = Speed(Line(300e-6, 1e-9))
    speed.note(MIB, 0.0)
    assert speed.line == Line(300e-6, 1e-9)


def test_times_never_shrink_with_the_size() -> None:
    for seed in range(100):
        random = Random(seed)
        speed = Speed(Line(300e-6, 1e-9))
        for _ in range(random.randrange(60)):
            speed.note(2 ** random.uniform(0, 32), 10 ** random.uniform(-6, 2))
        line = speed.line
        assert line.size_s > 0, seed
        assert line.fixed_s >= 0, seed
