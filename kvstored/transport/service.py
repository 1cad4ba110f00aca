"""Every unary method of the API: a message is read and checked, the store is asked, the answer is a message.

Verbs that read or keep blocks are here; `put_calls.py` has those that write them, `inspection.py` those that look inside.
Errors are the store's and pass through as they are.
"""

import os
from math import inf

from google.protobuf.message import Message

from kvstored import __version__
from kvstored.core.groups import valid_tokens_of
from kvstored.core.plan import Signal
from kvstored.core.types import BATCH_KEYS_MAX, UNIT_BYTES, Layout
from kvstored.errors import InvalidArgument, KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.clients import Peer, Wish
from kvstored.store.registry import PIECE_BYTES_MAX
from kvstored.store.store import Store
from kvstored.transport.answers import (
    acquire_message,
    job_message,
    match_message,
)
from kvstored.transport.asked import (
    Asked,
    conversation_of,
    handles_of,
    hint_of,
    keys_of,
    memory_of,
    prefill_of,
    question_of,
    request_id_of,
)
from kvstored.transport.caller import Answer, Caller
from kvstored.transport.descriptors import Descriptors
from kvstored.transport.inspection import Inspection
from kvstored.transport.put_calls import PutCalls
from kvstored.transport.scheduling import SchedulingCalls
from kvstored.transport.stored_calls import StoredCalls
from kvstored.wire.namespaces import message_of, spec_of
from kvstored.wire.packing import pack_u8, pack_u64

PROTOCOL = 1
INTERNAL = "internal"
"""How an error without a class of its own is counted."""


