"""The unary methods of puts: reserve, commit, abort, and puts into space set aside."""

from kvstored.core.calls import FillStatus
from kvstored.core.types import BATCH_KEYS_MAX
from kvstored.errors import Busy, InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.store import Store
from kvstored.transport.answers import aside_message, refused_message, reserve_message
from kvstored.transport.asked import Asked, Put, handles_of, sums_of
from kvstored.transport.caller import Answer, Caller
from kvstored.wire.packing import pack_u8, unpack_u64, word_of


class PutCalls:
    def __init__(self, store: Store, asked: Asked) -> None:
        self._store = store
        self._asked = asked

    def answers(self) -> dict[str, Answer]:
        return {
            "Reserve": self._reserve,
            "Commit": self._commit,
            "Abort": self._abort,
            "ReplaceIf": self._replace_if,
            "SetAside": self._set_aside,
            "PutAside": self._put_aside,
        }

    async def _reserve(self, request: pb.ReserveRequest, caller: Caller) -> pb.ReserveResponse:
        await self._asked.scanned()
        return self._reserved(self._asked.put(request, caller))

    async def _replace_if(self, request: pb.ReplaceIfRequest, caller: Caller) -> pb.ReserveResponse:
        await self._asked.scanned()
        put = self._asked.put(request.reserve, caller)
        generations = unpack_u64(request.generations, "generations", len(put.call.keys))
        reserved = self._store.puts.replace_if(
            put.session, put.layout, put.call, put.columns, generations.tolist()
        )
        return reserve_message(reserved, put.columns)

    async def _commit(self, request: pb.CommitRequest, caller: Caller) -> pb.CommitResponse:
        session = self._asked.session(request.session, caller)
        fills = handles_of(request.fills, "fills")
        # the next reservation is checked before anything is done: a bad one must not hide what became of the fills
        following = self._asked.put(request.next, caller) if request.HasField("next") else None
        if self._store.puts.commit_many(session, fills, unpack_u64(request.checksums, "checksums")):
            status = bytes([FillStatus.COMMITTED]) * len(fills)
        else:
            columns = [self._store.puts.columns_of(session, fill) for fill in fills]
            sums = sums_of(request.checksums, columns)
            done = self._store.puts.commit(session, fills, sums)
            status = pack_u8([int(each) for each in done])
        response = pb.CommitResponse(status=status)
        if following is not None:
            response.next.CopyFrom(self._reserved_if_possible(following))
        return response

    async def _abort(self, request: pb.AbortRequest, caller: Caller) -> pb.AbortResponse:
        session = self._asked.session(request.session, caller)
        self._store.puts.abort(session, handles_of(request.fills, "fills"))
        return pb.AbortResponse()

    async def _set_aside(self, request: pb.SetAsideRequest, caller: Caller) -> pb.SetAsideResponse:
        session = self._asked.session(request.session, caller)
        layout = self._asked.layout(request.namespace, caller)
        count = min(request.count, BATCH_KEYS_MAX)
        aside = self._store.puts.set_aside(session, layout, count, caller.connection_id)
        return aside_message(aside, layout)

    async def _put_aside(self, request: pb.PutAsideRequest, caller: Caller) -> pb.PutAsideResponse:
        one = self._asked.single(request.reserve, caller)
        if one is not None:
            stored = self._store.puts.put_one_aside(
                one.session,
                one.layout,
                one.put,
                request.reserve.keys.packed,
                word_of(request.places, "places"),
                word_of(request.checksums, "checksums"),
            )
            return pb.PutAsideResponse(stored=stored)
        put = self._asked.put(request.reserve, caller)
        count = len(put.call.keys)
        places = unpack_u64(request.places, "places", count).tolist()
        sums = unpack_u64(request.checksums, "checksums", count)
        stored = self._store.puts.put_aside(put.session, put.layout, put.call, places, sums)
        return pb.PutAsideResponse(stored=stored)

    def _reserved(self, put: Put) -> pb.ReserveResponse:
        reserved = self._store.puts.reserve(put.session, put.layout, put.call, put.columns)
        return reserve_message(reserved, put.columns)

    def _reserved_if_possible(self, put: Put) -> pb.ReserveResponse:
        try:
            return self._reserved(put)
        except (Busy, InvalidArgument):
            return refused_message(len(put.call.keys), put.columns)
