"""The namespace of a vLLM engine: from its configuration, so that scheduler and workers find the same one.

What this connector does not understand is refused here with the reason, before any block moves: state groups (Mamba), caches that are no
prefix cache, pipeline and context parallelism.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    KVCacheSpecKind,
    compute_layer_kv_cache_shape_bytes,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from kvstored.client import GroupKind, GroupSpec
from kvstored.connectors import identity, versions
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.vllm_plans import EngineLayout, GroupLayout
from kvstored.errors import ConfigError

LAYOUT_VERSION = 1
"""Of the order of bytes in a piece: layer by layer, page by page, each as it lies in memory."""

_FULL = {
    KVCacheSpecKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION,
    KVCacheSpecKind.SINK_FULL_ATTENTION,
}
_WINDOW = {KVCacheSpecKind.SLIDING_WINDOW}


def layout_of(
    config: Any, cache: Any, options: ConnectorOptions
) -> EngineLayout:  # Any: vLLM's own types, which this package does not depend on
    """Raises ConfigError for what cannot be stored."""
    version = versions.check(versions.VLLM)
    parallel = config.parallel_config
    _check_shape(parallel)
    groups = tuple(_group(i, group, parallel) for i, group in enumerate(cache.kv_cache_groups))
    _, hash_tokens = resolve_kv_cache_block_sizes(cache, config)
    block_tokens = math.lcm(hash_tokens, *(group.page_tokens for group in groups))
    model = config.model_config
    spec = identity.namespace_of(
        model=options.model or _name(model),
        revision=f"{options.revision or _revision(model)}+vllm{versions.minor(version)}",
        dtype=f"{model.dtype}/{config.cache_config.cache_dtype}".replace("torch.", ""),
        layout=_layout(config, cache),
        layout_version=LAYOUT_VERSION,
        block_tokens=block_tokens,
        groups=[
            _group_spec(group, told, block_tokens)
            for group, told in zip(groups, cache.kv_cache_groups, strict=True)
        ],
        tp=parallel.tensor_parallel_size,
        tenant=options.tenant,
        engine_page_tokens=block_tokens,
    )
    return EngineLayout(spec, groups, hash_tokens)


def _check_shape(parallel: Any) -> None:
    shape = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
    }
    wrong = {name: size for name, size in shape.items() if size != 1}
    if wrong:
        raise ConfigError(f"this connector stores KV of tensor parallel engines only: {wrong}")


def _group(index: int, group: Any, parallel: Any) -> GroupLayout:
    spec = group.kv_cache_spec
    kind = get_kv_cache_spec_kind(spec)
    if kind not in _FULL | _WINDOW or not spec.prefix_cacheable or not group.enable_kv_transfer:
        raise ConfigError(
            f"KV of this kind is not stored: group={index} kind={kind.value}"
            f" layers={len(group.layer_names)}; full and sliding window attention are"
        )
    return GroupLayout(
        name=f"{index}-{kind.value}",
        page_tokens=spec.block_size,
        layer_names=tuple(group.layer_names),
        layer_bytes=tuple(_page_bytes(spec, name) for name in group.layer_names),
        is_sharded=parallel.tensor_parallel_size > 1 and kind is not KVCacheSpecKind.MLA_ATTENTION,
    )


def _page_bytes(spec: Any, layer: str) -> int:
    """Of one layer, without padding. A group of several sizes has a specification for each layer."""
    by_layer = (
        spec.kv_cache_specs if hasattr(spec, "kv_cache_specs") else {}
    )  # UniformTypeKVCacheSpecs
    return math.prod(compute_layer_kv_cache_shape_bytes(by_layer.get(layer, spec), 1))


def _group_spec(group: GroupLayout, told: Any, block_tokens: int) -> GroupSpec:
    window_tokens = get_kv_cache_spec_sliding_window(told.kv_cache_spec)
    if get_kv_cache_spec_kind(told.kv_cache_spec) in _WINDOW:
        return GroupSpec(
            group.name,
            GroupKind.WINDOW,
            group.piece_bytes(block_tokens),
            window_tokens=window_tokens,
            per_block=True,
            sharded=group.is_sharded,
        )
    return GroupSpec(
        group.name, GroupKind.LINEAR, group.piece_bytes(block_tokens), sharded=group.is_sharded
    )


def _layout(config: Any, cache: Any) -> str:
    """Whatever decides the order of the elements within a page. On CPUs kernels pack by instruction set (AMX stores tiles)."""
    device = config.device_config.device_type
    backend = config.attention_config.backend
    parts = [
        "vllm",
        device,
        identity.cpu_isa() if device == "cpu" else "",
        str(cache.kv_cache_layout or ""),
        backend.name if backend is not None else "",
    ]
    return "-".join(part for part in parts if part)


def _name(model: Any) -> str:
    served = model.served_model_name
    return str(served[0] if isinstance(served, list) else served or model.model)


def _revision(model: Any) -> str:
    hub: str = model.hf_config.to_dict().get("_commit_hash") or ""
    weights = identity.weights_fingerprint(Path(model.model)) or hub or str(model.revision)
    facts: Mapping[str, object] = {
        "config": {
            name: value
            for name, value in model.hf_config.to_dict().items()
            if name not in ("_name_or_path", "transformers_version")
        },
        "quantization": model.quantization,
        "max_model_len": model.max_model_len if _stretches(model.hf_config) else 0,
    }
    return identity.revision_of(weights, facts)


def _stretches(hf_config: Any) -> bool:
    """Whether positions are computed by the model's length, as dynamic RoPE does."""
    scaling = hf_config.to_dict().get("rope_scaling") or {}
    return "dynamic" in str(scaling)