class StoreService:
    """The transport's Service over one store. Runs on its loop."""

    def __init__(self, store: Store, inspection: Inspection, *, busy_poll_s: float = 0.0) -> None:
        self._store = store
        self._busy_poll_us = round(busy_poll_s * 1e6)
        self._asked = Asked(store)
        self._descriptors = Descriptors(store)
        self._answers: dict[str, Answer] = {
            "OpenSession": self._open_session,
            "KeepAlive": self._keep_alive,
            "CloseSession": self._close_session,
            "OpenNamespace": self._open_namespace,
            "ListNamespaces": self._list_namespaces,
            "RetireNamespace": self._retire_namespace,
            "RemoveNamespace": self._remove_namespace,
            "Match": self._match,
            "Locate": self._locate,
            "Acquire": self._acquire,
            "Renew": self._renew,
            "Release": self._release,
            "Pin": self._pin,
            "Unpin": self._unpin,
            "Prefetch": self._prefetch,
            "JobStatus": self._job_status,
            "CancelJob": self._cancel_job,
            "BeginRequest": self._begin_request,
            "ExtendRequest": self._extend_request,
            "CompleteRequest": self._complete_request,
            "Remove": self._remove,
            "Clear": self._clear,
            "Touch": self._touch,
            "Report": self._report,
            "Segment": self._descriptors.segment,
            "Projection": self._descriptors.projection,
            "GpuPool": self._descriptors.gpu_pool,
            "WaitLayers": self._wait_layers,
            "ReserveBandwidth": self._reserve_bandwidth,
            **StoredCalls(store, self._asked).answers(),
            **PutCalls(store, self._asked).answers(),
            **inspection.answers(),
            **SchedulingCalls(store).answers(),
        }

    async def call(self, method: str, request: Message, caller: Caller) -> Message:
        answer = self._answers.get(method)
        if answer is None:
            raise InvalidArgument(f"no such method here: method={method!r}")
        shell = self._store.shell
        metrics, begun_s = shell.metrics, shell.elapsed_s()
        self._store.quiet.broken()
        try:
            return await answer(request, caller)
        except KvstoredError as error:
            metrics.request_errors[type(error).__name__].inc()
            raise
        except Exception:
            metrics.request_errors[INTERNAL].inc()
            raise
        finally:
            metrics.request_seconds[method].observe(shell.elapsed_s() - begun_s)

    def segment_fd(self, segment: int, caller: Caller) -> int:
        return self._descriptors.segment_fd(segment, caller)

    def projection_fd(self, caller: Caller) -> int:
        return self._descriptors.projection_fd(caller)

    def answered(self) -> None:
        self._store.puts.settle_soon()

    def connected(self, caller: Caller) -> None: ...

    def disconnected(self, caller: Caller, *, has_hung_up: bool) -> None:
        self._store.puts.disconnected(caller.connection_id, has_hung_up=has_hung_up)
        self._store.clients.disconnected(caller.connection_id)

    # ---- sessions

    async def _open_session(
        self, request: pb.OpenSessionRequest, caller: Caller
    ) -> pb.OpenSessionResponse:
        if request.protocol not in (0, PROTOCOL):
            raise InvalidArgument(
                f"unknown protocol: protocol={request.protocol} known={PROTOCOL}; upgrade the older side"
            )
        wish = Wish(
            client=request.client,
            resume_token=request.resume_token,
            resume_ttl_s=request.resume_ttl_ms / 1000,
            is_detached=request.detached,
        )
        peer = Peer(caller.connection_id, caller.pid, caller.tenant)
        session, is_resumed = self._store.clients.open(peer, wish)
        return pb.OpenSessionResponse(
            token=session.token,
            epoch=self._store.shell.events.epoch,
            resumed=is_resumed,
            resume_ttl_ms=int(session.resume_ttl_s * 1000),
            keys_max=BATCH_KEYS_MAX,
            piece_bytes_max=PIECE_BYTES_MAX,
            daemon_pid=os.getpid(),
            version=__version__,
            quarantined=self._store.shell.catalog.quarantine.has(session.core),
            projection=not request.detached and self._descriptors.has_projection(caller),
            busy_poll_us=self._busy_poll_us,
        )

    async def _keep_alive(
        self, request: pb.KeepAliveRequest, caller: Caller
    ) -> pb.KeepAliveResponse:
        session = self._asked.session(request.session, caller)
        now_s = self._store.shell.now_s()
        ends_s = session.expires_s if session.expires_s != inf else now_s + session.resume_ttl_s
        return pb.KeepAliveResponse(
            epoch=self._store.shell.events.epoch, session_expires_unix_ms=int(ends_s * 1000)
        )

    async def _close_session(
        self, request: pb.CloseSessionRequest, caller: Caller
    ) -> pb.CloseSessionResponse:
        self._store.clients.close(self._asked.session(request.session, caller))
        return pb.CloseSessionResponse()

    # ---- namespaces

    async def _open_namespace(
        self, request: pb.OpenNamespaceRequest, caller: Caller
    ) -> pb.OpenNamespaceResponse:
        spec = spec_of(request.namespace, caller_tenant=caller.tenant)
        if spec.tenant != caller.tenant:
            raise InvalidArgument(f"namespace of another tenant: tenant={spec.tenant!r}")
        opened = await self._store.registry.open(spec, supersede=request.supersede)
        return pb.OpenNamespaceResponse(
            digest=opened.layout.digest,
            namespace=message_of(opened.layout.spec),
            created=opened.created,
        )

    async def _list_namespaces(
        self,
        request: pb.ListNamespacesRequest,
        caller: Caller,
    ) -> pb.ListNamespacesResponse:
        return pb.ListNamespacesResponse(
            namespaces=[
                self._namespace_message(layout, is_retired)
                for layout, is_retired in self._store.registry.list(tenant=caller.tenant)
            ]
        )

    def _namespace_message(self, layout: Layout, is_retired: bool) -> pb.NamespaceInfo:
        blocks, units = self._store.shell.catalog.looking.namespace_use(layout.id)
        return pb.NamespaceInfo(
            digest=layout.digest,
            namespace=message_of(layout.spec),
            alias=f"{layout.spec.model}@{layout.spec.revision}",
            retired=is_retired,
            blocks=blocks,
            tier_bytes=[each * UNIT_BYTES for each in units],
        )

    async def _retire_namespace(
        self, request: pb.RetireNamespaceRequest, caller: Caller
    ) -> pb.RetireNamespaceResponse:
        await self._store.registry.retire(request.namespace, tenant=caller.tenant)
        return pb.RetireNamespaceResponse()

    async def _remove_namespace(
        self, request: pb.RemoveNamespaceRequest, caller: Caller
    ) -> pb.RemoveNamespaceResponse:
        blocks = await self._store.registry.remove(request.namespace, tenant=caller.tenant)
        return pb.RemoveNamespaceResponse(blocks=blocks)

    # ---- finding

    async def _match(self, request: pb.MatchRequest, caller: Caller) -> pb.MatchResponse:
        layout = self._asked.layout(request.namespace, caller)
        keys = keys_of(layout, request.keys)
        valid_tokens_of(layout.spec, request.last_valid_tokens)  # or raise
        found = self._store.match(layout, keys, request.last_valid_tokens, exact=request.exact)
        self._store.goes_on(layout, conversation_of(request))
        if request.advise:
            found = self._store.advised(layout, keys, found, question_of(request))
        return match_message(found)

    async def _locate(self, request: pb.LocateRequest, caller: Caller) -> pb.LocateResponse:
        layout = self._asked.layout(request.namespace, caller)
        tiers, generations = self._store.locate(layout, keys_of(layout, request.keys))
        return pb.LocateResponse(tiers=pack_u8(tiers), generations=pack_u64(generations))

    # ---- get

    async def _acquire(self, request: pb.AcquireRequest, caller: Caller) -> pb.AcquireResponse:
        get = self._asked.get(request, caller)
        lost = self._store.release(get.session, handles_of(request.release, "release"))
        grant = await self._store.acquire(
            get.call, get.layout, wait_s=get.wait_s, layers=request.layers
        )
        response = acquire_message(grant, len(get.columns))
        response.arriving = self._store.reads.arrivals.is_arriving(grant.lease)
        response.released_lost = pack_u8(lost)
        return response

    async def _wait_layers(
        self, request: pb.WaitLayersRequest, caller: Caller
    ) -> pb.WaitLayersResponse:
        session = self._asked.session(request.session, caller)
        progress = await self._store.wait_layers(
            session,
            request.lease,
            request.layers,
            wait_s=self._store.limits.load_wait(request.wait_ms / 1000),
            on_its_way=request.events,
        )
        events = [pb.LayerEvent(segment=s, handle=handle) for s, handle in progress.events]
        return pb.WaitLayersResponse(layers=progress.layers, events=events)

    async def _renew(self, request: pb.RenewRequest, caller: Caller) -> pb.RenewResponse:
        session = self._asked.session(request.session, caller)
        leases = handles_of(request.leases, "leases")
        lost = self._store.renew(session, leases, request.lease_ttl_ms / 1000)
        return pb.RenewResponse(lost=pack_u8(lost))

    async def _release(self, request: pb.ReleaseRequest, caller: Caller) -> pb.ReleaseResponse:
        session = self._asked.session(request.session, caller)
        lost = self._store.release(session, handles_of(request.leases, "leases"))
        return pb.ReleaseResponse(lost=pack_u8(lost))

    # ---- pins, prefetch

    async def _pin(self, request: pb.PinRequest, caller: Caller) -> pb.PinResponse:
        session = self._asked.session(request.session, caller)
        layout = self._asked.layout(request.namespace, caller)
        keys = keys_of(layout, request.keys)
        is_hard = request.strength == pb.HARD
        pinned = self._store.pin(session, layout, keys, hard=is_hard, ttl_s=float(request.ttl_s))
        return pb.PinResponse(pin=pinned.pin, blocks=pinned.blocks, bytes=pinned.bytes)

    async def _unpin(self, request: pb.UnpinRequest, caller: Caller) -> pb.UnpinResponse:
        return pb.UnpinResponse(found=self._store.unpin(request.pin, caller.tenant))

    async def _prefetch(self, request: pb.PrefetchRequest, caller: Caller) -> pb.PrefetchResponse:
        session = self._asked.session(request.session, caller)
        layout = self._asked.layout(request.namespace, caller)
        tier = memory_of(request.tier)
        keys = keys_of(layout, request.keys)
        job = self._store.prefetch(session, layout, keys, request.deadline_ms / 1000, tier)
        return pb.PrefetchResponse(job=job.id, blocks=job.blocks)

    async def _reserve_bandwidth(
        self, request: pb.ReserveBandwidthRequest, caller: Caller
    ) -> pb.ReserveBandwidthResponse:
        session = self._asked.session(request.session, caller)
        left = self._store.reserve_bandwidth(session, request.bytes_per_s, request.ttl_ms / 1000)
        return pb.ReserveBandwidthResponse(left_bytes_per_s=left)

    async def _job_status(
        self, request: pb.JobStatusRequest, caller: Caller
    ) -> pb.JobStatusResponse:
        return job_message(self._store.jobs.status(request.job, caller.tenant))

    async def _cancel_job(
        self, request: pb.CancelJobRequest, caller: Caller
    ) -> pb.JobStatusResponse:
        return job_message(self._store.jobs.cancel(request.job, caller.tenant))

    # ---- requests

    async def _begin_request(
        self, request: pb.BeginRequestRequest, caller: Caller
    ) -> pb.BeginRequestResponse:
        session = self._asked.session(request.session, caller)
        layout = self._asked.layout(request.namespace, caller)
        keys = keys_of(layout, request.keys)
        name = request_id_of(request.request_id) or os.urandom(16)
        hint = hint_of(request.hint)
        signal = Signal.TRANSFER if request.for_transfer else Signal.REQUEST
        wait_s = request.load_deadline_ms / 1000
        found = self._store.begin_request(
            session,
            layout,
            keys,
            name,
            hint,
            load_wait_s=wait_s,
            signal=signal,
            batch=request_id_of(request.batch),
        )
        return pb.BeginRequestResponse(request_id=name, match=match_message(found))

    async def _extend_request(
        self, request: pb.ExtendRequestRequest, caller: Caller
    ) -> pb.ExtendRequestResponse:
        session = self._asked.session(request.session, caller)
        name = request_id_of(request.request_id)
        layout = self._store.request_layout(session, name)
        blocks = self._store.extend_request(session, name, keys_of(layout, request.keys))
        return pb.ExtendRequestResponse(blocks=blocks)

    async def _complete_request(
        self, request: pb.CompleteRequestRequest, caller: Caller
    ) -> pb.CompleteRequestResponse:
        session = self._asked.session(request.session, caller)
        if request.outcome not in (pb.CACHE, pb.DISCARD):
            raise InvalidArgument(f"unknown outcome of a request: outcome={request.outcome}")
        is_discard = request.outcome == pb.DISCARD
        name = request_id_of(request.request_id)
        hint = hint_of(request.hint)
        dropped = self._store.complete_request(
            session, name, discard=is_discard, hint=hint, prefill=prefill_of(request)
        )
        return pb.CompleteRequestResponse(dropped_blocks=dropped)

    # ---- forgetting and touching

    async def _remove(self, request: pb.RemoveRequest, caller: Caller) -> pb.RemoveResponse:
        layout = self._asked.layout(request.namespace, caller)
        blocks = await self._store.remove(layout, keys_of(layout, request.keys))
        return pb.RemoveResponse(blocks=blocks)

    async def _clear(self, request: pb.ClearRequest, caller: Caller) -> pb.ClearResponse:
        if request.namespace:
            layouts = [self._asked.layout(request.namespace, caller)]
        else:
            layouts = [layout for layout, _ in self._store.registry.list(tenant=caller.tenant)]
        return pb.ClearResponse(blocks=sum([await self._store.clear(each) for each in layouts]))

    async def _touch(self, request: pb.TouchRequest, caller: Caller) -> pb.TouchResponse:
        self._asked.session(request.session, caller)
        layout = self._asked.layout(request.namespace, caller)
        keys = keys_of(layout, request.keys)
        if request.read:
            return pb.TouchResponse(blocks=self._store.was_read(layout, keys))
        return pb.TouchResponse(blocks=self._store.touch(layout, keys, hint_of(request.hint)))

    async def _report(self, request: pb.ReportRequest, caller: Caller) -> pb.ReportResponse:
        """Advisory: a block that the engine selected (score above 0) counts as touched."""
        self._asked.session(request.session, caller)
        layout = self._asked.layout(request.namespace, caller)
        keys = keys_of(layout, request.keys)
        if len(request.scores) != len(keys) or request.group >= len(layout.spec.groups):
            raise InvalidArgument(
                f"one score a key of a known group: scores={len(request.scores)} keys={len(keys)} "
                f"group={request.group} groups={len(layout.spec.groups)}"
            )
        return pb.ReportResponse(blocks=self._store.report(layout, keys, list(request.scores)))
