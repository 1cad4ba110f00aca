"""Published policies as their papers have them, for caches of single blocks: any block may leave, whatever becomes of those below it.

The daemon keeps prefixes whole, so these are no policies of it; sweeps show them beside those that are. A block without its parent takes
room and is no hit. They are fed what suits them best: a path comes tail first, and each stored block of it counts as used. LFU and GDSF with
what was forgotten still counted are here too; that a parent is used whenever its child is keeps their prefixes whole.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from kvstored.core.hints import NO_HINT, Hint
from kvstored.sim.measure import Served
from kvstored.sim.traces import BlockIds

_SMALL_SHARE, _USES_MAX = 0.1, 3
_WINDOW_SHARE, _PROTECTED_SHARE, _SAMPLE = 0.01, 0.8, 10

Queue = OrderedDict[int, None]
"""First to leave first."""


class BlockCache(Protocol):
    def __contains__(self, block: int) -> bool: ...

    def use(self, block: int) -> None:
        """Make it stored, and let another one leave for it where it is new and all is full."""


class PublishedModel:
    """Serves requests as the `LeanModel` does."""

    def __init__(self, policy: str, capacity_blocks: int) -> None:
        self._cache = PUBLISHED[policy](capacity_blocks)

    def request(self, ts_s: float, block_ids: BlockIds, hint: Hint = NO_HINT) -> Served:
        path, cache = block_ids.tolist(), self._cache
        hit = next((i for i, block in enumerate(path) if block not in cache), len(path))
        for block in reversed(path):
            cache.use(block)
        return Served(len(path), (0, hit, 0, 0), len(path) - hit)


class S3Fifo:
    """SOSP 2023, algorithm 1; `promoted_uses`: how many uses in the small queue lead to the main one, 2 in the paper."""

    def __init__(self, capacity: int, promoted_uses: int = 2) -> None:
        self._capacity = capacity
        self._promoted_uses = promoted_uses
        self._uses: dict[int, int] = {}
        self._small, self._main, self._ghosts = Queue(), Queue(), Queue()

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] = min(self._uses[block] + 1, _USES_MAX)
            return
        while len(self._uses) >= self._capacity:
            if self._main and len(self._small) < _SMALL_SHARE * self._capacity:
                self._pass_main()
            else:
                self._pass_small()
        known = block in self._ghosts
        (self._main if known else self._small)[block] = None
        self._ghosts.pop(block, None)
        self._uses[block] = 0

    def _pass_small(self) -> None:
        block, _ = self._small.popitem(last=False)
        if self._uses[block] >= self._promoted_uses:
            self._uses[block] = 0
            self._main[block] = None
            return
        del self._uses[block]
        self._ghosts[block] = None
        if len(self._ghosts) > (1 - _SMALL_SHARE) * self._capacity:
            self._ghosts.popitem(last=False)

    def _pass_main(self) -> None:
        block, _ = self._main.popitem(last=False)
        if self._uses[block]:
            self._uses[block] -= 1
            self._main[block] = None
        else:
            del self._uses[block]


class Arc:
    """FAST 2003, figure 4."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once_target = 0.0
        self._once, self._often, self._once_gone, self._often_gone = (Queue() for _ in range(4))

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._often

    def use(self, block: int) -> None:
        once, often, once_gone, often_gone = (
            self._once,
            self._often,
            self._once_gone,
            self._often_gone,
        )
        if block in often:
            often.move_to_end(block)
        elif block in once:
            del once[block]
            often[block] = None
        elif block in once_gone:
            step = max(1.0, len(often_gone) / len(once_gone))
            self._once_target = min(self._once_target + step, self._capacity)
            self._replace(was_often=False)
            del once_gone[block]
            often[block] = None
        elif block in often_gone:
            step = max(1.0, len(once_gone) / len(often_gone))
            self._once_target = max(self._once_target - step, 0.0)
            self._replace(was_often=True)
            del often_gone[block]
            often[block] = None
        else:
            self._make_room()
            once[block] = None

    def _make_room(self) -> None:
        seen_once = len(self._once) + len(self._once_gone)
        seen = seen_once + len(self._often) + len(self._often_gone)
        if seen_once == self._capacity:
            if self._once_gone:
                self._once_gone.popitem(last=False)
                self._replace(was_often=False)
            else:
                self._once.popitem(last=False)
        elif seen >= self._capacity:
            if seen == 2 * self._capacity:
                self._often_gone.popitem(last=False)
            self._replace(was_often=False)

    def _replace(self, *, was_often: bool) -> None:
        if len(self._once) + len(self._often) < self._capacity:
            return
        size = len(self._once)
        is_over = size > self._once_target or (was_often and size == self._once_target)
        is_once = bool(self._once) and (is_over or not self._often)
        block, _ = (self._once if is_once else self._often).popitem(last=False)
        (self._once_gone if is_once else self._often_gone)[block] = None


