"""Bytes go to places that the connection holds, then the daemon hears of the blocks: a put of one message."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstored.client.carrying import Mapped, carriers_of
from kvstored.client.channel import LocalLink
from kvstored.client.copying import Bytes, Copier, Run
from kvstored.client.keys import Keys
from kvstored.client.links import Plain, Post, PutPart
from kvstored.client.runs import extent_of
from kvstored.client.stock import Places
from kvstored.core.hints import Hint
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import Pieces, pack_u64


class Filled(NamedTuple):
    """Blocks whose bytes lie in places that the link holds, and that nobody was told of."""

    plain: Plain
    keys: Keys
    hint: Hint
    places: Places
    checksums: Sequence[int]


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

    def fill(self, post: Post, now_s: float, timeout_s: float) -> Filled | None:
        """None where there are no places: nothing was done."""
        plain, stock = post.plain, self._link.stock
        places = stock.take(plain.namespace, len(post.keys), now_s)
        if places is None:
            return None
        extents = self.extents(places, timeout_s)
        pairs = zip(post.sources, extents, strict=True)
        runs = [Run(source, (extent,), (extent.size,)) for source, extent in pairs]
        return Filled(plain, post.keys, post.hint, places, self._copier.copy_in(runs))

    def extents(self, places: Places, timeout_s: float) -> list[Bytes]:
        """The places, mapped."""
        segments = self._mapped(_pieces(places), timeout_s)
        return [extent_of(segments, *extent) for extent in places.extents.tolist()]

    def _stored(self, part: PutPart, places: Places, timeout_s: float) -> bool:
        pieces = _pieces(places)
        carriers = carriers_of(part, pieces, self._mapped(pieces, timeout_s))
        checksums = carriers.copy_in(self._copier)
        request = pb.PutAsideRequest(
            reserve=part.request, places=pack_u64(places.ids), checksums=pack_u64(checksums)
        )
        return self._link.call("PutAside", request, pb.PutAsideResponse, timeout_s).stored


def _pieces(places: Places) -> Pieces:
    count = len(places)
    sizes = places.extents[:, 2].reshape(count, 1)
    return Pieces(places.extents, np.arange(count + 1, dtype=np.int64), sizes)
