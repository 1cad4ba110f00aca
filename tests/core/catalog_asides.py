"""The state machine of the catalog: places set aside, and puts into them."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvstored.core.calls import NO_FINGERPRINT, Granted, GrantedPiece, Reserve
from kvstored.core.columnar import named
from kvstored.core.planned import Single
from kvstored.core.types import Heat, Place, SessionId
from tests.core.catalog_compare import PARENTS, PATHS, valid_of
from tests.core.catalog_machine import small
from tests.core.catalog_moves import MovingMachine
from tests.core.desk import BLOCK_TOKENS, UNIT


class AsideMachine(MovingMachine):
    @precondition(lambda self: self.is_begun)
    @rule(ns=small, session=small, count=st.integers(0, 4), peer=st.integers(1, 3))
    def set_aside(self, ns: int, session: int, count: int, peer: int) -> None:
        asked = self.ask_aside(ns, session, count, peer)
        self.compare()
        self.places |= asked

    def ask_aside(
        self, ns: int, session: int, count: int, peer: int
    ) -> dict[tuple[str, int], list[Place]]:
        namer, session = self.pick(self.namers, ns), self.pick(self.sessions, session)
        length = namer.layout.spec.groups[0].bytes_per_block
        got = self.catalog.set_aside(
            SessionId(session), namer.layout.id, length, count, self.now_s, peer
        )
        ids = [got.first + i for i in range(got.places.size)]
        units = length // UNIT
        expected = self.oracle.set_aside(session, namer.layout.id, units, count, ids, peer)
        assert len(ids) in (0, expected)
        return {("aside", id_): [got.places.place(i)] for i, id_ in enumerate(ids)}

    @precondition(lambda self: self.is_begun and self.oracle.asides)
    @rule(
        puts=st.lists(st.tuples(small, small, small, small, small, small), min_size=1, max_size=3)
    )
    def put_aside(self, puts: list[tuple[int, ...]]) -> None:
        """Some puts before their books are made. Mostly of new blocks into places of the right kind; now and then of known ones, or into
        another session's."""
        told = None
        for put in puts:
            ns, session, _, count, peer, _ = put
            if self.catalog.asides.has_room(self.pick(self.namers, ns).layout.id, count % 5):
                self.places |= self.ask_aside(ns, session, count % 5, peer % 3 + 1)
            if self.oracle.asides:
                told = self.put_one_aside(*put)
        self.catalog.settle(self.now_s)
        if told is not None:  # what one before it was told, it may have changed
            self.compare_told(told)
        self.compare()

    def put_one_aside(
        self, pick: int, stranger: int, path: int, first: int, count: int, request: int
    ) -> list[Granted] | None:
        aside = self.pick(list(self.oracle.asides.values()), pick)
        session = self.owner(self.oracle.asides, pick, stranger)
        namer = self.namer_of(aside.ns)
        mine = [id_ for id_, each in self.oracle.asides.items() if each == aside]
        keys = self.path(path, len(mine) - 1)
        if first % 4:
            new = [key for key in PATHS[path % 4] if (aside.ns, key) not in self.oracle.blocks]
            keys = tuple(new[first // 4 % 3 :][: len(mine)]) or keys
        if first % 8 > 4:  # of several paths, their ancestors before, behind or nowhere
            full = [key for key in PARENTS if valid_of(key) == BLOCK_TOKENS]
            fresh = [key for key in full if (aside.ns, key) not in self.oracle.blocks] or full
            keys = tuple((fresh * 2)[path % len(fresh) :][: len(mine)][:: 1 - path % 2 * 2])
        ids = (mine * 2)[count % len(mine) :][: len(keys)]
        parents = [PARENTS[key] for key in keys]
        last = valid_of(keys[-1]) % BLOCK_TOKENS
        request_id = self.pick((b"", b"r1", b"r2"), request)
        call = namer.reserve(session, keys, parents, last_valid_tokens=last, request_id=request_id)
        sums = np.ones(len(ids), dtype=np.uint64)
        if len(ids) == len(keys) == 1 and not last and stranger % 2:
            told = self.granted_alone(call, ids[0])
        else:
            many = self.catalog.put_aside(call, ids, sums)
            told = None if many is None else list(many.each())
        asked = [(key, parent, valid_of(key)) for key, parent in zip(keys, parents, strict=True)]
        is_put = self.oracle.may_put_aside(session, aside.ns, asked, aside.units, ids)
        assert (told is not None) is is_put
        if is_put:
            running = self.oracle.requests.get((session, request_id))
            self.oracle.put_aside(aside.ns, asked, ids, running)
        return told

    def granted_alone(self, call: Reserve, id_: int) -> list[Granted] | None:
        """The same put as of a single block."""
        (name,) = named(call.keys.fingerprints)
        parent = named(call.parents.fingerprints)[0] if call.parents.known[0] else None
        length = int(call.sizes[0, 0])
        put = Single(call.session, call.ns, length, name, parent, call.request_id)
        told = self.catalog.put_one_aside(put, id_, 1)
        if told is None:
            return None
        piece = GrantedPiece(0, 0, length, (told.place,), told.generation)
        above = told.parent or NO_FINGERPRINT
        return [Granted(id_, name, above, told.depth, BLOCK_TOKENS, told.heat, 0, (piece,))]

    def compare_told(self, told: list[Granted]) -> None:
        """What was told before it was done is what was done."""
        books = self.catalog.books
        for grant in told:
            block = books.index.find_one(grant.fingerprint)
            parent = books.parent_fingerprint(block)
            assert (grant.parent, grant.depth) == (parent, books.tree.depth[block])
            assert grant.heat == (Heat.SINK if books.heat(block) is Heat.SINK else Heat.COLD)
            assert grant.pieces[0].generation == books.blocks.generation[block]
            assert grant.pieces[0].place == books.place(
                int(books.copies.first_piece[books.blocks.first_copy[block]])
            )

    @precondition(lambda self: self.is_begun and self.oracle.asides)
    @rule(pick=small, stranger=small, count=small)
    def give_back(self, pick: int, stranger: int, count: int) -> None:
        session = self.owner(self.oracle.asides, pick, stranger)
        ids = list(self.oracle.asides)[pick % len(self.oracle.asides) :][: 1 + count % 3]
        self.catalog.abort(SessionId(session), ids, self.now_s)
        self.oracle.give_back(session, ids)
        self.compare()

    @precondition(lambda self: self.is_begun and self.oracle.asides)
    @rule(peer=st.integers(1, 3))
    def peer_left(self, peer: int) -> None:
        self.catalog.asides.peer_left(peer, self.now_s)
        self.oracle.peer_left(peer)
        self.compare()

    @precondition(lambda self: self.is_begun and self.oracle.asides)
    @rule(peer=st.integers(1, 3))
    def hung_up(self, peer: int) -> None:
        self.catalog.asides.hung_up(peer)
        self.oracle.hung_up(peer)
        self.compare()
