"""What the connector has to know of a running SGLang: whose weights it serves, and which of its pools are the same on every rank."""

from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

from kvstored.client import Keys
from kvstored.connectors.identity import revision_of, weights_fingerprint
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.sglang_pages import HostPool, Model, PoolSpace
from kvstored.connectors.sglang_selection import Selection, Selections, follow
from kvstored.errors import ConfigError

_SHARDED = ("MHATokenToKVPoolHost", "MHATokenToKOnlyPoolHost", "MambaPoolHost")
"""Classes of host pools, and all derived from them, that hold a rank's own heads even where the main pool is replicated."""

_SELECTED = (("deepseek_v4_c4", 4),)
"""Pools that a model selects from, where it is not the main one, and how many tokens a row of them stands for."""


def model_of(config: HiCacheStorageConfig, options: ConnectorOptions, release: str) -> Model:
    """Raises ConfigError where nothing tells one set of weights from another: blocks of other weights must never be taken for these."""
    server = _server_facts()
    name = options.model or config.model_name or str(server.get("model_path", ""))
    weights = options.revision or _weights(server, name)
    if not weights or not name:
        raise ConfigError(
            "nothing tells which weights SGLang serves: set them in its extra config,"
            f' {{"model": "name", "revision": "commit or version of the weights"}} model={name!r}'
        )
    facts = {
        "quantization": server.get("quantization"),
        "kv_cache_dtype": server.get("kv_cache_dtype"),
        "overrides": server.get("json_model_override_args"),
    }
    return Model(name=name, revision=f"{weights}+sglang{release}+{revision_of('', facts)[:8]}")


def is_replicated(config: HiCacheStorageConfig, pool: HostPool, name: PoolName) -> bool:
    """Whether every tensor-parallel rank has the same bytes in this pool: then it is stored once."""
    if not config.is_mla_model or name == PoolName.MAMBA:
        return False
    return not any(each.__name__ in _SHARDED for each in type(pool).__mro__)


def follow_selection(spaces: Mapping[str, PoolSpace]) -> Callable[[], None]:
    """Tells the daemon which pages attention selects, of the pool that it selects from. What is returned ends that."""
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415 - heavy
    from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: PLC0415

    name, ratio = next((each for each in _SELECTED if each[0] in spaces), ("kv", 1))
    space = spaces[name]
    page_tokens = space.guarded.spec.block_tokens

    def keys_of(selection: Selection) -> Keys:
        tokens = array("q", selection.tokens)
        key = RadixKey(tokens, selection.extra_key, cache_salt=selection.cache_salt)
        return space.keys(get_storage_hash_str(key, None, page_size=page_tokens))

    selections = Selections(space.guarded, keys_of, page_tokens=page_tokens, ratio=ratio)
    unfollow = follow(selections)

    def end() -> None:
        unfollow()
        selections.close()

    return end


def storage_metrics(loads: list[tuple[int, float]], stores: list[tuple[int, float]]) -> Any:
    """SGLang's own record; samples are pages and GiB/s."""
    from sglang.srt.observability.metrics_collector import (  # noqa: PLC0415 - heavy, and only with metrics on
        StorageMetrics,
    )

    return StorageMetrics(
        prefetch_pgs=[pages for pages, _ in loads],
        backup_pgs=[pages for pages, _ in stores],
        prefetch_bandwidth=[speed for _, speed in loads],
        backup_bandwidth=[speed for _, speed in stores],
    )


def _server_facts() -> dict[str, object]:
    """Of the server's own arguments; nothing where a controller runs without a server."""
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - heavy

    try:
        server = get_server_args()
    except ValueError:
        return {}
    return {
        "model_path": server.model_path,
        "revision": server.revision,
        "quantization": server.quantization,
        "kv_cache_dtype": server.kv_cache_dtype,
        "json_model_override_args": server.json_model_override_args,
    }


def _weights(server: dict[str, object], name: str) -> str:
    """By the bytes of the weights where they lie in a folder, else by the revision that the server was given."""
    path = Path(str(server.get("model_path") or name))
    if path.exists():
        return weights_fingerprint(path)
    snapshot = _hub_snapshot(str(path), server.get("revision"))
    if snapshot is not None:
        return weights_fingerprint(snapshot)
    return str(server.get("revision") or "")


def _hub_snapshot(model: str, revision: object) -> Path | None:
    """The folder that the hub's library downloaded the model to."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - comes with SGLang
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
