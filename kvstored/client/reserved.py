"""Puts of any blocks on one host: reserved, copied, committed."""

from collections.abc import Sequence

import numpy as np

from kvstored.client.carrying import Carriers, Filling, Mapped, carriers_of, granted_fills
from kvstored.client.channel import LocalLink
from kvstored.client.copying import Copier
from kvstored.client.links import PutPart
from kvstored.core.calls import FillStatus
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import U64S, PackedPieces, pack_u64, unpack_pieces, unpack_u8

_FILL = {int(status): status for status in FillStatus}


class ReservedPuts:
    """Of one link. The requests of the parts carry its session."""

    def __init__(self, link: LocalLink, copier: Copier, mapped: Mapped) -> None:
        self._link = link
        self._copier = copier
        self._mapped = mapped

    def put(self, parts: Sequence[PutPart], timeout_s: float) -> list[FillStatus]:
        """Part by part: while one is copied, the daemon commits the part before it and reserves the one after."""
        status: list[FillStatus] = []
        filling = self._filling(parts[0], self._reserve(parts[0], timeout_s), timeout_s)
        filled: Filling | None = None
        for following in [*parts[1:], None]:
            reserved = self._copied(filling, filled, following, timeout_s)
            if filled is not None:
                status += filled.status
            filled = filling
            if following is not None:
                filling = self._filling(following, reserved, timeout_s)
        assert filled is not None, "a put has parts"
        if filled.granted:
            request = self._commit_request(filled)
            self._settle(filled, self._link.call("Commit", request, pb.CommitResponse, timeout_s))
        return status + filled.status

    def _copied(
        self,
        filling: Filling,
        before: Filling | None,
        after: PutPart | None,
        timeout_s: float,
    ) -> pb.ReserveResponse:
        """Copies a part; meanwhile the one `before` is committed and the one `after` reserved, whose answer this returns.

        Gives the fills of this part back when anything fails.
        """
        request = pb.CommitRequest() if before is None else self._commit_request(before)
        if after is not None:
            request.session = self._link.session.token
            request.next.CopyFrom(after.request)
        is_sent = after is not None or (before is not None and bool(before.granted))
        answer = pb.CommitResponse()
        try:
            if is_sent:
                self._link.connection.begin("Commit", request, timeout_s)
            try:
                carriers = filling.carriers
                filling.checksums[carriers.indexes] = carriers.copy_in(self._copier)
            finally:
                if is_sent:
                    answer = self._link.connection.end("Commit", pb.CommitResponse)
            if before is not None:
                self._settle(before, answer)
        except BaseException:
            self._abort(filling.fills, timeout_s)
            if after is not None and answer.HasField("next"):
                self._abort(granted_fills(answer.next, after.keys), timeout_s)
            raise
        return answer.next

    def _filling(self, part: PutPart, reserved: pb.ReserveResponse, timeout_s: float) -> Filling:
        """What was reserved, mapped: a segment's descriptor has to be asked for before the next call is under way."""
        status = [_FILL[s] for s in unpack_u8(reserved.status, "status", part.keys).tolist()]
        fills = granted_fills(reserved, part.keys)
        carriers = Carriers([], [], [])
        if len(fills):
            try:
                packed = PackedPieces(reserved.extent_counts, reserved.extents, reserved.sizes)
                pieces = unpack_pieces(packed, part.keys, part.groups)
                carriers = carriers_of(part, pieces, self._mapped(pieces, timeout_s))
            except BaseException:
                self._abort(fills, timeout_s)
                raise
        granted = [i for i, s in enumerate(status) if s is FillStatus.GRANTED]
        checksums = np.zeros(part.keys * part.groups, dtype=np.uint64)
        return Filling(status, granted, fills, carriers, checksums)

    def _commit_request(self, filled: Filling) -> pb.CommitRequest:
        by_key = filled.checksums.reshape(len(filled.status), -1)
        return pb.CommitRequest(
            session=self._link.session.token,
            fills=pack_u64(filled.fills),
            checksums=pack_u64(by_key[filled.granted]),
        )

    def _settle(self, filled: Filling, answer: pb.CommitResponse) -> None:
        outcome = unpack_u8(answer.status, "status", len(filled.granted))
        for i, s in zip(filled.granted, outcome.tolist(), strict=True):
            filled.status[i] = _FILL[s]

    def _reserve(self, part: PutPart, timeout_s: float) -> pb.ReserveResponse:
        if part.generations is None:
            return self._link.call("Reserve", part.request, pb.ReserveResponse, timeout_s)
        request = pb.ReplaceIfRequest(reserve=part.request, generations=pack_u64(part.generations))
        return self._link.call("ReplaceIf", request, pb.ReserveResponse, timeout_s)

    def _abort(self, fills: U64S, timeout_s: float) -> None:
        request = pb.AbortRequest(session=self._link.session.token, fills=pack_u64(fills))
        try:
            if self._link.connection.is_reusable:
                self._link.call("Abort", request, pb.AbortResponse, timeout_s)
        except KvstoredError:
            # The fills end by their TTL or with the session; the first error is the one to tell.
            pass
