"""The end of window and state copies: they live for minutes after their last use, while global KV lives for days."""

from heapq import heappop, heappush

from kvstored.core.rows import Tables


class Lifetimes:
    """Copies by the earliest time at which they may end; each is in here once. Their use is not followed: who asks looks again."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int]] = []
        self._watched: set[int] = set()

    def watch(self, copy: int, due_s: float) -> None:
        if copy not in self._watched:
            self._watched.add(copy)
            heappush(self._order, (due_s, copy))

    def take(self, now_s: float) -> int | None:
        """The next copy whose time may be over; it is not watched any more."""
        if not self._order or self._order[0][0] > now_s:
            return None
        _, copy = heappop(self._order)
        self._watched.discard(copy)
        return copy

    def next_s(self) -> float:
        return self._order[0][0] if self._order else float("inf")


def due_s(tables: Tables, copy: int, default_s: float) -> float:
    """When a window/state copy ends: a lifetime after its last use."""
    return float(tables.blocks.last_s[tables.copies.block[copy]]) + lifetime_s(
        tables, copy, default_s
    )


def lifetime_s(tables: Tables, copy: int, default_s: float) -> float:
    """The longest retention among the groups of a window/state copy, or the daemon's default."""
    groups = tables.layout_of(int(tables.copies.block[copy])).spec.groups
    have = int(tables.copies.have[copy])
    own = [group.retention_s for g, group in enumerate(groups) if have >> g & 1]
    return float(max(own, default=0)) or default_s
