"""The store: every verb of the API over the catalog and the tiers. The only place that awaits tiers.

Verbs take and give the core's values; messages are the transport's. A verb that raises or is cancelled leaves nothing half done.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstored.core.advice import LoadQuestion, PrefillRun, advise
from kvstored.core.bandwidth import Bandwidth
from kvstored.core.calls import Acquire, Pinned, ReadStatus, Reason
from kvstored.core.columnar import Grant, ReadMany
from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.naming import count_reads, rows_leaf_first
from kvstored.core.plan import Signal
from kvstored.core.types import KeyBatch, Layout, Match, NamespaceSpec, TierId
from kvstored.core.usage import positions
from kvstored.errors import InvalidArgument, NotFound, Unavailable
from kvstored.store.access import Accesses
from kvstored.store.arrivals import Progress
from kvstored.store.clients import Clients
from kvstored.store.events import EventKind
from kvstored.store.flights import Flights
from kvstored.store.jobs import Job, Jobs
from kvstored.store.mover import Mover
from kvstored.store.puts import Puts
from kvstored.store.quiet import Quiet
from kvstored.store.reads import Reads
from kvstored.store.registry import Registry
from kvstored.store.rounds import Rounds
from kvstored.store.sessions import Session
from kvstored.store.shell import Shell
from kvstored.store.speeds import Speeds
from kvstored.store.stored_reads import StoredGrant, StoredReads
from kvstored.store.survey import Survey
from kvstored.tiers.layered import layers_in

LOAD_DEADLINE_S_MAX = 600.0
_Seen = tuple[ReadStatus, TierId, Reason]


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Times that callers may leave out. The catalog's limits bound what they may ask for."""

    fill_ttl_s: float = 30.0
    lease_ttl_s: float = 30.0
    resume_ttl_s: float = 10.0
    quarantine_s: float = 60.0
    load_deadline_s: float = 5.0
    hbm_bytes_per_s: int = 0

    def lease_ttl(self, asked_s: float) -> float:
        return asked_s or self.lease_ttl_s

    def fill_ttl(self, asked_s: float) -> float:
        return asked_s or self.fill_ttl_s

    def load_wait(self, asked_s: float) -> float:
        return min(asked_s or self.load_deadline_s, LOAD_DEADLINE_S_MAX)


