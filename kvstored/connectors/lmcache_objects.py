"""LMCache's objects as blocks: which namespace, under which key. No engine is imported here.

LMCache names an object by model, rank, group and salt beside the hash of its tokens. Model, shape, group and size make the namespace, the
rest the key. It tells no parents, so blocks stand for themselves.
"""

import hashlib
import logging
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstored.client import GroupKind, GroupSpec, Keys, NamespaceSpec
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.identity import namespace_of, weights_fingerprint
from kvstored.connectors.options import ConnectorOptions
from kvstored.errors import ConfigError, KvstoredError

log = logging.getLogger("kvstored.connectors")

LAYOUT_VERSION = 1
NAMESPACES_MAX = 64
"""Models, groups and sizes that one server is expected to have; more are not stored."""


class ObjectKey(Protocol):
    """What LMCache's class of this name holds."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Sort:
    """Objects of one namespace: all of one size."""

    model: str
    world_size: int
    group: int
    size_bytes: int


def sort_of(key: ObjectKey, size_bytes: int) -> Sort:
    # LMCache packs the number of ranks into the top byte of what it calls a rank.
    return Sort(key.model_name, (key.kv_rank >> 24) & 0xFF or 1, key.object_group_id, size_bytes)


def key_of(key: ObjectKey) -> bytes:
    """Every field is in it with its length, so that no two keys read the same."""
    hasher = hashlib.sha256(b"lmcache object 1")
    fields = (key.chunk_hash, key.model_name.encode(), key.cache_salt.encode())
    for field in fields:
        hasher.update(struct.pack("<I", len(field)) + field)
    hasher.update(struct.pack("<QI", key.kv_rank & 0xFFFF_FFFF_FFFF_FFFF, key.object_group_id))
    return hasher.digest()


def unchained(keys: list[bytes]) -> Keys:
    return Keys.opaque(keys, unchained=True)


def weights_of(model: str, options: ConnectorOptions) -> str:
    """Raises ConfigError where nothing tells one set of weights from another."""
    if options.revision:
        return options.revision
    path = Path(model)
    found = weights_fingerprint(path) if path.exists() else ""
    if not found:
        raise ConfigError(
            "nothing tells which weights the engine serves: set the option"
            f' "revision" to the commit or version of the weights model={model!r}'
        )
    return found


class Spaces:
    """A guarded namespace for each sort of objects, made when first asked for. Thread-safe."""

    def __init__(self, options: ConnectorOptions, release: str) -> None:
        self._options = options
        self._release = release
        self._spaces: dict[Sort, GuardedNamespace | None] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def of(self, sort: Sort) -> GuardedNamespace | None:
        """None where there can be none. Waits as long as a lookup may for a new one to be reached."""
        with self._lock:
            if sort in self._spaces or self._is_closed or len(self._spaces) >= NAMESPACES_MAX:
                return self._spaces.get(sort)
            made = self._spaces[sort] = self._made(sort)
        if made is not None:
            made.connected(self._options.lookup_s)
        return made

    def like(self, key: ObjectKey) -> list[GuardedNamespace]:
        """Those that may hold it, of whatever size."""
        with self._lock:
            return [
                space
                for sort, space in self._spaces.items()
                if space is not None and sort_of(key, sort.size_bytes) == sort
            ]

    def all(self) -> Mapping[Sort, GuardedNamespace]:
        with self._lock:
            return {sort: space for sort, space in self._spaces.items() if space is not None}

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for space in self.all().values():
            space.close()

    def _made(self, sort: Sort) -> GuardedNamespace | None:
        try:
            return GuardedNamespace(self._spec(sort), self._options, name="lmcache")
        except KvstoredError as error:
            log.error("nothing of LMCache is stored: sort=%s %s", sort, error)  # noqa: TRY400 - what to do is in the text
            return None

    def _spec(self, sort: Sort) -> NamespaceSpec:
        weights = weights_of(self._options.model or sort.model, self._options)
        return namespace_of(
            model=f"{self._options.model or sort.model}#lmcache-mp-{sort.group}-{sort.world_size}-{sort.size_bytes}",
            revision=f"{weights}+lmcache{self._release}",
            dtype="bytes",
            layout="lmcache mp object",
            layout_version=LAYOUT_VERSION,
            block_tokens=1,  # LMCache tells no tokens of an object
            groups=[GroupSpec("object", GroupKind.LINEAR, sort.size_bytes)],
            tp=sort.world_size,
            tenant=self._options.tenant,
        )