class WTinyLfu:
    """ACM TOS 2017: a window of 1 % before a segmented LRU, which a block enters that was used more often than the one that would leave. Uses are
    counted exactly, not in a sketch, and halved after ten times the capacity."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._window_max = max(1, int(_WINDOW_SHARE * capacity))
        self._protected_max = int(_PROTECTED_SHARE * (capacity - self._window_max))
        self._window, self._probation, self._protected = Queue(), Queue(), Queue()
        self._uses = Counter[int]()
        self._counted = 0

    def __contains__(self, block: int) -> bool:
        return block in self._window or block in self._probation or block in self._protected

    def use(self, block: int) -> None:
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            del self._probation[block]
            self._protected[block] = None
            if len(self._protected) > self._protected_max:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self._window[block] = None
            if len(self._window) > self._window_max:
                self._enter(self._window.popitem(last=False)[0])

    def _enter(self, block: int) -> None:
        main = len(self._probation) + len(self._protected)
        if main >= self._capacity - self._window_max:
            rival = next(iter(self._probation or self._protected), block)
            if self._uses[block] <= self._uses[rival]:
                return
            (self._probation or self._protected).pop(rival)
        self._probation[block] = None

    def _count(self, block: int) -> None:
        self._uses[block] += 1
        self._counted += 1
        if self._counted >= _SAMPLE * self._capacity:
            self._counted //= 2
            halved = ((each, uses // 2) for each, uses in self._uses.items() if uses > 1)
            self._uses = Counter[int](dict(halved))


class Counted:
    """The least often used leaves, of equals the least recently; all uses ever count."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._uses = Counter[int]()
        self._stored: dict[int, tuple[int, int]] = {}
        """Score, and number of the use."""
        self._order: list[tuple[int, int, int]] = []
        self._number = 0
        self._floor = 0

    def __contains__(self, block: int) -> bool:
        return block in self._stored

    def use(self, block: int) -> None:
        self._uses[block] += 1
        self._number += 1
        if block not in self._stored:
            if len(self._stored) >= self._capacity:
                self._evict()
            heappush(self._order, (self._floor + self._uses[block], self._number, block))
        self._stored[block] = self._floor + self._uses[block], self._number

    def _evict(self) -> None:
        while True:
            score, number, block = heappop(self._order)
            if self._stored[block] == (score, number):
                del self._stored[block]
                self._rise(score)
                return
            heappush(self._order, (*self._stored[block], block))

    def _rise(self, score: int) -> None:
        """Plain LFU does not age."""


class CountedGdsf(Counted):
    """GreedyDual-Size-Frequency over blocks of one size and cost: uses above the score of what left last."""

    def _rise(self, score: int) -> None:
        self._floor = score


def _s3fifo_of_one_use(capacity: int) -> S3Fifo:
    return S3Fifo(capacity, promoted_uses=1)


PUBLISHED: dict[str, Callable[[int], BlockCache]] = {
    "s3fifo-any": S3Fifo,
    "s3fifo-any-1": _s3fifo_of_one_use,
    "arc-any": Arc,
    "wtinylfu-any": WTinyLfu,
    "lfu-counts": Counted,
    "gdsf-counts": CountedGdsf,
}
"""By name in sweeps: `any` block may leave (`-1`: one use in the small queue is enough), or `counts` outlive their blocks."""