class Store:
    def __init__(self, shell: Shell, registry: Registry, limits: StoreLimits) -> None:
        self.shell = shell
        self.limits = limits
        self.registry = registry
        self.quiet = Quiet()
        self.flights = Flights()
        self.speeds = Speeds(shell.elapsed_s)
        self.bandwidth = Bandwidth(limits.hbm_bytes_per_s)
        self.mover = Mover(shell, self.flights, self.speeds, bandwidth=self.bandwidth)
        self.reads = Reads(shell, self.mover, self.flights)
        self.stored_reads = StoredReads(shell, self.reads)
        self.puts = Puts(shell)
        self.jobs = Jobs(shell, self.mover)
        self.accesses = Accesses(shell)
        self.rounds = Rounds(shell, self.mover, self.speeds)
        self.survey = Survey(shell)
        self.clients = Clients(
            shell, resume_ttl_s=limits.resume_ttl_s, quarantine_s=limits.quarantine_s
        )

    # ---- finding

    def match(
        self, layout: Layout, keys: KeyBatch, last_valid_tokens: int, *, exact: bool = False
    ) -> Match:
        now_s = self.shell.now_s()
        found = self.shell.catalog.match(layout.id, keys, last_valid_tokens, now_s, exact=exact)
        self.shell.apply()
        self.shell.counts["match_keys", "hit"] += found.hit_blocks
        self.shell.counts["match_keys", "miss"] += len(keys) - found.hit_blocks
        self.shell.counts["match_tokens", "hit"] += found.hit_tokens
        return found

    def advised(
        self, layout: Layout, keys: KeyBatch, found: Match, question: LoadQuestion
    ) -> Match:
        """What `match` found, with what loading it takes beside computing it."""
        prefill = self.speeds.prefill(
            layout.id,
            layout.spec,
            tokens_per_s=question.prefill_tokens_per_s,
            flops_per_s=question.prefill_flops_per_s,
        )
        path = self.shell.catalog.looking.hit_path(layout.id, keys, found.hit_blocks)
        deadline_s = question.deadline_s or None
        return replace(found, advice=advise(path, self.speeds.tiers(), prefill, deadline_s))

    def locate(
        self, layout: Layout, keys: KeyBatch
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        return self.shell.catalog.locate(layout.id, keys)

    # ---- reading

    async def acquire(
        self, call: Acquire, layout: Layout, *, wait_s: float, layers: int = 0
    ) -> Grant:
        """`layers`: on a GPU, each piece in so many equal parts, of which the first are told of (`wait_layers`) while the rest comes."""
        if len(self.accesses.residents):
            self.accesses.residents.read(call.session, call.ns, call.keys.fingerprints)
        if call.tier is TierId.HBM:
            self._check_hbm()
            order = layers_in(layout.spec, call.groups_mask, layers) if layers else None
            grant = await self.reads.acquire_in_hbm(call, wait_s=wait_s, layers=order)
        else:
            grant = await self.reads.acquire(call, wait_s=wait_s)
        # counted when it is answered
        self.shell.unsettled.append(partial(self._count_read, grant, call, layout))
        return grant

    async def wait_layers(
        self, session: Session, lease: int, layers: int, *, wait_s: float, on_its_way: bool
    ) -> Progress:
        """See `Arrivals.wait`."""
        arrivals = self.reads.arrivals
        return await arrivals.wait(session.core, lease, layers, wait_s, on_its_way=on_its_way)

    async def acquire_stored(self, call: Acquire, layout: Layout) -> StoredGrant | None:
        """Those of the keys that may travel as they lie on NVMe, leased there; None where there is none."""
        found = await self.stored_reads.acquire(call)
        if found is not None:
            self._count_read(found.grant, found.call, layout)
        return found

    def release(self, session: Session, leases: Sequence[int]) -> list[bool]:
        return self.reads.release(session.core, leases)

    def renew(self, session: Session, leases: Sequence[int], ttl_s: float) -> list[bool]:
        lost = self.shell.catalog.renew(
            session.core, leases, self.limits.lease_ttl(ttl_s), self.shell.now_s()
        )
        self.shell.apply()
        return lost

    # ---- keeping

    def pin(
        self, session: Session, layout: Layout, keys: KeyBatch, *, hard: bool, ttl_s: float
    ) -> Pinned:
        pinned = self.shell.catalog.pin(
            session.core, layout.id, keys, hard=hard, ttl_s=ttl_s, now_s=self.shell.now_s()
        )
        self.shell.apply()
        return pinned

    def unpin(self, pin: int, tenant: str) -> bool:
        """False for another tenant's, as if it were not there."""
        ns = self.shell.catalog.pin_namespace(pin)
        layout = None if ns is None else self.shell.layouts.get(ns)
        if layout is None or layout.spec.tenant != tenant:
            return False
        found = self.shell.catalog.unpin(pin, self.shell.now_s())
        self.shell.apply()
        return found

    def prefetch(
        self,
        session: Session,
        layout: Layout,
        keys: KeyBatch,
        wait_s: float,
        tier: TierId = TierId.DRAM,
    ) -> Job:
        if tier is TierId.HBM:
            self._check_hbm()
        deadline_s = self.shell.now_s() + self.limits.load_wait(wait_s)
        return self.jobs.prefetch(session.tenant, layout.id, keys, deadline_s=deadline_s, tier=tier)

    # ---- the life of a request

    def begin_request(
        self,
        session: Session,
        layout: Layout,
        keys: KeyBatch,
        request_id: bytes,
        hint: Hint = NO_HINT,
        *,
        load_wait_s: float = 0.0,
        signal: Signal = Signal.REQUEST,
        batch: bytes = b"",
    ) -> Match:
        """`load_wait_s`: until when its path should be in memory; 0: not before it is asked for. `batch`: of requests that have much in common."""
        now_s, catalog = self.shell.now_s(), self.shell.catalog
        catalog.begin_request(session.core, request_id, layout.id, keys, now_s, hint)
        self.shell.apply()
        found = self.match(layout, keys, 0)
        if load_wait_s and found.hit_blocks:
            path = keys.fingerprints[: found.hit_blocks]
            catalog.page_ins.want(layout.id, path, signal, now_s + load_wait_s, now_s)
        self.goes_on(layout, hint.session)
        if batch and found.hit_blocks:
            self._join_batch(layout, batch, keys, found.hit_blocks)
        return found

    def goes_on(self, layout: Layout, conversation: str) -> None:
        """A conversation asks again: what its last turn left on NVMe comes up ahead of the reads."""
        if not conversation:
            return
        page_ins, now_s = self.shell.catalog.page_ins, self.shell.now_s()
        leaf = page_ins.turns.begun((layout.id, conversation), now_s)
        if leaf is not None:
            page_ins.guess(layout.id, leaf, Signal.SESSION, now_s)

    def _join_batch(self, layout: Layout, batch: bytes, keys: KeyBatch, hit_blocks: int) -> None:
        page_ins, now_s = self.shell.catalog.page_ins, self.shell.now_s()
        low, high = keys.fingerprints[hit_blocks - 1].tolist()
        for leaf in page_ins.turns.joined(layout.id, batch, (low, high)):
            page_ins.guess(layout.id, leaf, Signal.SIBLING, now_s)

    def request_layout(self, session: Session, request_id: bytes) -> Layout:
        ns = self.shell.catalog.request_namespace(session.core, request_id)
        layout = self.shell.layouts.get(ns)
        if layout is None:
            raise NotFound(f"the request's namespace was removed: request_id={request_id.hex()}")
        return layout

    def extend_request(self, session: Session, request_id: bytes, keys: KeyBatch) -> int:
        blocks = self.shell.catalog.extend_request(
            session.core, request_id, keys, self.shell.now_s()
        )
        self.shell.apply()
        return blocks

    def complete_request(
        self,
        session: Session,
        request_id: bytes,
        *,
        discard: bool,
        hint: Hint = NO_HINT,
        prefill: PrefillRun | None = None,
    ) -> int:
        """Blocks that were dropped: with `discard`, those that nobody else shares. `prefill`: what its engine had to compute."""
        if prefill is not None:
            layout = self.request_layout(session, request_id)
            self.speeds.prefilled(layout.id, layout.spec, prefill)
        self._note_turn(session, request_id, hint)
        dropped = self.shell.catalog.complete_request(
            session.core, request_id, discard, self.shell.now_s(), hint
        )
        self.shell.apply()
        return dropped

    def _note_turn(self, session: Session, request_id: bytes, hint: Hint) -> None:
        catalog = self.shell.catalog
        ended = catalog.looking.end_of(session.core, request_id)
        if ended is None:
            return
        leaf, earlier = ended
        if conversation := hint.after(earlier).session:
            ns = catalog.request_namespace(session.core, request_id)
            catalog.page_ins.turns.ended((ns, conversation), leaf, self.shell.now_s())

    # ---- forgetting and touching

    async def remove(self, layout: Layout, keys: KeyBatch) -> int:
        """Blocks that were readable. Many go in slices, leaf first; all are gone when it returns."""
        rows = rows_leaf_first(self.shell.catalog.books, layout.id, keys)
        return await self.shell.forget(layout.id, rows)

    async def clear(self, layout: Layout) -> int:
        """Blocks that were readable."""
        blocks = await self.shell.clear(layout.id)
        self.shell.events.add(EventKind.CLEARED, digest=layout.digest)
        return blocks

    def touch(self, layout: Layout, keys: KeyBatch, hint: Hint = NO_HINT) -> int:
        blocks = self.shell.catalog.touch(layout.id, keys, self.shell.now_s(), hint)
        self.shell.apply()
        return blocks

    def was_read(self, layout: Layout, keys: KeyBatch) -> int:
        """Keys that were read through the projection; see `count_reads`."""
        catalog, counts, spec = self.shell.catalog, self.shell.counts, layout.spec
        depths, tokens = positions(catalog.books, layout.id, keys)
        blocks = count_reads(catalog.books, layout.id, keys, self.shell.now_s())
        self.shell.apply()
        total, where = int(tokens.sum()), TierId.DRAM.name.lower()
        counts["optimistic_keys", ""] += len(keys)
        counts["read_keys_hit", where] += len(keys)
        counts["read_bytes", ""] += total * spec.groups[0].bytes_per_block // spec.block_tokens
        counts["read_tokens", "hit"] += total
        counts["hit_tokens", where] += total
        counts["flops_saved", ""] += _flops(spec, depths, tokens)
        return blocks

    def report(self, layout: Layout, keys: KeyBatch, scores: Sequence[float]) -> int:
        """What the engine's attention selected (score above 0) counts as touched; the rest sinks by not being touched."""
        chosen = [i for i, score in enumerate(scores) if score > 0]
        packed = b"".join(keys.key(i) for i in chosen)
        return self.touch(layout, KeyBatch(packed, keys.key_bytes, keys.fingerprints[chosen]))

    def reserve_bandwidth(self, session: Session, bytes_per_s: int, ttl_s: float) -> int:
        """What is left to copies between DRAM and the GPUs; 0 where they are not bounded."""
        now_s = self.shell.elapsed_s()
        return self.bandwidth.reserve(session.core, bytes_per_s, ttl_s, now_s)

    def _check_hbm(self) -> None:
        hbm = self.shell.tiers.hbm
        if hbm is None:
            raise InvalidArgument("no such tier here: tier=hbm; set hbm.devices")
        if hbm.fault is not None:
            raise Unavailable(f"the hbm tier is off, read from dram: {hbm.fault}")

    def _count_read(self, grant: Grant, call: Acquire, layout: Layout) -> None:
        """Keys and bytes of every rank; tokens and FLOPs once, by the rank that reads shard 0."""
        counts, spec = self.shell.counts, layout.spec
        if grant.many is not None:
            self._count_many(grant.many, call, layout)
            return
        depths, tokens = positions(self.shell.behind.books, layout.id, call.keys)
        keys_seen, tokens_seen = Counter[_Seen](), Counter[_Seen]()
        for block, valid in zip(grant.blocks, tokens.tolist(), strict=True):
            seen = (block.status, block.tier, block.reason)
            keys_seen[seen] += 1
            tokens_seen[seen] += valid
        for (status, tier, reason), keys in keys_seen.items():
            name = status.name.lower()
            where = reason.value if status is ReadStatus.MISS else tier.name.lower()
            counts[f"read_keys_{name}", where] += keys
            if call.shard == 0:
                counts["read_tokens", name] += tokens_seen[status, tier, reason]
                if status is not ReadStatus.PENDING:
                    counts[f"{name}_tokens", where] += tokens_seen[status, tier, reason]
        hits = [i for i, block in enumerate(grant.blocks) if block.status is ReadStatus.HIT]
        counts["read_bytes", ""] += sum(
            piece.length for i in hits for piece in grant.blocks[i].pieces if piece is not None
        )
        if call.shard == 0:
            counts["flops_saved", ""] += _flops(spec, depths[hits], tokens[hits])

    def _count_many(self, many: ReadMany, call: Acquire, layout: Layout) -> None:
        """The same of plain blocks."""
        counts, hits, tokens = self.shell.counts, many.hits, many.tokens
        by_tier = np.bincount(many.tiers[hits], minlength=len(TierId)).tolist()
        tokens_by_tier = np.bincount(many.tiers[hits], tokens[hits], len(TierId)).tolist()
        for tier, keys in zip(TierId, by_tier, strict=True):
            if keys:
                counts["read_keys_hit", tier.name.lower()] += keys
        counts["read_bytes", ""] += int(many.lengths.sum())
        for reason in many.reasons.values():
            counts["read_keys_miss", reason.value] += 1
        if call.shard:
            return
        counts["read_tokens", "hit"] += int(tokens[hits].sum())
        for tier, hit_tokens in zip(TierId, tokens_by_tier, strict=True):
            if hit_tokens:
                counts["hit_tokens", tier.name.lower()] += int(hit_tokens)
        for i, reason in many.reasons.items():
            counts["read_tokens", "miss"] += int(tokens[i])
            counts["miss_tokens", reason.value] += int(tokens[i])
        counts["flops_saved", ""] += _flops(layout.spec, many.depths[hits], tokens[hits])


def _flops(spec: NamespaceSpec, depths: NDArray[np.int64], tokens: NDArray[np.int64]) -> int:
    """Prefill FLOPs of blocks at these depths with so many tokens."""
    if not spec.flops_base and not spec.flops_slope:
        return 0
    middles = depths * spec.block_tokens + tokens / 2
    return int((tokens * (spec.flops_base + spec.flops_slope * middles)).sum())
