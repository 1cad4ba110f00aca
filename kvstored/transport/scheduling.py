"""The methods of scheduling: what comes next, and what engines tell for it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import Fingerprint
from kvstored.core.copying import bytes_in
from kvstored.core.feedback import STEPS_MAX, Access
from kvstored.core.plan import NodeMove, PageIn, TierRoom
from kvstored.core.tags import KNOWN
from kvstored.core.types import UNIT_BYTES, Layout, NamespaceId, TierId
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.store import Store
from kvstored.transport.asked import Asked, keys_of
from kvstored.transport.caller import Answer, Caller

ROWS, ROWS_MAX = 256, 4096


class SchedulingCalls:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked = Asked(store)

    def answers(self) -> dict[str, Answer]:
        return {
            "Schedule": self._schedule,
            "ReportAccess": self._report_access,
            "ReportResident": self._report_resident,
        }

    async def _report_access(
        self, request: pb.ReportAccessRequest, caller: Caller
    ) -> pb.ReportAccessResponse:
        self._asked.session(request.session, caller)
        layout = self._asked.layout(request.namespace, caller)
        keys = keys_of(layout, request.keys)
        told = self._store.accesses.report(layout, keys, _access_of(request, layout, len(keys)))
        return pb.ReportAccessResponse(
            taken=told.is_taken,
            blocks=told.blocks,
            raised=len(told.raised),
            wanted=len(told.wanted),
        )

    async def _report_resident(
        self, request: pb.ReportResidentRequest, caller: Caller
    ) -> pb.ReportResidentResponse:
        session = self._asked.session(request.session, caller)
        layout = self._asked.layout(request.namespace, caller)
        keys = keys_of(layout, request.keys)
        wait_s = self._store.limits.load_wait(request.deadline_ms / 1000)
        wanted = self._store.accesses.reside(session, layout, keys, wait_s)
        return pb.ReportResidentResponse(wanted=wanted)

    async def _schedule(self, request: pb.ScheduleRequest, caller: Caller) -> pb.ScheduleResponse:
        shell = self._store.shell
        catalog, now_s = shell.catalog, shell.now_s()
        mine = {layout.id: layout for layout, _ in self._store.registry.list(tenant=caller.tenant)}
        rows_max = min(request.rows_max or ROWS, ROWS_MAX)
        plan = catalog.scheduler.look(now_s, catalog.counts["requests"], rows_max)
        response = pb.ScheduleResponse(
            objectives=[objective.value for objective in catalog.page_ins.objectives],
            tiers=[_room_message(room) for room in plan.tiers],
            page_ins=self._page_in_messages(plan.page_ins, mine, now_s),
            evictions=[
                _move_message(each, mine[each.ns]) for each in plan.evictions if each.ns in mine
            ],
            writes=[_move_message(each, mine[each.ns]) for each in plan.writes if each.ns in mine],
            cut=plan.is_cut,
            running_requests=plan.running,
        )
        if not request.dry_run:
            done = self._store.rounds.whole()
            response.evicted_copies = sum(done.evicted.values())
            response.load_bytes = sum(map(bytes_in, done.loads))
            response.write_bytes = sum(map(bytes_in, done.writes))
        return response

    def _page_in_messages(
        self, page_ins: Sequence[PageIn], mine: dict[NamespaceId, Layout], now_s: float
    ) -> list[pb.PageIn]:
        """When each is there: after what engines wait for, and those before it."""
        nvme, line = self._store.speeds.tiers()[TierId.NVME], self._store.speeds.load_line()
        ready_s, messages = nvme.queue_s, list[pb.PageIn]()
        for each in page_ins:
            ready_s += line.seconds(each.size_bytes)
            if each.ns in mine:
                messages.append(_page_in_message(each, mine[each.ns], now_s, ready_s))
        return messages


def _access_of(request: pb.ReportAccessRequest, layout: Layout, keys: int) -> Access:
    groups = len(layout.spec.groups)
    if request.group >= groups or not keys:
        raise InvalidArgument(
            f"keys of a known group: keys={keys} group={request.group} groups={groups}"
        )
    layer = request.layer if request.HasField("layer") else -1
    tags = _tags_of(request, keys)
    if tags is not None and not (request.mass or request.selected or request.steps):
        return Access(request.group, layer, None, None, tags)
    if request.mass:
        mass = np.asarray(request.mass, dtype=np.float64)
        if len(mass) != keys or request.selected or not (np.isfinite(mass) & (mass >= 0)).all():
            raise InvalidArgument(f"one mass a key, 0 or more: mass={len(mass)} keys={keys}")
        return Access(request.group, layer, None, mass, tags)
    row_bytes = -(-keys // 8)
    if not 0 < request.steps <= STEPS_MAX or len(request.selected) != request.steps * row_bytes:
        raise InvalidArgument(
            f"a bit a step and key: steps={request.steps} max={STEPS_MAX} keys={keys} "
            f"bytes={len(request.selected)} expected={request.steps * row_bytes}"
        )
    packed = np.frombuffer(request.selected, dtype=np.uint8).reshape(request.steps, row_bytes)
    bits = np.unpackbits(packed, axis=1, count=keys, bitorder="little")
    return Access(request.group, layer, bits.astype(np.bool_), None, tags)


def _tags_of(request: pb.ReportAccessRequest, keys: int) -> NDArray[np.uint8] | None:
    if not request.tags:
        return None
    tags = np.frombuffer(request.tags, dtype=np.uint8)
    if len(tags) != keys or (tags & ~np.uint8(KNOWN)).any():
        raise InvalidArgument(f"a byte a key, of known tags: tags={len(tags)} keys={keys}")
    return tags


def _page_in_message(each: PageIn, layout: Layout, now_s: float, ready_s: float) -> pb.PageIn:
    return pb.PageIn(
        namespace=layout.digest,
        head_fingerprint=_bytes_of(each.head),
        blocks=each.blocks,
        bytes=each.size_bytes,
        tier=each.source.name.lower(),
        signal=each.signal,
        deadline_in_s=each.deadline_s - now_s if each.deadline_s else None,
        ready_in_s=ready_s,
        loading=each.is_loading,
    )


def _move_message(move: NodeMove, layout: Layout) -> pb.NodeMove:
    return pb.NodeMove(
        namespace=layout.digest,
        head_fingerprint=_bytes_of(move.head),
        depth_blocks=move.depth,
        blocks=move.blocks,
        bytes=move.size_bytes,
        tier=move.tier.name.lower(),
        decision=move.decision.value,
        why=move.why,
    )


def _room_message(room: TierRoom) -> pb.TierRoom:
    return pb.TierRoom(
        name=room.tier.name.lower(),
        granted_bytes=room.granted_units * UNIT_BYTES,
        used_bytes=room.used_units * UNIT_BYTES,
        free_bytes=room.free_units * UNIT_BYTES,
        high_bytes=room.high_units * UNIT_BYTES,
        low_bytes=room.low_units * UNIT_BYTES,
    )


def _bytes_of(fingerprint: Fingerprint) -> bytes:
    low, high = fingerprint
    return low.to_bytes(8, "little") + high.to_bytes(8, "little")
