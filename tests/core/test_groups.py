"""Bytes of partial blocks, usable checkpoints and what is worth storing, against naive oracles."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.core.groups import (
    block_tokens_step,
    checkpoint_tokens,
    default_block_tokens,
    expected_bytes,
    is_checkpoint_boundary,
    nearest_block_tokens,
    needed_mask,
    optional_mask,
    put_masks,
    required_mask,
    window_blocks,
)
from kvstored.core.types import CheckpointPolicy, GroupKind, GroupSpec, NamespaceSpec
from kvstored.errors import InvalidArgument
from tests.core.specs import (
    COMPRESSED_4,
    COMPRESSED_128,
    HYBRID,
    LINEAR,
    OPEN_STATE,
    PLAIN,
    STATE,
    WINDOW_BLOB,
    WINDOW_PER_BLOCK,
    spec_of,
)


@pytest.mark.parametrize(
    ("group", "valid_tokens", "size_bytes"),
    [
        (LINEAR, 256, 131_072),
        (LINEAR, 1, 512),
        (COMPRESSED_4, 256, 64 * 584),
        (COMPRESSED_4, 7, 584),
        (COMPRESSED_4, 3, 0),
        (COMPRESSED_128, 255, 584),
        (COMPRESSED_128, 127, 0),
        (WINDOW_PER_BLOCK, 10, 1_000),
        (WINDOW_BLOB, 1, 128 * 584),
        (STATE, 1, 65_536),
        (OPEN_STATE, 100, 6_144),
        (OPEN_STATE, 128, 0),
        (OPEN_STATE, 256, 0),
    ],
)
def test_a_partial_block_has_bytes_for_whole_rows_only(
    group: GroupSpec, valid_tokens: int, size_bytes: int
) -> None:
    assert expected_bytes(group, valid_tokens, 256) == size_bytes


def test_padding_of_a_layout_is_shared_by_its_rows_and_rounded_up() -> None:
    padded = replace(LINEAR, bytes_per_block=1_000)
    assert expected_bytes(padded, 1, 256) == 4
    assert expected_bytes(padded, 255, 256) == 997
    assert expected_bytes(padded, 256, 256) == 1_000


def test_masks_tell_required_from_optional_and_leave_out_groups_without_rows() -> None:
    assert required_mask(HYBRID) == 0b1000011
    assert required_mask(HYBRID, 127) == 0b1000001
    assert required_mask(HYBRID, 3) == 0b1000000
    assert optional_mask(HYBRID) == 0b0111100
    assert needed_mask(HYBRID, 256) == 0b1011111
    assert needed_mask(HYBRID, 100) == 0b1111101


def test_more_valid_tokens_than_a_block_holds_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="last_valid_tokens=257 block_tokens=256"):
        required_mask(HYBRID, 257)


@pytest.mark.parametrize(
    ("ratios", "page_tokens", "default_tokens"),
    [
        ((), 1, 256),
        ((4, 128), 1, 256),
        ((), 48, 240),
        ((3,), 1, 255),
        ((), 512, 512),
        ((100,), 7, 700),
    ],
)
def test_default_block_size_is_the_legal_one_nearest_to_256(
    ratios: tuple[int, ...], page_tokens: int, default_tokens: int
) -> None:
    groups = tuple(replace(COMPRESSED_4, name=f"c{m}", ratio=m) for m in ratios)
    spec = replace(spec_of(*groups, LINEAR), engine_page_tokens=page_tokens)
    assert default_block_tokens(spec) == default_tokens
    assert default_tokens % block_tokens_step(spec) == 0


def test_nearest_block_sizes_lie_on_either_side() -> None:
    spec = replace(PLAIN, engine_page_tokens=170)
    assert nearest_block_tokens(spec, 256) == (170, 340)
    assert nearest_block_tokens(spec, 340) == (340,)
    assert nearest_block_tokens(spec, 1) == (170,)


@pytest.mark.parametrize(
    ("window_tokens", "valid_tokens", "blocks"),
    [
        (1, 16, 0),
        (2, 16, 1),
        (17, 16, 1),
        (18, 16, 2),
        (33, 16, 2),
        (17, 15, 2),
        (2, 1, 1),
        (3, 1, 2),
    ],
)
def test_a_window_reaches_back_over_the_blocks_that_hold_its_tokens(
    window_tokens: int, valid_tokens: int, blocks: int
) -> None:
    assert window_blocks(window_tokens, valid_tokens, 16) == blocks


def test_full_block_windows_need_the_last_ceil_of_w_minus_1_over_block_tokens() -> None:
    for window_tokens in range(1, 200):
        assert window_blocks(window_tokens, 16, 16) == -(-(window_tokens - 1) // 16)


def test_without_window_and_state_groups_the_hit_is_its_own_checkpoint() -> None:
    have = np.ones(5, dtype=np.uint64)
    assert checkpoint_tokens(PLAIN, 5, 0, have) == 5 * 256
    assert checkpoint_tokens(PLAIN, 5, 7, have) == 4 * 256 + 7
    assert checkpoint_tokens(PLAIN, 0, 0, have) == 0


def test_a_state_that_is_not_needed_is_skipped_and_not_missed() -> None:
    spec = spec_of(LINEAR, OPEN_STATE)
    have = np.ones(3, dtype=np.uint64)
    assert checkpoint_tokens(spec, 3, 0, have) == 768
    assert checkpoint_tokens(spec, 3, 128, have) == 640
    assert checkpoint_tokens(spec, 3, 100, have) == 512
    have[2] |= 2
    assert checkpoint_tokens(spec, 3, 100, have) == 612


def test_a_partial_block_may_need_one_more_block_of_its_window() -> None:
    window = GroupSpec("swa", GroupKind.WINDOW, 16, window_tokens=4, per_block=True)
    spec = spec_of(replace(LINEAR, bytes_per_block=16), window, block_tokens=16)
    first_missing = np.asarray([1, 3], dtype=np.uint64)
    assert checkpoint_tokens(spec, 2, 0, first_missing) == 32
    assert checkpoint_tokens(spec, 2, 3, first_missing) == 19
    assert checkpoint_tokens(spec, 2, 2, first_missing) == 0


# --- against a naive oracle --------------------------------------------------------------------

BLOCK = 8


def _optional_group(kind: str, i: int, tokens: int) -> GroupSpec:
    name = f"{kind}{i}"
    if kind == "window":
        return GroupSpec(name, GroupKind.WINDOW, BLOCK, window_tokens=tokens, per_block=True)
    if kind == "blob":
        return GroupSpec(name, GroupKind.WINDOW, 64, window_tokens=tokens)
    ratio = {"state": 1, "open": 4}[kind]
    return GroupSpec(name, GroupKind.STATE, 64, ratio=ratio)


_kinds = st.sampled_from(["window", "window", "blob", "state", "open"])
_groups = st.lists(st.tuples(_kinds, st.integers(1, 40)), max_size=3).map(
    lambda kinds: (
        GroupSpec("kv", GroupKind.LINEAR, BLOCK * 2),
        GroupSpec("csa", GroupKind.COMPRESSED, 4, ratio=2),
        *(_optional_group(kind, i, tokens) for i, (kind, tokens) in enumerate(kinds)),
    )
)


def _can_resume(spec: NamespaceSpec, have: list[int], end_tokens: int) -> bool:
    """Token by token: is everything there that an engine needs to go on at `end_tokens`?"""
    for i, group in enumerate(spec.groups):
        if group.is_required:
            continue
        stored = [bool(mask >> i & 1) for mask in have]
        if group.kind is GroupKind.WINDOW and group.per_block:
            first = max(0, end_tokens - (group.window_tokens - 1))
            if not all(stored[token // BLOCK] for token in range(first, end_tokens)):
                return False
        elif group.kind is GroupKind.STATE and group.ratio > 1 and end_tokens % group.ratio == 0:
            continue
        elif not stored[(end_tokens - 1) // BLOCK]:
            return False
    return True


def _ends(blocks: int, valid_tokens: int) -> list[int]:
    return [(i + 1) * BLOCK for i in range(blocks - 1)] + [(blocks - 1) * BLOCK + valid_tokens]


@settings(max_examples=300)
@given(
    groups=_groups,
    have=st.lists(st.one_of(st.just(0b111111), st.integers(0, 0b111111)), min_size=1, max_size=24),
    beyond=st.integers(0, 2),
    valid_tokens=st.integers(1, BLOCK),
)
def test_checkpoint_is_the_last_boundary_from_which_a_token_by_token_check_can_resume(
    groups: tuple[GroupSpec, ...], have: list[int], beyond: int, valid_tokens: int
) -> None:
    spec = spec_of(*groups, block_tokens=BLOCK)
    usable = [end for end in _ends(len(have), valid_tokens) if _can_resume(spec, have, end)]
    masks = np.asarray(have + [0b111111] * beyond, dtype=np.uint64)
    found = checkpoint_tokens(spec, len(have), valid_tokens % BLOCK, masks)
    assert found == (usable[-1] if usable else 0)


@settings(max_examples=300)
@given(
    groups=_groups,
    policy=st.sampled_from(CheckpointPolicy),
    blocks=st.integers(1, 20),
    valid_tokens=st.integers(1, BLOCK),
    period_blocks=st.integers(1, 5),
)
def test_what_is_worth_storing_is_exactly_what_resuming_at_the_checkpoints_reads(
    groups: tuple[GroupSpec, ...],
    policy: CheckpointPolicy,
    blocks: int,
    valid_tokens: int,
    period_blocks: int,
) -> None:
    period = period_blocks * BLOCK if policy is CheckpointPolicy.PERIODIC else 0
    spec = spec_of(
        *groups,
        block_tokens=BLOCK,
        checkpoint_policy=policy,
        checkpoint_period_tokens=period,
    )
    masks = put_masks(spec, 0, blocks, valid_tokens % BLOCK, ends_prompt=True)
    ends = _ends(blocks, valid_tokens)
    boundaries = [
        end for end in ends if is_checkpoint_boundary(spec, end, ends_prompt=end == ends[-1])
    ]
    have = [int(mask) for mask in masks]
    for end in boundaries:
        assert _can_resume(spec, have, end)
    for i, (mask, end) in enumerate(zip(have, ends, strict=True)):
        valid = end - i * BLOCK
        assert mask & required_mask(spec) == required_mask(spec, valid % BLOCK)
        assert mask & ~needed_mask(spec, valid) == 0
    # Minimal: without any one stored optional group some checkpoint cannot be resumed, unless it
    # serves a periodic boundary that lies beyond these blocks.
    last_end = boundaries[-1] if boundaries else 0
    later = policy is CheckpointPolicy.PERIODIC and valid_tokens == BLOCK
    for i, mask in enumerate(have):
        for g in range(2, len(groups)):
            if mask >> g & 1 and not (later and ends[i] > last_end):
                less = [*have[:i], mask & ~(1 << g), *have[i + 1 :]]
                assert any(not _can_resume(spec, less, end) for end in boundaries)


@given(groups=_groups, cut=st.integers(1, 19), period_blocks=st.integers(1, 5))
def test_a_periodic_put_in_two_batches_stores_what_one_batch_would(
    groups: tuple[GroupSpec, ...], cut: int, period_blocks: int
) -> None:
    spec = spec_of(
        *groups,
        block_tokens=BLOCK,
        checkpoint_policy=CheckpointPolicy.PERIODIC,
        checkpoint_period_tokens=period_blocks * BLOCK,
    )
    whole = put_masks(spec, 0, 20, 0, ends_prompt=False)
    first = put_masks(spec, 0, cut, 0, ends_prompt=False)
    second = put_masks(spec, cut, 20 - cut, 0, ends_prompt=True)
    assert np.concatenate([first, second]).tolist() == whole.tolist()


def test_boundary_policy_stores_no_checkpoint_before_the_prompt_ends() -> None:
    masks = put_masks(HYBRID, 0, 4, 0, ends_prompt=False)
    assert all(int(mask) & optional_mask(HYBRID) == 0 for mask in masks)


def test_boundary_policy_stores_blobs_at_the_end_and_the_window_that_reaches_it() -> None:
    masks = put_masks(HYBRID, 0, 6, 0, ends_prompt=True)
    swa, blob, state, open_state = 0b100, 0b1000, 0b10000, 0b100000
    assert [bool(int(m) & swa) for m in masks] == [False, False, True, True, True, True]
    assert [bool(int(m) & (blob | state)) for m in masks] == [False] * 5 + [True]
    assert not any(int(m) & open_state for m in masks)
