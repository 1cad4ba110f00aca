"""Arithmetic of KV groups: how many bytes a block has, and from which boundaries a hit can resume.

Pure functions of a namespace spec. They decide nothing about placement or eviction and know no
keys. A *boundary* is the end of a block, counted in tokens from the start of the sequence;
`valid_tokens` of a block is 0 for "full" wherever a caller may omit it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import (
    CheckpointPolicy,
    GroupKind,
    GroupSpec,
    Layout,
    NamespaceSpec,
    Part,
)
from kvstored.errors import InvalidArgument

BLOCK_TOKENS_DEFAULT = 256

GroupMasks = NDArray[np.uint64]
"""One word a block; bit i stands for group i of the namespace."""


def block_tokens_step(spec: NamespaceSpec) -> int:
    """block_tokens must be a multiple of this: of every group's ratio and of the engine's page."""
    return math.lcm(spec.engine_page_tokens, *(group.ratio for group in spec.groups))


def default_block_tokens(spec: NamespaceSpec) -> int:
    """256, or the legal size nearest to it; 256 is never midway between two of them."""
    nearest = nearest_block_tokens(spec, BLOCK_TOKENS_DEFAULT)
    return min(nearest, key=lambda tokens: abs(tokens - BLOCK_TOKENS_DEFAULT))


def nearest_block_tokens(spec: NamespaceSpec, wanted_tokens: int) -> tuple[int, ...]:
    """The legal sizes on either side of `wanted_tokens`, ascending; one where it is legal or below
    the smallest.
    """
    step = block_tokens_step(spec)
    below = wanted_tokens // step * step
    if below == wanted_tokens and below > 0:
        return (below,)
    return (below, below + step) if below > 0 else (step,)


def valid_tokens_of(spec: NamespaceSpec, last_valid_tokens: int) -> int:
    """Tokens of a last block, 0 meaning full; raises InvalidArgument when there are more than a
    block holds.
    """
    if not 0 <= last_valid_tokens <= spec.block_tokens:
        raise InvalidArgument(
            "last_valid_tokens is out of range"
            f" last_valid_tokens={last_valid_tokens} block_tokens={spec.block_tokens}"
        )
    return last_valid_tokens or spec.block_tokens


def expected_bytes(group: GroupSpec, valid_tokens: int, block_tokens: int) -> int:
    """Bytes of this group's piece of a block with `valid_tokens` tokens; 0 where the group has
    nothing to store there.

    Row groups shrink with a partial block (a compressed row exists only once its m tokens are
    there), a padded layout in proportion. Blobs have one size. A state group with ratio m is not
    needed where the boundary is a multiple of m: nothing is open there.
    """
    assert 0 < valid_tokens <= block_tokens
    if group.kind is GroupKind.STATE:
        return 0 if group.ratio > 1 and valid_tokens % group.ratio == 0 else group.bytes_per_block
    if group.kind is GroupKind.WINDOW and not group.per_block:
        return group.bytes_per_block
    rows, rows_full = valid_tokens // group.ratio, block_tokens // group.ratio
    return -(-group.bytes_per_block * rows // rows_full)


def needed_mask(spec: NamespaceSpec, valid_tokens: int) -> int:
    """Groups, of any kind, that have bytes in a block with so many tokens."""
    return sum(
        1 << i
        for i, group in enumerate(spec.groups)
        if expected_bytes(group, valid_tokens, spec.block_tokens) > 0
    )


def required_mask(spec: NamespaceSpec, last_valid_tokens: int = 0) -> int:
    """Groups that a block must have to be visible; in a partial block only those that have a row in
    it.
    """
    required = sum(1 << i for i, group in enumerate(spec.groups) if group.is_required)
    return required & needed_mask(spec, valid_tokens_of(spec, last_valid_tokens))


def optional_mask(spec: NamespaceSpec) -> int:
    """Window and state groups."""
    return sum(1 << i for i, group in enumerate(spec.groups) if not group.is_required)


def window_blocks(window_tokens: int, valid_tokens: int, block_tokens: int) -> int:
    """Blocks that hold the W-1 tokens before a boundary, counted back from the block that ends
    there with `valid_tokens`.
    """
    before = window_tokens - 1
    if before == 0:
        return 0
    return 1 + -(-max(before - valid_tokens, 0) // block_tokens)


def checkpoint_tokens(
    spec: NamespaceSpec, hit_blocks: int, last_valid_tokens: int, have: GroupMasks
) -> int:
    """The last boundary within the hit from which an engine can resume, in tokens; 0 if there is
    none.

    `have`: complete groups of each block from the start of the sequence. The hit's own end where
    the namespace has no window or state groups. Whether the policy would store something at a
    boundary does not matter, only whether it is there.
    """
    valid_tokens = valid_tokens_of(spec, last_valid_tokens)
    assert 0 <= hit_blocks <= len(have)
    if hit_blocks == 0:
        return 0
    boundaries = np.flatnonzero(resumable(spec, valid_tokens, have[:hit_blocks]))
    if len(boundaries) == 0:
        return 0
    last = int(boundaries[-1])
    missing = spec.block_tokens - valid_tokens if last == hit_blocks - 1 else 0
    return (last + 1) * spec.block_tokens - missing


def resumable(spec: NamespaceSpec, valid_tokens: int, have: GroupMasks) -> NDArray[np.bool_]:
    """At the end of which of these blocks, from the start of the sequence on, an engine can resume;
    the last one has `valid_tokens`.
    """
    usable = np.ones(len(have), dtype=np.bool_)
    for i, group in enumerate(spec.groups):
        if not group.is_required:
            present = (have >> np.uint64(i) & np.uint64(1)).astype(np.bool_)
            usable &= _usable(group, present, valid_tokens, spec.block_tokens)
    return usable


def required_bytes(spec: NamespaceSpec, valid_tokens: int) -> int:
    """Bytes of a block's required groups, of all shards."""
    return sum(
        expected_bytes(group, valid_tokens, spec.block_tokens)
        * (spec.shards if group.sharded else 1)
        for group in spec.groups
        if group.is_required
    )


