"""Plain `generate()` of Transformers over kvstored: load the longest stored prefix of a prompt, compute the rest, store it.

    kvstored = KvstoredCache(model)
    cache = kvstored.load(input_ids)
    output = model.generate(input_ids, cache=cache, max_new_tokens=64)
    kvstored.store(output, cache)

Written for Transformers 5.24 (`versions`). A daemon that is absent or fails makes everything a miss; nothing here raises for it.
"""

import hashlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvstored.client import GroupKind, GroupSpec, Keys, NamespaceSpec
from kvstored.client.keys import ExtraKeys
from kvstored.connectors import versions
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.identity import FINGERPRINT_LETTERS, namespace_of, revision_of
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.statistics import Statistics
from kvstored.connectors.transformers_layers import (
    LAYOUT,
    LAYOUT_VERSION,
    CacheShape,
    blocks_of,
    check_is_storable,
    filled,
    pairs_of,
    selection,
    shape_of,
    tokens_in,
)
from kvstored.errors import ConfigError, InvalidArgument

log = logging.getLogger("kvstored.connectors")

BLOCK_TOKENS = 64
_SAMPLES = 1024
"""Elements of each parameter that its fingerprint is made of."""
_NOT_TEXT = ("image", "video", "audio")
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "architectures", "use_cache")


