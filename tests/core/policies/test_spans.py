"""Spans stay runs of blocks with one history, whatever is used, split and forgotten; a random tree against the plain truth."""

from array import array
from random import Random

import numpy as np
import pytest

from kvstored.core.policies.spans import NONE, Spans
from kvstored.core.tree import PrefixTree


def grown() -> tuple[PrefixTree, Spans]:
    tree = PrefixTree()
    tree.ensure(64)
    spans = Spans(tree)
    spans.ensure(64)
    return tree, spans


@pytest.mark.parametrize("seed", range(8))
def test_every_block_is_of_the_span_whose_history_is_its_own(seed: int) -> None:
    random = Random(seed)
    tree = PrefixTree()
    tree.ensure(512)
    spans = Spans(tree)
    spans.ensure(512)
    history: dict[int, int] = {}  # the truth: uses by block
    free, stored = list(range(511, -1, -1)), set[int]()
    for _ in range(300):
        parent = random.choice([-1, *sorted(stored)])
        length = random.randint(1, 9)
        if random.random() < 0.5 and len(free) > length:
            rows = [free.pop() for _ in range(length)]
            tree.add_run(np.asarray(rows, dtype=np.int32), parent)
            spans.make(rows)
            stored.update(rows)
            history.update(dict.fromkeys(rows, 1))
        elif stored and random.random() < 0.6:
            path = tree.path(random.choice(sorted(stored)))[::-1]
            for span, block in spans.along(path):
                size = spans.size_down_to(span, block)
                if size < spans.size[span]:
                    spans.split(span, size)
                spans.uses[span] += 1
            for block in path.tolist():
                history[block] += 1
        elif leaves := [row for row in sorted(stored) if not tree.children[row]]:
            run = tree.run_above(random.choice(leaves), random.randint(1, 5))
            lost = spans.cut(run)
            assert np.concatenate([rows for _, rows in lost]).tolist() == run.tolist()
            tree.cut_run(run)
            stored.difference_update(run.tolist())
            free.extend(run.tolist())
        for row in stored:
            span = spans.of(row)
            assert span != NONE
            assert spans.uses[span] == history[row]
        for row in free:
            assert spans.of(row) == NONE


def test_a_path_that_uses_the_upper_part_splits_it_there() -> None:
    tree, spans = grown()
    tree.add_run(np.arange(10, dtype=np.int32), -1)
    span = spans.make(range(10))
    ((found, deepest),) = spans.along(np.asarray([3, 2, 1, 0], dtype=np.int32))
    assert found == span
    lower = spans.split(span, spans.size_down_to(span, deepest))
    assert (spans.head[span], spans.tail[span], spans.size[span]) == (0, 3, 4)
    assert (spans.head[lower], spans.tail[lower], spans.size[lower]) == (4, 9, 6)
    assert spans.of(3) == span
    assert spans.of(4) == lower
    assert spans.child[span] == 4


def test_blocks_in_another_order_than_a_path_s_are_of_the_same_spans() -> None:
    tree, spans = grown()
    tree.add_run(np.arange(10, dtype=np.int32), -1)
    upper, lower = spans.make(range(4)), spans.make(range(4, 10))
    path = np.arange(9, -1, -1, dtype=np.int32)
    assert spans.along(path) == [(lower, 9), (upper, 3)]
    assert spans.along(path[2:7]) == [(lower, 7), (upper, 3)]
    twice = np.concatenate((path[6:], path))  # copies of two tiers
    assert sorted(spans.along(twice)) == [(upper, 3), (lower, 9)]


def test_a_span_costs_less_than_64_bytes() -> None:
    _, spans = grown()
    columns = [column for column in vars(spans).values() if isinstance(column, array)]
    assert len(columns) > 10
    assert sum(column.itemsize for column in columns) < 64


def test_more_copies_than_two_are_known_too() -> None:
    tree, spans = grown()
    tree.add_run(np.arange(10, dtype=np.int32), -1)
    span = spans.make(range(10))
    for rows in ((), (5,), (5, 6), (5, 6, 7, 8), (9,)):
        spans.queue(span, rows)
        assert spans.queued(span) == rows
    spans.queue(span, (1, 2, 3))
    lower = spans.split(span, 4)
    assert spans.queued(lower) == spans.queued(span) == (1, 2, 3)


def test_around_a_block_the_run_of_those_of_no_span_is_found() -> None:
    tree, spans = grown()
    tree.add_run(np.arange(12, dtype=np.int32), -1)
    assert spans.unknown_run(5).tolist() == list(range(12))
    spans.make(range(3, 6))
    spans.make([9])
    assert spans.unknown_run(0).tolist() == [0, 1, 2]
    assert spans.unknown_run(7).tolist() == [6, 7, 8]
    assert spans.unknown_run(11).tolist() == [10, 11]
