from dataclasses import fields

import pytest

from kvstored.core.types import Access, CheckpointPolicy, GroupKind, GroupSpec, NamespaceSpec
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.namespaces import message_of, spec_of

FULL = NamespaceSpec(
    model="m",
    revision="r",
    dtype="bf16",
    layout="nhd",
    layout_version=3,
    block_tokens=128,
    groups=tuple(
        GroupSpec(
            f"g{i}",
            kind,
            1 << 40,
            ratio=4,
            window_tokens=512,
            per_block=True,
            access=access,
            sharded=True,
            lossy_ok=True,
            resident=True,
            retention_s=60,
        )
        for i, (kind, access) in enumerate((k, a) for k in GroupKind for a in Access)
    ),
    tp=8,
    pp=2,
    tenant="t",
    engine_page_tokens=16,
    sink_tokens=0,
    recent_tokens=0,
    checkpoint_policy=CheckpointPolicy.PERIODIC,
    checkpoint_period_tokens=1024,
    mutable=True,
    flops_base=1.5,
    flops_slope=2.5,
)


def test_every_field_of_a_namespace_survives() -> None:
    assert all(getattr(FULL, f.name) != f.default for f in fields(FULL))
    message = pb.Namespace.FromString(message_of(FULL).SerializeToString())
    assert spec_of(message, caller_tenant="other") == FULL


@pytest.mark.parametrize("policy", CheckpointPolicy)
def test_every_checkpoint_policy_survives(policy: CheckpointPolicy) -> None:
    message = message_of(FULL)
    message.checkpoint_policy = message_of(
        NamespaceSpec("m", "r", "d", "l", 1, 16, (), checkpoint_policy=policy)
    ).checkpoint_policy
    assert spec_of(message, caller_tenant="t").checkpoint_policy is policy


def test_what_a_message_leaves_out_gets_its_default() -> None:
    spec = spec_of(pb.Namespace(model="m", groups=[pb.Group(name="kv")]), caller_tenant="me")
    default = NamespaceSpec(
        "m", "", "", "", 0, 0, (GroupSpec("kv", GroupKind.LINEAR, 0),), tenant="me"
    )
    assert spec == default


def test_choices_from_the_future_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="checkpoint policy"):
        spec_of(pb.Namespace(checkpoint_policy=99), caller_tenant="t")  # type: ignore[arg-type]  # an open enum
    with pytest.raises(InvalidArgument, match="kind or access"):
        spec_of(pb.Namespace(groups=[pb.Group(kind=9)]), caller_tenant="t")  # type: ignore[arg-type]  # an open enum
    with pytest.raises(InvalidArgument, match="out of range"):
        message_of(NamespaceSpec("m", "r", "d", "l", 1, -1, ()))