def resume_bytes(spec: NamespaceSpec) -> int:
    """Bytes of the window and state groups that are read where a path is resumed, of all shards."""
    total = 0
    for group in spec.groups:
        if not group.is_required:
            shards = spec.shards if group.sharded else 1
            is_rows = group.kind is GroupKind.WINDOW and group.per_block
            blocks = (
                window_blocks(group.window_tokens, spec.block_tokens, spec.block_tokens)
                if is_rows
                else 1
            )
            total += group.bytes_per_block * shards * blocks
    return total


def _usable(
    group: GroupSpec, present: NDArray[np.bool_], valid_tokens: int, block_tokens: int
) -> NDArray[np.bool_]:
    """At which block ends this window or state group can be resumed from; the last block has
    `valid_tokens`.
    """
    if group.kind is GroupKind.WINDOW and group.per_block:
        blocks = np.arange(len(present))
        last_missing = np.maximum.accumulate(np.where(present, -1, blocks))
        needed = np.full(
            len(present), window_blocks(group.window_tokens, block_tokens, block_tokens)
        )
        needed[-1] = window_blocks(group.window_tokens, valid_tokens, block_tokens)
        whole: NDArray[np.bool_] = last_missing <= np.maximum(blocks - needed, -1)
        return whole
    usable = present.copy()
    if expected_bytes(group, block_tokens, block_tokens) == 0:
        usable[:-1] = True
    if expected_bytes(group, valid_tokens, block_tokens) == 0:
        usable[-1] = True
    return usable


def is_checkpoint_boundary(spec: NamespaceSpec, end_tokens: int, *, ends_prompt: bool) -> bool:
    """Whether the namespace's policy stores window and state groups at this boundary.

    `ends_prompt`: the boundary is the end of a prompt or of an output, which is where the next turn
    resumes.
    """
    match spec.checkpoint_policy:
        case CheckpointPolicy.FULL:
            return True
        case CheckpointPolicy.PERIODIC:
            return end_tokens % spec.checkpoint_period_tokens == 0
        case CheckpointPolicy.BOUNDARY:
            return ends_prompt
        case CheckpointPolicy.NONE:
            return False


