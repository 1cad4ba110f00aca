"""Places in the daemon's memory that a connection holds for puts to come, so that a put is copied first and told in one message.

A stock belongs to one connection, and so to one caller at a time. It is ordered without waiting for the answer, grows to what the last puts
took, and is given back when it was not used for a while, or with the client's end; else the places end with the session.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvstored.client.connection import Connection
from kvstored.core.types import BATCH_KEYS_MAX
from kvstored.errors import Corrupt
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import EXTENT_BYTES, unpack_u64

STOCK_BYTES_MAX = 128 << 20
BLOCKS_MIN = 32
AHEAD_PUTS, AHEAD_BLOCKS, AHEAD_BYTES = 8, 128, 4 << 20
"""Held where puts are smaller: an order for every put would be a message for every put again, and one for four costs the daemon half; it also makes the
books of what was put, which cost less for many at once (four clients with single blocks: a fifth)."""
_ID_BYTES = 8
IDLE_S = 10.0
REST_PUTS_MAX = 64
"""Puts of a namespace that go the other way after ones that copied for nothing."""


@dataclass(slots=True)
class Places:
    """As messages carry them: `ids`, u64 each; `extents`: segment, offset, bytes, u64 each."""

    ids: bytes = b""
    extents: bytes = b""

    def __len__(self) -> int:
        return len(self.ids) // _ID_BYTES

    @property
    def bytes(self) -> int:
        return int(unpack_u64(self.extents, "extents")[2::3].sum())


@dataclass(slots=True)
class _Shelf:
    """The places of one namespace. `puts`: how many went by; `rest`: puts left that do not use it, `rests`: how many the next time."""

    places: Places
    puts: int = 0
    rest: int = 0
    rests: int = 1


class Stock:
    """`session`: the token of the connection's session."""

    def __init__(self, connection: Connection, session: bytes) -> None:
        self._connection = connection
        self._session = session
        self._shelves: dict[bytes, _Shelf] = {}
        self._used_s = 0.0

    def take(self, namespace: bytes, count: int, now_s: float) -> Places | None:
        """Places for all of `count` blocks, or none."""
        self._used_s = now_s
        shelf = self._shelf(namespace)
        shelf.puts += 1
        if shelf.rest:
            shelf.rest -= 1
            return None
        if len(shelf.places) < count:
            self._connection.collect()  # the last order is on its way, perhaps
            if len(shelf.places) < count:
                return None
        taken, shelf.places = _cut(shelf.places, count)
        return taken

    def left(self, namespace: bytes) -> int:
        """Places that are here."""
        return len(self._shelf(namespace).places)

    def was_used(self, namespace: bytes) -> None:
        """What was taken holds blocks now."""
        self._shelves[namespace].rests = 1

    def put_back(self, namespace: bytes, places: Places) -> None:
        """Nothing was stored there: some block was known, say. The next puts ask first."""
        shelf = self._shelves[namespace]
        shelf.places = _joined(places, shelf.places)
        shelf.rest, shelf.rests = shelf.rests, min(2 * shelf.rests, REST_PUTS_MAX)

    def restock(self, namespace: bytes, count: int, piece_bytes: int, timeout_s: float) -> None:
        """Orders what two puts of `count` blocks like the last one need, or some more small ones, from the second put on: one uses what is there while
        the order for the other is carried out. Waits for no answer."""
        shelf = self._shelf(namespace)
        target = _target(count, piece_bytes)
        if shelf.puts < 2 or len(shelf.places) > target // 2 or not target:
            return
        self._give_back(list(self._in_the_way(namespace, target * piece_bytes)), timeout_s)
        request = pb.SetAsideRequest(
            session=self._session, namespace=namespace, count=target - len(shelf.places)
        )
        self._connection.owe(
            "SetAside",
            request,
            pb.SetAsideResponse,
            lambda answer: self._arrived(namespace, answer),
            timeout_s,
        )

    def give_back(self, timeout_s: float, *, unused_since_s: float) -> None:
        """All of it, if it was not used since then. Waits for no answer."""
        if self._shelves and self._used_s <= unused_since_s:
            self._connection.collect()
            self._give_back(list(self._shelves), timeout_s)

    def _shelf(self, namespace: bytes) -> _Shelf:
        shelf = self._shelves.get(namespace)
        if shelf is None:
            shelf = self._shelves[namespace] = _Shelf(Places())
        return shelf

    def _in_the_way(self, namespace: bytes, wanted_bytes: int) -> Iterator[bytes]:
        """Namespaces whose places have to go so that the stock stays within its bound."""
        others = {n: s.places.bytes for n, s in self._shelves.items() if n != namespace}
        over_bytes = sum(others.values()) + wanted_bytes - STOCK_BYTES_MAX
        for name, held_bytes in others.items():
            if over_bytes > 0 and held_bytes:
                over_bytes -= held_bytes
                yield name

    def _give_back(self, namespaces: Sequence[bytes], timeout_s: float) -> None:
        ids = b"".join([self._shelves.pop(name).places.ids for name in namespaces])
        if ids:
            request = pb.AbortRequest(session=self._session, fills=ids)
            self._connection.owe("Abort", request, pb.AbortResponse, lambda _: None, timeout_s)

    def _arrived(self, namespace: bytes, answer: pb.SetAsideResponse) -> None:
        count, rest = divmod(len(answer.extents), EXTENT_BYTES)
        if rest:
            raise Corrupt(f"places that were set aside are cut short: bytes={len(answer.extents)}")
        ids = np.arange(answer.first, answer.first + count, dtype="<u8").tobytes()
        shelf = self._shelf(namespace)
        shelf.places = _joined(shelf.places, Places(ids, answer.extents))


@lru_cache(maxsize=256)
def _target(count: int, piece_bytes: int) -> int:
    """How many to have after puts of `count`; 0 for more than can be held."""
    most = min(STOCK_BYTES_MAX // piece_bytes, BATCH_KEYS_MAX)
    ahead = min(max(AHEAD_PUTS * count, AHEAD_BLOCKS), AHEAD_BYTES // piece_bytes)
    return min(max(2 * count, ahead, BLOCKS_MIN), most) if count <= most else 0


def _cut(places: Places, count: int) -> tuple[Places, Places]:
    ids, extents = count * _ID_BYTES, count * EXTENT_BYTES
    return (
        Places(places.ids[:ids], places.extents[:extents]),
        Places(places.ids[ids:], places.extents[extents:]),
    )


def _joined(first: Places, second: Places) -> Places:
    return Places(first.ids + second.ids, first.extents + second.extents)
