"""Namespace specs of well-known models, from their public configurations.

Sizes are those of the engines' unpadded layouts (checked in the tests against the published table).
Draft and MTP layers are left out. Prefill FLOPs of the token at position p are flops_base +
flops_slope * p: twice the active parameters, and the part of attention that grows with the context,
four FLOPs a head dimension (scores and values) of every row that is read. Top-k attention reads a
bounded number of rows and adds its indexer's scan only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstored.core.namespace import validated
from kvstored.core.types import Access, CheckpointPolicy, GroupKind, GroupSpec, NamespaceSpec
from kvstored.errors import InvalidArgument

BF16_BYTES = 2
FP32_BYTES = 4
FP8_DS_MLA_BYTES = 656
"""MLA row of 512 FP8 latent dimensions, their scales, and 64 BF16 RoPE dimensions."""
FP8_DS_ROW_BYTES = 584
"""V4 row: 448 FP8 and 64 BF16 dimensions, 7 scales, 1 of padding."""
INDEXER_FP8_BYTES = 132
INDEXER_MXFP4_BYTES = 68
CHECKPOINT_RETENTION_S = 600


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a preset does not know: whose weights, how blocks are cut and how heads are sharded."""

    revision: str
    block_tokens: int = 256
    tp: int = 1
    tenant: str = "default"


def preset(name: str, deployment: Deployment) -> NamespaceSpec:
    """The validated spec of a model; InvalidArgument names the known ones, or what does not fit."""
    builder = PRESETS.get(name)
    if builder is None:
        raise InvalidArgument(f"unknown model preset name={name!r} known={', '.join(PRESETS)}")
    return builder(deployment)


def llama_3_1_8b(deployment: Deployment) -> NamespaceSpec:
    """GQA, 32 layers of 8 KV heads of 128; BF16."""
    kv = _gqa("kv", deployment, layers=32, kv_heads=8, head_dim=128)
    return _spec(
        "meta-llama/Llama-3.1-8B",
        deployment,
        (kv,),
        dtype="bfloat16",
        active_parameters=8.03e9,
        flops_slope=_attention_flops(layers=32, heads=32, head_dim=128),
    )


def deepseek_v3_2(deployment: Deployment) -> NamespaceSpec:
    """MLA with a lightning indexer in all 61 layers; FP8. Every rank holds the same rows: stored
    once.
    """
    layers = 61
    mla = _rows("mla", GroupKind.LINEAR, deployment, layers * FP8_DS_MLA_BYTES, Access.SPARSE)
    indexer = _rows("indexer", GroupKind.LINEAR, deployment, layers * INDEXER_FP8_BYTES)
    return _spec(
        "deepseek-ai/DeepSeek-V3.2",
        deployment,
        (mla, indexer),
        dtype="fp8_ds_mla",
        active_parameters=37e9,
        flops_slope=_indexer_flops(layers=layers, ratio=1),
    )


def deepseek_v4_flash(deployment: Deployment) -> NamespaceSpec:
    """21 CSA and 20 HCA layers, a sliding window of 128 in all 43; FP8 rows, MXFP4 indexer keys.

    The compressors' state is FP32: two overlapping 4-token chunks of CSA at any boundary, the open
    128-token chunk of HCA only where the boundary leaves one open.
    """
    csa_layers, hca_layers, layers = 21, 20, 43
    csa = _rows(
        "csa",
        GroupKind.COMPRESSED,
        deployment,
        csa_layers * FP8_DS_ROW_BYTES,
        Access.SPARSE,
        ratio=4,
    )
    indexer_bytes = csa_layers * INDEXER_MXFP4_BYTES
    indexer = _rows("indexer", GroupKind.COMPRESSED, deployment, indexer_bytes, ratio=4)
    hca_bytes = hca_layers * FP8_DS_ROW_BYTES
    hca = _rows("hca", GroupKind.COMPRESSED, deployment, hca_bytes, ratio=128, resident=True)
    window = _blob("swa", layers * 128 * FP8_DS_ROW_BYTES, window_tokens=128)
    csa_state = _blob("csa_state", csa_layers * (65_536 + 16_384))
    hca_state = _blob("hca_state", hca_layers * 524_288, ratio=128)
    return _spec(
        "deepseek-ai/DeepSeek-V4-Flash",
        deployment,
        (csa, indexer, hca, window, csa_state, hca_state),
        dtype="fp8_ds+mxfp4_indexer",
        active_parameters=13e9,
        flops_slope=_indexer_flops(layers=csa_layers, ratio=4)
        + _attention_flops(layers=hca_layers, heads=64, head_dim=512) / 128,
    )


