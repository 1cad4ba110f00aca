"""Keeps the projection that clients read without a message in step with the books: what may be in it, and when it leaves.

Shown are blocks of plain, immutable namespaces that lie ready in memory in one extent and need no look before they are read. Everything
else is read by Acquire. What a turn forgets is withdrawn in that turn, since its space may be granted in the next.
"""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from kvstored.core.calls import Fingerprint, PieceRow, Visible
from kvstored.core.columnar import FreedMany, Places, VisibleMany
from kvstored.core.space import Space
from kvstored.core.types import Layout, NamespaceId, Place, TierId
from kvstored.tiers.arena import Arena
from kvstored.tiers.projection import Projection

LATER_SLICE = 256
"""Blocks that are shown in one turn of the loop."""


class Showing:
    """Single blocks are gathered, in order, until `settle`."""

    def __init__(
        self,
        projection: Projection,
        arena: Arena,
        space: Space,
        layouts: Mapping[NamespaceId, Layout],
    ) -> None:
        self._projection = projection
        self._arena = arena
        self._space = space
        self._layouts = layouts
        self._later: list[Places] = []
        self._shown: list[Place] = []
        self._gone: list[tuple[Fingerprint, Place]] = []

    def show_many(self, visible: VisibleMany) -> None:
        """These come in after the turn of the loop, or before anything is withdrawn: whoever put them waits for an answer, and until
        then a get of them costs a message."""
        if visible.tier is not TierId.DRAM or not self.is_shown(visible.ns):
            return
        places = visible.places
        if self._space.suspects:
            clean = [i for i in range(places.size) if not self._is_suspect(places.place(i))]
            places = Places(*(column[clean] for column in places))
        if places.size:
            self._later.append(places)
            try:
                asyncio.get_running_loop().call_soon(self._catch_up_a_little)
            except RuntimeError:  # nobody waits where no loop runs
                self.catch_up()

    def catch_up(self) -> None:
        """Shows what came late. Their records are as they were: what is forgotten is withdrawn before they change."""
        later, self._later = self._later, []
        for places in later:
            self._projection.publish(self._arena.heads(places), places)

    def _catch_up_a_little(self) -> None:
        """A millisecond's worth, so that whoever waits is answered in between."""
        if not self._later:
            return
        places = self._later.pop(0)
        if places.size > LATER_SLICE:
            self._later.insert(0, places.part_of(LATER_SLICE, places.size))
            asyncio.get_running_loop().call_soon(self._catch_up_a_little)
        now = places.part_of(0, LATER_SLICE)
        self._projection.publish(self._arena.heads(now), now)

    def show(self, visible: Visible) -> None:
        if visible.tier is TierId.DRAM and self.is_shown(visible.ns):
            self.show_pieces([row.place for row in visible.pieces])

    def show_pieces(self, places: Sequence[Place]) -> None:
        """Pieces of namespaces that are shown; what is not one whole run of clean space is left out."""
        if self._gone:
            self.settle()
        self._shown += [p for p in places if len(p) == 1 and not self._is_suspect(p)]

    def withdraw_many(self, freed: FreedMany) -> None:
        if freed.tier is TierId.DRAM:
            self.catch_up()
            self.settle()
            self._projection.withdraw(freed.fingerprints, freed.places)

    def withdraw(self, fingerprint: Fingerprint, pieces: Sequence[PieceRow]) -> None:
        self.catch_up()
        if self._shown:
            self.settle()
        self._gone += [(fingerprint, piece.place) for piece in pieces if len(piece.place) == 1]

    def settle(self) -> None:
        if self._shown:
            places = _columns(self._shown)
            self._projection.publish(self._arena.heads(places), places)
            self._shown = []
        if self._gone:
            fingerprints = np.array([name for name, _ in self._gone], dtype=np.uint64)
            self._projection.withdraw(fingerprints, _columns([place for _, place in self._gone]))
            self._gone = []

    def is_shown(self, ns: NamespaceId) -> bool:
        layout = self._layouts.get(ns)
        if layout is None or layout.spec.mutable or not layout.is_plain:
            return False
        return layout.spec.tenant == self._projection.tenant

    def _is_suspect(self, place: Place) -> bool:
        return bool(self._space.suspects) and self._space.is_suspect(place)


def _columns(places: Sequence[Place]) -> Places:
    extents = np.array([place[0] for place in places], dtype=np.int64)
    return Places(extents[:, 0], extents[:, 1], extents[:, 2])
