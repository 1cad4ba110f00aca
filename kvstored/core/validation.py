"""What a namespace spec must satisfy before it gets an identity.

Every refusal names the value and what would be accepted. Filling in the default block size is the
only change made to a spec.
"""

import math
from collections import Counter
from dataclasses import replace

from kvstored.core.groups import (
    block_tokens_step,
    default_block_tokens,
    nearest_block_tokens,
    optional_mask,
)
from kvstored.core.types import (
    GROUPS_MAX,
    SHARDS_MAX,
    Access,
    CheckpointPolicy,
    GroupKind,
    GroupSpec,
    NamespaceSpec,
)
from kvstored.errors import InvalidArgument

TEXT_BYTES_MAX = 256
BLOCK_TOKENS_MAX = 65_536
GROUP_BYTES_MAX = 1 << 40
U32_MAX = 0xFFFF_FFFF


def validated(spec: NamespaceSpec) -> NamespaceSpec:
    """The spec with its block size filled in; raises InvalidArgument where it makes no sense."""
    _check_texts(spec)
    _check_numbers(spec)
    if not 1 <= len(spec.groups) <= GROUPS_MAX:
        raise InvalidArgument(f"a namespace has 1 to {GROUPS_MAX} groups groups={len(spec.groups)}")
    name, count = Counter(group.name for group in spec.groups).most_common(1)[0]
    if count > 1:
        raise InvalidArgument(f"group names must differ name={name!r} count={count}")
    for group in spec.groups:
        _check_group(group)
    if not any(group.is_required for group in spec.groups):
        raise InvalidArgument("a namespace needs at least one linear or compressed group")
    whole = replace(spec, block_tokens=spec.block_tokens or default_block_tokens(spec))
    _check_block_tokens(whole)
    _check_checkpoints(whole)
    return whole


def _check_texts(spec: NamespaceSpec) -> None:
    _check_text("model", spec.model)
    _check_text("revision", spec.revision)
    _check_text("dtype", spec.dtype)
    _check_text("layout", spec.layout)
    _check_text("tenant", spec.tenant)
    if "@" in spec.model:
        raise InvalidArgument(
            f"model must not contain '@', it separates the revision model={spec.model!r}"
        )


def _check_text(name: str, value: str) -> None:
    if not value or not value.isprintable() or len(value.encode()) > TEXT_BYTES_MAX:
        raise InvalidArgument(
            f"{name} must be 1 to {TEXT_BYTES_MAX} bytes of printable text {name}={value[:80]!r}"
        )


def _check_numbers(spec: NamespaceSpec) -> None:
    _check_range("layout_version", spec.layout_version, 0, U32_MAX)
    _check_range("block_tokens", spec.block_tokens, 0, BLOCK_TOKENS_MAX)
    _check_range("tp", spec.tp, 1, SHARDS_MAX)
    _check_range("pp", spec.pp, 1, SHARDS_MAX)
    _check_range("tp*pp", spec.shards, 1, SHARDS_MAX)
    _check_range("engine_page_tokens", spec.engine_page_tokens, 1, BLOCK_TOKENS_MAX)
    _check_range("sink_tokens", spec.sink_tokens, 0, U32_MAX)
    _check_range("recent_tokens", spec.recent_tokens, 0, U32_MAX)
    _check_range("checkpoint_period_tokens", spec.checkpoint_period_tokens, 0, U32_MAX)
    for name, flops in (("flops_base", spec.flops_base), ("flops_slope", spec.flops_slope)):
        if not math.isfinite(flops) or flops < 0:
            raise InvalidArgument(f"{name} must be finite and not negative {name}={flops}")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be {low} to {high} {name}={value}")


def _check_group(group: GroupSpec) -> None:
    _check_text("group name", group.name)
    where = f"groups.{group.name}"
    _check_range(f"{where}.bytes_per_block", group.bytes_per_block, 1, GROUP_BYTES_MAX)
    _check_range(f"{where}.ratio", group.ratio, 1, BLOCK_TOKENS_MAX)
    _check_range(f"{where}.retention_s", group.retention_s, 0, U32_MAX)
    if group.kind is GroupKind.WINDOW:
        _check_range(f"{where}.window_tokens", group.window_tokens, 1, U32_MAX)
    elif group.window_tokens or group.per_block:
        raise InvalidArgument(f"{where}: window_tokens and per_block are for window groups only")
    if group.kind is GroupKind.COMPRESSED and group.ratio < 2:
        raise InvalidArgument(
            f"{where}: a compressed group needs a ratio of 2 or more ratio={group.ratio}"
        )
    if group.kind in (GroupKind.LINEAR, GroupKind.WINDOW) and group.ratio != 1:
        raise InvalidArgument(f"{where}: a {group.kind} group has ratio 1 ratio={group.ratio}")
    if group.is_required and group.retention_s:
        raise InvalidArgument(f"{where}: retention_s is for window and state groups only")
    if not group.is_required and group.access is Access.SPARSE:
        raise InvalidArgument(f"{where}: only linear and compressed groups can be sparse")


def _check_block_tokens(spec: NamespaceSpec) -> None:
    step = block_tokens_step(spec)
    if step > BLOCK_TOKENS_MAX:
        raise InvalidArgument(
            "the ratios and the engine's page have no common multiple of at most"
            f" {BLOCK_TOKENS_MAX} tokens multiple={step}"
        )
    if spec.block_tokens % step:
        nearest = [
            n for n in nearest_block_tokens(spec, spec.block_tokens) if n <= BLOCK_TOKENS_MAX
        ]
        raise InvalidArgument(
            "block_tokens must be a multiple of every group's ratio and of the engine's page"
            f" block_tokens={spec.block_tokens} multiple_of={step}"
            f" nearest={' or '.join(map(str, nearest))}"
        )


def _check_checkpoints(spec: NamespaceSpec) -> None:
    period = spec.checkpoint_period_tokens
    if spec.checkpoint_policy is not CheckpointPolicy.PERIODIC:
        if period:
            raise InvalidArgument(
                "checkpoint_period_tokens is for the periodic policy only"
                f" checkpoint_policy={spec.checkpoint_policy} checkpoint_period_tokens={period}"
            )
        return
    if not optional_mask(spec):
        raise InvalidArgument("the periodic policy needs a window or state group")
    if period == 0 or period % spec.block_tokens:
        raise InvalidArgument(
            "checkpoint_period_tokens must be a multiple of block_tokens"
            f" checkpoint_period_tokens={period} block_tokens={spec.block_tokens}"
        )