def gpt_oss_120b(deployment: Deployment) -> NamespaceSpec:
    """18 full and 18 sliding-window (128) layers of 8 KV heads of 64; BF16. The engine pages its
    window like the rest.
    """
    full = _gqa("kv", deployment, layers=18, kv_heads=8, head_dim=64)
    window = GroupSpec(
        "swa",
        GroupKind.WINDOW,
        full.bytes_per_block,
        window_tokens=128,
        per_block=True,
        sharded=full.sharded,
        retention_s=CHECKPOINT_RETENTION_S,
    )
    return _spec(
        "openai/gpt-oss-120b",
        deployment,
        (full, window),
        dtype="bfloat16",
        active_parameters=5.1e9,
        flops_slope=_attention_flops(layers=18, heads=64, head_dim=64),
    )


def qwen3_next_80b(deployment: Deployment) -> NamespaceSpec:
    """12 full layers of 2 KV heads of 256, BF16, and 36 GDN layers with an FP32 state and a BF16
    convolution.
    """
    full = _gqa("kv", deployment, layers=12, kv_heads=2, head_dim=256)
    key_heads, value_heads, head_dim, convolution = 16, 32, 128, 4
    recurrent_bytes = value_heads * head_dim * head_dim * FP32_BYTES
    channels = (2 * key_heads + value_heads) * head_dim
    layer_bytes = recurrent_bytes + channels * (convolution - 1) * BF16_BYTES
    state = _blob("gdn", 36 * layer_bytes // deployment.tp, sharded=full.sharded)
    return _spec(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        deployment,
        (full, state),
        dtype="bfloat16+fp32_state",
        active_parameters=3e9,
        flops_slope=_attention_flops(layers=12, heads=16, head_dim=256),
    )


PRESETS: Mapping[str, Callable[[Deployment], NamespaceSpec]] = {
    "llama-3.1-8b": llama_3_1_8b,
    "deepseek-v3.2": deepseek_v3_2,
    "deepseek-v4-flash": deepseek_v4_flash,
    "gpt-oss-120b": gpt_oss_120b,
    "qwen3-next-80b": qwen3_next_80b,
}


def _spec(
    model: str,
    deployment: Deployment,
    groups: tuple[GroupSpec, ...],
    *,
    dtype: str,
    active_parameters: float,
    flops_slope: float,
) -> NamespaceSpec:
    spec = NamespaceSpec(
        model=model,
        revision=deployment.revision,
        dtype=dtype,
        layout="layer-row",
        layout_version=1,
        block_tokens=deployment.block_tokens,
        groups=groups,
        tp=deployment.tp,
        tenant=deployment.tenant,
        checkpoint_policy=CheckpointPolicy.BOUNDARY,
        flops_base=2 * active_parameters,
        flops_slope=flops_slope,
    )
    return validated(spec)


def _gqa(
    name: str, deployment: Deployment, *, layers: int, kv_heads: int, head_dim: int
) -> GroupSpec:
    """Keys and values of one shard's heads."""
    if deployment.tp < 1 or kv_heads % deployment.tp:
        raise InvalidArgument(
            f"tp must divide the KV heads of this preset tp={deployment.tp} kv_heads={kv_heads}"
        )
    row_bytes = layers * (kv_heads // deployment.tp) * head_dim * 2 * BF16_BYTES
    bytes_per_block = deployment.block_tokens * row_bytes
    return GroupSpec(name, GroupKind.LINEAR, bytes_per_block, sharded=deployment.tp > 1)


def _rows(
    name: str,
    kind: GroupKind,
    deployment: Deployment,
    row_bytes: int,
    access: Access = Access.DENSE,
    *,
    ratio: int = 1,
    resident: bool = False,
) -> GroupSpec:
    """One row of all layers every `ratio` tokens, the same on every rank."""
    bytes_per_block = -(-deployment.block_tokens // ratio) * row_bytes
    return GroupSpec(name, kind, bytes_per_block, ratio=ratio, access=access, resident=resident)


def _blob(
    name: str, size_bytes: int, *, window_tokens: int = 0, ratio: int = 1, sharded: bool = False
) -> GroupSpec:
    """A window or state checkpoint at one boundary."""
    return GroupSpec(
        name,
        GroupKind.WINDOW if window_tokens else GroupKind.STATE,
        size_bytes,
        ratio=ratio,
        window_tokens=window_tokens,
        sharded=sharded,
        retention_s=CHECKPOINT_RETENTION_S,
    )


def _attention_flops(*, layers: int, heads: int, head_dim: int) -> float:
    """Scores and values, a multiply and an add each, for every earlier row."""
    return 4.0 * layers * heads * head_dim


def _indexer_flops(*, layers: int, ratio: int) -> float:
    """Scores of 64 heads of 128 for every earlier indexer key."""
    return 2.0 * layers * 64 * 128 / ratio
