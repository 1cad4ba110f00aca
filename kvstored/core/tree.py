"""The prefix tree over block rows: who follows whom, how deep, and the radix nodes of it.

`parent`, `depth` and `children` (and the sibling links behind `children_of`) are the truth. A
*node* is a maximal run of blocks in which each but the last has exactly one child; nodes derive
from those columns and kept as links come and go: split at a divergence, joined when a fan-out falls
to 1, each by relabelling the shorter side. What a block is, holds or weighs is not known here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.links import Links
from kvstored.core.types import BlockRow, Rows, as_rows

SUBTREE_BLOCKS_MAX = 65_536
"""A larger subtree is not linked below a parent: bounds the time in which depths are mended."""
_SCALAR_MAX = 16
"""Below so many rows a Python loop over memory views beats array calls."""
_NONE = -1


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of `length` blocks from `head` down to `tail`; `parent` is a node id or -1."""

    id: int
    parent: int
    head: BlockRow
    tail: BlockRow
    length: int
    children: tuple[int, ...]


class PrefixTree(Links):
    """40 bytes a row at most; about a microsecond an operation, plus the shorter side of a split or
    join and the size of a subtree that is linked late.

    The columns are replaced by `ensure`: do not keep them across it, and do not write to them.
    """

    @property
    def node_count(self) -> int:
        return len(self._lengths) - len(self._free_nodes)

    def add(self, row: int) -> None:
        """A new root, of depth 0. The row is not in the tree."""
        assert self._nodes[row] == _NONE, "row is in the tree"
        self._nodes[row] = self._new_node(row, row, 1)

    def add_many(self, rows: Rows) -> None:
        """As `add` for each."""
        assert (self.node[rows] == _NONE).all(), "a row is in the tree"
        reused = rows[: len(self._free_nodes)]
        for row in reused.tolist():
            self._nodes[row] = self._new_node(row, row, 1)
        fresh = rows[len(reused) :]
        self.node[fresh] = np.arange(len(self._lengths), len(self._lengths) + len(fresh))
        self._heads.extend(fresh.tolist())
        self._tails.extend(fresh.tolist())
        self._lengths.extend([1] * len(fresh))

    def add_run(self, rows: Rows, parent: int) -> None:
        """New rows, each the only child of the one before, the first below `parent` (-1: it is a root)."""
        if len(rows) == 1:
            self._add_below(rows.item(0), parent)
            return
        assert (self.node[rows] == _NONE).all(), "a row is in the tree"
        node, depth = self._hang(rows.item(0), rows.item(-1), len(rows), parent)
        at = rows.astype(np.intp)  # else each column converts them, for a microsecond
        self.parent[at[1:]] = rows[:-1]
        self._first[at[:-1]] = rows[1:]
        self.children[at[:-1]] = 1
        self.node[at] = node
        self.depth[at] = np.arange(depth, depth + len(rows))

    def cut_run(self, rows: Rows) -> None:
        """Forget a row without children and those right above it, none of which has another child: leaf first."""
        assert self._fan_outs[rows[0]] == 0, "the first row has children"
        at = rows.astype(np.intp)  # else each column converts them, for a microsecond
        assert (self.children[at[1:]] == 1).all(), "a row has other children"
        top = int(rows[-1])
        node, above = self._nodes[top], self._parents[top]
        self.node[at] = _NONE
        self.depth[at] = 0
        self.parent[at[:-1]] = _NONE
        self.children[at] = 0
        self._first[at] = _NONE
        if above == _NONE:
            self._free_node(node)
            return
        if self._nodes[above] == node:
            self._tails[node] = above
            self._lengths[node] -= len(rows)
        else:
            self._free_node(node)
        self._detach(top, above)
        if self._fan_outs[above] == 1:
            self._join(above, self._firsts[above])

    def run_above(self, row: int, count: int) -> Rows:
        """A row without children and at most `count` rows in all with those right above it that have no other child; leaf first."""
        parents, fan_outs = self._parents, self._fan_outs
        run = [row]
        while len(run) < count:
            row = parents[row]
            if row == _NONE or fan_outs[row] != 1:
                break
            run.append(row)
        return as_rows(run)

    def path_above(self, row: int, count: int) -> Rows:
        """A row and at most `count` rows in all with those above it, upwards."""
        parents = self._parents
        path = [row]
        while len(path) < count and (row := parents[row]) != _NONE:
            path.append(row)
        return as_rows(path)

    def run_of(self, row: int) -> Rows:
        """All rows of the run that holds this one, from its head."""
        node = self._nodes[row]
        return self.path_above(self._tails[node], self._lengths[node])[::-1]

    def link(self, row: int, parent: int) -> bool:
        """Put a root with all that hangs below it under a parent.

        False, with nothing changed, when the parent is itself below the row or the subtree is over
        `SUBTREE_BLOCKS_MAX`.
        """
        assert self._nodes[row] != _NONE, "row is not in the tree"
        assert self._nodes[parent] != _NONE, "parent is not in the tree"
        assert self._parents[row] == _NONE, "row has a parent"
        if row == parent:
            return False
        below: list[int] = []
        if self._fan_outs[row] and (self._root_of(parent) == row or not self._collect(row, below)):
            return False
        fan_out = self._fan_outs[parent]
        if fan_out == 1:
            self._split(parent)
        self._attach(row, parent)
        if fan_out == 0:
            self._join(parent, row)
        deeper = self._depths[parent] + 1
        self._depths[row] = deeper
        if len(below) > _SCALAR_MAX:
            self.depth[below] += deeper
        else:
            for child in below:
                self._depths[child] += deeper
        return True

    def link_many(self, rows: Rows, parents: Rows) -> None:
        """As `link` for each in turn."""
        for row, parent in zip(rows.tolist(), parents.tolist(), strict=True):
            if self._fan_outs[row] or self._fan_outs[parent] or row == parent:
                self.link(row, parent)
            else:
                self._append(row, parent)

    def remove(self, row: int) -> None:
        """Forget a row that has no children."""
        assert self._fan_outs[row] == 0, "row has children"
        node, parent = self._nodes[row], self._parents[row]
        assert node != _NONE, "row is not in the tree"
        self._nodes[row] = _NONE
        self._depths[row] = 0
        if parent == _NONE:
            self._free_node(node)
            return
        if self._nodes[parent] == node:
            self._tails[node] = parent
            self._lengths[node] -= 1
        else:
            self._free_node(node)
        self._detach(row, parent)
        if self._fan_outs[parent] == 1:
            self._join(parent, self._firsts[parent])

    def is_along(self, row: int, above: int) -> bool:
        """Whether `above` is this row or lies above it. By runs, not by blocks."""
        nodes, parents, depths, depth = (
            self._nodes,
            self._parents,
            self._depths,
            self._depths[above],
        )
        while depths[row] > depth:
            if nodes[row] == nodes[above]:
                return True
            row = parents[self._heads[nodes[row]]]
            if row == _NONE:
                return False
        return row == above

    def path(self, row: int) -> Rows:
        """Rows from the root down to this row."""
        depth = self._depths[row]
        path: Rows = np.empty(depth + 1, dtype=np.int32)
        parents, view = self._parents, path.data
        for i in range(depth, -1, -1):
            view[i] = row
            row = parents[row]
        return path

    def paths_of(self, blocks: Rows) -> Rows:
        """These blocks and all above them, each once."""
        if len(blocks) and (self.parent[blocks[1:]] == blocks[:-1]).all():  # one path
            above = int(self.parent[blocks[0]])
            return blocks if above < 0 else np.concatenate((self.path(above), blocks))
        path = dict.fromkeys(blocks.tolist())
        for block in blocks.tolist():
            above = int(self.parent[block])
            while above >= 0 and above not in path:
                path[above] = None
                above = int(self.parent[above])
        return np.fromiter(path, dtype=np.int32, count=len(path))

    def children_of(self, row: int) -> list[int]:
        """Rows right below, the newest link first."""
        first = self._firsts[row]
        return [] if first == _NONE else [first, *self._after(first)]

    def children_of_many(self, rows: Rows) -> tuple[NDArray[np.int64], Rows]:
        """All rows right below these, in no order, and for each which of `rows` it is below."""
        above = np.flatnonzero(self.children[rows])
        child = self._first[rows[above]]
        owners, found = [above], [child]
        while len(child) > _SCALAR_MAX:
            child = self._next[child]
            above, child = above[child != _NONE], child[child != _NONE]
            owners.append(above)
            found.append(child)
        for owner, first in zip(above.tolist(), child.tolist(), strict=True):
            rest = self._after(first)
            owners.append(np.full(len(rest), owner))
            found.append(as_rows(rest))
        return np.concatenate(owners), np.concatenate(found)

    def node_of(self, row: int) -> int:
        """Id of the run that holds this row, -1 when it is not in the tree."""
        return self._nodes[row]

    def run_ends(self, rows: Rows) -> tuple[Rows, NDArray[np.int64]]:
        """Of the run that holds each row, its last row and that one's depth."""
        tails: Rows = np.frombuffer(self._tails, dtype=np.int32)[self.node[rows]]
        return tails, self.depth[tails].astype(np.int64)

    def tails_from(self, start: int, looks_max: int) -> tuple[list[tuple[int, int]], int]:
        """Of the next so many node ids those of runs of two blocks or more, each with its last row, and the id to go on from: 0 after the last."""
        end = min(start + looks_max, len(self._lengths))
        lengths, tails = self._lengths[start:end], self._tails[start:end]
        runs = enumerate(zip(lengths, tails, strict=True), start)
        found = [(node, tail) for node, (length, tail) in runs if length > 1]
        return found, end if end < len(self._lengths) else 0

    def nodes(self, start: int, limit: int) -> Iterator[PrefixNode]:
        """At most `limit` nodes with ids from `start` on; go on from the last id + 1."""
        for node in range(max(start, 0), len(self._lengths)):
            if limit <= 0:
                return
            if self._lengths[node]:
                limit -= 1
                yield self._value_of(node)

    def check(self) -> None:
        """Recompute everything from `parent` and compare; cost is linear in the rows."""
        rows = np.flatnonzero(self.node != _NONE).astype(np.int32)
        parents = self.parent[rows]
        assert (self.node[parents[parents != _NONE]] != _NONE).all(), "a parent is not in the tree"
        fan_outs = np.bincount(parents[parents != _NONE], minlength=len(self.parent))
        assert np.array_equal(self.children, fan_outs)
        seen, reached = [row for row in rows.tolist() if self._parents[row] == _NONE], 0
        assert not self.depth[seen].any()
        while reached < len(seen):  # from the roots down: a cycle is never reached
            row = seen[reached]
            reached += 1
            children = self.children_of(row)
            assert len(children) == self._fan_outs[row]
            for child in children:
                assert self._parents[child] == row
                assert self._depths[child] == self._depths[row] + 1
                same = self._nodes[child] == self._nodes[row]
                assert same is (len(children) == 1), "a run is not maximal or goes on in a branch"
            seen.extend(children)
        assert len(seen) == len(rows), "rows that no root reaches"
        self._check_nodes(rows)

    def _check_nodes(self, rows: Rows) -> None:
        assert sorted(self._free_nodes) == [i for i, n in enumerate(self._lengths) if not n]
        lengths = np.bincount(self.node[rows], minlength=len(self._lengths))
        assert lengths.tolist() == self._lengths.tolist()
        for node, length in enumerate(self._lengths):
            if length:
                head, tail = self._heads[node], self._tails[node]
                assert self._nodes[head] == self._nodes[tail] == node
                assert self._depths[tail] - self._depths[head] == length - 1

    def _add_below(self, row: int, parent: int) -> None:
        assert self._nodes[row] == _NONE, "row is in the tree"
        self._nodes[row], self._depths[row] = self._hang(row, row, 1, parent)

    def _hang(self, first: int, last: int, length: int, parent: int) -> tuple[int, int]:
        """Link a run of new rows; answers the node that they are of, and the depth of the first."""
        if parent == _NONE:
            return self._new_node(first, last, length), 0
        fan_out = self._fan_outs[parent]
        if fan_out == 1:
            self._split(parent)
        self._attach(first, parent)
        if fan_out:
            return self._new_node(first, last, length), self._depths[parent] + 1
        node = self._nodes[parent]  # the parent's run goes on
        self._tails[node] = last
        self._lengths[node] += length
        return node, self._depths[parent] + 1

    def _after(self, row: int) -> list[int]:
        """The siblings that were linked before this one."""
        siblings = []
        row = self._nexts[row]
        while row != _NONE:
            siblings.append(row)
            row = self._nexts[row]
        return siblings

    def _value_of(self, node: int) -> PrefixNode:
        head, tail = self._heads[node], self._tails[node]
        above = self._parents[head]
        return PrefixNode(
            id=node,
            parent=_NONE if above == _NONE else self._nodes[above],
            head=BlockRow(head),
            tail=BlockRow(tail),
            length=self._lengths[node],
            children=tuple(self._nodes[child] for child in self.children_of(tail)),
        )

    def _root_of(self, row: int) -> int:
        """By runs, not by blocks."""
        while True:
            row = self._heads[self._nodes[row]]
            above = self._parents[row]
            if above == _NONE:
                return row
            row = above

    def _collect(self, row: int, below: list[int]) -> bool:
        """All rows below this one; False when they and it are too many."""
        firsts, nexts = self._firsts, self._nexts
        pending = [firsts[row]]
        while pending:
            child = pending.pop()
            while child != _NONE:
                below.append(child)
                if firsts[child] != _NONE:
                    pending.append(firsts[child])
                child = nexts[child]
            if len(below) >= SUBTREE_BLOCKS_MAX:
                return False
        return True
