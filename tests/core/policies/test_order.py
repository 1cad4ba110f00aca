"""Under every policy the victim is the first of all that may leave, by that policy's own order, found here by looking at all of them; and what is
stored stays whole from its head, in every tier."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstored.core.columns import READY
from kvstored.core.policies.composite import Composite
from kvstored.core.policies.lists import Listed
from kvstored.core.policies.named import POLICIES
from kvstored.core.policies.ranked import Ranked
from kvstored.core.policies.s3fifo import MAIN, SMALL, S3Fifo
from kvstored.core.policies.spells import bin_of
from kvstored.core.types import Budget, Part, TierId
from kvstored.sim.core import CoreModel
from kvstored.sim.lean import LeanModel
from tests.sim.test_core import random_kvt1

Check = Callable[[list[int], int, float], None]
"""Of all rows that may leave, the one that does, and the time."""


def check_of(model: LeanModel) -> Check:
    policy, rank = model.policy, model.copies.rank

    def by_list(rows: list[int], victim: int, _now_s: float) -> None:
        assert isinstance(policy, Listed)
        lists = policy.lists_of(model.copies.block[rows])
        mine = lists[rows.index(victim)]
        assert rank[victim] == min(rank[np.asarray(rows)[lists == mine]])

    def by_rank(rows: list[int], victim: int, _now_s: float) -> None:
        assert rank[victim] == min(rank[rows])

    def by_worth(rows: list[int], victim: int, now_s: float) -> None:
        assert isinstance(policy, Composite)
        spans, hazard = policy._spans, policy._hazard
        of = {row: spans.of(int(model.copies.block[row])) for row in rows}
        if policy._rival.is_ahead or not hazard.is_learned:
            assert spans.last_s[of[victim]] == min(spans.last_s[of[row]] for row in rows)
            return
        ends: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: spans.spell[of[row]]):
            ends.setdefault(spans.class_[of[row]], []).append(row)
        worth = {
            row: hazard.rates[spans.class_[of[row]], bin_of(now_s - spans.start_s[of[row]])]
            for rows in ends.values()
            for row in (rows[0], rows[-1])
        }
        assert worth[victim] == min(worth.values())

    def by_nothing(_rows: list[int], _victim: int, _now_s: float) -> None:
        """S3-FIFO's hands move what they pass: it is told before, by `firsts_of`."""

    if isinstance(policy, S3Fifo):
        return by_nothing
    if isinstance(policy, Listed):
        return by_list
    return by_rank if isinstance(policy, Ranked) else by_worth


def firsts_of(policy: S3Fifo, rows: list[int]) -> dict[int, set[int]]:
    """By row the only row of its queue that may be the victim: the first by place, in the main queue of those that have the fewest rounds left."""
    firsts: dict[int, set[int]] = {}
    copies = policy._ledger.copies
    for list_, uses_max in ((SMALL, 1), (MAIN, 3)):
        queue = policy._queues.get((TierId.DRAM, Budget.GLOBAL, list_), ())
        uses = {
            row: int(policy._uses[copies.block[row]])
            for rank, row in queue
            if row in rows and copies.rank[row] == rank
            if policy._list[copies.block[row]] == list_
        }
        may = [row for row in uses if uses[row] <= uses_max]
        first = may[:1] if list_ == SMALL else sorted(may, key=uses.__getitem__)[:1]
        firsts |= {row: set(first) for row in may}
    return firsts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_victim_is_the_first_of_all_that_may_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int
) -> None:
    trace = random_kvt1(tmp_path / "trace", seed, requests=300)
    model = LeanModel(policy=policy, capacity_blocks=30, block_tokens=trace.block_tokens)
    check, choose, victims = check_of(model), model.policy.victim, list[int]()

    def victim(tier: TierId, budget: Budget, now_s: float) -> int | None:
        ready = np.flatnonzero(model.copies.state[: model.copies.top] == READY)
        rows = [row for row in ready.tolist() if model.is_evictable(row)]
        order = model.policy
        firsts = firsts_of(order, rows) if isinstance(order, S3Fifo) else {}
        found = choose(tier, budget, now_s)
        assert found in firsts.get(-1 if found is None else found, {found})
        assert (found is None) == (not rows)
        if found is not None:
            check(rows, found, now_s)
            victims.append(found)
        return found

    monkeypatch.setattr(model.policy, "victim", victim)
    for request in trace:
        model.request(request.ts_s, request.block_ids)
    assert len(victims) > 50


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_is_stored_only_below_its_parent_in_every_tier(tmp_path: Path, policy: str) -> None:
    trace = random_kvt1(tmp_path / "trace", 11, requests=250)
    tiers = {TierId.DRAM: 14, TierId.NVME: 40}
    model = CoreModel(trace, policy=policy, capacity_blocks=tiers)
    books, most = model.catalog.books, dict.fromkeys(tiers, 0)
    for request in trace:
        model.request(request.ts_s, request.block_ids)
        copies = np.flatnonzero(books.copies.block[: books.copies.top] >= 0)
        for tier in tiers:
            here = copies[books.copies.tier[copies] == tier]
            parents = books.tree.parent[books.copies.block[here]]
            for parent in parents[parents >= 0].tolist():
                assert books.copy_in(parent, tier, Part.DENSE) >= 0
            most[tier] = max(most[tier], len(here))
    assert model.evicted_blocks > 100
    assert most == tiers


def test_what_is_evicted_has_no_child_in_its_tier(tmp_path: Path) -> None:
    trace = random_kvt1(tmp_path / "trace", 12, requests=250)
    parent_of: dict[int, int] = {}
    order: list[int] = []
    for policy in POLICIES:
        model = LeanModel(policy=policy, capacity_blocks=25, block_tokens=16, evictions=order)
        stored: set[int] = set()
        for request in trace:
            ids = request.block_ids.tolist()
            parent_of.update(zip(ids[1:], ids[:-1], strict=True))
            stored.update(ids)
            order.clear()
            model.request(request.ts_s, request.block_ids)
            for block in order:
                stored.remove(block)
                assert block not in {parent_of.get(child, -1) for child in stored}
