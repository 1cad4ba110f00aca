"""What the local channel answers with a descriptor beside the message: memory that clients of this host map."""

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
