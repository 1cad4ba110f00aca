"""What is stored costs the collector of cycles nothing: it looks at every object that may be part of one, while the daemon's loop waits.

Ghosts were two such objects each, and made every full collection of a busy daemon twice as long.
"""

import gc
from collections import Counter
from pathlib import Path

import numpy as np

from kvstored.core.types import TierId
from kvstored.sim.core import CoreModel
from tests.sim.test_core import random_kvt1

PATHS, LENGTH, CAPACITY = 1500, 5, 1000
BOUNDED = {"Use", "Path", "tuple", "Forgotten"}
"""Of the sample of what is asked for, and of why blocks are gone: so many at most, whatever is stored."""


def looked_at() -> int:
    gc.collect()
    kinds = Counter(type(each).__name__ for each in gc.get_objects())
    return sum(count for kind, count in kinds.items() if kind not in BOUNDED)


def test_blocks_that_are_stored_or_gone_are_no_objects(tmp_path: Path) -> None:
    trace = random_kvt1(tmp_path / "trace", 1, requests=1)
    model = CoreModel(trace, policy="composite", capacity_blocks={TierId.DRAM: CAPACITY})
    before = 0
    for number in range(PATHS):
        model.request(10.0 * number, np.arange(number * LENGTH, (number + 1) * LENGTH))
        before = before or (looked_at() if number == PATHS // 3 else 0)
    assert model.evicted_blocks == PATHS * LENGTH - CAPACITY
    assert looked_at() - before < 200
