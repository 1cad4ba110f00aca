"""The methods that look inside: stat, tree, leases, explain, verify, events."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstored import __version__
from kvstored.core.calls import Reason
from kvstored.core.curve import Curve
from kvstored.core.types import UNIT_BYTES, Fingerprints, KeyBatch, Layout, NamespaceId, TierId
from kvstored.core.views import Holding, TierUse
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.store import Store
from kvstored.transport.answers import event_message, explanation_message, tree_message
from kvstored.transport.asked import Asked, keys_of
from kvstored.transport.caller import Answer, Caller

NODES_MAX = 10_000
HOLDINGS_MAX = 10_000
EVENTS_MAX = 4_096
WAIT_S_MAX = 60.0
VERIFY_PIECES_MAX = 4_096
EXPLAIN_KEYS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What a tier says of itself beside the books: `state` is on, read-only or off."""

    state: str
    codec: str = "raw"
    recovered: int = 0
    reason: str = ""
    """Why it is off."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the daemon knows and the store does not. `broken`: configured bytes of tiers that could not be used at this start."""

    keeper_pid: int
    front_pid: Callable[[], int]
    """0 where none runs."""
    policy: str
    state: Callable[[], str]
    uptime_s: Callable[[], float]
    tier_facts: Callable[[TierId], TierFacts]
    broken: Mapping[TierId, int]


def _what_if(curve: Curve) -> pb.WhatIf:
    return pb.WhatIf(
        span_s=curve.span_s,
        blocks=curve.blocks,
        flops=curve.flops,
        sampled_share=curve.sampled_share,
        points=[
            pb.CurvePoint(capacity_bytes=round(units * UNIT_BYTES), blocks=blocks, flops=flops)
            for units, blocks, flops in curve.points()
        ],
    )


