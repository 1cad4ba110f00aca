"""A client leaves out the window and state arrays that no future hit can consume; the daemon here grants whatever it is asked for."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvstored.client import Client, GroupKind, GroupSpec, Keys, Namespace
from kvstored.client.rows import parts_of
from kvstored.core.types import CheckpointPolicy

from .conftest import BLOCK_TOKENS, spec_with

GROUPS = ["kv", "state", "paged"]
BLOCKS = 5


def hybrid(client: Client, policy: CheckpointPolicy) -> Namespace:
    spec = spec_with(
        GroupSpec("kv", GroupKind.LINEAR, 4096),
        GroupSpec("state", GroupKind.STATE, 512),
        GroupSpec("paged", GroupKind.WINDOW, 256, window_tokens=BLOCK_TOKENS + 2, per_block=True),
        model=f"hybrid-{policy}",
    )
    period = 2 * BLOCK_TOKENS if policy is CheckpointPolicy.PERIODIC else 0
    return client.open_namespace(
        replace(spec, checkpoint_policy=policy, checkpoint_period_tokens=period)
    )


def put(namespace: Namespace, keys: Keys, *, ends_path: bool = True) -> None:
    row = [np.zeros(size, np.uint8) for size in (4096, 512, 256)]
    result = namespace.put(keys, [row] * len(keys), groups=GROUPS, ends_path=ends_path)
    assert result.committed == len(keys)


def stored(namespace: Namespace, keys: Keys, group: int) -> Sequence[int]:
    blocks = namespace.get(keys, groups=GROUPS).blocks
    return [i for i, block in enumerate(blocks) if block is not None and block[group] is not None]


@pytest.mark.parametrize(
    ("policy", "states", "windows"),
    [
        (CheckpointPolicy.FULL, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        (CheckpointPolicy.PERIODIC, [1, 3], [0, 1, 2, 3, 4]),
        (CheckpointPolicy.BOUNDARY, [4], [3, 4]),
        (CheckpointPolicy.NONE, [], []),
    ],
)
def test_a_put_stores_checkpoints_where_the_policy_has_them(
    client: Client, policy: CheckpointPolicy, states: list[int], windows: list[int]
) -> None:
    namespace = hybrid(client, policy)
    keys = namespace.keys(range(BLOCKS * BLOCK_TOKENS))
    put(namespace, keys)
    assert stored(namespace, keys, 0) == list(range(BLOCKS))
    assert stored(namespace, keys, 1) == states
    assert stored(namespace, keys, 2) == windows


def test_a_path_that_goes_on_has_no_boundary_at_its_last_key(client: Client) -> None:
    namespace = hybrid(client, CheckpointPolicy.BOUNDARY)
    keys = namespace.keys(range(BLOCKS * BLOCK_TOKENS))
    put(namespace, keys[:3], ends_path=False)
    assert stored(namespace, keys, 1) == []
    put(namespace, keys[3:])
    assert stored(namespace, keys, 1) == [4]


def test_a_run_of_keys_knows_its_depth(client: Client) -> None:
    namespace = hybrid(client, CheckpointPolicy.PERIODIC)
    keys = namespace.keys(range(BLOCKS * BLOCK_TOKENS))
    put(namespace, keys[2:])
    assert stored(namespace, keys, 1) == [3]
    orphans = Keys.opaque([b"engine-%d" % i for i in range(4)], parent=b"engine-x")
    put(namespace, orphans)
    assert stored(namespace, orphans, 1) == [0, 1, 2, 3], "their depth is not known"


def test_a_window_that_reaches_back_over_the_parts_of_a_put_is_stored(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.client.rows._PART_BYTES_MAX", 4096 * 2)
    namespace = hybrid(client, CheckpointPolicy.BOUNDARY)
    keys = namespace.keys(range(BLOCKS * BLOCK_TOKENS))
    source = np.zeros(4096, np.uint8)
    assert list(parts_of([source.size] * 3, 1)) == [(0, 2), (2, 3)]
    put(namespace, keys)
    assert stored(namespace, keys, 2) == [3, 4]
