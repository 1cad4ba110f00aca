"""Namespaces, keys and calls in short form, for the tests of the catalog."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstored.core.calls import (
    Acquire,
    CopyTask,
    Expired,
    FillStatus,
    Fingerprint,
    Freed,
    Limits,
    Parents,
    Reason,
    Reserve,
    StoredPiece,
    TierLimits,
)
from kvstored.core.catalog import Catalog
from kvstored.core.columnar import AnyEffect, Grant, Reserved, named, singly
from kvstored.core.columns import READY
from kvstored.core.copying import Copying, CopyRun
from kvstored.core.keys import key_batch
from kvstored.core.namespace import Namespaces
from kvstored.core.naming import rows_leaf_first
from kvstored.core.raising import Raising
from kvstored.core.types import (
    UNIT_BYTES,
    Access,
    GroupKind,
    GroupSpec,
    KeyBatch,
    Layout,
    Match,
    NamespaceId,
    NamespaceSpec,
    Part,
    SessionId,
    TierId,
)
from kvstored.core.views import Verdict

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
        contents: Sequence[int] = (),
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
            contents=np.asarray(contents, dtype=np.uint32) if contents else None,
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
        tier: TierId = TierId.DRAM,
        exact: bool = False,
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
            tier=tier,
            exact=exact,
        )


def freed_in(effects: Sequence[AnyEffect]) -> list[Freed]:
    return [effect for effect in singly(effects) if isinstance(effect, Freed)]


def remove(catalog: Catalog, ns: NamespaceId, keys: KeyBatch, now_s: float) -> int:
    return catalog.clear_rows(ns, rows_leaf_first(catalog.books, ns, keys), now_s)


class Desk:
    """A catalog with one open session, and the calls of its life in one line each. Chains link each name to the one before."""

    def __init__(
        self,
        *specs: NamespaceSpec,
        dram: int = 8,
        nvme: int = 0,
        hbm: int = 0,
        gpus: int = 1,
        policy: str = "lru",
        limits: Limits | None = None,
        **shares: float,
    ) -> None:
        given = {TierId.HBM: hbm, TierId.DRAM: dram, TierId.NVME: nvme}
        sizes = {tier: units for tier, units in given.items() if units}
        tiers = [
            TierLimits(tier, units, **{"lease_share": 1.0, **shares})  # type: ignore[arg-type]  # admit_hits is whole
            for tier, units in sizes.items()
        ]
        self.catalog = catalog = Catalog(
            tiers=tiers, policy=policy, limits=limits or Limits(), epoch=7
        )
        self.raising = Raising(catalog.books, catalog.carriage, catalog.looking.running)
        for tier, units in sizes.items():
            parts = gpus if tier is TierId.HBM else 1
            for segment in range(parts):
                self.catalog.grow(tier, segment, units // parts)
        self.namers = [Namer(layout) for layout in layouts_of(*(specs or (spec_of("m"),)))]
        for namer in self.namers:
            self.catalog.add_namespace(namer.layout)
        self.now_s = 1000.0
        self.session = self.catalog.open_session(self.now_s)

    def begin(
        self,
        names: str,
        *,
        ns: int = 0,
        shard: int = 0,
        groups: Sequence[int] | None = None,
        under: str | None = None,
        last: int = 0,
        ttl_s: float = 60.0,
        request_id: bytes = b"",
        contents: Sequence[int] = (),
    ) -> Reserved:
        """Reserves a chain of blocks, one a letter, below `under`."""
        parents = [under, *names[:-1]]
        call = self.namers[ns].reserve(
            self.session,
            list(names),
            parents,
            shard=shard,
            groups=groups,
            last_valid_tokens=last,
            ttl_s=ttl_s,
            request_id=request_id,
            contents=contents,
        )
        reserved = self.catalog.reserve(call, self.now_s)
        self.catalog.tell_contents(call)
        self.catalog.check()
        return reserved

    def commit(self, reserved: Reserved) -> list[bool | None]:
        """Whether each block is visible now; None for a lost fill."""
        fills = [grant.fill for grant in reserved.grants if grant is not None]
        outcomes = self.catalog.commit(self.session, fills, [{}] * len(fills), self.now_s)
        self.catalog.check()
        return [None if outcome is None else outcome.visible for outcome in outcomes]

    def put(
        self,
        names: str,
        *,
        ns: int = 0,
        shard: int = 0,
        groups: Sequence[int] | None = None,
        under: str | None = None,
        last: int = 0,
        contents: Sequence[int] = (),
    ) -> list[FillStatus]:
        reserved = self.begin(
            names, ns=ns, shard=shard, groups=groups, under=under, last=last, contents=contents
        )
        self.commit(reserved)
        return reserved.status

    def read(
        self, names: str, *, ns: int = 0, shard: int = 0, groups: Sequence[int] | None = None
    ) -> Grant:
        call = self.namers[ns].acquire(self.session, list(names), shard=shard, groups=groups)
        acquired = self.catalog.acquire(call, self.now_s)
        self.carry(acquired.loads)
        grant = self.catalog.grant(acquired.lease, self.now_s)
        self.catalog.check()
        return grant

    def release(self, grant: Grant) -> bool:
        """Whether the lease still was."""
        (lost,) = self.catalog.release(self.session, [grant.lease], self.now_s)
        self.catalog.check()
        return not lost

    def singly(self, copying: Sequence[Copying]) -> list[CopyTask]:
        """Runs taken apart."""
        tasks: list[CopyTask] = []
        for each in copying:
            tasks += self.catalog.carriage.take_apart(each) if isinstance(each, CopyRun) else [each]
        return tasks

    def carry(self, copying: Sequence[Copying]) -> None:
        for each in copying:
            if isinstance(each, CopyRun):
                assert self.catalog.carriage.commit_run(each, each.targets, self.now_s)
                continue
            stored = [StoredPiece(move.target, 1) for move in each.moves]
            self.catalog.carriage.commit(each.id, stored, self.now_s)
        self.catalog.check()

    def write_back(self) -> list[str]:
        copying = self.catalog.write_back(1 << 30, self.now_s)
        names: list[str] = []
        for each in copying:
            found = named(each.fingerprints) if isinstance(each, CopyRun) else [each.fingerprint]
            names += map(self.name_of, found)
        self.carry(copying)
        return names

    def gone(self) -> list[tuple[str, Reason]]:
        """What was forgotten since the last look; discards on disk are carried out."""
        freed = freed_in(self.catalog.drain())
        for effect in freed:
            if effect.token:
                self.catalog.discarded(effect.token)
        self.catalog.check()
        return [(self.name_of(effect.fingerprint), effect.reason) for effect in freed]

    def hits(self, names: str, *, ns: int = 0, last: int = 0) -> Match:
        return self.catalog.match(
            self.namers[ns].layout.id, self.namers[ns].batch(list(names)), last, self.now_s
        )

    def there(self, names: str, *, ns: int = 0) -> str:
        """The readable ones among the names."""
        batch = self.namers[ns].batch(list(names))
        tiers, _ = self.catalog.locate(self.namers[ns].layout.id, batch)
        return "".join(name for name, mask in zip(names, tiers.tolist(), strict=True) if mask)

    def tiers_of(self, name: str, part: Part = Part.DENSE, *, ns: int = 0) -> set[TierId]:
        table = self.catalog.books.copies
        return {
            TierId(int(table.tier[copy]))
            for copy in self.copies(name, ns=ns)
            if table.part[copy] == part and table.state[copy] == READY
        }

    def copies(self, name: str, *, ns: int = 0) -> list[int]:
        low, high = self.namers[ns].batch([name]).fingerprints[0].tolist()
        return self.catalog.looking.copies_of(self.namers[ns].layout.id, (low, high))

    def explain(self, name: str, *, ns: int = 0) -> Verdict:
        low, high = self.namers[ns].batch([name]).fingerprints[0].tolist()
        return self.catalog.looking.explain(self.namers[ns].layout.id, (low, high), self.now_s)

    def wait(self, seconds: float) -> Expired:
        self.now_s += seconds
        expired = self.catalog.expire(self.now_s)
        self.catalog.check()
        return expired

    def name_of(self, fingerprint: Fingerprint) -> str:
        return next(namer.names[fingerprint] for namer in self.namers if fingerprint in namer.names)

    @property
    def ns(self) -> NamespaceId:
        return self.namers[0].layout.id

    def keys(self, names: str, *, ns: int = 0) -> KeyBatch:
        return self.namers[ns].batch(list(names))
