"""Plans of the vLLM connector: arithmetic, without vLLM and without a daemon."""

from kvstored.client import GroupKind, GroupSpec
from kvstored.connectors.vllm_plans import (
    EngineLayout,
    GroupLayout,
    hashed_blocks,
    pages_of,
    run_of,
    wanted_runs,
)

from .conftest import spec_with

FULL = GroupLayout("0-full", 32, ("a", "b"), (100, 50), is_sharded=False)
WINDOW = GroupLayout("1-window", 16, ("c",), (70,), is_sharded=False)
HYBRID = EngineLayout(
    spec_with(
        block_tokens=32,
        groups=[
            GroupSpec("0-full", GroupKind.LINEAR, 150),
            GroupSpec("1-window", GroupKind.WINDOW, 140, window_tokens=20, per_block=True),
        ],
    ),
    (FULL, WINDOW),
    hash_tokens=16,
)
HASHES = [bytes([i]) * 32 for i in range(8)]


def test_a_block_is_known_by_the_hash_of_its_last_tokens() -> None:
    assert hashed_blocks(HASHES[:7], HYBRID) == 3
    root = run_of(HASHES, HYBRID, 0, 2)
    assert (root.hashes, root.parent) == ((HASHES[1], HASHES[3]), b"")
    later = run_of(HASHES, HYBRID, 2, 3, (b"lora",))
    assert (later.hashes, later.parent) == ((HASHES[5],), HASHES[3])
    keys = later.keys()
    assert (keys.parent, keys.extra_keys, keys.first_block) == (HASHES[3], (b"lora",), 2)


def test_pieces_have_as_many_pages_of_a_group_as_the_block_has() -> None:
    assert FULL.piece_bytes(32) == 150
    assert WINDOW.piece_bytes(32) == 140
    tables = [[7, 8], [None, None, 5, 6]]
    assert pages_of(tables, HYBRID, 0, 2) == (((7,), (None, None)), ((8,), (5, 6)))


def test_pages_that_the_engine_has_itself_are_left_out() -> None:
    tables = [[7, 8], [3, 4, 5, 6]]
    assert pages_of(tables, HYBRID, 0, 2, from_token=16) == (
        ((None,), (None, 4)),
        ((8,), (5, 6)),
    )


def test_pages_behind_the_table_s_end_are_not_there() -> None:
    assert pages_of([[7], [3]], HYBRID, 0, 2)[1] == ((None,), (None, None))


def test_blocks_are_loaded_in_runs_of_the_same_groups() -> None:
    pages = pages_of([[7, 8, 9, 10], [None] * 4 + [5, 6, 1, 2]], HYBRID, 0, 4)
    assert wanted_runs(pages) == [(0, 2, (0,)), (2, 4, (0, 1))]
    assert wanted_runs((((None,), (None, None)),)) == []
