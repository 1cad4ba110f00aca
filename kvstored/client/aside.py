"""Bytes go to places that the connection holds, then the daemon hears of the blocks: a put of one message."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from kvstored.client.carrying import Mapped, carriers_of
from kvstored.client.channel import LocalLink
from kvstored.client.copying import Bytes, Copier
from kvstored.client.hints import hint_message
from kvstored.client.keys import Keys
from kvstored.client.links import Aside, Plain, Post, PutPart
from kvstored.client.segments import Segments, extent_of
from kvstored.client.stock import Places
from kvstored.core.hints import Hint
from kvstored.errors import Corrupt
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import Pieces, pack_u64, unpack_extents, unpack_u64


class Filled(NamedTuple):
    """Blocks whose bytes lie in places that the link holds, and that nobody was told of. `checksums`: packed."""

    plain: Plain
    keys: Keys
    hint: Hint
    places: Places
    checksums: bytes


class AsidePuts:
    """Of one link."""

    def __init__(self, link: LocalLink, copier: Copier, segments: Segments, mapped: Mapped) -> None:
        self._link = link
        self._copier = copier
        self._segments = segments
        self._mapped = mapped

    def put(self, part: PutPart, aside: Aside, now_s: float, timeout_s: float) -> bool:
        """Whether the blocks are stored. Where not, nothing was done: they have to be reserved."""
        try:
            stock, namespace = self._link.stock, aside.plain.namespace
            places = stock.take(namespace, part.keys, now_s)
            if places is None:
                return False
            is_stored = self._stored(part, aside.request, places, timeout_s)
            if is_stored:
                stock.was_used(namespace)
            else:
                stock.put_back(namespace, places)
            return is_stored
        except BaseException:
            # An interrupt may have come behind the answer: what became of the places is not known, and they may hold blocks that others read.
            # So nobody writes there again: they end with the connection.
            self._link.connection.close()
            raise

    def fill(self, post: Post, now_s: float, timeout_s: float) -> Filled | None:
        """None where there are no places: nothing was done."""
        places = self._link.stock.take(post.plain.namespace, len(post.keys), now_s)
        if places is None:
            return None
        checksums = self._copied(post.sources, places, timeout_s)
        return Filled(post.plain, post.keys, post.hint, places, checksums)

    def again(self, filled: Filled, timeout_s: float) -> PutPart:
        """What puts the blocks from where they lie."""
        request = pb.ReserveRequest(
            session=self._link.session.token,
            namespace=filled.plain.namespace,
            keys=filled.keys.message(),
            ends_path=True,
            hint=hint_message(filled.hint),
            content_keys=b"".join(filled.keys.content_keys),
        )
        segments = self._mapped(_pieces(filled.places), timeout_s)
        extents = unpack_extents(filled.places.extents)
        sources = [extent_of(segments, *extent) for extent in extents]
        return PutPart(request, sources, len(filled.keys))

    def _stored(
        self, part: PutPart, request: pb.PutAsideRequest, places: Places, timeout_s: float
    ) -> bool:
        request.places = places.ids
        if part.gathers:
            pieces = _pieces(places)
            carriers = carriers_of(part, pieces, self._mapped(pieces, timeout_s))
            request.checksums = pack_u64(carriers.copy_in(self._copier))
        else:
            sources = cast("Sequence[Bytes]", part.sources)  # it is plain: none is missing
            request.checksums = self._copied(sources, places, timeout_s)
        return self._link.call("PutAside", request, pb.PutAsideResponse, timeout_s).stored

    def _copied(self, sources: Sequence[Bytes], places: Places, timeout_s: float) -> bytes:
        """Their checksums."""
        known = self._segments.known(self._link.session.epoch)
        try:
            return self._copier.fill(sources, known, places.extents)
        except LookupError:  # a segment is new, most likely
            segments = self._mapped(_pieces(places), timeout_s)
        try:
            return self._copier.fill(sources, segments, places.extents)
        except LookupError as error:
            raise Corrupt(f"a place that was set aside is none: {error}") from error


def _pieces(places: Places) -> Pieces:
    extents = unpack_u64(places.extents, "extents").reshape(-1, 3)
    count = len(extents)
    return Pieces(extents, np.arange(count + 1, dtype=np.int64), extents[:, 2].reshape(count, 1))
