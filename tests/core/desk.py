"""Namespaces, keys and calls in short form, for the tests of the catalog."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstored.core.calls import Acquire, Effect, Fingerprint, Freed, Parents, Reserve
from kvstored.core.keys import key_batch
from kvstored.core.namespace import Namespaces
from kvstored.core.types import (
    UNIT_BYTES,
    Access,
    GroupKind,
    GroupSpec,
    KeyBatch,
    Layout,
    NamespaceSpec,
    SessionId,
)

UNIT = UNIT_BYTES
LINEAR = GroupSpec("kv", GroupKind.LINEAR, UNIT)
SPARSE = GroupSpec("csa", GroupKind.COMPRESSED, UNIT, ratio=2, access=Access.SPARSE)
WINDOW = GroupSpec("swa", GroupKind.WINDOW, UNIT, window_tokens=6, per_block=True)
BLOB = GroupSpec("swa_blob", GroupKind.WINDOW, UNIT, window_tokens=4)
STATE = GroupSpec("state", GroupKind.STATE, 2 * UNIT)
SHARDED = GroupSpec("heads", GroupKind.LINEAR, UNIT, sharded=True)
SHARDED_STATE = GroupSpec("ssm", GroupKind.STATE, UNIT, sharded=True)
BLOCK_TOKENS = 4


def spec_of(
    model: str,
    *groups: GroupSpec,
    tp: int = 1,
    sink_tokens: int = 0,
    recent_tokens: int = 4,
    mutable: bool = False,
) -> NamespaceSpec:
    return NamespaceSpec(
        model=model,
        revision="r",
        dtype="bf16",
        layout="nhd",
        layout_version=1,
        block_tokens=BLOCK_TOKENS,
        groups=groups or (LINEAR,),
        tp=tp,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        mutable=mutable,
    )


def layouts_of(*specs: NamespaceSpec) -> list[Layout]:
    namespaces = Namespaces()
    return [namespaces.open(spec, supersede=False).layout for spec in specs]


@dataclass
class Namer:
    """Keys by short names; remembers which fingerprint is whose."""

    layout: Layout
    names: dict[Fingerprint, str] = field(default_factory=dict)

    def batch(self, names: Sequence[str]) -> KeyBatch:
        packed = b"".join(hashlib.sha256(name.encode()).digest() for name in names)
        batch = key_batch(packed, 32, self.layout.seed)
        for name, (low, high) in zip(names, batch.fingerprints.tolist(), strict=True):
            self.names[low, high] = name
        return batch

    def parents(self, parents: Sequence[str | None]) -> Parents:
        known = np.asarray([parent is not None for parent in parents], dtype=np.bool_)
        fingerprints = self.batch([parent or "" for parent in parents]).fingerprints.copy()
        fingerprints[~known] = 0
        return Parents(fingerprints, known)

    def reserve(
        self,
        session: int,
        names: Sequence[str],
        parents: Sequence[str | None],
        *,
        shard: int = 0,
        groups: Sequence[int] | None = None,
        last_valid_tokens: int = 0,
        ttl_s: float = 60.0,
        request_id: bytes = b"",
    ) -> Reserve:
        spec = self.layout.spec
        chosen = list(range(len(spec.groups))) if groups is None else sorted(groups)
        sizes = np.zeros((len(names), len(chosen)), dtype=np.uint64)
        for i in range(len(names)):
            is_last = i == len(names) - 1
            valid = last_valid_tokens if is_last and last_valid_tokens else spec.block_tokens
            for column, g in enumerate(chosen):
                group = spec.groups[g]
                sizes[i, column] = group.bytes_per_block if valid >= group.ratio else 0
        return Reserve(
            session=SessionId(session),
            ns=self.layout.id,
            shard=shard,
            keys=self.batch(names),
            parents=self.parents(parents),
            groups_mask=sum(1 << g for g in chosen),
            sizes=sizes,
            last_valid_tokens=last_valid_tokens,
            ttl_s=ttl_s,
            request_id=request_id,
        )

    def acquire(
        self,
        session: int,
        names: Sequence[str],
        *,
        shard: int = 0,
        groups: Sequence[int] | None = None,
        ttl_s: float = 60.0,
        load: bool = True,
    ) -> Acquire:
        known = range(len(self.layout.spec.groups))
        return Acquire(
            session=SessionId(session),
            ns=self.layout.id,
            shard=shard,
            keys=self.batch(names),
            groups_mask=sum(1 << g for g in (known if groups is None else groups)),
            ttl_s=ttl_s,
            load=load,
        )


def freed_in(effects: Sequence[Effect]) -> list[Freed]:
    return [effect for effect in effects if isinstance(effect, Freed)]
