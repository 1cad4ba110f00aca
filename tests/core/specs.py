"""Specs that the identity tests share. Their digests are golden: do not change them."""

from kvstored.core.types import Access, CheckpointPolicy, GroupKind, GroupSpec, NamespaceSpec

LINEAR = GroupSpec("kv", GroupKind.LINEAR, 131_072)
COMPRESSED_4 = GroupSpec("csa", GroupKind.COMPRESSED, 64 * 584, ratio=4, access=Access.SPARSE)
COMPRESSED_128 = GroupSpec("hca", GroupKind.COMPRESSED, 2 * 584, ratio=128, resident=True)
WINDOW_PER_BLOCK = GroupSpec(
    "swa", GroupKind.WINDOW, 256 * 100, window_tokens=1000, per_block=True, retention_s=600
)
WINDOW_BLOB = GroupSpec("swa_blob", GroupKind.WINDOW, 128 * 584, window_tokens=128)
STATE = GroupSpec("state", GroupKind.STATE, 65_536, sharded=True, lossy_ok=False)
OPEN_STATE = GroupSpec("open_state", GroupKind.STATE, 6_144, ratio=128)


def spec_of(
    *groups: GroupSpec,
    model: str = "org/model",
    revision: str = "r1",
    block_tokens: int = 256,
    checkpoint_policy: CheckpointPolicy = CheckpointPolicy.BOUNDARY,
    checkpoint_period_tokens: int = 0,
    tenant: str = "default",
) -> NamespaceSpec:
    return NamespaceSpec(
        model=model,
        revision=revision,
        dtype="bfloat16",
        layout="nhd",
        layout_version=1,
        block_tokens=block_tokens,
        groups=groups or (LINEAR,),
        tenant=tenant,
        checkpoint_policy=checkpoint_policy,
        checkpoint_period_tokens=checkpoint_period_tokens,
    )


PLAIN = spec_of()
HYBRID = spec_of(
    COMPRESSED_4, COMPRESSED_128, WINDOW_PER_BLOCK, WINDOW_BLOB, STATE, OPEN_STATE, LINEAR
)
