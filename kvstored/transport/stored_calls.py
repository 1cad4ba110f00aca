"""AcquireStored, the front's own: which of a get's keys may travel as they lie on NVMe."""

from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.store import Store
from kvstored.transport.answers import stored_message
from kvstored.transport.asked import Asked
from kvstored.transport.caller import Answer, Caller


class StoredCalls:
    def __init__(self, store: Store, asked: Asked) -> None:
        self._store = store
        self._asked = asked

    def answers(self) -> dict[str, Answer]:
        return {"AcquireStored": self._acquire_stored}

    async def _acquire_stored(
        self, request: pb.AcquireStoredRequest, caller: Caller
    ) -> pb.AcquireStoredResponse:
        """Window and state groups are read from memory only."""
        get = self._asked.get(request.acquire, caller)
        if not all(get.layout.spec.groups[g].is_required for g in get.columns):
            return pb.AcquireStoredResponse()
        found = await self._store.acquire_stored(get.call, get.layout)
        if found is None:
            return pb.AcquireStoredResponse()
        slabs = self._store.shell.tiers.slabs
        return stored_message(found, len(get.call.keys), len(get.columns), slabs)
