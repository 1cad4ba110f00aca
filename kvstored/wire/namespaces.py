"""Namespace specifications <-> messages. Only translation: validation and identity are
core/namespace.py.
"""

from kvstored.core.types import Access, CheckpointPolicy, GroupKind, GroupSpec, NamespaceSpec
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb

_KINDS = {
    pb.LINEAR: GroupKind.LINEAR,
    pb.COMPRESSED: GroupKind.COMPRESSED,
    pb.WINDOW: GroupKind.WINDOW,
    pb.STATE: GroupKind.STATE,
}
_ACCESSES = {pb.DENSE: Access.DENSE, pb.SPARSE: Access.SPARSE}
_POLICIES = {
    pb.BOUNDARY: CheckpointPolicy.BOUNDARY,
    pb.FULL: CheckpointPolicy.FULL,
    pb.PERIODIC: CheckpointPolicy.PERIODIC,
    pb.NONE: CheckpointPolicy.NONE,
}
_KIND_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_ACCESS_NUMBERS = {access: number for number, access in _ACCESSES.items()}
_POLICY_NUMBERS = {policy: number for number, policy in _POLICIES.items()}


def spec_of(message: pb.Namespace, *, caller_tenant: str) -> NamespaceSpec:
    """Fills in what the message leaves out; a choice that this version does not know is
    InvalidArgument.
    """
    if message.checkpoint_policy not in _POLICIES:
        raise InvalidArgument(f"unknown checkpoint policy value={message.checkpoint_policy}")
    return NamespaceSpec(
        model=message.model,
        revision=message.revision,
        dtype=message.dtype,
        layout=message.layout,
        layout_version=message.layout_version,
        block_tokens=message.block_tokens,
        groups=tuple(_group_of(group) for group in message.groups),
        tp=message.tp or 1,
        pp=message.pp or 1,
        tenant=message.tenant or caller_tenant,
        engine_page_tokens=message.engine_page_tokens or 1,
        sink_tokens=message.sink_tokens if message.HasField("sink_tokens") else 64,
        recent_tokens=message.recent_tokens if message.HasField("recent_tokens") else 128,
        checkpoint_policy=_POLICIES[message.checkpoint_policy],
        checkpoint_period_tokens=message.checkpoint_period_tokens,
        mutable=message.mutable,
        flops_base=message.flops_base,
        flops_slope=message.flops_slope,
    )


def message_of(spec: NamespaceSpec) -> pb.Namespace:
    try:
        return pb.Namespace(
            model=spec.model,
            revision=spec.revision,
            dtype=spec.dtype,
            layout=spec.layout,
            layout_version=spec.layout_version,
            block_tokens=spec.block_tokens,
            groups=[_message_of_group(group) for group in spec.groups],
            tp=spec.tp,
            pp=spec.pp,
            tenant=spec.tenant,
            engine_page_tokens=spec.engine_page_tokens,
            sink_tokens=spec.sink_tokens,
            recent_tokens=spec.recent_tokens,
            checkpoint_policy=_POLICY_NUMBERS[spec.checkpoint_policy],
            checkpoint_period_tokens=spec.checkpoint_period_tokens,
            mutable=spec.mutable,
            flops_base=spec.flops_base,
            flops_slope=spec.flops_slope,
        )
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"the namespace has a value out of range: {error}") from error


def _group_of(message: pb.Group) -> GroupSpec:
    if message.kind not in _KINDS or message.access not in _ACCESSES:
        raise InvalidArgument(
            f"unknown kind or access of a group name={message.name!r} "
            f"kind={message.kind} access={message.access}"
        )
    return GroupSpec(
        name=message.name,
        kind=_KINDS[message.kind],
        bytes_per_block=message.bytes_per_block,
        ratio=message.ratio or 1,
        window_tokens=message.window_tokens,
        per_block=message.per_block,
        access=_ACCESSES[message.access],
        sharded=message.sharded,
        lossy_ok=message.lossy_ok,
        resident=message.resident,
        retention_s=message.retention_s,
    )


def _message_of_group(group: GroupSpec) -> pb.Group:
    return pb.Group(
        name=group.name,
        kind=_KIND_NUMBERS[group.kind],
        bytes_per_block=group.bytes_per_block,
        ratio=group.ratio,
        window_tokens=group.window_tokens,
        per_block=group.per_block,
        access=_ACCESS_NUMBERS[group.access],
        sharded=group.sharded,
        lossy_ok=group.lossy_ok,
        resident=group.resident,
        retention_s=group.retention_s,
    )
