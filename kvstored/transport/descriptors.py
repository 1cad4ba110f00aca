"""What the local channel tells of memory that clients of this host map: descriptors beside the message, handles of GPU memory in it."""

import os

from kvstored.errors import NotFound
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.store import Store
from kvstored.transport.caller import Caller


class Descriptors:
    """The descriptors stay the daemon's."""

    def __init__(self, store: Store) -> None:
        self._tiers = store.shell.tiers
        self._epoch = store.shell.events.epoch

    async def segment(self, request: pb.SegmentRequest, caller: Caller) -> pb.SegmentResponse:
        size_bytes = os.fstat(self.segment_fd(request.segment, caller)).st_size
        return pb.SegmentResponse(
            segment=request.segment, bytes=size_bytes, incarnation=self._epoch
        )

    def segment_fd(self, segment: int, caller: Caller) -> int:
        return self._tiers.arena.segment_fd(segment)

    async def gpu_pool(self, request: pb.GpuPoolRequest, caller: Caller) -> pb.GpuPoolResponse:
        """The pools are this tenant's whose blocks lie in them, like the projection."""
        hbm = self._tiers.hbm
        if hbm is None or not self.has_projection(caller):
            raise NotFound(f"no gpu pool for this tenant: tenant={caller.tenant!r}")
        handle = hbm.handle(request.segment)
        return pb.GpuPoolResponse(
            segment=request.segment,
            pool_bytes=hbm.pool_bytes,
            epoch=self._epoch,
            kind=handle.kind.name,
            handle=handle.payload,
            device=handle.device,
        )

    async def projection(
        self, request: pb.ProjectionRequest, caller: Caller
    ) -> pb.ProjectionResponse:
        size_bytes = os.fstat(self.projection_fd(caller)).st_size
        return pb.ProjectionResponse(bytes=size_bytes, epoch=self._epoch)

    def has_projection(self, caller: Caller) -> bool:
        return self._tiers.projection.tenant == caller.tenant

    def projection_fd(self, caller: Caller) -> int:
        """Cannot be written through."""
        if not self.has_projection(caller):
            raise NotFound(f"this tenant has no projection: tenant={caller.tenant!r}")
        return self._tiers.projection.read_fd