def put_masks(
    spec: NamespaceSpec, first_block: int, blocks: int, last_valid_tokens: int, *, ends_prompt: bool
) -> GroupMasks:
    """Which groups of each of these consecutive blocks are worth storing: those that a future hit
    can consume.

    `first_block`: depth of the first one. Required groups always; blobs at checkpoint boundaries; a
    per-block window in the blocks that a checkpoint boundary reaches back to, also one that lies
    beyond this batch.
    """
    assert blocks > 0
    valid_tokens = valid_tokens_of(spec, last_valid_tokens)
    masks = np.full(blocks, needed_mask(spec, spec.block_tokens), dtype=np.uint64)
    masks[-1] = needed_mask(spec, valid_tokens)
    distance = _blocks_to_checkpoint(
        spec, first_block, blocks, valid_tokens, ends_prompt=ends_prompt
    )
    for i, group in enumerate(spec.groups):
        if not group.is_required:
            reach = _reach(group, spec, valid_tokens)
            masks[distance >= reach] &= ~np.uint64(1 << i)
    return masks


def consumable(
    spec: NamespaceSpec,
    first_block: int | None,
    blocks: int,
    last_valid_tokens: int,
    *,
    ends_path: bool,
) -> NDArray[np.bool_]:
    """Shape (blocks, groups): the pieces of consecutive blocks that a future hit can consume; of
    required groups all.

    `first_block` None: the depth is not known. A periodic boundary cannot be told then, and nothing
    is left out: a guess with the wrong phase would leave out every checkpoint.
    """
    groups = np.arange(len(spec.groups), dtype=np.uint64)
    if first_block is None and spec.checkpoint_policy is CheckpointPolicy.PERIODIC:
        return np.ones((blocks, len(groups)), dtype=np.bool_)
    if blocks == 0:
        return np.zeros((0, len(groups)), dtype=np.bool_)
    masks = put_masks(spec, first_block or 0, blocks, last_valid_tokens, ends_prompt=ends_path)
    masks |= np.uint64(~optional_mask(spec) & (1 << len(groups)) - 1)
    return (masks[:, None] >> groups & np.uint64(1)).astype(np.bool_)


def _blocks_to_checkpoint(
    spec: NamespaceSpec, first_block: int, blocks: int, valid_tokens: int, *, ends_prompt: bool
) -> NDArray[np.int64]:
    """Blocks from each block to the next one that ends at a checkpoint boundary (0: it does
    itself); huge where none is known.
    """
    never = np.full(blocks, np.iinfo(np.int64).max)
    match spec.checkpoint_policy:
        case CheckpointPolicy.FULL:
            return np.zeros(blocks, dtype=np.int64)
        case CheckpointPolicy.PERIODIC:
            period_blocks = spec.checkpoint_period_tokens // spec.block_tokens
            distance = -(first_block + 1 + np.arange(blocks, dtype=np.int64)) % period_blocks
            if valid_tokens < spec.block_tokens:
                # A partial block is a leaf: no boundary follows it, nor the full blocks before it
                # on this path.
                distance = np.where(distance < np.arange(blocks)[::-1], distance, never)
            return distance
        case CheckpointPolicy.BOUNDARY:
            return np.arange(blocks, dtype=np.int64)[::-1] if ends_prompt else never
        case CheckpointPolicy.NONE:
            return never


def _reach(group: GroupSpec, spec: NamespaceSpec, valid_tokens: int) -> int:
    """From how many blocks, counted back from a checkpoint boundary, the group is read."""
    if not group.per_block:
        return 1
    at_partial = spec.checkpoint_policy in (CheckpointPolicy.BOUNDARY, CheckpointPolicy.FULL)
    end_tokens = valid_tokens if at_partial else spec.block_tokens
    return window_blocks(group.window_tokens, end_tokens, spec.block_tokens)


def pieces_needed(layout: Layout, part: Part, valid_tokens: int) -> int:
    """Pieces of a whole copy of a block of so many tokens: a compressed group has none before its first row."""
    groups = (layout.spec.groups[g] for g in layout.groups_of(part))
    return sum(
        layout.spec.shards if group.sharded else 1
        for group in groups
        if valid_tokens >= group.ratio
    )
