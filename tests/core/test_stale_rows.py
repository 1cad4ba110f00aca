"""Rows looked up at the start of a call may be evicted, and taken by other blocks, before the call comes to them."""

import numpy as np

from kvstored.core.calls import (
    FillStatus,
    Limits,
    Parents,
    Reserve,
    StoredPiece,
    TierLimits,
)
from kvstored.core.catalog import Catalog
from kvstored.core.keys import key_batch
from kvstored.core.namespace import Namespaces
from kvstored.core.types import GroupKind, GroupSpec, KeyBatch, Layout, NamespaceSpec, TierId

SPEC = NamespaceSpec(
    model="m",
    revision="1",
    dtype="bf16",
    layout="nhd",
    layout_version=1,
    block_tokens=16,
    groups=(GroupSpec("kv", GroupKind.LINEAR, 4096),),
    sink_tokens=0,
)
NOW_S = 1000.0


def catalog_of(dram: int, nvme: int) -> tuple[Catalog, Layout]:
    tiers = [TierLimits(TierId.DRAM, dram), TierLimits(TierId.NVME, nvme)]
    catalog = Catalog(tiers=tiers, policy="lru", limits=Limits(), epoch=1)
    catalog.grow(TierId.DRAM, 0, dram)
    catalog.grow(TierId.NVME, 0, nvme)
    layout = Namespaces().open(SPEC, supersede=False).layout
    catalog.add_namespace(layout)
    return catalog, layout


def keys_of(layout: Layout, numbers: list[int]) -> KeyBatch:
    packed = b"".join(number.to_bytes(8, "big") for number in numbers)
    return key_batch(packed, 8, layout.seed)


def put(catalog: Catalog, layout: Layout, session: int, numbers: list[int]) -> list[FillStatus]:
    keys = keys_of(layout, numbers)
    alone = Parents(
        np.zeros((len(numbers), 2), dtype=np.uint64), np.zeros(len(numbers), dtype=np.bool_)
    )
    call = Reserve(
        session=session,  # type: ignore[arg-type]  # a plain number is enough here
        ns=layout.id,
        shard=0,
        keys=keys,
        parents=alone,
        groups_mask=1,
        sizes=np.full((len(numbers), 1), 4096, dtype=np.uint64),
        last_valid_tokens=0,
        ttl_s=10.0,
    )
    reserved = catalog.reserve(call, NOW_S)
    fills = [grant.fill for grant in reserved.grants if grant is not None]
    catalog.commit(call.session, fills, [{0: 1} for _ in fills], NOW_S)
    catalog.check()
    return reserved.status


def test_a_key_whose_block_was_evicted_for_an_earlier_key_is_granted_anew() -> None:
    catalog, layout = catalog_of(dram=2, nvme=8)
    session = catalog.open_session(NOW_S)
    put(catalog, layout, session, [1, 2])
    # 3 evicts 1 and takes its row; 1 must not be taken for 3, which is being filled
    assert put(catalog, layout, session, [3, 1]) == [FillStatus.GRANTED, FillStatus.GRANTED]


def test_a_prefetch_survives_the_eviction_of_what_it_would_load() -> None:
    catalog, layout = catalog_of(dram=2, nvme=8)
    session = catalog.open_session(NOW_S)
    put(catalog, layout, session, [1])
    for task in catalog.write_back(1 << 20, NOW_S):
        stored = [StoredPiece(move.target, move.checksum) for move in task.moves]
        catalog.carriage.commit(task.id, stored, NOW_S)
    put(catalog, layout, session, [2, 3])
    # loading 1 evicts 2, which lies nowhere else and is gone when the call comes to it
    tasks, _ = catalog.prefetch(layout.id, keys_of(layout, [1, 2]), TierId.DRAM, NOW_S)
    assert len(tasks) == 1
    catalog.check()
