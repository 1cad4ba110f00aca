"""What goes up to GPUs without being asked for: resident groups of what running requests read, and the sets that engines predict.

Resident groups are small, dense and read at every step (HCA-like), so they make room there for themselves like a read would; a predicted set takes
only what is free. Everything comes from where a copy to a GPU is made from anyway (`Carriage.source_for`): what is not there yet has its turn later.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstored.core.books import Books
from kvstored.core.carriage import Carriage
from kvstored.core.claims import Request
from kvstored.core.columns import FILLING, READY
from kvstored.core.copying import Copying
from kvstored.core.types import Budget, Fingerprints, NamespaceId, Part, Rows, TierId, as_rows

REQUESTS_MAX = 64
"""Requests that one round looks at, each in its turn."""
LOOKS_MAX = 256
"""Copies that one round begins or is refused for: each costs a tenth of a millisecond."""
REFUSALS_MAX = 8


class Raising:
    def __init__(
        self, books: Books, carriage: Carriage, requests: Mapping[tuple[int, bytes], Request]
    ) -> None:
        self._books = books
        self._carriage = carriage
        self._requests = requests
        self._turn = 0

    def begin(
        self, sets: Iterable[tuple[NamespaceId, Fingerprints]], bytes_max: int, now_s: float
    ) -> list[Copying]:
        """Copies to carry up, head to tail: of requests first, then of `sets`."""
        books = self._books
        if TierId.HBM not in books.space.books or TierId.HBM in books.lost:
            return []
        there: dict[Part, NDArray[np.bool_]] = {}
        begun: list[Copying] = []
        looks, refusals = LOOKS_MAX, 0
        for block, part, may_evict in self._wanted(sets, there):
            if bytes_max <= 0 or not looks or refusals == REFUSALS_MAX:
                break
            source = self._carriage.source_for(block, TierId.HBM, part)
            if source < 0:
                continue
            looks -= 1
            units = int(books.copies.units[source])
            if not may_evict and units > self._free_units():
                refusals += 1
                continue
            task = self._carriage.begin(source, TierId.HBM, now_s)
            if task is None:
                refusals += 1
                continue
            begun.append(task)
            bytes_max -= sum(move.length for move in task.moves)
        return begun

    def _wanted(
        self,
        sets: Iterable[tuple[NamespaceId, Fingerprints]],
        there: dict[Part, NDArray[np.bool_]],
    ) -> Iterator[tuple[int, Part, bool]]:
        """Block, part and whether others may leave for it, of what no GPU has."""
        for ns, path in self._turns():
            for part in self._resident_parts(ns):
                yield from ((row, part, True) for row in self._lacking(path, part, there))
        for ns, fingerprints in sets:
            rows = self._books.index.find(fingerprints)
            rows = rows[(rows >= 0) & (self._books.blocks.ns[rows] == ns)]
            for part in (Part.DENSE, Part.SPARSE):
                yield from ((row, part, False) for row in self._lacking(rows, part, there))

    def _turns(self) -> list[tuple[int, Rows]]:
        """Paths of the next requests whose namespace has resident groups."""
        mine = [each for each in self._requests.values() if self._resident_parts(each.ns)]
        if not mine:
            return []
        first = self._turn % len(mine)
        self._turn = first + min(REQUESTS_MAX, len(mine))
        chosen = islice([*mine[first:], *mine[:first]], REQUESTS_MAX)
        return [(each.ns, as_rows(sorted(each.path))) for each in chosen]

    def _resident_parts(self, ns: int) -> list[Part]:
        groups = self._books.layouts[NamespaceId(ns)].spec.groups
        return sorted({group.part for group in groups if group.resident and group.is_required})

    def _lacking(self, rows: Rows, part: Part, there: dict[Part, NDArray[np.bool_]]) -> list[int]:
        """Those without this part on a GPU or on its way there, head first."""
        if part not in there:
            there[part] = self._on_gpu(part)
        cold = rows[~there[part][rows]]
        order = np.argsort(self._books.tree.depth[cold], kind="stable")
        found: list[int] = cold[order].tolist()
        return found

    def _on_gpu(self, part: Part) -> NDArray[np.bool_]:
        """By block row."""
        copies = self._books.copies
        state, tier = copies.state[: copies.top], copies.tier[: copies.top]
        mine = (tier == int(TierId.HBM)) & (copies.part[: copies.top] == int(part))
        mine &= (state == READY) | (state == FILLING)
        found = np.zeros(len(self._books.blocks.ns), dtype=np.bool_)
        found[copies.block[: copies.top][mine]] = True
        return found

    def _free_units(self) -> int:
        """Below the low watermark, so that nothing leaves for what is taken of it."""
        book = self._books.space.books[TierId.HBM]
        limit = self._books.space.limit(TierId.HBM, Budget.GLOBAL)
        return int(limit * book.limits.low) - book.used[Budget.GLOBAL]
