"""Gets in several parts: what was seen without a message and the rest, or a large read of what is not in memory, cut so that one part is copied
while the next ones load.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from kvstored.client.links import GetCall, Glance, milliseconds
from kvstored.client.results import Block, GetResult
from kvstored.clock import Clock
from kvstored.core.calls import ReadStatus
from kvstored.core.types import BATCH_KEYS_MAX

PART_BYTES = 16 << 20
"""Loads in some 10 ms, to which a message adds one."""

LINKS = 3
"""Parts of one read that may be under way: two load while one is copied."""

Asked = TypeVar("Asked")


class Asking(Protocol[Asked]):
    """A link whose gets may be asked for before they are taken, one at a time."""

    def begin_get(self, call: GetCall, timeout_s: float) -> Asked: ...

    def end_get(self, asked: Asked, timeout_s: float) -> GetResult: ...


Part = tuple[Sequence[int], GetResult]
"""Which keys of the call, and what was found of them."""


def completed(
    glance: Glance,
    seen: GetResult | None,
    acquire: Callable[[Glance], GetResult],
) -> GetResult:
    """What was seen, with the rest acquired."""
    if seen is None:
        return acquire(glance)
    if seen.hits == len(seen.status):
        return seen
    rest = [i for i, status in enumerate(seen.status) if status is not ReadStatus.HIT]
    return merged([(range(len(seen.status)), seen), (rest, acquire(glance.part(rest)))])


def cut(keys: int, block_bytes: int) -> list[range]:
    """Parts of a read of that many keys; one where it is not worth more, and of what is too much for a call, which is refused."""
    step = max(1, PART_BYTES // max(block_bytes, 1))
    if keys < 2 * step or keys > BATCH_KEYS_MAX:
        return [range(keys)]
    return [range(begin, min(begin + step, keys)) for begin in range(0, keys, step)]


def got_in_turns(
    links: Sequence[Asking[Asked]], calls: Iterable[GetCall], timeout_s: float
) -> list[GetResult]:
    """Each link has one call under way: while a part is copied the others load."""
    free, begun, got = deque(links), deque[tuple[Asking[Asked], Asked]](), list[GetResult]()

    def take() -> None:
        link, asked = begun.popleft()
        got.append(link.end_get(asked, timeout_s))
        free.append(link)

    for call in calls:
        if not free:
            take()
        link = free.popleft()
        begun.append((link, link.begin_get(call, timeout_s)))
    while begun:
        take()
    return got


def within(calls: Iterable[GetCall], clock: Clock) -> Iterator[GetCall]:
    """The load deadline is that of the whole read: what is asked for later has less of it. Without one each part has the daemon's."""
    begun_s = clock.elapsed_s()
    for call in calls:
        if call.request.deadline_ms:
            spent_ms = milliseconds(clock.elapsed_s() - begun_s)
            call.request.deadline_ms = max(1, call.request.deadline_ms - spent_ms)
        yield call


def merged(parts: Sequence[Part]) -> GetResult:
    """One answer for all keys; of a key in several parts the last counts."""
    count = 1 + max(indexes[-1] for indexes, _ in parts)
    blocks: list[Block | None] = [None] * count
    status, generations = [ReadStatus.MISS] * count, [0] * count
    tiers, lossy = bytearray(count), bytearray(count)
    for indexes, got in parts:
        told = (got.blocks, got.status, got.generations, got.tiers, got.lossy)
        for i, *of_key in zip(indexes, *told, strict=True):
            blocks[i], status[i], generations[i], tiers[i], lossy[i] = of_key
    results = [got for _, got in parts]
    return GetResult(
        blocks=tuple(blocks),
        status=tuple(status),
        tiers=bytes(tiers),
        generations=tuple(generations),
        miss_reason=next((got.miss_reason for got in results if got.miss_reason), ""),
        corrupt=sum(got.corrupt for got in results),
        verified=all(got.verified for got in results),
        lossy=bytes(lossy),
    )
