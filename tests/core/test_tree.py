"""PrefixTree against a naive map from row to parent."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstored.core import tree as tree_module
from kvstored.core.tree import PrefixTree

PICK = st.integers(min_value=0)


class TreeAgainstParents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.parents: dict[int, int] = {}
        self.unused = list(range(40))

    def path(self, row: int) -> list[int]:
        path = [row]
        while self.parents[path[-1]] != -1:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def children(self, row: int) -> list[int]:
        return [child for child, parent in self.parents.items() if parent == row]

    def pick(self, number: int, rows: list[int]) -> int:
        return rows[number % len(rows)]

    @precondition(lambda self: self.unused)
    @rule()
    def add(self) -> None:
        row = self.unused.pop()
        self.tree.add(row)
        self.parents[row] = -1

    @precondition(lambda self: self.unused and self.parents)
    @rule(parent=PICK, length=st.integers(1, 5))
    def grow_a_run(self, parent: int, length: int) -> None:
        above = self.pick(parent, list(self.parents))
        for _ in range(min(length, len(self.unused))):
            row = self.unused.pop()
            self.tree.add(row)
            assert self.tree.link(row, above)
            self.parents[row] = above
            above = row

    @precondition(lambda self: self.parents)
    @rule(root=PICK, parent=PICK)
    def link(self, root: int, parent: int) -> None:
        row = self.pick(root, [row for row, above in self.parents.items() if above == -1])
        above = self.pick(parent, list(self.parents))
        is_cycle = self.path(above)[0] == row
        assert self.tree.link(row, above) is not is_cycle
        if not is_cycle:
            self.parents[row] = above

    @precondition(lambda self: self.parents)
    @rule(leaf=PICK)
    def remove(self, leaf: int) -> None:
        row = self.pick(leaf, [row for row in self.parents if not self.children(row)])
        self.tree.remove(row)
        del self.parents[row]
        self.unused.append(row)

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        for row in self.unused:
            assert self.tree.node_of(row) == self.tree.parent[row] == -1
            assert self.tree.depth[row] == self.tree.children[row] == 0
        for row, parent in self.parents.items():
            assert self.tree.parent[row] == parent
            assert self.tree.path(row).tolist() == self.path(row)
            assert self.tree.depth[row] == len(self.path(row)) - 1
            assert sorted(self.tree.children_of(row)) == sorted(self.children(row))
            assert self.tree.children[row] == len(self.children(row))

    @invariant()
    def nodes_are_the_maximal_runs(self) -> None:
        starts = [
            row
            for row, parent in self.parents.items()
            if parent == -1 or len(self.children(parent)) > 1
        ]
        expected = {}
        for head in starts:
            run = [head]
            while len(self.children(run[-1])) == 1:
                run.extend(self.children(run[-1]))
            expected[head] = run
        found = {int(node.head): node for node in self.tree.nodes(0, 1_000)}
        assert found.keys() == expected.keys()
        assert self.tree.node_count == len(expected)
        for head, run in expected.items():
            node = found[head]
            assert (node.tail, node.length) == (run[-1], len(run))
            assert all(self.tree.node_of(row) == node.id for row in run)
            above = self.parents[head]
            assert node.parent == (-1 if above == -1 else self.tree.node_of(above))
            below = [self.tree.node_of(child) for child in self.children(run[-1])]
            assert sorted(node.children) == sorted(below)


TreeAgainstParents.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestTreeAgainstParents = TreeAgainstParents.TestCase


def chain(tree: PrefixTree, rows: range, parent: int = -1) -> None:
    tree.ensure(rows.stop)
    for row in rows:
        tree.add(row)
        if parent >= 0:
            assert tree.link(row, parent)
        parent = row


def test_a_late_link_mends_the_depths_below() -> None:
    tree = PrefixTree()
    chain(tree, range(10))
    chain(tree, range(10, 20))
    chain(tree, range(20, 30), parent=14)
    assert tree.link(10, 9)
    assert tree.depth[:20].tolist() == list(range(20))
    assert tree.depth[20:30].tolist() == list(range(15, 25))
    tree.check()


def test_the_longer_side_keeps_its_node_when_a_run_splits_and_joins() -> None:
    tree = PrefixTree()
    tree.ensure(101)
    chain(tree, range(100))
    whole = tree.node_of(0)
    for row, kept in ((20, 99), (80, 0)):
        tree.add(100)
        assert tree.link(100, row)
        assert tree.node_of(kept) == whole
        assert tree.node_count == 3
        tree.remove(100)
        assert tree.node_of(0) == tree.node_of(99) == whole
        assert tree.node_count == 1
    tree.check()


def test_children_come_newest_first() -> None:
    tree = PrefixTree()
    for row in range(4):
        tree.add(row)
    for row in (2, 1, 3):
        assert tree.link(row, 0)
    assert tree.children_of(0) == [3, 1, 2]


def test_nodes_are_listed_in_bounded_slices() -> None:
    tree = PrefixTree()
    for row in range(10):
        tree.add(row)
    tree.remove(4)
    first = list(tree.nodes(0, 6))
    rest = list(tree.nodes(first[-1].id + 1, 6))
    assert [node.head for node in first + rest] == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_too_large_a_subtree_stays_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "SUBTREE_BLOCKS_MAX", 20)
    tree = PrefixTree()
    chain(tree, range(20))
    tree.add(30)
    assert tree.link(0, 30)
    chain(tree, range(40, 61))
    assert not tree.link(40, 30)
    assert tree.parent[40] == -1
    assert tree.depth[60] == 20
    tree.check()


def test_the_columns_keep_their_rows_when_they_grow() -> None:
    tree = PrefixTree()
    chain(tree, range(50))
    tree.ensure(10_000)
    chain(tree, range(9_000, 9_050), parent=49)
    assert tree.path(9_049).tolist() == [*range(50), *range(9_000, 9_050)]
    assert tree.parent.dtype == np.int32
    assert len(tree.parent) >= 10_000
    tree.check()


def test_wrong_calls_are_bugs_of_the_caller() -> None:
    tree = PrefixTree()
    chain(tree, range(2))
    with pytest.raises(AssertionError):
        tree.add(0)
    with pytest.raises(AssertionError):
        tree.remove(0)
    with pytest.raises(AssertionError):
        tree.link(1, 0)
    tree.check()


def test_a_cursor_comes_by_every_run_of_two_blocks_or_more() -> None:
    tree = PrefixTree(64)
    tree.add_run(np.arange(0, 5, dtype=np.int32), -1)
    tree.add(5)
    tree.add_run(np.arange(6, 9, dtype=np.int32), 2)
    tree.add_run(np.arange(9, 11, dtype=np.int32), -1)
    expected = {node.tail for node in tree.nodes(0, 100) if node.length > 1}
    found: list[int] = []
    cursor = 0
    for _ in range(tree.node_count):
        tails, cursor = tree.tails_from(cursor, 2)
        found += [tail for _, tail in tails]
        assert all(tree.node_of(tail) == node for node, tail in tails)
        if not cursor:
            break
    assert cursor == 0
    assert sorted(found) == sorted(expected)
    assert PrefixTree().tails_from(0, 8) == ([], 0)
