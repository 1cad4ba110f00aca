"""A Transformers cache as bytes: which caches can be stored, what their layers look like, and where a block lies in them.

A block holds, layer after layer, its keys and then its values, each (heads, tokens, dim): 2 x layers arrays of the cache, where they lie.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from kvstored.errors import ConfigError, InvalidArgument

LAYOUT, LAYOUT_VERSION = "transformers-layer-kv-head-token-dim", 1

Bytes = NDArray[np.uint8]
Pair = tuple[Any, Any]
"""Keys and values of one layer: tensors, and torch ships no types that the checks here could use."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    heads: int
    key_dim: int
    value_dim: int
    device: Any  # torch.device


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: tuple[LayerShape, ...]
    dtype: Any  # torch.dtype

    @property
    def token_bytes(self) -> int:
        return sum(
            layer.heads * (layer.key_dim + layer.value_dim) * int(self.dtype.itemsize)
            for layer in self.layers
        )

    def new(self, tokens: int) -> list[Pair]:
        """Memory of the host for so many tokens, to be filled."""
        return [
            (
                torch.empty((1, layer.heads, tokens, layer.key_dim), dtype=self.dtype),
                torch.empty((1, layer.heads, tokens, layer.value_dim), dtype=self.dtype),
            )
            for layer in self.layers
        ]


def shape_of(model: Any) -> CacheShape:
    """What this model keeps of a token, by computing one. Raises ConfigError for a model whose state is more than keys and values of tokens."""
    config = model.config
    if config.is_encoder_decoder:
        raise ConfigError("encoder-decoder models have two caches, the connector stores none")
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if other := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        names = sorted(kind.__name__ for kind in other)
        raise ConfigError(
            f"the model keeps what the connector does not store layers={names}:"
            " it takes models of full and sliding-window attention"
        )
    cache = DynamicCache()
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), **{named: cache})
    layers = [layer for layer in cache.layers if layer.is_initialized]
    dtypes = {tensor.dtype for layer in layers for tensor in (layer.keys, layer.values)}
    if len(layers) != len(cache.layers) or len(dtypes) != 1:
        raise ConfigError(
            f"layers share their KV or differ in dtype dtypes={sorted(map(str, dtypes))}"
        )
    shapes = (
        LayerShape(each.keys.shape[1], each.keys.shape[3], each.values.shape[3], each.keys.device)
        for each in layers
    )
    return CacheShape(tuple(shapes), dtypes.pop())


def check_is_storable(cache: Cache) -> None:
    """Layers that hold every token, of one sequence. Raises InvalidArgument with what to pass instead."""
    if any(layer.is_initialized and len(layer.keys) != 1 for layer in cache.layers):
        raise InvalidArgument(
            f"the cache holds several sequences batch={len(cache.layers[0].keys)}: generate them one after the other,"
            " without beams"
        )
    other = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer", "StaticLayer"}
    if not other:
        return
    raise InvalidArgument(
        f"a cache whose layers hold every token is needed layers={sorted(other)}: pass none, or DynamicCache() without"
        " a config; a model with sliding windows masks what lies outside of them"
    )


def tokens_in(cache: Cache) -> int:
    return int(cache.get_seq_length()) if cache.layers else 0


def filled(cache: Cache, pairs: Sequence[Pair], tokens: int, shape: CacheShape) -> None:
    """Puts the first tokens into an empty cache."""
    for index, ((keys, values), layer) in enumerate(zip(pairs, shape.layers, strict=True)):
        cache.update(
            keys[:, :, :tokens].to(layer.device), values[:, :, :tokens].to(layer.device), index
        )


def pairs_of(cache: Cache, tokens: int) -> list[Pair]:
    """The first tokens of a cache, in memory of the host: where they lie, or copied there from a GPU."""
    return [
        (layer.keys[:, :, :tokens].detach().cpu(), layer.values[:, :, :tokens].detach().cpu())
        for layer in cache.layers
    ]


def blocks_of(pairs: Sequence[Pair], first: int, end: int, block_tokens: int) -> list[list[Bytes]]:
    """The arrays of each block, without a copy."""
    whole = [tensor[0].view(torch.uint8).numpy() for pair in pairs for tensor in pair]
    return [
        [array[:, i * block_tokens : (i + 1) * block_tokens] for array in whole]
        for i in range(first, end)
    ]


def selection(attentions: Sequence[Any], block_tokens: int) -> list[float]:
    """One score a full block: how many times its fair share of attention it got over all layers and heads, 0 where less than that.

    The first block is a sink that draws most of it whatever the text is: the others are compared with each other.
    """
    mass = sum(layer[0].float().sum(dim=(0, 1)) for layer in attentions)
    if not isinstance(mass, torch.Tensor):
        return []
    blocks = len(mass) // block_tokens
    each = mass[: blocks * block_tokens].reshape(blocks, block_tokens).sum(1).tolist()
    others_fair = (float(mass.sum()) - sum(each[:1])) / max(len(mass) - block_tokens, 1)
    fairs = [float(mass.mean()) * block_tokens] + [others_fair * block_tokens] * (blocks - 1)
    ratios = [got / fair if fair else 0.0 for got, fair in zip(each, fairs, strict=True)]
    return [ratio if ratio > 1 else 0.0 for ratio in ratios]
