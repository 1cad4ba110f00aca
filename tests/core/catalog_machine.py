"""The state machine of the catalog: how it begins, fills and leases."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from numpy.typing import NDArray

from kvstored.core.calls import CopyTask, Fingerprint
from kvstored.core.catalog import Catalog
from kvstored.core.columnar import Grant, Places, named
from kvstored.core.copying import CopyRun
from kvstored.core.types import Part, Rows, SessionId, TierId
from kvstored.errors import Conflict
from tests.core.catalog_compare import (
    LIMITS,
    PARENTS,
    PATHS,
    ComparingMachine,
    Profile,
    T,
    valid_of,
)
from tests.core.desk import BLOCK_TOKENS, UNIT, Namer, layouts_of
from tests.core.oracle_claims import FullOracle
from tests.core.oracle_rows import Aside, Fill, Lease

small = st.integers(0, 1 << 16)


class CatalogMachine(ComparingMachine):
    profile: Profile

    def __init__(self) -> None:
        super().__init__()
        self.is_begun = False

    @precondition(lambda self: not self.is_begun)
    @rule(dram=small, nvme=small)
    def begin(self, dram: int, nvme: int) -> None:
        profile = self.profile
        tiers = [self.pick(profile.dram, dram), self.pick(profile.nvme, nvme)]
        self.catalog = Catalog(tiers=tiers, policy="lru", limits=LIMITS, epoch=3)
        self.oracle = FullOracle(tiers, LIMITS)
        for limits in tiers:  # two segments: no extent crosses from one to the other
            self.catalog.grow(limits.tier, 0, -(-limits.capacity_units // 2))
            if limits.capacity_units > 1:
                self.catalog.grow(limits.tier, 1, limits.capacity_units // 2)
        self.namers = [Namer(layout) for layout in layouts_of(*profile.specs)]
        for namer in self.namers:
            self.catalog.add_namespace(namer.layout)
            self.oracle.specs[namer.layout.id] = namer.layout.spec
        self.tasks = {}
        self.discards = []
        self.given_fills: list[int] = []
        self.asked: dict[int, tuple[int, list[int]]] = {}
        self.generations = {}
        self.places = {}
        self.oracle.now_s = 1000.0
        self.sessions = [self.catalog.open_session(self.now_s) for _ in range(2)]
        self.attempts: list[tuple[int, Fingerprint, Part, int | None]] = []
        self.record_attempts()
        self.is_begun = True

    def record_attempts(self) -> None:
        """Which copies a write-back looks at, and in which order, is not promised: the oracle is told."""
        carriage, books = self.catalog.carriage, self.catalog.books
        begin = carriage.begin

        def recorded(source: int, target: TierId, now_s: float) -> CopyTask | None:
            block, part = int(books.copies.block[source]), Part(int(books.copies.part[source]))
            ns, fingerprint = int(books.blocks.ns[block]), books.fingerprint(block)
            task = begin(source, target, now_s)
            self.attempts.append((ns, fingerprint, part, task.id if task else None))
            return task

        open_run = carriage.open_run

        def recorded_run(
            sources: Rows, target: TierId, places: Places, asked: NDArray[np.int64]
        ) -> CopyRun:
            run = open_run(sources, target, places, asked)
            names = named(run.fingerprints)
            self.attempts += [
                (run.ns, name, run.part, id_) for name, id_ in zip(names, run.ids, strict=True)
            ]
            return run

        carriage.begin = recorded  # type: ignore[method-assign]  # on purpose
        carriage.open_run = recorded_run  # type: ignore[method-assign]  # on purpose

    # ---- small words

    def pick(self, values: Sequence[T], i: int) -> T:
        return values[i % len(values)]

    def path(self, path: int, length: int) -> tuple[str, ...]:
        keys = self.pick(PATHS, path)
        return keys[: 1 + length % len(keys)]

    def owner(self, rights: Mapping[int, Aside | Fill | Lease], pick: int, stranger: int) -> int:
        """The session of a right; now and then another one."""
        if stranger % 8 == 0:
            return self.pick(self.sessions, stranger // 8)
        return self.pick(list(rights.values()), pick).session

    def fills_of(self, session: int) -> list[int]:
        return [id_ for id_, fill in self.oracle.fills.items() if fill.session == session]

    def groups_of(self, namer: Namer, mask: int, *, keep_required: bool) -> list[int]:
        groups = namer.layout.spec.groups
        chosen = [g for g in range(len(groups)) if mask >> g & 1]
        required = [g for g, group in enumerate(groups) if group.is_required]
        if keep_required and set(chosen) & set(required):
            chosen = sorted({*chosen, *required})
        return chosen or required

    # ---- fills

    @precondition(lambda self: self.is_begun)
    @rule(
        ns=small,
        session=small,
        path=small,
        first=small,
        length=small,
        shard=small,
        mask=small,
        ttl=small,
        told=st.booleans(),
        request=small,
    )
    def reserve(self, ns, session, path, first, length, shard, mask, ttl, told, request) -> None:  # type: ignore[no-untyped-def]  # drawn
        namer, session = self.pick(self.namers, ns), self.pick(self.sessions, session)
        keys = self.path(path, length)
        keys = keys[first % len(keys) :]
        groups = self.groups_of(namer, mask | (mask >> 8 & 3), keep_required=True)
        request_id = self.pick((b"", b"r1", b"r2"), request)
        self.reserve_keys(
            namer,
            session,
            keys,
            shard,
            groups,
            ttl_s=1 + ttl % 30,
            told=told,
            request_id=request_id,
        )

    @precondition(lambda self: self.is_begun)
    @rule(session=small, path=small, length=small, stale=small)
    def replace(self, session: int, path: int, length: int, stale: int) -> None:
        namer = self.namers[-1]
        session = self.pick(self.sessions, session)
        keys = [key for key in self.path(path, length) if valid_of(key) == BLOCK_TOKENS]
        if not namer.layout.spec.mutable:
            return
        _, current = self.catalog.locate(namer.layout.id, namer.batch(keys))
        generations = current.tolist()
        if stale % 4 == 0:
            generations[-1] += 1
            call = namer.reserve(session, keys, [None] * len(keys))
            with pytest.raises(Conflict):
                self.catalog.replace_if(call, generations, self.now_s)
            return
        if any(self.oracle.is_being_put(namer.layout.id, key) for key in keys):
            with pytest.raises(Conflict):
                self.catalog.replace_if(
                    namer.reserve(session, keys, [None] * len(keys)), generations, self.now_s
                )
            return
        self.reserve_keys(
            namer, session, tuple(keys), 0, [0], ttl_s=20, told=False, generations=generations
        )

    def reserve_keys(
        self,
        namer: Namer,
        session: int,
        keys: tuple[str, ...],
        shard: int,
        groups: list[int],
        *,
        ttl_s: int,
        told: bool,
        request_id: bytes = b"",
        generations: list[int] | None = None,
    ) -> None:
        spec = namer.layout.spec
        parents = [PARENTS[key] if told else None for key in keys]
        last = valid_of(keys[-1]) % BLOCK_TOKENS
        shard %= spec.shards
        call = namer.reserve(
            session,
            keys,
            parents,
            shard=shard,
            groups=groups,
            last_valid_tokens=last,
            ttl_s=ttl_s,
            request_id=request_id,
        )
        reserved = (
            self.catalog.reserve(call, self.now_s)
            if generations is None
            else self.catalog.replace_if(call, generations, self.now_s)
        )
        granted = [grant for grant in reserved.grants if grant is not None]
        status = self.oracle.reserve(
            session,
            namer.layout.id,
            shard,
            [(key, parent, valid_of(key)) for key, parent in zip(keys, parents, strict=True)],
            {g: spec.groups[g].bytes_per_block // UNIT for g in groups},
            [grant.fill for grant in granted],
            expires_s=self.now_s + ttl_s,
            now_s=self.now_s,
            request=(session, request_id) if request_id else None,
            replace=generations is not None,
        )
        assert reserved.status == status
        for grant in granted:
            fill = self.oracle.fills[grant.fill]
            assert keys[grant.key_index] == fill.block.key
            assert [(p.group, p.shard) for p in grant.pieces] == sorted(p for _, p in fill.pieces)
            assert grant.depth == self.oracle.depth(fill.block)
        self.compare()
        self.given_fills += [grant.fill for grant in granted]
        for grant in granted:
            self.places["fill", grant.fill] = [piece.place for piece in grant.pieces]

    @precondition(lambda self: self.is_begun and self.oracle.fills)
    @rule(session=small, pick=small, count=small, is_lost=small)
    def commit(self, session: int, pick: int, count: int, is_lost: int) -> None:
        session = self.owner(self.oracle.fills, pick, session)
        mine = self.fills_of(session) or list(self.oracle.fills)
        fills = mine[pick % len(mine) :][: 1 + count % 4]
        if not is_lost % 4:
            fills.append(self.pick(self.given_fills, is_lost))
        self.commit_fills(session, list(dict.fromkeys(fills)))

    def commit_fills(self, session: int, fills: list[int]) -> None:
        outcomes = self.committed(session, fills)
        for id_, outcome in zip(fills, outcomes, strict=True):
            expected = self.oracle.commit(session, id_, self.now_s)
            assert outcome is expected
        self.compare()

    def committed(self, session: int, fills: list[int]) -> list[bool | None]:
        """As the store does it: a whole run of fills at once, everything else one by one. Whether each is visible, None if lost."""
        sums = np.ones(len(fills), dtype=np.uint64)
        run = self.catalog.whole_run(SessionId(session), fills)
        if run is not None:
            self.catalog.commit_run(run, sums, self.now_s)
            return [True] * len(fills)
        outcomes = self.catalog.commit(SessionId(session), fills, [{0: 1}] * len(fills), self.now_s)
        return [outcome.visible if outcome else None for outcome in outcomes]

    @precondition(lambda self: self.is_begun and self.oracle.fills)
    @rule(session=small, pick=small)
    def abort(self, session: int, pick: int) -> None:
        session = self.owner(self.oracle.fills, pick, session)
        id_ = self.pick(list(self.oracle.fills), pick)
        self.catalog.abort(SessionId(session), [id_], self.now_s)
        if self.oracle.fills[id_].session == session:
            self.oracle.end_fill(id_, self.now_s, keep=False)
        self.compare()

    # ---- leases

    @precondition(lambda self: self.is_begun)
    @rule(
        ns=small,
        session=small,
        path=small,
        length=small,
        shard=small,
        mask=small,
        ttl=small,
        load=st.booleans(),
        now=st.booleans(),
    )
    def acquire(self, ns, session, path, length, shard, mask, ttl, load, now) -> None:  # type: ignore[no-untyped-def]  # drawn
        namer, session = self.pick(self.namers, ns), self.pick(self.sessions, session)
        keys = self.path(path, length)
        groups = self.groups_of(namer, mask, keep_required=False)
        lease = self.acquire_keys(namer, session, keys, shard, groups, 1 + ttl % 30, load=load)
        if now:
            self.grant_lease(lease)

    def acquire_keys(
        self,
        namer: Namer,
        session: int,
        keys: tuple[str, ...],
        shard: int,
        groups: list[int],
        ttl_s: int,
        *,
        load: bool,
    ) -> int:
        shard %= namer.layout.spec.shards
        call = namer.acquire(session, keys, shard=shard, groups=groups, ttl_s=ttl_s, load=load)
        acquired = self.catalog.acquire(call, self.now_s)
        loads = self.begun(acquired.loads)
        self.oracle.leases[acquired.lease] = self.oracle.acquire(
            session,
            namer.layout.id,
            keys,
            set(groups),
            load=load,
            loads=loads,
            expires_s=self.now_s + ttl_s,
            now_s=self.now_s,
        )
        assert not loads
        self.asked[acquired.lease] = shard, groups
        self.compare()
        return acquired.lease

    @precondition(lambda self: self.is_begun and self.ungranted())
    @rule(pick=small)
    def grant(self, pick: int) -> None:
        self.grant_lease(self.pick(self.ungranted(), pick))

    def ungranted(self) -> list[int]:
        return [id_ for id_ in self.oracle.leases if id_ in self.asked]

    def grant_lease(self, lease: int) -> None:
        grant = self.catalog.grant(lease, self.now_s)
        status = self.oracle.grant(lease, self.now_s)
        assert [block.status for block in grant.blocks] == status
        assert (grant.lease == lease) is (lease in self.oracle.leases)
        self.compare_grant(grant, *self.asked.pop(lease))
        self.compare()
        if lease in self.oracle.leases:
            pieces = [piece for block in grant.blocks for piece in block.pieces if piece]
            self.places["lease", lease] = [piece.place for piece in pieces]

    def compare_grant(self, grant: Grant, shard: int, groups: list[int]) -> None:
        """Every piece that is there, of the right shard, and no other."""
        lease = self.oracle.leases.get(grant.lease)
        if lease is None:
            return
        for i, block in enumerate(grant.blocks):
            there: set[tuple[int, int]] = set()
            for copy in lease.copies[i]:
                whole = self.oracle.complete(copy)
                there |= {
                    p for p in copy.written if copy.part is not Part.CHECKPOINT or p[0] in whole
                }
            known = lease.blocks[i]
            spec = self.oracle.specs[known.ns] if known else None
            wanted = (
                {(g, shard if spec.groups[g].sharded else 0) for g in groups} if spec else set()
            )
            pieces = {(piece.group, piece.shard) for piece in block.pieces if piece}
            assert pieces == there & wanted

    @precondition(lambda self: self.is_begun and self.oracle.leases)
    @rule(session=small, pick=small, renew=st.booleans(), ttl=small)
    def release_or_renew(self, session: int, pick: int, renew: bool, ttl: int) -> None:
        session = self.owner(self.oracle.leases, pick, session)
        id_ = self.pick(list(self.oracle.leases), pick)
        is_mine = self.oracle.leases[id_].session == session
        if renew:
            ttl_s = float(1 + ttl % 40)
            assert self.catalog.renew(SessionId(session), [id_], ttl_s, self.now_s) == [not is_mine]
            if is_mine:
                self.oracle.leases[id_].expires_s = self.now_s + ttl_s
        else:
            assert self.catalog.release(SessionId(session), [id_, 1], self.now_s) == [
                not is_mine,
                True,
            ]
            if is_mine:
                self.oracle.end_lease(id_, self.now_s, keep=False)
        self.compare()
