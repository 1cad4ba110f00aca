"""The oracle's part of places set aside for puts to come."""

from collections.abc import Sequence

from kvstored.core.calls import Reason
from kvstored.core.types import Budget
from tests.core.oracle import Asked, Oracle
from tests.core.oracle_rows import DRAM, Aside, Block, Kept, Request

NOBODYS = Block(-1, "", 0)
"""What lies in a place before its block has a name."""
ONE_PIECE = ((0, 0),)


class AsideOracle(Oracle):
    def set_aside(
        self, session: int, ns: int, units: int, count: int, ids: Sequence[int], peer: int
    ) -> int:
        """How many places there have to be; `ids`: of those that the catalog gave."""
        capacity = self.tiers[DRAM].capacity_units
        share = capacity * self.tiers[DRAM].aside_share
        mine = sum(a.units for a in self.asides.values() if a.session == session)
        left = min(int(share) - self.aside(), int(share / 2) - mine)
        count = min(count, left // units) if self.is_plain(ns) else 0
        given = 0
        held = list(ids)
        while given < count and self.room(DRAM, Budget.GLOBAL, units):
            given += 1
            id_ = held.pop(0) if held else -given  # where they are no single runs there are none
            self.asides[id_] = Aside(session, ns, units, peer)
        for id_ in [id_ for id_ in self.asides if id_ < 0]:
            del self.asides[id_]
        return given

    def is_plain(self, ns: int) -> bool:
        spec = self.specs[ns]
        shards = spec.tp if spec.groups[0].sharded else 1
        return len(spec.groups) == 1 and spec.groups[0].is_required and shards == 1

    def may_put_aside(
        self, session: int, ns: int, asked: Sequence[Asked], units: int, ids: Sequence[int]
    ) -> bool:
        """Whether these are new blocks, none below one that comes later, and a place of the session for each."""
        held = [self.asides.get(id_) for id_ in ids]
        mine = Aside(session, ns, units)
        if len(ids) != len(asked) or len(set(ids)) != len(ids) or any(a != mine for a in held):
            return False
        is_full = all(valid == self.specs[ns].block_tokens for _, _, valid in asked)
        names = [key for key, *_ in asked]
        is_late = any(parent in names[i:] for i, (_, parent, _) in enumerate(asked))
        is_new = not any((ns, key) in self.blocks for key in names) and len({*names}) == len(names)
        is_odd = any(self._is_odd(ns, parent) for _, parent, _ in asked)
        return is_full and is_new and not is_late and not is_odd

    def _is_odd(self, ns: int, parent: str | None) -> bool:
        """Blocks of a retired namespace, and those that make a partial one superfluous, go the other way."""
        above = self.blocks.get((ns, parent)) if parent else None
        siblings = above.children if above is not None else ()
        full = self.specs[ns].block_tokens
        return ns in self.retired or any(each.valid < full for each in siblings)

    def put_aside(
        self, ns: int, asked: Sequence[Asked], ids: Sequence[int], request: Request | None
    ) -> None:
        part = self.specs[ns].groups[0].part
        placed = []
        for id_, (key, parent, valid) in zip(ids, asked, strict=True):
            block = self._row(ns, key, parent, valid)
            block.holds += 1
            copy = self.open_copy(block, DRAM, part)
            copy.pieces[0, 0] = self.asides.pop(id_).units
            placed.append(copy)
        for copy in placed:
            self.written(copy, (0, 0), self.now_s)
        self.let_go([copy.block for copy in placed])
        for copy in placed if request is not None and request.ns == ns else ():
            if copy.block not in request.sealed:
                request.sealed.append(copy.block)
            self.seal(request, [copy.block])

    def give_back(self, session: int, ids: Sequence[int]) -> None:
        for id_ in ids:
            if id_ in self.asides and self.asides[id_].session == session:
                del self.asides[id_]
                self._freed(DRAM, NOBODYS, ONE_PIECE, Reason.FILL_LOST)

    def hung_up(self, peer: int) -> None:
        for id_ in [id_ for id_, aside in self.asides.items() if aside.peer == peer]:
            self.give_back(self.asides[id_].session, [id_])

    def keep_asides(self, session: int) -> None:
        self._keep([id_ for id_, aside in self.asides.items() if aside.session == session])

    def peer_left(self, peer: int) -> None:
        self._keep([id_ for id_, aside in self.asides.items() if aside.peer == peer])

    def _keep(self, ids: Sequence[int]) -> None:
        until_s = self.now_s + self.limits.quarantine_s
        for id_ in ids:
            aside = self.asides.pop(id_)
            self.kept.append(Kept(aside.session, until_s, aside.units, (NOBODYS, ONE_PIECE)))
