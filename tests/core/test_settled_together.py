"""Puts into places set aside whose books are made together end as those whose books are made one after the other, under every policy."""

from random import Random

import numpy as np
import pytest

from kvstored.core.columns import QUEUED
from kvstored.core.policies.composite import Composite
from kvstored.core.policies.named import POLICIES
from kvstored.core.types import Budget, TierId
from tests.core.desk import BLOCK_TOKENS, UNIT, Desk, spec_of

DRAM = TierId.DRAM
SINKS = spec_of("m", sink_tokens=BLOCK_TOKENS)
Path = tuple[str | None, list[str]]
"""Blocks, each below the one before, the first below this one."""


class Putter:
    def __init__(self, policy: str, *, together: bool) -> None:
        self.desk = Desk(SINKS, dram=80, policy=policy, sink_share=0.1, aside_share=0.5)
        self.together = together

    def put(self, puts: list[list[Path]]) -> int:
        """Answers how many were planned."""
        desk, planned = self.desk, 0
        count = sum(len(names) for put in puts for _, names in put)
        aside = desk.catalog.set_aside(desk.session, desk.ns, UNIT, count, desk.now_s, 1)
        free = [aside.first + i for i in range(aside.places.size)]
        for put in puts:
            names = [name for _, path in put for name in path]
            parents = [above for top, path in put for above in (top, *path[:-1])]
            if len(free) < len(names):
                break
            call = desk.namers[0].reserve(desk.session, names, parents)
            sums = np.ones(len(names), dtype=np.uint64)
            if desk.catalog.put_aside(call, free[: len(names)], sums) is not None:
                free, planned = free[len(names) :], planned + 1
            if not self.together:
                desk.catalog.settle(desk.now_s)
        desk.catalog.settle(desk.now_s)
        desk.catalog.abort(desk.session, free, desk.now_s)
        desk.catalog.check()
        return planned

    def books(self) -> list[object]:
        """What there is, by name: rows may be others."""
        books, name_of = self.desk.catalog.books, self.desk.name_of
        names = {row: name_of(books.fingerprint(row)) for row in range(books.blocks.top)
                 if books.blocks.ns[row] >= 0}  # fmt: skip
        tree, table, copies = books.tree, books.blocks, books.copies
        found: list[object] = [
            (
                name,
                names.get(int(tree.parent[row])),
                int(tree.depth[row]),
                int(table.tiers[row]),
                [
                    (int(copies.flags[copy]) & ~QUEUED, int(copies.kids[copy]))
                    for copy in books.copies_of(row)
                ],
            )
            for row, name in sorted(names.items(), key=lambda each: each[1])
        ]
        curve, policy = books.asked.curve, books.policy
        found += [curve.blocks, curve.flops, len(books.waiting), policy.dump(self.desk.now_s)]
        if isinstance(policy, Composite):
            spans = policy._spans
            of = {name: spans.of(row) for row, name in names.items() if spans.of(row) >= 0}
            for name, span in sorted(of.items()):
                profile = policy._histories.profile(span)
                history = spans.last_s[span], spans.uses[span], spans.marks[span], spans.kids[span]
                found.append((name, names[spans.head[span]], spans.size[span], profile, history))
            found += [policy._held, policy._hazard.requests, policy._hazard.blocks]
        return found

    def victims(self) -> list[str]:
        """All of them in their order; for good."""
        books, left = self.desk.catalog.books, list[str]()
        while (row := books.policy.victim(DRAM, Budget.GLOBAL, self.desk.now_s)) is not None:
            left.append(self.desk.name_of(books.fingerprint(int(books.copies.block[row]))))
        return left


def random_puts(random: Random, stored: list[str]) -> list[list[Path]]:
    """Mostly of one block; roots, below what was put before or with it, below nobody. Some come back."""
    puts: list[list[Path]] = []
    for _ in range(random.randrange(1, 14)):
        paths: list[Path] = []
        names = [str(number) for number in random.sample(range(150), 10)]
        for _ in range(random.choice((1, 1, 1, 2))):
            count = random.choice((1, 1, 1, 2, 5))
            path, names = names[:count], names[count:]
            above = random.choice((None, None, random.choice(stored or ["x"]), "nobody"))
            paths.append((None if above in path else above, path))
        stored += [path[-1] for _, path in paths]
        puts.append(paths)
    return puts


# article ranks by how many children a block has, and all of them are there by then
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "article"])
def test_together_or_one_by_one_the_books_are_the_same(policy: str) -> None:
    random, stored, planned = Random(f"settled {policy}"), list[str](), 0
    both = [Putter(policy, together=together) for together in (True, False)]
    for step in range(120):
        puts = random_puts(random, stored)
        counts = [putter.put(puts) for putter in both]
        assert counts[0] == counts[1]
        planned += counts[0]
        names, gap_s = stored[-2:], random.choice((0.0, 0.1, 2.0, 40.0))
        for putter in both:
            putter.desk.now_s += gap_s
            putter.desk.catalog.touch(putter.desk.ns, putter.desk.keys(names), putter.desk.now_s)  # type: ignore[arg-type]  # names, not letters
            putter.desk.catalog.books.policy.maintain(putter.desk.now_s)
        if step % 10 == 0:
            assert both[0].books() == both[1].books()
    assert planned > 200
    assert both[0].books() == both[1].books()
    victims = both[0].victims()
    assert victims == both[1].victims()
    assert len(victims) > 20


def test_what_is_new_of_a_path_with_a_gap_is_no_path_beside_another_of_which_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(policy="composite")
    desk.put("abc")
    desk.put("x")
    books = desk.catalog.books
    policy = books.policy
    assert isinstance(policy, Composite)
    rows = np.array([desk.copies(name)[0] for name in "abcx"], dtype=np.int32)
    blocks = books.copies.block[rows].tolist()
    is_new = np.array([True, False, True, False])
    monkeypatch.setattr(policy._spans, "are_unknown", lambda blocks: is_new)
    policy.stored(rows, (3, 1), desk.now_s)
    first, _, third, _ = (policy._spans.of(block) for block in blocks)
    assert first != third, "the third block is not right below the first"