class Inspection:
    def __init__(self, store: Store, around: Surroundings) -> None:
        self._store = store
        self._around = around
        self._asked = Asked(store)

    def answers(self) -> dict[str, Answer]:
        return {
            "Stat": self._stat,
            "Tree": self._tree,
            "Leases": self._leases,
            "Explain": self._explain,
            "Verify": self._verify,
            "PollEvents": self._poll_events,
            "ReportBulk": self._report_bulk,
        }

    async def _report_bulk(
        self, request: pb.ReportBulkRequest, caller: Caller
    ) -> pb.ReportBulkResponse:
        shell = self._store.shell
        shell.counts["bulk_bytes", "received"] += request.received_bytes
        shell.counts["bulk_bytes", "sent"] += request.sent_bytes
        shell.counts["bulk_connections", "opened"] += request.opened
        shell.counts["bulk_connections", "refused"] += request.refused
        shell.counts["bulk_failures", ""] += request.failures
        for direction, frames in (
            ("received", request.received_frames),
            ("sent", request.sent_frames),
        ):
            shell.counts["wire_frame_bytes", f"{direction}:plain"] += frames.plain_bytes
            shell.counts["wire_frame_bytes", f"{direction}:wire"] += frames.wire_bytes
        shell.metrics.bulk_connections.set(request.connections)
        return pb.ReportBulkResponse()

    async def _stat(self, request: pb.StatRequest, caller: Caller) -> pb.StatResponse:
        shell = self._store.shell
        counts = shell.catalog.counts
        return pb.StatResponse(
            version=__version__,
            daemon_pid=os.getpid(),
            keeper_pid=self._around.keeper_pid,
            front_pid=self._around.front_pid(),
            epoch=shell.events.epoch,
            uptime_s=self._around.uptime_s(),
            state=self._around.state(),
            tiers=[self._tier_message(use, caller) for use in shell.catalog.tier_use()]
            + [
                pb.TierStat(
                    name=tier.name.lower(), capacity_bytes=size_bytes, state="off", codec_ratio=1.0
                )
                for tier, size_bytes in self._around.broken.items()
            ],
            blocks=shell.catalog.blocks,
            tree_nodes=counts["tree_nodes"],
            sessions=len(self._store.clients.sessions),
            leases=counts["leases"],
            fills=counts["fills"],
            pins=counts["pins"],
            requests=counts["requests"],
            recovering=bool(shell.catalog.recovering),
            counters={_counter(name): float(count) for name, count in shell.counts.items()},
            policy=self._around.policy,
            what_if=_what_if(shell.catalog.books.asked.curve),
        )

    def _tier_message(self, use: TierUse, caller: Caller) -> pb.TierStat:
        facts = self._around.tier_facts(use.tier)
        counts = self._store.shell.counts
        stored = counts["stored_bytes", ""]
        written = counts["copy_bytes", "dram:nvme"]
        is_disk = use.tier is TierId.NVME
        budget, now_s = self._store.shell.catalog.admission.budget, self._store.shell.now_s()
        return pb.TierStat(
            name=use.tier.name.lower(),
            capacity_bytes=use.capacity_units * UNIT_BYTES,
            granted_bytes=use.granted_units * UNIT_BYTES,
            used_bytes=use.used_units * UNIT_BYTES,
            copies=use.copies,
            dirty_copies=use.dirty_copies,
            leased_bytes=use.leased_units * UNIT_BYTES,
            pinned_bytes=use.pinned_units * UNIT_BYTES,
            quarantined_bytes=use.quarantined_units * UNIT_BYTES,
            aside_bytes=use.aside_units * UNIT_BYTES,
            kept_bytes=use.kept_units * UNIT_BYTES,
            fragmentation=use.fragmentation,
            state=facts.state,
            reason=facts.reason,
            recovered=facts.recovered,
            codec=facts.codec,
            codec_ratio=written / stored if is_disk and stored else 1.0,
            groups=self._group_codecs(caller) if is_disk else (),
            written_day_bytes=budget.spent(now_s) if is_disk else 0,
            write_budget_bytes=budget.day_bytes if is_disk else 0,
            write_state=budget.state(now_s).name.lower() if is_disk else "",
        )

    def _group_codecs(self, caller: Caller) -> list[pb.GroupCodec]:
        shell, mine = self._store.shell, self._namespaces(caller)
        digests = {shell.layouts[ns].digest for ns in mine}
        return [
            pb.GroupCodec(
                namespace=each.digest,
                group=each.group,
                plan=each.plan,
                plain_bytes=each.plain_bytes,
                stored_bytes=each.stored_bytes,
                p_plain_bytes=each.p_plain_bytes,
                p_stored_bytes=each.p_stored_bytes,
                encode_s=each.encode_s,
                decoded_bytes=each.decoded_bytes,
                decode_s=each.decode_s,
            )
            for each in shell.tiers.coding.shown()
            if each.digest in digests and (each.plan or each.decoded_bytes)
        ]

    async def _tree(self, request: pb.TreeRequest, caller: Caller) -> pb.TreeResponse:
        """Of one namespace or of all of the tenant; with keys only the nodes that begin with one of them."""
        shell = self._store.shell
        limit = min(request.nodes_max or NODES_MAX, NODES_MAX)
        namespaces, wanted = self._namespaces(caller), set[tuple[int, int]]()
        if request.namespace:
            layout = self._asked.layout(request.namespace, caller)
            namespaces = {layout.id}
            if request.HasField("keys"):
                wanted = _names(keys_of(layout, request.keys).fingerprints)
        nodes, is_cut = shell.catalog.looking.tree_nodes(namespaces, limit)
        return pb.TreeResponse(
            nodes=[
                tree_message(node, shell.layouts[node.ns])
                for node in nodes
                if not wanted or node.head in wanted
            ],
            cut=is_cut,
        )

    async def _leases(self, request: pb.LeasesRequest, caller: Caller) -> pb.LeasesResponse:
        limit = min(request.max or HOLDINGS_MAX, HOLDINGS_MAX)
        catalog = self._store.shell.catalog
        holdings, is_cut = catalog.looking.holdings(self._namespaces(caller), limit)
        now_s = self._store.shell.now_s()
        leases = [self._holding_message(holding, now_s) for holding in holdings]
        return pb.LeasesResponse(leases=leases, cut=is_cut)

    def _holding_message(self, holding: Holding, now_s: float) -> pb.LeaseInfo:
        session = self._store.clients.sessions.of_core(holding.session)
        return pb.LeaseInfo(
            kind=holding.kind,
            id=holding.id,
            client=session.client if session else "",
            blocks=holding.blocks,
            bytes=holding.units * UNIT_BYTES,
            age_s=now_s - holding.begun_s,
            expires_in_s=holding.expires_s - now_s if holding.expires_s else 0.0,
            state=holding.state,
        )

    def _namespaces(self, caller: Caller) -> set[NamespaceId]:
        """The caller's: what other tenants have is not there for it."""
        return {layout.id for layout, _ in self._store.registry.list(tenant=caller.tenant)}

    async def _explain(self, request: pb.ExplainRequest, caller: Caller) -> pb.ExplainResponse:
        layout = self._asked.layout(request.namespace, caller)
        keys = keys_of(layout, request.keys)
        if len(keys) > EXPLAIN_KEYS_MAX:
            raise InvalidArgument(f"too many keys: keys={len(keys)} max={EXPLAIN_KEYS_MAX}")
        others = [
            (other, keys_of(other, request.keys))
            for other, _ in self._store.registry.list(tenant=caller.tenant)
            if other.id != layout.id
        ]
        return pb.ExplainResponse(
            keys=[self._explanation(layout, keys, others, i) for i in range(len(keys))]
        )

    def _explanation(
        self, layout: Layout, keys: KeyBatch, others: Sequence[tuple[Layout, KeyBatch]], i: int
    ) -> pb.Explanation:
        survey = self._store.survey
        verdict = survey.explain(layout, keys.key(i))
        if verdict.reason in (Reason.NEVER_STORED, Reason.UNKNOWN):
            verdict = survey.elsewhere((other, k.key(i)) for other, k in others) or verdict
        return explanation_message(keys.key(i), verdict)

    async def _verify(self, request: pb.VerifyRequest, caller: Caller) -> pb.VerifyResponse:
        digest = request.namespace
        if digest:
            digest = self._asked.layout(digest, caller).digest
        limit = min(request.blocks_max or VERIFY_PIECES_MAX, VERIFY_PIECES_MAX)
        verified = await self._store.survey.verify(digest, request.cursor, limit)
        return pb.VerifyResponse(
            cursor=verified.cursor,
            done=verified.is_done,
            blocks=verified.pieces,
            bytes=verified.size_bytes,
            corrupt=verified.corrupt,
            blocks_total=self._store.shell.catalog.blocks,
        )

    async def _poll_events(
        self, request: pb.PollEventsRequest, caller: Caller
    ) -> pb.PollEventsResponse:
        events = self._store.shell.events
        polled = await events.poll(
            epoch=request.epoch,
            cursor=request.cursor,
            events_max=min(request.events_max or EVENTS_MAX, EVENTS_MAX),
            wait_s=min(request.wait_ms / 1000, WAIT_S_MAX),
        )
        return pb.PollEventsResponse(
            events=[event_message(event, events.epoch) for event in polled.events],
            epoch=events.epoch,
            cursor=polled.cursor,
            lost=polled.lost,
        )


def _counter(key: tuple[str, str]) -> str:
    name, label = key
    return f"{name}:{label}" if label else name


def _names(fingerprints: Fingerprints) -> set[tuple[int, int]]:
    return {(low, high) for low, high in fingerprints.tolist()}