class KvstoredCache:
    """The stored KV of one model, of batches of one sequence without padding. One a process, thread-safe.

    Raises ConfigError for a release or a model that it cannot work with. The namespace is the model's configuration and a sample of every
    parameter as they are now: adapters that are merged or loaded later need an extra key, or a new object.
    """

    def __init__(
        self,
        model: Any,  # a PreTrainedModel; Transformers ships no types
        options: ConnectorOptions | None = None,
        *,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        release = versions.check(versions.TRANSFORMERS)
        if versions.is_newer(release, versions.TRANSFORMERS):
            log.warning("Transformers %s is newer than this connector is tested with", release)
        self._options = options or ConnectorOptions()
        self._shape = shape_of(model)
        spec = _spec(model, self._shape, self._options, block_tokens)
        self._block_tokens = spec.block_tokens
        self._placeholders = _placeholders(model.config.to_dict())
        self._guarded = GuardedNamespace(spec, self._options, name="transformers")
        self._stored: weakref.WeakKeyDictionary[Cache, int] = weakref.WeakKeyDictionary()

    # ---- the two calls

    def load(
        self, input_ids: Any, *, into: Cache | None = None, extra_keys: ExtraKeys = ()
    ) -> Cache:
        """A cache with the longest stored prefix of these ids, all but the last at most, whose logits have to be computed.

        `into`: an empty cache to fill, static or dynamic, in place of a new DynamicCache. `extra_keys`: what else the KV depends on (a salt,
        an adapter). Pass the cache and the same ids to `generate`.
        """
        cache = DynamicCache() if into is None else into
        check_is_storable(cache)
        if tokens_in(cache):
            raise InvalidArgument(f"the cache to fill is not empty tokens={tokens_in(cache)}")
        ids = _ids(input_ids)
        keys = self._keys(ids, extra_keys)[: (len(ids) - 1) // self._block_tokens]
        self._stored[cache] = self._filled(cache, keys)
        return cache

    def store(self, ids: Any, cache: Cache, *, extra_keys: ExtraKeys = ()) -> int:
        """Stores the full blocks of the cache that are not known to be stored, in the background; how many were taken.

        `ids`: of the tokens in the cache, and any that follow: what `generate` gave back, or the prompt alone to store nothing of the answer. The cache
        is the caller's again when this returns.
        """
        check_is_storable(cache)
        sequence = _ids(ids)
        end = min(len(sequence), tokens_in(cache)) // self._block_tokens
        first = self._stored.get(cache, 0)
        if end <= first:
            return 0
        keys = self._keys(sequence[: end * self._block_tokens], extra_keys)[first:]
        pairs = pairs_of(cache, end * self._block_tokens)
        taken = self._guarded.store_later(keys, blocks_of(pairs, first, end, self._block_tokens))
        self._stored[cache] = first + taken
        return taken

    def report(self, ids: Any, attentions: Sequence[Any], *, extra_keys: ExtraKeys = ()) -> int:
        """Tells the daemon which blocks the model attended to, so that these stay and others go first; how many of them it has.

        `attentions`: one tensor a layer, (1, heads, queries, tokens), as a forward pass with `output_attentions=True` gives, which needs the eager
        attention. Once in some steps is enough.
        """
        scores = selection(attentions, self._block_tokens)
        keys = self._keys(_ids(ids), extra_keys)[: len(scores)]
        wait_s = self._options.lookup_s
        return self._guarded.attempt(lambda n: n.report(keys, scores, timeout_s=wait_s), 0)

    def flush(self, timeout_s: float) -> bool:
        """Whether everything taken was stored, or given up, in time."""
        return self._guarded.flush(timeout_s)

    # ---- around them

    @property
    def spec(self) -> NamespaceSpec:
        return self._guarded.spec

    @property
    def statistics(self) -> Statistics:
        return self._guarded.statistics

    def connected(self, timeout_s: float) -> bool:
        """Waits for the daemon; until it is reached every load is a miss."""
        return self._guarded.connected(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stores what waits, as long as there is time, and ends the session."""
        self._guarded.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _keys(self, ids: list[int], extra_keys: ExtraKeys) -> Keys:
        if not extra_keys and (found := self._placeholders.intersection(ids)):
            raise InvalidArgument(
                f"these tokens stand for an image, a video or a sound ids={sorted(found)}: give their hashes as extra_keys,"
                " since the ids are the same whatever is shown"
            )
        return self._guarded.keys(ids, extra_keys)

    def _filled(self, cache: Cache, keys: Keys) -> int:
        """Blocks that were loaded into it."""
        found = self._guarded.lookup(keys).hit_blocks
        if not found:
            return 0
        pairs = self._shape.new(found * self._block_tokens)
        rows = blocks_of(pairs, 0, found, self._block_tokens)
        loaded = self._guarded.load(keys[:found], rows).prefix
        if loaded:
            filled(cache, pairs, loaded * self._block_tokens, self._shape)
        return loaded


def _spec(
    model: Any, shape: CacheShape, options: ConnectorOptions, block_tokens: int
) -> NamespaceSpec:
    config = {name: v for name, v in model.config.to_dict().items() if name not in _NOT_IDENTITY}
    return namespace_of(
        model=options.model or Path(model.config.name_or_path).name or type(model).__name__,
        revision=revision_of(options.revision or _parameters_fingerprint(model), config),
        dtype=str(shape.dtype).removeprefix("torch."),
        layout=LAYOUT,
        layout_version=LAYOUT_VERSION,
        block_tokens=block_tokens,
        groups=(GroupSpec("kv", GroupKind.LINEAR, block_tokens * shape.token_bytes),),
        tenant=options.tenant,
    )


def _placeholders(config: Mapping[str, object]) -> frozenset[int]:
    """Ids that stand for what is not text."""
    named = (f"{kind}_token_{end}" for kind in _NOT_TEXT for end in ("id", "index"))
    return frozenset(i for name in named if isinstance(i := config.get(name), int))


def _parameters_fingerprint(model: Any) -> str:
    """Of the weights as they are in memory, adapters included: names, shapes, and samples of each."""
    hasher = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.is_meta:
                raise ConfigError(
                    f"weights that are not in memory have no fingerprint parameter={name}: give"
                    " ConnectorOptions(revision=...), a version of the weights"
                )
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, len(flat) // _SAMPLES)].contiguous().cpu()
            hasher.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
            hasher.update(sample.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:FINGERPRINT_LETTERS]


def _ids(given: Any) -> list[int]:
    """Of one sequence: ids as `generate` takes and gives them, (1, tokens), or a plain sequence."""
    ids = torch.as_tensor(given)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or not len(ids):
        raise InvalidArgument(
            f"token ids of one sequence are needed, (1, tokens), shape={tuple(ids.shape)};"
            " load and generate the sequences of a batch one after the other"
        )
    listed: list[int] = ids.tolist()
    return listed
