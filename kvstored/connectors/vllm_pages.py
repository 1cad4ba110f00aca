"""The pages of vLLM's KV cache as bytes: in place where they lie in host memory, by way of host memory where they lie on a device.

A page is taken as it lies, without its padding; nothing here knows heads or tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvstored.client import Gather
from kvstored.client.copying import Bytes
from kvstored.connectors.vllm_plans import EngineLayout, GroupLayout, Page, has_all
from kvstored.errors import ConfigError

Tensor = Any  # torch is the engine's, this package has no types of it


class Piece(Protocol):
    """The memory of one piece of a load."""

    @property
    def gather(self) -> Gather: ...

    def finish(self) -> None:
        """After the bytes have come: to where the engine reads them."""


class InPlace:
    """A piece that is loaded to the engine's own pages; there is nothing left to do."""

    def __init__(self, gather: Gather) -> None:
        self.gather = gather

    def finish(self) -> None:
        return


class ByCopy:
    """A piece that is loaded to host memory and copied to the pages of a device."""

    def __init__(self, targets: Sequence[tuple[Tensor | None, int]]) -> None:
        self._targets = targets
        self._memory = np.empty(sum(size for _, size in targets), dtype=np.uint8)
        ends = np.cumsum([size for _, size in targets]).tolist()
        starts = [0, *ends[:-1]]
        self._parts = [self._memory[a:b] for a, b in zip(starts, ends, strict=True)]
        self.gather = Gather.of(self._parts)

    def finish(self) -> None:
        for (target, _), part in zip(self._targets, self._parts, strict=True):
            if target is not None:
                target.copy_(torch.from_numpy(part))


class GroupPages:
    """Pages of one group. `layers`: each as bytes, one row a page."""

    def __init__(self, group: GroupLayout, layers: Sequence[Tensor]) -> None:
        self._bytes = group.layer_bytes
        self._layers = layers
        self._in_place: list[Bytes] | None = None
        if all(layer.device.type == "cpu" for layer in layers):
            self._in_place = [layer.numpy() for layer in layers]
        self._unwanted = np.empty(max(group.layer_bytes), dtype=np.uint8)

    def source(self, pages: Sequence[Page]) -> Gather | None:
        """The bytes of a block's piece; None unless all of its pages are there."""
        if not has_all(pages):
            return None
        if self._in_place is not None:
            return Gather.of([layer[page] for layer in self._in_place for page in pages])
        return Gather.of([layer[page].cpu().numpy() for layer in self._layers for page in pages])

    def target(self, pages: Sequence[Page], layers: slice) -> Piece:
        """Where the piece, or these layers of it, goes; the bytes of pages that are not wanted go nowhere."""
        if self._in_place is not None:
            return InPlace(
                Gather.of(
                    [
                        self._unwanted[:size] if page is None else layer[page]
                        for layer, size in self._layers_of(self._in_place, layers)
                        for page in pages
                    ]
                )
            )
        return ByCopy(
            [
                (None if page is None else layer[page], size)
                for layer, size in self._layers_of(self._layers, layers)
                for page in pages
            ]
        )

    def _layers_of(self, layers: Sequence[Any], chosen: slice) -> list[tuple[Any, int]]:
        return list(zip(layers[chosen], self._bytes[chosen], strict=True))


def pages_by_group(
    layout: EngineLayout, kv_caches: Mapping[str, Tensor], num_blocks: int
) -> tuple[GroupPages, ...]:
    """Raises ConfigError where the tensors are not what the layout says."""
    return tuple(
        GroupPages(
            group,
            [
                _rows(name, kv_caches.get(name), size, num_blocks)
                for name, size in zip(group.layer_names, group.layer_bytes, strict=True)
            ],
        )
        for group in layout.groups
    )


def _rows(name: str, cache: Tensor | None, page_bytes: int, num_blocks: int) -> Tensor:
    """One row of bytes a page. Kernels may cut a page into several of their own, which lie behind each other."""
    if not isinstance(cache, torch.Tensor):
        raise ConfigError(f"a layer has no KV cache of one tensor: layer={name} is={type(cache)}")
    kernel_pages, left = divmod(cache.shape[0], num_blocks)
    dense = _dense_elements(cache)
    found_bytes = kernel_pages * math.prod(cache.shape[1:]) * cache.element_size()
    if left or not dense or found_bytes != page_bytes:
        raise ConfigError(
            f"pages do not lie as expected: layer={name} shape={tuple(cache.shape)}"
            f" strides={cache.stride()} page_bytes={found_bytes} expected={page_bytes}"
        )
    stride_bytes = cache.stride(0) * cache.element_size()
    if kernel_pages > 1 and stride_bytes * kernel_pages != page_bytes:
        raise ConfigError(f"pages of a kernel are apart: layer={name} strides={cache.stride()}")
    # All of the page's elements, in the order of memory: as one run of its own storage.
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return flat.as_strided(
        (num_blocks, page_bytes),
        (stride_bytes * kernel_pages, 1),
        cache.storage_offset() * cache.element_size(),
    )


def _dense_elements(cache: Tensor) -> bool:
    """Whether the elements of a row fill one run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
