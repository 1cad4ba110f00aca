"""Tells LMCache's accounts what the daemon let go: a thread that follows the daemon's events, and asks where they are not enough."""

import threading
from collections.abc import Callable, Mapping, Sequence

from kvstored.client import Client, Keys, KvstoredError, NotFound
from kvstored.connectors.options import ConnectorOptions
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import unpack_u8

_WAIT_MS = 1000
_PAUSE_S = 2.0
"""After a failure: the daemon is away, and the accounts can wait."""
_EVENTS = 8192
_KEYS = 1024
_COPY_LEFT = (pb.EVICTED, pb.REMOVED, pb.CORRUPTED)
_ALL_LEFT = (pb.CLEARED, pb.NAMESPACE_REMOVED)
_READABLE = 0x80

Held = Callable[[], Mapping[bytes, list[bytes]]]
"""Block keys in the accounts, by the digest of their namespace."""


class Departures:
    """`departed` is told block keys that cannot be read any more. Late by a second or two, and after an outage by all at once."""

    def __init__(
        self,
        options: ConnectorOptions,
        departed: Callable[[Sequence[bytes]], None],
        held: Held,
    ) -> None:
        self._client = Client(
            options.address,
            name="lmcache accounts",
            timeout_s=options.load_s,
            connect_timeout_s=options.probe_s,
        )
        self._departed = departed
        self._held = held
        self._closed = threading.Event()
        self._epoch, self._cursor = 0, 0
        self._thread = threading.Thread(target=self._run, name="kvstored-accounts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Within a poll's wait."""
        self._closed.set()
        self._client.close()
        self._thread.join(_WAIT_MS / 1000 + 2.0)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow()
            except KvstoredError:
                self._closed.wait(_PAUSE_S)

    def _follow(self) -> None:
        request = pb.PollEventsRequest(
            epoch=self._epoch, cursor=self._cursor, events_max=_EVENTS, wait_ms=_WAIT_MS
        )
        told = self._client.call("PollEvents", request, pb.PollEventsResponse)
        held = self._held()
        suspects = held if told.lost else _suspects(told.events, held)
        for digest, block_keys in suspects.items():
            for start in range(0, len(block_keys), _KEYS):
                self._look(digest, block_keys[start : start + _KEYS])
        self._epoch, self._cursor = told.epoch, told.cursor

    def _look(self, digest: bytes, block_keys: list[bytes]) -> None:
        """An event tells that one copy went; another tier may have one."""
        keys = Keys.opaque(block_keys, unchained=True)
        request = pb.LocateRequest(namespace=digest, keys=keys.message())
        try:
            told = self._client.call("Locate", request, pb.LocateResponse)
        except NotFound:  # the namespace went with all that was in it
            self._departed(block_keys)
            return
        tiers = unpack_u8(told.tiers, "tiers", len(block_keys)).tolist()
        self._departed(
            [key for key, bits in zip(block_keys, tiers, strict=True) if not bits & _READABLE]
        )


def _suspects(
    events: Sequence[pb.Event], held: Mapping[bytes, list[bytes]]
) -> dict[bytes, list[bytes]]:
    suspects: dict[bytes, dict[bytes, None]] = {}
    known = {digest: set(block_keys) for digest, block_keys in held.items()}
    for event in events:
        if event.kind in _ALL_LEFT and event.namespace in held:
            suspects[event.namespace] = dict.fromkeys(held[event.namespace])
        elif event.kind in _COPY_LEFT and event.key in known.get(event.namespace, ()):
            suspects.setdefault(event.namespace, {})[event.key] = None
    return {digest: list(block_keys) for digest, block_keys in suspects.items()}
