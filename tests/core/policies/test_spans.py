"""Spans stay runs of blocks with one history, whatever is used, split and forgotten; a random tree against the plain truth."""

from random import Random

import numpy as np
import pytest

from kvstored.core.policies.spans import Spans
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
                if size < span.size:
                    spans.split(span, size)
                span.uses += 1
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
            assert span is not None
            assert span.uses == history[row]
        for row in free:
            assert spans.of(row) is None


def test_a_path_that_uses_the_upper_part_splits_it_there() -> None:
    tree, spans = grown()
    tree.add_run(np.arange(10, dtype=np.int32), -1)
    span = spans.make(range(10))
    ((found, deepest),) = spans.along(np.asarray([3, 2, 1, 0], dtype=np.int32))
    assert found is span
    lower = spans.split(span, spans.size_down_to(span, deepest))
    assert (span.head, span.tail, span.size) == (0, 3, 4)
    assert (lower.head, lower.tail, lower.size) == (4, 9, 6)
    assert spans.of(3) is span
    assert spans.of(4) is lower
    assert span.child == 4
