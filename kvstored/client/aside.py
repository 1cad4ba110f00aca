"""Puts of one message: the bytes are copied to places that the connection holds, then the daemon hears of the blocks."""

import numpy as np

from kvstored.client.carrying import Mapped, carriers_of
from kvstored.client.channel import LocalLink
from kvstored.client.copying import Copier
from kvstored.client.links import Plain, PutPart
from kvstored.client.stock import Places
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import Pieces, pack_u64


class AsidePuts:
    """Of one link."""

    def __init__(self, link: LocalLink, copier: Copier, mapped: Mapped) -> None:
        self._link = link
        self._copier = copier
        self._mapped = mapped

    def put(self, part: PutPart, plain: Plain, now_s: float, timeout_s: float) -> bool:
        """Whether the blocks are stored. Where not, nothing was done: they have to be reserved."""
        try:
            return self._put(part, plain, now_s, timeout_s)
        except BaseException:
            # An interrupt may have come behind the answer: what became of the places is not known, and they may hold blocks that others read.
            # So nobody writes there again: they end with the connection.
            self._link.connection.close()
            raise

    def _put(self, part: PutPart, plain: Plain, now_s: float, timeout_s: float) -> bool:
        stock = self._link.stock
        places = stock.take(plain.namespace, part.keys, now_s)
        if places is None:
            return False
        is_stored = self._stored(part, places, timeout_s)
        if is_stored:
            stock.was_used(plain.namespace)
        else:
            stock.put_back(plain.namespace, places)
        return is_stored

    def _stored(self, part: PutPart, places: Places, timeout_s: float) -> bool:
        count = len(places)
        sizes = places.extents[:, 2].reshape(count, 1)
        pieces = Pieces(places.extents, np.arange(count + 1, dtype=np.int64), sizes)
        carriers = carriers_of(part, pieces, self._mapped(pieces, timeout_s))
        checksums = carriers.copy_in(self._copier)
        request = pb.PutAsideRequest(
            reserve=part.request, places=pack_u64(places.ids), checksums=pack_u64(checksums)
        )
        return self._link.call("PutAside", request, pb.PutAsideResponse, timeout_s).stored
