"""Rights to write: one a block, or one value for the consecutive rights that a call of many plain blocks was granted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import eq

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import GrantedPiece
from kvstored.core.columnar import Places
from kvstored.core.hints import Hint
from kvstored.core.types import Fingerprints, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """One open fill. `pieces` are piece rows, in namespace order of their groups."""

    id: int
    session: int
    ns: int
    block: int
    fingerprint: tuple[int, int]
    pieces: list[int]
    granted: tuple[GrantedPiece, ...]
    begun_s: float
    expires_s: float
    request_id: bytes
    hint: Hint


@dataclass(frozen=True, slots=True, eq=False)
class FillRun:
    """Fills with the ids `first`, `first` + 1, ... over plain blocks, as long as nothing is done to one of them alone."""

    first: int
    session: int
    ns: int
    blocks: Rows
    fingerprints: Fingerprints
    pieces: Rows
    places: Places
    generations: NDArray[np.uint64]
    length: int
    begun_s: float
    expires_s: float
    request_id: bytes
    hint: Hint

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def ids(self) -> range:
        return range(self.first, self.first + len(self.blocks))

    def each(self) -> list[Fill]:
        return [self._fill(i) for i in range(len(self.blocks))]

    def _fill(self, i: int) -> Fill:
        low, high = self.fingerprints[i].tolist()
        place, generation = self.places.place(i), int(self.generations[i])
        return Fill(
            id=self.first + i,
            session=self.session,
            ns=self.ns,
            block=int(self.blocks[i]),
            fingerprint=(low, high),
            pieces=[int(self.pieces[i])],
            granted=(GrantedPiece(0, 0, self.length, place, generation),),
            begun_s=self.begun_s,
            expires_s=self.expires_s,
            request_id=self.request_id,
            hint=self.hint,
        )


class Rights:
    """The open fills by id and by session, and when they end."""

    def __init__(self, first_id: int) -> None:
        self._open: dict[int, Fill | FillRun] = {}
        self._by_session: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last_id = first_id

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Fill]:
        """All of them, oldest first; changes nothing."""
        for each in dict.fromkeys(self._open.values()):
            yield from each.each() if isinstance(each, FillRun) else (each,)

    def next_ids(self, count: int) -> int:
        """The first of so many consecutive ids that nobody had."""
        first = self._last_id + 1
        self._last_id += count
        return first

    def opened(self, session: int) -> int:
        return len(self._by_session.get(session, ()))

    def add(self, fill: Fill) -> None:
        self._open[fill.id] = fill
        self._by_session.setdefault(fill.session, set()).add(fill.id)
        heappush(self._deadlines, (fill.expires_s, fill.id))

    def add_run(self, run: FillRun) -> None:
        self._open.update(dict.fromkeys(run.ids, run))
        self._by_session.setdefault(run.session, set()).update(run.ids)
        heappush(self._deadlines, (run.expires_s, run.first))

    def get(self, id_: int) -> Fill | None:
        """One of a run is taken out of it, and so are the others: they may go different ways from now on."""
        found = self._open.get(id_)
        if not isinstance(found, FillRun):
            return found
        for fill in found.each():
            self._open[fill.id] = fill
            heappush(self._deadlines, (fill.expires_s, fill.id))
        found = self._open[id_]
        assert isinstance(found, Fill)
        return found

    def run(self, session: int, ids: Sequence[int]) -> FillRun | None:
        """The run that has exactly these ids, in order."""
        found = self._open.get(ids[0]) if len(ids) else None
        if not isinstance(found, FillRun) or found.session != session:
            return None
        is_whole = len(ids) == len(found) and all(map(eq, ids, found.ids))
        return found if is_whole else None

    def of_session(self, session: int) -> list[Fill]:
        found = [self.get(id_) for id_ in sorted(self._by_session.get(session, ()))]
        return [fill for fill in found if fill is not None]

    def due(self, now_s: float) -> Fill | None:
        """One whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            fill = self.get(heappop(self._deadlines)[1])
            if fill is not None:
                return fill
        return None

    def next_s(self) -> float:
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def remove(self, fill: Fill | FillRun) -> None:
        ids = fill.ids if isinstance(fill, FillRun) else (fill.id,)
        for id_ in ids:
            del self._open[id_]
        mine = self._by_session[fill.session]
        mine.difference_update(ids)
        if not mine:
            del self._by_session[fill.session]
        if len(self._deadlines) > 2 * len(self._open) + 1024:
            runs = dict.fromkeys(self._open.values())
            self._deadlines = sorted(
                (each.expires_s, each.first if isinstance(each, FillRun) else each.id)
                for each in runs
            )
