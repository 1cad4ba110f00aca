"""The linked columns below the prefix tree: siblings, parents and runs, changed one link at a time. What a tree may do is in tree.py."""

from array import array

import numpy as np

from kvstored.core.types import Rows

_NONE = -1


class Links:
    """The columns, and the node table that derives from them."""

    def __init__(self, rows: int = 0) -> None:
        self.parent: Rows = np.empty(0, dtype=np.int32)
        self.depth: Rows = self.parent
        self.children: Rows = self.parent
        self.node: Rows = self.parent
        self._first: Rows = self.parent
        self._next: Rows = self.parent
        self._previous: Rows = self.parent
        self._heads = array("i")
        self._tails = array("i")
        self._lengths = array("i")
        """0 where the node id is free."""
        self._free_nodes: list[int] = []
        self.ensure(max(rows, 64))

    def ensure(self, rows: int) -> None:
        """Make room for rows below this number; grows by an eighth at least."""
        capacity = len(self.parent)
        if rows <= capacity:
            return
        more = max(rows, capacity * 9 // 8) - capacity
        self.parent = _grown(self.parent, more, _NONE)
        self.depth = _grown(self.depth, more, 0)
        self.children = _grown(self.children, more, 0)
        self.node = _grown(self.node, more, _NONE)
        self._first = _grown(self._first, more, _NONE)
        self._next = _grown(self._next, more, _NONE)
        self._previous = _grown(self._previous, more, _NONE)
        # Scalar reads and writes through these cost a third of those through numpy.
        self._parents = self.parent.data
        self._depths = self.depth.data
        self._fan_outs = self.children.data
        self._nodes = self.node.data
        self._firsts = self._first.data
        self._nexts = self._next.data
        self._previouses = self._previous.data

    def _attach(self, row: int, parent: int) -> None:
        newest = self._firsts[parent]
        if newest != _NONE:
            self._previouses[newest] = row
        self._nexts[row] = newest
        self._firsts[parent] = row
        self._parents[row] = parent
        self._fan_outs[parent] += 1

    def _append(self, row: int, parent: int) -> None:
        """Link a root without children below a row that has none either: the parent's run goes on."""
        node, gone = self._nodes[parent], self._nodes[row]
        assert node != _NONE, "parent is not in the tree"
        assert gone != _NONE, "row is not in the tree"
        assert self._parents[row] == _NONE, "row has a parent"
        self._nodes[row] = node
        self._tails[node] = row
        self._lengths[node] += 1
        self._free_node(gone)
        self._firsts[parent] = row
        self._parents[row] = parent
        self._fan_outs[parent] = 1
        self._depths[row] = self._depths[parent] + 1

    def _detach(self, row: int, parent: int) -> None:
        before, after = self._previouses[row], self._nexts[row]
        if before == _NONE:
            self._firsts[parent] = after
        else:
            self._nexts[before] = after
        if after != _NONE:
            self._previouses[after] = before
        self._previouses[row] = self._nexts[row] = self._parents[row] = _NONE
        self._fan_outs[parent] -= 1

    def _split(self, row: int) -> None:
        """End the run at this row, which lies within it; the longer side keeps the node."""
        node, below = self._nodes[row], self._firsts[row]
        upper = self._depths[row] - self._depths[self._heads[node]] + 1
        lower = self._lengths[node] - upper
        if lower <= upper:
            tail = self._tails[node]
            self._relabel_down(below, lower, self._new_node(below, tail, lower))
            self._tails[node] = row
            self._lengths[node] = upper
        else:
            head = self._heads[node]
            self._relabel_up(row, upper, self._new_node(head, row, upper))
            self._heads[node] = below
            self._lengths[node] = lower

    def _join(self, row: int, child: int) -> None:
        """Make one run of the one that ends at `row` and the one that starts at its only child."""
        upper, lower = self._nodes[row], self._nodes[child]
        upper_length, lower_length = self._lengths[upper], self._lengths[lower]
        if lower_length <= upper_length:
            self._relabel_down(child, lower_length, upper)
            self._tails[upper] = self._tails[lower]
            self._lengths[upper] = upper_length + lower_length
            self._free_node(lower)
        else:
            self._relabel_up(row, upper_length, lower)
            self._heads[lower] = self._heads[upper]
            self._lengths[lower] = upper_length + lower_length
            self._free_node(upper)

    def _relabel_down(self, row: int, count: int, node: int) -> None:
        nodes, firsts = self._nodes, self._firsts
        for _ in range(count):
            nodes[row] = node
            row = firsts[row]

    def _relabel_up(self, row: int, count: int, node: int) -> None:
        nodes, parents = self._nodes, self._parents
        for _ in range(count):
            nodes[row] = node
            row = parents[row]

    def _new_node(self, head: int, tail: int, length: int) -> int:
        if self._free_nodes:
            node = self._free_nodes.pop()
            self._heads[node] = head
            self._tails[node] = tail
            self._lengths[node] = length
            return node
        self._heads.append(head)
        self._tails.append(tail)
        self._lengths.append(length)
        return len(self._lengths) - 1

    def _free_node(self, node: int) -> None:
        self._lengths[node] = 0
        self._free_nodes.append(node)


def _grown(column: Rows, more: int, value: int) -> Rows:
    grown: Rows = np.zeros(len(column) + more, dtype=np.int32)
    grown[: len(column)] = column
    if value:
        grown[len(column) :] = value
    return grown
